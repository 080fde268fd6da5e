//! Queue pairs: their queues, their state machines, and changes of their state.

use std::net::IpAddr;
use std::time::Duration;

use rdma_sys::*;

use super::ack_delay::AckDelay;
use super::host::{Datagram, Identity, Queues, Shared, Side};
use super::modify;
use super::net_address::{Destination, packet_type};
use super::queues::{Job, ReceiveQueue, SendQueue, Taken, Task};
use crate::transport::{
    Completion, Host, Outgoing, Requester, RequesterSettings, Responder, ResponderSettings, Status, Time,
    UnreliableRequester, UnreliableResponder, Work,
};
use crate::wire::{Nak, Operation, Packet, Psn, Transport};

/// The partition that all are in: RoCE has no others that anybody uses.
pub(crate) const PKEY: u16 = 0xffff;

/// A queue pair.
pub(crate) struct Qp {
    pub(crate) id: Identity,
    pub(crate) queues: Queues,
    pub(crate) state: ibv_qp_state,
    pub(crate) attr: ibv_qp_attr,
    /// The peer of a connection.
    pub(crate) peer: Option<Destination>,
    machine: Machine,
    /// It is in the list of those that have something to send.
    pub(crate) is_ready: bool,
    /// Whether its ACKs wait for requests.
    pub(crate) ack_delay: AckDelay,
    /// When it was last said that it is to be woken.
    pub(crate) timer: Option<Time>,
    /// Something has come from its peer.
    has_heard: bool,
    awaits_drain: bool,
}

/// What goes over the network for it.
#[derive(Debug)]
enum Machine {
    /// Nothing: it is not connected, or not any more.
    None,
    Reliable {
        responder: Responder,
        requester: Option<Requester>,
    },
    /// It has failed by a refusal, which the peer may ask for again.
    Refused(Responder),
    Unreliable {
        responder: UnreliableResponder,
        requester: Option<UnreliableRequester>,
    },
    Datagram {
        /// Of the next datagram.
        psn: Psn,
    },
}

/// What a queue pair wants sent.
#[derive(Debug)]
pub(crate) enum Sending {
    /// To its peer.
    Packet(Transport, Outgoing),
    /// To whom the work says, which is the earliest; it ends with that.
    Datagram(Psn),
}

impl Qp {
    pub(crate) fn new(id: Identity) -> Self {
        let cap = id.cap;
        Qp {
            id,
            queues: Queues {
                send: SendQueue::new(cap.max_send_wr, cap.max_send_sge, cap.max_inline_data),
                receive: ReceiveQueue::new(cap.max_recv_wr, cap.max_recv_sge),
                taken: Taken::new(),
            },
            state: IBV_QPS_RESET,
            attr: ibv_qp_attr { cap, ..ibv_qp_attr::zeroed() },
            peer: None,
            machine: Machine::None,
            is_ready: false,
            ack_delay: AckDelay::new(),
            timer: None,
            has_heard: false,
            awaits_drain: false,
        }
    }

