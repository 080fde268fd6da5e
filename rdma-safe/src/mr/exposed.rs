//! Registered memory that peers may reach.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Region, RemoteMemory};
use crate::{Error, ProtectionDomain, Result, bounds};

/// Registered bytes that peers may read or write at any time, as the access given at registration says.
///
/// It never gives a slice: a peer's write would change bytes behind a `&[u8]`. Bytes are copied in and out by volatile
/// access, and 64-bit words can be read and changed atomically. What several bytes say together is the protocol's
/// business; a copy that races with a peer's write sees some bytes of the old and some of the new value.
///
/// Writing takes `&mut self`, so that two threads of this process do not race with each other. A write by the CPU is
/// atomic towards a peer's atomic operations only if the device says so (`atomic_cap`, `IBV_ATOMIC_GLOB`).
pub struct ExposedRegion {
    region: Arc<Region>,
}

impl ExposedRegion {
    pub(super) fn new(region: Arc<Region>) -> Self {
        ExposedRegion { region }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.region.len
    }

    /// Always `false`: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The domain it is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.region.registration.pd()
    }

    /// The kernel's handle, by which it can be imported: [`ProtectionDomain::import_mr`].
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.region.registration.handle()
    }

    /// The C object, valid while this region is.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_sys::ibv_mr {
        self.region.registration.as_raw()
    }

    /// What a peer needs to reach it. Give it to those you trust with the access of this region.
    #[must_use]
    #[inline]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: self.region.iova, len: self.region.len as u64, rkey: self.region.registration.rkey }
    }

    /// Copies bytes from `offset` on into `target`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let source = self.range(offset, target.len())?;
        let mut at = 0;
        while at < target.len() {
            // SAFETY: `range` found `offset..offset + target.len()` within the region, whose memory is initialised and
            // stays while `self` does; a word is read where it is aligned and ends within the range. Volatile, because a
            // peer may write at the same time. No thread of this process writes, since that takes `&mut self`.
            unsafe {
                let from = source.add(at);
                if is_word(from, target.len() - at) {
                    let word = from.cast::<u64>().read_volatile();
                    target[at..][..WORD].copy_from_slice(&word.to_ne_bytes());
                    at += WORD;
                } else {
                    target[at] = from.read_volatile();
                    at += 1;
                }
            }
        }
        Ok(())
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; nothing is copied.
    pub fn write(&mut self, offset: usize, source: &[u8]) -> Result<()> {
        let target = self.range(offset, source.len())?;
        let mut rest = source;
        while let Some((byte, behind)) = rest.split_first() {
            // SAFETY: as in `read`; `&mut self` keeps other threads of this process out.
            unsafe {
                let to = target.add(source.len() - rest.len());
                match rest.split_first_chunk::<WORD>() {
                    Some((word, behind)) if is_word(to, WORD) => {
                        to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word));
                        rest = behind;
                    }
                    _ => {
                        to.write_volatile(*byte);
                        rest = behind;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the 64-bit word at `offset`, in host byte order, with acquire ordering: what a peer wrote before it is
    /// seen by later reads, where the device keeps the order of its writes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Stores a 64-bit word at `offset`, in host byte order, with release ordering.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    #[inline]
    pub fn store_u64(&mut self, offset: usize, value: u64) -> Result<()> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn range(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        bounds::check(offset, len, self.region.len)?;
        // SAFETY: `offset` is at most the length of the region.
        Ok(unsafe { self.region.address.add(offset) })
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        let address = self.range(offset, size_of::<u64>())?;
        let align = align_of::<AtomicU64>();
        if address.addr().get() % align != 0 {
            return Err(Error::Misaligned { offset, align });
        }
        // SAFETY: eight initialised, aligned bytes within the region, which stays while `self` does. Threads of this
        // process access them by this function or, excluded by `&mut self`, by `write`.
        Ok(unsafe { address.cast::<AtomicU64>().as_ref() })
    }
}

/// Bytes that are copied at once where they can be.
const WORD: usize = size_of::<u64>();

/// Whether a whole, aligned word starts at `address`, of which `left` bytes are there.
#[inline]
fn is_word(address: NonNull<u8>, left: usize) -> bool {
    left >= WORD && address.addr().get() % align_of::<u64>() == 0
}

impl fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedRegion").field("address", &self.region.address).field("len", &self.len()).finish()
    }
}
