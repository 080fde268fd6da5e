//! Shared receives that own their buffers.

use std::fmt;
use std::sync::Arc;

use super::{Rejected, WorkId};
use crate::srq::{self, Slab, Vacancies};
use crate::{Buffer, PostError, ProtectionDomain, Result, SharedReceiveQueue};

/// Receives that any number of endpoints share: a [`SharedReceiveQueue`] that is used without `unsafe`.
///
/// Endpoints are built with [`EndpointBuilder::receive_pool`](crate::EndpointBuilder::receive_pool). Posting a buffer
/// moves it into the pool. It comes back from the endpoint whose peer sent the message in it. So a service needs
/// receives for the messages that arrive at once, instead of receives for each connection.
///
/// Posting needs exclusive access to the pool, and polling does not: the pool can be on one thread, and each endpoint
/// on another.
///
/// For many endpoints, use an [`EndpointSet`](crate::EndpointSet): one poll takes the messages of all of them, and one
/// event wakes the thread that waits. In this example each endpoint has its own completion queue:
///
/// ```no_run
/// # fn example(pd: &rdma_safe::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// use rdma_safe::{Endpoint, ReceivePool};
///
/// let mut pool = ReceivePool::new(pd, 256)?;
/// for buffer in pd.allocate(256 * 4096)?.into_chunks(4096)? {
///     pool.receive(buffer)?;
/// }
/// let mut clients = Vec::new();
/// for _ in 0..8 {
///     clients.push(Endpoint::builder(pd).receive_pool(&pool).build()?);
/// }
/// // … connect them
/// for client in &mut clients {
///     while let Some(done) = client.poll()? {
///         if done.id.is_receive() {
///             let done = done.ok()?;
///             // … read the message
///             pool.receive(done.buffer.unwrap())?;
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// When receives run out, senders over reliable connections get an RNR NAK and retry, and messages over unreliable
/// connections are lost. [`ReceivePool::set_limit`] requests an event before that happens:
///
/// ```no_run
/// # use rdma_safe::ReceivePool;
/// # use rdma_safe::async_event::AsyncSource;
/// # fn example(pool: &mut ReceivePool, mut spare: Vec<rdma_safe::Buffer>) -> Result<(), Box<dyn std::error::Error>> {
/// let events = pool.pd().context().async_events()?;
/// pool.set_limit(64)?;
/// // … when the descriptor of `events` is readable, or now and then:
/// while let Some(event) = events.try_event()? {
///     if event.source == AsyncSource::Srq(pool.shared_receive_queue().id()) {
///         while let Some(buffer) = spare.pop() {
///             pool.receive(buffer)?;
///         }
///         pool.set_limit(64)?; // the event has disarmed it
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// The device gives a receive to whichever message arrives first, so one peer that floods can take all of them.
/// [`EndpointBuilder::receive_share`](crate::EndpointBuilder::receive_share) limits that in a set.
///
/// Dropping an endpoint drops the buffers of messages that were not polled. [`Endpoint::close`](crate::Endpoint::close)
/// returns them. If the peer was in the middle of a message, the queue pair may take the receive of that message with
/// it. That receive stays in the pool and is out of use.
///
/// The queue is destroyed, and the buffers in it are freed, once the pool and all its endpoints are dropped.
pub struct ReceivePool {
    srq: SharedReceiveQueue,
    vacancies: Vacancies,
    /// A posting failed, and the provider may or may not have taken its work.
    poisoned: bool,
}

impl ReceivePool {
    /// Creates a pool with room for `depth` receives in this domain: `ibv_create_srq(3)`.
    ///
    /// # Errors
    /// Those of [`SharedReceiveQueueBuilder::build`](crate::srq::SharedReceiveQueueBuilder::build).
    pub fn new(pd: &ProtectionDomain, depth: u32) -> Result<Self> {
        let mut vacancies = Vacancies::NONE;
        let srq = pd.shared_receive_queue(depth).max_batch(1).build_with(|depth| {
            let (slab, all) = Slab::new(depth);
            vacancies = all;
            Some(slab)
        })?;
        Ok(ReceivePool { srq, vacancies, poisoned: false })
    }

