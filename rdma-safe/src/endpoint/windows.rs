//! Memory windows of endpoints: bound, invalidated and released by work of one connection.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use super::{Endpoint, EndpointMut, Operation, Poster, WorkId};
use crate::interface::Interface;
use crate::mw::{BindInfo, MemoryWindow, Type2};
use crate::qp::QpId;
use crate::{PostError, ProtectionDomain, RemoteMemory, Result};

/// A part of a region that is open to the peer of one endpoint, with a separate key.
///
/// Made by [`Endpoint::bind_window`] and [`EndpointMut::bind_window`]. Send [`BoundWindow::remote`] to the peer, which reads
/// and writes within the rights of the [`BindInfo`]. On most devices, no other connection can use the key. The access ends
/// - when a completion reports [`Operation::InvalidateWindow`], after [`Endpoint::invalidate_window`],
/// - when the peer has sent [`Work::send_invalidate`](crate::Work::send_invalidate) with the key, which the receive reports in
///   [`Completion::invalidated_rkey`](crate::Completion::invalidated_rkey) (the kernel's rxe does not report it, so there the
///   endpoint keeps the window until it is closed), or
/// - when the endpoint is closed, dropped or removed from its set.
///
/// The endpoint owns the window and keeps the region registered until then, even if the [`ExposedRegion`] is dropped.
/// Dropping this value changes nothing: the window stays bound as long as the endpoint exists.
///
/// The endpoint needs the access of the window, too: [`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access).
///
/// [`ExposedRegion`]: crate::ExposedRegion
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::mr::Pages;
/// use rdma_safe::{Access, Device, Endpoint, Operation};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let region = pd.expose(Pages::new(4096)?, Access::MW_BIND)?; // no remote access but by windows
/// let mut owner = Endpoint::builder(&pd).peer_access(Access::REMOTE_WRITE).build()?;
/// // The peer would be on another host.
/// let mut peer = Endpoint::builder(&pd).build()?;
/// owner.connect(&peer.address())?;
/// peer.connect(&owner.address())?;
///
/// let window = owner.bind_window(region.bind_info(1024, 16, Access::REMOTE_WRITE)?)?;
/// let bound = owner.wait(Duration::from_secs(60))?.ok()?;
/// assert_eq!((bound.operation, bound.id), (Operation::BindWindow, window.work_id()));
///
/// let mut buffer = pd.allocate(16)?;
/// buffer.fill_from(b"within 16 bytes.")?;
/// peer.write(buffer, window.remote())?;
/// let _ = peer.wait(Duration::from_secs(60))?.ok()?;
///
/// owner.invalidate_window(window)?;
/// let revoked = owner.wait(Duration::from_secs(60))?.ok()?;
/// assert_eq!(revoked.operation, Operation::InvalidateWindow); // the peer's next write fails
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
#[must_use = "the window stays bound until it is invalidated or its endpoint is dropped"]
pub struct BoundWindow {
    qp: QpId,
    slot: u32,
    remote: RemoteMemory,
    /// The work that binds the window. Unique among the bindings of the endpoint.
    work: WorkId,
}

/// A window that was not invalidated.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct RejectedWindow {
    /// Reason for the rejection.
    pub error: PostError,
    /// The window, bound or not as before.
    pub window: BoundWindow,
}

/// The windows of an endpoint.
#[derive(Default)]
pub(super) struct Windows {
    slots: Vec<Slot>,
    /// The first unbound slot, for further bindings. The others are linked, so that polling never allocates.
    free: Option<u32>,
    /// Slots by the part of the key that bindings do not change.
    by_key: HashMap<u32, u32>,
    /// Bindings and invalidations in flight, in the order of posting.
    in_flight: VecDeque<InFlight>,
}

struct Slot {
    window: MemoryWindow<Type2>,
    /// The work of the last binding.
    binding: u64,
    state: State,
    /// The next unbound slot, if this one is unbound.
    next_free: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// The binding is in flight.
    Binding,
    Bound,
    /// The invalidation is in flight, and possibly the binding before it.
    Invalidating,
    /// Work has failed, and with it the connection. Never bound again.
    Failed,
}

/// Work on a window.
struct InFlight {
    /// Sequence number in the ring of sends.
    sequence: u64,
    slot: u32,
    /// The binding that the work makes or ends.
    binding: u64,
}

impl BoundWindow {
    /// Address and key for the peer. The key grants no access until the binding has completed.
    ///
    /// Later sends of the same endpoint may carry it, since they start after the binding.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        self.remote
    }

    /// Identifier of the work that binds the window.
    #[must_use]
    pub fn work_id(&self) -> WorkId {
        self.work
    }
}

