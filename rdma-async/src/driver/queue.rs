//! A completion queue with its connections.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use rdma_safe::cm::{Handshake, Progress, SetConnection};
use rdma_safe::endpoint::Armed;
use rdma_safe::{Buffer, Completion, EndpointKey, EndpointSet, PollError, Work};

use super::events::{Events, Source};
use super::member::{Ended, Member, Stage};
use crate::core::{Finished, Slot, Slots, Ticket};
use crate::effects::Effects;
use crate::{Error, Failed, Result, Sharing};

/// A completion queue, its connections, and their operations in flight.
///
/// Everything is behind one lock. Its driver takes the completions, and nobody else does.
pub(crate) struct Queue<S: Sharing> {
    state: S::Cell<State<S>>,
    pub(crate) events: S::Rc<Events<S>>,
}

struct State<S: Sharing> {
    set: EndpointSet,
    /// Indexed by the number of the endpoint in the set.
    members: Vec<Option<Box<Member<S>>>>,
    /// Operations in flight. `None` as a result: the endpoint was removed before the completion was taken.
    slots: Slots<Option<Completion>>,
    /// Connections that this side is closing.
    leaving: Vec<EndpointKey>,
    /// Why no connection of the queue works any more.
    broken: Option<Ended>,
    /// Reports events of the completion queue.
    _source: Source<S>,
    counts: Counts,
}

/// Counts of a queue since it was created.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) posted: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) received: u64,
    pub(crate) waited: u64,
    pub(crate) starved: u64,
}

/// Most completions to take while the lock is held.
const BATCH: usize = 32;

/// The result of posting.
pub(crate) enum Posted {
    /// The operation is in flight.
    InFlight(Slot),
    /// The send queue is full. The ticket is notified when there is room.
    Full(Work<'static>, Ticket),
    /// It was not posted.
    Failed(Failed),
}

/// The result of asking for a message.
pub(crate) enum Received {
    Message(Completion),
    Waiting(Ticket),
    Ended(Ended),
}

impl<S: Sharing> Queue<S> {
    pub(crate) fn new(set: EndpointSet, events: &S::Rc<Events<S>>) -> Result<Self> {
        let channel = set.channel().ok_or(rdma_safe::Error::NoChannel)?;
        let source = Source::completions(events, channel)?;
        let state = State {
            set,
            members: Vec::new(),
            slots: Slots::with_capacity(64),
            leaving: Vec::new(),
            broken: None,
            _source: source,
            counts: Counts::default(),
        };
        Ok(Queue { state: S::cell(state), events: events.clone() })
    }

    /// Posts an operation.
    #[inline]
    pub(crate) fn post(&self, key: EndpointKey, work: Work<'static>, context: &Context<'_>) -> Posted {
        // Cloned and dropped without the lock, since both can run code of the user.
        let waker = context.waker().clone();
        let (posted, unused) = S::with(&self.state, |state| state.post(key, work, waker));
        drop(unused);
        posted
    }

    /// Posts an operation that has waited for room, if its turn has come.
    #[cold]
    pub(crate) fn post_waiting(
        &self,
        key: EndpointKey,
        work: Work<'static>,
        ticket: Ticket,
        context: &Context<'_>,
    ) -> Posted {
        let waker = context.waker().clone();
        let mut effects = Effects::default();
        let posted = S::with(&self.state, |state| state.post_waiting(key, work, ticket, waker, &mut effects));
        effects.run();
        posted
    }

    /// Why the endpoint of a connection was removed.
    #[cold]
    pub(crate) fn removed(&self) -> Ended {
        S::with(&self.state, |state| Ended::of_removed(&state.broken))
    }

    /// Takes the result of an operation. `None` in it: the endpoint was removed.
    #[inline]
    pub(crate) fn take(&self, slot: Slot, context: &Context<'_>) -> Option<Option<Completion>> {
        let taken = S::with(&self.state, |state| state.slots.take(slot, context.waker(), || context.waker().clone()));
        match taken {
            Ok(completion) => Some(completion),
            Err(before) => {
                drop(before);
                None
            }
        }
    }

    /// The future of an operation in flight is dropped.
    #[cold]
    pub(crate) fn abandon(&self, slot: Slot) {
        drop(S::with(&self.state, |state| state.slots.abandon(slot)));
    }

