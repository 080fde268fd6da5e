//! `Bytes`, which have no identity: copied or registered for the life of their handle.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use rdma_safe::mr::ReadOnly;
use rdma_safe::{Buffer, Error, SharedBuffer};

use super::{Inner, RegistrationCache, RegistrationError, is_limit};

/// Bytes that can be sent.
#[derive(Debug)]
#[must_use]
pub enum Payload {
    /// A copy.
    Copied(Buffer),
    /// The memory of the `Bytes` itself.
    Registered(SharedBuffer),
}

/// Why bytes cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError<E> {
    /// There was no buffer for a copy.
    #[error(transparent)]
    Buffer(E),
    /// The copy did not fit into the buffer.
    #[error(transparent)]
    Copy(rdma_safe::Error),
    /// The memory could not be registered.
    #[error(transparent)]
    Register(RegistrationError),
}

/// Bytes of the limit of a cache.
struct Lease {
    of: Arc<Inner>,
    bytes: usize,
}

/// A handle, and the part of the limit that is given back after it was deregistered.
struct Leased {
    handle: Bytes,
    lease: Lease,
}

// SAFETY: the bytes belong to the reference-counted memory of the handle, and are immutable while a handle exists.
unsafe impl ReadOnly for Leased {
    fn bytes(&self) -> &[u8] {
        &self.handle
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.of.is_inherited() {
            self.of.regions.give_back(self.bytes);
        }
    }
}

impl RegistrationCache {
    /// Copies `bytes` if they are shorter than `threshold` bytes, and registers their memory otherwise.
    ///
    /// A `Bytes` has no identity that a cache could find again, so it is registered for the life of the [`SharedBuffer`] alone.
    /// Registering makes system calls, so it pays off for long messages only. Measure from which length on, and set `threshold`
    /// to it. `buffer` is called with the length of a copy and returns a buffer of at least that capacity, for example from a
    /// pool.
    ///
    /// # Errors
    /// [`PayloadError::Buffer`] with the error of `buffer`; [`PayloadError::Copy`] if its capacity is too small;
    /// [`PayloadError::Register`] with the errors of [`RegistrationCache::register`].
    pub fn payload<E>(
        &self,
        bytes: Bytes,
        threshold: usize,
        buffer: impl FnOnce(usize) -> Result<Buffer, E>,
    ) -> Result<Payload, PayloadError<E>> {
        if bytes.len() >= threshold {
            return self.register_bytes(bytes).map(Payload::Registered).map_err(PayloadError::Register);
        }
        let mut copy = buffer(bytes.len()).map_err(PayloadError::Buffer)?;
        copy.fill_from(&bytes).map_err(PayloadError::Copy)?;
        self.0.copied.fetch_add(1, Ordering::Relaxed);
        Ok(Payload::Copied(copy))
    }

    /// Registers the memory of `bytes` until the last clone of the result is dropped.
    ///
    /// It counts towards the limit of the cache as in use. To use the same bytes repeatedly, keep a clone of the result, or give
    /// them an identity: `Arc<Bytes>` can be registered with [`RegistrationCache::register`].
    ///
    /// # Errors
    /// As for [`RegistrationCache::register`].
    pub fn register_bytes(&self, bytes: Bytes) -> Result<SharedBuffer, RegistrationError> {
        let inner = &self.0;
        inner.require_own()?;
        let len = bytes.len();
        let register = || {
            let leased = Leased { handle: bytes.clone(), lease: Lease { of: Arc::clone(inner), bytes: len } };
            inner.pd.share(leased).map_err(|mut failed| {
                // `reserve` gives the bytes back itself.
                failed.memory.lease.bytes = 0;
                Error::from(failed)
            })
        };
        inner.regions.reserve(len, register, is_limit).map_err(|failed| inner.error(failed, len))
    }
}
