//! The owned door: buffers move in with work and come back with its completion.

mod armed;
mod batch;
mod builder;
mod completion;
mod datagram;
mod face;
mod gates;
mod pending;
mod poll;
mod pool;
mod post;
mod ring;
mod set;
mod wait;
mod work;

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use crate::interface::{Any, Classic, Extended, Interface, Known};
use crate::{
    Buffer, CompletionChannel, CompletionQueue, ConnectOptions, PollError, ProtectionDomain, QueuePair,
    QueuePairAddress, QueuePairAttributes, Result, srq,
};
use gates::Gates;
use pending::Pending;
use ring::Ring;

pub use armed::Armed;
pub use batch::Batch;
pub use builder::EndpointBuilder;
use completion::RECEIVE;

pub use completion::{Completion, FailedWork, Operation, Rejected, Unposted, WorkId};
pub(crate) use datagram::Arrival;
pub use datagram::{DatagramBatch, DatagramCompletion, DatagramEndpoint, Peer, Sender};
pub use pool::ReceivePool;
pub use set::{EndpointKey, EndpointMut, EndpointSet, EndpointSetBuilder};
pub use work::Work;

/// A connection whose user needs no `unsafe`: a reliable one, or, with [`EndpointBuilder::qp_type`], an unreliable one.
///
/// A buffer that is posted is *moved* into the endpoint; it comes back with the completion of its work, so that nobody can
/// touch, free or post it in between. Work is kept in rings of fixed size, one for sends and one for receives, allocated
/// with the endpoint: posting and polling allocate nothing, and a full ring is back-pressure
/// ([`PostError::EndpointFull`](crate::PostError::EndpointFull)), unless sends may wait: [`EndpointBuilder::pending_sends`].
///
/// ```no_run
/// # fn exchange(_: rdma_safe::QueuePairAddress) -> rdma_safe::QueuePairAddress { unimplemented!() }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let mut endpoint = Endpoint::builder(&pd).build()?;
/// let (inbox, mut outbox) = pd.allocate(8192)?.into_split(4096)?;
///
/// endpoint.receive(inbox)?; // before the peer can send
/// let remote = exchange(endpoint.address()); // over TCP, a file, …
/// endpoint.connect(&remote)?;
/// // A send that comes before the peer has connected, too, fails after half a second to two: let the peer say that it has.
///
/// outbox.fill_from(b"hello")?;
/// endpoint.send(outbox)?;
/// for _ in 0..2 {
///     let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
///     println!("{:?}: {:?}", done.operation, done.buffer.as_deref());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Endpoint<I: Interface = Any> {
    poster: Poster<I>,
    /// Never lent, and polled by [`CompletionQueue::stand`] and [`CompletionQueue::next_row`] only: nobody begins what is not
    /// ended.
    cq: CompletionQueue,
}

/// An endpoint but for the queue that it completes to.
struct Poster<I: Interface = Any> {
    gates: Gates,
    live: Live,
    pd: ProtectionDomain,
    settings: Settings,
    address: QueuePairAddress,
    run: Run,
    rare: Rare,
    /// Work requests of pending sends. Their buffers are in the ring.
    pending: Option<Box<Pending>>,
    /// A posting failed, and whether the provider has its work is not known.
    poisoned: bool,
    interface: PhantomData<I>,
}

/// A queue pair and the work that is in flight on it.
struct Live {
    /// Destroyed in `drop`, before the rings.
    qp: ManuallyDrop<QueuePair>,
    sends: Ring<Buffer>,
    receives: Ring<Buffer>,
    /// The queue of a [`ReceivePool`], whose receives it takes instead.
    pool: Option<Arc<srq::Shared>>,
    /// Of datagrams, what there is beside their buffers.
    datagrams: Option<Box<datagram::Kept>>,
    /// `qp` was taken.
    destroyed: bool,
}

/// What is fixed when an endpoint is built.
struct Settings {
    max_message: u32,
    /// Unsignaled sends in a row, before one is signaled anyway.
    max_unsignaled: u32,
    timestamps: bool,
    /// [`EndpointBuilder::receive_share`].
    receive_share: Option<u32>,
}

/// What calls that are rare hand back, apart from what fits in a register. Returned as a whole, in memory, it would make every
/// caller keep the results of all calls there, those of the usual ones, too.
struct Rare {
    rejected: Option<Rejected>,
    completion: Option<Completion>,
    failure: PollError,
}

impl Rare {
    const NOTHING: Rare = Rare { rejected: None, completion: None, failure: PollError::Unexpected { wr_id: 0 } };
}

/// The last unsignaled sends.
#[derive(Clone, Copy)]
struct Run {
    /// How many, one right after the other,
    len: u32,
    /// before this sequence number.
    end: u64,
}

