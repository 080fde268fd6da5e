//! Endpoints that complete to one queue.

mod backlog;
mod builder;
mod members;
mod poll;
mod room;

use std::fmt;

use super::{EndpointBuilder, Poster};
use crate::{
    Buffer, CompletionChannel, CompletionQueue, Context, CqId, Error, PollError, QpId, QueuePairAttributes, Result,
    WcFields,
};

pub use builder::EndpointSetBuilder;
use members::Members;
use room::Room;

/// Any number of connections that share one completion queue: one poll, one event and one thread for all of them, without
/// `unsafe`. With a [`ReceivePool`](crate::ReceivePool) it is what a server with many clients needs.
///
/// Endpoints are built in the set, by [`EndpointBuilder::build_in`], and belong to it. [`EndpointSet::endpoint`] lends one to be
/// connected and posted to; [`EndpointSet::poll`] says whose each completion is; [`EndpointSet::remove`] ends one and returns its
/// buffers. A peer that fails, or work that does, concerns its own endpoint and no other. A peer that goes without a word is
/// noticed by a send, a write or a read to it, which fails then, and not by receives that wait for it: where an end may be silent
/// for long, watch the connection by which addresses were exchanged, or send now and then.
///
/// ```no_run
/// # fn exchange(_: rdma_safe::QueuePairAddress) -> rdma_safe::QueuePairAddress { unimplemented!() }
/// # fn example(pd: &rdma_safe::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::{Endpoint, EndpointSet, ReceivePool};
///
/// let mut pool = ReceivePool::new(pd, 4096)?;
/// for buffer in pd.allocate(4096 * 256)?.into_chunks(256)? {
///     pool.receive(buffer)?;
/// }
/// // Room for the receives of the pool, and 16 sends of each client. A client may have 64 requests unanswered.
/// let mut clients = EndpointSet::builder(pd.context(), 4096 + 1000 * 16).events(true).build()?;
/// for _ in 0..1000 {
///     let builder = Endpoint::builder(pd).send_depth(16).receive_pool(&pool).receive_share(64);
///     let key = builder.build_in(&mut clients)?;
///     let mut client = clients.endpoint(key).unwrap();
///     let remote = exchange(client.address());
///     client.connect(&remote)?;
/// }
/// loop {
///     let (key, done) = clients.wait(Duration::from_secs(60))?;
///     let Some(mut client) = clients.endpoint(key) else { continue };
///     match done.ok() {
///         Ok(done) => {
///             let buffer = done.buffer.unwrap();
///             if done.id.is_receive() {
///                 client.send(buffer)?; // a request: answer it, out of the buffer that it has come in
///             } else {
///                 pool.receive(buffer)?; // the answer has left: its buffer is free for the next request
///             }
///         }
///         Err(failed) => {
///             eprintln!("client {}: {}", key.index(), client.explain(&failed));
///             let buffers = clients.remove(key)?;
///             for buffer in buffers.into_iter().chain(failed.0.buffer) {
///                 pool.receive(buffer)?;
///             }
///         }
///     }
/// }
/// # }
/// ```
///
/// # Clients that flood
///
/// An answer occupies one of the [sends](EndpointBuilder::send_depth) of its endpoint until it is acknowledged, and a client may
/// send its next request before that. Without a limit, a client with more requests in flight than its endpoint has sends would end
/// this loop with [`PostError::EndpointFull`](crate::PostError::EndpointFull).
///
/// [`EndpointBuilder::receive_share`] prevents that. A request is handed out only when there is room for its answer, and the
/// endpoints take turns. If a client exceeds its share, its connection ends with a failed completion, and the loop above
/// returns its buffers to the pool as for any other lost client. Without a share, [`EndpointBuilder::pending_sends`] lets
/// some answers wait, which does not bound what a client can do: then a full endpoint ends its client, and not the loop.
///
/// The queue cannot overrun: an endpoint for whose work it may have no room is refused when it is built
/// ([`Error::EndpointSetFull`]). Of each endpoint there have to fit its [sends](EndpointBuilder::send_depth) and, unless it takes
/// from a pool, its [receives](EndpointBuilder::recv_depth); and of each pool that any of them takes from its depth, once.
///
/// Completions of one endpoint come as from an [`Endpoint`](crate::Endpoint) by itself; between endpoints they come in the order
/// in which the device has reported them, or in turns if any endpoint has a share.
pub struct EndpointSet {
    // Before the queue, to which they complete.
    members: Members,
    room: Room,
    /// The endpoint that was lent last, unless it was looked at since, whose user may have forgotten a batch of it.
    lent: Option<u32>,
    fields: WcFields,
    timestamps: bool,
    /// Completions are noted at their endpoints before they are handed out, for timestamps or for turns.
    notes_all: bool,
    /// As that of an endpoint: never lent, and nobody begins what is not ended.
    cq: CompletionQueue,
}

/// Names an endpoint of a set. That of one that was removed, or of another set, names none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EndpointKey {
    index: u32,
    id: QpId,
}

impl EndpointKey {
    /// A small number that no other endpoint of the set has at the same time: to find one's own data of the endpoint in a `Vec`.
    /// That of an endpoint that was removed is used again.
    #[must_use]
    #[inline]
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// The name of its queue pair in [asynchronous events](crate::AsyncSource).
    #[must_use]
    #[inline]
    pub fn qp_id(self) -> QpId {
        self.id
    }
}

/// An endpoint of an [`EndpointSet`], lent to connect it and to post to it: what an [`Endpoint`](crate::Endpoint) is but for
/// polling, which is the set's.
pub struct EndpointMut<'s> {
    pub(super) poster: &'s mut Poster,
}

