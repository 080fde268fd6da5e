//! Posting and completing batches.

use std::task::{Context, Waker};

use rdma_safe::endpoint::EndpointMut;
use rdma_safe::{Buffer, EndpointKey, Work};

use super::member::Ended;
use super::queue::Queue;
use super::state::{Done, State, find};
use crate::core::{Slot, Ticket};
use crate::effects::Effects;
use crate::{Error, Sharing};

/// An operation of a batch.
#[derive(Debug)]
pub(crate) enum Item {
    /// Not posted.
    Work(Work<'static>),
    /// In flight. It has a slot if it is awaited.
    InFlight(Slot),
    /// It has succeeded, or was rejected.
    Back(Buffer),
    /// It has failed.
    Ended(Done),
}

impl Item {
    /// The slot of an operation in flight that is awaited.
    fn slot(&self) -> Option<Slot> {
        if let Item::InFlight(slot) = self { Some(*slot).filter(|slot| *slot != Slot::NONE) } else { None }
    }
}

/// The result of posting the rest of a batch.
pub(crate) struct Posted {
    /// Number of operations that were posted.
    pub(crate) count: usize,
    pub(crate) next: Next,
}

pub(crate) enum Next {
    /// Wait for the last operation that was posted, which has the waker.
    Completion,
    /// Wait for room for the rest, until the ticket is notified.
    Room(Ticket),
    /// The rest cannot be posted.
    Failed(Error),
}

impl<S: Sharing> Queue<S> {
    /// Posts as many of these operations as there is room for, with one doorbell, if their turn has come.
    pub(crate) fn post_batch(
        &self,
        key: EndpointKey,
        items: &mut [Item],
        ticket: Option<Ticket>,
        awaited: bool,
        waker: Waker,
    ) -> Posted {
        let mut effects = Effects::default();
        let posted = S::with(&self.state, |state| state.post_batch(key, items, ticket, awaited, waker, &mut effects));
        effects.run();
        posted
    }

    /// Takes the results of operations that are in flight. Returns whether it has them all. If not, wakes the task once the last
    /// one has completed, since they complete in order.
    pub(crate) fn take_batch(&self, items: &mut [Item], context: &Context<'_>) -> bool {
        let last = items.iter().rev().find_map(Item::slot);
        let Some(last) = last else { return true };
        let needs_waker = S::with(&self.state, |state| {
            let done = match state.slots.take(last, context.waker()) {
                Ok(done) => done,
                Err(is_other) => return Some(is_other),
            };
            take_all(state, items, last, done);
            None
        });
        match needs_waker {
            None => true,
            Some(false) => false,
            Some(true) => {
                let waker = context.waker().clone();
                let (is_done, unused) = S::with(&self.state, |state| {
                    let (done, unused) = state.slots.take_or_store(last, waker);
                    let is_done = done.is_some();
                    if let Some(done) = done {
                        take_all(state, items, last, done);
                    }
                    (is_done, unused)
                });
                drop(unused);
                is_done
            }
        }
    }

