//! The responder of a reliable connection: executes requests and sends responses, ACKs and NAKs.

use std::collections::VecDeque;

use super::host::{Access, Completion, Host, Place, ReceiveId, Received, Status};
use super::{Outgoing, Payload, packets};
use crate::wire::{Ack, Atomic, Data, Header, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer};

/// Settings of a responder, set when its queue pair enters RTR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponderSettings {
    /// PSN of the first packet.
    pub psn: Psn,
    /// Path MTU: maximum payload of a packet, in bytes.
    pub mtu: u32,
    /// Responder resources: maximum number of outstanding reads and atomic operations.
    pub resources: u8,
    /// RNR NAK timer code, 0 to 31.
    pub min_rnr_timer: u8,
}

/// The responder of a reliable connection.
#[derive(Clone, Debug)]
pub struct Responder {
    settings: ResponderSettings,
    /// PSN of the next packet.
    expected: Psn,
    /// Number of completed messages (message sequence number).
    msn: u32,
    /// A NAK for the expected PSN was sent. It is sent only once.
    is_nak_sent: bool,
    message: Message,
    /// Latest reads and atomic operations, oldest first. Duplicate requests are answered from them.
    resources: VecDeque<Resource>,
    /// Pending responses and NAKs, in the order of their requests.
    responses: VecDeque<Response>,
    /// PSN of the ACK that is due. It is sent after the pending responses.
    due_ack: Option<Psn>,
    /// ACKs that the peer has requested since the last one was sent. A retransmitted request counts twice, because the peer is
    /// already waiting.
    ack_requests: u32,
    has_failed: bool,
    /// PSN and code of the fatal NAK.
    failure: Option<(Psn, Nak)>,
}

/// Message whose packets are arriving.
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
enum Response {
    /// Remaining part of a read response. `is_first` is also set if the peer requests only the rest of a read again.
    Read {
        psn: Psn,
        range: RemoteRange,
        at: u32,
        is_first: bool,
        is_duplicate: bool,
    },
    Atomic {
        psn: Psn,
        old: u64,
        is_duplicate: bool,
    },
    /// A NAK. It also acknowledges all packets before its PSN.
    Nak {
        psn: Psn,
        syndrome: Syndrome,
    },
}

/// Why a request is answered by a NAK.
enum RequestError {
    /// RNR NAK. The connection continues.
    ReceiverNotReady,
    /// Fatal NAK. The connection fails.
    Fatal(Nak),
}

impl Responder {
    /// Creates a responder that is ready to receive.
    #[must_use]
    pub fn new(settings: ResponderSettings) -> Self {
        Responder {
            settings,
            expected: settings.psn,
            msn: 0,
            is_nak_sent: false,
            message: Message::None,
            resources: VecDeque::with_capacity(settings.resources.into()),
            responses: VecDeque::with_capacity(2 * usize::from(settings.resources) + 2),
            due_ack: None,
            ack_requests: 0,
            has_failed: false,
            failure: None,
        }
    }

    /// Whether a fatal NAK is due or sent. The queue pair enters the error state after it is sent.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Sets the RNR NAK timer code, 0 to 31.
    pub fn set_min_rnr_timer(&mut self, code: u8) {
        self.settings.min_rnr_timer = code;
    }

    /// Returns the code of the fatal NAK.
    #[must_use]
    pub fn failure(&self) -> Option<Nak> {
        self.failure.map(|(_, nak)| nak)
    }

    /// Stops executing requests and returns the receive of an incomplete message, which the caller flushes.
    ///
    /// After a fatal NAK, each further request is answered by the same NAK.
    pub fn abandon(&mut self) -> Option<ReceiveId> {
        self.has_failed = true;
        match std::mem::replace(&mut self.message, Message::None) {
            Message::Send { receive, .. } => Some(receive),
            Message::None | Message::Write { .. } => None,
        }
    }

    /// Handles a request that has arrived.
    pub fn handle(&mut self, header: &Header, payload: Data<'_>, host: &mut impl Host) {
        if self.has_failed {
            return self.repeat_nak();
        }
        match header.psn.since(self.expected) {
            0 => {}
            1.. => {
                if !std::mem::replace(&mut self.is_nak_sent, true) {
                    self.queue_nak(Syndrome::Nak(Nak::SequenceError));
                }
                return;
            }
            _ => return self.handle_duplicate(header),
        }
        self.is_nak_sent = false;
        match self.execute(header, payload, host) {
            Ok(psns) => {
                self.expected = self.expected.add(psns);
                let is_answered = matches!(
                    header.operation,
                    Operation::ReadRequest(_) | Operation::CompareSwap(_) | Operation::FetchAdd(_)
                );
                if is_answered {
                    // The response also acknowledges this request and all before it.
                    self.due_ack = None;
                } else if header.ack_request {
                    self.schedule_ack(1);
                }
            }
            Err(RequestError::ReceiverNotReady) => {
                self.is_nak_sent = true;
                self.queue_nak(Syndrome::ReceiverNotReady(self.settings.min_rnr_timer));
            }
            Err(RequestError::Fatal(nak)) => {
                self.has_failed = true;
                self.failure = Some((self.expected, nak));
                self.queue_nak(Syndrome::Nak(nak));
            }
        }
    }

