//! Unreliable connections. A message or write arrives completely or not at all, without ACKs or retransmission.

use std::collections::VecDeque;

use super::host::{Access, Completion, Host, ReceiveId, Received, Status};
use super::{Outgoing, Request, Work};
use crate::wire::{Data, Header, Operation, Psn, RemoteRange, Trailer};

/// The requester of an unreliable connection.
#[derive(Clone, Debug)]
pub struct UnreliableRequester {
    mtu: u32,
    psn: Psn,
    work: VecDeque<Work>,
    /// Packets of the first work that were sent.
    sent_packets: u32,
}

impl UnreliableRequester {
    /// Creates a requester that starts at this PSN.
    #[must_use]
    pub fn new(psn: Psn, mtu: u32) -> Self {
        UnreliableRequester { mtu, psn, work: VecDeque::new(), sent_packets: 0 }
    }

    /// Adds a send or write. Returns `false` for work that an unreliable connection does not support.
    pub fn post(&mut self, work: Work) -> bool {
        let is_known =
            matches!(work.request, Request::Send(Trailer::None | Trailer::Immediate(_)) | Request::Write { .. });
        if is_known {
            self.work.push_back(work);
        }
        is_known
    }

    /// Whether a message was started and not all of its packets were sent.
    #[must_use]
    pub fn is_amid(&self) -> bool {
        self.sent_packets > 0
    }

    /// Completes all remaining work as flushed.
    pub fn flush(&mut self, host: &mut impl Host) {
        self.sent_packets = 0;
        for work in self.work.drain(..) {
            host.complete(Completion::Sent { id: work.id, status: Status::Flushed });
        }
    }

    /// Returns the next packet to send, if any. The caller copies its data and then calls [`UnreliableRequester::taken`].
    pub fn transmit(&mut self) -> Option<Outgoing> {
        let work = *self.work.front()?;
        let mut outgoing = work.packet(self.sent_packets, work.packets(self.mtu), self.psn, self.mtu);
        outgoing.ack_request = false;
        self.psn = self.psn.add(1);
        self.sent_packets += 1;
        Some(outgoing)
    }

    /// Reports that the packet's data was copied.
    ///
    /// After the last packet the work completes, and the program may reuse its memory.
    pub fn taken(&mut self, host: &mut impl Host) {
        if let Some(work) = self.work.front().filter(|work| self.sent_packets >= work.packets(self.mtu)) {
            let id = work.id;
            self.sent_packets = 0;
            self.work.pop_front();
            host.complete(Completion::Sent { id, status: Status::Success });
        }
    }
}

/// The responder of an unreliable connection.
#[derive(Clone, Debug)]
pub struct UnreliableResponder {
    mtu: u32,
    /// PSN of the next packet if none is lost.
    expected: Psn,
    message: Message,
    /// Receive of an aborted message. The next message uses it.
    spare: Option<ReceiveId>,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    /// No message has started, or the start of the current message was lost.
    None,
    Send {
        receive: ReceiveId,
        at: u32,
    },
    Write {
        range: RemoteRange,
        at: u32,
    },
}

impl UnreliableResponder {
    /// Creates a responder that expects this PSN first.
    #[must_use]
    pub fn new(psn: Psn, mtu: u32) -> Self {
        UnreliableResponder { mtu, expected: psn, message: Message::None, spare: None }
    }

    /// Returns the receive that was taken and not completed. The caller flushes it.
    pub fn abandon(&mut self) -> Option<ReceiveId> {
        self.abort_message();
        self.spare.take()
    }

    /// Handles a packet that has arrived. Packets of incomplete messages are dropped.
    pub fn handle(&mut self, header: &Header, payload: Data<'_>, host: &mut impl Host) {
        if header.psn != self.expected {
            self.abort_message();
        }
        self.expected = header.psn.add(1);
        if self.execute(header, payload, host).is_none() {
            self.abort_message();
        }
    }

    fn abort_message(&mut self) {
        if let Message::Send { receive, .. } = std::mem::replace(&mut self.message, Message::None) {
            self.spare = Some(receive);
        }
    }

