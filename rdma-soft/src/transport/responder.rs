//! Carrying requests out, and answering them.

use std::collections::VecDeque;

use super::host::{Access, Completion, Host, ReceiveId, Received, Status};
use super::{Outgoing, Payload, packets};
use crate::wire::{Ack, Atomic, Header, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer};

/// What a responder is told when its queue pair becomes ready to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponderSettings {
    /// The number of the first packet that comes.
    pub psn: Psn,
    /// Most bytes of a packet's payload.
    pub mtu: u32,
    /// Reads and atomic operations that may be outstanding.
    pub resources: u8,
    /// The code of how long the peer is to wait when there is no receive.
    pub min_rnr_timer: u8,
}

/// The end of a reliable connection that answers.
#[derive(Clone, Debug)]
pub struct Responder {
    settings: ResponderSettings,
    /// Of the packet that comes next.
    expected: Psn,
    /// Messages that were completed.
    msn: u32,
    /// The peer knows already what is missing: it is told once.
    is_naked: bool,
    message: Message,
    /// Reads and atomic operations, the latest last, to be answered again when the answer gets lost.
    resources: VecDeque<Resource>,
    /// In the order of their requests.
    answers: VecDeque<Answer>,
    /// All up to there is to be acknowledged, after the answers.
    due: Option<Psn>,
    /// ACKs that the peer has requested since the last one was sent. A retransmitted request counts twice, as the peer waits
    /// already.
    asked: u32,
    has_failed: bool,
    /// With which refusal it has, and of which packet.
    failure: Option<(Psn, Nak)>,
}