    /// A task stops to wait for room. If it was notified, the next one is notified instead.
    #[cold]
    pub(crate) fn leave_room(&self, key: EndpointKey, ticket: Ticket) {
        let (waker, next) = S::with(&self.state, |state| {
            let Some(member) = state.member(key) else { return (None, None) };
            let (was_notified, waker) = member.room.leave(ticket);
            (waker, if was_notified { member.room.notify() } else { None })
        });
        drop(waker);
        if let Some(next) = next {
            next.wake();
        }
    }

    /// Takes the oldest message, or waits for the next one.
    pub(crate) fn receive(&self, key: EndpointKey, ticket: Option<Ticket>, context: &Context<'_>) -> Received {
        let waker = context.waker().clone();
        let (received, unused) = S::with(&self.state, |state| state.receive(key, ticket, waker));
        drop(unused);
        received
    }

    /// A task stops to wait for a message. If it was notified, the next one is notified instead.
    pub(crate) fn leave_readers(&self, key: EndpointKey, ticket: Ticket) {
        let (waker, next) = S::with(&self.state, |state| {
            let Some(member) = state.member(key) else { return (None, None) };
            let (was_notified, waker) = member.readers.leave(ticket);
            let next = if was_notified && !member.inbox.is_empty() { member.readers.notify() } else { None };
            (waker, next)
        });
        drop(waker);
        if let Some(next) = next {
            next.wake();
        }
    }

    /// Posts the buffer of a message again.
    pub(crate) fn give_back(&self, key: EndpointKey, buffer: Option<Buffer>) {
        let unused = S::with(&self.state, |state| {
            let Some(member) = state.members.get_mut(key.index()).and_then(|member| member.as_deref_mut()) else {
                return buffer;
            };
            if member.key != key {
                return buffer;
            }
            member.kept = member.kept.saturating_sub(1);
            if member.ended.is_some() {
                return buffer;
            }
            let buffer = buffer?;
            let Some(mut endpoint) = state.set.endpoint(key) else { return Some(buffer) };
            match endpoint.receive(buffer) {
                Ok(_) => None,
                Err(rejected) => rejected.buffer,
            }
        });
        drop(unused);
    }

    /// Takes completions, at most [`BATCH`], and wakes the tasks. Returns their number.
    #[inline]
    pub(crate) fn sweep(&self, effects: &mut Effects) -> usize {
        let swept = S::with(&self.state, |state| state.sweep(effects));
        if swept != 0 {
            effects.run();
        }
        swept
    }

    /// Requests an event for the next completion. Returns whether to sleep, and when to look again at the latest.
    pub(crate) fn arm(&self, effects: &mut Effects) -> (bool, Option<Instant>) {
        let armed = S::with(&self.state, |state| {
            if state.broken.is_some() {
                return (true, None);
            }
            match state.set.arm() {
                Ok(armed) => (armed == Armed::Wait, state.next_deadline()),
                Err(error) => {
                    state.fail_all(&Ended::Failed(Arc::new(error)), effects);
                    (false, None)
                }
            }
        });
        effects.run();
        armed
    }

    /// Calls `f` with the endpoints, to connect one.
    pub(crate) fn with_set<R>(&self, f: impl FnOnce(&mut EndpointSet) -> R) -> R {
        S::with(&self.state, |state| f(&mut state.set))
    }

    /// Starts a connection with `start`, and adds it.
    pub(crate) fn open(
        &self,
        sends: u32,
        receives: u32,
        start: impl FnOnce(&mut EndpointSet) -> rdma_safe::Result<Handshake<SetConnection>>,
    ) -> Result<Handshake<SetConnection>> {
        S::with(&self.state, |state| {
            if let Some(broken) = &state.broken {
                return Err(broken.error());
            }
            let handshake = start(&mut state.set)?;
            let key = handshake.key();
            if state.members.len() <= key.index() {
                state.members.resize_with(key.index() + 1, || None);
            }
            state.members[key.index()] = Some(Box::new(Member::new(key, sends, receives)));
            Ok(handshake)
        })
    }

    /// Advances the handshake of a connection. If it fails, the connection is removed.
    pub(crate) fn advance_opening(&self, handshake: Handshake<SetConnection>) -> Result<Progress<SetConnection>> {
        let mut effects = Effects::default();
        let advanced = S::with(&self.state, |state| {
            let key = handshake.key();
            let advanced = handshake.advance_in(&mut state.set);
            if advanced.is_err() {
                effects.drop_buffers(state.set.remove(key).unwrap_or_default());
                state.forget(key, &mut effects);
            }
            advanced
        });
        effects.run();
        Ok(advanced?)
    }

