//! The receives of connections: their own, or those that they share.

use std::fmt;

use rdma_safe::{Buffer, EndpointBuilder, ProtectionDomain, ReceivePool};

use crate::{Error, Result, Sharing, Threads};

/// Receives that connections share, instead of receives for each connection.
///
/// They suit a service with many connections, few of which receive at the same time. A connection reserves its
/// [`receives`](crate::Connector::receives) when it is made, and can [reserve](crate::Connection::reserve_receives) further ones
/// while it needs them.
///
/// The device gives a receive to whichever message arrives first. So the protocol has to bound what a peer sends by what its
/// connection has reserved, as rdma-msg does. If a peer sends more, its connection ends with [`Error::ReceivesExceeded`], and its
/// queue pair is stopped when the driver notices. Other peers may get RNR NAKs and retry until then.
///
/// ```no_run
/// # async fn example() -> rdma_async::Result<()> {
/// let shared = rdma_async::SharedReceives::new(4096, 4096);
/// let listener = rdma_async::Listener::builder().receives(2).shared_receives(&shared).bind("0.0.0.0:7471").await?;
/// # Ok(())
/// # }
/// ```
///
/// In each protection domain, the receives and their memory are made for the first connection. They are freed once this and the
/// connections are dropped. Each completion queue of the driver needs [room](crate::DriverBuilder::completions) for all of them.
pub struct SharedReceives<S: Sharing = Threads> {
    shared: S::Rc<Shared<S>>,
}

/// Alignment of the memory for a message, in bytes: a cache line.
const ALIGN: usize = 64;

struct Shared<S: Sharing> {
    messages: u32,
    message_size: usize,
    /// One for each protection domain.
    queues: S::Cell<Vec<S::Rc<DomainReceives<S>>>>,
}

impl<S: Sharing> Clone for SharedReceives<S> {
    fn clone(&self) -> Self {
        SharedReceives { shared: self.shared.clone() }
    }
}

impl<S: Sharing> SharedReceives<S> {
    /// In each protection domain, `messages` receives, at least 1, for messages of up to `message_size` bytes, 1 to 1 GiB.
    ///
    /// The first connection fails if the device does not allow as many.
    #[must_use]
    pub fn new(messages: u32, message_size: usize) -> Self {
        let message_size = message_size.clamp(1, 1 << 30).next_multiple_of(ALIGN);
        SharedReceives {
            shared: S::rc(Shared { messages: messages.max(1), message_size, queues: S::cell(Vec::new()) }),
        }
    }

    /// The number of receives in each protection domain.
    #[must_use]
    pub fn messages(&self) -> u32 {
        self.shared.messages
    }

    /// The longest message in bytes, rounded up to a cache line.
    #[must_use]
    pub fn message_size(&self) -> usize {
        self.shared.message_size
    }

    /// The number of receives that connections have reserved, in all domains. It includes messages that readers keep.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        S::with(&self.shared.queues, |queues| {
            queues.iter().map(|queue| self.messages() - S::with(&queue.state, |state| state.free)).sum()
        })
    }

    /// Reserves receives in this domain.
    pub(crate) fn reserve(&self, pd: &ProtectionDomain, receives: u32) -> Result<Reservation<S>> {
        let queue = self.queue(pd)?;
        if !queue.reserve(receives) {
            return Err(Error::NoReceives { wanted: receives, messages: self.messages() });
        }
        Ok(Reservation { queue, receives })
    }

    fn queue(&self, pd: &ProtectionDomain) -> Result<S::Rc<DomainReceives<S>>> {
        let find =
            |queues: &mut Vec<S::Rc<DomainReceives<S>>>| queues.iter().find(|queue| queue.pd.is_same(pd)).cloned();
        if let Some(queue) = S::with(&self.shared.queues, find) {
            return Ok(queue);
        }
        let queue = S::rc(DomainReceives::new(pd, self.messages(), self.message_size())?);
        // If another thread was faster, this one is dropped without the lock.
        let other = S::with(&self.shared.queues, |queues| {
            let other = find(queues);
            if other.is_none() {
                queues.push(queue.clone());
            }
            other
        });
        Ok(other.unwrap_or(queue))
    }
}

impl<S: Sharing> fmt::Debug for SharedReceives<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives")
            .field("messages", &self.messages())
            .field("message_size", &self.message_size())
            .field("reserved", &self.reserved())
            .finish()
    }
}

/// The shared receives in one protection domain.
pub(crate) struct DomainReceives<S: Sharing> {
    pd: ProtectionDomain,
    /// May be locked while the queue of a connection is. That queue must not be locked while this is.
    state: S::Cell<State>,
    /// The addresses of the memory for messages.
    memory: std::ops::Range<usize>,
}

struct State {
    pool: ReceivePool,
    /// Receives that no connection has reserved.
    free: u32,
    /// The device has refused a receive, so there are fewer than were counted.
    is_broken: bool,
}

