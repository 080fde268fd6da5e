//! What the lock of a queue protects.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use rdma_safe::endpoint::{DatagramSender, FailedWork, Rejected};
use rdma_safe::{Buffer, Completion, EndpointKey, EndpointSet, Gather, PollError, PostError};

use super::connections::{Connections, Counts, Delivery, fail_operations, find, finish};
use super::events::Source;
use super::look::Misses;
use super::member::{Ended, Member};
use crate::core::{Slot, Slots, Ticket};
use crate::effects::Effects;
use crate::operation::Step;
use crate::receive::Arrived;
use crate::{Error, Failed, Request, Sharing};

/// What the lock of a queue protects.
pub(super) struct State<S: Sharing> {
    pub(super) set: EndpointSet,
    pub(super) connections: Connections<S>,
    /// Connections that this side is closing.
    pub(super) leaving: Vec<EndpointKey>,
    /// [`Counts::exceeded`] when connections were last stopped for it.
    pub(super) exceeded_before: u64,
    /// Why no connection of the queue works any more.
    pub(super) broken: Option<Ended>,
    pub(super) misses: Misses,
    /// Reports events of the completion queue.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code, reason = "its drop ends the reports"))]
    pub(super) source: Source<S>,
}

/// Most completions to take while the lock is held.
pub(super) const BATCH: usize = 32;

/// An operation that is not in flight.
pub(crate) enum Unposted<R> {
    /// It waits for room in the send queue, until the ticket is notified.
    Waiting(R, Ticket),
    Failed(Failed),
}

/// Why a task cannot post now.
pub(super) enum Held {
    /// It waits for room, until the ticket is notified.
    Waiting(Ticket),
    /// The connection takes no more work.
    Ended(Error),
}

/// How an operation ended.
#[derive(Debug)]
pub enum Done {
    /// It has succeeded, with one buffer.
    Buffer(Buffer),
    /// It has succeeded, with a list.
    Gather(Gather),
    Failed(FailedWork),
    /// The endpoint was removed, or its queue has failed, before the completion was taken.
    Removed,
}

impl Done {
    /// The end of an operation that has succeeded.
    pub(super) fn of(completion: Completion) -> Self {
        match (completion.buffer, completion.list) {
            (Some(buffer), _) => Done::Buffer(buffer),
            (None, Some(list)) => Done::Gather(list),
            (None, None) => Done::Removed,
        }
    }
}

/// The result of asking for a message.
pub(crate) enum Received<O> {
    Message(Arrived, O),
    Waiting(Ticket),
    Ended(Ended),
}

/// What a reader wants to know about the sender of a message: nothing, or the sender of a datagram.
pub(crate) trait Origin: Sized {
    /// Takes the sender of the oldest message.
    fn take(senders: &mut VecDeque<DatagramSender>) -> Option<Self>;
}

impl Origin for () {
    #[inline(always)]
    fn take(_: &mut VecDeque<DatagramSender>) -> Option<Self> {
        Some(())
    }
}

impl Origin for DatagramSender {
    fn take(senders: &mut VecDeque<DatagramSender>) -> Option<Self> {
        senders.pop_front()
    }
}

impl<S: Sharing> State<S> {
    #[inline(always)]
    pub(super) fn member(&mut self, key: EndpointKey) -> Option<&mut Member<S>> {
        self.connections.find(key)
    }

    /// The endpoints, and the connection of this key.
    pub(super) fn with_set(&mut self, key: EndpointKey) -> (&mut EndpointSet, Option<&mut Member<S>>) {
        (&mut self.set, self.connections.find(key))
    }