    /// Schedules an ACK for all packets received so far. It counts as `times` requested ACKs.
    fn schedule_ack(&mut self, times: u32) {
        self.ack_requests = if self.due_ack.is_some() { self.ack_requests.saturating_add(times) } else { times };
        self.due_ack = Some(self.expected.add(u32::MAX));
    }

    /// Whether an ACK is due and no response is pending.
    #[must_use]
    pub fn owes_ack(&self) -> bool {
        self.responses.is_empty() && self.due_ack.is_some()
    }

    /// Whether the peer has requested the due ACK only once. The peer may then have nothing else in flight.
    #[must_use]
    pub fn was_asked_once(&self) -> bool {
        self.ack_requests <= 1
    }

    fn queue_nak(&mut self, syndrome: Syndrome) {
        // A NAK acknowledges all packets before it. It replaces a pending NAK, so that a peer cannot queue any number of them.
        self.due_ack = None;
        let nak = Response::Nak { psn: self.expected, syndrome };
        match self.responses.back_mut() {
            Some(last @ Response::Nak { .. }) => *last = nak,
            _ => self.responses.push_back(nak),
        }
    }

    /// Sends the fatal NAK again, because the peer may not have received it. Without it, the peer would retry until it gives
    /// up.
    fn repeat_nak(&mut self) {
        if let (Some((psn, nak)), true) = (self.failure, self.responses.is_empty()) {
            self.responses.push_back(Response::Nak { psn, syndrome: Syndrome::Nak(nak) });
        }
    }