    /// The state machine, and the device as it appears to it.
    fn split<'a>(&'a mut self, shared: &'a mut Shared) -> (&'a mut Machine, Side<'a>) {
        let side = Side {
            id: &self.id,
            access: self.attr.qp_access_flags,
            source_qp: self.attr.dest_qp_num,
            queues: &mut self.queues,
            shared,
        };
        (&mut self.machine, side)
    }

    /// Where it sends next, if it sends anything.
    pub(crate) fn destination(&self) -> Option<Destination> {
        match &self.machine {
            Machine::Datagram { .. } => match self.queues.send.get(self.queues.send.head())?.task {
                Task::Datagram { to, .. } => Some(to),
                _ => None,
            },
            _ => self.peer,
        }
    }

    /// When it is to be woken.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        match &self.machine {
            Machine::Reliable { requester: Some(requester), .. } => requester.wake_at(),
            _ => None,
        }
    }

    /// As [`Requester::expire`].
    pub(crate) fn expire(&mut self, now: Time, heard: Time, shared: &mut Shared) -> bool {
        let (machine, mut side) = self.split(shared);
        let Machine::Reliable { requester: Some(requester), .. } = machine else { return false };
        let is_due = requester.expire(now, heard, &mut side);
        self.end_requests(shared);
        is_due
    }

    /// Goes to the error state when its requests have failed, before anybody hears of it.
    fn end_requests(&mut self, shared: &mut Shared) {
        if matches!(&self.machine, Machine::Reliable { requester: Some(requester), .. } if requester.has_failed()) {
            self.fail(shared);
        }
    }

    /// Takes a packet that is for it. What is none of its business is dropped.
    pub(crate) fn handle(&mut self, packet: &Packet<'_>, from: IpAddr, now: Time, shared: &mut Shared) {
        let is_own = self.peer.is_some_and(|peer| peer.address == from);
        if !packet.header.is_of_partition(PKEY) || !is_own {
            return;
        }
        if !std::mem::replace(&mut self.has_heard, true) && self.state == IBV_QPS_RTR {
            shared.events.raise(self.id.context, IBV_EVENT_COMM_EST, self.id.object);
        }
        let (machine, mut side) = self.split(shared);
        match (machine, packet.header.transport) {
            (Machine::Reliable { responder, requester }, Transport::Rc) => {
                if !packet.header.operation.is_answer() {
                    responder.handle(&packet.header, packet.payload, &mut side);
                } else if let Some(requester) = requester {
                    requester.handle(&packet.header, packet.payload, now, &mut side);
                }
            }
            // To an answer there is none.
            (Machine::Refused(responder), Transport::Rc) if !packet.header.operation.is_answer() => {
                responder.handle(&packet.header, packet.payload, &mut side);
            }
            (Machine::Unreliable { responder, .. }, Transport::Uc) => {
                responder.handle(&packet.header, packet.payload, &mut side);
            }
            _ => {}
        }
        self.end_requests(shared);
    }

    /// Takes a datagram that is for it, with the header of its route.
    pub(crate) fn handle_datagram(&mut self, packet: &Packet<'_>, route: &[u8; 40], shared: &mut Shared) {
        let Transport::Ud { qkey, source_qp } = packet.header.transport else { return };
        let is_ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE);
        if self.id.kind != IBV_QPT_UD || !is_ready || !packet.header.is_of_partition(PKEY) || qkey != self.attr.qkey {
            return;
        }
        let Operation::SendOnly(trailer) = packet.header.operation else { return };
        let (_, mut side) = self.split(shared);
        side.source_qp = source_qp;
        let Some(receive) = side.receive() else { return };
        let filled = side.fill(receive, 0, route).and_then(|()| side.fill(receive, 40, packet.payload));
        let imm = if let crate::wire::Trailer::Immediate(imm) = trailer { Some(imm) } else { None };
        let (status, len) = match filled {
            Ok(()) => (Status::Success, 40 + packet.payload.len() as u32),
            Err(status) => (status, 0),
        };
        let of = Datagram { is_solicited: packet.header.solicited, packet_type: packet_type(route) };
        side.datagram(receive, status, len, imm, of);
    }

    /// Begins with what was posted, as far as that may begin.
    fn stage(&mut self, shared: &mut Shared) -> Result<(), ibv_wc_status> {
        if self.state != IBV_QPS_RTS {
            return Ok(());
        }
        let (machine, mut side) = self.split(shared);
        while let Some((number, job)) = side.queues.send.next() {
            let is_idle = match &*machine {
                Machine::Reliable { requester: Some(requester), .. } => requester.is_idle(),
                _ => number == side.queues.send.head(),
            };
            let request = match job.task {
                Task::Datagram { .. } => return Ok(()),
                Task::Request(request) if has_memory(job, &side) => request,
                // What comes before it ends first.
                _ if !is_idle => return Ok(()),
                Task::Request(_) => return Err(IBV_WC_LOC_PROT_ERR),
                Task::Bind(kind, binding) => {
                    let Identity { pd, number, .. } = *side.id;
                    side.shared.keys.bind(pd, number, kind, &binding).ok_or(IBV_WC_MW_BIND_ERR)?;
                    side.ended(Status::Success);
                    continue;
                }
                Task::Invalidate(rkey) => {
                    if !side.invalidate(rkey) {
                        return Err(IBV_WC_MW_BIND_ERR);
                    }
                    side.ended(Status::Success);
                    continue;
                }
            };
            let Job { len, is_fenced, is_solicited, .. } = *job;
            let work = Work { id: number, request, len, is_fenced, is_solicited };
            match machine {
                Machine::Reliable { requester: Some(requester), .. } => requester.post(work, &mut side),
                Machine::Unreliable { requester: Some(requester), .. } => _ = requester.post(work),
                _ => return Ok(()),
            }
            side.queues.send.stage();
        }
        Ok(())
    }

    /// The next thing to send. `None`: nothing for now; the queue pair may have failed with that.
    ///
    /// With `may_delay`, an ACK [may wait](AckDelay::is_waiting) for a later call.
    pub(crate) fn transmit(&mut self, now: Time, may_delay: bool, shared: &mut Shared) -> Option<Sending> {
        if let Err(status) = self.stage(shared) {
            // It was its turn, with nothing before it.
            self.fail_at(self.queues.send.head(), status, shared);
            return None;
        }
        let is_drained = self.state == IBV_QPS_SQD;
        let is_sending = self.state == IBV_QPS_RTS || is_drained;
        if let Machine::Reliable { responder, requester } = &mut self.machine {
            let request = requester.as_mut().filter(|_| is_sending).and_then(|requester| requester.transmit(now));
            // The ACK that is due follows the request in the same message to the kernel, as it is never longer than a request.
            if let Some(request) = request {
                self.ack_delay.request_sent(now, responder.owes_ack());
                return Some(Sending::Packet(Transport::Rc, request));
            }
            if responder.owes_ack() {
                if may_delay && responder.was_asked_once() && self.ack_delay.begin() {
                    return None;
                }
                self.ack_delay.ack_sent(now);
            }
        }
        let (machine, side) = self.split(shared);
        match machine {
            Machine::Reliable { responder, .. } => {
                responder.transmit(&side).map(|outgoing| Sending::Packet(Transport::Rc, outgoing))
            }
            Machine::Refused(responder) => {
                responder.transmit(&side).map(|outgoing| Sending::Packet(Transport::Rc, outgoing))
            }
            Machine::Unreliable { requester: Some(requester), .. } if is_sending => {
                if is_drained && !requester.is_amid() {
                    return None;
                }
                requester.transmit().map(|outgoing| Sending::Packet(Transport::Uc, outgoing))
            }
            Machine::Datagram { psn } if is_sending && !is_drained && !side.queues.send.is_empty() => {
                let number = *psn;
                *psn = psn.add(1);
                Some(Sending::Datagram(number))
            }
            _ => None,
        }
    }

    /// The data of a packet was taken, or it has none: work may end with that.
    pub(crate) fn taken(&mut self, shared: &mut Shared) {
        let (machine, mut side) = self.split(shared);
        if let Machine::Unreliable { requester: Some(requester), .. } = machine {
            requester.taken(&mut side);
        }
    }

    /// A piece of work cannot be done here. What comes before it and after it is flushed.
    pub(crate) fn fail_at(&mut self, work: u64, status: ibv_wc_status, shared: &mut Shared) {
        let (_, mut side) = self.split(shared);
        while side.queues.send.head() < work && !side.queues.send.is_empty() {
            side.ended(Status::Flushed);
        }
        side.ended_with(status);
        self.fail(shared);
    }

    /// The datagram that is the earliest work was handed on.
    pub(crate) fn datagram_sent(&mut self, shared: &mut Shared) {
        let (_, mut side) = self.split(shared);
        side.ended(Status::Success);
    }

    /// Does what follows from what has happened: its peer was refused for good, or all is drained.
    pub(crate) fn settle(&mut self, shared: &mut Shared) {
        let refusal = match &self.machine {
            Machine::Reliable { responder, .. } => responder.failure(),
            _ => None,
        };
        let Some(nak) = refusal else { return self.drained(shared) };
        let kind = if nak == Nak::RemoteAccess { IBV_EVENT_QP_ACCESS_ERR } else { IBV_EVENT_QP_REQ_ERR };
        shared.events.raise(self.id.context, kind, self.id.object);
        self.fail(shared);
    }

    fn drained(&mut self, shared: &mut Shared) {
        if !self.awaits_drain {
            return;
        }
        let is_drained = match &self.machine {
            Machine::Reliable { requester: Some(requester), .. } => requester.is_drained(),
            Machine::Unreliable { requester: Some(requester), .. } => !requester.is_amid(),
            _ => true,
        };
        if is_drained {
            self.awaits_drain = false;
            if self.attr.en_sqd_async_notify != 0 {
                shared.events.raise(self.id.context, IBV_EVENT_SQ_DRAINED, self.id.object);
            }
        }
    }

    /// Whether work is still to be drained.
    pub(crate) fn is_draining(&self) -> bool {
        self.awaits_drain
    }

    /// Goes to the error state: all that is left ends.
    pub(crate) fn fail(&mut self, shared: &mut Shared) {
        let was = std::mem::replace(&mut self.state, IBV_QPS_ERR);
        self.awaits_drain = false;
        let mut machine = std::mem::replace(&mut self.machine, Machine::None);
        let (_, mut side) = self.split(shared);
        let begun = match &mut machine {
            Machine::Reliable { responder, requester } => {
                if let Some(requester) = requester {
                    requester.flush(&mut side);
                }
                responder.abandon()
            }
            Machine::Unreliable { responder, requester } => {
                if let Some(requester) = requester {
                    requester.flush(&mut side);
                }
                responder.abandon()
            }
            _ => None,
        };
        match machine {
            Machine::Reliable { responder, .. } if responder.failure().is_some() => {
                self.machine = Machine::Refused(responder);
            }
            Machine::Refused(_) => self.machine = machine,
            _ => {}
        }
        let (_, mut side) = self.split(shared);
        while !side.queues.send.is_empty() {
            side.complete(Completion::Sent { id: 0, status: Status::Flushed });
        }
        side.flush_receives(begun);
        if was != IBV_QPS_ERR && self.id.srq.is_some() {
            shared.events.raise(self.id.context, IBV_EVENT_QP_LAST_WQE_REACHED, self.id.object);
        }
    }

    /// Changes it as `ibv_modify_qp`. `peer` is who the address vector of the attributes leads to.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn modify(
        &mut self,
        attr: &ibv_qp_attr,
        mask: u32,
        peer: Option<Destination>,
        window: u16,
        shared: &mut Shared,
    ) -> Result<(), i32> {
        let from = self.state;
        let to = if mask & IBV_QP_STATE.0 != 0 { attr.qp_state } else { from };
        let is_current = mask & IBV_QP_CUR_STATE.0 == 0 || attr.cur_qp_state == from;
        if !is_current || !modify::is_allowed(self.id.kind, from, to, mask) {
            return Err(libc::EINVAL);
        }
        modify::merge(&mut self.attr, attr, mask);
        if mask & IBV_QP_AV.0 != 0 {
            self.peer = peer;
        }
        match to {
            IBV_QPS_ERR => self.fail(shared),
            IBV_QPS_RESET => self.reset(shared),
            IBV_QPS_RTR if from == IBV_QPS_INIT => self.begin_to_receive(),
            IBV_QPS_RTS if from == IBV_QPS_RTR => self.begin_to_send(window),
            _ => {}
        }
        self.state = to;
        if from == IBV_QPS_RTS && to == IBV_QPS_SQD {
            self.awaits_drain = true;
        }
        let settings = self.requester_settings(window);
        if let Machine::Reliable { requester: Some(requester), responder } = &mut self.machine {
            requester.hold(to == IBV_QPS_SQD);
            // Some attributes may change while it runs.
            requester.change(settings);
            responder.set_min_rnr_timer(self.attr.min_rnr_timer);
        }
        Ok(())
    }

    fn reset(&mut self, shared: &mut Shared) {
        self.machine = Machine::None;
        let Identity { number, send_cq, recv_cq, cap, .. } = self.id;
        self.queues.send.clear();
        self.queues.receive.waiting.clear();
        self.queues.taken = Taken::new();
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = shared.cqs.get(cq) {
                cq.sweep(number);
            }
        }
        // Windows were opened to the peer that it had, and the next may be another.
        shared.keys.forget_qp(number);
        self.attr = ibv_qp_attr { cap, ..ibv_qp_attr::zeroed() };
        (self.peer, self.has_heard, self.awaits_drain) = (None, false, false);
        self.ack_delay = AckDelay::new();
    }

    fn begin_to_receive(&mut self) {
        let ibv_qp_attr { rq_psn, path_mtu, max_dest_rd_atomic, min_rnr_timer, .. } = self.attr;
        let (psn, mtu) = (Psn::new(rq_psn), bytes(path_mtu));
        self.machine = match self.id.kind {
            IBV_QPT_RC => {
                let settings = ResponderSettings { psn, mtu, resources: max_dest_rd_atomic, min_rnr_timer };
                Machine::Reliable { responder: Responder::new(settings), requester: None }
            }
            IBV_QPT_UC => Machine::Unreliable { responder: UnreliableResponder::new(psn, mtu), requester: None },
            _ => Machine::Datagram { psn: Psn::new(0) },
        };
    }

    fn requester_settings(&self, window: u16) -> RequesterSettings {
        let ibv_qp_attr { sq_psn, path_mtu, max_rd_atomic, timeout, retry_cnt, rnr_retry, .. } = self.attr;
        let mtu = bytes(path_mtu);
        RequesterSettings {
            psn: Psn::new(sq_psn),
            mtu,
            window: (u32::from(window) * 1024 / mtu).clamp(8, 256) as u16,
            reads: max_rd_atomic,
            timeout: ack_timeout(timeout),
            retries: retry_cnt,
            rnr_retries: rnr_retry,
        }
    }

    fn begin_to_send(&mut self, window: u16) {
        let settings = self.requester_settings(window);
        let RequesterSettings { psn, mtu, .. } = settings;
        match &mut self.machine {
            Machine::Reliable { requester, .. } => *requester = Some(Requester::new(settings)),
            Machine::Unreliable { requester, .. } => *requester = Some(UnreliableRequester::new(psn, mtu)),
            Machine::Datagram { psn: next } => *next = psn,
            Machine::None | Machine::Refused(_) => {}
        }
    }
}

