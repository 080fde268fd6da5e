//! Owners that get dropped buffers back.

use std::fmt;
use std::sync::Arc;

use super::Buffer;

/// An owner that gets buffers back when they are dropped, such as a pool.
///
/// [`Backing::home`](super::Backing::home) names it.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::ptr::NonNull;
/// use std::sync::{Arc, Mutex, Weak};
/// use rdma_safe::{Buffer, Device};
/// use rdma_safe::mr::{Backing, Home, Pages, TakeBack};
///
/// #[derive(Default)]
/// struct Returned(Mutex<Vec<Buffer>>);
///
/// impl TakeBack for Returned {
///     fn take_back(&self, buffer: Buffer, tag: usize) {
///         assert_eq!(tag, 7);
///         self.0.lock().unwrap().push(buffer);
///     }
/// }
///
/// /// Refers weakly to the owner of the buffers, which own this.
/// struct Lent(Pages, Weak<Returned>);
///
/// // SAFETY: `Pages` keeps the contract, and this type only forwards to it.
/// unsafe impl Backing for Lent {
///     fn address(&self) -> NonNull<u8> {
///         self.0.address()
///     }
///
///     fn len(&self) -> usize {
///         self.0.len()
///     }
///
///     fn home(&self) -> Option<Home> {
///         Some(Home { owner: self.1.upgrade()?, tag: 7 })
///     }
/// }
///
/// let returned = Arc::new(Returned::default());
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let (head, tail) = pd.register(Lent(Pages::new(4096)?, Arc::downgrade(&returned)))?.into_split(100)?;
/// drop(tail);
/// drop(head);
/// let (head, tail) = match &mut *returned.0.lock().unwrap() {
///     buffers => (buffers.pop().unwrap(), buffers.pop().unwrap()),
/// };
/// let whole = head.join(tail).map_err(|_| "the parts are adjacent")?;
/// assert_eq!(whole.capacity(), 4096);
/// drop(returned);
/// drop(whole); // frees it, because its home is gone
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub trait TakeBack: Send + Sync {
    /// Takes back a buffer that was dropped, or a part of one. [`Buffer::free`] frees it for good.
    ///
    /// A buffer in flight is dropped after its completion, or after its queue pair is destroyed, so the device no longer
    /// accesses its bytes. Its length is unspecified. Any thread may call this, also while it panics.
    fn take_back(&self, buffer: Buffer, tag: usize);
}

/// The owner of a buffer.
pub struct Home {
    /// The owner that gets it.
    pub owner: Arc<dyn TakeBack>,
    /// A number for the owner.
    pub tag: usize,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Home").field("tag", &self.tag).finish_non_exhaustive()
    }
}
