//! Registered memory of one owner.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Region;
use crate::{Error, ProtectionDomain, Result};

/// Registered bytes with one owner: a whole region, or a part of one that nothing else overlaps.
///
/// It derefs to its bytes. Handing it to an [`Endpoint`](crate::Endpoint) moves it into the queue; it comes back with
/// its completion. As a `Vec` it has a length within a capacity: a send takes `len` bytes, a receive offers `capacity`
/// bytes and sets `len` to what arrived. All bytes are initialised, so the length may be set freely. Unlike that of a `Vec`, the
/// length of a new buffer, and of each part of one that is cut, is its capacity: set it before a shorter send.
///
/// The region is deregistered, and its memory freed, when the last buffer of it is dropped.
///
/// It is one pointer in size, so that handing it over and back costs next to nothing.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// // One registration, cut into a message and sixteen receives.
/// let (mut message, rest) = pd.allocate(64 + 16 * 4096)?.into_split(64)?;
/// let receives = rest.into_chunks(4096)?;
/// assert_eq!((receives.len(), receives[0].capacity()), (16, 4096));
///
/// message.fill_from(b"hello")?; // sets the length, too
/// assert_eq!((&message[..], message.capacity()), (&b"hello"[..], 64));
/// message[0] = b'j';
///
/// message.set_len(64)?; // the bytes beyond the message are zero
/// assert_eq!(&message[..8], b"jello\0\0\0");
/// assert!(message.set_len(65).is_err());
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub struct Buffer(Box<Part>);

/// A part of a region. What posting needs of the region is here, so that there is one place to look at. The first three are in
/// the order of `struct ibv_sge`, to be copied at once.
#[repr(C)]
struct Part {
    address: NonNull<u8>,
    /// The capacity, or as much of it as 32 bits can say.
    short_capacity: u32,
    lkey: u32,
    /// [`Buffer::gate_of`].
    gate: usize,
    len: usize,
    capacity: usize,
    region: Arc<Region>,
}

// SAFETY: a part is the only way to its bytes, like a `Box<[u8]>`; the region is `Send + Sync`.
unsafe impl Send for Part {}
// SAFETY: a shared reference gives only `&[u8]`.
unsafe impl Sync for Part {}

impl Buffer {
    pub(super) fn whole(region: Arc<Region>) -> Self {
        let (address, capacity) = (region.address, region.len);
        Buffer::part(region, address, capacity)
    }

    /// `capacity` bytes of the region from `address`, which are nobody else's.
    fn part(region: Arc<Region>, address: NonNull<u8>, capacity: usize) -> Self {
        let gate = Self::gate_of(region.registration.pd(), capacity);
        let (lkey, short_capacity) = (region.lkey(), u32::try_from(capacity).unwrap_or(u32::MAX));
        Buffer(Box::new(Part { address, len: capacity, capacity, gate, lkey, short_capacity, region }))
    }

