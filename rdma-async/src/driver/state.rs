//! What the lock of a queue protects.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use rdma_safe::endpoint::{DatagramSender, FailedWork};
use rdma_safe::{Buffer, Completion, EndpointKey, EndpointSet, Gather, PollError, WcStatus};

use super::events::Source;
use super::member::{Ended, Member};
use crate::core::{Finished, Slot, Slots, Ticket};
use crate::effects::Effects;
use crate::{Error, Failed, Request, Sharing};

/// What the lock of a queue protects.
pub(super) struct State<S: Sharing> {
    pub(super) set: EndpointSet,
    /// Indexed by the number of the endpoint in the set.
    pub(super) members: Vec<Option<Box<Member<S>>>>,
    /// Operations in flight.
    pub(super) slots: Slots<Done>,
    /// Connections that this side is closing.
    pub(super) leaving: Vec<EndpointKey>,
    /// [`Counts::exceeded`] at the last look.
    pub(super) exceeded_before: u64,
    /// Why no connection of the queue works any more.
    pub(super) broken: Option<Ended>,
    /// Reports events of the completion queue.
    pub(super) _source: Source<S>,
    pub(super) counts: Counts,
}

/// Counts of a queue since it was created.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) posted: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) received: u64,
    /// Messages beyond the receives that their connections had reserved.
    pub(crate) exceeded: u64,
    pub(crate) waited: u64,
    pub(crate) starved: u64,
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

/// An operation that [`State::post`] has not posted.
pub(super) enum Unusual<R> {
    /// The send queue is full, or the connection has ended.
    Refused(R),
    Failed(Failed),
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
    /// The end of completed work.
    #[inline(always)]
    fn of(completion: Completion) -> Self {
        if completion.status != WcStatus::SUCCESS {
            return Done::of_failed(completion);
        }
        match (completion.buffer, completion.list) {
            (Some(buffer), _) => Done::Buffer(buffer),
            (None, Some(list)) => Done::Gather(list),
            (None, None) => Done::Removed,
        }
    }

    #[cold]
    fn of_failed(completion: Completion) -> Self {
        match completion.ok() {
            Err(failed) => Done::Failed(failed),
            Ok(_) => Done::Removed,
        }
    }
}

