//! Cutting buffers, and joining them again.

use std::fmt;
use std::result::Result as StdResult;
use std::sync::Arc;

use super::Buffer;
use crate::{Error, Result};

impl Buffer {
    /// Cuts off the first `at` bytes of the capacity and returns them. This buffer keeps the rest.
    ///
    /// The length of both becomes their capacity, as by [`Buffer::into_split`].
    ///
    /// # Errors
    /// [`Error::PartSize`] when either part would be empty.
    pub fn split_to(&mut self, at: usize) -> Result<Buffer> {
        self.check_cut(at)?;
        let (address, capacity) = (self.address_ptr(), self.capacity());
        // SAFETY: `at` is less than the capacity, so this buffer, which now starts there, lies within the region.
        self.set_range(unsafe { address.add(at) }, capacity - at);
        Ok(Buffer::part(Arc::clone(self.region()), address, at))
    }

    /// Cuts off the bytes of the capacity from `at` and returns them. This buffer keeps the first `at` bytes.
    ///
    /// The length of both becomes their capacity, as by [`Buffer::into_split`].
    ///
    /// # Errors
    /// [`Error::PartSize`] when either part would be empty.
    pub fn split_off(&mut self, at: usize) -> Result<Buffer> {
        self.check_cut(at)?;
        let (address, capacity) = (self.address_ptr(), self.capacity());
        self.set_range(address, at);
        // SAFETY: `at` is less than the capacity, so the part lies within the region. This buffer now ends there.
        Ok(Buffer::part(Arc::clone(self.region()), unsafe { address.add(at) }, capacity - at))
    }

    /// Joins two parts of one region. The length is the whole capacity.
    ///
    /// ```
    /// # #[cfg(feature = "soft")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # rdma_safe::soft::install()?;
    /// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
    /// let (head, tail) = pd.allocate(100)?.into_split(40)?;
    ///
    /// let error = tail.join(head).unwrap_err();
    /// assert_eq!(error.to_string(), "the buffers cannot be joined: each must begin where the one before it ends");
    /// let [tail, head] = error.parts;
    /// assert_eq!(head.join(tail)?.capacity(), 100);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "soft"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`JoinError`] returns both parts, unchanged and in this order, unless `next` starts where this part ends.
    pub fn join(mut self, next: Buffer) -> StdResult<Buffer, JoinError<[Buffer; 2]>> {
        match self.append(next) {
            Ok(()) => Ok(self),
            Err(next) => Err(JoinError::new([self, next])),
        }
    }

    /// Joins parts of one region, in any order, that leave no gap. The length is the whole capacity.
    ///
    /// ```
    /// # #[cfg(feature = "soft")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # rdma_safe::soft::install()?;
    /// use rdma_safe::Buffer;
    ///
    /// let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
    /// let mut rest = pd.register(b"some longer text".to_vec())?;
    /// let (first, last) = (rest.split_to(5)?, rest.split_off(7)?);
    /// assert_eq!((&first[..], &rest[..], &last[..]), (&b"some "[..], &b"longer "[..], &b"text"[..]));
    ///
    /// let error = Buffer::join_all([last, first]).unwrap_err();
    /// assert_eq!(error.parts.len(), 2); // a part is missing
    /// let whole = Buffer::join_all(error.parts.into_iter().chain([rest]))?;
    /// assert_eq!(whole.into_memory::<Vec<u8>>()?, b"some longer text");
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "soft"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`JoinError`] returns the parts in ascending order of addresses. Adjacent ones are joined.
    pub fn join_all(parts: impl IntoIterator<Item = Buffer>) -> StdResult<Buffer, JoinError<Vec<Buffer>>> {
        let mut parts: Vec<Buffer> = parts.into_iter().collect();
        parts.sort_unstable_by_key(Buffer::address);
        let mut joined: Vec<Buffer> = Vec::new();
        for part in parts {
            let rest = match joined.last_mut() {
                Some(last) => last.append(part),
                None => Err(part),
            };
            joined.extend(rest.err());
        }
        match joined.pop() {
            Some(whole) if joined.is_empty() => Ok(whole),
            last => {
                joined.extend(last);
                Err(JoinError::new(joined))
            }
        }
    }

    /// Takes over the bytes of `next`, or returns it unless it starts where this buffer ends.
    fn append(&mut self, next: Buffer) -> StdResult<(), Buffer> {
        let end = self.address_ptr().as_ptr().wrapping_add(self.capacity());
        if !Arc::ptr_eq(self.region(), next.region()) || next.address_ptr().as_ptr() != end {
            return Err(next);
        }
        let capacity = self.capacity() + next.capacity();
        // `next` is not returned to its pool. Its bytes belong to this buffer.
        drop(next.into_region());
        self.set_range(self.address_ptr(), capacity);
        Ok(())
    }

    fn check_cut(&self, at: usize) -> Result<()> {
        if at == 0 || at >= self.capacity() {
            return Err(Error::PartSize { size: at, capacity: self.capacity() });
        }
        Ok(())
    }
}

/// Buffers that were not joined, with the reason.
///
/// `P` is `[Buffer; 2]` for [`Buffer::join`] and `Vec<Buffer>` for [`Buffer::join_all`].
#[non_exhaustive]
pub struct JoinError<P> {
    /// Reason of the failure.
    pub reason: JoinReason,
    /// The buffers.
    pub parts: P,
}

/// Why buffers cannot be joined.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinReason {
    /// There are no buffers.
    #[error("there are none")]
    NoParts,
    /// The buffers are parts of different regions.
    #[error("they are parts of different regions")]
    OtherRegion,
    /// Bytes between two buffers are missing, or the buffers were passed to [`Buffer::join`] in the wrong order.
    #[error("each must begin where the one before it ends")]
    NotAdjacent,
}

impl<P: AsRef<[Buffer]>> JoinError<P> {
    fn new(parts: P) -> Self {
        let reason = match parts.as_ref() {
            [] => JoinReason::NoParts,
            [first, rest @ ..] if rest.iter().all(|part| Arc::ptr_eq(part.region(), first.region())) => {
                JoinReason::NotAdjacent
            }
            _ => JoinReason::OtherRegion,
        };
        JoinError { reason, parts }
    }
}

impl<P> fmt::Display for JoinError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Error::Join(self.reason).fmt(f)
    }
}

impl<P> fmt::Debug for JoinError<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<P> std::error::Error for JoinError<P> {}

impl<P> From<JoinError<P>> for Error {
    /// Drops the buffers.
    fn from(failed: JoinError<P>) -> Self {
        Error::Join(failed.reason)
    }
}
