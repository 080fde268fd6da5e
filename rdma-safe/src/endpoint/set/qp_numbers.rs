//! Endpoints of a set by the number of their queue pair.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The owner of each queue pair number that completions may name.
pub(super) struct QpNumbers {
    /// All numbers.
    owners: HashMap<u32, Owner, BuildHasherDefault<QpNumHasher>>,
    /// Some of the numbers that belong to a slot, by their lower bits. A power of two in length.
    ///
    /// A device mostly assigns consecutive numbers, so nearly all are here.
    table: Box<[Entry]>,
}

/// The owner of a queue pair number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    Slot(u32),
    /// An endpoint that was removed or is being removed.
    Removed,
}

#[derive(Clone, Copy)]
struct Entry {
    number: u32,
    slot: u32,
}

/// An entry without a number, since queue pair numbers have 24 bits.
const EMPTY: Entry = Entry { number: u32::MAX, slot: 0 };

impl Default for QpNumbers {
    fn default() -> Self {
        QpNumbers { owners: HashMap::default(), table: Box::new([EMPTY; 16]) }
    }
}

impl QpNumbers {
    /// The slot of a number, unless it was removed.
    #[inline(always)]
    pub(super) fn slot(&self, number: u32) -> Option<u32> {
        match self.table.get(self.index(number)) {
            Some(entry) if entry.number == number => Some(entry.slot),
            _ => self.search(number),
        }
    }

    #[cold]
    #[inline(never)]
    fn search(&self, number: u32) -> Option<u32> {
        match self.owner(number)? {
            Owner::Slot(slot) => Some(slot),
            Owner::Removed => None,
        }
    }

    pub(super) fn owner(&self, number: u32) -> Option<Owner> {
        self.owners.get(&number).copied()
    }

    #[inline(always)]
    fn index(&self, number: u32) -> usize {
        number as usize & (self.table.len() - 1)
    }

    pub(super) fn insert(&mut self, number: u32, owner: Owner) {
        self.forget_entry(number);
        self.owners.insert(number, owner);
        if self.owners.len() * 2 > self.table.len() {
            self.table = vec![EMPTY; self.table.len() * 2].into_boxed_slice();
            let owners = std::mem::take(&mut self.owners);
            owners.iter().for_each(|(number, owner)| self.add_entry(*number, *owner));
            self.owners = owners;
        } else {
            self.add_entry(number, owner);
        }
    }

    pub(super) fn remove(&mut self, number: u32) {
        self.forget_entry(number);
        self.owners.remove(&number);
    }

    fn add_entry(&mut self, number: u32, owner: Owner) {
        let index = self.index(number);
        if let (Owner::Slot(slot), entry) = (owner, &mut self.table[index]) {
            *entry = Entry { number, slot };
        }
    }

    fn forget_entry(&mut self, number: u32) {
        let index = self.index(number);
        if self.table[index].number == number {
            self.table[index] = EMPTY;
        }
    }
}

/// Hashes queue pair numbers.
#[derive(Default)]
struct QpNumHasher(u64);

impl Hasher for QpNumHasher {
    #[inline]
    fn write_u32(&mut self, number: u32) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_whatever_their_lower_bits() {
        let mut numbers = QpNumbers::default();
        // Consecutive ones, and ones whose lower bits agree.
        let all: Vec<u32> = (100..140).chain((0..40).map(|high| high << 12 | 7)).collect();
        for (slot, number) in all.iter().enumerate() {
            numbers.insert(*number, Owner::Slot(slot as u32));
        }
        for (slot, number) in all.iter().enumerate() {
            assert_eq!(numbers.slot(*number), Some(slot as u32));
        }
        for (index, number) in all.iter().enumerate() {
            numbers.insert(*number, Owner::Removed);
            assert_eq!((numbers.slot(*number), numbers.owner(*number)), (None, Some(Owner::Removed)));
            numbers.remove(*number);
            assert_eq!((numbers.slot(*number), numbers.owner(*number)), (None, None));
            let rest = all.iter().enumerate().skip(index + 1);
            rest.for_each(|(slot, number)| assert_eq!(numbers.slot(*number), Some(slot as u32)));
        }
    }
}
