//! Registered memory of a worker.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use anyhow::Result;
use rdma_safe::mr::{Backing, HugePages, Pages};
use rdma_safe::{Access, ProtectionDomain, RawMemoryRegion, Remote, RemoteMemory, Sge, UdTarget};

use super::datagram::Destination;
use crate::plan::layout::Layout;
use crate::plan::{Plan, Role, Verb};

/// Registered memory, divided into one buffer per queue pair.
///
/// A worker has as few regions as access rights allow, because a device looks up a region by its key, and fewer keys
/// are looked up faster.
pub(super) struct Region {
    /// Taken on drop.
    region: Option<RawMemoryRegion>,
    memory: ManuallyDrop<Box<dyn Backing>>,
    buffer: u64,
    lkey: u32,
    rkey: u32,
    address: u64,
}

impl Drop for Region {
    fn drop(&mut self) {
        // If deregistration fails, the device may still use the memory, so it is leaked.
        if self.region.take().is_some_and(|region| region.deregister().is_ok()) {
            // SAFETY: dropped only here and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

impl Region {
    fn new(pd: &ProtectionDomain, plan: &Plan, buffer: u64, access: Access) -> Result<Self> {
        let len = usize::try_from(buffer * u64::from(plan.qps))?;
        let memory: Box<dyn Backing> =
            if plan.huge_pages { Box::new(HugePages::new(len)?) } else { Box::new(Pages::new(len)?) };
        // SAFETY: the memory is freed only after the region was deregistered successfully: see `drop`. `Buffer` gives
        // out raw pointers. References are made only to the source buffer of plans that send inline, which no device
        // writes to.
        let region = unsafe { pd.register_raw(memory.address().as_ptr(), len, access)? };
        let (lkey, rkey, address) = (region.lkey(), region.rkey(), region.address());
        Ok(Region { region: Some(region), memory: ManuallyDrop::new(memory), buffer, lkey, rkey, address })
    }

    /// `len` bytes at `offset` of buffer number `index`.
    fn buffer(&self, index: usize, offset: u64, len: u64) -> Buffer {
        let offset = index as u64 * self.buffer + offset;
        // SAFETY: the memory holds one buffer of this length per queue pair.
        let base = unsafe { self.memory.address().add(offset as usize) };
        Buffer { base, address: self.address + offset, len, lkey: self.lkey, rkey: self.rkey }
    }
}

/// Memory of all queue pairs of a worker.
pub(super) enum Regions {
    /// One region for tests of sends, which give the peer no remote access.
    One(Region),
    /// The source and the target, which the peer can access. An end has only the regions that it uses.
    Two(Option<Region>, Option<Region>),
}

impl Regions {
    pub(super) fn new(pd: &ProtectionDomain, plan: &Plan, role: Role, layout: &Layout) -> Result<Self> {
        if plan.verb == Verb::Send {
            let buffer = layout.send_area + layout.target_area;
            return Ok(Regions::One(Region::new(pd, plan, buffer, Access::LOCAL_WRITE)?));
        }
        let region = |buffer, access| Region::new(pd, plan, buffer, access);
        let source = plan.sends(role).then(|| region(layout.send_area, Access::LOCAL_WRITE));
        let target = plan.is_sent_to(role).then(|| region(layout.target_area, Access::LOCAL_WRITE | Access::REMOTE));
        Ok(Regions::Two(source.transpose()?, target.transpose()?))
    }

    /// Source and target of queue pair number `index`.
    pub(super) fn buffers(&self, index: usize, layout: &Layout) -> (Buffer, Buffer) {
        let (sends, targets) = (layout.send_area, layout.target_area);
        match self {
            Regions::One(region) => (region.buffer(index, 0, sends), region.buffer(index, sends, targets)),
            Regions::Two(source, target) => {
                let buffer = |region: &Option<Region>, len| {
                    region.as_ref().map_or(Buffer::NONE, |region| region.buffer(index, 0, len))
                };
                (buffer(source, sends), buffer(target, targets))
            }
        }
    }
}

/// Memory of one queue pair for one purpose.
pub(crate) struct Buffer {
    base: NonNull<u8>,
    address: u64,
    len: u64,
    lkey: u32,
    rkey: u32,
}

// SAFETY: plain memory of the worker, which moves to a thread as a whole.
unsafe impl Send for Buffer {}

impl Buffer {
    /// A buffer without memory.
    const NONE: Buffer = Buffer { base: NonNull::dangling(), address: 0, len: 0, lkey: 0, rkey: 0 };

    /// `size` bytes at `offset`.
    #[inline]
    pub(crate) fn sge(&self, offset: u64, size: u64) -> Sge {
        Sge { address: self.address + offset, len: size as u32, lkey: self.lkey }
    }

    /// Pointer to the byte at `offset`, valid as long as the worker.
    ///
    /// # Panics
    /// If `offset` is outside of the buffer.
    #[inline]
    pub(crate) fn byte(&self, offset: u64) -> *mut u8 {
        assert!(offset < self.len);
        // SAFETY: `offset` is within this buffer.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}

/// Memory of one queue pair, and the peer's memory that it accesses.
pub(crate) struct LaneMemory {
    /// Memory to send, or to read into. No other end writes to it.
    pub(crate) source: Buffer,
    /// Memory for receives, and for writes, reads and atomics of the peer.
    pub(crate) target: Buffer,
    pub(super) layout: Layout,
    /// The peer's target; empty until connected.
    pub(super) remote: RemoteMemory,
    /// The peer's address for datagrams; `None` until connected, and for other transports.
    pub(super) destination: Option<Destination>,
}

impl LaneMemory {
    pub(super) fn exposed_target(&self) -> RemoteMemory {
        RemoteMemory { address: self.target.address, len: self.target.len, rkey: self.target.rkey }
    }

    /// The peer's memory for a message at `offset`.
    #[inline]
    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.remote.address.wrapping_add(offset), rkey: self.remote.rkey }
    }

    /// The peer's address for a datagram.
    #[inline(always)]
    pub(crate) fn ud_target(&self) -> Option<UdTarget<'_>> {
        self.destination.as_ref().map(Destination::target)
    }

    /// Offset of receive number `index` in the target.
    #[inline]
    pub(crate) fn receive_offset(&self, index: u64) -> u64 {
        index % self.layout.receive_slots * self.layout.receive_len
    }

    /// Memory of receive number `index`.
    #[inline]
    pub(crate) fn receive_sge(&self, index: u64) -> Sge {
        self.target.sge(self.receive_offset(index), self.layout.receive_len)
    }
}
