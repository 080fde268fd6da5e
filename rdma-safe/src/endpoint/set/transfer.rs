//! Posting to a set, with a look for the completion.

use super::builder::SET_FIELDS;
use super::{EndpointKey, EndpointSet};
use crate::cq::OpenPoll;
use crate::endpoint::{Rejected, Transfer, WorkId};
use crate::{Buffer, PollError, PostError, WcStatus};

/// What [`EndpointSet::transfer_and_poll`] has found.
#[derive(Debug)]
#[must_use = "it has the buffer, or the error of the poll"]
pub enum Transferred {
    /// The work has succeeded already.
    Completed(Buffer),
    /// The work is in flight.
    InFlight(WorkId),
    /// The work has not succeeded yet, or has failed. The set keeps a completion: of other work, or of this failure. The queue
    /// raises no event for it any more, so poll the set.
    Kept(WorkId),
    /// The work is in flight, and the poll has failed.
    PollFailed(Box<FailedPoll>),
}

/// Work in flight, and why a poll has failed.
#[derive(Debug)]
pub struct FailedPoll {
    /// The work.
    pub id: WorkId,
    /// The error that [`EndpointSet::poll`] would return.
    pub error: PollError,
}

impl EndpointSet {
    /// Sends, writes or reads one buffer, and looks once whether that has completed.
    ///
    /// It costs less than [`transfer`](crate::endpoint::EndpointMut::transfer) followed by [`poll`](Self::poll). It hands out no
    /// other work and checks no peers, so the set has to be polled as well. A set with a classic queue, with timestamps or with
    /// receive shares posts without a look, and so does one with a handshake in progress.
    ///
    /// ```no_run
    /// use rdma_safe::endpoint::{Transfer, Transferred};
    /// use rdma_safe::{Buffer, EndpointKey, EndpointSet, RemoteMemory};
    ///
    /// fn store(
    ///     clients: &mut EndpointSet, key: EndpointKey, record: Buffer, place: RemoteMemory,
    /// ) -> Result<Option<Buffer>, Box<dyn std::error::Error>> {
    ///     match clients.transfer_and_poll(key, Transfer::Write(place), record, 7)? {
    ///         Transferred::Completed(record) => Ok(Some(record)),
    ///         // A poll returns it, with the user data 7.
    ///         Transferred::InFlight(_) | Transferred::Kept(_) => Ok(None),
    ///         Transferred::PollFailed(failed) => Err(failed.error.into()),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// Like [`EndpointMut::transfer`](crate::endpoint::EndpointMut::transfer). [`PostError::EndpointFailed`] if there is no such
    /// endpoint.
    #[inline(always)]
    pub fn transfer_and_poll(
        &mut self,
        key: EndpointKey,
        transfer: Transfer,
        buffer: Buffer,
        user_data: u32,
    ) -> Result<Transferred, Box<Rejected>> {
        // Cold functions return one or two words, so that the result of the fast path is in registers.
        if self.unchecked.is_some() || !self.looks {
            return self.transfer_only(key, transfer, buffer, user_data).map(Transferred::InFlight);
        }
        let EndpointSet { members, unchecked, cq, .. } = self;
        let Some(poster) = members.find(key) else { return Err(no_such_endpoint(buffer)) };
        let posted = poster.transfer(transfer, buffer, user_data);
        if !poster.gates.poll {
            *unchecked = Some(key.index);
            return posted.map(Transferred::InFlight).map_err(boxed);
        }
        let id = match posted {
            Ok(id) => id,
            Err(rejected) => return Err(boxed(rejected)),
        };
        // SAFETY: the queue is extended, because `looks` implies `takes_several`. Each poll of it is ended: see `poll`. The poll
        // below drops no buffer and runs no code of the user, and it modifies and destroys no queue pair.
        let open = match unsafe { cq.start_poll() } {
            Ok(Some(open)) => open,
            Ok(None) => return Ok(Transferred::InFlight(id)),
            Err(error) => return Ok(Transferred::PollFailed(poll_failed(id, error))),
        };
        // SAFETY: the queues of sets have at least these fields.
        let found = unsafe { open.completion(SET_FIELDS) };
        let sends = &mut poster.live.sends;
        if found.wr_id() == id.0
            && sends.oldest() == id.0
            && found.qp_num() == Some(poster.live.qp.number())
            && found.status() == WcStatus::SUCCESS
        {
            if let Some(buffer) = sends.take_oldest() {
                drop(open);
                return Ok(Transferred::Completed(buffer));
            }
        }
        match self.record_next(id, open) {
            None => Ok(Transferred::Kept(id)),
            Some(failed) => Ok(Transferred::PollFailed(failed)),
        }
    }

    /// Changes the number that the completion of a send, write, read or atomic operation returns. Returns whether that is still to
    /// be taken.
    ///
    /// For work that needs a number only if [`transfer_and_poll`](Self::transfer_and_poll) has not found it completed.
    pub fn set_user_data(&mut self, key: EndpointKey, id: WorkId, user_data: u32) -> bool {
        self.members.find(key).is_some_and(|poster| poster.live.sends.set_user_data(id.0, user_data))
    }

    #[cold]
    #[inline(never)]
    fn transfer_only(
        &mut self,
        key: EndpointKey,
        transfer: Transfer,
        buffer: Buffer,
        user_data: u32,
    ) -> Result<WorkId, Box<Rejected>> {
        let Some(mut endpoint) = self.endpoint(key) else {
            return Err(no_such_endpoint(buffer));
        };
        endpoint.transfer(transfer, buffer, user_data).map_err(boxed)
    }

    /// Keeps a completion for the next poll. Returns the error, if there is one.
    #[cold]
    #[inline(never)]
    fn record_next(&mut self, id: WorkId, open: OpenPoll) -> Option<Box<FailedPoll>> {
        // An earlier one may be waiting. If that is a receive of a pool, this one could replace it.
        self.members.defer_last();
        self.record(open).err().map(|error| poll_failed(id, error))
    }
}

#[cold]
#[inline(never)]
fn no_such_endpoint(buffer: Buffer) -> Box<Rejected> {
    Box::new(Rejected { error: PostError::EndpointFailed, buffer: Some(buffer), list: None })
}

#[cold]
#[inline(never)]
fn boxed(rejected: Rejected) -> Box<Rejected> {
    Box::new(rejected)
}

#[cold]
#[inline(never)]
fn poll_failed(id: WorkId, error: PollError) -> Box<FailedPoll> {
    Box::new(FailedPoll { id, error })
}
