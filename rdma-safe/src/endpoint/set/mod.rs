//! Sets of endpoints that share one completion queue.

mod backlog;
mod builder;
mod leftovers;
mod lent;
mod members;
mod poll;
mod provisional;
mod qp_numbers;
mod room;
mod schedule;
mod sink;
mod transfer;

use std::fmt;
use std::sync::Arc;

use super::EndpointBuilder;
use crate::cq::CqId;
use crate::mr::Piece;
use crate::qp::QpId;
use crate::{Buffer, CompletionChannel, CompletionQueue, Context, Error, PollError, Result, WcFields};

pub use builder::EndpointSetBuilder;
pub use lent::EndpointMut;
use members::Members;
use provisional::Dropped;
pub(crate) use provisional::Provisional;
use room::Room;
use schedule::Schedule;
pub use sink::CompletionSink;
pub use transfer::{FailedPoll, Transferred};

/// Any number of connections that share one completion queue: one poll, one event and one thread for all.
///
/// It needs no `unsafe`. Combined with a [`ReceivePool`](crate::ReceivePool), it suits a server with many clients.
///
/// [`EndpointBuilder::build_in`] builds an endpoint in the set. [`EndpointSet::endpoint`] lends it for connecting and
/// posting, [`EndpointSet::poll`] returns the key of the endpoint with each completion, and [`EndpointSet::remove`]
/// removes an endpoint and returns its buffers. A failure of a peer or of work affects only its own endpoint.
///
/// A peer that disappears silently is detected when a send, write or read to it fails. Posted receives do not detect
/// it. [`EndpointBuilder::keepalive`] does, also if an endpoint is idle.
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
/// // Entries for the receives of the pool, and for 16 sends of each client. A client may have 64 requests unanswered.
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
///                 client.send(buffer)?; // a request: reply to it from the same buffer
///             } else {
///                 pool.receive(buffer)?; // the reply was sent: its buffer is free for the next request
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
/// A reply occupies one of the [sends](EndpointBuilder::send_depth) of its endpoint until it is acknowledged, and a
/// client may send its next request before that. Without a limit, a client with more requests in flight than its
/// endpoint has sends would end this loop with [`PostError::EndpointFull`](crate::PostError::EndpointFull).
///
/// [`EndpointBuilder::receive_share`] prevents that. A request is handed out only when there is room for its reply, and
/// the endpoints take turns. If a client exceeds its share, its connection ends with a failed completion, and the loop
/// above returns its buffers to the pool as for any other lost client. Without a share,
/// [`EndpointBuilder::pending_sends`] lets some replies wait, but does not bound a client: then remove the client whose
/// endpoint is full, instead of leaving the loop.
///
/// # Capacity
///
/// The queue cannot overrun: [`Error::EndpointSetFull`] refuses an endpoint that the queue may be too small for. Each
/// endpoint needs entries for its [sends](EndpointBuilder::send_depth) and, without a pool, for its
/// [receives](EndpointBuilder::recv_depth). Each pool in use needs entries for its depth, once. The set has additional
/// entries for [keepalives](EndpointBuilder::keepalive), which need not be counted.
///
/// # Order
///
/// Completions of one endpoint are ordered as with an [`Endpoint`](crate::Endpoint). Endpoints are served
/// in the order in which the device reports completions, or in turns if any endpoint has a share.
pub struct EndpointSet {
    // Dropped before the queue, to which they complete.
    members: Members,
    room: Room,
    /// The endpoint that was used last, if it may have a forgotten batch or work to hand out. `None` once that was checked.
    unchecked: Option<u32>,
    schedule: Schedule,
    fields: WcFields,
    timestamps: bool,
    /// Whether completions are recorded at their endpoints before they are handed out, for timestamps or for turns.
    records_all: bool,
    /// Whether one poll can take several completions: the provider allows it, and no completion must be recorded first.
    takes_several: bool,
    /// Members to remove with the next call.
    dropped: Arc<Dropped>,
    /// Whether there may be provisional members, so that `dropped` has to be read.
    has_provisional: bool,
    /// Whether [`transfer_and_poll`](Self::transfer_and_poll) looks for completions: `takes_several`, and nothing is provisional.
    looks: bool,
    /// Events that the queue may have raised since the channel was read. `None` if the channel has other readers or queues.
    events: Option<u32>,
    /// Never lent out, and polled only here, so no poll stays open.
    cq: CompletionQueue,
}