/// The result of asking for a message.
pub(crate) enum Received<O> {
    Message(Completion, O),
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
        find(&mut self.members, key)
    }

    /// The endpoints, and the connection of this key.
    pub(super) fn with_set(&mut self, key: EndpointKey) -> (&mut EndpointSet, Option<&mut Member<S>>) {
        let State { members, set, .. } = self;
        (set, find(members, key))
    }

    /// Posts an operation if its connection has room. It has a slot if there is a waker. An operation that is not posted leaves the
    /// waker to the caller, since dropping it can run code of the user.
    #[inline(always)]
    pub(super) fn post<R: Request>(
        &mut self,
        key: EndpointKey,
        request: R,
        waker: Option<Waker>,
    ) -> Result<Slot, (Unusual<R>, Option<Waker>)> {
        let State { members, set, slots, counts, .. } = self;
        match find(members, key).filter(|member| member.ended.is_none() && member.has_room()) {
            Some(member) => post_to(set, member, slots, counts, request, waker)
                .map_err(|(failed, waker)| (Unusual::Failed(failed), waker)),
            None => Err((Unusual::Refused(request), waker)),
        }
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
        let State { members, counts, broken, .. } = self;
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
            if member.has_room() {
                return Ok(waker);
            }
            counts.waited += 1;
            return Err(Held::Waiting(member.room.join(waker)));
        };
        if !member.room.is_notified(&ticket) {
            effects.drop_waker(Some(member.room.set_waker(&ticket, waker)));
            return Err(Held::Waiting(ticket));
        }
        if member.is_full() {
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
        let State { members, set, slots, counts, .. } = self;
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
        post_to(set, member, slots, counts, request, waker).map_err(|(failed, waker)| {
            effects.drop_waker(waker);
            // The place is still free.
            if let Some(next) = member.room.notify() {
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
        let State { members, counts, broken, .. } = self;
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
        let State { set, members, slots, counts, .. } = self;
        let mut delivery = Delivery { members, slots, counts, effects };
        match set.poll_each_from(BATCH, |key, completion, sender| delivery.deliver(key, completion, sender)) {
            Ok(swept) => swept,
            Err(error) => self.poll_failed(error, effects),
        }
    }

    /// Returns 1 if there is anything to do for it.
    #[cold]
    #[inline(never)]
    fn poll_failed(&mut self, error: PollError, effects: &mut Effects) -> usize {
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
        for member in self.members.iter_mut().flatten() {
            member.end(ended, effects);
            // Nobody may ever take their completions. The memory stays with the endpoint until it is removed.
            fail_operations(member, &mut self.slots, effects);
        }
    }

    /// Adds a connection.
    pub(super) fn add(&mut self, member: Member<S>) {
        let index = member.key.index();
        if self.members.len() <= index {
            self.members.resize_with(index + 1, || None);
        }
        self.members[index] = Some(Box::new(member));
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
        self.exceeded_before = self.counts.exceeded;
        let State { set, members, .. } = self;
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
        let Some(mut member) = self.members.get_mut(key.index()).and_then(Option::take) else {
            return effects.drop_buffers(buffers);
        };
        member.end(&Ended::Closed, effects);
        fail_operations(&mut member, &mut self.slots, effects);
        let Member { inbox, receives, kept, attachments, .. } = &mut *member;
        let messages = inbox.drain(..).filter_map(|message| message.buffer);
        effects.drop_buffers(buffers.into_iter().chain(messages).filter_map(|buffer| receives.post_shared(buffer)));
        receives.leave_to_readers(*kept);
        effects.drop_attachments(mem::take(attachments));
        member.closers.drain(..).for_each(|waker| effects.wake(waker));
    }

    pub(super) fn advance_leaving(&mut self, effects: &mut Effects) {
        if self.counts.exceeded != self.exceeded_before {
            self.stop_exceeded();
        }
        if self.leaving.is_empty() {
            return;
        }
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
        leaving.filter_map(|key| self.members.get(key.index())?.as_deref()?.leaving_deadline()).min()
    }
}

/// Hands completions to the tasks that wait for them.
struct Delivery<'a, S: Sharing> {
    members: &'a mut Vec<Option<Box<Member<S>>>>,
    slots: &'a mut Slots<Done>,
    counts: &'a mut Counts,
    effects: &'a mut Effects,
}

impl<S: Sharing> Delivery<'_, S> {
    #[inline(always)]
    fn deliver(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>) {
        let Some(member) = find(self.members, key) else {
            self.effects.drop_completion(completion);
            return;
        };
        let is_receive = completion.id.is_receive();
        if completion.status != WcStatus::SUCCESS || (is_receive && member.is_at_limit()) {
            return self.deliver_unusual(key, completion);
        }
        if is_receive {
            self.counts.received += 1;
            member.inbox.push_back(completion);
            // Known at compile time for connections, except on the slow path.
            member.senders.extend(sender);
            if let Some(waker) = member.readers.notify() {
                self.effects.wake(waker);
            }
            return;
        }
        self.counts.completed += 1;
        let slot = member.completed(completion.id.sequence());
        match self.slots.complete(slot, Done::of(completion)) {
            Finished::Wake(waker) => self.effects.wake(waker),
            Finished::Drop(done) => self.effects.drop_done(done),
        }
        if let Some(waker) = member.room.notify() {
            self.effects.wake(waker);
        }
    }

    #[cold]
    #[inline(never)]
    fn deliver_unusual(&mut self, key: EndpointKey, completion: Completion) {
        let Some(member) = find(self.members, key) else { return };
        if completion.status == WcStatus::SUCCESS {
            self.counts.exceeded += 1;
            return member.exceed(completion, self.effects);
        }
        self.counts.failed += 1;
        let is_operation = !completion.id.is_receive() && completion.operation != rdma_safe::Operation::Keepalive;
        let sequence = completion.id.sequence();
        let Err(failed) = completion.ok() else { return };
        if member.ended.is_none() {
            let ended = Ended::of(&failed);
            member.end(&ended, self.effects);
        }
        if !is_operation {
            let mut failed = failed;
            failed.0.buffer = failed.0.buffer.take().and_then(|buffer| member.receives.post_shared(buffer));
            return self.effects.drop_done(Done::Failed(failed));
        }
        match self.slots.complete(member.completed(sequence), Done::Failed(failed)) {
            Finished::Wake(waker) => self.effects.wake(waker),
            Finished::Drop(done) => self.effects.drop_done(done),
        }
    }
}

/// The connection of this key, unless it was removed.
#[inline(always)]
pub(super) fn find<S: Sharing>(members: &mut [Option<Box<Member<S>>>], key: EndpointKey) -> Option<&mut Member<S>> {
    members.get_mut(key.index())?.as_deref_mut().filter(|member| member.key == key)
}

/// Posts an operation to a connection that has room. It has a slot if there is a waker, which is returned if the operation fails.
#[inline(always)]
fn post_to<S: Sharing, R: Request>(
    set: &mut EndpointSet,
    member: &mut Member<S>,
    slots: &mut Slots<Done>,
    counts: &mut Counts,
    request: R,
    waker: Option<Waker>,
) -> Result<Slot, (Failed, Option<Waker>)> {
    let Some(mut endpoint) = set.endpoint(member.key) else { return Err((refuse(request, Error::Closed), waker)) };
    match request.post(&mut endpoint) {
        Ok(id) => {
            let slot = waker.map_or(Slot::NONE, |waker| slots.insert(waker));
            member.posted(id.sequence(), slot);
            counts.posted += 1;
            Ok(slot)
        }
        Err(rejected) => Err((Failed::rejected(rejected), waker)),
    }
}

/// Tells the tasks of all operations in flight that no completion of theirs will be taken.
fn fail_operations<S: Sharing>(member: &mut Member<S>, slots: &mut Slots<Done>, effects: &mut Effects) {
    for slot in member.take_slots() {
        match slots.complete(slot, Done::Removed) {
            Finished::Wake(waker) => effects.wake(waker),
            Finished::Drop(done) => effects.drop_done(done),
        }
    }
}

/// Returns the memory of work that is not posted.
#[cold]
fn refuse<R: Request>(request: R, error: Error) -> Failed {
    let (buffer, list) = request.into_memory();
    Failed { error, buffer, list }
}
