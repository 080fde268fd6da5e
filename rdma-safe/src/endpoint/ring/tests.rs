//! Tests of the ring.

use super::*;
use crate::WcStatus;
use std::collections::VecDeque;
use std::rc::Rc;

const SIGNALED: Kind = Kind::signaled(Operation::Send);
const UNSIGNALED: Kind = Kind::unsignaled(Operation::Send);
const SILENT: Kind = Kind { silent: true, ..UNSIGNALED };
const FAILED: Outcome = Outcome { status: WcStatus::RETRY_EXC_ERR, ..Outcome::DONE };

impl<B> Ring<B> {
    fn done(&mut self, sequence: u64) -> bool {
        self.complete(sequence, |_| Outcome::DONE)
    }

    fn add(&mut self, buffer: Option<B>, kind: Kind) -> u64 {
        let sequence = self.next_sequence();
        self.push(buffer, kind);
        sequence
    }

    fn next(&mut self) -> Option<(u64, Option<B>)> {
        self.pop().map(|done| (done.sequence, done.buffer))
    }
}

#[test]
fn a_completion_releases_earlier_unsignaled_entries() {
    let mut ring = Ring::new(4, 0, SIGNALED);
    for (value, kind) in [(10, UNSIGNALED), (11, UNSIGNALED), (12, SIGNALED), (13, SIGNALED)] {
        assert!(!ring.is_full());
        ring.add(Some(value), kind);
    }
    assert!(ring.is_full());
    assert!(!ring.done(4), "the third entry is signaled");
    assert!(ring.done(3));
    assert!(!ring.done(3), "a repeated completion names nothing");
    assert!(!ring.done(5), "a completion of a future entry names nothing");
    assert_eq!(ring.next(), Some((1, Some(10))));
    assert!(!ring.is_full());
    assert_eq!(ring.next(), Some((2, Some(11))));
    assert_eq!(ring.next(), Some((3, Some(12))));
    assert_eq!(ring.next(), None, "the fourth is in flight");
    assert_eq!(ring.in_flight(), 1);
}

#[test]
fn a_completion_of_zeros_names_no_entry() {
    let mut ring = Ring::new(2, 0, SIGNALED);
    ring.add(Some(()), SIGNALED);
    assert!(!ring.done(0));
}

#[test]
fn the_oldest_entry_is_taken_if_it_has_a_buffer() {
    let mut ring = Ring::new(2, 0, SIGNALED);
    ring.add(Some('a'), SIGNALED);
    ring.add(None, SIGNALED);
    assert_eq!((ring.oldest(), ring.take_oldest()), (1, Some('a')));
    assert_eq!((ring.oldest(), ring.take_oldest()), (2, None));
    assert!(ring.done(2));
    assert_eq!(ring.next(), Some((2, None)));
    assert_eq!((ring.oldest(), ring.take_oldest()), (3, None), "it was never posted");
}

#[test]
fn silent_work_is_skipped_unless_it_failed() {
    let mut ring = Ring::new(4, 0, SIGNALED);
    for kind in [SILENT, SILENT, SIGNALED] {
        ring.add(Some(()), kind);
    }
    assert!(!ring.complete_all(4, FAILED), "it was never posted, so the others do not fail");
    assert!(ring.complete_all(1, FAILED) && ring.done(3));
    let failed = ring.pop().unwrap();
    assert_eq!((failed.sequence, failed.outcome), (1, FAILED));
    assert_eq!(ring.next(), Some((3, Some(()))));
}

#[test]
fn a_reused_slot_does_not_keep_the_old_outcome() {
    let mut ring = Ring::new(2, 0, SIGNALED);
    assert_eq!([(); 2].map(|()| ring.add(Some(()), UNSIGNALED)), [1, 2]);
    assert!(ring.complete_all(2, FAILED));
    assert_eq!([(); 2].map(|()| ring.pop().unwrap().outcome), [FAILED; 2]);
    assert_eq!([(); 2].map(|()| ring.add(Some(()), UNSIGNALED)), [3, 4]);
    assert!(ring.done(4));
    assert_eq!([(); 2].map(|()| ring.pop().unwrap().outcome), [Outcome::DONE; 2]);
}

#[test]
fn staged_entries_can_be_removed_and_cannot_complete() {
    let mut ring = Ring::new(4, 0, SIGNALED);
    for value in ['a', 'b', 'c'] {
        ring.stage(Some(value), UNSIGNALED);
    }
    assert!(!ring.done(1), "nothing is posted");
    assert_eq!(ring.in_flight(), 0);
    ring.commit_first(1);
    assert_eq!(ring.pop_staged().map(|(buffer, _)| buffer), Some(Some('c')));
    ring.roll_back();
    assert!(ring.pop_staged().is_none(), "the first is posted");
    assert_eq!(ring.stage(Some('d'), SIGNALED), 2);
    ring.commit();
    assert!(ring.done(2));
    assert_eq!(ring.next(), Some((1, Some('a'))));
}

