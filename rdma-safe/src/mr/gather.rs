//! Lists of registered memory for one piece of work.

use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{Buffer, ExposedRegion, Region, SharedBuffer};
use crate::{ProtectionDomain, Result, Sge, bounds};

/// A part of an [`ExposedRegion`], as the local memory of posted work. Made by [`ExposedRegion::part`].
///
/// It keeps the region registered, but gives no access to the bytes.
pub struct ExposedPart {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl ExposedPart {
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

impl ExposedRegion {
    /// `len` bytes from `offset` as the local memory of work: the source of a send or write, or the target of a receive or read.
    ///
    /// The region stays registered while parts of it exist, even if it is dropped. A part may overlap others, since all bytes of
    /// the region may change at any time.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds); [`Error::Unsupported`](crate::Error::Unsupported) for a region of
    /// [`ProtectionDomain::expose_at`] whose address for peers is not its own, because some providers write short messages to that
    /// address with the CPU.
    pub fn part(&self, offset: usize, len: usize) -> Result<ExposedPart> {
        bounds::check(offset, len, self.region.len)?;
        if self.region.iova != self.region.address.as_ptr() as u64 {
            return Err(self.pd().context().unsupported("local work on memory that peers see at another address"));
        }
        Ok(ExposedPart { region: Arc::clone(&self.region), offset, len })
    }
}

/// Registered memory that is one element of a [`Gather`].
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
            Piece::Exposed(part) => part.len,
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
    fn capacity(&self) -> usize {
        match self {
            Piece::Buffer(buffer) => buffer.capacity(),
            _ => self.len(),
        }
    }

    fn is_of(&self, pd: &ProtectionDomain) -> bool {
        match self {
            Piece::Buffer(buffer) => buffer.is_of(pd),
            Piece::Shared(shared) => shared.is_of(pd),
            Piece::Exposed(part) => part.region.registration.is_of(pd),
        }
    }

    fn sge(&self) -> Sge {
        match self {
            Piece::Buffer(buffer) => buffer.sge(),
            Piece::Shared(shared) => shared.sge(),
            Piece::Exposed(ExposedPart { region, offset, len }) => Sge {
                address: region.iova + *offset as u64,
                len: u32::try_from(*len).unwrap_or(u32::MAX),
                lkey: region.lkey(),
            },
        }
    }
}

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

struct List {
    pieces: Vec<Piece>,
    /// Room for a header and for each element, which is filled when the list is posted.
    sges: Vec<Sge>,
    /// The next unused list.
    next: Option<Box<List>>,
}

/// Number of elements that a list has room for from the start.
const INLINE: usize = 4;

/// Number of unused lists that each thread keeps.
const SPARE: u32 = 64;

/// Largest capacity of a list that is kept.
const SPARE_LEN: usize = 32;

/// Empty lists of a thread.
///
/// It has no destructor, since registering one for a thread can fail, which dropping a list must not. [`Guard`] frees the lists.
#[derive(Default)]
struct Unused {
    /// The first list, which links to the next.
    first: ManuallyDrop<Option<Box<List>>>,
    /// Number of lists that there is still room for: none before there is a guard, and after it is dropped.
    room: u32,
    has_guard: bool,
}

/// Frees the unused lists of a thread that ends.
struct Guard;

thread_local! {
    static UNUSED: Cell<Unused> =
        const { Cell::new(Unused { first: ManuallyDrop::new(None), room: 0, has_guard: false }) };
    static GUARD: Guard = const { Guard };
}

impl Drop for Guard {
    fn drop(&mut self) {
        let first = UNUSED.replace(Unused { has_guard: true, ..Unused::default() }).first;
        drop(ManuallyDrop::into_inner(first));
    }
}

impl Gather {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        let list = List::unused().unwrap_or_else(|| {
            let (pieces, mut sges) = (Vec::with_capacity(INLINE), Vec::with_capacity(INLINE + 1));
            sges.push(Sge::EMPTY);
            Box::new(List { pieces, sges, next: None })
        });
        Gather(ManuallyDrop::new(list))
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

impl List {
    /// An empty list that this thread has kept.
    fn unused() -> Option<Box<List>> {
        let mut unused = UNUSED.take();
        let mut list = ManuallyDrop::into_inner(unused.first);
        match &mut list {
            Some(list) => (unused.first, unused.room) = (ManuallyDrop::new(list.next.take()), unused.room + 1),
            None => {
                unused.first = ManuallyDrop::new(None);
                // Fails in a thread that is ending.
                if !unused.has_guard && GUARD.try_with(|_| ()).is_ok() {
                    (unused.has_guard, unused.room) = (true, SPARE);
                }
            }
        }
        UNUSED.set(unused);
        list
    }

    /// Fills `sges` with `first` and the entries of the elements, and returns the filled part.
    fn fill(&mut self, mut sge: impl FnMut(&Piece) -> Sge, first: Option<Sge>) -> &[Sge] {
        let Some((header, sges)) = self.sges.split_first_mut() else { return &[] };
        *header = first.unwrap_or(Sge::EMPTY);
        let mut filled = 1;
        for (target, piece) in sges.iter_mut().zip(&self.pieces) {
            *target = sge(piece);
            filled += 1;
        }
        self.sges.get(usize::from(first.is_none())..filled).unwrap_or(&[])
    }

    /// Drops the elements, and keeps the list for [`List::unused`].
    #[cold]
    #[inline(never)]
    fn keep(mut self: Box<Self>) {
        self.pieces.clear();
        self.sges.truncate(1);
        if self.pieces.capacity() > SPARE_LEN {
            return;
        }
        // Never fails, and unlike `with` contains no panic.
        let _ = UNUSED.try_with(|cell| {
            let mut unused = cell.take();
            if let Some(room) = unused.room.checked_sub(1) {
                self.next = ManuallyDrop::into_inner(unused.first);
                (unused.first, unused.room) = (ManuallyDrop::new(Some(self)), room);
            }
            cell.set(unused);
        });
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
    ($($variant:ident($type:ty)),+) => {
        $(
            impl From<$type> for Piece {
                fn from(piece: $type) -> Self {
                    Piece::$variant(piece)
                }
            }

            impl From<$type> for Gather {
                fn from(piece: $type) -> Self {
                    Gather::new().with(piece)
                }
            }
        )+
    };
}

from_piece!(Buffer(Buffer), Shared(SharedBuffer), Exposed(ExposedPart));

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of lists that this thread keeps.
    fn kept() -> u32 {
        let mut count = 0;
        let mut kept = Vec::new();
        while let Some(list) = List::unused() {
            kept.push(list);
            count += 1;
        }
        kept.into_iter().for_each(List::keep);
        count
    }

    #[test]
    fn a_thread_keeps_the_storage_of_dropped_lists() {
        let storage = |list: &Gather| list.0.pieces.as_ptr();
        std::thread::spawn(move || {
            let (first, second) = (Gather::new(), Gather::default());
            let addresses = [storage(&first), storage(&second)];
            assert_eq!(kept(), 0);
            drop(first);
            drop(second);
            assert_eq!(kept(), 2);
            let again = [Gather::new(), Gather::new()];
            assert!(again.iter().all(|list| addresses.contains(&storage(list))));

            let many: Vec<_> = (0..SPARE + 10).map(|_| Gather::new()).collect();
            drop((again, many));
            assert_eq!(kept(), SPARE);
            // The thread frees them when it ends, which Miri checks.
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_makes_no_lists_keeps_none() {
        let list = Gather::new();
        std::thread::spawn(move || {
            drop(list);
            assert!(UNUSED.take().first.is_none());
        })
        .join()
        .unwrap();
    }
}
