//! Registered memory with one owner.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Region;
use crate::{Access, Error, ProtectionDomain, Result};

/// Registered bytes with one owner: a whole region, or a part that nothing else overlaps.
///
/// It dereferences to its bytes. Posting it to an [`Endpoint`](crate::Endpoint) moves it into the queue, and its
/// completion returns it. Like a `Vec` it has a length and a capacity: a send uses `len` bytes, and a receive offers
/// `capacity` bytes and sets `len` to the length of the message. All bytes are initialised, so the length can be
/// changed freely. Unlike a `Vec`, a new buffer, and each part of a split one, has its capacity as its length: set the
/// length before a shorter send.
///
/// The region is deregistered, and its memory freed, when its last buffer is dropped.
///
/// A `Buffer` has the size of one pointer, so moving it is cheap.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// // One registration, split into a message and sixteen receives.
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
// The box is dropped only by `Drop` and `into_part`.
pub struct Buffer(ManuallyDrop<Box<Part>>);

/// A part of a region, with copies of everything that posting needs of the region.
///
/// The first three fields have the order of `struct ibv_sge`, so that they are copied together.
#[repr(C)]
pub(super) struct Part {
    address: NonNull<u8>,
    /// The capacity, limited to 32 bits.
    short_capacity: u32,
    lkey: u32,
    /// [`Buffer::gate_of`].
    gate: usize,
    len: usize,
    pub(super) capacity: usize,
    pub(super) region: Arc<Region>,
}

// SAFETY: a part has exclusive access to its bytes, like a `Box<[u8]>`. The region is `Send + Sync`.
unsafe impl Send for Part {}
// SAFETY: a shared reference gives only `&[u8]`.
unsafe impl Sync for Part {}

impl Buffer {
    pub(super) fn whole(region: Arc<Region>) -> Self {
        let (address, capacity) = (region.address, region.len);
        Buffer::part(region, address, capacity)
    }

    /// `capacity` bytes of the region from `address`, which must belong to no other part.
    pub(super) fn part(region: Arc<Region>, address: NonNull<u8>, capacity: usize) -> Self {
        let gate = Self::gate_of(region.registration.pd(), capacity);
        let (lkey, short_capacity) = (region.lkey(), u32::try_from(capacity).unwrap_or(u32::MAX));
        let part = Part { address, len: capacity, capacity, gate, lkey, short_capacity, region };
        Buffer::from_part(Box::new(part))
    }

    /// Makes this buffer `capacity` bytes from `address`. Both must be within the region, and belong to no other part.
    pub(super) fn set_range(&mut self, address: NonNull<u8>, capacity: usize) {
        let gate = Self::gate_of(self.pd(), capacity);
        let part = &mut **self.0;
        (part.address, part.len, part.capacity, part.gate) = (address, capacity, capacity, gate);
        part.short_capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
    }

    #[inline(always)]
    pub(super) fn from_part(part: Box<Part>) -> Self {
        Buffer(ManuallyDrop::new(part))
    }