impl Windows {
    /// Takes an unbound window, or allocates one.
    fn take_free(&mut self, pd: &ProtectionDomain) -> Result<u32> {
        if let Some(index) = self.free {
            self.free = self.slots.get_mut(index as usize).and_then(|slot| slot.next_free.take());
            return Ok(index);
        }
        let window = pd.memory_window::<Type2>()?;
        // A device has fewer windows than keys, which have 24 bits without the part that bindings change.
        let slot = self.slots.len() as u32;
        self.by_key.insert(fixed_part(window.rkey()), slot);
        self.slots.push(Slot { window, binding: 0, state: State::Free, next_free: None });
        Ok(slot)
    }

    /// Whether the window is bound, or its binding is in flight.
    fn is_bound(&self, window: &BoundWindow) -> bool {
        let slot = self.slots.get(window.slot as usize);
        slot.is_some_and(|slot| slot.binding == window.work.0 && matches!(slot.state, State::Binding | State::Bound))
    }

    /// Records the completion of a send, which may be work on a window.
    pub(super) fn completed(&mut self, sequence: u64, succeeded: bool) {
        let Some(work) = self.in_flight.front().filter(|work| work.sequence == sequence) else { return };
        let InFlight { sequence, slot: index, binding } = *work;
        self.in_flight.pop_front();
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        if slot.binding != binding || !matches!(slot.state, State::Binding | State::Invalidating) {
            // The peer has released the window in the meantime.
            return;
        }
        match (sequence == binding, succeeded) {
            (_, false) => slot.state = State::Failed,
            (true, true) => {
                slot.window.confirm();
                if slot.state == State::Binding {
                    slot.state = State::Bound;
                }
            }
            (false, true) => self.release(index),
        }
    }

    /// Records that the peer has invalidated a key.
    pub(super) fn invalidated_by_peer(&mut self, rkey: u32) {
        let Some(&index) = self.by_key.get(&fixed_part(rkey)) else { return };
        let Some(slot) = self.slots.get(index as usize) else { return };
        if slot.window.rkey() == rkey && matches!(slot.state, State::Binding | State::Bound | State::Invalidating) {
            self.release(index);
        }
    }

    /// Makes an invalidated window available for another binding.
    fn release(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.window.invalidated();
        // SAFETY: bindings are confirmed and windows invalidated only here and in `completed`, when the device has reported
        // it: by the completion of the work, whose place in the ring is checked, or by a receive that names the current key.
        // `revert` is called only for work that the provider has surely not taken.
        unsafe { slot.window.release_unused_regions() }
        slot.state = State::Free;
        slot.next_free = self.free.replace(index);
    }
}

/// The part of a key that bindings do not change: `ibv_inc_rkey` changes the low 8 bits.
fn fixed_part(rkey: u32) -> u32 {
    rkey >> 8
}

impl<I: Interface> Poster<I> {
    /// Implements [`Endpoint::bind_window`].
    #[inline(never)]
    fn bind_window(&mut self, info: BindInfo<'_>) -> Result<BoundWindow> {
        // Taken out, because a batch borrows the whole poster.
        let mut windows = self.live.windows.take().unwrap_or_default();
        let bound = self.bind_one_of(&mut windows, info);
        self.live.windows = Some(windows);
        bound
    }

    fn bind_one_of(&mut self, windows: &mut Windows, info: BindInfo<'_>) -> Result<BoundWindow> {
        let index = windows.take_free(&self.pd)?;
        let slot = &mut windows.slots[index as usize];
        let window = &mut slot.window;
        let (posted, added) = match self.batch() {
            Ok(mut batch) => {
                // SAFETY: `window` is borrowed until the batch is posted or dropped, which happens right here.
                let bind = |raw: &mut crate::SendBatch<'_>, wr| unsafe { raw.bind(wr, window, info) };
                match batch.add_window_work(Operation::BindWindow, bind) {
                    Ok(added) => (batch.post().map_err(|unposted| unposted.error), Some(added)),
                    Err(error) => (Err(error), None),
                }
            }
            Err(error) => (Err(error), None),
        };
        match (posted, added) {
            (Ok(()), Some((work, remote))) => {
                (slot.binding, slot.state) = (work.0, State::Binding);
                windows.in_flight.push_back(InFlight { sequence: work.0, slot: index, binding: work.0 });
                Ok(BoundWindow { qp: self.live.qp.id(), slot: index, remote, work })
            }
            (posted, added) => {
                if added.is_some() && self.poisoned {
                    // The provider may have taken the work, so the window stays as it is until the endpoint is dropped.
                    slot.state = State::Failed;
                } else {
                    slot.window.revert();
                    slot.next_free = windows.free.replace(index);
                }
                Err(posted.err().unwrap_or(PostError::EndpointFailed).into())
            }
        }
    }

    /// Implements [`Endpoint::invalidate_window`].
    #[inline(never)]
    fn invalidate_window(&mut self, window: BoundWindow) -> Result<WorkId, RejectedWindow> {
        if window.qp != self.live.qp.id() {
            return Err(RejectedWindow { error: PostError::ForeignWindow, window });
        }
        match self.try_invalidate_window(&window) {
            Ok(work) => Ok(work),
            Err(error) => Err(RejectedWindow { error, window }),
        }
    }