    /// The handshake is complete.
    pub(crate) fn establish(self_: &S::Rc<Self>, connection: SetConnection, source: Source<S>) {
        let key = connection.key();
        source.set_connection(self_, key);
        let unused = S::with(&self_.state, |state| match state.member(key) {
            Some(member) => {
                member.stage = Stage::Open(Box::new(connection));
                member.source = Some(source);
                None
            }
            None => Some((connection, source)),
        });
        drop(unused);
        // The peer may have ended it before the source reported to the connection.
        self_.check_connection(key);
    }

    /// Looks whether the peer has ended a connection.
    pub(crate) fn check_connection(&self, key: EndpointKey) {
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            let State { set, members, .. } = state;
            let Some(member) = members.get_mut(key.index()).and_then(|member| member.as_deref_mut()) else { return };
            let Stage::Open(connection) = &mut member.stage else { return };
            match connection.is_connected(set) {
                Ok(true) => {}
                Ok(false) => member.end(&Ended::Disconnected, &mut effects),
                Err(error) => member.end(&Ended::Failed(Arc::new(error)), &mut effects),
            }
        });
        effects.run();
    }

    /// The last handle of a connection was dropped, or it is to be closed: it ends once its operations have completed, or at
    /// `linger`.
    pub(crate) fn begin_close(&self, key: EndpointKey, linger: Duration) {
        let mut effects = Effects::default();
        let has_begun = S::with(&self.state, |state| {
            let State { members, leaving, .. } = state;
            let Some(member) = members.get_mut(key.index()).and_then(|member| member.as_deref_mut()) else {
                return false;
            };
            if member.key != key || member.drain_until.is_some() {
                return false;
            }
            let now = Instant::now();
            member.drain_until = Some(now.checked_add(linger).unwrap_or(now));
            member.end(&Ended::Closed, &mut effects);
            leaving.push(key);
            true
        });
        effects.run();
        if has_begun {
            self.events.poller.wake();
        }
    }

    /// Whether a connection is gone. If not, wakes the task when it is.
    pub(crate) fn poll_closed(&self, key: EndpointKey, context: &Context<'_>) -> bool {
        let waker = context.waker().clone();
        S::with(&self.state, |state| match state.member(key) {
            Some(member) if !member.closers.iter().any(|other| other.will_wake(&waker)) => {
                member.closers.push(waker);
                (false, None)
            }
            Some(_) => (false, Some(waker)),
            None => (true, Some(waker)),
        })
        .0
    }

    /// Removes a connection at once: its handshake was dropped or has failed.
    pub(crate) fn remove(&self, key: EndpointKey) {
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            if state.member(key).is_some() {
                // An endpoint that cannot be destroyed is leaked with its buffers.
                effects.drop_buffers(state.set.remove(key).unwrap_or_default());
                state.forget(key, &mut effects);
            }
        });
        effects.run();
    }

    /// Advances the connections that this side is closing.
    pub(crate) fn advance_leaving(&self, effects: &mut Effects) {
        S::with(&self.state, |state| state.advance_leaving(effects));
        effects.run();
    }

    /// Ends all connections: the driver stops.
    pub(crate) fn stop(&self) {
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            state.fail_all(&Ended::DriverStopped, &mut effects);
            let keys: Vec<_> = state.members.iter().flatten().map(|member| member.key).collect();
            for key in keys {
                effects.drop_buffers(state.set.remove(key).unwrap_or_default());
                state.forget(key, &mut effects);
            }
        });
        effects.run();
    }

    pub(crate) fn counts(&self) -> Counts {
        S::with(&self.state, |state| state.counts)
    }

    /// Numbers of connections, and of slots in use.
    pub(crate) fn population(&self) -> (usize, usize) {
        S::with(&self.state, |state| (state.members.iter().flatten().count(), state.slots.len()))
    }

    /// Number of messages of a connection that its readers keep.
    pub(crate) fn kept(&self, key: EndpointKey) -> u32 {
        S::with(&self.state, |state| state.member(key).map_or(0, |member| member.kept))
    }
}

impl<S: Sharing> State<S> {
    #[inline(always)]
    fn member(&mut self, key: EndpointKey) -> Option<&mut Member<S>> {
        self.members.get_mut(key.index())?.as_deref_mut().filter(|member| member.key == key)
    }