impl Endpoint {
    /// Starts describing an endpoint in this domain.
    pub fn builder(pd: &ProtectionDomain) -> EndpointBuilder<'_> {
        EndpointBuilder::new(pd)
    }

    /// This endpoint, with the interface of its queues known to the compiler: posting and polling are compiled without the other
    /// one.
    ///
    /// ```no_run
    /// # fn example(endpoint: rdma_safe::Endpoint) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut endpoint = endpoint.extended().map_err(|_| "the provider has no ibv_wr_*, or no ibv_start_poll")?;
    /// let len = endpoint.take(|completion| completion.byte_len)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The endpoint, as usable as before, if it does not post by `ibv_wr_*` and poll by `ibv_start_poll`.
    #[allow(clippy::result_large_err)] // It is given back, and not an error to be handed on.
    pub fn extended(self) -> Result<Endpoint<Extended>, Endpoint> {
        self.by()
    }

    /// As [`Endpoint::extended`], of the other interface.
    ///
    /// # Errors
    /// The endpoint, if it does not post by `ibv_post_send(3)` and poll by `ibv_poll_cq(3)`.
    #[allow(clippy::result_large_err)] // As above.
    pub fn classic(self) -> Result<Endpoint<Classic>, Endpoint> {
        self.by()
    }

    /// As [`Endpoint::extended`] or [`Endpoint::classic`], for code that is generic over the interface.
    ///
    /// # Errors
    /// The endpoint, if one of its queues is of the other interface.
    #[allow(clippy::result_large_err)] // As above.
    pub fn by<I: Known>(self) -> Result<Endpoint<I>, Endpoint> {
        if [self.poster.live.qp.is_extended(), self.cq.is_extended()].map(Some) != [I::EXTENDED; 2] {
            return Err(self);
        }
        let from = ManuallyDrop::new(self);
        // SAFETY: each field is moved, once, out of what is neither dropped nor used again.
        let (poster, cq) = unsafe { (ptr::read(&from.poster), ptr::read(&from.cq)) };
        Ok(Endpoint { poster: poster.by(), cq })
    }
}

impl<I: Interface> Endpoint<I> {
    /// The channel that becomes readable when work is done, if the endpoint was built with
    /// [`EndpointBuilder::events`]: for `epoll(7)` and async runtimes. [`Endpoint::arm`] it first. It is the endpoint's own:
    /// events of other queues that are made to report over it get lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Changes the state of the queue pair, say as a connection manager has it.
    pub(crate) fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.poster.advance(attributes)
    }

    /// Destroys the queue pair, and returns the buffers of all work that was not handed out, done or not. Of a
    /// [`ReceivePool`], these are the receives that a message has come into; the others are still the pool's.
    ///
    /// # Errors
    /// [`Error::Verb`](crate::Error::Verb) when the queue pair cannot be destroyed, and [`Error::InUse`](crate::Error::InUse) while
    /// there are [`Flow`](crate::Flow)s to it. As the device may still use the buffers, they then stay: until the process ends, or
    /// the last of the flows is gone.
    pub fn close(mut self) -> Result<Vec<Buffer>> {
        let mut buffers = self.take_shared();
        self.poster.live.destroy()?;
        buffers.extend(self.poster.live.take_buffers());
        Ok(buffers)
    }

    /// Buffers of a pool that it has taken and not handed out, and with them those of other work that is done: nobody else will
    /// poll their completions, and until then the pool keeps a place for each.
    fn take_shared(&mut self) -> Vec<Buffer> {
        let mut buffers = Vec::new();
        if self.poster.live.pool.is_none() || self.poster.live.destroyed {
            return buffers;
        }
        // Nothing more arrives then.
        self.poster.poison();
        // No more than that has completed: a device that goes on and on is not followed.
        for _ in 0..=self.cq.capacity() {
            match self.poll() {
                Ok(Some(done)) => buffers.extend(done.buffer),
                Ok(None) | Err(_) => break,
            }
        }
        buffers
    }
}

impl<I: Interface> Drop for Endpoint<I> {
    fn drop(&mut self) {
        drop(self.take_shared());
    }
}

impl Poster {
    fn by<I: Interface>(self) -> Poster<I> {
        let Poster { gates, live, pd, settings, address, run, rare, pending, poisoned, .. } = self;
        Poster { gates, live, pd, settings, address, run, rare, pending, poisoned, interface: PhantomData }
    }
}

impl<I: Interface> Poster<I> {
    /// Changes the state of the queue pair otherwise than by [`Poster::connect_with`].
    fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        let changed = self.live.qp.modify(attributes);
        self.open_gates();
        changed
    }

    fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let connected = self.live.qp.connect(remote, options);
        self.open_gates();
        connected
    }
}

impl Live {
    /// Buffers of all work that was not handed out. The queue pair must be destroyed.
    fn take_buffers(&mut self) -> impl Iterator<Item = Buffer> + use<'_> {
        debug_assert!(self.destroyed);
        self.sends.take_buffers().chain(self.receives.take_buffers())
    }

    /// Destroys the queue pair, once.
    fn destroy(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.destroyed, true) {
            return Ok(());
        }
        // SAFETY: `destroyed` was false, so it has not been taken. It is not used after: `close` and `drop`, the only
        // callers, end the endpoint.
        let qp = unsafe { ManuallyDrop::take(&mut self.qp) };
        // While there is a queue pair the device may still read and write the buffers.
        qp.destroy_or_keep(|| (self.take_buffers().collect::<Vec<_>>(), self.datagrams.take()))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<I: Interface> fmt::Debug for Endpoint<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("queue_pair", self.queue_pair())
            .field("sends_in_flight", &self.sends_in_flight())
            .field("receives_in_flight", &self.receives_in_flight())
            .finish_non_exhaustive()
    }
}
