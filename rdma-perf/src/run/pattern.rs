//! Test patterns for `--validate`.

use anyhow::{Result, bail};

use crate::endpoint::memory::Buffer;
use crate::plan::layout::{slots, stride};
use crate::plan::{Metric, Plan};

/// Content of the memory: each lane, slot and position has its own bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    /// Differs between sizes, so that data of an earlier size is detected.
    seed: u64,
    /// Number of slots that messages cycle through.
    slots: u64,
}

impl Pattern {
    /// The pattern for size number `index` of the plan.
    pub(crate) fn of(plan: &Plan, index: usize) -> Self {
        let slots = match plan.metric {
            Metric::Bw => slots(plan.sizes[index]),
            Metric::Lat => 1,
        };
        Pattern { seed: index as u64 + 1, slots }
    }

    /// Eight bytes of the message in `slot`, at a multiple of eight.
    fn word(self, lane: usize, slot: u64, position: u64) -> u64 {
        // The finalizer of splitmix64, which decorrelates adjacent inputs.
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

    /// Fills all slots with messages of `size` bytes.
    pub(crate) fn fill(self, buffer: &Buffer, lane: usize, size: u64) {
        for slot in 0..self.slots {
            for position in 0..size {
                let byte = self.byte(lane, slot, position);
                // SAFETY: within the buffer. The write is volatile and not through a reference, because a peer may
                // write at the same time.
                unsafe { buffer.byte(slot * stride(size) + position).write_volatile(byte) }
            }
        }
    }

    /// Compares `size` bytes at `offset` with message number `message` of `lane`.
    pub(crate) fn check(self, buffer: &Buffer, offset: u64, lane: usize, message: u64, size: u64) -> Result<()> {
        let slot = message % self.slots;
        for position in 0..size {
            // SAFETY: within the buffer. The device has written these bytes before it reported the message.
            let found = unsafe { buffer.byte(offset + position).read_volatile() };
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

    /// Compares the slots that `messages` messages of `lane` have used, and returns their number.
    pub(crate) fn check_all(self, buffer: &Buffer, lane: usize, messages: u64, size: u64) -> Result<u64> {
        let used = messages.min(self.slots);
        for slot in 0..used {
            self.check(buffer, slot * stride(size), lane, slot, size)?;
        }
        Ok(used)
    }

    /// Checks the words that `messages` atomic operations have incremented, one word after the other. Returns the number of words.
    pub(crate) fn check_counts(self, buffer: &Buffer, messages: u64) -> Result<u64> {
        let used = messages.min(self.slots);
        for slot in 0..used {
            let expected = messages / self.slots + u64::from(slot < messages % self.slots);
            // SAFETY: eight aligned, initialized bytes within the buffer. The read is volatile, because a peer may
            // write at the same time.
            let found = unsafe { buffer.byte(slot * stride(8)).cast::<u64>().read_volatile() };
            if found != expected {
                bail!("wrong count: word {slot} is {found} instead of {expected}");
            }
        }
        Ok(used)
    }
}

/// Zeroes all slots of messages of `size` bytes.
pub(crate) fn clear(buffer: &Buffer, size: u64) {
    for offset in 0..slots(size) * stride(size) {
        // SAFETY: within the buffer. The write is volatile and not through a reference, because a peer may write at the
        // same time.
        unsafe { buffer.byte(offset).write_volatile(0) }
    }
}
