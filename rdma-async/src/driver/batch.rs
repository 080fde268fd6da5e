//! Posting and completing batches.

use std::mem;
use std::task::{Context, Waker};

use rdma_safe::endpoint::EndpointMut;
use rdma_safe::{Buffer, EndpointKey, PostError, Work};

use super::queue::Queue;
use super::state::{Done, Held, State, find};
use crate::core::{Slot, Slots, Ticket};
use crate::effects::Effects;
use crate::{Error, Sharing};

/// An operation of a batch.
#[derive(Debug)]
pub(crate) enum Item {
    /// Not posted.
    Work(Work<'static>),
    /// In flight. It has a slot if it is awaited.
    InFlight(Slot),
    /// Its buffer has come back: it has succeeded, or was not posted.
    Returned(Buffer),
    /// It has failed.
    Ended(Done),
    /// The provider does not say whether it was posted. The device may use its memory until the endpoint is removed.
    InDoubt,
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
    /// Posts the operations that fit in the send queue, with one doorbell. Posts nothing while earlier tasks wait.
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

    /// Takes the results once the last operation has completed. Until then returns `false`, and that operation wakes the task.
    pub(crate) fn take_batch(&self, items: &mut [Item], context: &Context<'_>) -> bool {
        let Some(last) = items.iter().rev().find_map(Item::slot) else { return true };
        let Some(done) = self.take(last, context) else { return false };
        S::with(&self.state, |state| take_all(&mut state.slots, items, last, done));
        true
    }

    /// Gives up the slots of operations. Their results are dropped.
    pub(crate) fn abandon_batch(&self, items: &mut [Item]) {
        if self.events.is_inherited() || items.iter().all(|item| item.slot().is_none()) {
            return;
        }
        let mut unused = Vec::new();
        S::with(&self.state, |state| {
            for item in items {
                if let Some(slot) = item.slot() {
                    unused.push(state.slots.abandon(slot));
                    *item = Item::InFlight(Slot::NONE);
                }
            }
        });
        drop(unused);
    }
}

/// Stores the results of a batch. `done` is the result of `last`.
fn take_all(slots: &mut Slots<Done>, items: &mut [Item], last: Slot, done: Done) {
    let mut done = Some(done);
    for item in items {
        let Some(slot) = item.slot() else { continue };
        // Operations complete in order.
        let result = if slot == last { done.take() } else { slots.take(slot, Waker::noop()).ok() };
        *item = match result {
            Some(Done::Buffer(buffer)) => Item::Returned(buffer),
            other => Item::Ended(other.unwrap_or(Done::Removed)),
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
        let waker = match self.admit(key, ticket, waker, effects) {
            Ok(waker) => waker,
            Err(Held::Waiting(ticket)) => return Posted { count: 0, next: Next::Room(ticket) },
            Err(Held::Ended(error)) => return Posted { count: 0, next: Next::Failed(error) },
        };
        let State { members, set, slots, counts, .. } = self;
        let (Some(member), Some(mut endpoint)) = (find(members, key), set.endpoint(key)) else {
            effects.drop_waker(Some(waker));
            return Posted { count: 0, next: Next::Failed(Error::Closed) };
        };
        // Leaves a place for each other task that was notified, but takes at least one.
        let room = member.room_left().saturating_sub(member.room.notified()).max(1).min(items.len());
        let Batched { first, count, in_doubt, failure } = post_all(&mut endpoint, &mut items[..room]);
        let is_complete = count == items.len();
        let mut waker = Some(waker);
        for (index, item) in items[..count].iter_mut().enumerate() {
            let slot = match awaited && !in_doubt {
                // Only the last one wakes the task.
                true if is_complete && index + 1 == count => {
                    waker.take().map_or(Slot::NONE, |waker| slots.insert(waker))
                }
                true => slots.insert(Waker::noop().clone()),
                false => Slot::NONE,
            };
            member.posted(first + index as u64, slot);
            counts.posted += 1;
            *item = if in_doubt { Item::InDoubt } else { Item::InFlight(slot) };
        }
        let next = match (failure, waker) {
            (None, Some(waker)) if !is_complete => Next::Room(member.room.join(waker)),
            (failure, waker) => {
                effects.drop_waker(waker);
                failure.map_or(Next::Completion, |error| {
                    // There may still be room.
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

/// The result of one doorbell.
struct Batched {
    /// The first sequence number.
    first: u64,
    count: usize,
    /// Whether the provider does not say what it has posted. Then completions may never come.
    in_doubt: bool,
    /// The error that stopped it.
    failure: Option<Error>,
}

/// Posts operations with one doorbell.
fn post_all(endpoint: &mut EndpointMut<'_>, items: &mut [Item]) -> Batched {
    let mut batched = Batched { first: 0, count: 0, in_doubt: false, failure: None };
    let mut batch = match endpoint.batch() {
        Ok(batch) => batch,
        Err(error) => return Batched { failure: Some(rdma_safe::Error::from(error).into()), ..batched },
    };
    for item in items.iter_mut() {
        let Item::Work(work) = mem::replace(item, Item::InFlight(Slot::NONE)) else { break };
        match batch.add(work) {
            Ok(id) => {
                batched.first = if batched.count == 0 { id.sequence() } else { batched.first };
                batched.count += 1;
            }
            Err(rejected) => {
                if let Some(buffer) = rejected.buffer {
                    *item = Item::Returned(buffer);
                }
                batched.failure = Some(rdma_safe::Error::from(rejected.error).into());
                break;
            }
        }
    }
    if let Err(failed) = batch.post() {
        batched.in_doubt = matches!(failed.error, PostError::MaybePosted { .. });
        let added = batched.count;
        batched.count -= failed.buffers.len();
        for (item, buffer) in items[batched.count..added].iter_mut().zip(failed.buffers) {
            *item = Item::Returned(buffer);
        }
        batched.failure = Some(rdma_safe::Error::from(failed.error).into());
    }
    batched
}
