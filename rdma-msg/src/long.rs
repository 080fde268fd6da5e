//! Memory of messages that arrive in parts.
//!
//! An allocator gives long allocations back to the system, so each message would cost a page fault for each of its pages. That
//! takes longer than the copy. So the process keeps some of this memory for the next messages.

use std::collections::VecDeque;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

/// Shortest and longest memory that is kept, in bytes.
const KEPT: (usize, usize) = (16 << 10, 4 << 20);

/// Bytes that are kept in total, at most.
const MOST: usize = 16 << 20;

/// Most pieces of memory that are kept.
const PIECES: usize = 64;

/// Spare memory is used if it is at most this many times as long as the message.
const FIT: usize = 2;

/// Memory that waits for the next messages, the oldest first.
struct Spares {
    all: VecDeque<Vec<u8>>,
    bytes: usize,
}

static SPARES: Mutex<Spares> = Mutex::new(Spares { all: VecDeque::new(), bytes: 0 });

/// The spare memory. `None` while another thread has locked it: waiting would cost more than an allocation, and a forked child
/// would wait for ever if it was locked at the fork.
fn spares() -> Option<MutexGuard<'static, Spares>> {
    SPARES.try_lock().ok()
}

/// The bytes of a long message. Its memory is kept for others when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Long(Vec<u8>);

impl Long {
    /// Empty memory for `len` bytes. `None` if there is none.
    pub(crate) fn with_capacity(len: usize) -> Option<Self> {
        if let Some(bytes) = spares().and_then(|mut spares| spares.take(len)) {
            return Some(Long(bytes));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        Some(Long(bytes))
    }

    pub(crate) fn into_vec(mut self) -> Vec<u8> {
        mem::take(&mut self.0)
    }
}

impl Spares {
    /// The shortest memory that fits.
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let fits = len..=len.saturating_mul(FIT);
        let fitting = self.all.iter().map(Vec::capacity).enumerate().filter(|(_, capacity)| fits.contains(capacity));
        let (at, capacity) = fitting.min_by_key(|(_, capacity)| *capacity)?;
        self.bytes -= capacity;
        self.all.remove(at)
    }

    /// Keeps memory. Frees the oldest if there is too much.
    fn keep(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        self.bytes += bytes.capacity();
        self.all.push_back(bytes);
        while self.bytes > MOST || self.all.len() > PIECES {
            let Some(oldest) = self.all.pop_front() else { return };
            self.bytes -= oldest.capacity();
        }
    }
}

impl From<Vec<u8>> for Long {
    fn from(bytes: Vec<u8>) -> Self {
        Long(bytes)
    }
}

impl Deref for Long {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Long {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        let bytes = mem::take(&mut self.0);
        if !(KEPT.0..=KEPT.1).contains(&bytes.capacity()) {
            return;
        }
        if let Some(mut spares) = spares() {
            spares.keep(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spares(capacities: &[usize]) -> Spares {
        let mut spares = Spares { all: VecDeque::new(), bytes: 0 };
        capacities.iter().for_each(|capacity| spares.keep(Vec::with_capacity(*capacity)));
        spares
    }

    fn capacity(taken: Option<Vec<u8>>) -> Option<usize> {
        taken.as_ref().map(Vec::capacity)
    }

    #[test]
    fn the_shortest_memory_that_fits_is_taken() {
        let mut spares = spares(&[240, 100, 200, 150]);
        assert_eq!(spares.bytes, 690);
        assert_eq!(capacity(spares.take(120)), Some(150));
        assert_eq!(capacity(spares.take(120)), Some(200));
        assert_eq!(capacity(spares.take(120)), Some(240));
        assert_eq!(capacity(spares.take(120)), None, "too short");
        assert_eq!(capacity(spares.take(49)), None, "too long");
        assert_eq!(capacity(spares.take(50)), Some(100));
        assert_eq!((spares.bytes, spares.all.len()), (0, 0));
    }

    #[test]
    fn no_more_than_the_limit_is_kept_and_no_bytes_of_a_message() {
        let mut spares = spares(&[MOST - 10, 10]);
        let mut used = Vec::with_capacity(11);
        used.push(1);
        spares.keep(used);
        assert_eq!((spares.bytes, spares.all.len()), (21, 2), "the oldest is freed");
        assert!(spares.take(11).is_some_and(|taken| taken.is_empty()));
        (0..2 * PIECES).for_each(|_| spares.keep(Vec::with_capacity(1)));
        assert_eq!((spares.bytes, spares.all.len()), (PIECES, PIECES));
    }

    #[test]
    fn the_memory_of_a_message_serves_the_next_one() {
        // Another test may lock the spare memory, or take it. New memory would have exactly the capacity that is asked for.
        let is_reused = |_| {
            let mut first = Long::with_capacity(3_141_593).unwrap();
            first.push(1);
            drop(first);
            let second = Long::with_capacity(3_141_590).unwrap();
            assert!(second.is_empty() && second.capacity() >= 3_141_590);
            second.capacity() == 3_141_593
        };
        assert!((0..1000).any(is_reused));
        assert!(Long::with_capacity(usize::MAX).is_none());
        let own = Long::from(vec![1; KEPT.0]);
        assert_eq!(own.into_vec(), [1; KEPT.0]);
    }
}
