//! Bytes that show where they come from.

use anyhow::{Result, bail};

use crate::plan::{Metric, Plan};
use crate::worker::{Part, slots, stride};

/// What a place of the memory is to hold: every lane, place and position has bytes of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    /// Differs from size to size, so that what an earlier one left does not count.
    seed: u64,
    /// Places that messages take turns in.
    slots: u64,
}

impl Pattern {
    /// For the plan's size number `index`.
    pub(crate) fn of(plan: &Plan, index: usize) -> Self {
        let slots = match plan.metric {
            Metric::Bw => slots(plan.sizes[index]),
            Metric::Lat => 1,
        };
        Pattern { seed: index as u64 + 1, slots }
    }

    /// Eight bytes of the message at `slot`, from a multiple of eight.
    fn word(self, lane: usize, slot: u64, position: u64) -> u64 {
        // splitmix64's finaliser: neighbours have nothing in common.
        let mut mixed = self
            .seed
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add((lane as u64) << 48 | slot << 36 | position >> 3)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn byte(self, lane: usize, slot: u64, position: u64) -> u8 {
        self.word(lane, slot, position & !7).to_le_bytes()[(position & 7) as usize]
    }

    /// Writes the messages of `size` bytes of all places.
    pub(crate) fn fill(self, part: &Part, lane: usize, size: u64) {
        for slot in 0..self.slots {
            for position in 0..size {
                let byte = self.byte(lane, slot, position);
                // SAFETY: within the part. A peer may write at the same time: volatile, and by no reference.
                unsafe { part.byte(slot * stride(size) + position).write_volatile(byte) }
            }
        }
    }

    /// Compares `size` bytes at `offset` with message number `message` of `lane`.
    pub(crate) fn check(self, part: &Part, offset: u64, lane: usize, message: u64, size: u64) -> Result<()> {
        let slot = message % self.slots;
        for position in 0..size {
            // SAFETY: within the part; the device writes whole bytes, and has written these before it told of them.
            let found = unsafe { part.byte(offset + position).read_volatile() };
            let expected = self.byte(lane, slot, position);
            if found != expected {
                bail!(
                    "wrong data: byte {position} of message {message} of queue pair {lane} is {found:#04x} instead of \
                     {expected:#04x}"
                );
            }
        }
        Ok(())
    }

    /// Compares the places that `messages` messages of `lane` have used; how many there are.
    pub(crate) fn check_all(self, part: &Part, lane: usize, messages: u64, size: u64) -> Result<u64> {
        let used = messages.min(self.slots);
        for slot in 0..used {
            self.check(part, slot * stride(size), lane, slot, size)?;
        }
        Ok(used)
    }

    /// Compares the words that `messages` atomic operations have counted up, each place in turn; how many there are.
    pub(crate) fn check_counts(self, part: &Part, messages: u64) -> Result<u64> {
        let used = messages.min(self.slots);
        for place in 0..used {
            let expected = messages / self.slots + u64::from(place < messages % self.slots);
            // SAFETY: eight aligned bytes within the part, initialised. A peer may write at the same time: volatile.
            let found = unsafe { part.byte(place * stride(8)).cast::<u64>().read_volatile() };
            if found != expected {
                bail!(
                    "wrong count: word {place} was counted up to {found} by operations that should make it {expected}"
                );
            }
        }
        Ok(used)
    }
}

/// Sets the places that messages of `size` bytes use to zero.
pub(crate) fn clear(part: &Part, size: u64) {
    for offset in 0..slots(size) * stride(size) {
        // SAFETY: within the part. A peer may write at the same time: volatile, and by no reference.
        unsafe { part.byte(offset).write_volatile(0) }
    }
}
