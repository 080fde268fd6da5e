//! Unreliable connections: messages and writes that arrive whole or not at all, and that nobody asks for again.

use std::collections::VecDeque;

use super::host::{Access, Completion, Host, ReceiveId, Received, Status};
use super::{Outgoing, Request, Work};
use crate::wire::{Header, Operation, Psn, RemoteRange, Trailer};

/// The end of an unreliable connection that sends.
#[derive(Clone, Debug)]
pub struct UnreliableRequester {
    mtu: u32,
    psn: Psn,
    work: VecDeque<Work>,
    /// Packets of the first that were sent.
    sent: u32,
}

impl UnreliableRequester {
    /// Ready to send, from that number on.
    #[must_use]
    pub fn new(psn: Psn, mtu: u32) -> Self {
        UnreliableRequester { mtu, psn, work: VecDeque::new(), sent: 0 }
    }

    /// Adds work, a send or a write; whether it is one.
    pub fn post(&mut self, work: Work) -> bool {
        let is_known =
            matches!(work.request, Request::Send(Trailer::None | Trailer::Immediate(_)) | Request::Write { .. });
        if is_known {
            self.work.push_back(work);
        }
        is_known
    }

    /// Whether a message was begun that has not ended.
    #[must_use]
    pub fn is_amid(&self) -> bool {
        self.sent > 0
    }

    /// Ends all work that is left.
    pub fn flush(&mut self, host: &mut impl Host) {
        self.sent = 0;
        for work in self.work.drain(..) {
            host.complete(Completion::Sent { id: work.id, status: Status::Flushed });
        }
    }

    /// The next packet to send, if there is any. Its data is to be taken, and then [`UnreliableRequester::taken`] to be called.
    pub fn transmit(&mut self) -> Option<Outgoing> {
        let work = *self.work.front()?;
        let mut outgoing = work.packet(self.sent, work.packets(self.mtu), self.psn, self.mtu);
        outgoing.ack_request = false;
        self.psn = self.psn.add(1);
        self.sent += 1;
        Some(outgoing)
    }

    /// The data of the packet was taken. With the last of a piece of work the work has ended: whoever hears of that may write over
    /// its data.
    pub fn taken(&mut self, host: &mut impl Host) {
        if let Some(work) = self.work.front().filter(|work| self.sent >= work.packets(self.mtu)) {
            let id = work.id;
            self.sent = 0;
            self.work.pop_front();
            host.complete(Completion::Sent { id, status: Status::Success });
        }
    }
}

/// The end of an unreliable connection that receives.
#[derive(Clone, Debug)]
pub struct UnreliableResponder {
    mtu: u32,
    /// Of the packet that comes next, if none gets lost.
    expected: Psn,
    message: Message,
    /// A receive whose message broke off: the next message goes there.
    spare: Option<ReceiveId>,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    /// The next packet begins one, or belongs to one whose beginning was lost.
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
    /// Ready to receive, from that number on.
    #[must_use]
    pub fn new(psn: Psn, mtu: u32) -> Self {
        UnreliableResponder { mtu, expected: psn, message: Message::None, spare: None }
    }

    /// The receive that was taken and not filled: it is to be flushed with the others.
    pub fn abandon(&mut self) -> Option<ReceiveId> {
        self.break_off();
        self.spare.take()
    }

    /// Takes a packet that has arrived. What does not belong together is dropped.
    pub fn handle(&mut self, header: &Header, payload: &[u8], host: &mut impl Host) {
        if header.psn != self.expected {
            self.break_off();
        }
        self.expected = header.psn.add(1);
        if self.carry_out(header, payload, host).is_none() {
            self.break_off();
        }
    }

    fn break_off(&mut self) {
        if let Message::Send { receive, .. } = std::mem::replace(&mut self.message, Message::None) {
            self.spare = Some(receive);
        }
    }

    /// `None` where the message ends before its end.
    fn carry_out(&mut self, header: &Header, payload: &[u8], host: &mut impl Host) -> Option<()> {
        let len = payload.len() as u32;
        let is_full = len == self.mtu;
        match header.operation {
            // One that begins ends what came before.
            Operation::SendFirst if is_full => {
                let receive = self.receive(host)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill(receive, 0, payload, host)
            }
            Operation::SendMiddle if is_full => match self.message {
                Message::Send { receive, at } => self.fill(receive, at, payload, host),
                _ => None,
            },
            Operation::SendLast(trailer) if len <= self.mtu => match self.message {
                Message::Send { receive, at } => {
                    self.fill(receive, at, payload, host)?;
                    self.received(header, receive, at.saturating_add(len), trailer, host)
                }
                _ => None,
            },
            Operation::SendOnly(trailer) if len <= self.mtu => {
                let receive = self.receive(host)?;
                self.message = Message::Send { receive, at: 0 };
                self.fill(receive, 0, payload, host)?;
                self.received(header, receive, len, trailer, host)
            }
            Operation::WriteFirst(range) if is_full => {
                self.break_off();
                self.store(range, 0, payload, host)
            }
            Operation::WriteMiddle if is_full => match self.message {
                Message::Write { range, at } => self.store(range, at, payload, host),
                _ => None,
            },
            Operation::WriteLast(imm) if len <= self.mtu => match self.message {
                Message::Write { range, at } => self.written(header, range, at, payload, imm, host),
                _ => None,
            },
            Operation::WriteOnly(range, imm) if len <= self.mtu => {
                self.break_off();
                self.written(header, range, 0, payload, imm, host)
            }
            _ => None,
        }
    }

    fn receive(&mut self, host: &mut impl Host) -> Option<ReceiveId> {
        self.break_off();
        self.spare.take().or_else(|| host.receive())
    }

    fn fill(&mut self, receive: ReceiveId, at: u32, payload: &[u8], host: &mut impl Host) -> Option<()> {
        if let Err(status) = host.fill(receive, at, payload) {
            // Nobody asks again, but whoever has posted it is told.
            self.message = Message::None;
            host.complete(Completion::failed_receive(receive, status));
            return None;
        }
        self.message = Message::Send { receive, at: at.saturating_add(payload.len() as u32) };
        Some(())
    }

    fn received(
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

    fn store(&mut self, range: RemoteRange, at: u32, payload: &[u8], host: &mut impl Host) -> Option<()> {
        let len = payload.len() as u32;
        let address = range.address.wrapping_add(u64::from(at));
        let asked = if at == 0 { range.len } else { len };
        if len > range.len - at {
            return None;
        }
        if asked > 0 {
            let place = host.open(&RemoteRange { address, rkey: range.rkey, len: asked }, Access::Write)?;
            host.store(place, payload);
        }
        self.message = Message::Write { range, at: at + len };
        Some(())
    }

    fn written(
        &mut self,
        header: &Header,
        range: RemoteRange,
        at: u32,
        payload: &[u8],
        imm: Option<u32>,
        host: &mut impl Host,
    ) -> Option<()> {
        if payload.len() as u32 != range.len - at {
            return None;
        }
        if !payload.is_empty() {
            self.store(range, at, payload, host)?;
        }
        self.message = Message::None;
        if imm.is_some() {
            let receive = self.receive(host)?;
            let received =
                Received { len: range.len, is_write: true, imm, invalidated: None, solicited: header.solicited };
            host.complete(received.into_completion(receive));
        }
        Some(())
    }
}
