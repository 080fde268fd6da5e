//! A part of a region that peers can access, as local memory.

use std::fmt;
use std::sync::Arc;

use super::Region;
use crate::{ProtectionDomain, Sge};

/// A part of an [`ExposedRegion`](super::ExposedRegion), as the local memory of posted work.
///
/// Made by [`ExposedRegion::part`](super::ExposedRegion::part). It keeps the region registered, but gives no access to the bytes.
pub struct ExposedPart {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl ExposedPart {
    /// `len` bytes from `offset`, which must be within the region.
    #[inline]
    pub(super) fn new(region: Arc<Region>, offset: usize, len: usize) -> Self {
        ExposedPart { region, offset, len }
    }

    /// Whether it is registered in `pd`.
    #[inline]
    pub(super) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.region.registration.is_of(pd)
    }

    /// The bytes as a scatter/gather element.
    #[inline]
    pub(super) fn sge(&self) -> Sge {
        let len = u32::try_from(self.len).unwrap_or(u32::MAX);
        Sge { address: self.region.iova + self.offset as u64, len, lkey: self.region.lkey() }
    }

    /// Offset of the first byte in the region.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for ExposedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedPart").field("offset", &self.offset).field("len", &self.len).finish_non_exhaustive()
    }
}
