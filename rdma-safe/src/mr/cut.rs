//! Cutting buffers, and joining them again.

use std::fmt;
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
    /// # Errors
    /// Returns both parts unless `next` starts where this part ends.
    pub fn join(mut self, next: Buffer) -> std::result::Result<Buffer, (Buffer, Buffer)> {
        match self.append(next) {
            Ok(()) => Ok(self),
            Err(next) => Err((self, next)),
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
    /// [`JoinError`] returns the parts, of which adjacent ones are joined.
    pub fn join_all(parts: impl IntoIterator<Item = Buffer>) -> std::result::Result<Buffer, JoinError> {
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
                Err(JoinError { parts: joined })
            }
        }
    }

    /// Takes over the bytes of `next`, or returns it unless it starts where this buffer ends.
    fn append(&mut self, next: Buffer) -> std::result::Result<(), Buffer> {
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

/// Parts that cannot be joined, because bytes between them are missing or they belong to several regions.
#[non_exhaustive]
pub struct JoinError {
    /// The parts in ascending order of addresses; adjacent parts are joined.
    pub parts: Vec<Buffer>,
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts.len() {
            0 => write!(f, "there are no parts to join"),
            runs => {
                write!(f, "the parts form {runs} separate buffers: parts between them are missing, or regions differ")
            }
        }
    }
}

impl fmt::Debug for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinError").field("parts", &self.parts.len()).finish()
    }
}

impl std::error::Error for JoinError {}