impl<S: Sharing> DomainReceives<S> {
    fn new(pd: &ProtectionDomain, messages: u32, message_size: usize) -> Result<Self> {
        let mut pool = ReceivePool::new(pd, messages)?;
        let len = messages as usize * message_size;
        let whole = pd.allocate(len)?;
        let memory = whole.as_ptr().addr()..whole.as_ptr().addr() + len;
        for buffer in whole.into_chunks(message_size)? {
            pool.receive(buffer).map_err(|rejected| rdma_safe::Error::from(rejected.error))?;
        }
        Ok(DomainReceives { pd: pd.clone(), state: S::cell(State { pool, free: messages, is_broken: false }), memory })
    }

    /// Endpoints of the builder use these receives.
    pub(crate) fn build<'a>(&self, builder: EndpointBuilder<'a>) -> EndpointBuilder<'a> {
        S::with(&self.state, |state| builder.receive_pool(&state.pool))
    }

    fn reserve(&self, receives: u32) -> bool {
        S::with(&self.state, |state| {
            let left = state.free.checked_sub(receives).filter(|_| !state.is_broken);
            state.free = left.unwrap_or(state.free);
            left.is_some()
        })
    }

    fn release(&self, receives: u32) {
        S::with(&self.state, |state| state.free += receives);
    }

    /// Posts the receive of a message again. Returns a buffer that is not of these receives, or that the device refuses.
    pub(crate) fn post(&self, buffer: Buffer) -> Option<Buffer> {
        if !self.owns(&buffer) {
            return Some(buffer);
        }
        S::with(&self.state, |state| {
            let rejected = state.pool.receive(buffer).err()?;
            state.is_broken = true;
            rejected.buffer
        })
    }

    fn owns(&self, buffer: &Buffer) -> bool {
        self.memory.contains(&buffer.as_ptr().addr())
    }

    /// Posts the receive of a message whose connection is gone.
    pub(crate) fn post_orphan(&self, buffer: Buffer) -> Option<Buffer> {
        if !self.owns(&buffer) {
            return Some(buffer);
        }
        let unused = self.post(buffer);
        self.release(1);
        unused
    }
}

/// Receives that a connection has reserved, until this is dropped.
pub(crate) struct Reservation<S: Sharing> {
    pub(crate) queue: S::Rc<DomainReceives<S>>,
    receives: u32,
}

impl<S: Sharing> Drop for Reservation<S> {
    fn drop(&mut self) {
        self.queue.release(self.receives);
    }
}

/// The receives of a connection.
pub(crate) enum Receives<S: Sharing> {
    /// As many as the size of its receive queue.
    Own(u32),
    Shared(Reservation<S>),
}

impl<S: Sharing> Receives<S> {
    /// The most messages that may have arrived and not been dropped.
    #[inline(always)]
    pub(crate) fn count(&self) -> u32 {
        match self {
            Receives::Own(receives) => *receives,
            Receives::Shared(reservation) => reservation.receives,
        }
    }

    /// The most messages that a peer may send, if the device does not enforce it.
    pub(crate) fn limit(&self) -> u32 {
        match self {
            Receives::Own(_) => u32::MAX,
            Receives::Shared(reservation) => reservation.receives,
        }
    }

    pub(crate) fn shared(&self) -> Option<&S::Rc<DomainReceives<S>>> {
        match self {
            Receives::Own(_) => None,
            Receives::Shared(reservation) => Some(&reservation.queue),
        }
    }

    /// Reserves further receives. False if there are none, or if the connection has its own.
    pub(crate) fn reserve(&mut self, receives: u32) -> bool {
        let Receives::Shared(reservation) = self else { return false };
        if !reservation.queue.reserve(receives) {
            return false;
        }
        reservation.receives += receives;
        true
    }

    /// Releases receives for others.
    pub(crate) fn release(&mut self, receives: u32) {
        let Receives::Shared(reservation) = self else { return };
        let receives = receives.min(reservation.receives);
        reservation.receives -= receives;
        reservation.queue.release(receives);
    }

    /// Posts the receive of a message again if it is shared. Returns the buffer otherwise.
    pub(crate) fn post_shared(&self, buffer: Buffer) -> Option<Buffer> {
        match self.shared() {
            Some(shared) => shared.post(buffer),
            None => Some(buffer),
        }
    }

    /// The receives cannot be used again.
    pub(crate) fn leak(&mut self) {
        self.leave_to_readers(u32::MAX);
    }

    /// Leaves the receives of `messages` kept messages reserved when the connection is gone.
    pub(crate) fn leave_to_readers(&mut self, messages: u32) {
        if let Receives::Shared(reservation) = self {
            reservation.receives = reservation.receives.saturating_sub(messages);
        }
    }
}
