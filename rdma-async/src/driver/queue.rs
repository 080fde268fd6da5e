//! A completion queue with its connections.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

#[cfg(feature = "tokio")]
use rdma_safe::CompletionChannel;
use rdma_safe::cm::{Handshake, Progress, SetConnection};
use rdma_safe::endpoint::Armed;
use rdma_safe::{Buffer, EndpointKey, EndpointSet};

use super::connections::{Connections, Counts};
use super::events::{Events, Source};
use super::look::{Looks, Misses};
use super::member::{Ended, Member, Stage};
use super::state::{BATCH, Done, Origin, Received, State, Unposted};
use crate::connection::Inner;
use crate::core::{Slot, Slots, Ticket};
use crate::effects::{Attachment, Effects, wake};
use crate::operation::Step;
use crate::receive::Arrived;
use crate::receives::{DomainReceives, Receives};
use crate::{Request, Result, Sharing};

/// A completion queue, its connections, and their operations in flight.
///
/// Everything is behind one lock. Its driver takes the completions, and so do [looks](super::look).
pub(crate) struct Queue<S: Sharing> {
    pub(super) state: S::Cell<State<S>>,
    /// Shared receives whose messages readers may keep longer than their connections.
    shared_receives: S::Cell<Vec<S::Weak<DomainReceives<S>>>>,
    pub(crate) events: S::Rc<Events<S>>,
    pub(crate) looks: Looks,
}

/// Time to linger if the clock cannot represent the end of a longer one.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

impl<S: Sharing> Queue<S> {
    pub(crate) fn new(set: EndpointSet, events: &S::Rc<Events<S>>, looks: Looks) -> Result<Self> {
        let channel = set.channel().ok_or(rdma_safe::Error::NoChannel)?;
        let source = Source::completions(events, channel)?;
        let state = State {
            set,
            connections: Connections {
                members: Vec::new(),
                slots: Slots::with_capacity(64),
                counts: Counts::default(),
            },
            leaving: Vec::new(),
            exceeded_before: 0,
            broken: None,
            misses: Misses::default(),
            source,
        };
        Ok(Queue { state: S::cell(state), shared_receives: S::cell(Vec::new()), events: events.clone(), looks })
    }

    /// Where its completion queue reports events.
    #[cfg(feature = "tokio")]
    pub(crate) fn channel(&self) -> Option<CompletionChannel> {
        S::with(&self.state, |state| state.set.channel().cloned())
    }

    /// The runtime watches the channel, and the driver only looks for its errors.
    #[cfg(feature = "tokio")]
    pub(crate) fn unwatch_channel(&self) {
        S::with(&self.state, |state| state.source.report_errors());
    }

    /// Posts an operation if its turn has come. Otherwise, its task waits for room.
    pub(crate) fn post_or_wait<R: Request>(
        &self,
        key: EndpointKey,
        request: R,
        ticket: Option<Ticket>,
        awaited: bool,
        waker: Waker,
    ) -> Result<Slot, Unposted<R>> {
        let mut effects = Effects::default();
        let posted =
            S::with(&self.state, |state| state.post_or_wait(key, request, ticket, awaited, waker, &mut effects));
        effects.run();
        posted
    }

