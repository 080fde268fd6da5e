//! Memory that a region takes, and gives back.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::Backing;

/// Memory that [`ProtectionDomain::register`](crate::ProtectionDomain::register) takes and
/// [`Buffer::into_memory`](super::Buffer::into_memory) returns.
///
/// It is a `Vec<u8>`, a `Box<[u8]>`, a `memmap2::MmapMut` (feature `memmap2`) or any [`Backing`].
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
/// let buffer = pd.register(b"hello".to_vec())?; // registers the bytes where they are
/// let (mut head, tail) = buffer.into_split(1)?;
/// head[0] = b'j';
///
/// // The memory comes back when the last part is no longer used.
/// let error = head.into_memory::<Vec<u8>>().unwrap_err();
/// assert_eq!(error.to_string(), "the memory cannot be returned: 1 other part of it is held or in flight");
/// drop(tail);
/// assert_eq!(error.part.unwrap().into_memory::<Vec<u8>>()?, b"jello");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub trait Memory: Sized + 'static {
    /// What a region keeps.
    type Backing: Backing;

    /// Gives the memory to a region.
    fn into_backing(self) -> Self::Backing;

    /// Takes the memory back from a region, which is deregistered.
    fn from_backing(backing: Self::Backing) -> Self;
}

impl<B: Backing> Memory for B {
    type Backing = B;

    fn into_backing(self) -> B {
        self
    }

    fn from_backing(backing: B) -> B {
        backing
    }
}

/// The bytes of a `Vec<u8>` up to its length. Its spare capacity is kept, but not registered.
#[derive(Debug)]
pub struct VecBacking {
    address: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the allocation is owned and not tied to a thread.
unsafe impl Send for VecBacking {}

// SAFETY: `VecBacking` owns the allocation of a `Vec<u8>`, whose first `len` bytes are initialised, and which does not move.
unsafe impl Backing for VecBacking {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for VecBacking {
    fn drop(&mut self) {
        // SAFETY: these are the parts of a `Vec<u8>`, which `into_backing` has taken apart. `from_backing`, the only other
        // place that puts it together again, prevents this call.
        drop(unsafe { Vec::from_raw_parts(self.address.as_ptr(), self.len, self.capacity) });
    }
}

impl Memory for Vec<u8> {
    type Backing = VecBacking;

    fn into_backing(self) -> VecBacking {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the pointer of a `Vec` is never null.
        let address = unsafe { NonNull::new_unchecked(this.as_mut_ptr()) };
        VecBacking { address, len: this.len(), capacity: this.capacity() }
    }

    fn from_backing(backing: VecBacking) -> Self {
        let VecBacking { address, len, capacity } = *ManuallyDrop::new(backing);
        // SAFETY: these are the parts of a `Vec<u8>`, as in `VecBacking::drop`, which is not called.
        unsafe { Vec::from_raw_parts(address.as_ptr(), len, capacity) }
    }
}

/// The allocation of a boxed slice, without the uniqueness that moving a `Box` asserts.
#[derive(Debug)]
pub struct BoxBacking(NonNull<[u8]>);

// SAFETY: the allocation is owned and not tied to a thread.
unsafe impl Send for BoxBacking {}

// SAFETY: `BoxBacking` owns the allocation of a `Box<[u8]>`, which is initialised and does not move.
unsafe impl Backing for BoxBacking {
    fn address(&self) -> NonNull<u8> {
        self.0.cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for BoxBacking {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `into_backing`. `from_backing`, the only other place that makes a box of it,
        // prevents this call.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Memory for Box<[u8]> {
    type Backing = BoxBacking;

    fn into_backing(self) -> BoxBacking {
        // SAFETY: `Box::into_raw` never returns NULL.
        BoxBacking(unsafe { NonNull::new_unchecked(Box::into_raw(self)) })
    }

    fn from_backing(backing: BoxBacking) -> Self {
        // SAFETY: made by `Box::into_raw`, as in `BoxBacking::drop`, which is not called.
        unsafe { Box::from_raw(ManuallyDrop::new(backing).0.as_ptr()) }
    }
}

/// A mapping of a file, or an anonymous one.
#[cfg(feature = "memmap2")]
#[derive(Debug)]
pub struct MmapBacking {
    map: memmap2::MmapMut,
    address: NonNull<u8>,
}

// SAFETY: the mapping is owned and not tied to a thread.
#[cfg(feature = "memmap2")]
unsafe impl Send for MmapBacking {}

// SAFETY: the mapping is owned, initialised and writable, and stays where it is until it is dropped, also if the value moves.
// `MmapMut` refers to it by a raw pointer. It has no other references: the caller of memmap2's `unsafe`
// function guarantees that no other process changes or truncates the file. An empty mapping is not registered.
#[cfg(feature = "memmap2")]
unsafe impl Backing for MmapBacking {
    fn address(&self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.map.len()
    }
}

#[cfg(feature = "memmap2")]
impl Memory for memmap2::MmapMut {
    type Backing = MmapBacking;

    fn into_backing(mut self) -> MmapBacking {
        // SAFETY: the pointer of a mapping is never null.
        let address = unsafe { NonNull::new_unchecked(self.as_mut_ptr()) };
        MmapBacking { map: self, address }
    }

    fn from_backing(backing: MmapBacking) -> Self {
        backing.map
    }
}