    /// Executes a request that arrived in order. Returns the number of PSNs that it takes.
    fn execute(&mut self, header: &Header, payload: Data<'_>, host: &mut impl Host) -> Result<u32, RequestError> {
        let invalid = RequestError::Fatal(Nak::InvalidRequest);
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
                let receive = host.receive().ok_or(RequestError::ReceiverNotReady)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill_receive(receive, 0, payload, host)?;
            }
            (Operation::SendMiddle, Message::Send { receive, at }) => self.fill_receive(receive, at, payload, host)?,
            (Operation::SendOnly(trailer), Message::None) => {
                let receive = host.receive().ok_or(RequestError::ReceiverNotReady)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill_receive(receive, 0, payload, host)?;
                self.complete_send(header, receive, len, trailer, host)?;
            }
            (Operation::SendLast(trailer), Message::Send { receive, at }) => {
                self.fill_receive(receive, at, payload, host)?;
                self.complete_send(header, receive, at.saturating_add(len), trailer, host)?;
            }
            (Operation::WriteFirst(range), Message::None) => {
                // The data of a write with a First packet must not fit in one packet.
                if range.len <= self.settings.mtu {
                    return Err(invalid);
                }
                self.message = Message::Write { range, at: 0 };
                self.write(range, 0, payload, host)?;
            }
            (Operation::WriteMiddle, Message::Write { range, at }) => self.write(range, at, payload, host)?,
            (Operation::WriteLast(imm), Message::Write { range, at }) => {
                self.write_last(header, range, at, payload, imm, host)?;
            }
            (Operation::WriteOnly(range, imm), Message::None) => {
                self.write_last(header, range, 0, payload, imm, host)?;
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

    /// Writes a packet's payload to the receive of the message.
    fn fill_receive(
        &mut self,
        receive: ReceiveId,
        at: u32,
        payload: Data<'_>,
        host: &mut impl Host,
    ) -> Result<(), RequestError> {
        if let Err(status) = host.fill(receive, at, payload) {
            self.message = Message::None;
            host.complete(Completion::failed_receive(receive, status));
            let nak = if status == Status::LocalLength { Nak::InvalidRequest } else { Nak::RemoteOperation };
            return Err(RequestError::Fatal(nak));
        }
        self.message = Message::Send { receive, at: at.saturating_add(payload.len() as u32) };
        Ok(())
    }

    /// Completes the receive of a send message.
    fn complete_send(
        &mut self,
        header: &Header,
        id: ReceiveId,
        len: u32,
        trailer: Trailer,
        host: &mut impl Host,
    ) -> Result<(), RequestError> {
        let (imm, invalidated) = match trailer {
            Trailer::None => (None, None),
            Trailer::Immediate(imm) => (Some(imm), None),
            Trailer::Invalidate(rkey) if host.invalidate(rkey) => (None, Some(rkey)),
            Trailer::Invalidate(_) => {
                self.message = Message::None;
                host.complete(Completion::failed_receive(id, Status::LocalProtection));
                return Err(RequestError::Fatal(Nak::RemoteAccess));
            }
        };
        self.complete_message();
        let received = Received { len, is_write: false, imm, invalidated, solicited: header.solicited };
        host.complete(received.into_completion(id));
        Ok(())
    }

    /// Writes a packet's payload to the memory of an RDMA write.
    fn write(
        &mut self,
        range: RemoteRange,
        at: u32,
        payload: Data<'_>,
        host: &mut impl Host,
    ) -> Result<(), RequestError> {
        let len = payload.len() as u32;
        if len > range.len - at {
            return Err(RequestError::Fatal(Nak::InvalidRequest));
        }
        // The first packet checks access to the whole range. Each later packet checks its own part again.
        let (offset, opened_len) = if at == 0 { (0, range.len) } else { (u64::from(at), len) };
        let address = range.address.wrapping_add(offset);
        let opened = host.open(&RemoteRange { address, rkey: range.rkey, len: opened_len }, Access::Write);
        host.store(opened.ok_or(RequestError::Fatal(Nak::RemoteAccess))?, payload);
        self.message = Message::Write { range, at: at + len };
        Ok(())
    }

    fn write_last(
        &mut self,
        header: &Header,
        range: RemoteRange,
        at: u32,
        payload: Data<'_>,
        imm: Option<u32>,
        host: &mut impl Host,
    ) -> Result<(), RequestError> {
        if payload.len() as u32 != range.len - at {
            return Err(RequestError::Fatal(Nak::InvalidRequest));
        }
        // A write of zero bytes does not check the key.
        if range.len == 0 && !host.allows(Access::Write) {
            return Err(RequestError::Fatal(Nak::RemoteAccess));
        }
        // Take the receive before writing. After an RNR NAK, the peer sends the packet again.
        let receive = match imm {
            Some(_) => Some(host.receive().ok_or(RequestError::ReceiverNotReady)?),
            None => None,
        };
        if range.len > 0 {
            if let Err(error) = self.write(range, at, payload, host) {
                if let Some(id) = receive {
                    host.complete(Completion::failed_receive(id, Status::Flushed));
                }
                return Err(error);
            }
        }
        self.complete_message();
        if let Some(id) = receive {
            let received =
                Received { len: range.len, is_write: true, imm, invalidated: None, solicited: header.solicited };
            host.complete(received.into_completion(id));
        }
        Ok(())
    }

    fn read(&mut self, psn: Psn, range: RemoteRange, host: &mut impl Host) -> Result<u32, RequestError> {
        if range.len > 1 << 31 || self.has_too_many_outstanding() {
            return Err(RequestError::Fatal(Nak::InvalidRequest));
        }
        // A read of zero bytes does not check the key.
        let is_allowed = match range.len {
            0 => host.allows(Access::Read),
            _ => host.open(&range, Access::Read).is_some(),
        };
        if !is_allowed {
            return Err(RequestError::Fatal(Nak::RemoteAccess));
        }
        let packets = packets(range.len, self.settings.mtu);
        self.complete_message();
        self.save_resource(Resource { psn, packets, kind: Kind::Read });
        self.responses.push_back(Response::Read { psn, range, at: 0, is_first: true, is_duplicate: false });
        Ok(packets)
    }

    fn atomic(
        &mut self,
        psn: Psn,
        atomic: &Atomic,
        change: &dyn Fn(u64) -> u64,
        host: &mut impl Host,
    ) -> Result<(), RequestError> {
        let Atomic { address, rkey, .. } = *atomic;
        if address % 8 != 0 || self.has_too_many_outstanding() {
            return Err(RequestError::Fatal(Nak::InvalidRequest));
        }
        let opened = host.open(&RemoteRange { address, rkey, len: 8 }, Access::Atomic);
        let old = host.update(opened.ok_or(RequestError::Fatal(Nak::RemoteAccess))?, change);
        self.complete_message();
        self.save_resource(Resource { psn, packets: 1, kind: Kind::Atomic { old } });
        self.responses.push_back(Response::Atomic { psn, old, is_duplicate: false });
        Ok(())
    }

    /// Counts a completed message.
    fn complete_message(&mut self) {
        self.message = Message::None;
        self.msn = self.msn.wrapping_add(1);
    }

    /// Whether the peer exceeds the responder resources. Duplicates do not count.
    fn has_too_many_outstanding(&self) -> bool {
        let is_new = |response: &&Response| {
            matches!(
                response,
                Response::Read { is_duplicate: false, .. } | Response::Atomic { is_duplicate: false, .. }
            )
        };
        self.responses.iter().filter(is_new).count() >= usize::from(self.settings.resources)
    }

    fn save_resource(&mut self, resource: Resource) {
        if self.resources.len() >= usize::from(self.settings.resources) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }

    /// Handles a duplicate request. Its response may have been lost.
    fn handle_duplicate(&mut self, header: &Header) {
        // Limit the pending responses. The peer retries a duplicate that is dropped here.
        if self.responses.len() > 2 * usize::from(self.settings.resources) {
            return;
        }
        match header.operation {
            Operation::ReadRequest(range) => {
                let requested = packets(range.len, self.settings.mtu);
                let covers = |resource: &&Resource| {
                    let at = header.psn.since(resource.psn);
                    matches!(resource.kind, Kind::Read) && at >= 0 && at as u32 + requested <= resource.packets
                };
                // A read that is no longer in `resources` is ignored. The peer has its response, or it retries in vain.
                if self.resources.iter().any(|resource| covers(&resource)) {
                    self.responses.push_back(Response::Read {
                        psn: header.psn,
                        range,
                        at: 0,
                        is_first: true,
                        is_duplicate: true,
                    });
                }
            }
            Operation::CompareSwap(_) | Operation::FetchAdd(_) => {
                let same = self.resources.iter().find(|resource| resource.psn == header.psn);
                if let Some(Resource { psn, kind: Kind::Atomic { old }, .. }) = same {
                    self.responses.push_back(Response::Atomic { psn: *psn, old: *old, is_duplicate: true });
                }
            }
            _ => self.schedule_ack(2),
        }
    }

    /// Returns the next packet to send, if any.
    pub fn transmit(&mut self, host: &impl Host) -> Option<Outgoing> {
        let msn = Psn::new(self.msn);
        let ack = Ack { syndrome: Syndrome::ACK, msn };
        let outgoing =
            |operation, psn, payload| Outgoing { operation, psn, ack_request: false, solicited: false, payload };
        let Some(response) = self.responses.front_mut() else {
            let psn = self.due_ack.take()?;
            return Some(outgoing(Operation::Acknowledge(ack), psn, Payload::None));
        };
        match *response {
            Response::Nak { psn, syndrome } => {
                self.responses.pop_front();
                Some(outgoing(Operation::Acknowledge(Ack { syndrome, msn }), psn, Payload::None))
            }
            Response::Atomic { psn, old, .. } => {
                self.responses.pop_front();
                Some(outgoing(Operation::AtomicAcknowledge(ack, old), psn, Payload::None))
            }
            Response::Read { psn, range, at, is_first, is_duplicate } => {
                let RemoteRange { address, rkey, len } = range;
                let left = len - at;
                let part = left.min(self.settings.mtu);
                let address = address.wrapping_add(u64::from(at));
                // The memory may have been deregistered since the request arrived.
                let payload = match host.open(&RemoteRange { address, rkey, len: part }, Access::Read) {
                    _ if part == 0 => Payload::None,
                    Some(place) => Payload::Remote { place, len: part },
                    // A late or duplicate request. A peer that already has the response ignores this NAK, and was free to have
                    // the memory deregistered. Any other peer fails its read.
                    None if is_duplicate => {
                        self.responses.pop_front();
                        let syndrome = Syndrome::Nak(Nak::RemoteAccess);
                        return Some(outgoing(Operation::Acknowledge(Ack { syndrome, msn }), psn, Payload::None));
                    }
                    None => {
                        self.responses.clear();
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
                    self.responses.pop_front();
                } else {
                    *response = Response::Read { psn: psn.add(1), range, at: at + part, is_first: false, is_duplicate };
                }
                Some(outgoing(operation, psn, payload))
            }
        }
    }

    /// Like [`Requester::extend_run`](super::Requester::extend_run), for a read response. Returns 0 if its memory is inaccessible.
    pub fn extend_run(&mut self, first: &Outgoing, most: u32, host: &impl Host) -> u32 {
        let Some(Response::Read { psn, range, at, .. }) = self.responses.front_mut() else { return 0 };
        let (Operation::ReadMiddle, Payload::Remote { place, len: mtu @ 1.. }) = (first.operation, first.payload)
        else {
            return 0;
        };
        // The run ends before the last packet of the response.
        let count = ((range.len - *at).saturating_sub(1) / mtu).min(most);
        let part =
            RemoteRange { address: range.address.wrapping_add(u64::from(*at)), rkey: range.rkey, len: count * mtu };
        let follows = |opened: Place| opened.0 == place.0 + u64::from(mtu);
        if first.psn.add(1) != *psn || count == 0 || !host.open(&part, Access::Read).is_some_and(follows) {
            return 0;
        }
        (*psn, *at) = (psn.add(count), *at + part.len);
        count
    }
}
