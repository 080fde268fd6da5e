//! Posting and completing batches.

use std::mem;
use std::task::{Context, Waker};

use rdma_safe::endpoint::{BatchError, EndpointMut};
use rdma_safe::{Buffer, EndpointKey, PostError, Work};

use super::connections::{Connections, find};
use super::member::Ended;
use super::queue::Queue;
use super::state::{Done, Held, State};
use crate::core::{Slot, Slots, Ticket};
use crate::effects::Effects;
use crate::{Error, Sharing};

/// An operation of a batch.
#[derive(Debug)]
pub(crate) enum Item {
    /// A send that is not posted.
    Send(Buffer),
    /// Another operation that is not posted.
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
        S::with(&self.state, |state| take_all(&mut state.connections.slots, items, last, done));
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
                    unused.push(state.connections.slots.abandon(slot));
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
        let State { connections: Connections { members, slots, counts }, set, .. } = self;
        let (Some(member), Some(mut endpoint)) = (find(members, key), set.endpoint(key)) else {
            effects.drop_waker(Some(waker));
            return Posted { count: 0, next: Next::Failed(Error::Closed) };
        };
        let room = member.room.share().min(items.len());
        let connection = awaited.then_some(key.index() as u32);
        let items_now = &mut items[..room];
        let (count, failure) = if items_now.iter().all(|item| matches!(item, Item::Send(_))) {
            send_all(&mut endpoint, items_now, slots, connection)
        } else {
            post_all(&mut endpoint, items_now, slots, connection)
        };
        member.room.posted(count as u32);
        counts.posted += count as u64;
        let mut waker = Some(waker);
        if let (Some(last), true) = (items.last().and_then(Item::slot), count == items.len()) {
            // Only the last operation wakes the task. The waker that it had does nothing.
            waker = waker.map(|waker| slots.take_or_store(last, waker).1);
        }
        let next = match (failure, waker) {
            (None, Some(waker)) if count < items.len() => Next::Room(member.room.join(waker)),
            (failure, waker) => {
                effects.drop_waker(waker);
                failure.map_or(Next::Completion, |error| {
                    if let Some(ended) = Ended::of_doubt(&error) {
                        member.end(&ended, effects);
                    } else if let Some(next) = member.room.notify() {
                        // There may still be room.
                        effects.wake(next);
                    }
                    Next::Failed(error)
                })
            }
        };
        Posted { count, next }
    }
}

/// Posts operations with one doorbell. If they are awaited, each has a slot of the connection. Returns their number, and the error
/// that stopped it.
fn post_all(
    endpoint: &mut EndpointMut<'_>,
    items: &mut [Item],
    slots: &mut Slots<Done>,
    connection: Option<u32>,
) -> (usize, Option<Error>) {
    let mut batch = match endpoint.batch() {
        Ok(batch) => batch,
        Err(error) => return (0, Some(rdma_safe::Error::from(error).into())),
    };
    let (mut added, mut failure) = (0, None);
    for item in items.iter_mut() {
        let work = match mem::replace(item, Item::InFlight(Slot::NONE)) {
            Item::Send(buffer) => Work::send(buffer),
            Item::Work(work) => work,
            _ => break,
        };
        let slot = insert_slot(slots, connection);
        match batch.add(work.user_data(slot.number())) {
            Ok(_) => {
                *item = Item::InFlight(slot);
                added += 1;
            }
            Err(rejected) => {
                slots.cancel(slot);
                if let Some(buffer) = rejected.buffer {
                    *item = Item::Returned(buffer);
                }
                failure = Some(rdma_safe::Error::from(rejected.error).into());
                break;
            }
        }
    }
    let mut count = added;
    if let Err(failed) = batch.post() {
        count = failed.posted;
        failure = Some(take_back(&mut items[..added], failed, slots));
    }
    (count, failure)
}

/// Like [`post_all`], for sends only. They take few completion queue entries, because the ring of the endpoint knows which one is
/// the last. Other work would have to be checked before the work in front of it can go without an entry.
fn send_all(
    endpoint: &mut EndpointMut<'_>,
    items: &mut [Item],
    slots: &mut Slots<Done>,
    connection: Option<u32>,
) -> (usize, Option<Error>) {
    let mut taken = 0;
    let buffers = items.iter_mut().map_while(|item| {
        let slot = insert_slot(slots, connection);
        let Item::Send(buffer) = mem::replace(item, Item::InFlight(slot)) else { return None };
        taken += 1;
        Some((buffer, slot.number()))
    });
    match endpoint.send_many_with_user_data(buffers) {
        Ok(count) => (count, None),
        Err(failed) => (failed.posted, Some(take_back(&mut items[..taken], failed, slots))),
    }
}

/// A slot for an operation of the connection, if it is awaited. The last one of a batch gets a waker later.
fn insert_slot(slots: &mut Slots<Done>, connection: Option<u32>) -> Slot {
    connection.map_or(Slot::NONE, |connection| slots.insert(connection, Waker::noop().clone()))
}

/// Handles operations of which the first `failed.posted` were posted, or may have been. The buffers of the others have come back.
fn take_back(items: &mut [Item], failed: BatchError, slots: &mut Slots<Done>) -> Error {
    let (posted, unposted) = items.split_at_mut(failed.posted);
    for (item, buffer) in unposted.iter_mut().zip(failed.buffers) {
        if let Some(slot) = item.slot() {
            slots.cancel(slot);
        }
        *item = Item::Returned(buffer);
    }
    if matches!(failed.error, PostError::MaybePosted { .. }) {
        // The provider does not say what it has posted. Completions may never come.
        for item in posted {
            if let Some(slot) = item.slot() {
                slots.abandon(slot);
            }
            *item = Item::InDoubt;
        }
    }
    rdma_safe::Error::from(failed.error).into()
}
