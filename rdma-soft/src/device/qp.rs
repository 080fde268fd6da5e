//! Queue pairs: queues, protocol state machines and state transitions.

use std::net::IpAddr;
use std::time::Duration;

use rdma_sys::*;

use super::ack_delay::AckDelay;
use super::host::{Datagram, Identity, QpHost, Queues, Shared};
use super::modify;
use super::net_address::{Destination, packet_type};
use super::observe;
use super::queues::{ActiveReceives, Job, ReceiveQueue, SendQueue, Task};
use crate::transport::{
    Completion, Host, Outgoing, Requester, RequesterSettings, Responder, ResponderSettings, Status, Time,
    UnreliableRequester, UnreliableResponder, Work,
};
use crate::wire::{Nak, Operation, Packet, Psn, Transport};

/// The only partition key, which is the default one of RoCE.
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
    /// Whether it is in [`State::ready`](super::state::State) or `State::blocked`.
    pub(crate) is_ready: bool,
    /// Decides whether ACKs wait for requests.
    pub(crate) ack_delay: AckDelay,
    /// Its current timer in [`State`](super::state::State).
    pub(crate) timer: Option<Time>,
    /// Whether a packet of the peer has arrived.
    has_received: bool,
    /// Whether the connection manager waits for the first packet of the peer.
    pub(crate) awaits_establishment: bool,
    awaits_drain: bool,
}

/// The protocol state of a queue pair.
#[derive(Debug)]
enum Machine {
    /// Not connected, or failed.
    None,
    Reliable {
        responder: Responder,
        requester: Option<Requester>,
    },
    /// Failed by a fatal NAK, which is repeated if the peer retransmits the request.
    Refused(Responder),
    Unreliable {
        responder: UnreliableResponder,
        requester: Option<UnreliableRequester>,
    },
    Datagram {
        /// PSN of the next datagram.
        psn: Psn,
    },
}

/// What a queue pair does with the answers that it owes its peer: ACKs and responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answers {
    /// It sends them after its requests.
    Send,
    /// Like [`Answers::Send`], but an ACK [may wait](AckDelay::is_waiting).
    DelayAcks,
}

