//! The receives of connections: their own, or those that they share.

use std::fmt;

use rdma_safe::{Buffer, EndpointBuilder, ProtectionDomain, ReceivePool};

use crate::{Error, Result, Sharing, Threads};

/// Receives that connections share, instead of receives for each connection.
///
/// For a service with many connections, of which few receive at the same time. A connection reserves its
/// [`receives`](crate::Connector::receives) when it is made, and can [reserve](crate::Connection::reserve_receives) further ones
/// while it needs them.
///
/// The device gives a receive to whichever message arrives first. So the protocol has to bound what a peer sends by what its
/// connection has reserved, as rdma-msg does. A peer that sends more loses its connection, with [`Error::ReceivesExceeded`].
/// Until this is noticed, other peers may have to wait, and try again.
///
/// ```no_run
/// # async fn example() -> rdma_async::Result<()> {
/// let shared = rdma_async::SharedReceives::new(4096, 4096);
/// let listener = rdma_async::Listener::builder().receives(2).shared_receives(&shared).bind("0.0.0.0:7471").await?;
/// # Ok(())
/// # }
/// ```
///
/// On each device, the receives and their memory are made for the first connection. They are freed once this and the connections
/// are dropped. Each completion queue of the driver needs [room](crate::DriverBuilder::completions) for all of them.
pub struct SharedReceives<S: Sharing = Threads> {
    shared: S::Rc<Shared<S>>,
}

/// Alignment of the memory for a message, in bytes: a cache line.
const ALIGN: usize = 64;

struct Shared<S: Sharing> {
    messages: u32,
    message_size: usize,
    /// One for each device.
    queues: S::Cell<Vec<S::Rc<SharedQueue<S>>>>,
}

impl<S: Sharing> Clone for SharedReceives<S> {
    fn clone(&self) -> Self {
        SharedReceives { shared: self.shared.clone() }
    }
}

impl<S: Sharing> SharedReceives<S> {
    /// On each device, `messages` receives for messages of up to `message_size` bytes.
    #[must_use]
    pub fn new(messages: u32, message_size: usize) -> Self {
        let message_size = message_size.clamp(1, 1 << 30).next_multiple_of(ALIGN);
        SharedReceives {
            shared: S::rc(Shared { messages: messages.max(1), message_size, queues: S::cell(Vec::new()) }),
        }
    }

    /// The number of receives on each device.
    #[must_use]
    pub fn messages(&self) -> u32 {
        self.shared.messages
    }

    /// The longest message in bytes, rounded up to a cache line.
    #[must_use]
    pub fn message_size(&self) -> usize {
        self.shared.message_size
    }

    /// The number of receives that connections have reserved, on all devices. It includes messages that readers keep.
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

    fn queue(&self, pd: &ProtectionDomain) -> Result<S::Rc<SharedQueue<S>>> {
        let find = |queues: &mut Vec<S::Rc<SharedQueue<S>>>| queues.iter().find(|queue| queue.pd.is_same(pd)).cloned();
        if let Some(queue) = S::with(&self.shared.queues, find) {
            return Ok(queue);
        }
        let queue = S::rc(SharedQueue::new(pd, self.messages(), self.message_size())?);
        Ok(S::with(&self.shared.queues, |queues| match find(queues) {
            // Another thread was faster.
            Some(other) => other,
            None => {
                queues.push(queue.clone());
                queue
            }
        }))
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

/// The shared receives of one device.
pub(crate) struct SharedQueue<S: Sharing> {
    pd: ProtectionDomain,
    /// A queue of connections may be locked when this is locked, but not the other way around.
    state: S::Cell<State>,
    /// The addresses of the memory for messages.
    memory: std::ops::Range<usize>,
}

struct State {
    pool: ReceivePool,
    /// Receives that no connection has reserved.
    free: u32,
}

impl<S: Sharing> SharedQueue<S> {
    fn new(pd: &ProtectionDomain, messages: u32, message_size: usize) -> Result<Self> {
        let mut pool = ReceivePool::new(pd, messages)?;
        let len = messages as usize * message_size;
        let whole = pd.allocate(len)?;
        let memory = whole.as_ptr().addr()..whole.as_ptr().addr() + len;
        for buffer in whole.into_chunks(message_size)? {
            pool.receive(buffer).map_err(|rejected| rdma_safe::Error::from(rejected.error))?;
        }
        Ok(SharedQueue { pd: pd.clone(), state: S::cell(State { pool, free: messages }), memory })
    }

    /// Endpoints of the builder use these receives.
    pub(crate) fn build<'a>(&self, builder: EndpointBuilder<'a>) -> EndpointBuilder<'a> {
        S::with(&self.state, |state| builder.receive_pool(&state.pool))
    }

    fn reserve(&self, receives: u32) -> bool {
        S::with(&self.state, |state| match state.free.checked_sub(receives) {
            Some(free) => {
                state.free = free;
                true
            }
            None => false,
        })
    }

    fn release(&self, receives: u32) {
        S::with(&self.state, |state| state.free += receives);
    }

    /// Posts the receive of a message again. Returns a buffer that is not of these receives, or that the device refuses.
    pub(crate) fn post(&self, buffer: Buffer) -> Option<Buffer> {
        if !self.memory.contains(&buffer.as_ptr().addr()) {
            return Some(buffer);
        }
        S::with(&self.state, |state| state.pool.receive(buffer).err()).and_then(|rejected| rejected.buffer)
    }

    /// Posts the receive of a message whose connection is gone.
    pub(crate) fn post_orphan(&self, buffer: Buffer) -> Option<Buffer> {
        let is_own = self.memory.contains(&buffer.as_ptr().addr());
        let unused = self.post(buffer);
        if is_own {
            self.release(1);
        }
        unused
    }
}

/// Receives that a connection has reserved, until this is dropped.
pub(crate) struct Reservation<S: Sharing> {
    pub(crate) queue: S::Rc<SharedQueue<S>>,
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

    pub(crate) fn shared(&self) -> Option<&S::Rc<SharedQueue<S>>> {
        match self {
            Receives::Own(_) => None,
            Receives::Shared(reservation) => Some(&reservation.queue),
        }
    }

    /// Reserves further receives. False if there are none, or if the connection has its own.
    pub(crate) fn reserve(&mut self, receives: u32) -> bool {
        let Receives::Shared(reservation) = self else { return false };
        let is_reserved = reservation.queue.reserve(receives);
        reservation.receives += if is_reserved { receives } else { 0 };
        is_reserved
    }

    /// Releases receives for others.
    pub(crate) fn release(&mut self, receives: u32) {
        let Receives::Shared(reservation) = self else { return };
        let receives = receives.min(reservation.receives);
        reservation.receives -= receives;
        reservation.queue.release(receives);
    }

    /// The connection is gone, and readers keep `messages` of it. Each releases its receive when it is dropped.
    pub(crate) fn leave_to_readers(&mut self, messages: u32) {
        if let Receives::Shared(reservation) = self {
            reservation.receives = reservation.receives.saturating_sub(messages);
        }
    }
}