/// Key of an endpoint of a set. After the endpoint is removed, and in other sets, the key is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct EndpointKey {
    index: u32,
    id: QpId,
}

impl EndpointKey {
    /// A small number that is unique among the current endpoints of the set, to index a `Vec` of per-endpoint data.
    ///
    /// The number of a removed endpoint is reused.
    #[must_use]
    #[inline]
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// The name of the endpoint's queue pair in [asynchronous events](crate::async_event::AsyncSource).
    #[must_use]
    #[inline]
    pub fn qp_id(self) -> QpId {
        self.id
    }
}

impl EndpointSet {
    /// Starts building a set on this device with room for `completions` entries; see [`EndpointSet`] for the number
    /// needed.
    pub fn builder(context: &Context, completions: u32) -> EndpointSetBuilder {
        EndpointSetBuilder::new(context, completions)
    }

    /// Builds an endpoint in the set, for datagrams if there is a queue key. Its type must already be checked.
    pub(super) fn insert(&mut self, builder: EndpointBuilder<'_>, datagrams: Option<u32>) -> Result<EndpointKey> {
        self.settle_provisional();
        self.cq.context().require_same(builder.context(), "protection domain")?;
        let keepalive = builder.keepalive_limit()?;
        let demand = self.room.check(&builder, keepalive.is_some())?;
        self.end_forgotten_batch();
        let poster = builder.timestamps(self.timestamps).create_for(&self.cq, datagrams)?;
        let checks = poster.live.keepalive.as_ref().map(|keepalive| (keepalive.within(), keepalive.interval()));
        if self.members.was_removed(poster.live.qp.number()) {
            // A destroyed queue pair had the same number. Its completions must not be mistaken for work of the new
            // endpoint.
            self.drain()?;
        }
        self.room.occupy(demand);
        // Completions found by arming are handed out first. With turns, the next recorded one would replace them.
        self.members.defer_last();
        let key = self.members.insert(poster);
        self.members.reserve(self.room.shared());
        self.records_all |= self.members.takes_turns();
        self.takes_several &= !self.records_all;
        self.update_looks();
        if let Some((within, interval)) = checks {
            self.schedule.add(key, within, interval);
        }
        Ok(key)
    }

