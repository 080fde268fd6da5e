//! Lists of registered memory for one piece of work.

use std::fmt;
use std::mem::ManuallyDrop;

use super::list::List;
use super::{Buffer, ExposedPart, Piece, SharedBuffer};
use crate::{ProtectionDomain, Sge};

/// Memory for one piece of work: a message of several parts, or several places that a message goes to.
///
/// Buffers, shared bytes and parts of exposed regions can be mixed. It is made from a tuple, an array or an iterator of them, and
/// moves into the endpoint like a [`Buffer`]: [`Endpoint::send_list`](crate::Endpoint::send_list),
/// [`Endpoint::receive_list`](crate::Endpoint::receive_list). [`Completion::list`](crate::Completion::list) returns it.
/// [`EndpointBuilder::send_sges`](crate::EndpointBuilder::send_sges) is the maximum number of elements.
///
/// A list without elements is valid. A send of it is an empty message, which takes a receive of the peer. A write or read of it
/// transfers no bytes, and a receive into it accepts only an empty message.
///
/// Up to four elements need no allocation: the thread reuses the storage of lists that it has dropped.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let mut a = Endpoint::builder(&pd).send_sges(2).build()?;
/// let mut b = Endpoint::builder(&pd).recv_sges(2).build()?;
/// a.connect(&b.address())?;
/// b.connect(&a.address())?;
///
/// let payload = pd.share(vec![7; 1000])?;
/// let mut header = pd.allocate(16)?;
/// header.fill_from(b"length 1000     ")?;
/// b.receive_list((pd.allocate(16)?, pd.allocate(4096)?))?;
/// a.send_list((header, payload.clone()))?;
///
/// let received = b.wait(Duration::from_secs(60))?.ok()?.list.unwrap();
/// let parts: Vec<_> = received.into_iter().filter_map(|piece| piece.into_buffer()).collect();
/// assert_eq!((&parts[0][..9], parts[1].len()), (&b"length 10"[..], 1000));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
// The box is dropped only by `Drop`.
pub struct Gather(ManuallyDrop<Box<List>>);

impl Gather {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Gather(ManuallyDrop::new(List::new()))
    }

    /// Appends an element.
    pub fn push(&mut self, piece: impl Into<Piece>) {
        self.0.pieces.push(piece.into());
        self.0.sges.push(Sge::EMPTY);
    }

    /// Appends an element.
    #[must_use]
    pub fn with(mut self, piece: impl Into<Piece>) -> Self {
        self.push(piece);
        self
    }

    /// Removes the last element.
    pub fn pop(&mut self) -> Option<Piece> {
        let piece = self.0.pieces.pop()?;
        self.0.sges.pop();
        Some(piece)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.pieces.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.pieces.is_empty()
    }

    /// Sum of the lengths of the elements in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.0.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len()))
    }

    /// The elements.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.0.pieces
    }

    /// The elements, for example to fill buffers.
    pub fn pieces_mut(&mut self) -> &mut [Piece] {
        &mut self.0.pieces
    }

    /// Removes all elements. The list can be filled and posted again without an allocation.
    pub fn drain(&mut self) -> impl Iterator<Item = Piece> + use<'_> {
        self.0.sges.truncate(1);
        self.0.pieces.drain(..)
    }

    /// Whether all elements are registered in `pd`.
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.0.pieces.iter().all(|piece| piece.is_of(pd))
    }

    /// Whether the device may write to all elements.
    pub(crate) fn is_writable(&self) -> bool {
        !self.0.pieces.iter().any(|piece| matches!(piece, Piece::Shared(_)))
    }

    /// The scatter/gather elements of a send, write or read.
    pub(crate) fn sges(&mut self) -> &[Sge] {
        self.0.fill(|piece| piece.sge(), None)
    }

    /// The scatter/gather elements of a receive of at most `max` bytes after those in `first`.
    pub(crate) fn receive_sges(&mut self, first: Option<Sge>, max: u32) -> &[Sge] {
        let mut room = max;
        let sge = |piece: &Piece| {
            let len = u32::try_from(piece.capacity()).unwrap_or(u32::MAX).min(room);
            room -= len;
            Sge { len, ..piece.sge() }
        };
        self.0.fill(sge, first)
    }

    /// Sets the lengths of the buffers after `len` bytes were received. Returns the number of bytes that are in the list.
    pub(crate) fn set_received(&mut self, len: u32) -> u32 {
        let mut rest = len;
        for piece in &mut self.0.pieces {
            let part = u32::try_from(piece.capacity()).unwrap_or(u32::MAX).min(rest);
            rest -= part;
            if let Piece::Buffer(buffer) = piece {
                buffer.set_len_within(part);
            }
        }
        len - rest
    }
}

impl Default for Gather {
    fn default() -> Self {
        Gather::new()
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        // SAFETY: taken only here.
        unsafe { ManuallyDrop::take(&mut self.0) }.keep();
    }
}

impl fmt::Debug for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0.pieces).finish()
    }
}

/// The elements of a [`Gather`], by value and in order.
#[derive(Debug)]
pub struct IntoIter(Gather);

impl Iterator for IntoIter {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        self.0.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len(), Some(self.0.len()))
    }
}

impl ExactSizeIterator for IntoIter {}

impl IntoIterator for Gather {
    type Item = Piece;
    type IntoIter = IntoIter;

    fn into_iter(mut self) -> IntoIter {
        self.0.pieces.reverse();
        IntoIter(self)
    }
}

impl<P: Into<Piece>> Extend<P> for Gather {
    fn extend<T: IntoIterator<Item = P>>(&mut self, pieces: T) {
        pieces.into_iter().for_each(|piece| self.push(piece));
    }
}

impl<P: Into<Piece>> FromIterator<P> for Gather {
    fn from_iter<T: IntoIterator<Item = P>>(pieces: T) -> Self {
        let mut list = Gather::new();
        list.extend(pieces);
        list
    }
}

impl<P: Into<Piece>, const N: usize> From<[P; N]> for Gather {
    fn from(pieces: [P; N]) -> Self {
        pieces.into_iter().collect()
    }
}

impl<P: Into<Piece>> From<Vec<P>> for Gather {
    fn from(pieces: Vec<P>) -> Self {
        pieces.into_iter().collect()
    }
}

macro_rules! from_tuple {
    ($($piece:ident),+) => {
        impl<$($piece: Into<Piece>),+> From<($($piece,)+)> for Gather {
            #[allow(non_snake_case)]
            fn from(($($piece,)+): ($($piece,)+)) -> Self {
                Gather::new()$(.with($piece))+
            }
        }
    };
}

from_tuple!(A);
from_tuple!(A, B);
from_tuple!(A, B, C);
from_tuple!(A, B, C, D);

macro_rules! from_piece {
    ($($type:ty),+) => {
        $(
            impl From<$type> for Gather {
                fn from(piece: $type) -> Self {
                    Gather::new().with(piece)
                }
            }
        )+
    };
}

from_piece!(Buffer, SharedBuffer, ExposedPart);