    /// The connection takes no more work.
    #[cold]
    pub(crate) fn end(&self, key: EndpointKey, ended: &Ended) {
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            if let Some(member) = state.member(key) {
                member.end(ended, &mut effects);
            }
        });
        effects.run();
    }

    /// Why the endpoint of a connection was removed.
    #[cold]
    pub(crate) fn removed(&self) -> Ended {
        S::with(&self.state, |state| Ended::of_removed(&state.broken))
    }

    /// Takes the result of an operation.
    #[inline(always)]
    pub(crate) fn take(&self, slot: Slot, context: &Context<'_>) -> Option<Done> {
        match S::with(&self.state, |state| state.connections.slots.take(slot, context.waker())) {
            Ok(done) => Some(done),
            Err(false) => None,
            Err(true) => self.take_or_store(slot, context),
        }
    }

    /// Another task polls the operation than before.
    #[cold]
    fn take_or_store(&self, slot: Slot, context: &Context<'_>) -> Option<Done> {
        let waker = context.waker().clone();
        let (done, unused) = S::with(&self.state, |state| state.connections.slots.take_or_store(slot, waker));
        drop(unused);
        done
    }

    /// The future of an operation in flight is dropped.
    #[cold]
    pub(crate) fn abandon(&self, slot: Slot) {
        if !self.events.is_inherited() {
            drop(S::with(&self.state, |state| state.connections.slots.abandon(slot)));
        }
    }

    /// Takes the oldest message.
    pub(crate) fn try_receive(&self, key: EndpointKey) -> Option<Arrived> {
        S::with(&self.state, |state| state.member(key)?.take_message::<()>()).map(|(message, ())| message)
    }

    /// A task stops to wait for room. If it was notified, the next one is notified instead.
    #[cold]
    pub(crate) fn leave_room(&self, key: EndpointKey, ticket: Ticket) {
        self.leave(key, |Member { room, .. }| {
            let (was_notified, waker) = room.leave(ticket);
            (waker, if was_notified { room.notify() } else { None })
        });
    }

    /// A task stops to wait for a message. If it was notified, the next one is notified instead.
    pub(crate) fn leave_readers(&self, key: EndpointKey, ticket: Ticket) {
        self.leave(key, |Member { readers, inbox, .. }| {
            let (was_notified, waker) = readers.leave(ticket);
            (waker, if was_notified && !inbox.is_empty() { readers.notify() } else { None })
        });
    }

    /// `leave` returns the waker to drop, and the one of the next task.
    fn leave(&self, key: EndpointKey, leave: impl FnOnce(&mut Member<S>) -> (Option<Waker>, Option<Waker>)) {
        if self.events.is_inherited() {
            return;
        }
        let (unused, next) = S::with(&self.state, |state| state.member(key).map_or((None, None), leave));
        if let Some(next) = next {
            wake(next);
        }
        drop(unused);
    }

    /// Takes the oldest message, or waits for the next one.
    pub(crate) fn receive<O: Origin>(&self, key: EndpointKey, ticket: Option<Ticket>, waker: Waker) -> Received<O> {
        let (received, unused) = S::with(&self.state, |state| state.receive(key, ticket, waker));
        drop(unused);
        received
    }

    /// Reserves further shared receives for a connection.
    pub(crate) fn reserve_receives(&self, key: EndpointKey, receives: u32) -> bool {
        S::with(&self.state, |state| {
            state.member(key).is_some_and(|member| {
                let is_reserved = member.receives.reserve(receives);
                member.set_limit();
                is_reserved
            })
        })
    }

    /// Releases shared receives of a connection.
    pub(crate) fn release_receives(&self, key: EndpointKey, receives: u32) {
        S::with(&self.state, |state| {
            let Some(member) = state.member(key) else { return };
            // Those of messages that are kept are in use.
            let unused = member.receives.count().saturating_sub(member.messages());
            member.receives.release(receives.min(unused));
            member.set_limit();
        });
    }

    /// Remembers the shared receives of a new connection.
    fn remember(&self, shared: Option<&S::Rc<DomainReceives<S>>>) {
        let Some(shared) = shared else { return };
        S::with(&self.shared_receives, |all| {
            all.retain(|other| {
                S::upgrade::<DomainReceives<S>>(other).is_some_and(|other| !std::ptr::eq(&*other, &**shared))
            });
            all.push(S::downgrade(shared));
        });
    }

    /// Posts the receive of a message again whose connection is gone, if it was shared.
    #[cold]
    fn post_orphan(&self, buffer: Option<Buffer>) -> Option<Buffer> {
        let all = S::with(&self.shared_receives, |all| all.clone());
        let queues = all.iter().filter_map(|queue| S::upgrade::<DomainReceives<S>>(queue));
        queues.fold(buffer, |buffer, queue| queue.post_orphan(buffer?))
    }

    /// Posts the buffer of a message again. Returns it if it is not needed.
    pub(crate) fn give_back(&self, key: EndpointKey, buffer: Option<Buffer>) -> Option<Buffer> {
        if self.events.is_inherited() {
            return buffer;
        }
        let mut is_orphan = false;
        let unused = S::with(&self.state, |state| {
            let (set, Some(member)) = state.with_set(key) else {
                is_orphan = true;
                return buffer;
            };
            member.kept = member.kept.saturating_sub(1);
            if let Some(shared) = member.receives.shared() {
                return buffer.and_then(|buffer| shared.post(buffer));
            }
            if member.ended.is_some() {
                return buffer;
            }
            let buffer = buffer?;
            let Some(mut endpoint) = set.endpoint(key) else { return Some(buffer) };
            match endpoint.receive(buffer) {
                Ok(_) => None,
                Err(rejected) => rejected.buffer,
            }
        });
        if is_orphan { self.post_orphan(unused) } else { unused }
    }

    /// Takes completions, at most [`BATCH`], and wakes the tasks. Returns their number.
    // Inlined, it would take registers from its caller.
    #[inline(never)]
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
            // Those whose last operation has completed since the last call.
            state.advance_leaving(effects);
            if state.broken.is_some() {
                // Its connections still have to end.
                return (true, state.leaving_deadline());
            }
            match state.set.arm() {
                Ok(armed) => {
                    let deadlines = state.leaving_deadline().into_iter().chain(state.set.keepalive_due());
                    (armed == Armed::Wait, deadlines.min())
                }
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

    /// Builds an endpoint with `start`, and adds its connection. `None` if the queue has failed, or if `start` returns that.
    pub(crate) fn open<T>(
        &self,
        sends: u32,
        receives: &mut Option<Receives<S>>,
        start: impl FnOnce(&mut EndpointSet) -> Option<rdma_safe::Result<(EndpointKey, T)>>,
    ) -> Option<Result<(EndpointKey, T)>> {
        S::with(&self.state, |state| {
            if state.broken.is_some() {
                return None;
            }
            let started = start(&mut state.set)?;
            Some(started.map_err(Into::into).inspect(|(key, _)| {
                if let Some(receives) = receives.take() {
                    self.remember(receives.shared());
                    state.add(Member::new(*key, sends, receives));
                }
            }))
        })
    }

    /// The connection was made without a connection manager.
    pub(crate) fn set_exchanged(&self, key: EndpointKey) {
        S::with(&self.state, |state| {
            if let Some(member) = state.member(key) {
                member.stage = Stage::Exchanged;
            }
        });
    }

    /// Advances the handshake of a connection. If it fails, the connection is removed.
    pub(crate) fn advance_opening(&self, handshake: Handshake<SetConnection>) -> Result<Progress<SetConnection>> {
        let mut effects = Effects::default();
        let advanced = S::with(&self.state, |state| {
            let key = handshake.key();
            let advanced = handshake.advance_in(&mut state.set);
            if advanced.is_err() {
                state.remove(key, &mut effects);
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

    /// Looks whether the peer has ended a connection, or answers the lookups of datagrams.
    pub(crate) fn check_connection(&self, key: EndpointKey) {
        if self.answer_lookups(key) {
            return;
        }
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            let (set, Some(member)) = state.with_set(key) else { return };
            let Stage::Open(connection) = &mut member.stage else { return };
            let ended = match connection.is_connected(set) {
                Ok(true) => return,
                Ok(false) => Ended::Disconnected,
                Err(error) => Ended::Failed(Arc::new(error)),
            };
            // Work that completed before the disconnect is in the queue by the time the disconnect is noticed. Its messages come
            // first.
            for _ in 0..=state.set.capacity() as usize / BATCH {
                if state.sweep(&mut effects) == 0 {
                    break;
                }
            }
            if let Some(member) = state.member(key) {
                member.end(&ended, &mut effects);
            }
        });
        effects.run();
    }

    /// The last handle of a connection was dropped, or it is to be closed: it ends once its operations have completed, or at
    /// `linger`.
    pub(crate) fn begin_close(&self, key: EndpointKey, linger: Duration) {
        if self.events.is_inherited() {
            return;
        }
        let mut effects = Effects::default();
        let has_begun = S::with(&self.state, |state| {
            let Some(member) = state.member(key).filter(|member| member.drain_until.is_none()) else { return false };
            let now = Instant::now();
            member.drain_until = Some(now.checked_add(linger).unwrap_or(now + FAR));
            member.end(&Ended::Closed, &mut effects);
            state.leaving.push(key);
            true
        });
        effects.run();
        if has_begun {
            self.events.poller.wake();
        }
    }

    /// Drops `memory` when the connection is gone. Returns it if that is so already.
    pub(crate) fn attach(&self, key: EndpointKey, memory: Attachment) -> Option<Attachment> {
        if self.events.is_inherited() {
            return Some(memory);
        }
        S::with(&self.state, |state| match state.member(key) {
            Some(member) => {
                member.attachments.push(memory);
                None
            }
            None => Some(memory),
        })
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
        if self.events.is_inherited() {
            return;
        }
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            if state.member(key).is_some() {
                state.remove(key, &mut effects);
            }
        });
        effects.run();
    }

    /// Advances the connections that this side is closing.
    #[inline]
    pub(crate) fn advance_leaving(&self, effects: &mut Effects) {
        S::with(&self.state, |state| state.advance_leaving(effects));
        effects.run();
    }

    /// Ends all connections: the driver stops.
    pub(crate) fn stop(&self) {
        let mut effects = Effects::default();
        S::with(&self.state, |state| {
            state.fail_all(&Ended::DriverStopped, &mut effects);
            let keys: Vec<_> = state.connections.members.iter().flatten().map(|member| member.key).collect();
            for key in keys {
                state.remove(key, &mut effects);
            }
        });
        effects.run();
    }

    pub(crate) fn counts(&self) -> Counts {
        S::with(&self.state, |state| state.connections.counts)
    }

    /// Numbers of connections, and of slots in use.
    pub(crate) fn population(&self) -> (usize, usize) {
        S::with(&self.state, |state| {
            (state.connections.members.iter().flatten().count(), state.connections.slots.len())
        })
    }

    /// Number of messages of a connection that its readers keep.
    pub(crate) fn kept(&self, key: EndpointKey) -> u32 {
        S::with(&self.state, |state| state.member(key).map_or(0, |member| member.kept))
    }
}

