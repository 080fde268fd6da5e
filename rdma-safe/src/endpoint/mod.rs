//! Endpoints: buffers move in with posted work and come back with its completion.
//!
//! Start with [`Endpoint`]. [`EndpointSet`] serves many connections, [`DatagramEndpoint`] is for datagrams, and a
//! [`ReceivePool`] is shared by several endpoints.

mod armed;
mod batch;
mod builder;
mod completion;
mod datagram;
mod gates;
mod keepalive;
mod lists;
mod many;
mod methods;
mod pending;
mod poll;
mod poll_each;
mod pool;
mod post;
mod ring;
mod set;
mod wait;
mod windows;
mod work;

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use crate::interface::{Any, Interface, Known};
use crate::mr::{Gather, Piece};
use crate::qp::QueuePairAttributes;
use crate::{
    Buffer, CompletionChannel, CompletionQueue, ConnectOptions, PollError, ProtectionDomain, QueuePair,
    QueuePairAddress, Result, srq,
};
use gates::Gates;
use keepalive::{Countdown, Keepalive};
use pending::Pending;
use ring::Ring;

pub use armed::Armed;
pub use batch::Batch;
pub use builder::EndpointBuilder;
use completion::RECEIVE;

pub use completion::{BatchError, Completion, FailedWork, Operation, Rejected, Succeeded, WorkId};
pub use datagram::{DatagramBatch, DatagramCompletion, DatagramEndpoint, DatagramIdentity, DatagramSender, Peer};
pub use keepalive::{ConnectionLost, KeepaliveError};
pub use pool::ReceivePool;
pub(crate) use set::Provisional;
pub use set::{CompletionSink, EndpointKey, EndpointMut, EndpointSet, EndpointSetBuilder, FailedPoll, Transferred};
pub use windows::{BoundWindow, RejectedWindow};
pub use work::{Transfer, Work};

/// A connection that is used without `unsafe`: a reliable one by default, see [`EndpointBuilder::qp_type`].
///
/// Posting a buffer *moves* it into the endpoint. It comes back with the completion of its work, so nothing else can
/// access, free or post it in between. Work in flight is kept in two rings of fixed size, one for sends and one for
/// receives, which are allocated with the endpoint. Posting and polling allocate nothing. A full ring is back-pressure
/// ([`PostError::EndpointFull`](crate::PostError::EndpointFull)), unless sends may wait:
/// [`EndpointBuilder::pending_sends`].
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
/// endpoint.receive(inbox)?; // post it before the peer can send
/// let remote = exchange(endpoint.address()); // over TCP, a file, …
/// endpoint.connect(&remote)?;
/// // A send fails after 0.5 to 2 seconds if the peer is not connected by then, so have the peer confirm that it is.
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
    /// Never lent out. Polled only through [`CompletionQueue::start_poll`] and [`CompletionQueue::next_row`], so no poll
    /// stays open.
    cq: CompletionQueue,
}

/// An endpoint without its completion queue.
struct Poster<I: Interface = Any> {
    gates: Gates,
    /// Polls without a completion until the keepalive reads the clock. Not used in a set.
    countdown: Countdown,
    live: Live,
    pd: ProtectionDomain,
    settings: Settings,
    address: QueuePairAddress,
    run: UnsignaledRun,
    slow: SlowResults,
    /// Work requests of pending sends. Their buffers are in the ring.
    pending: Option<Box<Pending>>,
    /// A posting failed, and the provider may or may not have taken its work.
    poisoned: bool,
    interface: PhantomData<I>,
}

/// A queue pair and the work in flight on it.
struct Live {
    /// Destroyed in `drop`, before the rings.
    qp: ManuallyDrop<QueuePair>,
    sends: Ring<Buffer>,
    receives: Ring<Buffer>,
    /// The queue of a [`ReceivePool`], used instead of `receives`.
    pool: Option<Arc<srq::Shared>>,
    /// Headers, senders and address handles of a datagram endpoint.
    datagrams: Option<Box<datagram::DatagramSlots>>,
    keepalive: Option<Box<Keepalive>>,
    /// Memory windows of the queue pair, which are deallocated before it is destroyed.
    windows: Option<Box<windows::Windows>>,
    /// The connection manager has told that the peer has ended the connection.
    peer_left: bool,
    /// `qp` has been taken.
    destroyed: bool,
}