    /// Posts the request of `step` if there is room and no other task waits. It has a slot if there is a waker. If posting fails,
    /// `step` becomes `Refused`. Returns the waker if nothing was posted, because dropping it can run code of the user.
    #[inline(always)]
    pub(super) fn post<R: Request>(
        &mut self,
        key: EndpointKey,
        step: &mut Step<R>,
        waker: Option<Waker>,
    ) -> Result<Slot, Option<Waker>> {
        let State { connections: Connections { members, slots, counts }, set, .. } = self;
        let member = find(members, key).filter(|member| member.room.admits());
        let (Some(member), Step::New(_)) = (member, &*step) else {
            return Err(waker);
        };
        let Step::New(request) = mem::replace(step, Step::Finished) else { return Err(waker) };
        post_request(set, member, slots, counts, request, waker).map_err(|(failed, waker)| {
            *step = Step::Refused(Box::new(failed));
            waker
        })
    }

    /// Returns the waker if the task may post now: its turn has come, and there is room. Otherwise the task waits, with its
    /// ticket or with a new one at the end.
    pub(super) fn admit(
        &mut self,
        key: EndpointKey,
        ticket: Option<Ticket>,
        waker: Waker,
        effects: &mut Effects,
    ) -> Result<Waker, Held> {
        let State { connections: Connections { members, counts, .. }, broken, .. } = self;
        let Some(member) = find(members, key) else {
            effects.drop_waker(Some(waker));
            return Err(Held::Ended(Ended::of_removed(broken).error()));
        };
        if let Some(ended) = &member.ended {
            let error = ended.error();
            effects.drop_waker(Some(waker));
            effects.drop_waker(ticket.and_then(|ticket| member.room.leave(ticket).1));
            return Err(Held::Ended(error));
        }
        let Some(ticket) = ticket else {
            if member.room.admits() {
                return Ok(waker);
            }
            counts.waited += 1;
            return Err(Held::Waiting(member.room.join(waker)));
        };
        if !member.room.is_notified(&ticket) {
            effects.drop_waker(Some(member.room.set_waker(&ticket, waker)));
            return Err(Held::Waiting(ticket));
        }
        if member.room.is_full() {
            // Another operation has taken the place.
            member.room.rejoin(&ticket, waker);
            return Err(Held::Waiting(ticket));
        }
        member.room.leave(ticket);
        Ok(waker)
    }

    /// Posts an operation, or waits for room with the ticket, or with another one at the end.
    #[cold]
    pub(super) fn post_or_wait<R: Request>(
        &mut self,
        key: EndpointKey,
        request: R,
        ticket: Option<Ticket>,
        awaited: bool,
        waker: Waker,
        effects: &mut Effects,
    ) -> Result<Slot, Unposted<R>> {
        let waker = match self.admit(key, ticket, waker, effects) {
            Ok(waker) => waker,
            Err(Held::Waiting(ticket)) => return Err(Unposted::Waiting(request, ticket)),
            Err(Held::Ended(error)) => return Err(Unposted::Failed(refuse(request, error))),
        };
        let State { connections: Connections { members, slots, counts }, set, .. } = self;
        let Some(member) = find(members, key) else {
            effects.drop_waker(Some(waker));
            return Err(Unposted::Failed(refuse(request, Error::Closed)));
        };
        let waker = if awaited {
            Some(waker)
        } else {
            effects.drop_waker(Some(waker));
            None
        };
        post_request(set, member, slots, counts, request, waker).map_err(|(failed, waker)| {
            effects.drop_waker(waker);
            if let Some(ended) = Ended::of_doubt(&failed.error) {
                member.end(&ended, effects);
            } else if let Some(next) = member.room.notify() {
                // The place is still free.
                effects.wake(next);
            }
            Unposted::Failed(failed)
        })
    }

