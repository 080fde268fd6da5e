//! Registered bytes that do not change, with any number of owners.

use std::any::type_name;
use std::fmt;
use std::ops::{Bound, Deref, RangeBounds};
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Backing, Buffer, ReclaimError, ReclaimReason, Region, RegisterError, RegistrationBuilder};
use crate::{Access, Error, ProtectionDomain, Result, Sge, bounds};

/// Bytes that do not change. [`ProtectionDomain::share`] registers them for local reads, and
/// [`ProtectionDomain::expose_read_only`] for reads of peers.
///
/// `Vec<u8>`, `Box<[u8]>`, `String`, `&'static [u8]`, `Arc<[u8]>`, `Arc<Vec<u8>>` and [`SharedBuffer`] implement it, and so do
/// `bytes::Bytes` (feature `bytes`) and `memmap2::Mmap` (feature `memmap2`).
///
/// # Safety
///
/// For as long as the value exists, even if it is moved, `bytes` must return the same slice, and its bytes must stay initialised
/// and unchanged. If dropping the value panics, the process may be aborted.
#[diagnostic::on_unimplemented(
    note = "`bytes::Bytes` needs the feature `bytes` of rdma-safe, `memmap2::Mmap` the feature `memmap2`"
)]
pub unsafe trait ReadOnly: Send + Sync + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

macro_rules! read_only {
    ($($type:ty),+) => {
        $(
            // SAFETY: the bytes are outside of the value, and cannot be changed through a shared reference to it.
            unsafe impl ReadOnly for $type {
                fn bytes(&self) -> &[u8] {
                    self.as_ref()
                }
            }
        )+
    };
}

read_only!(Vec<u8>, Box<[u8]>, String, &'static [u8], Arc<[u8]>, Arc<Vec<u8>>);

#[cfg(feature = "bytes")]
read_only!(bytes::Bytes);

// SAFETY: the mapping stays where it is until the value is dropped, and cannot be changed through it. The caller of
// memmap2's `unsafe` function guarantees that no other process changes or truncates the file.
#[cfg(feature = "memmap2")]
unsafe impl ReadOnly for memmap2::Mmap {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: as above. The `Arc` refers to the mapping.
#[cfg(feature = "memmap2")]
unsafe impl ReadOnly for Arc<memmap2::Mmap> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: as long as a `SharedBuffer` exists, its bytes stay where they are, initialised and unchanged. Its clones and slices count
// as owners, so that nobody gets the buffer back meanwhile.
unsafe impl ReadOnly for SharedBuffer {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// What a region keeps of memory that is not written.
pub(super) struct ReadOnlyBacking<M>(pub(super) M);

// SAFETY: one initialised slice that does not move as long as the value exists, by the contract of `ReadOnly`. This type deviates
// from the contract of `Backing` in that the memory may have shared references and may not be writable. Only `share` and
// `expose_read_only` make it: the region has no write access. The `Buffer` that covers it is in a `SharedBuffer`, which never lends
// or returns it mutably, or there is none.
unsafe impl<M: ReadOnly> Backing for ReadOnlyBacking<M> {
    fn address(&self) -> NonNull<u8> {
        NonNull::from(self.0.bytes()).cast()
    }

    fn len(&self) -> usize {
        self.0.bytes().len()
    }
}

/// Registered bytes that do not change, or a part of them, with any number of owners.
///
/// Clones and [slices](SharedBuffer::slice) refer to the same memory and allocate nothing. They can be posted to several endpoints
/// at the same time, and dropped while others are in flight. The memory is deregistered and freed
/// after the last of them is dropped and the last work with them has completed.
///
/// [`ProtectionDomain::share`] makes it of memory of the program, such as `Bytes`, and [`Buffer::freeze`] of a buffer.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// let payload = pd.share("hello world".to_owned())?;
/// let word = payload.slice(6..)?;
/// assert_eq!(&word[..], b"world");
///
/// let error = payload.into_memory::<String>().unwrap_err();
/// drop(word);
/// assert_eq!(error.part.unwrap().into_memory::<String>()?, "hello world");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
#[derive(Clone)]
pub struct SharedBuffer {
    /// Never lent mutably. Its bytes are not changed while it is shared.
    of: Arc<Buffer>,
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it gives shared access to immutable bytes of the buffer, which is `Send + Sync`.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    fn new(buffer: Buffer) -> Self {
        let (address, len) = (buffer.address_ptr(), buffer.len());
        SharedBuffer { of: Arc::new(buffer), address, len }
    }

    /// A part of these bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SharedBuffer> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.len,
        };
        let out_of_bounds = Error::OutOfBounds { offset: start, len: end.saturating_sub(start), region: self.len };
        let len = end.checked_sub(start).ok_or(out_of_bounds)?;
        bounds::check(start, len, self.len)?;
        // SAFETY: `start` is at most the length.
        Ok(SharedBuffer { of: Arc::clone(&self.of), address: unsafe { self.address.add(start) }, len })
    }

    /// Deregisters the region and returns the memory that [`ProtectionDomain::share`] registered.
    ///
    /// This must be the last owner, and nothing may be in flight. The whole memory is returned, even if this is a slice of it.
    ///
    /// # Errors
    /// [`ReclaimError`] returns this value. For a [frozen](Buffer::freeze) buffer the reason is [`ReclaimReason::OtherType`]: use
    /// [`SharedBuffer::into_buffer`].
    pub fn into_memory<M: ReadOnly>(mut self) -> std::result::Result<M, ReclaimError<SharedBuffer>> {
        let reason = match Arc::get_mut(&mut self.of) {
            None => self.in_use(),
            Some(buffer) => match Region::reclaimable::<ReadOnlyBacking<M>>(buffer.region_mut()) {
                Err(ReclaimReason::OtherType { .. }) => self.other_type::<M>(),
                Err(reason) => reason,
                Ok(()) => match Arc::try_unwrap(self.of) {
                    Ok(buffer) => {
                        // SAFETY: it is reclaimable.
                        let memory = unsafe { Region::reclaim::<ReadOnlyBacking<M>>(buffer.into_region()) };
                        return memory
                            .map(|read_only| read_only.0)
                            .map_err(|reason| ReclaimError { reason, part: None });
                    }
                    Err(of) => {
                        self.of = of;
                        self.in_use()
                    }
                },
            },
        };
        Err(ReclaimError { reason, part: Some(self) })
    }

    /// Returns the buffer that was [frozen](Buffer::freeze).
    ///
    /// This must be the last owner, and nothing may be in flight. The whole buffer is returned, even if this is a slice of it.
    ///
    /// # Errors
    /// [`ReclaimError`] returns this value. For memory from [`ProtectionDomain::share`] the reason is
    /// [`ReclaimReason::OtherType`]: use [`SharedBuffer::into_memory`].
    pub fn into_buffer(mut self) -> std::result::Result<Buffer, ReclaimError<SharedBuffer>> {
        let reason = if !self.is_frozen() {
            self.other_type::<Buffer>()
        } else {
            match Arc::try_unwrap(self.of) {
                Ok(buffer) => return Ok(buffer),
                Err(of) => {
                    self.of = of;
                    self.in_use()
                }
            }
        };
        Err(ReclaimError { reason, part: Some(self) })
    }

    /// Number of clones and slices of the same memory, including this one and those in flight. It may already have changed.
    #[must_use]
    pub fn owners(&self) -> usize {
        Arc::strong_count(&self.of)
    }

    /// Whether it was made by [`Buffer::freeze`]. Memory from [`ProtectionDomain::share`] is never writable.
    fn is_frozen(&self) -> bool {
        self.of.access().contains(Access::LOCAL_WRITE)
    }

    /// The reason if it is requested as a `T`, but was made of another type.
    fn other_type<T>(&self) -> ReclaimReason {
        if self.is_frozen() {
            return ReclaimReason::OtherType { expected: type_name::<T>(), registered: type_name::<Buffer>() };
        }
        self.of.region().other_type::<T>()
    }

    fn in_use(&self) -> ReclaimReason {
        ReclaimReason::InUse { others: Arc::strong_count(&self.of).saturating_sub(1).max(1) }
    }

    /// The domain it is registered in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.of.pd()
    }

    /// Whether it is registered in `pd`.
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.of.is_of(pd)
    }

    /// The bytes, at most 4 GiB - 1, as a scatter/gather element for the raw API. The device can only read them.
    #[must_use]
    pub fn sge(&self) -> Sge {
        let len = u32::try_from(self.len).unwrap_or(u32::MAX);
        Sge { address: self.address.as_ptr() as u64, len, lkey: self.of.lkey() }
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are part of the buffer `of`, which exists as long as `self`. They are initialised, and nobody writes
        // to them: the buffer is lent to nobody and posted only as a source, and the owner of registered memory keeps the
        // contract of `ReadOnly`.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer")
            .field("address", &self.address)
            .field("len", &self.len)
            .field("owners", &self.owners())
            .finish_non_exhaustive()
    }
}

