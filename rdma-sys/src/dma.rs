//! Copies of memory that a device may access at the same time.
//!
//! A peer reads and writes registered memory whenever it likes, so a program must not refer to such memory by `&[u8]`. It also
//! must not access it by plain loads and stores where the device is Rust code of the same process, as a software RNIC is: that
//! is a data race. These copies are atomic in each aligned word of eight bytes, and in each single byte before the first and
//! after the last word. Together with copies of the same kind, and with atomic access to aligned 64-bit words, they never race.
//!
//! Access of different sizes to the same bytes at the same time is outside Rust's memory model, although processors define
//! it: a copy whose edge lies within a word that the other side accesses as a whole.

use core::array;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Bytes of a word, and its alignment.
const WORD: usize = size_of::<AtomicU64>();

/// Words that are copied without a branch between them: one by one they take half as long again as `memcpy`.
const BLOCK: usize = 8;

/// Copies `len` bytes from memory that a device may write to at the same time.
///
/// A copy that overlaps a write in time has old bytes and new ones, but each aligned word is either old or new. Whatever the
/// device wrote before the bytes that were found is seen by later reads.
///
/// # Safety
/// `from` is valid for reads of `len` bytes, and the whole process accesses them atomically while this runs. `to` is valid for
/// writes of `len` bytes that nobody else accesses.
#[inline]
pub unsafe fn read(from: *const u8, to: *mut u8, len: usize) {
    let (head, tail) = edges(from, len);
    let mut at = head;
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `from`. References to atomics may be
    // to memory that others write to atomically. It may also be mapped read-only: `core::sync::atomic` allows relaxed loads of
    // one byte or one word of that.
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

/// Copies `len` bytes to memory that a device, or the program of a device, may access at the same time.
///
/// Bytes are written in the order of their addresses, and the last store has release ordering: who finds it with acquire ordering
/// finds all bytes, and all that was written before.
///
/// # Safety
/// `to` is valid for writes of `len` bytes, and the whole process accesses them atomically while this runs. `from` is valid for
/// reads of `len` bytes that nobody writes to.
#[inline]
pub unsafe fn write(to: *mut u8, from: *const u8, len: usize) {
    let (head, tail) = edges(to, len);
    let mut at = head;
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `to`.
    unsafe {
        let byte = |at: usize| AtomicU8::from_ptr(to.add(at)).store(from.add(at).read(), order(at + 1 == len));
        let word = |at: usize, word: u64, order: Ordering| AtomicU64::from_ptr(to.add(at).cast()).store(word, order);
        (0..head).for_each(byte);
        // The last store is none of a block.
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

/// Where the aligned words of a range begin, and where they end.
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
                // SAFETY: both ranges lie within arrays that nobody else accesses.
                unsafe { write(memory.0.as_mut_ptr().add(start), source.as_ptr(), len) };
                let mut expected = [0; 240];
                expected[start..start + len].copy_from_slice(&source[..len]);
                assert_eq!(memory.0, expected, "{len} bytes at {start}");
                let mut back = [0; 240];
                // SAFETY: as above.
                unsafe { read(memory.0.as_mut_ptr().add(start), back.as_mut_ptr(), len) };
                assert_eq!((&back[..len], &back[len..]), (&source[..len], &[0; 240][len..]), "{len} bytes at {start}");
            }
        }
    }
}