    /// The buffer without its drop.
    #[inline(always)]
    pub(super) fn into_part(self) -> Box<Part> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped afterwards.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }

    /// The region.
    pub(super) fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// The region, to find out whether other parts of it exist.
    pub(super) fn region_mut(&mut self) -> &mut Arc<Region> {
        &mut self.0.region
    }

    /// The region of the dropped buffer.
    pub(super) fn into_region(self) -> Arc<Region> {
        self.into_part().region
    }

    /// Maximum length in bytes.
    #[must_use]
    #[inline]
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Sets the length to `len` bytes. Bytes beyond the old length keep their values.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when `len` exceeds the capacity; the length is then unchanged.
    #[inline(always)]
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.0.capacity {
            return Err(Error::OutOfBounds { offset: 0, len, region: self.0.capacity });
        }
        self.0.len = len;
        Ok(())
    }

    /// Like [`Buffer::set_len`], but limits the length to the capacity.
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

    /// Copies `bytes` to the start and sets the length to their number.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when they exceed the capacity; nothing is copied.
    pub fn fill_from(&mut self, bytes: &[u8]) -> Result<()> {
        self.set_len(bytes.len())?;
        self.copy_from_slice(bytes);
        Ok(())
    }

    /// Splits the buffer into parts of `size` bytes each. If a shorter part is left, it is dropped, and its pool gets it back.
    ///
    /// # Errors
    /// [`Error::PartSize`] when `size` is zero or exceeds the capacity.
    pub fn into_chunks(self, size: usize) -> Result<Vec<Buffer>> {
        if size == 0 || size > self.0.capacity {
            return Err(Error::PartSize { size, capacity: self.0.capacity });
        }
        let Part { address, capacity, region, .. } = *self.into_part();
        let count = capacity / size;
        // SAFETY: callers pass parts within the capacity that do not overlap, and `self`, which could reach all of them, is
        // consumed.
        let part = |at: usize, len: usize| Buffer::part(Arc::clone(&region), unsafe { address.add(at) }, len);
        if count * size < capacity {
            drop(part(count * size, capacity - count * size));
        }
        Ok((0..count).map(|index| part(index * size, size)).collect())
    }

    /// Splits the buffer in two, at `at` bytes of its capacity.
    ///
    /// # Errors
    /// [`Error::PartSize`] when either part would be empty.
    pub fn into_split(self, at: usize) -> Result<(Buffer, Buffer)> {
        if at == 0 || at >= self.0.capacity {
            return Err(Error::PartSize { size: at, capacity: self.0.capacity });
        }
        let Part { address, capacity, region, .. } = *self.into_part();
        // SAFETY: `at` is less than the capacity, and the first part ends there, so the parts do not overlap.
        let second = Buffer::part(Arc::clone(&region), unsafe { address.add(at) }, capacity - at);
        Ok((Buffer::part(region, address, at), second))
    }

    /// The domain it is registered in.
    #[must_use]
    #[inline]
    pub fn pd(&self) -> &ProtectionDomain {
        self.0.region.registration.pd()
    }

    /// The C object of the buffer's region, valid while any buffer of that region exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_sys::ibv_mr {
        self.0.region.registration.as_raw()
    }

    /// Local key, for the raw API.
    #[must_use]
    #[inline(always)]
    pub fn lkey(&self) -> u32 {
        self.0.lkey
    }

    /// Address of the first byte, for the raw API.
    ///
    /// The contract of [`SendBatch`](crate::SendBatch) forbids posting it while this buffer is read or written.
    #[must_use]
    #[inline(always)]
    pub fn address(&self) -> u64 {
        self.0.address.as_ptr() as u64
    }

    /// Address of the first byte.
    pub(super) fn address_ptr(&self) -> NonNull<u8> {
        self.0.address
    }

    /// The access that its region was registered with.
    pub(super) fn access(&self) -> Access {
        self.0.region.registration.access
    }

    /// The address of the byte at `offset`, which must be within the capacity. Accesses no memory.
    pub(crate) fn as_ptr_of(&self, offset: usize) -> *const u8 {
        debug_assert!(offset <= self.0.capacity);
        self.0.address.as_ptr().wrapping_add(offset)
    }

    /// The bytes up to the length, at most 4 GiB - 1, as a scatter/gather element for the raw API.
    #[must_use]
    #[inline(always)]
    pub fn sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: u32::try_from(self.0.len).unwrap_or(u32::MAX), lkey: self.lkey() }
    }

    /// Like [`Buffer::sge`], for a length of at most 32 bits.
    #[inline(always)]
    pub(crate) fn short_sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: self.0.len as u32, lkey: self.lkey() }
    }

    /// Like [`Buffer::short_sge`], for the bytes up to the capacity, limited to 32 bits.
    #[inline(always)]
    pub(crate) fn short_whole_sge(&self) -> crate::Sge {
        crate::Sge { address: self.address(), len: self.0.short_capacity, lkey: self.lkey() }
    }

    /// The memory of a receive for messages of at most `max` bytes.
    pub(crate) fn whole_sge(&self, max: u32) -> crate::Sge {
        crate::Sge { len: self.0.short_capacity.min(max), ..self.sge() }
    }
}

impl Drop for Buffer {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken only here, because `into_part` prevents this call.
        let part = unsafe { ManuallyDrop::take(&mut self.0) };
        let take_back = part.region.take_back;
        // SAFETY: `Region::new` made it for the type of the backing.
        unsafe { take_back(part) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` bytes from `address` are allocated and initialised (`Backing`), and belong to this
        // buffer alone. The device does not write to them, because the buffer is in no queue.
        unsafe { std::slice::from_raw_parts(self.0.address.as_ptr(), self.0.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`. The device does not read them either.
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
