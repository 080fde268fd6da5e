//! Memory that is shared and never written.

/// Memory that an [`Arc`](std::sync::Arc) keeps alive, unchanged and in place.
///
/// # Safety
///
/// While there are shared references to the value and no exclusive one, `bytes()` must return the same bytes at the same
/// address, and nothing must write to them. Both hold for types without interior mutability that own their bytes.
pub unsafe trait SharedMemory: Send + Sync + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

macro_rules! owned {
    ($($type:ty)+) => {
        $(
            // SAFETY: the type owns its bytes and has no interior mutability.
            unsafe impl SharedMemory for $type {
                fn bytes(&self) -> &[u8] {
                    self.as_ref()
                }
            }
        )+
    };
}

owned! { [u8] Vec<u8> Box<[u8]> str String }

// SAFETY: as above.
unsafe impl<const N: usize> SharedMemory for [u8; N] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: the bytes belong to the reference-counted memory of the handle, and are immutable while a handle exists.
#[cfg(feature = "bytes")]
unsafe impl SharedMemory for bytes::Bytes {
    fn bytes(&self) -> &[u8] {
        self
    }
}
