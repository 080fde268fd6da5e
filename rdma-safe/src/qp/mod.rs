//! Queue pairs: creation, states, attributes and addresses.
//!
//! Start with [`ProtectionDomain::queue_pair`](crate::ProtectionDomain::queue_pair), which makes a [`QueuePair`], the
//! raw API of the data path. The owned API is an [`Endpoint`](crate::Endpoint).

mod attributes;
mod builder;
mod connect;
mod data_order;
mod drain;
mod ece;
mod keeper;
mod modify;
mod multicast;
mod operations;
mod options;
mod rate_limit;
mod raw;
mod raw_packet;
mod state;
pub(crate) mod xrc_target;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::error::Verb;
use crate::object::{Object, Parents as _};
use crate::post::{RecvBatch, RecvQueue, RecvState, SendBatch, SendOps, SendQueue, SendState};
use crate::srq::SrqId;
use crate::xrc::XrcDomain;
use crate::{Context, Error, PostError, ProtectionDomain, Result, Sge, cq, object, srq};
use multicast::Groups;

pub use attributes::{AttributeMask, QueuePairAttributes, QueuePairCapacity, Transition};
pub use builder::QueuePairBuilder;
pub(crate) use connect::Local;
pub use connect::{ConnectOptions, InitOptions, QueuePairAddress};
pub use data_order::{DataInOrder, WrOpcode};
pub use ece::Ece;
pub(crate) use keeper::Keeper;
pub use modify::ModifyError;
pub use options::QueuePairFlags;
pub use rate_limit::RateLimit;
pub use state::{QueuePairState, QueuePairType};

pub use crate::id::QpId;

/// A queue pair: `struct ibv_qp`, with `struct ibv_qp_ex` for posting if the provider supports it.
///
/// This is the raw interface: [`SendBatch`] and [`RecvBatch`] post memory by address and key, which is `unsafe`. The
/// safe interface with owned buffers is [`Endpoint`](crate::Endpoint). The example `hello_raw` sends a message.
pub struct QueuePair {
    /// Also has the C object, and destroys it on drop.
    send: SendState,
    recv: RecvState,
    /// Set by [`QueuePair::init`].
    local: Option<Box<Local>>,
}

/// The C object of a queue pair, and what is known of it.
pub(crate) struct Core {
    object: Object<Parents>,
    number: u32,
    id: QpId,
    qp_type: QueuePairType,
    capacity: QueuePairCapacity,
    /// State as last set or queried here. The device may have moved the queue pair to the error state.
    state: AtomicU32,
    port: AtomicU8,
}

struct Parents {
    home: Home,
    // Completion queues must outlive the queue pairs that complete to them. The second is `None` if it is the first.
    cqs: [Option<Arc<cq::Shared>>; 2],
    // The shared receive queue must outlive the queue pairs that take receives from it.
    srq: Option<Arc<srq::Shared>>,
    /// Locked during `ibv_query_qp`, which writes to the C object.
    extras: Mutex<Option<Box<Extras>>>,
}

/// What few queue pairs have.
#[derive(Default)]
struct Extras {
    groups: Groups,
    /// `None` before the first flow or memory window.
    keeper: Option<Arc<Keeper>>,
    // Released only after the queue pair is destroyed.
    retained: Vec<Box<dyn Send>>,
}

/// The object that a queue pair is created in.
enum Home {
    Domain(ProtectionDomain),
    /// For the target of an XRC connection, which has no queues.
    Xrc(XrcDomain),
}

impl Home {
    fn context(&self) -> &Context {
        match self {
            Home::Domain(pd) => pd.context(),
            Home::Xrc(xrcd) => xrcd.context(),
        }
    }
}