    /// Takes a message. Also returns wakers to drop.
    #[inline]
    pub(super) fn receive<O: Origin>(
        &mut self,
        key: EndpointKey,
        ticket: Option<Ticket>,
        waker: Waker,
    ) -> (Received<O>, [Option<Waker>; 2]) {
        let State { connections: Connections { members, counts, .. }, broken, .. } = self;
        let Some(member) = find(members, key) else {
            return (Received::Ended(Ended::of_removed(broken)), [Some(waker), None]);
        };
        let oldest = member.take_message();
        let received = match (oldest, &member.ended) {
            (Some((message, origin)), _) => Received::Message(message, origin),
            (None, Some(ended)) => Received::Ended(ended.clone()),
            (None, None) => {
                counts.starved += u64::from(member.kept == member.receives.count());
                let Some(ticket) = ticket else {
                    return (Received::Waiting(member.readers.join(waker)), [None, None]);
                };
                if member.readers.is_notified(&ticket) {
                    // Another task has taken the message.
                    member.readers.rejoin(&ticket, waker);
                    return (Received::Waiting(ticket), [None, None]);
                }
                let before = member.readers.set_waker(&ticket, waker);
                return (Received::Waiting(ticket), [Some(before), None]);
            }
        };
        (received, [Some(waker), ticket.and_then(|ticket| member.readers.leave(ticket).1)])
    }

    /// Takes completions, at most [`BATCH`]. Returns their number.
    #[inline(always)]
    pub(super) fn sweep(&mut self, effects: &mut Effects) -> usize {
        match self.set.poll_into(BATCH, Delivery { connections: &mut self.connections, effects }) {
            Ok(swept) => swept,
            Err(error) => self.poll_failed(error, effects),
        }
    }

    /// Returns 1 if there is anything to do for it.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_failed(&mut self, error: PollError, effects: &mut Effects) -> usize {
        if self.broken.is_some() {
            return 0;
        }
        // After `NotInFlight`, one endpoint takes no more work, and its completions fail.
        if !matches!(error, PollError::NotInFlight { .. }) {
            self.fail_all(&Ended::Failed(Arc::new(error.into())), effects);
        }
        1
    }

    /// Ends all connections, since the queue or its driver no longer works.
    pub(super) fn fail_all(&mut self, ended: &Ended, effects: &mut Effects) {
        self.broken.get_or_insert_with(|| ended.clone());
        for member in self.connections.members.iter_mut().flatten() {
            member.end(ended, effects);
            member.room.give_up();
        }
        // Nobody may ever take their completions. The memory stays with the endpoints until they are removed.
        let slots = &mut self.connections.slots;
        for slot in slots.in_flight() {
            finish(slots, slot, Done::Removed, effects);
        }
    }

    /// Adds a connection.
    pub(super) fn add(&mut self, member: Member<S>) {
        let index = member.key.index();
        let members = &mut self.connections.members;
        if members.len() <= index {
            members.resize_with(index + 1, || None);
        }
        members[index] = Some(Box::new(member));
    }

    /// Removes the endpoint of a connection, and forgets the connection.
    pub(super) fn remove(&mut self, key: EndpointKey, effects: &mut Effects) {
        let buffers = self.set.remove(key).unwrap_or_else(|_| {
            // An endpoint that cannot be destroyed is leaked with its buffers, also those of shared receives.
            self.member(key).into_iter().for_each(|member| member.receives.leak());
            Vec::new()
        });
        self.forget(key, buffers, effects);
    }

    /// Stops the queue pairs of connections whose peers have sent more than was reserved.
    #[cold]
    fn stop_exceeded(&mut self) {
        self.exceeded_before = self.connections.counts.exceeded;
        let State { connections: Connections { members, .. }, set, .. } = self;
        for member in members.iter_mut().flatten() {
            if member.is_to_stop() {
                // If the device refuses, the next message of the peer leads here again.
                member.is_stopped = set.endpoint(member.key).is_none_or(|mut endpoint| endpoint.stop().is_ok());
            }
        }
    }

    /// Forgets a connection whose endpoint was removed, and had these buffers.
    fn forget(&mut self, key: EndpointKey, buffers: Vec<Buffer>, effects: &mut Effects) {
        effects.drop_pieces(self.set.take_leftovers());
        let Some(mut member) = self.connections.members.get_mut(key.index()).and_then(Option::take) else {
            return effects.drop_buffers(buffers);
        };
        member.end(&Ended::Closed, effects);
        fail_operations(&mut member, &mut self.connections.slots, effects);
        let Member { inbox, receives, kept, attachments, .. } = &mut *member;
        let messages = inbox.drain(..).filter_map(|message| message.buffer);
        effects.drop_buffers(buffers.into_iter().chain(messages).filter_map(|buffer| receives.post_shared(buffer)));
        receives.leave_to_readers(*kept);
        effects.drop_attachments(mem::take(attachments));
        member.closers.drain(..).for_each(|waker| effects.wake(waker));
    }

    /// Advances the connections that are to end. Mostly there are none.
    #[inline(always)]
    pub(super) fn advance_leaving(&mut self, effects: &mut Effects) {
        if self.connections.counts.exceeded != self.exceeded_before {
            self.stop_exceeded();
        }
        if !self.leaving.is_empty() {
            self.advance_all_leaving(effects);
        }
    }

    #[cold]
    #[inline(never)]
    fn advance_all_leaving(&mut self, effects: &mut Effects) {
        let now = Instant::now();
        let mut index = 0;
        while let Some(key) = self.leaving.get(index).copied() {
            match self.advance_leaver(key, now) {
                None => index += 1,
                Some(buffers) => {
                    self.forget(key, buffers, effects);
                    self.leaving.swap_remove(index);
                }
            }
        }
    }

    /// Advances one connection. Returns the buffers of its endpoint once it is gone.
    fn advance_leaver(&mut self, key: EndpointKey, now: Instant) -> Option<Vec<Buffer>> {
        let (set, member) = self.with_set(key);
        member.map_or(Some(Vec::new()), |member| member.advance_leaving(set, now))
    }

    /// The next time to advance the connections that this side is closing, even if there is no event.
    pub(super) fn leaving_deadline(&self) -> Option<Instant> {
        let leaving = self.leaving.iter();
        leaving.filter_map(|key| self.connections.members.get(key.index())?.as_deref()?.leaving_deadline()).min()
    }
}