    #[inline]
    fn post(&mut self, key: EndpointKey, work: Work<'static>, waker: Waker) -> (Posted, Option<Waker>) {
        let State { members, set, slots, counts, broken, .. } = self;
        let member = members.get_mut(key.index()).and_then(|member| member.as_deref_mut());
        let Some(member) = member.filter(|member| member.key == key) else {
            return (Posted::Failed(refuse(work, Ended::of_removed(broken).error())), Some(waker));
        };
        if let Some(ended) = &member.ended {
            return (Posted::Failed(refuse(work, ended.error())), Some(waker));
        }
        if !member.has_room() {
            counts.waited += 1;
            return (Posted::Full(work, member.room.join(waker)), None);
        }
        post_to(set, member, slots, counts, work, waker)
    }

    /// Takes a message. Also returns wakers to drop.
    #[inline]
    fn receive(&mut self, key: EndpointKey, ticket: Option<Ticket>, waker: Waker) -> (Received, [Option<Waker>; 2]) {
        let State { members, counts, broken, .. } = self;
        let member = members.get_mut(key.index()).and_then(|member| member.as_deref_mut());
        let Some(member) = member.filter(|member| member.key == key) else {
            return (Received::Ended(Ended::of_removed(broken)), [Some(waker), None]);
        };
        let received = match (member.inbox.pop_front(), &member.ended) {
            (Some(message), _) => {
                member.kept += 1;
                Received::Message(message)
            }
            (None, Some(ended)) => Received::Ended(ended.clone()),
            (None, None) => {
                counts.starved += u64::from(member.kept == member.receives);
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

    #[cold]
    fn post_waiting(
        &mut self,
        key: EndpointKey,
        work: Work<'static>,
        ticket: Ticket,
        waker: Waker,
        effects: &mut Effects,
    ) -> Posted {
        let State { members, set, slots, counts, broken, .. } = self;
        let member = members.get_mut(key.index()).and_then(|member| member.as_deref_mut());
        let Some(member) = member.filter(|member| member.key == key) else {
            effects.drop_waker(Some(waker));
            return Posted::Failed(refuse(work, Ended::of_removed(broken).error()));
        };
        if let Some(ended) = &member.ended {
            let error = ended.error();
            effects.drop_waker(Some(waker));
            effects.drop_waker(member.room.leave(ticket).1);
            return Posted::Failed(refuse(work, error));
        }
        if !member.room.is_notified(&ticket) {
            effects.drop_waker(Some(member.room.set_waker(&ticket, waker)));
            return Posted::Full(work, ticket);
        }
        if member.is_full() {
            // Another operation has taken the place.
            member.room.rejoin(&ticket, waker);
            return Posted::Full(work, ticket);
        }
        member.room.leave(ticket);
        let (posted, unused) = post_to(set, member, slots, counts, work, waker);
        effects.drop_waker(unused);
        if let Posted::Failed(_) = posted {
            if let Some(next) = member.room.notify() {
                effects.wake(next);
            }
        }
        posted
    }

    #[inline]
    fn sweep(&mut self, effects: &mut Effects) -> usize {
        for swept in 0..BATCH {
            match self.set.poll() {
                Ok(Some((key, completion))) => self.deliver(key, completion, effects),
                Ok(None) => return swept,
                // The endpoint takes no more work, and its completions fail.
                Err(PollError::NotInFlight { .. }) => {}
                Err(error) => {
                    if self.broken.is_none() {
                        self.fail_all(&Ended::Failed(Arc::new(error.into())), effects);
                    }
                    return swept;
                }
            }
        }
        BATCH
    }

    /// Hands a completion to the task that waits for it.
    #[inline]
    fn deliver(&mut self, key: EndpointKey, completion: Completion, effects: &mut Effects) {
        let member = self.members.get_mut(key.index()).and_then(|member| member.as_deref_mut());
        let Some(member) = member.filter(|member| member.key == key) else {
            effects.drop_completion(completion);
            return;
        };
        if completion.status != rdma_safe::WcStatus::SUCCESS {
            self.counts.failed += 1;
            return self.deliver_failed(key, completion, effects);
        }
        if completion.id.is_receive() {
            self.counts.received += 1;
            member.inbox.push_back(completion);
            if let Some(waker) = member.readers.notify() {
                effects.wake(waker);
            }
            return;
        }
        self.counts.completed += 1;
        let slot = member.completed(completion.id.sequence());
        match self.slots.complete(slot, Some(completion)) {
            Finished::Wake(waker) => effects.wake(waker),
            Finished::Drop(Some(completion)) => effects.drop_completion(completion),
            Finished::Drop(None) => {}
        }
        if let Some(waker) = member.room.notify() {
            effects.wake(waker);
        }
    }

    #[cold]
    #[inline(never)]
    fn deliver_failed(&mut self, key: EndpointKey, completion: Completion, effects: &mut Effects) {
        let Some(member) = self.members.get_mut(key.index()).and_then(|member| member.as_deref_mut()) else { return };
        let is_operation = !completion.id.is_receive() && completion.operation != rdma_safe::Operation::Keepalive;
        match completion.ok() {
            Err(failed) => {
                if member.ended.is_none() {
                    let ended = Ended::of(&failed);
                    member.end(&ended, effects);
                }
                let completion = *failed.0;
                if !is_operation {
                    return effects.drop_completion(completion);
                }
                let slot = member.completed(completion.id.sequence());
                match self.slots.complete(slot, Some(completion)) {
                    Finished::Wake(waker) => effects.wake(waker),
                    Finished::Drop(Some(completion)) => effects.drop_completion(completion),
                    Finished::Drop(None) => {}
                }
            }
            Ok(completion) => effects.drop_completion(completion),
        }
    }

    /// Ends all connections, since the queue or its driver no longer works.
    fn fail_all(&mut self, ended: &Ended, effects: &mut Effects) {
        for member in self.members.iter_mut().flatten() {
            member.end(ended, effects);
        }
        self.broken.get_or_insert_with(|| ended.clone());
    }

    /// Forgets a connection whose endpoint was removed.
    fn forget(&mut self, key: EndpointKey, effects: &mut Effects) {
        let Some(mut member) = self.members.get_mut(key.index()).and_then(Option::take) else { return };
        member.end(&Ended::Closed, effects);
        for slot in member.take_slots() {
            match self.slots.complete(slot, None) {
                Finished::Wake(waker) => effects.wake(waker),
                Finished::Drop(Some(completion)) => effects.drop_completion(completion),
                Finished::Drop(None) => {}
            }
        }
        member.inbox.drain(..).for_each(|message| effects.drop_completion(message));
        member.closers.drain(..).for_each(|waker| effects.wake(waker));
    }

    fn advance_leaving(&mut self, effects: &mut Effects) {
        let now = Instant::now();
        let mut index = 0;
        while let Some(key) = self.leaving.get(index).copied() {
            match self.advance_leaver(key, now) {
                None => index += 1,
                Some(buffers) => {
                    effects.drop_buffers(buffers);
                    self.forget(key, effects);
                    self.leaving.swap_remove(index);
                }
            }
        }
    }

    /// Advances one connection. Returns the buffers of its endpoint once it is gone.
    fn advance_leaver(&mut self, key: EndpointKey, now: Instant) -> Option<Vec<Buffer>> {
        let State { set, members, .. } = self;
        let member = members.get_mut(key.index()).and_then(|member| member.as_deref_mut());
        let Some(member) = member.filter(|member| member.key == key) else { return Some(Vec::new()) };
        member.advance_leaving(set, now)
    }

    /// The next time to look at the queue even if there is no event.
    fn next_deadline(&self) -> Option<Instant> {
        let members =
            self.leaving.iter().filter_map(|key| self.members.get(key.index())?.as_deref()?.leaving_deadline());
        members.chain(self.set.keepalive_due()).min()
    }
}

/// Posts an operation to a connection that has room.
#[inline(always)]
fn post_to<S: Sharing>(
    set: &mut EndpointSet,
    member: &mut Member<S>,
    slots: &mut Slots<Option<Completion>>,
    counts: &mut Counts,
    work: Work<'static>,
    waker: Waker,
) -> (Posted, Option<Waker>) {
    let Some(mut endpoint) = set.endpoint(member.key) else {
        return (Posted::Failed(refuse(work, Error::Closed)), Some(waker));
    };
    match endpoint.post(work) {
        Ok(id) => {
            let slot = slots.insert(waker);
            member.posted(id.sequence(), slot);
            counts.posted += 1;
            (Posted::InFlight(slot), None)
        }
        Err(rejected) => (Posted::Failed(Failed::rejected(rejected)), Some(waker)),
    }
}

/// Returns the memory of work that is not posted.
#[cold]
fn refuse(work: Work<'static>, error: Error) -> Failed {
    let (buffer, list) = work.into_memory();
    Failed { error, buffer, list }
}