    /// Posts a receive: a message to one of the endpoints goes into `buffer`, up to its capacity.
    ///
    /// # Errors
    /// [`Rejected`] returns the buffer: with [`PostError::ForeignBuffer`] if it belongs to another domain than the
    /// pool, and with [`PostError::QueueFull`] if the pool already has `depth` receives.
    #[inline]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        if self.poisoned {
            return Err(Rejected { error: PostError::EndpointFailed, buffer: Some(buffer), list: None });
        }
        if !buffer.is_of(self.pd()) {
            return Err(Rejected { error: PostError::ForeignBuffer, buffer: Some(buffer), list: None });
        }
        let sge = buffer.short_whole_sge();
        let Some(slab) = self.srq.shared().slab() else { unreachable!("`new` has made the queue with a slab") };
        // SAFETY: the slab and the vacancies were created together.
        let ticket = match unsafe { slab.insert(&mut self.vacancies, buffer) } {
            Ok(ticket) => ticket,
            Err(buffer) => {
                return Err(Rejected { error: PostError::QueueFull { posted: 0 }, buffer: Some(buffer), list: None });
            }
        };
        // SAFETY: the memory belongs to the buffer alone, which is in the slab. It stays there until a completion names
        // its ticket, the provider surely has not taken it, or the queue is destroyed (see `srq::Shared::release`).
        match unsafe { self.srq.receive(ticket, sge) } {
            Ok(()) => Ok(WorkId(ticket)),
            Err(error) => Err(self.failed(ticket, error)),
        }
    }

    /// Handles a receive that was not posted, or that the provider may have taken.
    #[cold]
    fn failed(&mut self, ticket: u64, error: PostError) -> Rejected {
        let buffer = match error.surely_not_posted() {
            true => self.srq.shared().slab().and_then(|slab| slab.take(ticket)),
            false => {
                self.poisoned = true;
                None
            }
        };
        Rejected { error, buffer, list: None }
    }

    /// Number of receives that are posted and not completed. Scans the whole pool.
    #[must_use]
    pub fn receives_in_flight(&self) -> usize {
        self.srq.shared().slab().map_or(0, Slab::len)
    }

    /// Requests one event when fewer than `limit` receives are left: [`SharedReceiveQueue::set_limit`].
    ///
    /// # Errors
    /// Like [`SharedReceiveQueue::set_limit`].
    pub fn set_limit(&mut self, limit: u32) -> Result<()> {
        self.srq.set_limit(limit)
    }

    /// Read-only access to the queue, for example for its name in events, [`SharedReceiveQueue::id`].
    #[must_use]
    pub fn shared_receive_queue(&self) -> &SharedReceiveQueue {
        &self.srq
    }

    /// The domain that buffers must belong to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.srq.pd()
    }

    pub(super) fn shared(&self) -> &Arc<srq::Shared> {
        self.srq.shared()
    }

    /// Destroys the queue and returns the buffers that no endpoint has taken.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) while endpoints use the pool. The queue is then destroyed, and the buffers
    /// are freed, when the last of these endpoints is dropped. [`Error::Verb`](crate::Error::Verb) when the queue
    /// cannot be destroyed. The buffers are then leaked, because the device may still use them.
    pub fn close(self) -> Result<Vec<Buffer>> {
        Ok(self.srq.destroy_with_slab()?.map_or_else(Vec::new, Slab::into_buffers))
    }
}

impl fmt::Debug for ReceivePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivePool")
            .field("shared_receive_queue", &self.srq)
            .field("receives_in_flight", &self.receives_in_flight())
            .finish_non_exhaustive()
    }
}