impl QueuePair {
    /// Number of the queue pair, 24 bits, which a peer needs to reach it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.core().number
    }

    /// Identifier in asynchronous events. No other queue pair of the process ever has the same.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.core().id
    }

    /// Capacities that the device granted, at least those requested.
    #[must_use]
    pub fn capacity(&self) -> QueuePairCapacity {
        self.core().capacity
    }

    /// Type of the queue pair.
    #[must_use]
    pub fn qp_type(&self) -> QueuePairType {
        self.core().qp_type
    }

    /// State as last set or queried here. A device may move a queue pair to the error state on its own: see
    /// [`QueuePair::query`].
    #[must_use]
    pub fn state(&self) -> QueuePairState {
        self.core().state()
    }

    /// The [id](crate::SharedReceiveQueue::id) of the shared receive queue; `None` if the queue pair has its own
    /// receive queue.
    #[must_use]
    pub fn shared_receive_queue(&self) -> Option<SrqId> {
        self.core().object.srq.as_ref().map(|srq| srq.id())
    }

    /// Whether work is posted by `ibv_wr_*`; otherwise by `ibv_post_send`.
    #[must_use]
    #[inline(always)]
    pub fn is_extended(&self) -> bool {
        self.send.is_extended()
    }

    /// Sets attributes: `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Modify`], which says what the kernel's `EINVAL` does not: an attribute that is missing, not allowed or
    /// out of range, or a problem with the address.
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        // A forgotten batch that is aborted later would set the provider's counters back to their values before a
        // reset.
        self.send.abort();
        let result = self.core().modify(attributes);
        if let (Some(port), true) = (attributes.port(), result.is_ok()) {
            self.update_max_datagram(port);
        }
        self.update_queue_states();
        result
    }

    /// Passes the MTU of the port to the send queue as the limit of datagrams.
    fn update_max_datagram(&mut self, port: u8) {
        if self.qp_type() == QueuePairType::UD {
            let mtu = self.context().query_port(port).ok().and_then(|port| port.active_mtu().bytes());
            // If the MTU is not known, assume the largest one and let the device refuse longer datagrams.
            self.send.set_max_datagram(mtu.and_then(|mtu| u16::try_from(mtu).ok()).unwrap_or(4096));
        }
    }

    /// Reads attributes from the device: `ibv_query_qp(3)`.
    ///
    /// Requests all attributes. Some devices report only part of them and leave the rest zero.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        self.core().query(|| self.update_queue_states())
    }

    /// Passes the state to both queues.
    fn update_queue_states(&self) {
        self.send.set_state(self.state());
        self.recv.set_state(self.state());
    }

    /// Largest datagram in bytes: the MTU that the port had when the queue pair was assigned to it. `None` before INIT,
    /// and for other types than UD.
    #[must_use]
    pub fn max_datagram(&self) -> Option<u32> {
        self.send.max_datagram()
    }

    /// Enabled send operations.
    #[must_use]
    pub fn operations(&self) -> SendOps {
        self.send.operations()
    }

    /// Starts a batch of sends: `ibv_wr_start`. Nothing is posted before [`SendBatch::post`].
    ///
    /// This is the one way to post sends by address and key. [`SendQueue::batch`](crate::post::SendQueue::batch) is the
    /// same after [`QueuePair::split`], and [`SendQueue::post`](crate::post::SendQueue::post) costs less in a loop.
    ///
    /// # Errors
    /// [`PostError::NotReady`] unless the queue pair was brought to RTS.
    #[doc(alias = "ibv_wr_start")]
    #[inline(always)]
    pub fn send_batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        self.send.batch()
    }

    /// Starts a batch of receives, which may have several elements. Nothing is posted before [`RecvBatch::post`].
    ///
    /// # Errors
    /// [`PostError::NotReady`] in RESET; [`PostError::SharedReceives`] if it uses a shared receive queue.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<RecvBatch<'_>, PostError> {
        self.recv.batch()
    }

    /// Posts one receive: `ibv_post_recv(3)`. Costs less than a batch of one.
    ///
    /// # Errors
    /// [`PostError::NotReady`] in RESET; [`PostError::SharedReceives`] if it uses a shared receive queue;
    /// [`PostError::QueueFull`]; [`PostError::Refused`] or [`PostError::MaybePosted`] if the provider failed for another
    /// reason.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.recv.receive(wr_id, sge) }
    }

    /// Posts one receive that is scattered into `sges`.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    pub(crate) unsafe fn receive_list(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let mut batch = self.recv_batch()?;
        // SAFETY: the caller's contract is the same.
        unsafe { batch.receive(wr_id, sges)? };
        batch.post()
    }

    /// Splits the queue pair into its two queues, which two threads may use at the same time.
    #[inline(always)]
    pub fn split(&mut self) -> (SendQueue<'_>, RecvQueue<'_>) {
        (SendQueue::new(&mut self.send), RecvQueue::new(&mut self.recv))
    }

    #[inline(always)]
    pub(crate) fn send_state(&mut self) -> &mut SendState {
        &mut self.send
    }

    #[inline(always)]
    pub(crate) fn recv_state(&mut self) -> &mut RecvState {
        &mut self.recv
    }

    /// Aborts a forgotten batch.
    pub(crate) fn abort_sends(&mut self) {
        self.send.abort();
    }

    /// Moves the queue pair to the error state, which flushes all work in flight.
    #[cold]
    pub(crate) fn fail(&mut self) {
        // A forgotten batch holds a lock that some providers take in `ibv_modify_qp`.
        self.send.abort();
        self.core().fail();
        self.update_queue_states();
    }

    /// The context that the queue pair belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.core().context()
    }

    /// The protection domain that the queue pair belongs to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.core().pd()
    }

    pub(crate) fn core(&self) -> &Core {
        self.send.core()
    }

    /// The C object, valid while this queue pair or a flow to it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.core().as_raw()
    }

    /// Destroys the queue pair: `ibv_destroy_qp(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`] if the provider fails; the object and everything it depends on are then leaked.
    /// [`Error::PollInProgress`] if this thread has a cursor on one of its completion queues: it is destroyed when the
    /// cursor moves on or is dropped. [`Error::InUse`] if there are [`Flow`](crate::flow::Flow)s to it or memory windows of
    /// type 2 bound to it: it is destroyed with the last of them.
    #[doc(alias = "ibv_destroy_qp")]
    #[inline]
    pub fn destroy(mut self) -> Result<()> {
        // SAFETY: `self` is only dropped afterwards.
        unsafe { self.send.destroy() }
    }

    /// Like [`QueuePair::destroy`]. If the queue pair is not destroyed at once, it keeps `work`, whose memory the
    /// device may still access.
    #[inline]
    pub(crate) fn destroy_or_keep<W: Send + 'static>(mut self, work: impl FnOnce() -> W) -> Result<()> {
        // SAFETY: `self` is only dropped afterwards.
        unsafe { self.send.destroy_or_keep(work) }
    }
}