impl EndpointMut<'_> {
    /// Changes the state of the queue pair, say as a connection manager has it.
    pub(crate) fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.poster.advance(attributes)
    }
}

impl EndpointSet {
    /// Starts describing a set on this device, with room for so many completions; see [`EndpointSet`] for how many endpoints need.
    pub fn builder(context: &Context, completions: u32) -> EndpointSetBuilder {
        EndpointSetBuilder::new(context, completions)
    }

    /// Builds an endpoint, which fits and is a connection, if nothing else is wrong.
    pub(super) fn insert(&mut self, builder: EndpointBuilder<'_>) -> Result<EndpointKey> {
        self.cq.context().require_same(builder.context(), "protection domain")?;
        let wanted = self.room.find(&builder, self.cq.capacity())?;
        self.settle();
        let poster = builder.timestamps(self.timestamps).create_for(&self.cq)?;
        if self.members.is_gone(poster.live.qp.number()) {
            // The number was that of a queue pair that is destroyed by now: what is left of it must not be taken for work of this.
            self.drain()?;
        }
        self.room.occupy(wanted);
        // Completions that arming has found are handed out first. With turns, the next one noted would replace them.
        self.members.put_off();
        let key = self.members.insert(poster);
        self.members.reserve(self.room.shared());
        self.notes_all |= self.members.is_in_turn();
        Ok(key)
    }

    /// Lends an endpoint; `None` if it was removed.
    #[must_use]
    #[inline]
    pub fn endpoint(&mut self, key: EndpointKey) -> Option<EndpointMut<'_>> {
        if self.lent != Some(key.index) {
            self.settle();
        }
        let poster = self.members.find(key)?;
        self.lent = Some(key.index);
        Some(EndpointMut { poster })
    }

    /// Ends a batch of the endpoint that was lent last, should it have been forgotten: some providers lock both queues meanwhile.
    #[inline]
    fn settle(&mut self) {
        if let Some(index) = self.lent.take() {
            self.members.settle(index);
        }
    }

    /// Ends an endpoint: destroys its queue pair, and returns the buffers of all its work that was not handed out, done or not.
    /// Of a [`ReceivePool`](crate::ReceivePool), these are the receives that a message has come into; the others are still the
    /// pool's.
    /// Completions of other endpoints are kept for [`EndpointSet::poll`].
    ///
    /// # Errors
    /// [`Error::NoSuchEndpoint`]. [`Error::Verb`] when the queue pair cannot be destroyed: the endpoint is gone all the same, and
    /// its buffers are leaked, as the device may still use them. [`Error::Poll`] when the provider fails to say what is left of it
    /// in the completion queue: its buffers are freed then. In both cases the room that it had in the set is not free again.
    pub fn remove(&mut self, key: EndpointKey) -> Result<Vec<Buffer>> {
        self.settle();
        let Some(mut poster) = self.members.begin_removal(key) else { return Err(Error::NoSuchEndpoint) };
        if poster.live.pool.is_some() {
            // Nothing more arrives then. Some providers throw completions away with the queue pair, and the buffers of a pool would
            // be lost to it.
            poster.poison();
            let _ = self.drain();
        }
        let number = poster.live.qp.number();
        let destroyed = poster.live.destroy();
        // Nothing more completes, and what has is gone from the queue before anybody gets the number or the room.
        let drained = self.drain();
        let mut buffers = self.members.end_removal();
        destroyed?;
        drained?;
        self.members.forget(number);
        self.room.vacate(&poster.live);
        buffers.extend(poster.live.take_buffers());
        Ok(buffers)
    }

    /// Takes what is in the queue now, and keeps it.
    fn drain(&mut self) -> Result<(), PollError> {
        // What arming has found comes before, and is not to make room for what comes now.
        self.members.put_off();
        // No more than that was there before: others may go on and on completing.
        for _ in 0..self.cq.capacity() {
            match self.look() {
                Ok(true) => self.members.put_off(),
                Ok(false) => break,
                // Its endpoint takes no more work, and that is all.
                Err(PollError::Unexpected { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Number of an endpoint's messages that wait to be handed out by [`EndpointSet::poll`].
    ///
    /// 0 unless endpoints take turns ([`EndpointBuilder::receive_share`]). `None` if the endpoint was removed.
    #[must_use]
    pub fn backlog(&self, key: EndpointKey) -> Option<u32> {
        self.members.backlog(key)
    }

    /// Endpoints that there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.keys().count()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.keys().next().is_none()
    }

    /// The endpoints that there are, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = EndpointKey> + '_ {
        self.members.keys()
    }

    /// Completions that there is room for; at least what was asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.cq.capacity()
    }

    /// The name of the completion queue in [asynchronous events](crate::AsyncSource).
    #[must_use]
    pub fn cq_id(&self) -> CqId {
        self.cq.id()
    }

    /// The channel that becomes readable when work is done, if the set was built with [`EndpointSetBuilder::events`]: for
    /// `epoll(7)` and async runtimes. [`EndpointSet::arm`] it first. It is the set's own: events of other queues that are made to
    /// report over it get lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.cq.context()
    }
}

impl Drop for EndpointSet {
    /// Buffers of pools that were taken and not handed out are dropped, which makes room in the pools.
    fn drop(&mut self) {
        self.settle();
        if self.members.poison_those_of_pools() {
            let _ = self.drain();
        }
    }
}

impl fmt::Debug for EndpointSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointSet")
            .field("endpoints", &self.len())
            .field("completion_queue", &self.cq)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for EndpointMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointMut")
            .field("queue_pair", self.queue_pair())
            .field("sends_in_flight", &self.sends_in_flight())
            .field("receives_in_flight", &self.receives_in_flight())
            .finish_non_exhaustive()
    }
}
