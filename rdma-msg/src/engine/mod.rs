//! The engine of a channel: sends and receives packets, and knows which tasks wait.
//!
//! It is behind a lock, and never waits. [`Engine::run`] takes what the connection has, [`Engine::settle`] sends what there is
//! credit for. No code of the user runs inside: wakers are collected.

mod idle;
mod incoming;
mod liveness;
mod open;
mod outgoing;
mod reading;
mod spaces;
mod timer;
mod unpacker;

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Weak;
use std::task::{Context, Poll, Waker};

use rdma_async::Connection;
use rdma_async::{List, OwnedOperation, Threads};
use rdma_safe::{Buffer, ExposedRegion, Gather, ReadableRegion};

use crate::channel::Statistics;
use crate::error::{Error, Violation};
use crate::flow::{Flow, Limits};
use crate::message::{CopyBudget, Message};
use crate::shared::{News, OwnWakers, Shared};
use crate::waiting::{Line, Place, Wakers};
use crate::wire::{Class, Hello};

use idle::Idle;
use incoming::{Arrived, Incoming};
use liveness::Liveness;
use outgoing::{CONTROL_BUFFERS, Outgoing, Sent};
use reading::Reading;
use spaces::Spaces;
use timer::Timer;

pub(crate) use open::Packer;
pub(crate) use outgoing::Progress;
pub(crate) use reading::READS;
pub(crate) use spaces::{WRITE_PARTS, WRITES, Writing};
pub(crate) use unpacker::Unpacker;

/// The engine of a channel.
pub(crate) struct Engine {
    connection: Connection,
    /// Runs the engine when packets have arrived.
    packets: Waker,
    /// Runs the engine when a send, a read or a write has completed.
    completions: Waker,
    idle: Idle,
    liveness: Liveness,
    flow: Flow,
    outgoing: Outgoing,
    incoming: Incoming,
    /// The message that is being read from the memory of the peer.
    reading: Option<Reading>,
    spaces: Spaces,
    /// Why nothing more can be sent, and nothing more arrives.
    ended: Option<Error>,
    senders: Line,
    readers: Line,
    /// Tasks that wait for acknowledgements, or to offer memory.
    flushers: Line,
    /// Tasks to wake.
    wakers: Wakers,
    freed: Freed,
    /// Whether a task that waits to send may find room.
    has_new_room: bool,
    counts: Counts,
}

/// Counts since the connection was made.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    statistics: Statistics,
    packets_acknowledged: u64,
    offers_made: u64,
    offers_answered: u64,
    /// Packets of all classes that have arrived.
    arrived: u64,
    /// Packets of all classes that were sent.
    posted: u64,
    completed: u64,
}

impl Counts {
    /// Counts a packet as acknowledged, once.
    fn acknowledge(&mut self, sent: &mut Sent) {
        if !mem::replace(&mut sent.is_acknowledged, true) {
            self.statistics.messages_acknowledged += u64::from(sent.messages);
            self.packets_acknowledged += u64::from(sent.class == Class::Data);
        }
    }
}

/// Work deferred until the engine is unlocked.
pub(crate) struct Effects {
    pub(crate) wakers: Wakers,
    /// Usually there is none.
    pub(crate) freed: Option<Freed>,
}

/// Memory to drop. Its destructors can run code of the user.
#[derive(Default)]
pub(crate) struct Freed {
    /// Memory of messages that the peer has read, or can no longer read.
    regions: Vec<ReadableRegion>,
    buffers: Vec<Buffer>,
    messages: Vec<Message>,
    packets: Vec<Arrived>,
    readings: Vec<Reading>,
    lists: Vec<Gather>,
    writes: Vec<OwnedOperation<Threads, List>>,
    spaces: Vec<ExposedRegion>,
    /// Memory that stays until the connection is gone.
    left: Option<(Connection, Vec<ExposedRegion>)>,
}

impl Freed {
    /// Drops the memory, without a lock.
    pub(crate) fn release(self) {
        if let Some((connection, spaces)) = self.left {
            spaces.into_iter().for_each(|space| connection.attach(space));
        }
    }

    fn is_empty(&self) -> bool {
        let Freed { regions, buffers, messages, packets, readings, lists, writes, spaces, left } = self;
        let has_spaces = !spaces.is_empty() || left.is_some();
        let has_memory = !(regions.is_empty() && buffers.is_empty() && lists.is_empty()) || has_spaces;
        let has_work = !(readings.is_empty() && writes.is_empty());
        !has_memory && !has_work && messages.is_empty() && packets.is_empty()
    }
}