impl Core {
    /// Whether the C object is here: it was neither destroyed nor moved out.
    #[inline(always)]
    pub(crate) fn exists(&self) -> bool {
        self.object.exists()
    }

    /// See [`QueuePair::destroy_or_keep`].
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    #[inline]
    pub(crate) unsafe fn destroy_or_keep<W: Send + 'static>(&mut self, work: impl FnOnce() -> W) -> Result<()> {
        if self.object.has_users() {
            self.object.keep(work());
            // SAFETY: the caller's contract.
            return Err(unsafe { self.leave_to_users() });
        }
        let mut work = Some(work);
        let deferring = |parents: &Parents| parents.keep(work.take().map(|work| work()));
        // SAFETY: the caller's contract. No flow or memory window uses the queue pair.
        let Err(failure) = (unsafe { self.object.destroy_in_place(deferring) }) else { return Ok(()) };
        if let Some(work) = work {
            std::mem::forget(work());
        }
        Err(self.object.error(failure))
    }

    /// Gives up ownership of the C object, unless flows or memory windows use it.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    unsafe fn disown(&mut self) -> Result<NonNull<ibv_qp>> {
        // SAFETY: the caller's contract.
        unsafe {
            match self.object.has_users() {
                true => Err(self.leave_to_users()),
                false => Ok(self.object.take().disown()),
            }
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("number", &format_args!("{:#08x}", self.number()))
            .field("type", &self.qp_type())
            .field("state", &self.state())
            .field("extended", &self.is_extended())
            .finish_non_exhaustive()
    }
}

impl Core {
    pub(crate) fn context(&self) -> &Context {
        self.object.context()
    }