impl Buffer {
    /// Shares the bytes up to the length, which can no longer be changed. [`SharedBuffer::into_buffer`] is the reverse.
    #[must_use]
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer::new(self)
    }
}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}

/// The bytes up to the length, without a copy. The buffer is dropped with the last handle, so it returns to its pool.
#[cfg(feature = "bytes")]
impl From<Buffer> for bytes::Bytes {
    fn from(buffer: Buffer) -> Self {
        bytes::Bytes::from_owner(buffer)
    }
}

/// The bytes, without a copy.
#[cfg(feature = "bytes")]
impl From<SharedBuffer> for bytes::Bytes {
    fn from(shared: SharedBuffer) -> Self {
        bytes::Bytes::from_owner(shared)
    }
}

impl ProtectionDomain {
    /// Registers bytes that do not change: `ibv_reg_mr(3)` without any write access.
    ///
    /// They can be the source of sends and writes. Since the device only reads them, read-only mappings of files can be registered:
    /// on Linux before 6.2 private ones only (`MAP_PRIVATE`, `MmapOptions::map_copy_read_only`), which the kernel copies then.
    ///
    /// # Errors
    /// [`RegisterError`] returns the memory, with the errors of [`ProtectionDomain::register`].
    pub fn share<M: ReadOnly>(&self, memory: M) -> std::result::Result<SharedBuffer, RegisterError<M>> {
        self.registration(Access::empty()).share(memory)
    }
}

impl RegistrationBuilder<'_> {
    /// Like [`ProtectionDomain::share`]. [`Access::LOCAL_WRITE`] is ignored.
    ///
    /// # Errors
    /// Like [`ProtectionDomain::share`], with [`Error::BufferAccess`] for flags that grant remote access; see also
    /// [`RegistrationBuilder::dma_handle`].
    pub fn share<M: ReadOnly>(mut self, memory: M) -> std::result::Result<SharedBuffer, RegisterError<M>> {
        let access = self.access & Access::EXPOSING;
        if !access.is_empty() {
            return Err(RegisterError { error: Error::BufferAccess { access }, memory });
        }
        self.access.remove(Access::LOCAL_WRITE);
        match Region::new::<M, _>(self, Box::new(ReadOnlyBacking(memory)), None) {
            Ok(region) => Ok(SharedBuffer::new(Buffer::whole(region))),
            Err((error, backing)) => Err(RegisterError { error, memory: backing.0 }),
        }
    }
}