/// What a task waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waits {
    ToSend,
    ToReceive,
    ForAcknowledgements,
}

/// Memory of a connection that is reserved before its engine starts.
pub(crate) struct Reserved {
    pub(crate) packet: Buffer,
    pub(crate) control: [Buffer; CONTROL_BUFFERS],
}

impl Engine {
    pub(crate) fn new(
        connection: Connection,
        [own, peer]: [&Hello; 2],
        limits: Limits,
        copies: CopyBudget,
        reserved: Reserved,
        wakers: OwnWakers,
        channel: Weak<Shared>,
    ) -> Self {
        let timer = || Timer::new(connection.deadline(), wakers.timer.clone());
        Engine {
            packets: wakers.packets,
            completions: wakers.completions,
            idle: Idle::new(timer()),
            liveness: Liveness::new(timer(), [own.keepalive, peer.keepalive]),
            flow: Flow::new(limits),
            outgoing: Outgoing::new([own, peer], limits.sends, reserved),
            incoming: Incoming::new(connection.receiver(), own, copies, channel),
            connection,
            reading: None,
            spaces: Spaces::default(),
            ended: None,
            senders: Line::default(),
            readers: Line::default(),
            flushers: Line::default(),
            wakers: Wakers::default(),
            freed: Freed::default(),
            has_new_room: false,
            counts: Counts::default(),
        }
    }

    /// Takes packets and completions, and looks at the timers.
    pub(crate) fn run(&mut self, news: News) {
        // Packets and completions that came before the end of the connection count.
        let end = if news.has(News::PACKETS) { self.take_packets() } else { None };
        if news.has(News::COMPLETIONS) || end.is_some() {
            self.take_completions();
        } else {
            self.take_done();
        }
        if let Some(error) = end {
            self.fail(error);
        }
        if news.has(News::COMPLETIONS) {
            self.take_writes();
            self.advance_reading();
        }
        if news.has(News::TIMER) {
            self.on_timer();
        }
    }

    fn on_timer(&mut self) {
        self.take_completions();
        if self.ended.is_none() {
            self.check_peer();
        }
        if self.ended.is_none() {
            self.check_idle();
        }
    }

    /// Sends what there is room for, and decides which tasks to wake.
    pub(crate) fn settle(&mut self) {
        if self.ended.is_none() {
            self.send_due();
        }
        while self.ended.is_none() && self.wants_completions() {
            self.take_completions();
            if self.ended.is_none() {
                self.send_due();
            }
        }
        if self.ended.is_none() {
            self.arm_idle_timer();
            self.arm_liveness_timer();
        }
        let has_message = self.has_message();
        let Engine { senders, readers, flushers, wakers, ended, .. } = self;
        if ended.is_some() {
            for line in [senders, readers, flushers] {
                wakers.extend(line.wake_all());
            }
            return;
        }
        if has_message {
            wakers.extend(readers.wake_first());
        }
        if mem::take(&mut self.has_new_room) {
            wakers.extend(senders.wake_first());
        }
        if mem::take(&mut self.outgoing.has_progressed) {
            wakers.extend(flushers.wake_all());
        }
    }

    pub(crate) fn take_effects(&mut self) -> Option<Effects> {
        let has_effects = !self.wakers.is_empty() || !self.freed.is_empty();
        has_effects.then(|| Effects {
            wakers: mem::take(&mut self.wakers),
            freed: (!self.freed.is_empty()).then(|| mem::take(&mut self.freed)),
        })
    }

    /// Whether a task that receives will find something.
    pub(crate) fn has_message(&self) -> bool {
        self.reading.as_ref().map_or_else(|| self.incoming.has_more(), Reading::is_done)
    }

    /// How many more receives must be posted again before the peer has to be told.
    pub(crate) fn returns_wanted(&self) -> u32 {
        if self.ended.is_some() { u32::MAX } else { self.flow.returns_until_update() }
    }

    /// Receives of these many packets are posted again.
    pub(crate) fn count_returned(&mut self, packets: u32) {
        (0..packets).for_each(|_| self.flow.returned());
    }

    pub(crate) fn line(&mut self, waits: Waits) -> &mut Line {
        match waits {
            Waits::ToSend => &mut self.senders,
            Waits::ToReceive => &mut self.readers,
            Waits::ForAcknowledgements => &mut self.flushers,
        }
    }