/// Settings that are fixed when an endpoint is built.
struct Settings {
    max_message: u32,
    /// Maximum run of unsignaled sends; the next send is signaled anyway.
    max_unsignaled: u32,
    timestamps: bool,
    /// [`EndpointBuilder::receive_share`].
    receive_share: Option<u32>,
}

/// Results of the slow path that do not fit in a register.
///
/// If slow-path functions returned them by value, in memory, callers would keep the results of all calls in memory,
/// even the results of the fast path.
struct SlowResults {
    rejected: Option<Rejected>,
    completion: Option<Completion>,
    failure: PollError,
}

impl SlowResults {
    const NONE: SlowResults =
        SlowResults { rejected: None, completion: None, failure: PollError::NotInFlight { wr_id: 0 } };
}

/// The most recent run of unsignaled sends.
#[derive(Clone, Copy)]
struct UnsignaledRun {
    /// Length of the run.
    len: u32,
    /// Sequence number that follows its last send.
    end: u64,
}

impl Endpoint {
    /// Starts building an endpoint in this domain.
    pub fn builder(pd: &ProtectionDomain) -> EndpointBuilder<'_> {
        EndpointBuilder::new(pd)
    }

    /// Fixes the interface of the queues at compile time, for loops that post and poll at the lowest cost.
    ///
    /// Posting and polling are then compiled without the other interface. [`Extended`](crate::interface::Extended) is
    /// `ibv_wr_*` and `ibv_start_poll`, [`Classic`](crate::interface::Classic) is `ibv_post_send(3)` and
    /// `ibv_poll_cq(3)`.
    ///
    /// ```no_run
    /// # fn example(endpoint: rdma_safe::Endpoint) -> Result<(), Box<dyn std::error::Error>> {
    /// use rdma_safe::interface::Extended;
    ///
    /// let endpoint = endpoint.with_interface::<Extended>();
    /// let mut endpoint = endpoint.map_err(|_| "the provider has no ibv_wr_*, or no ibv_start_poll")?;
    /// let len = endpoint.poll_with(|completion| completion.byte_len)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The unchanged endpoint, if one of its queues uses the other interface.
    #[allow(clippy::result_large_err)] // The endpoint is handed back here; it is not an error that propagates.
    pub fn with_interface<I: Known>(self) -> Result<Endpoint<I>, Endpoint> {
        if [self.poster.live.qp.is_extended(), self.cq.is_extended()].map(Some) != [I::EXTENDED; 2] {
            return Err(self);
        }
        let from = ManuallyDrop::new(self);
        // SAFETY: each field is moved out once. `from` is neither dropped nor used again.
        let (poster, cq) = unsafe { (ptr::read(&from.poster), ptr::read(&from.cq)) };
        Ok(Endpoint { poster: poster.with_interface(), cq })
    }
}

