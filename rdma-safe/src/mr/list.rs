//! Storage of lists, which each thread reuses.

use std::cell::Cell;
use std::mem::ManuallyDrop;

use super::Piece;
use crate::Sge;

/// Elements, and room for their scatter/gather entries.
pub(super) struct List {
    pub(super) pieces: Vec<Piece>,
    /// Room for a header and for each element, which is filled when the list is posted.
    pub(super) sges: Vec<Sge>,
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

impl List {
    /// An empty list, if possible one that this thread has kept.
    pub(super) fn new() -> Box<List> {
        List::unused().unwrap_or_else(|| {
            let (pieces, mut sges) = (Vec::with_capacity(INLINE), Vec::with_capacity(INLINE + 1));
            sges.push(Sge::EMPTY);
            Box::new(List { pieces, sges, next: None })
        })
    }

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
    #[inline]
    pub(super) fn fill(&mut self, mut sge: impl FnMut(&Piece) -> Sge, first: Option<Sge>) -> &[Sge] {
        let Some((header, sges)) = self.sges.split_first_mut() else { return &[] };
        *header = first.unwrap_or(Sge::EMPTY);
        let mut filled = 1;
        for (target, piece) in sges.iter_mut().zip(&self.pieces) {
            *target = sge(piece);
            filled += 1;
        }
        self.sges.get(usize::from(first.is_none())..filled).unwrap_or(&[])
    }

    /// Drops the elements, and keeps the list for [`List::new`].
    #[cold]
    #[inline(never)]
    pub(super) fn keep(mut self: Box<Self>) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::Gather;

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
        let storage = |list: &Gather| list.pieces().as_ptr();
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