    /// Executes a packet. Returns `None` if its message is aborted.
    fn execute(&mut self, header: &Header, payload: Data<'_>, host: &mut impl Host) -> Option<()> {
        let len = payload.len() as u32;
        let is_full = len == self.mtu;
        match header.operation {
            // A First or Only packet aborts an incomplete message.
            Operation::SendFirst if is_full => {
                let receive = self.take_receive(host)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill_receive(receive, 0, payload, host)
            }
            Operation::SendMiddle if is_full => match self.message {
                Message::Send { receive, at } => self.fill_receive(receive, at, payload, host),
                _ => None,
            },
            Operation::SendLast(trailer) if len <= self.mtu => match self.message {
                Message::Send { receive, at } => {
                    self.fill_receive(receive, at, payload, host)?;
                    self.complete_send(header, receive, at.saturating_add(len), trailer, host)
                }
                _ => None,
            },
            Operation::SendOnly(trailer) if len <= self.mtu => {
                let receive = self.take_receive(host)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill_receive(receive, 0, payload, host)?;
                self.complete_send(header, receive, len, trailer, host)
            }
            Operation::WriteFirst(range) if is_full => {
                self.abort_message();
                self.write(range, 0, payload, host)
            }
            Operation::WriteMiddle if is_full => match self.message {
                Message::Write { range, at } => self.write(range, at, payload, host),
                _ => None,
            },
            Operation::WriteLast(imm) if len <= self.mtu => match self.message {
                Message::Write { range, at } => self.write_last(header, range, at, payload, imm, host),
                _ => None,
            },
            Operation::WriteOnly(range, imm) if len <= self.mtu => {
                self.abort_message();
                self.write_last(header, range, 0, payload, imm, host)
            }
            _ => None,
        }
    }

    fn take_receive(&mut self, host: &mut impl Host) -> Option<ReceiveId> {
        self.abort_message();
        self.spare.take().or_else(|| host.receive())
    }

    fn fill_receive(&mut self, receive: ReceiveId, at: u32, payload: Data<'_>, host: &mut impl Host) -> Option<()> {
        if let Err(status) = host.fill(receive, at, payload) {
            // The peer is not informed, but the receive completes with the error.
            self.message = Message::None;
            host.complete(Completion::failed_receive(receive, status));
            return None;
        }
        self.message = Message::Send { receive, at: at.saturating_add(payload.len() as u32) };
        Some(())
    }

    fn complete_send(
        &mut self,
        header: &Header,
        receive: ReceiveId,
        len: u32,
        trailer: Trailer,
        host: &mut impl Host,
    ) -> Option<()> {
        self.message = Message::None;
        let imm = if let Trailer::Immediate(imm) = trailer { Some(imm) } else { None };
        let received = Received { len, is_write: false, imm, invalidated: None, solicited: header.solicited };
        host.complete(received.into_completion(receive));
        Some(())
    }

    fn write(&mut self, range: RemoteRange, at: u32, payload: Data<'_>, host: &mut impl Host) -> Option<()> {
        let len = payload.len() as u32;
        let address = range.address.wrapping_add(u64::from(at));
        let opened_len = if at == 0 { range.len } else { len };
        if len > range.len - at {
            return None;
        }
        if opened_len > 0 {
            let place = host.open(&RemoteRange { address, rkey: range.rkey, len: opened_len }, Access::Write)?;
            host.store(place, payload);
        }
        self.message = Message::Write { range, at: at + len };
        Some(())
    }

    fn write_last(
        &mut self,
        header: &Header,
        range: RemoteRange,
        at: u32,
        payload: Data<'_>,
        imm: Option<u32>,
        host: &mut impl Host,
    ) -> Option<()> {
        if payload.len() as u32 != range.len - at {
            return None;
        }
        if range.len == 0 && !host.allows(Access::Write) {
            return None;
        }
        if !payload.is_empty() {
            self.write(range, at, payload, host)?;
        }
        self.message = Message::None;
        if imm.is_some() {
            let receive = self.take_receive(host)?;
            let received =
                Received { len: range.len, is_write: true, imm, invalidated: None, solicited: header.solicited };
            host.complete(received.into_completion(receive));
        }
        Some(())
    }
}