    /// The future of a batch in flight is dropped.
    #[cold]
    pub(crate) fn abandon_batch(&self, items: &[Item]) {
        for item in items {
            if let Some(slot) = item.slot() {
                self.abandon(slot);
            }
        }
    }
}

/// Stores the results of a batch, of whose last operation `done` is the result.
fn take_all<S: Sharing>(state: &mut State<S>, items: &mut [Item], last: Slot, done: Done) {
    let mut done = Some(done);
    for item in items {
        let Some(slot) = item.slot() else { continue };
        let result = if slot == last { done.take() } else { state.slots.take(slot, Waker::noop()).ok() };
        *item = match result {
            Some(Done::Buffer(buffer)) => Item::Back(buffer),
            Some(failed) => Item::Ended(failed),
            None => {
                debug_assert!(false, "operations complete in order");
                Item::Ended(Done::Removed)
            }
        };
    }
}

impl<S: Sharing> State<S> {
    fn post_batch(
        &mut self,
        key: EndpointKey,
        items: &mut [Item],
        ticket: Option<Ticket>,
        awaited: bool,
        waker: Waker,
        effects: &mut Effects,
    ) -> Posted {
        let State { members, set, slots, counts, broken, .. } = self;
        let Some(member) = find(members, key) else {
            effects.drop_waker(Some(waker));
            return Posted { count: 0, next: Next::Failed(Ended::of_removed(broken).error()) };
        };
        if let Some(ended) = &member.ended {
            let error = ended.error();
            effects.drop_waker(Some(waker));
            effects.drop_waker(ticket.and_then(|ticket| member.room.leave(ticket).1));
            return Posted { count: 0, next: Next::Failed(error) };
        }
        let ticket = match ticket {
            Some(ticket) if !member.room.is_notified(&ticket) => {
                effects.drop_waker(Some(member.room.set_waker(&ticket, waker)));
                return Posted { count: 0, next: Next::Room(ticket) };
            }
            None if !member.has_room() => {
                counts.waited += 1;
                return Posted { count: 0, next: Next::Room(member.room.join(waker)) };
            }
            ticket => ticket,
        };
        // Leaves room for the other tasks that were notified. But like a single operation, it need not wait for them.
        let others = member.room.notified() - usize::from(ticket.is_some());
        let room_left = member.room_left();
        let room = items.len().min(room_left.saturating_sub(others).max(room_left.min(1)));
        let (first, count, failure) = match set.endpoint(key) {
            Some(mut endpoint) => post_all(&mut endpoint, &mut items[..room]),
            None => (0, 0, Some(Error::Closed)),
        };
        let is_complete = count == items.len();
        let mut waker = Some(waker);
        for (index, item) in items[..count].iter_mut().enumerate() {
            // Only the last one wakes the task.
            let is_last = is_complete && index + 1 == count;
            let waker = waker.take_if(|_| is_last);
            let slot = match awaited {
                true => slots.insert(waker.unwrap_or_else(|| Waker::noop().clone())),
                false => {
                    effects.drop_waker(waker);
                    Slot::NONE
                }
            };
            member.posted(first + index as u64, slot);
            counts.posted += 1;
            *item = Item::InFlight(slot);
        }
        let next = match (failure, waker) {
            (None, Some(waker)) if count == 0 => Next::Room(match ticket {
                // Another operation has taken the place.
                Some(ticket) => {
                    member.room.rejoin(&ticket, waker);
                    ticket
                }
                None => member.room.join(waker),
            }),
            (None, Some(waker)) => {
                effects.drop_waker(ticket.and_then(|ticket| member.room.leave(ticket).1));
                Next::Room(member.room.join(waker))
            }
            (failure, waker) => {
                effects.drop_waker(waker);
                effects.drop_waker(ticket.and_then(|ticket| member.room.leave(ticket).1));
                failure.map_or(Next::Completion, |error| {
                    // Its place may still be free.
                    if let Some(next) = member.room.notify() {
                        effects.wake(next);
                    }
                    Next::Failed(error)
                })
            }
        };
        Posted { count, next }
    }
}

/// Posts operations with one doorbell. Returns the number of the first one, how many were posted, and why the others were not.
fn post_all(endpoint: &mut EndpointMut<'_>, items: &mut [Item]) -> (u64, usize, Option<Error>) {
    let (mut first, mut added, mut failure) = (None, 0, None);
    let mut batch = match endpoint.batch() {
        Ok(batch) => batch,
        Err(error) => return (0, 0, Some(rdma_safe::Error::from(error).into())),
    };
    for item in items.iter_mut() {
        let Item::Work(work) = std::mem::replace(item, Item::Ended(Done::Removed)) else { break };
        match batch.add(work) {
            Ok(id) => {
                first = first.or(Some(id.sequence()));
                added += 1;
            }
            Err(rejected) => {
                if let Some(buffer) = rejected.buffer {
                    *item = Item::Back(buffer);
                }
                failure = Some(rdma_safe::Error::from(rejected.error).into());
                break;
            }
        }
    }
    if let Err(failed) = batch.post() {
        let posted = added - failed.buffers.len();
        for (item, buffer) in items[posted..added].iter_mut().zip(failed.buffers) {
            *item = Item::Back(buffer);
        }
        added = posted;
        failure = Some(rdma_safe::Error::from(failed.error).into());
    }
    (first.unwrap_or(0), added, failure)
}