impl<I: Interface> Endpoint<I> {
    /// The channel of the completion queue, for `epoll(7)` and async runtimes.
    ///
    /// `None` unless the endpoint was built with [`EndpointBuilder::events`]. It becomes readable when work completes,
    /// after [`Endpoint::arm`]. It belongs to the endpoint: if other queues report to it, their events are lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Modifies the queue pair, as a connection manager requires.
    pub(crate) fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.poster.advance(attributes)
    }

    /// Pauses the keepalive until the peer has confirmed the connection.
    pub(crate) fn pause_keepalive(&mut self) {
        self.poster.pause_keepalive();
    }

    /// Resumes the keepalive.
    pub(crate) fn resume_keepalive(&mut self) {
        self.poster.resume_keepalive();
    }

    /// The peer has ended the connection, so work that is flushed from now on has this cause.
    pub(crate) fn note_peer_left(&mut self) {
        self.poster.live.peer_left = true;
    }

    /// Destroys the queue pair and returns the buffers of all work that was not handed out, completed or not.
    ///
    /// With a [`ReceivePool`], these include only the receives that a message has arrived in. The others stay in the
    /// pool.
    ///
    /// # Errors
    /// [`Error::Verb`](crate::Error::Verb) when the queue pair cannot be destroyed, and
    /// [`Error::InUse`](crate::Error::InUse) while a [`Flow`](crate::flow::Flow) refers to it. The device may then still use
    /// the buffers, so they are kept until the process ends or the last of the flows is dropped.
    pub fn close(mut self) -> Result<Vec<Buffer>> {
        let mut buffers = self.take_pool_buffers();
        self.poster.live.destroy()?;
        buffers.extend(self.poster.live.take_buffers());
        Ok(buffers)
    }

    /// Drains the receives that this endpoint has taken from a pool, together with other completed work.
    ///
    /// Nothing else will poll their completions, and the pool reserves a slot for each until then.
    fn take_pool_buffers(&mut self) -> Vec<Buffer> {
        let mut buffers = Vec::new();
        let Live { pool, destroyed, .. } = &self.poster.live;
        if pool.is_none() || *destroyed || self.cq.context().is_inherited() {
            return buffers;
        }
        // After this, receives complete only as flushed.
        self.poster.poison();
        // Polls at most as many completions as the queue holds, in case the device keeps adding more.
        for _ in 0..=self.cq.capacity() {
            match self.poll() {
                Ok(Some(done)) => buffers.extend(done.into_buffers()),
                Ok(None) | Err(_) => break,
            }
        }
        buffers
    }
}

impl<I: Interface> Drop for Endpoint<I> {
    fn drop(&mut self) {
        drop(self.take_pool_buffers());
    }
}

impl Poster {
    fn with_interface<I: Interface>(self) -> Poster<I> {
        let Poster { gates, countdown, live, pd, settings, address, run, slow, pending, poisoned, .. } = self;
        Poster { gates, countdown, live, pd, settings, address, run, slow, pending, poisoned, interface: PhantomData }
    }
}

impl<I: Interface> Poster<I> {
    /// Modifies the queue pair in any other way than [`Poster::connect_with`].
    fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        let limited = self.limit_ack_timeout(attributes);
        let changed = self.live.qp.modify(&limited);
        self.open_gates();
        if changed.is_ok() {
            self.follow(attributes);
        }
        changed
    }

    fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        if let Some(keepalive) = &mut self.live.keepalive {
            if !remote.remote_write {
                return Err(KeepaliveError::RefusedByPeer { qp_num: remote.qp_num }.into());
            }
            keepalive.set_peer(remote.qp_num);
        }
        let options = self.limit_retries(options);
        let connected = self.live.qp.connect(remote, &options);
        self.open_gates();
        if connected.is_ok() {
            self.start_keepalive();
        }
        connected
    }
}

impl Live {
    /// Buffers of all work that was not handed out. The queue pair must be destroyed first.
    fn take_buffers(&mut self) -> impl Iterator<Item = Buffer> + use<'_> {
        let lists: Vec<_> = self.take_lists().collect();
        self.take_single_buffers().chain(lists.into_iter().flatten().filter_map(Piece::into_buffer))
    }

    /// Like [`Live::take_buffers`], without those in lists.
    fn take_single_buffers(&mut self) -> impl Iterator<Item = Buffer> + use<'_> {
        debug_assert!(self.destroyed);
        self.sends.take_buffers().chain(self.receives.take_buffers())
    }

    /// Lists of all work that was not handed out. The queue pair must be destroyed first.
    fn take_lists(&mut self) -> impl Iterator<Item = Gather> + use<'_> {
        debug_assert!(self.destroyed);
        self.sends.take_lists().chain(self.receives.take_lists())
    }

    /// Destroys the queue pair, once.
    fn destroy(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.destroyed, true) {
            return Ok(());
        }
        // A bound window keeps its queue pair.
        self.windows = None;
        // SAFETY: `destroyed` was false, so `qp` has not been taken. It is not used later, because the only callers,
        // `close` and `drop`, end the endpoint.
        let qp = unsafe { ManuallyDrop::take(&mut self.qp) };
        // The device may read and write the buffers for as long as the queue pair exists.
        qp.destroy_or_keep(|| {
            let lists: Vec<_> = self.take_lists().collect();
            (lists, self.take_single_buffers().collect::<Vec<_>>(), self.datagrams.take())
        })
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
