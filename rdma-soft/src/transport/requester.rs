//! Turning work into requests, and what comes back into completions.

use std::collections::VecDeque;
use std::time::Duration;

use super::host::{Completion, Host, Status};
use super::{Outgoing, Request, Time, Work};
use crate::wire::{Ack, Header, Nak, Operation, Psn, Syndrome};

/// Packets that may be on their way unacknowledged: what a path keeps busy, and a receiver's socket can hold.
const WINDOW: i32 = 256;

/// In a long message, after how many packets an acknowledgement is asked for.
const PACE: u32 = 64;

/// What a requester is told when its queue pair becomes ready to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequesterSettings {
    /// The number of its first packet.
    pub psn: Psn,
    /// Most bytes of a packet's payload.
    pub mtu: u32,
    /// Reads and atomic operations that may be outstanding; at least one where there are any.
    pub reads: u8,
    /// How long an acknowledgement is waited for; for ever unless set.
    pub timeout: Option<Duration>,
    /// How often to send again when none comes, or packets are missing: 0 to 7.
    pub retries: u8,
    /// How often to send again when the peer has no receive: 0 to 6, or without end at 7.
    pub rnr_retries: u8,
}

/// Work with its packets' numbers.
#[derive(Clone, Copy, Debug)]
struct Numbered {
    work: Work,
    psn: Psn,
    packets: u32,
    /// Of a read or an atomic operation: packets that have come back.
    returned: u32,
}

impl Numbered {
    fn awaits_data(&self) -> bool {
        matches!(self.work.request, Request::Read { .. } | Request::CompareSwap(_) | Request::FetchAdd(_))
    }

    fn is_answered(&self) -> bool {
        !self.awaits_data() || self.returned == self.packets
    }

    /// The number of the first packet after it.
    fn end(&self) -> Psn {
        self.psn.add(self.packets)
    }
}

/// The end of a reliable connection that asks.
#[derive(Clone, Debug)]
pub struct Requester {
    settings: RequesterSettings,
    /// Not acknowledged yet, the earliest first. Those before `at` were sent.
    work: VecDeque<Numbered>,
    /// Which is sent next,
    at: usize,
    /// and how many of its packets were.
    sent: u32,
    /// Of the first packet that was never numbered.
    next: Psn,
    /// After all that was ever sent, also if it is being sent again.
    highest: Psn,
    /// Of the first packet that is not acknowledged.
    unacknowledged: Psn,
    retries: u8,
    rnr_retries: u8,
    /// When an answer must have come.
    deadline: Option<Time>,
    /// Until when the peer has asked to be left alone.
    pause: Option<Time>,
    /// An answer is missing, and what asks for it was sent again: what comes after the gap says nothing new.
    has_asked: bool,
    has_failed: bool,
}

impl Requester {
    /// Ready to send.
    #[must_use]
    pub fn new(settings: RequesterSettings) -> Self {
        Requester {
            settings,
            work: VecDeque::new(),
            at: 0,
            sent: 0,
            next: settings.psn,
            highest: settings.psn,
            unacknowledged: settings.psn,
            retries: settings.retries,
            rnr_retries: settings.rnr_retries,
            deadline: None,
            pause: None,
            has_asked: false,
            has_failed: false,
        }
    }

