//! Copies of memory that a device may access at the same time.
//!
//! A peer reads and writes registered memory whenever it likes, so a program must not refer to such memory by `&[u8]`. It also
//! must not access it by plain loads and stores where the device is Rust code of the same process, as a software RNIC is: that
//! is a data race. These copies are atomic in each aligned word of eight bytes, and in each single byte before the first and
//! after the last word. Together with copies of the same kind, and with atomic access to aligned 64-bit words, they never race.
//!
//! Access of different sizes to the same bytes at the same time is outside Rust's memory model, although processors define
//! it: a copy whose edge lies within a word that the other side accesses as a whole.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Bytes of a word, and its alignment.
const WORD: usize = size_of::<AtomicU64>();

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
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `from`. Relaxed loads of one byte
    // or one word are allowed for memory that is mapped read-only.
    unsafe {
        let byte = |at: usize| to.add(at).write(AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed));
        (0..head).for_each(byte);
        for at in (head..tail).step_by(WORD) {
            let word = AtomicU64::from_ptr(from.add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.add(at).cast::<u64>().write_unaligned(word);
        }
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
    // SAFETY: all offsets are below `len`, and the words between the edges are aligned in `to`.
    unsafe {
        let byte = |at: usize| AtomicU8::from_ptr(to.add(at)).store(from.add(at).read(), order(at + 1 == len));
        (0..head).for_each(byte);
        for at in (head..tail).step_by(WORD) {
            let word = from.add(at).cast::<u64>().read_unaligned();
            AtomicU64::from_ptr(to.add(at).cast()).store(word, order(at + WORD == len));
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
    struct Memory([u8; 40]);

    #[test]
    fn every_byte_is_copied_and_no_other() {
        let source: [u8; 40] = core::array::from_fn(|at| at as u8 + 1);
        for start in 0..9 {
            for len in 0..=24 {
                let mut memory = Memory([0; 40]);
                // SAFETY: both ranges lie within arrays that nobody else accesses.
                unsafe { write(memory.0.as_mut_ptr().add(start), source.as_ptr(), len) };
                let mut expected = [0; 40];
                expected[start..start + len].copy_from_slice(&source[..len]);
                assert_eq!(memory.0, expected, "{len} bytes at {start}");
                let mut back = [0; 40];
                // SAFETY: as above.
                unsafe { read(memory.0.as_ptr().add(start), back.as_mut_ptr(), len) };
                assert_eq!((&back[..len], &back[len..]), (&source[..len], &[0; 40][len..]), "{len} bytes at {start}");
            }
        }
    }
}