    fn try_invalidate_window(&mut self, window: &BoundWindow) -> Result<WorkId, PostError> {
        if !self.is_window_bound(window) {
            return Err(PostError::NotBound);
        }
        let mut batch = self.batch()?;
        let rkey = window.remote.rkey;
        let (work, ()) = batch.add_window_work(Operation::InvalidateWindow, |raw, wr| raw.invalidate(wr, rkey))?;
        batch.post().map_err(|unposted| unposted.error)?;
        if let Some(windows) = self.live.windows.as_deref_mut() {
            let invalidation = InFlight { sequence: work.0, slot: window.slot, binding: window.work.0 };
            windows.in_flight.push_back(invalidation);
            if let Some(slot) = windows.slots.get_mut(window.slot as usize) {
                slot.state = State::Invalidating;
            }
        }
        Ok(work)
    }

    fn is_window_bound(&self, window: &BoundWindow) -> bool {
        window.qp == self.live.qp.id() && self.live.windows.as_deref().is_some_and(|windows| windows.is_bound(window))
    }
}

impl<I: Interface> Endpoint<I> {
    /// Posts work that opens a part of a region to the peer, and only to it: `ibv_wr_bind_mw`.
    ///
    /// It completes with [`Operation::BindWindow`], in order with sends, and takes the room of one. The endpoint allocates a
    /// memory window unless it has one that was released, so that a binding seldom takes a system call.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the device lacks windows of type 2;
    /// [`Error::Verb`](crate::Error::Verb) if it has no more of them; [`Error::Post`](crate::Error::Post) with
    /// [`PostError::NotReady`] before [`connect`](Self::connect), [`PostError::NotEnabled`] if the queue pair cannot bind
    /// windows, [`PostError::EndpointFull`], [`PostError::ForeignDomain`], and those of [`post`](Self::post). Nothing is then
    /// open to the peer, except after [`PostError::MaybePosted`], which ends the connection.
    #[doc(alias = "ibv_wr_bind_mw")]
    pub fn bind_window(&mut self, info: BindInfo<'_>) -> Result<BoundWindow> {
        self.poster.bind_window(info)
    }

    /// Posts work that ends the access of the peer through a window: `ibv_wr_local_inv`.
    ///
    /// The access has ended when the work completes with [`Operation::InvalidateWindow`]. The peer's accesses then fail with
    /// [`WcStatus::REM_ACCESS_ERR`](crate::WcStatus::REM_ACCESS_ERR), which ends its connection, but no other.
    ///
    /// If the peer releases the window at the same time by [`Work::send_invalidate`](crate::Work::send_invalidate), one of the
    /// two fails and ends the connection. Let the protocol decide which side ends a window.
    ///
    /// # Errors
    /// [`RejectedWindow`] returns the window: [`PostError::ForeignWindow`] if another endpoint has bound it;
    /// [`PostError::NotBound`] if its binding has failed, or the peer has released it; those of [`post`](Self::post).
    #[doc(alias = "ibv_wr_local_inv")]
    pub fn invalidate_window(&mut self, window: BoundWindow) -> Result<WorkId, RejectedWindow> {
        self.poster.invalidate_window(window)
    }

    /// Whether this endpoint has bound the window, and has polled no completion that ends or fails the binding.
    #[must_use]
    pub fn is_window_bound(&self, window: &BoundWindow) -> bool {
        self.poster.is_window_bound(window)
    }
}

impl EndpointMut<'_> {
    /// Posts work that opens a part of a region to the peer, and only to it:
    /// [`Endpoint::bind_window`](crate::Endpoint::bind_window).
    ///
    /// # Errors
    /// Those of [`Endpoint::bind_window`](crate::Endpoint::bind_window).
    pub fn bind_window(&mut self, info: BindInfo<'_>) -> Result<BoundWindow> {
        self.with_poster(|poster| poster.bind_window(info))
    }

    /// Posts work that ends the access of the peer through a window:
    /// [`Endpoint::invalidate_window`](crate::Endpoint::invalidate_window).
    ///
    /// # Errors
    /// Those of [`Endpoint::invalidate_window`](crate::Endpoint::invalidate_window).
    pub fn invalidate_window(&mut self, window: BoundWindow) -> Result<WorkId, RejectedWindow> {
        self.with_poster(|poster| poster.invalidate_window(window))
    }

    /// Whether this endpoint has bound the window:
    /// [`Endpoint::is_window_bound`](crate::Endpoint::is_window_bound).
    #[must_use]
    pub fn is_window_bound(&self, window: &BoundWindow) -> bool {
        self.poster.is_window_bound(window)
    }
}

impl From<RejectedWindow> for crate::Error {
    /// Drops the window, which stays as it was.
    fn from(rejected: RejectedWindow) -> Self {
        rejected.error.into()
    }
}

impl fmt::Debug for BoundWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundWindow").field("remote", &self.remote).field("work", &self.work).finish_non_exhaustive()
    }
}