/// A packet that a queue pair sends.
#[derive(Debug)]
pub(crate) enum Sending {
    /// A packet to the connected peer.
    Packet(Transport, Outgoing),
    /// The oldest work request, a datagram to the destination that it names. Sending completes it.
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
                active: ActiveReceives::new(),
            },
            state: IBV_QPS_RESET,
            attr: ibv_qp_attr { cap, ..ibv_qp_attr::zeroed() },
            peer: None,
            machine: Machine::None,
            is_ready: false,
            ack_delay: AckDelay::new(),
            timer: None,
            has_received: false,
            awaits_establishment: false,
            awaits_drain: false,
        }
    }

    /// Splits the queue pair into the state machine and its [`Host`].
    fn split<'a>(&'a mut self, shared: &'a mut Shared) -> (&'a mut Machine, QpHost<'a>) {
        let host = QpHost {
            id: &self.id,
            access: self.attr.qp_access_flags,
            source_qp: self.attr.dest_qp_num,
            queues: &mut self.queues,
            shared,
        };
        (&mut self.machine, host)
    }

    /// Destination of the next packet, if there is one.
    pub(crate) fn destination(&self) -> Option<Destination> {
        match &self.machine {
            Machine::Datagram { .. } => match self.queues.send.get(self.queues.send.head())?.task {
                Task::Datagram { to, .. } => Some(to),
                _ => None,
            },
            _ => self.peer,
        }
    }

    /// Whether a packet of the peer has arrived.
    pub(crate) fn has_received(&self) -> bool {
        self.has_received
    }

    /// When [`Qp::expire`] has to be called.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        match &self.machine {
            Machine::Reliable { requester: Some(requester), .. } => requester.wake_at(),
            _ => None,
        }
    }

    /// Expires timers: [`Requester::expire`].
    pub(crate) fn expire(&mut self, now: Time, received_until: Time, shared: &mut Shared) -> bool {
        let (machine, mut host) = self.split(shared);
        let Machine::Reliable { requester: Some(requester), .. } = machine else { return false };
        let is_due = requester.expire(now, received_until, &mut host);
        self.fail_with_requester(shared);
        is_due
    }

    /// Moves to the error state if the requester has failed, while the device is still locked.
    fn fail_with_requester(&mut self, shared: &mut Shared) {
        if matches!(&self.machine, Machine::Reliable { requester: Some(requester), .. } if requester.has_failed()) {
            self.fail(shared);
        }
    }

    /// Handles a packet to this queue pair. Drops packets of other partitions, senders and transports.
    pub(crate) fn handle(&mut self, packet: &Packet<'_>, from: IpAddr, now: Time, shared: &mut Shared) {
        let is_own = self.peer.is_some_and(|peer| peer.address == from);
        if !packet.header.is_of_partition(PKEY) || !is_own {
            return;
        }
        if !std::mem::replace(&mut self.has_received, true) && self.state == IBV_QPS_RTR {
            shared.events.raise(self.id.context, IBV_EVENT_COMM_EST, self.id.object);
        }
        let (machine, mut host) = self.split(shared);
        match (machine, packet.header.transport) {
            (Machine::Reliable { responder, requester }, Transport::Rc) => {
                if !packet.header.operation.is_answer() {
                    responder.handle(&packet.header, packet.payload, &mut host);
                } else if let Some(requester) = requester {
                    requester.handle(&packet.header, packet.payload, now, &mut host);
                }
            }
            // A response gets no response.
            (Machine::Refused(responder), Transport::Rc) if !packet.header.operation.is_answer() => {
                responder.handle(&packet.header, packet.payload, &mut host);
            }
            (Machine::Unreliable { responder, .. }, Transport::Uc) => {
                responder.handle(&packet.header, packet.payload, &mut host);
            }
            _ => {}
        }
        self.fail_with_requester(shared);
    }

    /// Handles a datagram to this queue pair. `route` is its global route header.
    pub(crate) fn handle_datagram(&mut self, packet: &Packet<'_>, route: &[u8; 40], shared: &mut Shared) {
        let Transport::Ud { qkey, source_qp } = packet.header.transport else { return };
        let is_ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE);
        if self.id.kind != IBV_QPT_UD || !is_ready || !packet.header.is_of_partition(PKEY) || qkey != self.attr.qkey {
            return;
        }
        let Operation::SendOnly(trailer) = packet.header.operation else { return };
        let (_, mut host) = self.split(shared);
        host.source_qp = source_qp;
        let Some(receive) = host.receive() else { return };
        let filled = host.fill(receive, 0, route.into()).and_then(|()| host.fill(receive, 40, packet.payload));
        let imm = if let crate::wire::Trailer::Immediate(imm) = trailer { Some(imm) } else { None };
        let (status, len) = match filled {
            Ok(()) => (Status::Success, 40 + packet.payload.len() as u32),
            Err(status) => (status, 0),
        };
        let of = Datagram { is_solicited: packet.header.solicited, packet_type: packet_type(route) };
        host.complete_datagram(receive, status, len, imm, of);
    }

    /// Hands posted work to the state machine, as far as it may start.
    fn stage(&mut self, shared: &mut Shared) -> Result<(), ibv_wc_status> {
        if self.state != IBV_QPS_RTS {
            return Ok(());
        }
        let (machine, mut host) = self.split(shared);
        while let Some((number, job)) = host.queues.send.next() {
            let is_idle = match &*machine {
                Machine::Reliable { requester: Some(requester), .. } => requester.is_idle(),
                _ => number == host.queues.send.head(),
            };
            let request = match job.task {
                Task::Datagram { .. } => return Ok(()),
                Task::Request(request) if has_valid_memory(job, &host) => request,
                // Earlier work has to complete first.
                _ if !is_idle => return Ok(()),
                Task::Request(_) => {
                    observe::refused_send(self, &shared.keys, number);
                    return Err(IBV_WC_LOC_PROT_ERR);
                }
                Task::Bind(kind, binding) => {
                    let Identity { pd, number, .. } = *host.id;
                    host.shared.keys.bind(pd, number, kind, &binding).ok_or(IBV_WC_MW_BIND_ERR)?;
                    host.complete_send(Status::Success);
                    continue;
                }
                Task::Invalidate(rkey) => {
                    if !host.invalidate(rkey) {
                        return Err(IBV_WC_MW_BIND_ERR);
                    }
                    host.complete_send(Status::Success);
                    continue;
                }
            };
            let Job { len, is_fenced, is_solicited, .. } = *job;
            let work = Work { id: number, request, len, is_fenced, is_solicited };
            match machine {
                Machine::Reliable { requester: Some(requester), .. } => requester.post(work, &mut host),
                Machine::Unreliable { requester: Some(requester), .. } => _ = requester.post(work),
                _ => return Ok(()),
            }
            host.queues.send.stage();
        }
        Ok(())
    }

    /// Returns the next packet. `None` if there is none at the moment, or if the queue pair has failed.
    pub(crate) fn transmit(&mut self, now: Time, answers: Answers, shared: &mut Shared) -> Option<Sending> {
        if let Err(status) = self.stage(shared) {
            // All earlier work has completed, so the failed work is the oldest.
            self.fail_at(self.queues.send.head(), status, shared);
            return None;
        }
        let is_drained = self.state == IBV_QPS_SQD;
        let is_sending = self.state == IBV_QPS_RTS || is_drained;
        if let Machine::Reliable { responder, requester } = &mut self.machine {
            let request = requester.as_mut().filter(|_| is_sending).and_then(|requester| requester.transmit(now));
            // An ACK that is due follows, by the same system call. If this is the only queue pair that sends, it often shares the
            // request's message to the kernel, because an ACK is never longer than a request.
            if let Some(request) = request {
                self.ack_delay.request_sent(now, responder.owes_ack());
                return Some(Sending::Packet(Transport::Rc, request));
            }
            if responder.owes_ack() {
                if answers == Answers::DelayAcks && responder.was_asked_once() && self.ack_delay.begin() {
                    return None;
                }
                self.ack_delay.ack_sent(now);
            }
        }
        let (machine, host) = self.split(shared);
        match machine {
            Machine::Reliable { responder, .. } => {
                responder.transmit(&host).map(|outgoing| Sending::Packet(Transport::Rc, outgoing))
            }
            Machine::Refused(responder) => {
                responder.transmit(&host).map(|outgoing| Sending::Packet(Transport::Rc, outgoing))
            }
            Machine::Unreliable { requester: Some(requester), .. } if is_sending => {
                if is_drained && !requester.is_amid() {
                    return None;
                }
                requester.transmit().map(|outgoing| Sending::Packet(Transport::Uc, outgoing))
            }
            Machine::Datagram { psn } if is_sending && !is_drained && !host.queues.send.is_empty() => {
                let number = *psn;
                *psn = psn.add(1);
                Some(Sending::Datagram(number))
            }
            _ => None,
        }
    }

    /// Transmits up to `most` more packets of the run that `first` starts. Returns their number.
    #[inline]
    pub(crate) fn extend_run(&mut self, first: &Outgoing, most: u32, shared: &mut Shared) -> u32 {
        if !first.operation.is_middle() {
            return 0;
        }
        let (machine, host) = self.split(shared);
        match machine {
            Machine::Reliable { responder, .. } if first.operation.is_answer() => {
                responder.extend_run(first, most, &host)
            }
            Machine::Reliable { requester: Some(requester), .. } => requester.extend_run(first, most),
            _ => 0,
        }
    }

    /// Notes that a packet was built. The last packet of unreliable work completes it.
    pub(crate) fn packet_built(&mut self, shared: &mut Shared) {
        let (machine, mut host) = self.split(shared);
        if let Machine::Unreliable { requester: Some(requester), .. } = machine {
            requester.taken(&mut host);
        }
    }

    /// Fails a work request, and flushes all others.
    pub(crate) fn fail_at(&mut self, work: u64, status: ibv_wc_status, shared: &mut Shared) {
        let (_, mut host) = self.split(shared);
        while host.queues.send.head() < work && !host.queues.send.is_empty() {
            host.complete_send(Status::Flushed);
        }
        host.complete_send_with(status);
        self.fail(shared);
    }

    /// Completes the oldest work request, a datagram that was sent.
    pub(crate) fn datagram_sent(&mut self, shared: &mut Shared) {
        let (_, mut host) = self.split(shared);
        host.complete_send(Status::Success);
    }

    /// Moves to the error state after a fatal NAK, or notes that the send queue is drained.
    pub(crate) fn update_state(&mut self, shared: &mut Shared) {
        let refusal = match &self.machine {
            Machine::Reliable { responder, .. } => responder.failure(),
            _ => None,
        };
        let Some(nak) = refusal else { return self.check_drained(shared) };
        let kind = if nak == Nak::RemoteAccess { IBV_EVENT_QP_ACCESS_ERR } else { IBV_EVENT_QP_REQ_ERR };
        shared.events.raise(self.id.context, kind, self.id.object);
        self.fail(shared);
    }

    fn check_drained(&mut self, shared: &mut Shared) {
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

    /// Whether the send queue is still draining.
    pub(crate) fn is_draining(&self) -> bool {
        self.awaits_drain
    }

    /// Moves to the error state, and flushes all outstanding work.
    pub(crate) fn fail(&mut self, shared: &mut Shared) {
        let was = std::mem::replace(&mut self.state, IBV_QPS_ERR);
        self.awaits_drain = false;
        let mut machine = std::mem::replace(&mut self.machine, Machine::None);
        let (_, mut host) = self.split(shared);
        let active = match &mut machine {
            Machine::Reliable { responder, requester } => {
                if let Some(requester) = requester {
                    requester.flush(&mut host);
                }
                responder.abandon()
            }
            Machine::Unreliable { responder, requester } => {
                if let Some(requester) = requester {
                    requester.flush(&mut host);
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
        let (_, mut host) = self.split(shared);
        while !host.queues.send.is_empty() {
            host.complete(Completion::Sent { id: 0, status: Status::Flushed });
        }
        host.flush_receives(active);
        if was != IBV_QPS_ERR && self.id.srq.is_some() {
            shared.events.raise(self.id.context, IBV_EVENT_QP_LAST_WQE_REACHED, self.id.object);
        }
    }

    /// Changes the state and attributes: `ibv_modify_qp(3)`.
    ///
    /// `peer` is the destination of the address vector, and `window` the limit of KiB in flight.
    ///
    /// # Errors
    /// `EINVAL` if the transition or an attribute is not allowed.
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
            IBV_QPS_RTR if from == IBV_QPS_INIT => self.enter_rtr(),
            IBV_QPS_RTS if from == IBV_QPS_RTR => self.enter_rts(window),
            _ => {}
        }
        self.state = to;
        if from == IBV_QPS_RTS && to == IBV_QPS_SQD {
            self.awaits_drain = true;
        }
        let settings = self.requester_settings(window);
        if let Machine::Reliable { requester: Some(requester), responder } = &mut self.machine {
            requester.hold(to == IBV_QPS_SQD);
            // Some attributes may change while the requester runs.
            requester.change(settings);
            responder.set_min_rnr_timer(self.attr.min_rnr_timer);
        }
        Ok(())
    }

    fn reset(&mut self, shared: &mut Shared) {
        self.machine = Machine::None;
        let Identity { number, send_cq, recv_cq, cap, .. } = self.id;
        observe::cleared(number, &self.queues);
        self.queues.send.clear();
        self.queues.receive.posted.clear();
        self.queues.active = ActiveReceives::new();
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = shared.cqs.get(cq) {
                cq.remove_qp(number);
            }
        }
        // The next peer may be another one, and must not use windows that were bound for this peer.
        shared.keys.unbind_qp(number);
        self.attr = ibv_qp_attr { cap, ..ibv_qp_attr::zeroed() };
        (self.peer, self.has_received, self.awaits_drain) = (None, false, false);
        self.awaits_establishment = false;
        self.ack_delay = AckDelay::new();
    }

    fn enter_rtr(&mut self) {
        let ibv_qp_attr { rq_psn, path_mtu, max_dest_rd_atomic, min_rnr_timer, .. } = self.attr;
        let (psn, mtu) = (Psn::new(rq_psn), mtu_bytes(path_mtu));
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
        let mtu = mtu_bytes(path_mtu);
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

    fn enter_rts(&mut self, window: u16) {
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

/// How long a requester waits for an ACK before it counts a retry. `None` is without limit.
///
/// `timeout` is the attribute. The specification allows one to four times 4.096 µs · 2ⁿ. Lost packets are retransmitted long before
/// that. The time beyond the minimum only lets a software peer be scheduled, which takes the same time for any timeout.
fn ack_timeout(timeout: u8) -> Option<Duration> {
    const SCHEDULING_MARGIN: Duration = Duration::from_millis(200);
    let least = Duration::from_nanos(4096 << timeout.min(31));
    (timeout != 0).then(|| least + SCHEDULING_MARGIN.min(3 * least))
}

/// Whether the keys of a work request allow access to all of its memory.
fn has_valid_memory(job: &Job, host: &QpHost<'_>) -> bool {
    let is_written = matches!(job.task.opcode(), IBV_WC_RDMA_READ | IBV_WC_COMP_SWAP | IBV_WC_FETCH_ADD);
    let opens = |sge: &ibv_sge| sge.length == 0 || host.shared.keys.local(host.id.pd, sge, is_written).is_some();
    job.is_inline || job.sges.iter().all(opens)
}

/// Bytes of a path MTU.
/// The largest path MTU of at most `bytes`.
pub(crate) fn mtu_code(bytes: u32) -> ibv_mtu {
    (1..=5).rev().map(ibv_mtu).find(|mtu| mtu_bytes(*mtu) <= bytes).unwrap_or(IBV_MTU_256)
}

pub(crate) fn mtu_bytes(mtu: ibv_mtu) -> u32 {
    128 << mtu.0.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ack_timeout_is_within_the_limits_of_the_specification() {
        assert_eq!(ack_timeout(0), None);
        for timeout in 1..=31 {
            let (least, waited) = (Duration::from_nanos(4096 << timeout), ack_timeout(timeout).unwrap());
            assert!(waited >= least && waited <= 4 * least, "{timeout}: {waited:?}");
        }
        // The timeouts of perftest (67 ms) and UCX (1.07 s), each with seven retries.
        let total_timeout = |timeout| (8 * ack_timeout(timeout).unwrap()).as_secs_f64();
        assert!(
            (2.0..2.2).contains(&total_timeout(14)) && (8.6..11.0).contains(&total_timeout(18)),
            "{}",
            total_timeout(18)
        );
    }
}