    /// Bytes that it can hold.
    #[must_use]
    #[inline]
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Sets the length to `len` bytes. Bytes that come into view are whatever was there before.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when it exceeds the capacity; the length stays.
    #[inline(always)]
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.0.capacity {
            return Err(Error::OutOfBounds { offset: 0, len, region: self.0.capacity });
        }
        self.0.len = len;
        Ok(())
    }

    /// As [`Buffer::set_len`], with the capacity as the most.
    #[inline(always)]
    pub(crate) fn set_len_within(&mut self, len: u32) {
        self.0.len = len.min(self.0.short_capacity) as usize;
    }

    /// See [`Buffer::gate_of`].
    #[inline(always)]
    pub(crate) fn gate(&self) -> usize {
        self.0.gate
    }

    /// Whether it is registered in `pd`.
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.0.region.registration.is_of(pd)
    }

    /// Copies `bytes` to the start and sets the length to theirs.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when they exceed the capacity; nothing is copied.
    pub fn fill_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.set_len(bytes.len())?;
        self.copy_from_slice(bytes);
        Ok(())
    }

    /// Cuts it into parts of `size` bytes each; what is left over, less than `size`, stays unused in the region.
    ///
    /// # Errors
    /// [`Error::PartSize`] when `size` is zero or exceeds the capacity.
    pub fn into_chunks(self, size: usize) -> Result<Vec<Buffer>> {
        if size == 0 || size > self.0.capacity {
            return Err(Error::PartSize { size, capacity: self.0.capacity });
        }
        let Part { address, capacity, ref region, .. } = *self.0;
        // SAFETY: `index * size + size` is at most the capacity, so the part lies within this buffer. The parts do not
        // overlap, and `self`, which could reach all of them, is consumed.
        let part = |index: usize| Buffer::part(Arc::clone(region), unsafe { address.add(index * size) }, size);
        Ok((0..capacity / size).map(part).collect())
    }

    /// Splits it in two at `at` bytes of its capacity.
    ///
    /// # Errors
    /// [`Error::PartSize`] when either part would be empty.
    pub fn into_split(self, at: usize) -> Result<(Buffer, Buffer)> {
        if at == 0 || at >= self.0.capacity {
            return Err(Error::PartSize { size: at, capacity: self.0.capacity });
        }
        let Part { address, capacity, ref region, .. } = *self.0;
        // SAFETY: `at` is less than the capacity, and `self` ends there now, so the two do not overlap.
        let second = Buffer::part(Arc::clone(region), unsafe { address.add(at) }, capacity - at);
        Ok((Buffer::part(Arc::clone(region), address, at), second))
    }

    /// The domain it is registered in.
    #[must_use]
    #[inline]
    pub fn pd(&self) -> &ProtectionDomain {
        self.0.region.registration.pd()
    }

    /// The C object of the region that it is of, valid while any buffer of that is.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_sys::ibv_mr {
        self.0.region.registration.as_raw()
    }

    /// Local key, for the raw door.
    #[must_use]
    #[inline(always)]
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }

    /// Address of the first byte, for the raw door.
    ///
    /// Posting it there while this buffer is read or written is what the contract of
    /// [`SendBatch`](crate::SendBatch) forbids.
    #[must_use]
    #[inline(always)]
    pub fn address(&self) -> u64 {
        self.0.address.as_ptr() as u64
    }

    /// The address of the byte at `offset`, without a look at it or any other; within the capacity.
    pub(crate) fn as_ptr_of(&self, offset: usize) -> *const u8 {
        debug_assert!(offset <= self.0.capacity);
        self.0.address.as_ptr().wrapping_add(offset)
    }

    /// The bytes up to the length, at most 4 GiB - 1, as a scatter/gather element for the raw door.
    #[must_use]
    #[inline(always)]
    pub fn sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: u32::try_from(self.0.len).unwrap_or(u32::MAX), lkey: self.lkey() }
    }

    /// As [`Buffer::sge`], of one whose length has 32 bits.
    #[inline(always)]
    pub(crate) fn short_sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: self.0.len as u32, lkey: self.lkey() }
    }

    /// The same up to the capacity, or as much of it as 32 bits can say.
    #[inline(always)]
    pub(crate) fn short_whole_sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: self.0.short_capacity, lkey: self.lkey() }
    }

    /// What a receive may fill, of a message of at most `max` bytes.
    pub(crate) fn whole_sge(&self, max: u32) -> crate::Sge {
        crate::Sge { len: self.0.short_capacity.min(max), ..self.sge() }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` bytes from `address` are allocated and initialised (`Backing`), and belong to this
        // buffer alone; the device does not write them while the buffer is here and not in a queue.
        unsafe { std::slice::from_raw_parts(self.0.address.as_ptr(), self.0.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the device does not read them either.
        unsafe { std::slice::from_raw_parts_mut(self.0.address.as_ptr(), self.0.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("address", &self.0.address)
            .field("len", &self.0.len)
            .field("capacity", &self.0.capacity)
            .field("lkey", &format_args!("{:#x}", self.lkey()))
            .finish()
    }
}
