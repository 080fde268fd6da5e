//! Copies of memory that a device may access at the same time.
//!
//! A peer may read and write registered memory at any time, so a program must not refer to such memory by `&[u8]`. If
//! the device is Rust code in the same process, such as a software RNIC, plain loads and stores would be a data race.
//! These functions access each aligned word of eight bytes atomically, and each byte before the first and after the
//! last word. They do not race with each other, or with atomic accesses to aligned 64-bit words.
//!
//! One case is outside Rust's memory model, although processors define it: concurrent atomic accesses of different
//! sizes to the same bytes. It occurs when a copy starts or ends within a word that the other side accesses as a whole.

use core::array;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Size and alignment of a word in bytes.
const WORD: usize = size_of::<AtomicU64>();

/// Words that are copied without a branch between them. One word at a time takes 1.5 times as long as `memcpy`.
const BLOCK: usize = 8;

/// Copies `len` bytes from memory that a device may write at the same time.
///
/// If the device writes during the copy, the result may mix old and new words, but each aligned word is either old or
/// new. The copy has acquire ordering: later reads see everything that the device wrote before the copied bytes.
///
/// # Safety
/// `from` must be valid for reads of `len` bytes, and the whole process must access them atomically during the call.
/// `to` must be valid for writes of `len` bytes that nobody else accesses.
#[inline]
pub unsafe fn read(from: *const u8, to: *mut u8, len: usize) {
    let (head, tail) = edges(from, len);
    let mut at = head;
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `from`. A reference to an
    // atomic may refer to memory that others write atomically, and to memory that is mapped read-only:
    // `core::sync::atomic` allows relaxed loads of a byte or a word of such memory.
    unsafe {
        let byte = |at: usize| to.add(at).write((*from.add(at).cast::<AtomicU8>()).load(Ordering::Relaxed));
        let word = |at: usize| (*from.add(at).cast::<AtomicU64>()).load(Ordering::Relaxed);
        (0..head).for_each(byte);
        while at + BLOCK * WORD <= tail {
            let words: [u64; BLOCK] = array::from_fn(|index| word(at + index * WORD));
            to.add(at).cast::<[u64; BLOCK]>().write_unaligned(words);
            at += BLOCK * WORD;
        }
        (at..tail).step_by(WORD).for_each(|at| to.add(at).cast::<u64>().write_unaligned(word(at)));
        (tail..len).for_each(byte);
    }
    fence(Ordering::Acquire);
}

/// Copies `len` bytes to memory that a device, or its program, may access at the same time.
///
/// Bytes are written in ascending order of their addresses, and the last store has release ordering. A reader that
/// loads the last value with acquire ordering sees all bytes, and everything that was written before.
///
/// # Safety
/// `to` must be valid for writes of `len` bytes, and the whole process must access them atomically during the call.
/// `from` must be valid for reads of `len` bytes that this process does not write. If another process writes them, the copy has
/// bytes from before and after.
#[inline]
pub unsafe fn write(to: *mut u8, from: *const u8, len: usize) {
    let (head, tail) = edges(to, len);
    let mut at = head;
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `to`.
    unsafe {
        let byte = |at: usize| AtomicU8::from_ptr(to.add(at)).store(from.add(at).read(), order(at + 1 == len));
        let word = |at: usize, word: u64, order: Ordering| AtomicU64::from_ptr(to.add(at).cast()).store(word, order);
        (0..head).for_each(byte);
        // The last store is never part of a block, because it has release ordering.
        while at + BLOCK * WORD < tail {
            let words = from.add(at).cast::<[u64; BLOCK]>().read_unaligned();
            (0..BLOCK).for_each(|index| word(at + index * WORD, words[index], Ordering::Relaxed));
            at += BLOCK * WORD;
        }
        for at in (at..tail).step_by(WORD) {
            word(at, from.add(at).cast::<u64>().read_unaligned(), order(at + WORD == len));
        }
        (tail..len).for_each(byte);
    }
}

const fn order(is_last: bool) -> Ordering {
    if is_last { Ordering::Release } else { Ordering::Relaxed }
}

/// Offsets where the aligned words of a range start and end.
fn edges(address: *const u8, len: usize) -> (usize, usize) {
    let head = (address.addr().wrapping_neg() % WORD).min(len);
    (head, head + (len - head) / WORD * WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(8))]
    struct Memory([u8; 240]);

    #[test]
    fn every_byte_is_copied_and_no_other() {
        let source: [u8; 240] = array::from_fn(|at| at as u8 + 1);
        for start in 0..9 {
            for len in (0..=24).chain([63, 64, 65, 128, 135, 136, 137, 200, 231]) {
                let mut memory = Memory([0; 240]);
                // SAFETY: both ranges lie in arrays that nobody else accesses.
                unsafe { write(memory.0.as_mut_ptr().add(start), source.as_ptr(), len) };
                let mut expected = [0; 240];
                expected[start..start + len].copy_from_slice(&source[..len]);
                assert_eq!(memory.0, expected, "{len} bytes at {start}");
                let mut back = [0; 240];
                // SAFETY: both ranges lie in arrays that nobody else accesses.
                unsafe { read(memory.0.as_mut_ptr().add(start), back.as_mut_ptr(), len) };
                assert_eq!((&back[..len], &back[len..]), (&source[..len], &[0; 240][len..]), "{len} bytes at {start}");
            }
        }
    }
}
