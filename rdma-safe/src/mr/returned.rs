//! Dropped buffers, for their memory to take back.

use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;

use super::buffer::Part;
use super::{Backing, Buffer};

/// A dropped buffer of memory `M`. [`Backing::take_back`] gets it. Dropping it frees the buffer.
///
/// A buffer in flight is dropped after its completion, or after its queue pair is destroyed, so the device no longer
/// accesses its bytes. Its length is unspecified. Any thread may drop a buffer, also while it panics.
///
/// A pool keeps the buffer to hand it out again:
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::ptr::NonNull;
/// use std::sync::{Arc, Mutex, Weak};
/// use rdma_safe::{Buffer, Device};
/// use rdma_safe::mr::{Backing, Pages, Returned};
///
/// type Free = Mutex<Vec<Buffer>>;
///
/// /// Refers weakly to the owner of the buffers, which own this.
/// struct Lent(Pages, Weak<Free>);
///
/// // SAFETY: `Pages` keeps the contract.
/// unsafe impl Backing for Lent {
///     fn address(&self) -> NonNull<u8> {
///         self.0.address()
///     }
///
///     fn len(&self) -> usize {
///         self.0.len()
///     }
///
///     fn take_back(buffer: Returned<Lent>) {
///         if let Some(free) = buffer.memory().1.upgrade() {
///             free.lock().unwrap().push(buffer.into());
///         }
///     }
/// }
///
/// let free = Arc::new(Free::default());
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let (head, tail) = pd.register(Lent(Pages::new(4096)?, Arc::downgrade(&free)))?.into_split(100)?;
/// drop(tail);
/// drop(head);
/// let (head, tail) = match &mut *free.lock().unwrap() {
///     buffers => (buffers.pop().unwrap(), buffers.pop().unwrap()),
/// };
/// let whole = head.join(tail).map_err(|_| "the parts are adjacent")?;
/// assert_eq!(whole.capacity(), 4096);
/// // The pool, which knows the type of its memory, can free a buffer for good.
/// drop(Returned::<Lent>::try_from(whole).map_err(|_| "the memory has another type")?);
/// assert!(free.lock().unwrap().is_empty());
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub struct Returned<M> {
    /// Its region has a backing of type `M`.
    part: Box<Part>,
    memory: PhantomData<fn() -> M>,
}

impl<M: Backing> Returned<M> {
    /// Gives a dropped buffer back to its memory.
    ///
    /// # Safety
    ///
    /// The backing of its region has the type `M`.
    #[inline]
    pub(super) unsafe fn take_back(part: Box<Part>) {
        M::take_back(Returned { part, memory: PhantomData });
    }

    /// The memory that was registered.
    #[must_use]
    #[inline(always)]
    pub fn memory(&self) -> &M
    where
        M: Sync,
    {
        let backing: *const dyn Backing = &raw const **self.part.region.backing;
        // SAFETY: the backing has this type, as `take_back` requires. The region keeps it as long as this value keeps the region.
        unsafe { &*backing.cast() }
    }

    /// Maximum length of the buffer in bytes.
    #[must_use]
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.part.capacity
    }
}

impl<M: Backing> TryFrom<Buffer> for Returned<M> {
    /// The buffer, whose memory has another type.
    type Error = Buffer;

    /// The buffer as if it had been dropped, for the owner of its memory. Dropping the result frees the buffer.
    fn try_from(buffer: Buffer) -> Result<Self, Buffer> {
        if buffer.region().type_id != TypeId::of::<M>() {
            return Err(buffer);
        }
        Ok(Returned { part: buffer.into_part(), memory: PhantomData })
    }
}

impl<M> From<Returned<M>> for Buffer {
    /// The buffer as it was before it was dropped, except for its length.
    #[inline(always)]
    fn from(returned: Returned<M>) -> Buffer {
        Buffer::from_part(returned.part)
    }
}

impl<M> fmt::Debug for Returned<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned").field("capacity", &self.part.capacity).finish_non_exhaustive()
    }
}