/// How long a requester waits for an ACK before it counts a retry, for the attribute `timeout`; `None` is for ever.
///
/// The specification allows one to four times 4.096 µs · 2ⁿ. Lost packets are retransmitted long before that. The time beyond
/// the minimum only lets a peer in software be scheduled, which does not depend on the timeout.
fn ack_timeout(timeout: u8) -> Option<Duration> {
    const TO_BE_SCHEDULED: Duration = Duration::from_millis(200);
    let least = Duration::from_nanos(4096 << timeout.min(31));
    (timeout != 0).then(|| least + TO_BE_SCHEDULED.min(3 * least))
}

/// Whether all memory that a piece of work names is open to it.
fn has_memory(job: &Job, side: &Side<'_>) -> bool {
    let is_written = matches!(job.task.opcode(), IBV_WC_RDMA_READ | IBV_WC_COMP_SWAP | IBV_WC_FETCH_ADD);
    let opens = |sge: &ibv_sge| sge.length == 0 || side.shared.keys.local(side.id.pd, sge, is_written).is_some();
    job.is_inline || job.sges.iter().all(opens)
}

/// Bytes of a path MTU.
pub(crate) fn bytes(mtu: ibv_mtu) -> u32 {
    128 << mtu.0.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_is_waited_for_as_long_as_the_specification_allows_and_long_timeouts_stay_as_they_are() {
        assert_eq!(ack_timeout(0), None);
        for timeout in 1..=31 {
            let (least, waited) = (Duration::from_nanos(4096 << timeout), ack_timeout(timeout).unwrap());
            assert!(waited >= least && waited <= 4 * least, "{timeout}: {waited:?}");
        }
        // perftest's, of 67 ms, and UCX's, of 1.07 s: each with seven retries.
        let given_up = |timeout| (8 * ack_timeout(timeout).unwrap()).as_secs_f64();
        assert!((2.0..2.2).contains(&given_up(14)) && (8.6..11.0).contains(&given_up(18)), "{}", given_up(18));
    }
}