/// What the packets so far are the beginning of.
#[derive(Clone, Copy, Debug)]
enum Message {
    None,
    Send { receive: ReceiveId, at: u32 },
    Write { range: RemoteRange, at: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Resource {
    psn: Psn,
    packets: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Atomic { old: u64 },
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// What was read, from here on; `is_first` also where the first was sent before and got lost.
    Read {
        psn: Psn,
        range: RemoteRange,
        at: u32,
        is_first: bool,
        is_repeated: bool,
    },
    Atomic {
        psn: Psn,
        old: u64,
        is_repeated: bool,
    },
    /// Everything before is acknowledged by it, too.
    Nak {
        psn: Psn,
        syndrome: Syndrome,
    },
}

/// A request that is answered with a refusal.
enum Refusal {
    /// The connection goes on.
    NotReady,
    /// It does not.
    Fatal(Nak),
}

impl Responder {
    /// Ready to receive.
    #[must_use]
    pub fn new(settings: ResponderSettings) -> Self {
        Responder {
            settings,
            expected: settings.psn,
            msn: 0,
            is_naked: false,
            message: Message::None,
            resources: VecDeque::with_capacity(settings.resources.into()),
            answers: VecDeque::with_capacity(2 * usize::from(settings.resources) + 2),
            due: None,
            asked: 0,
            has_failed: false,
            failure: None,
        }
    }

    /// Whether the peer has broken the rules, or was refused memory: the queue pair goes to the error state when the refusal was
    /// sent.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// The peer is to wait so long, by its code, when there is no receive.
    pub fn set_min_rnr_timer(&mut self, code: u8) {
        self.settings.min_rnr_timer = code;
    }

    /// Why the peer was refused for good.
    #[must_use]
    pub fn failure(&self) -> Option<Nak> {
        self.failure.map(|(_, nak)| nak)
    }

    /// The receive that a message has begun to fill: it is to be flushed with the others. Nothing is carried out from now on; a
    /// peer that was refused is told so again whenever it asks.
    pub fn abandon(&mut self) -> Option<ReceiveId> {
        self.has_failed = true;
        match std::mem::replace(&mut self.message, Message::None) {
            Message::Send { receive, .. } => Some(receive),
            Message::None | Message::Write { .. } => None,
        }
    }

    /// Takes a request that has arrived.
    pub fn handle(&mut self, header: &Header, payload: &[u8], host: &mut impl Host) {
        if self.has_failed {
            return self.refuse_again();
        }
        match header.psn.since(self.expected) {
            0 => {}
            1.. => {
                if !std::mem::replace(&mut self.is_naked, true) {
                    self.refuse(Syndrome::Nak(Nak::SequenceError));
                }
                return;
            }
            _ => return self.repeat(header),
        }
        self.is_naked = false;
        match self.carry_out(header, payload, host) {
            Ok(taken) => {
                self.expected = self.expected.add(taken);
                let is_answered = matches!(
                    header.operation,
                    Operation::ReadRequest(_) | Operation::CompareSwap(_) | Operation::FetchAdd(_)
                );
                if is_answered {
                    // The answer acknowledges it, and what came before.
                    self.due = None;
                } else if header.ack_request {
                    self.owe_ack(1);
                }
            }
            Err(Refusal::NotReady) => {
                self.is_naked = true;
                self.refuse(Syndrome::ReceiverNotReady(self.settings.min_rnr_timer));
            }
            Err(Refusal::Fatal(nak)) => {
                self.has_failed = true;
                self.failure = Some((self.expected, nak));
                self.refuse(Syndrome::Nak(nak));
            }
        }
    }

    /// Makes an ACK due of all that has arrived. It counts as requested `times` times.
    fn owe_ack(&mut self, times: u32) {
        self.asked = if self.due.is_some() { self.asked.saturating_add(times) } else { times };
        self.due = Some(self.expected.add(u32::MAX));
    }

    /// Whether an ACK is due, and nothing else.
    #[must_use]
    pub fn owes_ack(&self) -> bool {
        self.answers.is_empty() && self.due.is_some()
    }

    /// Whether the peer has requested the ACK that is due only once. It may then have nothing else in flight.
    #[must_use]
    pub fn was_asked_once(&self) -> bool {
        self.asked <= 1
    }

    fn refuse(&mut self, syndrome: Syndrome) {
        // It acknowledges what came before, and takes the place of a refusal that was not sent yet: however often a peer is refused
        // before it is heard, one waits.
        self.due = None;
        let nak = Answer::Nak { psn: self.expected, syndrome };
        match self.answers.back_mut() {
            Some(last @ Answer::Nak { .. }) => *last = nak,
            _ => self.answers.push_back(nak),
        }
    }

    /// The peer goes on as if nothing was: the refusal may have got lost, and without it the peer would take this end for gone.
    fn refuse_again(&mut self) {
        if let (Some((psn, nak)), true) = (self.failure, self.answers.is_empty()) {
            self.answers.push_back(Answer::Nak { psn, syndrome: Syndrome::Nak(nak) });
        }
    }

    /// Carries out what has come in its turn; how many numbers it takes.
    fn carry_out(&mut self, header: &Header, payload: &[u8], host: &mut impl Host) -> Result<u32, Refusal> {
        let invalid = Refusal::Fatal(Nak::InvalidRequest);
        let len = payload.len() as u32;
        let fits = match header.operation {
            Operation::SendFirst | Operation::SendMiddle | Operation::WriteFirst(_) | Operation::WriteMiddle => {
                len == self.settings.mtu
            }
            Operation::SendLast(_) | Operation::WriteLast(_) => 0 < len && len <= self.settings.mtu,
            _ => len <= self.settings.mtu,
        };
        if !fits {
            return Err(invalid);
        }
        match (header.operation, self.message) {
            (Operation::SendFirst, Message::None) => {
                let receive = host.receive().ok_or(Refusal::NotReady)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill(receive, 0, payload, host)?;
            }
            (Operation::SendMiddle, Message::Send { receive, at }) => self.fill(receive, at, payload, host)?,
            (Operation::SendOnly(trailer), Message::None) => {
                let receive = host.receive().ok_or(Refusal::NotReady)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill(receive, 0, payload, host)?;
                self.received(header, receive, len, trailer, host)?;
            }
            (Operation::SendLast(trailer), Message::Send { receive, at }) => {
                self.fill(receive, at, payload, host)?;
                self.received(header, receive, at.saturating_add(len), trailer, host)?;
            }
            (Operation::WriteFirst(range), Message::None) => {
                // What is written comes in more than one packet.
                if range.len <= self.settings.mtu {
                    return Err(invalid);
                }
                self.message = Message::Write { range, at: 0 };
                self.store(range, 0, payload, host)?;
            }
            (Operation::WriteMiddle, Message::Write { range, at }) => self.store(range, at, payload, host)?,
            (Operation::WriteLast(imm), Message::Write { range, at }) => {
                self.last_of_write(header, range, at, payload, imm, host)?;
            }
            (Operation::WriteOnly(range, imm), Message::None) => {
                self.last_of_write(header, range, 0, payload, imm, host)?;
            }
            (Operation::ReadRequest(range), Message::None) => return self.read(header.psn, range, host),
            (Operation::CompareSwap(atomic), Message::None) => {
                let change = |old| if old == atomic.compare { atomic.swap } else { old };
                self.atomic(header.psn, &atomic, &change, host)?;
            }
            (Operation::FetchAdd(atomic), Message::None) => {
                let change = |old: u64| old.wrapping_add(atomic.swap);
                self.atomic(header.psn, &atomic, &change, host)?;
            }
            _ => return Err(invalid),
        }
        Ok(1)
    }

    /// Puts a part of a message into its receive.
    fn fill(&mut self, receive: ReceiveId, at: u32, payload: &[u8], host: &mut impl Host) -> Result<(), Refusal> {
        if let Err(status) = host.fill(receive, at, payload) {
            self.message = Message::None;
            host.complete(Completion::failed_receive(receive, status));
            let nak = if status == Status::LocalLength { Nak::InvalidRequest } else { Nak::RemoteOperation };
            return Err(Refusal::Fatal(nak));
        }
        self.message = Message::Send { receive, at: at.saturating_add(payload.len() as u32) };
        Ok(())
    }

    /// A message is whole.
    fn received(
        &mut self,
        header: &Header,
        id: ReceiveId,
        len: u32,
        trailer: Trailer,
        host: &mut impl Host,
    ) -> Result<(), Refusal> {
        let (imm, invalidated) = match trailer {
            Trailer::None => (None, None),
            Trailer::Immediate(imm) => (Some(imm), None),
            Trailer::Invalidate(rkey) if host.invalidate(rkey) => (None, Some(rkey)),
            Trailer::Invalidate(_) => {
                self.message = Message::None;
                host.complete(Completion::failed_receive(id, Status::LocalProtection));
                return Err(Refusal::Fatal(Nak::RemoteAccess));
            }
        };
        self.done();
        let received = Received { len, is_write: false, imm, invalidated, solicited: header.solicited };
        host.complete(received.into_completion(id));
        Ok(())
    }

    /// Writes a part of what is written.
    fn store(&mut self, range: RemoteRange, at: u32, payload: &[u8], host: &mut impl Host) -> Result<(), Refusal> {
        let len = payload.len() as u32;
        if len > range.len - at {
            return Err(Refusal::Fatal(Nak::InvalidRequest));
        }
        // All of it is to be open before the first byte is written, and each part when its time comes.
        let (offset, asked) = if at == 0 { (0, range.len) } else { (u64::from(at), len) };
        let address = range.address.wrapping_add(offset);
        let opened = host.open(&RemoteRange { address, rkey: range.rkey, len: asked }, Access::Write);
        host.store(opened.ok_or(Refusal::Fatal(Nak::RemoteAccess))?, payload);
        self.message = Message::Write { range, at: at + len };
        Ok(())
    }

    fn last_of_write(
        &mut self,
        header: &Header,
        range: RemoteRange,
        at: u32,
        payload: &[u8],
        imm: Option<u32>,
        host: &mut impl Host,
    ) -> Result<(), Refusal> {
        if payload.len() as u32 != range.len - at {
            return Err(Refusal::Fatal(Nak::InvalidRequest));
        }
        // Before anything is written: a packet that is refused now comes again, whole.
        let receive = match imm {
            Some(_) => Some(host.receive().ok_or(Refusal::NotReady)?),
            None => None,
        };
        // Of nothing no key is asked for.
        if range.len > 0 {
            if let Err(refusal) = self.store(range, at, payload, host) {
                if let Some(id) = receive {
                    host.complete(Completion::failed_receive(id, Status::Flushed));
                }
                return Err(refusal);
            }
        }
        self.done();
        if let Some(id) = receive {
            let received =
                Received { len: range.len, is_write: true, imm, invalidated: None, solicited: header.solicited };
            host.complete(received.into_completion(id));
        }
        Ok(())
    }

    fn read(&mut self, psn: Psn, range: RemoteRange, host: &mut impl Host) -> Result<u32, Refusal> {
        if range.len > 1 << 31 || self.is_overrun() {
            return Err(Refusal::Fatal(Nak::InvalidRequest));
        }
        if range.len > 0 && host.open(&range, Access::Read).is_none() {
            return Err(Refusal::Fatal(Nak::RemoteAccess));
        }
        let packets = packets(range.len, self.settings.mtu);
        self.done();
        self.remember(Resource { psn, packets, kind: Kind::Read });
        self.answers.push_back(Answer::Read { psn, range, at: 0, is_first: true, is_repeated: false });
        Ok(packets)
    }

    fn atomic(
        &mut self,
        psn: Psn,
        atomic: &Atomic,
        change: &dyn Fn(u64) -> u64,
        host: &mut impl Host,
    ) -> Result<(), Refusal> {
        let Atomic { address, rkey, .. } = *atomic;
        if address % 8 != 0 || self.is_overrun() {
            return Err(Refusal::Fatal(Nak::InvalidRequest));
        }
        let opened = host.open(&RemoteRange { address, rkey, len: 8 }, Access::Atomic);
        let old = host.update(opened.ok_or(Refusal::Fatal(Nak::RemoteAccess))?, change);
        self.done();
        self.remember(Resource { psn, packets: 1, kind: Kind::Atomic { old } });
        self.answers.push_back(Answer::Atomic { psn, old, is_repeated: false });
        Ok(())
    }

    /// A message is complete.
    fn done(&mut self) {
        self.message = Message::None;
        self.msn = self.msn.wrapping_add(1);
    }

    /// Whether the peer has more reads and atomic operations outstanding than it may. What it has asked for again counts once.
    fn is_overrun(&self) -> bool {
        let is_new = |answer: &&Answer| {
            matches!(answer, Answer::Read { is_repeated: false, .. } | Answer::Atomic { is_repeated: false, .. })
        };
        self.answers.iter().filter(is_new).count() >= usize::from(self.settings.resources)
    }

    fn remember(&mut self, resource: Resource) {
        if self.resources.len() >= usize::from(self.settings.resources) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }

    /// A request that was carried out already: its answer may have got lost.
    fn repeat(&mut self, header: &Header) {
        // More than that is not outstanding; whoever asks more often asks again when nothing comes.
        if self.answers.len() > 2 * usize::from(self.settings.resources) {
            return;
        }
        match header.operation {
            Operation::ReadRequest(range) => {
                let asked = packets(range.len, self.settings.mtu);
                let covers = |resource: &&Resource| {
                    let at = header.psn.since(resource.psn);
                    matches!(resource.kind, Kind::Read) && at >= 0 && at as u32 + asked <= resource.packets
                };
                // One that is so old that it was forgotten: the peer has its answer, or asks in vain.
                if self.resources.iter().any(|resource| covers(&resource)) {
                    self.answers.push_back(Answer::Read {
                        psn: header.psn,
                        range,
                        at: 0,
                        is_first: true,
                        is_repeated: true,
                    });
                }
            }
            Operation::CompareSwap(_) | Operation::FetchAdd(_) => {
                let same = self.resources.iter().find(|resource| resource.psn == header.psn);
                if let Some(Resource { psn, kind: Kind::Atomic { old }, .. }) = same {
                    self.answers.push_back(Answer::Atomic { psn: *psn, old: *old, is_repeated: true });
                }
            }
            _ => self.owe_ack(2),
        }
    }

    /// The next packet to send, if there is any.
    pub fn transmit(&mut self, host: &impl Host) -> Option<Outgoing> {
        let msn = Psn::new(self.msn);
        let ack = Ack { syndrome: Syndrome::ACK, msn };
        let outgoing =
            |operation, psn, payload| Outgoing { operation, psn, ack_request: false, solicited: false, payload };
        let Some(answer) = self.answers.front_mut() else {
            let psn = self.due.take()?;
            return Some(outgoing(Operation::Acknowledge(ack), psn, Payload::None));
        };
        match *answer {
            Answer::Nak { psn, syndrome } => {
                self.answers.pop_front();
                Some(outgoing(Operation::Acknowledge(Ack { syndrome, msn }), psn, Payload::None))
            }
            Answer::Atomic { psn, old, .. } => {
                self.answers.pop_front();
                Some(outgoing(Operation::AtomicAcknowledge(ack, old), psn, Payload::None))
            }
            Answer::Read { psn, range, at, is_first, is_repeated } => {
                let RemoteRange { address, rkey, len } = range;
                let left = len - at;
                let part = left.min(self.settings.mtu);
                let address = address.wrapping_add(u64::from(at));
                // It was open when the request came; it may not be any more.
                let payload = match host.open(&RemoteRange { address, rkey, len: part }, Access::Read) {
                    _ if part == 0 => Payload::None,
                    Some(place) => Payload::Remote { place, len: part },
                    // A request that was late, or came twice: whoever has sent it has its answer and does not hear this, or
                    // hears it and fails. The memory may be closed with every right.
                    None if is_repeated => {
                        self.answers.pop_front();
                        let syndrome = Syndrome::Nak(Nak::RemoteAccess);
                        return Some(outgoing(Operation::Acknowledge(Ack { syndrome, msn }), psn, Payload::None));
                    }
                    None => {
                        self.answers.clear();
                        self.has_failed = true;
                        self.failure = Some((psn, Nak::RemoteAccess));
                        let syndrome = Syndrome::Nak(Nak::RemoteAccess);
                        return Some(outgoing(Operation::Acknowledge(Ack { syndrome, msn }), psn, Payload::None));
                    }
                };
                let is_last = part == left;
                let operation = match (is_first, is_last) {
                    (true, true) => Operation::ReadOnly(ack),
                    (true, false) => Operation::ReadFirst(ack),
                    (false, false) => Operation::ReadMiddle,
                    (false, true) => Operation::ReadLast(ack),
                };
                if is_last {
                    self.answers.pop_front();
                } else {
                    *answer = Answer::Read { psn: psn.add(1), range, at: at + part, is_first: false, is_repeated };
                }
                Some(outgoing(operation, psn, payload))
            }
        }
    }
}