#[test]
fn every_entry_is_dropped_once_or_leaked() {
    let witness = Rc::new(());
    let mut ring = Ring::new(3, 0, SIGNALED);
    for _ in 0..3 {
        ring.add(Some(Rc::clone(&witness)), SIGNALED);
    }
    assert!(ring.done(1));
    drop(ring.pop());
    assert_eq!(Rc::strong_count(&witness), 3);
    assert_eq!(ring.take_buffers().count(), 2);
    assert_eq!(Rc::strong_count(&witness), 1);
    ring.add(Some(Rc::clone(&witness)), SIGNALED);
    drop(ring);
    assert_eq!(Rc::strong_count(&witness), 1);
}

#[test]
fn pending_entries_are_posted_in_order_when_there_is_room() {
    let mut ring = Ring::with_pending(2, 3, 0, SIGNALED);
    ring.add(Some(1), SIGNALED);
    ring.add(Some(2), SIGNALED);
    for value in 3..=5 {
        assert!(ring.is_full());
        ring.add_pending(Some(value), None, SIGNALED);
    }
    assert_eq!((ring.pending(), ring.in_flight(), ring.postable()), (3, 5, (0, 3)));
    assert!(!ring.done(3), "it is not posted");
    assert!(ring.done(1));
    assert_eq!(ring.postable(), (0, 3), "completed, but not handed out");
    assert_eq!(ring.next(), Some((1, Some(1))));
    assert_eq!((ring.postable(), ring.is_full()), ((1, 3), true), "the room is for pending entries");
    assert_eq!(ring.buffer(3), Some(&3));
    ring.mark_posted(1);
    assert_eq!((ring.pending(), ring.postable()), (2, (0, 4)));
    assert!(ring.done(2));
    assert!(ring.done(3));
    assert_eq!([ring.next(), ring.next()], [Some((2, Some(2))), Some((3, Some(3)))]);
    assert_eq!(ring.postable(), (2, 4));
    ring.mark_posted(2);
    assert!(ring.is_full());
    assert!(ring.done(4));
    assert!(ring.done(5));
    assert_eq!([ring.next(), ring.next()], [Some((4, Some(4))), Some((5, Some(5)))]);
    assert!(!ring.is_full());
}

#[test]
fn pending_entries_complete_after_those_in_flight() {
    let mut ring = Ring::with_pending(1, 2, 0, SIGNALED);
    ring.add(Some('a'), SIGNALED);
    ring.add_pending(Some('b'), None, SIGNALED);
    ring.add_pending(None, None, SILENT);
    ring.complete_pending(FAILED);
    assert_eq!(ring.pending(), 2, "the first is in flight");
    assert!(ring.done(1));
    ring.complete_pending(FAILED);
    assert_eq!(ring.pending(), 0);
    let ended: Vec<_> = std::iter::from_fn(|| ring.pop()).map(|done| (done.buffer, done.outcome)).collect();
    assert_eq!(ended, [(Some('a'), Outcome::DONE), (Some('b'), FAILED), (None, FAILED)]);
    assert_eq!((ring.in_flight(), ring.is_full()), (0, false));
    assert_eq!(ring.add(Some('c'), SIGNALED), 4);
}

/// Compares the ring with a model, over a fixed pseudo-random sequence and capacities that are not powers of two.
#[test]
fn a_ring_behaves_like_a_queue() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    for (capacity, mark) in [(1, 0), (2, 0), (3, 1 << 63), (5, 0), (8, 1 << 63), (13, 0)] {
        let mut ring = Ring::new(capacity, mark, UNSIGNALED);
        let (mut completed, mut in_flight) = (VecDeque::new(), VecDeque::new());
        for _ in 0..if cfg!(miri) { 100 } else { 5000 } {
            match next(5) {
                0 | 1 => {
                    let room = completed.len() + in_flight.len() < capacity as usize;
                    assert_eq!(ring.is_full(), !room);
                    if room {
                        let value = Box::new(next(1000));
                        let sequence = ring.add(Some(value.clone()), UNSIGNALED);
                        in_flight.push_back((sequence, value));
                    }
                }
                2 if !in_flight.is_empty() => {
                    let upto = next(in_flight.len() as u64) as usize;
                    assert!(ring.done(in_flight[upto].0));
                    completed.extend(in_flight.drain(..=upto).map(|(sequence, value)| (sequence, Some(value))));
                }
                3 if completed.is_empty() && !in_flight.is_empty() => {
                    let (sequence, value) = in_flight.pop_front().unwrap();
                    assert_eq!(ring.oldest(), sequence);
                    assert_eq!(ring.take_oldest(), Some(value));
                }
                _ => assert_eq!(ring.next(), completed.pop_front()),
            }
            assert_eq!(ring.in_flight(), in_flight.len() as u64);
        }
    }
}