    /// The protection domain. Must not be called on the target of an XRC connection.
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        match &self.object.home {
            Home::Domain(pd) => pd,
            Home::Xrc(_) => unreachable!("an XRC target has no protection domain"),
        }
    }

    /// Keeps `what` until the queue pair is destroyed.
    pub(crate) fn keep(&self, what: impl Send + 'static) {
        self.object.keep(what);
    }

    fn extras(&self) -> MutexGuard<'_, Option<Box<Extras>>> {
        self.object.extras()
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_qp {
        self.object.as_raw()
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_qp> {
        self.object.raw()
    }

    /// Whether this thread has an open cursor, whose lock a reset may take.
    fn is_polled_by_this_thread(&self) -> bool {
        self.object.polled_by_this_thread().is_some()
    }

    pub(crate) fn qp_type(&self) -> QueuePairType {
        self.qp_type
    }

    pub(crate) fn capacity(&self) -> QueuePairCapacity {
        self.capacity
    }

    /// Whether it takes receives from a shared receive queue.
    pub(crate) fn has_srq(&self) -> bool {
        self.object.srq.is_some()
    }

    /// Moves the queue pair to the error state, which flushes all work in flight. If this fails, destroying the queue
    /// pair ends the work.
    #[cold]
    pub(crate) fn fail(&self) {
        let _ = self.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR));
    }

    #[inline(always)]
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    #[inline]
    pub(crate) fn state(&self) -> QueuePairState {
        QueuePairState(self.state.load(Ordering::Relaxed))
    }

    fn set_state(&self, state: QueuePairState) {
        self.state.store(state.0, Ordering::Relaxed);
    }

    /// Port set at INIT; 0 before.
    fn port(&self) -> u8 {
        self.port.load(Ordering::Relaxed)
    }

    fn set_port(&self, port: u8) {
        self.port.store(port, Ordering::Relaxed);
    }

    /// Reads attributes, and calls `done` while other threads cannot query.
    fn query(&self, done: impl FnOnce()) -> Result<QueuePairAttributes> {
        let mut attributes = QueuePairAttributes::new();
        let mask = AttributeMask::all() - AttributeMask::RATE_LIMIT;
        let mut init = ibv_qp_init_attr::zeroed();
        let _guard = self.extras();
        // SAFETY: the queue pair and both out pointers are valid.
        let result = unsafe {
            (self.context().verbs().ibv_query_qp)(
                self.as_raw(),
                &mut attributes.raw,
                mask.bits() as std::ffi::c_int,
                &mut init,
            )
        };
        check(result).map_err(|errno| self.error(Verb::QueryQp, errno))?;
        attributes.mask = mask;
        self.set_state(QueuePairState(attributes.raw.qp_state.0));
        done();
        Ok(attributes)
    }

    fn error(&self, verb: Verb, errno: crate::Errno) -> Error {
        self.context().verb_error(verb, errno)
    }
}

impl Parents {
    #[inline(always)]
    fn new(home: Home, cqs: [Option<Arc<cq::Shared>>; 2], srq: Option<Arc<srq::Shared>>) -> Self {
        Parents { home, cqs, srq, extras: Mutex::default() }
    }

    fn extras(&self) -> MutexGuard<'_, Option<Box<Extras>>> {
        self.extras.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline(always)]
    fn extras_mut(&mut self) -> &mut Option<Box<Extras>> {
        self.extras.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `what` until the queue pair is destroyed.
    fn keep(&self, what: impl Send + 'static) {
        self.extras().get_or_insert_default().retained.push(Box::new(what));
    }
}

impl object::Parents for Parents {
    type Raw = ibv_qp;

    const VERB: Verb = Verb::DestroyQp;

    fn context(&self) -> &Context {
        self.home.context()
    }

    #[inline(always)]
    fn polled_by_this_thread(&self) -> Option<&Arc<cq::Shared>> {
        self.cqs.iter().flatten().find(|cq| cq.is_polled_by_this_thread())
    }

    #[inline(always)]
    unsafe fn destroy(&mut self, raw: *mut ibv_qp) -> std::ffi::c_int {
        let Parents { home, extras, .. } = self;
        if let Some(extras) = extras.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // SAFETY: the caller's contract: the queue pair is valid until `ibv_destroy_qp`.
            unsafe { extras.groups.leave(home.context(), raw) };
        }
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_destroy_qp)(raw) }
    }
}