/// Posts an operation to a connection that has room. It has a slot if there is a waker, which is returned if the operation fails.
#[inline(always)]
fn post_request<S: Sharing, R: Request>(
    set: &mut EndpointSet,
    member: &mut Member<S>,
    slots: &mut Slots<Done>,
    counts: &mut Counts,
    request: R,
    waker: Option<Waker>,
) -> Result<Slot, (Failed, Option<Waker>)> {
    let Some(mut endpoint) = set.endpoint(member.key) else { return Err((refuse(request, Error::Closed), waker)) };
    let slot = waker.map_or(Slot::NONE, |waker| slots.insert(member.key.index() as u32, waker));
    match request.post(&mut endpoint, slot.number()) {
        Ok(_) => {
            member.room.posted(1);
            counts.posted += 1;
            Ok(slot)
        }
        Err(rejected) => Err(not_posted(member, slots, slot, rejected)),
    }
}

/// Gives back the slot of an operation that was not posted. Its result, if the provider has taken it nevertheless, is dropped.
#[cold]
#[inline(never)]
pub(super) fn not_posted<S: Sharing>(
    member: &mut Member<S>,
    slots: &mut Slots<Done>,
    slot: Slot,
    rejected: Rejected,
) -> (Failed, Option<Waker>) {
    let waker = if matches!(rejected.error, PostError::MaybePosted { .. }) {
        // Counted, so that removing the connection frees the slot.
        member.room.posted(1);
        slots.abandon(slot).1
    } else {
        slots.cancel(slot)
    };
    (Failed::rejected(rejected), waker)
}

/// Returns the memory of work that is not posted.
#[cold]
fn refuse<R: Request>(request: R, error: Error) -> Failed {
    let (buffer, list) = request.into_memory();
    Failed { error, buffer, list }
}