    /// Lends an endpoint; `None` if it was removed.
    #[must_use]
    #[inline(always)]
    pub fn endpoint(&mut self, key: EndpointKey) -> Option<EndpointMut<'_>> {
        self.settle_provisional();
        if self.unchecked.is_some() {
            self.check_other(key.index);
        }
        let EndpointSet { members, unchecked, .. } = self;
        Some(EndpointMut { poster: members.find(key)?, index: key.index, unchecked })
    }

    /// `takes_several` or `has_provisional` has changed.
    fn update_looks(&mut self) {
        self.looks = self.takes_several && !self.has_provisional;
    }

    /// Removes provisional members that were dropped.
    #[inline(always)]
    fn settle_provisional(&mut self) {
        if self.has_provisional {
            self.remove_dropped();
        }
    }

    /// Ends a forgotten batch of the endpoint that was used last. Some providers lock both queues while a batch is open.
    #[inline(always)]
    fn end_forgotten_batch(&mut self) {
        if self.unchecked.is_some() {
            self.check_endpoint();
        }
    }

    #[cold]
    #[inline(never)]
    fn check_endpoint(&mut self) {
        if let Some(index) = self.unchecked.take() {
            self.members.end_forgotten_batch(index);
        }
    }

    /// Checks the endpoint that was used last, unless it is this one.
    #[cold]
    #[inline(never)]
    fn check_other(&mut self, index: u32) {
        if self.unchecked != Some(index) {
            self.check_endpoint();
        }
    }

    /// Removes an endpoint: destroys its queue pair and returns the buffers of its work.
    ///
    /// These are the buffers of all work that was not handed out, completed or not. With a
    /// [`ReceivePool`](crate::ReceivePool), they include only the receives that a message has arrived in. The others
    /// stay in the pool. Completions of other endpoints are kept for [`EndpointSet::poll`].
    ///
    /// # Errors
    /// [`Error::NoSuchEndpoint`]. [`Error::Verb`] when the queue pair cannot be destroyed: the endpoint is removed
    /// nevertheless, and its buffers are leaked, because the device may still use them. [`Error::Poll`] when the
    /// completion queue cannot be polled for the endpoint's remaining completions: its buffers are then freed. In both
    /// cases its room in the set is not freed.
    pub fn remove(&mut self, key: EndpointKey) -> Result<Vec<Buffer>> {
        self.end_forgotten_batch();
        let Some(mut poster) = self.members.begin_removal(key) else { return Err(Error::NoSuchEndpoint) };
        if poster.live.keepalive.is_some() {
            self.schedule.removed(|key| self.members.contains(key));
        }
        if poster.live.pool.is_some() {
            // After this, receives complete only as flushed. Some providers discard completions along
            // with the queue pair, and buffers of a pool would be lost to the pool.
            poster.poison();
            let _ = self.drain();
        }
        let number = poster.live.qp.number();
        let destroyed = poster.live.destroy();
        // The destroyed queue pair generates no more completions. Those in the queue must be taken before another queue pair
        // gets its number or its entries in the queue.
        let drained = self.drain();
        let mut buffers = self.members.end_removal();
        if destroyed.is_ok() {
            self.members.take_memory(&mut poster.live, &mut buffers);
        }
        if let Err(error) = destroyed.and_then(|()| Ok(drained?)) {
            self.members.leftovers.discard(buffers);
            return Err(error);
        }
        self.members.forget_qp(number);
        self.room.vacate(&poster.live);
        Ok(buffers)
    }

    /// Takes the memory of removed endpoints that [`EndpointSet::remove`] has not returned, if the set was
    /// [built](EndpointSetBuilder::keep_leftovers) to keep it.
    pub fn take_leftovers(&mut self) -> Vec<Piece> {
        self.members.leftovers.take()
    }

    /// Takes all completions that are in the queue now, and keeps them.
    fn drain(&mut self) -> Result<(), PollError> {
        // Defers the completion found by arming, because the next recorded one would replace it.
        self.members.defer_last();
        // Polls at most as many completions as the queue holds, in case others keep adding more.
        for _ in 0..self.cq.capacity() {
            match self.poll_queue() {
                Ok(true) => self.members.defer_last(),
                Ok(false) => break,
                // The endpoint takes no more work. The others are unaffected.
                Err(PollError::NotInFlight { .. }) => {}
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
        self.members.backlog(key).filter(|_| !self.was_dropped(key))
    }

    /// Number of endpoints in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys().count()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys().next().is_none()
    }

    /// Keys of the endpoints in the set, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = EndpointKey> + '_ {
        self.members.keys().filter(|key| !self.was_dropped(*key))
    }

    /// Number of completions that endpoints may have, as requested. The queue has more entries, for keepalives.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.room.capacity()
    }

    /// Whether an endpoint of this builder fits into the completion queue, so that it is not refused with
    /// [`Error::EndpointSetFull`].
    #[must_use]
    pub fn has_room_for(&self, builder: &EndpointBuilder<'_>) -> bool {
        builder.keepalive_limit().is_ok_and(|keepalive| self.room.check(builder, keepalive.is_some()).is_ok())
    }

    /// The name of the completion queue in [asynchronous events](crate::async_event::AsyncSource).
    #[must_use]
    pub fn cq_id(&self) -> CqId {
        self.cq.id()
    }

    /// The channel of the completion queue, for `epoll(7)` and async runtimes.
    ///
    /// `None` unless the set was built with [`EndpointSetBuilder::events`]. It becomes readable when work completes,
    /// after [`EndpointSet::arm`]. It belongs to the set: if other queues report to it, their events are lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// The device of the set.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.cq.context()
    }
}

impl Drop for EndpointSet {
    /// Drops buffers of pools that were received and not handed out, which makes room in the pools.
    fn drop(&mut self) {
        if self.context().is_inherited() {
            return;
        }
        self.end_forgotten_batch();
        if self.members.poison_pool_users() {
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
