//! Building sets of endpoints.

use std::sync::Arc;

use super::room::with_probes;
use super::{EndpointSet, Members, Room, Schedule};
use crate::endpoint::builder::{FIELDS, SENDER_FIELDS};
use crate::{Context, Result, WcFields};

/// Fields of completions that sets need. All providers support the sender fields.
pub(super) const SET_FIELDS: WcFields = FIELDS.union(WcFields::QP_NUM).union(SENDER_FIELDS);

/// Builds a set of endpoints. Made by [`EndpointSet::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct EndpointSetBuilder {
    context: Context,
    completions: u32,
    events: bool,
    timestamps: bool,
    vector: u32,
    classic_poll: bool,
    keep_leftovers: bool,
}

impl EndpointSetBuilder {
    pub(super) fn new(context: &Context, completions: u32) -> Self {
        let context = context.clone();
        EndpointSetBuilder {
            context,
            completions,
            events: false,
            timestamps: false,
            vector: 0,
            classic_poll: false,
            keep_leftovers: false,
        }
    }

    /// Lets [`EndpointSet::wait`] sleep until there is an event, instead of spinning.
    pub fn events(mut self, events: bool) -> Self {
        self.events = events;
        self
    }

    /// Completion vector, which spreads events over interrupts; 0 by default.
    ///
    /// Must be below [`Context::completion_vectors`](crate::Context::completion_vectors).
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Records when work completed: [`Completion::timestamp`](crate::Completion::timestamp).
    ///
    /// Without support by the device, [`EndpointSetBuilder::build`] returns
    /// [`Error::CompletionFields`](crate::Error::CompletionFields).
    pub fn timestamps(mut self, timestamps: bool) -> Self {
        self.timestamps = timestamps;
        self
    }

    /// Polls by `ibv_poll_cq` even if `ibv_start_poll` is available.
    pub fn classic_poll(mut self, classic: bool) -> Self {
        self.classic_poll = classic;
        self
    }

    /// Keeps the memory of removed endpoints that [`EndpointSet::remove`] does not return, for [`EndpointSet::take_leftovers`]:
    /// shared memory, parts of exposed regions, and all memory if the completion queue cannot be polled. Without this, it is
    /// dropped when the endpoint is removed.
    ///
    /// For callers that hold a lock meanwhile: dropping the last owner of memory can run code of the program.
    pub fn keep_leftovers(mut self, keep: bool) -> Self {
        self.keep_leftovers = keep;
        self
    }

    /// Creates the completion queue: `ibv_create_cq_ex(3)`.
    ///
    /// # Errors
    /// The errors of [`CompletionQueueBuilder::build`](crate::cq::CompletionQueueBuilder::build).
    pub fn build(self) -> Result<EndpointSet> {
        let mut fields = SET_FIELDS;
        fields.set(WcFields::COMPLETION_TIMESTAMP, self.timestamps);
        let entries = with_probes(self.completions, self.context.attributes().max_cqe());
        let cq = self.context.completion_queue(entries).fields(fields).vector(self.vector);
        let mut cq = cq.classic(self.classic_poll);
        if self.events {
            cq = cq.channel(&self.context.create_channel()?);
        }
        let cq = cq.build()?;
        let mut members = Members::default();
        if self.keep_leftovers {
            members.leftovers.keep();
        }
        Ok(EndpointSet {
            members,
            room: Room::new(self.completions, cq.capacity()),
            unchecked: None,
            schedule: Schedule::new(),
            fields: cq.fields(),
            timestamps: self.timestamps,
            records_all: self.timestamps,
            takes_several: cq.takes_several() && !self.timestamps,
            dropped: Arc::default(),
            has_provisional: false,
            // Nobody can transfer before there is an endpoint.
            looks: false,
            events: Some(0),
            cq,
        })
    }
}