impl<S: Sharing> Inner<S> {
    /// Posts the request of `step` if there is room: [`State::post`].
    // Not inlined into the task, whose registers it would take. With few arguments and a small result, the call is cheap.
    #[inline(never)]
    pub(crate) fn post<R: Request>(&self, step: &mut Step<R>, waker: Option<Waker>) -> Option<Slot> {
        match S::with(&self.queue.state, |state| state.post(self.key, step, waker)) {
            Ok(slot) => Some(slot),
            Err(unused) => {
                drop(unused);
                None
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    #[cfg(feature = "soft")]
    use crate::driver::spin::moved_packets;
    use crate::{Connection, Connector, Driver, Listener, Local, Runner};

    /// A connection, both of whose ends are in one queue.
    pub(in crate::driver) fn connected() -> (Runner<Local>, [Connection<Local>; 2]) {
        rdma_safe::soft::install().unwrap();
        let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
        let ends = connect(&mut runner, &driver);
        (runner, ends)
    }

    pub(in crate::driver) fn connect(runner: &mut Runner<Local>, driver: &Driver<Local>) -> [Connection<Local>; 2] {
        runner.block_on(async {
            let listener = Listener::builder().driver(driver).bind("127.0.0.1:0").await.unwrap();
            let connector = Connector::with_driver(driver).keepalive(None).linger(Duration::MAX);
            let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
            [client.unwrap(), server.unwrap()]
        })
    }

    #[cfg(feature = "soft")]
    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn packets_that_a_driver_moves_on_this_thread_are_seen() {
        let (mut runner, [client, server]) = connected();
        let (start, before) = (Instant::now(), moved_packets());
        // The server thread of soft0 may be faster.
        while moved_packets() == before {
            assert!(start.elapsed() < Duration::from_secs(30), "this thread has moved no packet");
            runner.block_on(async {
                client.send(client.buffer_of(b"a packet").await.unwrap()).await.unwrap();
                server.receive().await.unwrap().unwrap();
            });
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn a_failed_queue_has_the_deadlines_of_its_connections() {
        let (_runner, [client, _server]) = connected();
        let (queue, mut effects) = (client.inner.queue.clone(), Effects::default());
        // The peer has to confirm the end, within the deadline of the handshake.
        drop(client);
        queue.advance_leaving(&mut effects);
        let failed = Ended::Failed(Arc::new(rdma_safe::Error::NoChannel));
        Local::with(&queue.state, |state| state.fail_all(&failed, &mut effects));
        assert!(matches!(queue.arm(&mut effects), (true, Some(_))));
    }

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn a_disconnect_that_is_noticed_first_loses_no_message() {
        rdma_safe::soft::install().unwrap();
        let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
        let of_peer = Driver::thread().unwrap();
        let others = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runner.block_on(Listener::builder().driver(&driver).bind("127.0.0.1:0")).unwrap();
        let connector = Connector::with_driver(&of_peer);
        let connect = connector.connect(listener.local_address());
        let (peer, end) = runner.block_on(async { tokio::join!(connect, listener.accept()) });
        let (peer, end) = (peer.unwrap(), end.unwrap());
        // From here on, nobody takes the completions of this end.
        others.block_on(async {
            peer.send(peer.buffer_of(b"the last message").await.unwrap()).await.unwrap();
            let _ = tokio::time::timeout(Duration::from_millis(10), peer.close()).await;
        });
        let (queue, key) = (&end.inner.queue, end.inner.key);
        let has_ended = |state: &mut State<Local>| state.member(key).is_some_and(|member| member.ended.is_some());
        let start = Instant::now();
        while !Local::with(&queue.state, has_ended) {
            assert!(start.elapsed() < Duration::from_secs(30));
            queue.check_connection(key);
        }
        let message = runner.block_on(end.receive()).unwrap();
        assert_eq!(message.as_deref(), Some(&b"the last message"[..]));
        assert!(runner.block_on(end.receive()).unwrap().is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn an_endless_time_to_linger_has_not_passed() {
        let (mut runner, [client, _server]) = connected();
        let (queue, key) = (client.inner.queue.clone(), client.inner.key);
        let buffer = runner.block_on(client.buffer_of(b"in flight")).unwrap();
        runner.block_on(client.send(buffer).posted()).unwrap();
        drop(client);
        queue.advance_leaving(&mut Effects::default());
        let is_open =
            |state: &mut State<Local>| state.member(key).is_some_and(|member| matches!(member.stage, Stage::Open(_)));
        assert!(Local::with(&queue.state, is_open));
    }
}
