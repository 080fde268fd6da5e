//! One element of a list of memory.

use super::{Buffer, ExposedPart, SharedBuffer};
use crate::{ProtectionDomain, Sge};

/// Registered memory that is one element of a [`Gather`](super::Gather).
#[derive(Debug)]
#[non_exhaustive]
pub enum Piece {
    /// A buffer: its bytes up to the length for sends, writes and reads, and up to the capacity for receives.
    Buffer(Buffer),
    /// Bytes that do not change, for sends and writes.
    Shared(SharedBuffer),
    /// A part of a region that peers can access.
    Exposed(ExposedPart),
}

impl Piece {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Piece::Buffer(buffer) => buffer.len(),
            Piece::Shared(shared) => shared.len(),
            Piece::Exposed(part) => part.len(),
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer, if this is a [`Piece::Buffer`].
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Piece::Buffer(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// The shared bytes, if this is a [`Piece::Shared`].
    #[must_use]
    pub fn into_shared(self) -> Option<SharedBuffer> {
        match self {
            Piece::Shared(shared) => Some(shared),
            _ => None,
        }
    }

    /// Number of bytes that a message may have in this piece.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        match self {
            Piece::Buffer(buffer) => buffer.capacity(),
            _ => self.len(),
        }
    }

    #[inline]
    pub(super) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        match self {
            Piece::Buffer(buffer) => buffer.is_of(pd),
            Piece::Shared(shared) => shared.is_of(pd),
            Piece::Exposed(part) => part.is_of(pd),
        }
    }

    #[inline]
    pub(super) fn sge(&self) -> Sge {
        match self {
            Piece::Buffer(buffer) => buffer.sge(),
            Piece::Shared(shared) => shared.sge(),
            Piece::Exposed(part) => part.sge(),
        }
    }
}

macro_rules! from {
    ($($variant:ident($type:ty)),+) => {
        $(
            impl From<$type> for Piece {
                fn from(piece: $type) -> Self {
                    Piece::$variant(piece)
                }
            }
        )+
    };
}

from!(Buffer(Buffer), Shared(SharedBuffer), Exposed(ExposedPart));