    /// A task has to wait. Returns its place, and a waker to drop.
    pub(crate) fn wait(&mut self, waits: Waits, place: Option<Place>, waker: Option<Waker>) -> (Place, Option<Waker>) {
        self.counts.statistics.waits += u64::from(place.is_none());
        let is_starved = place.is_none() && matches!(waits, Waits::ToReceive) && self.is_starved();
        self.counts.statistics.starved += u64::from(is_starved);
        if place.is_none() && !matches!(waits, Waits::ToSend) {
            self.outgoing.make_urgent();
        }
        self.line(waits).wait(place, waker)
    }

    /// A task no longer waits. Returns its waker, to drop.
    pub(crate) fn leave_line(&mut self, waits: Waits, place: Place) -> Option<Waker> {
        // There may be room for the next one.
        self.has_new_room |= matches!(waits, Waits::ToSend);
        self.line(waits).leave(place)
    }

    /// Whether this end has said that it sends no more, and the peer has all.
    pub(crate) fn is_complete(&mut self) -> bool {
        self.take_completions();
        self.outgoing.has_finished() && self.has_all_acknowledged()
    }

    fn has_all_acknowledged(&self) -> bool {
        matches!(self.try_flush(self.added()), Ok(Some(())))
    }

    pub(crate) fn statistics(&mut self) -> Statistics {
        self.take_completions();
        Statistics { window: self.flow.window(), ..self.counts.statistics }
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Why nothing more can be sent.
    pub(crate) fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    /// Why nothing more can be sent, as an error; otherwise `value`.
    fn ended_or<T>(&self, value: T) -> Result<T, Error> {
        self.ended.clone().map_or(Ok(value), Err)
    }

    /// Ends the channel. The first reason counts.
    pub(crate) fn end(&mut self, reason: Error) {
        if self.ended.is_some() {
            return;
        }
        self.ended = Some(reason);
        // A message that was read before comes before the error, and none comes after it.
        self.advance_reading();
        self.free_memory();
        // The peer shall not wait for a program that does not look.
        self.close_connection();
    }

    fn violate(&mut self, violation: Violation) {
        self.end(violation.into());
        self.freed.packets.extend(self.incoming.clear());
    }

    /// Begins to close the connection. Nothing waits for the end.
    fn close_connection(&self) {
        let close = self.connection.close();
        // Its drop does not stop the closing.
        let mut close = Box::pin(close);
        let _: Poll<()> = close.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }

    /// All handles are gone.
    pub(crate) fn leave(&mut self) {
        self.take_completions();
        if self.ended.is_none() {
            self.freed.spaces.extend(self.spaces.take_due());
            // Without room, or with unread offers, no end is sent, and the peer gets `Disconnected`.
            if !self.outgoing.has_offers() {
                let _ = self.try_finish();
            }
            self.send_open();
            self.send_due();
            self.ended = Some(Error::Closed);
            self.free_memory();
        }
        // While the last packets are on their way, the peer may still write to this memory.
        let spaces: Vec<_> = self.spaces.take_own().collect();
        self.freed.left = (!spaces.is_empty()).then(|| (self.connection.clone(), spaces));
    }

    /// Frees the memory that the end of the channel leaves.
    fn free_memory(&mut self) {
        self.freed.regions.extend(self.outgoing.take_offers());
        self.freed.writes.extend(self.spaces.take_all_writes());
        self.freed.spaces.extend(self.spaces.take_due());
        if let Some(reading) = self.reading.take_if(|reading| !reading.is_done()) {
            self.freed.readings.push(reading);
            // A message is lost, so later ones must not be delivered.
            self.freed.packets.extend(self.incoming.clear());
        }
    }

    /// Whether the engine has to run when the first send completes, and nothing is registered for that yet.
    ///
    /// If nobody waits for a completion, the engine takes it when the reply arrives.
    fn wants_completions(&self) -> bool {
        let outgoing = &self.outgoing;
        let sleeps = !outgoing.sending.is_empty() && !outgoing.is_first_awaited;
        let has_waiters = !(self.senders.is_empty() && self.flushers.is_empty());
        sleeps && (outgoing.has_due() || self.spaces.are_due() || has_waiters)
    }

    /// Takes the completions of sends. If there are more to come, the next one runs the engine.
    pub(crate) fn take_completions(&mut self) {
        self.outgoing.is_first_awaited = true;
        self.take_done();
    }

    /// Takes the completions of sends, which come in order.
    fn take_done(&mut self) {
        while let Some(first) = self.outgoing.sending.front_mut() {
            let waker = if self.outgoing.is_first_awaited { &self.completions } else { Waker::noop() };
            let context = &mut Context::from_waker(waker);
            let Poll::Ready(result) = Pin::new(&mut first.operation).poll(context) else { return };
            let Some(mut sent) = self.outgoing.sending.pop_front() else { return };
            self.flow.completed(sent.class);
            self.outgoing.has_progressed = true;
            self.counts.completed += 1;
            if result.is_ok() {
                self.counts.acknowledge(&mut sent);
            } else {
                // The peer may have ended the connection before its acknowledgement arrived, and have said that it has all.
                let _ = self.take_packets();
                self.acknowledge_taken(&mut sent);
            }
            match result {
                Ok(buffer) => {
                    self.has_new_room = true;
                    self.outgoing.take_back(sent.class, buffer);
                }
                Err(failed) => {
                    self.freed.buffers.extend(failed.buffer);
                    // A write before it may be the cause.
                    self.take_writes();
                    self.fail(failed.error);
                }
            }
        }
    }

    /// Counts a packet as acknowledged if the peer has said that it has taken it.
    fn acknowledge_taken(&mut self, sent: &mut Sent) {
        if self.flow.has_taken(sent.number) {
            self.counts.acknowledge(sent);
        }
    }

    /// The connection takes no more work.
    fn fail(&mut self, error: rdma_async::Error) {
        if self.ended.is_some() {
            return;
        }
        // The peer may have said why.
        let _ = self.take_packets();
        let mut sending = mem::take(&mut self.outgoing.sending);
        sending.iter_mut().for_each(|sent| self.acknowledge_taken(sent));
        self.outgoing.sending = sending;
        let reason = match self.incoming.find_abort() {
            Some(aborted) => aborted,
            None if error.is_disconnected() => Error::Disconnected,
            None => error.into(),
        };
        self.end(reason);
    }

    /// Takes the packets that have arrived. Returns the reason if the connection has ended.
    fn take_packets(&mut self) -> Option<rdma_async::Error> {
        while !self.incoming.is_deaf {
            match self.incoming.receiver.poll_receive(&mut Context::from_waker(&self.packets)) {
                Poll::Pending => return None,
                Poll::Ready(Ok(Some(packet))) => {
                    if let Err(violation) = self.arrive(packet) {
                        self.incoming.is_deaf = true;
                        self.violate(violation);
                    }
                }
                Poll::Ready(Ok(None)) => {
                    self.incoming.is_deaf = true;
                    return Some(rdma_async::Error::Disconnected);
                }
                Poll::Ready(Err(error)) => {
                    self.incoming.is_deaf = true;
                    return Some(error);
                }
            }
        }
        None
    }

    /// Posts the receive of a packet again, before the peer is told of it.
    fn repost(&mut self, packet: rdma_async::Message) {
        self.freed.buffers.extend(packet.repost());
    }

    fn refuse(&mut self, packet: rdma_async::Message, violation: Violation) -> Result<(), Violation> {
        self.repost(packet);
        Err(violation)
    }

    fn arrive(&mut self, packet: rdma_async::Message) -> Result<(), Violation> {
        self.counts.arrived += 1;
        let (class, counts) = match crate::wire::decode_header(&packet) {
            Ok(header) => header,
            Err(violation) => return self.refuse(packet, violation),
        };
        match class {
            Class::Data => {
                if let Err(violation) = self.flow.received(counts) {
                    return self.refuse(packet, violation);
                }
                self.grow();
                self.counts.statistics.packets_received += 1;
                self.outgoing.is_answered = true;
                self.incoming.push(packet);
            }
            Class::Space => {
                let memory = crate::wire::decode_space(&packet);
                self.repost(packet);
                let memory = memory?;
                self.flow.received(counts)?;
                self.flow.returned();
                self.grow();
                self.space_received(memory)?;
            }
            Class::Abort => {
                let decoded = crate::wire::decode_abort_packet(&packet);
                let aborted = decoded.map(|(code, reason)| Error::Aborted { code, reason: reason.into() });
                self.repost(packet);
                let aborted = aborted?;
                self.flow.updated(counts)?;
                self.incoming.abort(aborted);
            }
            Class::Waiver => {
                let count = crate::wire::decode_waiver(&packet);
                self.repost(packet);
                let count = count?;
                self.flow.waived(counts, count)?;
                self.connection.release_receives(count);
            }
            Class::Control | Class::Answer | Class::Heartbeat => {
                let is_alone = packet.len() == crate::wire::HEADER;
                self.repost(packet);
                match class {
                    Class::Control => self.flow.updated(counts)?,
                    Class::Heartbeat => self.flow.heartbeat_received(counts)?,
                    _ => self.flow.answered(counts)?,
                }
                if !is_alone {
                    return Err(Violation::UnknownKind);
                }
            }
        }
        self.has_new_room = true;
        self.take_answers();
        Ok(())
    }
}