    /// Whether work has failed: all work has ended then, and the queue pair goes to the error state.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether no work is left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.work.is_empty()
    }

    /// Adds work. After a failure it is flushed at once.
    pub fn post(&mut self, work: Work, host: &mut impl Host) {
        if self.has_failed {
            host.complete(Completion::Sent { id: work.id, status: Status::Flushed });
            return;
        }
        let packets = work.packets(self.settings.mtu);
        self.work.push_back(Numbered { work, psn: self.next, packets, returned: 0 });
        self.next = self.next.add(packets);
    }

    /// Ends all work that is left, as the queue pair goes to the error state.
    pub fn flush(&mut self, host: &mut impl Host) {
        self.has_failed = true;
        self.deadline = None;
        self.pause = None;
        for numbered in self.work.drain(..) {
            host.complete(Completion::Sent { id: numbered.work.id, status: Status::Flushed });
        }
        (self.at, self.sent) = (0, 0);
    }

    /// When to call [`Requester::expire`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        self.pause.or(self.deadline)
    }

    /// Does what has become due.
    pub fn expire(&mut self, now: Time, host: &mut impl Host) {
        if self.pause.is_some_and(|pause| pause <= now) {
            self.pause = None;
        }
        if self.pause.is_none() && self.deadline.is_some_and(|deadline| deadline <= now) {
            self.again(host);
        }
    }

    /// Sends again what is not acknowledged, or fails when that was done often enough.
    fn again(&mut self, host: &mut impl Host) {
        match self.retries.checked_sub(1) {
            Some(left) => {
                self.retries = left;
                self.deadline = None;
                self.has_asked = false;
                self.rewind();
            }
            None => self.fail(Status::RetryExceeded, host),
        }
    }

    /// As [`Requester::again`], once for each gap in the answers.
    fn ask_for_missing(&mut self, host: &mut impl Host) {
        if !self.has_asked {
            self.again(host);
            self.has_asked = true;
        }
    }

    /// The earliest work fails, and what comes after it is flushed.
    fn fail(&mut self, status: Status, host: &mut impl Host) {
        if let Some(first) = self.work.pop_front() {
            host.complete(Completion::Sent { id: first.work.id, status });
        }
        self.flush(host);
    }

    /// Sends all again that was not acknowledged.
    fn rewind(&mut self) {
        self.at = 0;
        self.sent = match self.work.front() {
            Some(first) if first.awaits_data() => first.returned,
            Some(first) => self.unacknowledged.since(first.psn).max(0) as u32,
            None => 0,
        };
    }

    /// The next packet to send, if there is any.
    pub fn transmit(&mut self, now: Time) -> Option<Outgoing> {
        if self.pause.is_some() {
            return None;
        }
        let numbered = *self.work.get(self.at)?;
        let psn = numbered.psn.add(self.sent);
        if psn.since(self.unacknowledged) >= WINDOW {
            return None;
        }
        if numbered.awaits_data() || numbered.work.is_fenced {
            let outstanding = self.work.iter().take(self.at).filter(|earlier| !earlier.is_answered()).count();
            if outstanding >= usize::from(self.settings.reads.max(1)) || (numbered.work.is_fenced && outstanding > 0) {
                return None;
            }
        }
        let mut outgoing = numbered.work.packet(self.sent, numbered.packets, psn, self.settings.mtu);
        outgoing.ack_request |= self.sent % PACE == PACE - 1 || psn.add(1).since(self.unacknowledged) >= WINDOW;
        match numbered.awaits_data() {
            true => self.sent = numbered.packets,
            false => self.sent += 1,
        }
        if self.sent >= numbered.packets {
            (self.at, self.sent) = (self.at + 1, 0);
        }
        let frontier = self.frontier();
        if frontier.since(self.highest) > 0 {
            self.highest = frontier;
        }
        let is_answered = outgoing.ack_request || numbered.awaits_data();
        if is_answered && self.deadline.is_none() {
            self.deadline = self.settings.timeout.map(|timeout| now + timeout);
        }
        Some(outgoing)
    }

    /// The number of the first packet that was not sent yet.
    fn frontier(&self) -> Psn {
        match self.work.get(self.at) {
            Some(numbered) => numbered.psn.add(self.sent),
            None => self.next,
        }
    }

    /// Takes an answer that has arrived.
    pub fn handle(&mut self, header: &Header, payload: &[u8], now: Time, host: &mut impl Host) {
        if self.has_failed {
            return;
        }
        match header.operation {
            Operation::Acknowledge(Ack { syndrome, .. }) => self.acknowledged(header.psn, syndrome, now, host),
            Operation::AtomicAcknowledge(_, old) => {
                self.returned(header.psn, &old.to_ne_bytes(), true, now, host);
            }
            Operation::ReadFirst(_) | Operation::ReadMiddle => self.returned(header.psn, payload, false, now, host),
            Operation::ReadLast(_) | Operation::ReadOnly(_) => self.returned(header.psn, payload, true, now, host),
            _ => {}
        }
    }

    fn acknowledged(&mut self, psn: Psn, syndrome: Syndrome, now: Time, host: &mut impl Host) {
        // A refusal is of the packet that it numbers, and acknowledges those before it.
        let upto = if matches!(syndrome, Syndrome::Ack(_)) { psn.add(1) } else { psn };
        // Of what was acknowledged already, or never sent.
        if upto.since(self.unacknowledged) < 0 || upto.since(self.highest) > 0 {
            return;
        }
        if !self.advance(upto, now, host) {
            return;
        }
        match syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::ReceiverNotReady(timer) => {
                if self.rnr_retries == 0 {
                    return self.fail(Status::ReceiverNotReadyExceeded, host);
                }
                if self.rnr_retries < 7 {
                    self.rnr_retries -= 1;
                }
                self.pause = Some(now + rnr_pause(timer));
                self.deadline = None;
                self.rewind();
            }
            Syndrome::Nak(Nak::SequenceError) => self.again(host),
            Syndrome::Nak(Nak::InvalidRequest) => self.fail(Status::RemoteInvalidRequest, host),
            Syndrome::Nak(Nak::RemoteAccess) => self.fail(Status::RemoteAccess, host),
            Syndrome::Nak(Nak::RemoteOperation) => self.fail(Status::RemoteOperation, host),
        }
    }

    /// All before that number is acknowledged; whether no answer is missing among it.
    fn advance(&mut self, upto: Psn, now: Time, host: &mut impl Host) -> bool {
        let mut is_whole = true;
        while let Some(first) = self.work.front().copied() {
            if first.end().since(upto) > 0 {
                // A read of which the peer has gone on to something later: its answer got lost.
                if first.awaits_data() && upto.since(first.psn.add(first.returned)) > 0 {
                    is_whole = false;
                }
                break;
            }
            if !first.is_answered() {
                is_whole = false;
                break;
            }
            self.work.pop_front();
            match self.at.checked_sub(1) {
                Some(at) => self.at = at,
                // It was being sent again.
                None => self.sent = 0,
            }
            host.complete(Completion::Sent { id: first.work.id, status: Status::Success });
        }
        let reached = match self.work.front() {
            Some(first) if first.awaits_data() => first.psn.add(first.returned),
            _ => upto,
        };
        if reached.since(self.unacknowledged) > 0 {
            self.unacknowledged = reached;
            // What is sent again need not be, if its answer comes meanwhile.
            if self.frontier().since(reached) < 0 {
                self.rewind();
            }
            self.progressed(now);
        }
        if !is_whole {
            self.ask_for_missing(host);
        }
        is_whole
    }

    /// The peer has answered something new.
    fn progressed(&mut self, now: Time) {
        self.has_asked = false;
        self.retries = self.settings.retries;
        self.rnr_retries = self.settings.rnr_retries;
        let is_awaited = self.frontier().since(self.unacknowledged) > 0;
        self.deadline = if is_awaited { self.settings.timeout.map(|timeout| now + timeout) } else { None };
    }

    /// Data has come back.
    fn returned(&mut self, psn: Psn, data: &[u8], is_last: bool, now: Time, host: &mut impl Host) {
        // It acknowledges what came before the work that it is of.
        let of = self.work.iter().position(|numbered| {
            numbered.awaits_data() && psn.since(numbered.psn) >= 0 && psn.since(numbered.end()) < 0
        });
        let Some(of) = of.filter(|_| psn.since(self.highest) < 0) else { return };
        let start = self.work[of].psn;
        if of > 0 && !self.advance(start, now, host) {
            return;
        }
        let Some(first) = self.work.front_mut() else { return };
        let expected = first.psn.add(first.returned);
        match psn.since(expected) {
            // It was there already.
            ..0 => return,
            0 => {}
            // Those before it got lost.
            1.. => return self.ask_for_missing(host),
        }
        let mtu = self.settings.mtu;
        let offset = first.returned * mtu;
        let is_atomic = !matches!(first.work.request, Request::Read { .. });
        let wanted = if is_atomic { 8 } else { (first.work.len - offset.min(first.work.len)).min(mtu) };
        let ends = first.returned + 1 == first.packets;
        if data.len() as u32 != wanted || is_last != ends {
            return self.fail(Status::BadResponse, host);
        }
        if let Err(status) = host.returned(first.work.id, offset, data) {
            return self.fail(status, host);
        }
        first.returned += 1;
        self.advance(psn.add(1), now, host);
    }
}

/// How long the peer asks to be left alone: table 45 of the specification, `enum ib_rnr_timeout` of Linux.
fn rnr_pause(timer: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    Duration::from_micros(10 * HUNDREDTHS_OF_MS[usize::from(timer & 31)])
}
