//! The objects of a device, its send schedule, its timers, and its multicast groups. Everything but the sockets.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::net::IpAddr;
use std::time::Duration;

use rdma_sys::{IBV_EVENT_QP_FATAL, IBV_QPS_ERR, IBV_QPS_RESET, IBV_QPT_UD};

use super::ack_delay::ACK_DELAY;
use super::cma::Cma;
use super::events::Events;
use super::host::{Identity, Shared};
use super::keys::{KeyHasher, Keys};
use super::net_address::{address, route_header};
use super::observe;
use super::qp::Qp;
use super::slab::Slab;
use super::traffic::RECEIVED;
use crate::check::{self, Object};
use crate::cm::MAD_QP;
use crate::net::Origin;
use crate::transport::Time;
use crate::wire::{Chunks, Data, Following, Packet, Transport};

/// Destination queue pair number of multicast datagrams.
pub(crate) const MULTICAST_QP: u32 = 0xff_ffff;

/// The state of a device, apart from its sockets.
pub(crate) struct State {
    pub(crate) shared: Shared,
    pub(crate) qps: HashMap<u32, Box<Qp>, BuildHasherDefault<KeyHasher>>,
    next_qp: u32,
    /// Queue pairs that have packets to send, in the order of their turns.
    pub(crate) ready: VecDeque<u32>,
    /// Queue pairs that have packets to send but whose link is blocked. Their `is_ready` is set, too.
    pub(crate) blocked: Vec<u32>,
    /// Queue pairs with a [delayed](super::ack_delay::AckDelay) ACK. Some may have sent it since.
    pub(crate) delayed: Vec<u32>,
    /// Deadline of the delayed ACKs.
    pub(crate) ack_deadline: Option<Time>,
    /// Longest delay of an ACK that is delayed from now on. It is longer while a channel is [direct](super::direct).
    pub(super) ack_delay: Duration,
    /// Timers, the earliest first. A timer is stale unless it equals [`Qp::timer`] of its queue pair.
    timers: BinaryHeap<Reverse<(Time, u32)>>,
    /// Members of multicast groups, by GID.
    pub(crate) groups: HashMap<[u8; 16], Vec<u32>>,
    /// Protection domains, each with the number of its context.
    pub(crate) pds: Slab<u32>,
    /// Connections by address.
    pub(crate) cma: Cma,
}

impl State {
    pub(crate) fn new() -> Self {
        let mut keys = Keys::new();
        // A random start keeps peers of an earlier process from reaching this one by number. Numbers below 16 are reserved.
        let next_qp = 16 + (keys.draw() as u32 & 0x7f_ffff);
        let cma = Cma::new(keys.draw(), keys.draw());
        State {
            shared: Shared { keys, cqs: Slab::new(1), srqs: Slab::new(1), events: Events::new(), packets: 0 },
            qps: HashMap::default(),
            next_qp,
            ready: VecDeque::with_capacity(64),
            blocked: Vec::new(),
            delayed: Vec::new(),
            ack_deadline: None,
            ack_delay: ACK_DELAY,
            timers: BinaryHeap::with_capacity(64),
            groups: HashMap::new(),
            pds: Slab::new(1),
            cma,
        }
    }

    /// Adds a queue pair, and returns its number. A number is not reused for a long time.
    pub(crate) fn add_qp(&mut self, mut id: Identity) -> u32 {
        while self.qps.contains_key(&self.next_qp) || self.cma.uses_qpn(self.next_qp) {
            self.next_qp = next_number(self.next_qp);
        }
        let number = self.next_qp;
        self.next_qp = next_number(number);
        id.number = number;
        for cq in [id.send_cq, id.recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(cq) {
                cq.users += 1;
            }
        }
        if let Some(srq) = id.srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            srq.users += 1;
        }
        self.qps.insert(number, Box::new(Qp::new(id)));
        check::created(Object::QueuePair(number));
        number
    }

    /// Removes a queue pair, its completions and its events, and unbinds its windows.
    ///
    /// # Errors
    /// `EBUSY` if it is a member of a multicast group, `EINVAL` if it does not exist.
    pub(crate) fn remove_qp(&mut self, number: u32) -> Result<(), i32> {
        if self.groups.values().any(|members| members.contains(&number)) {
            return Err(libc::EBUSY);
        }
        let Some(qp) = self.qps.remove(&number) else { return Err(libc::EINVAL) };
        let Identity { send_cq, recv_cq, srq, context, object, .. } = qp.id;
        observe::cleared(number, &qp.queues);
        check::destroyed(Object::QueuePair(number));
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(cq) {
                cq.remove_qp(number);
                cq.users -= 1;
            }
        }
        if let Some(srq) = srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.shared.keys.unbind_qp(number);
        self.shared.events.remove_object(context, object);
        Ok(())
    }

    /// Schedules a queue pair to send packets and to update its state.
    pub(crate) fn mark_ready(&mut self, number: u32) {
        if let Some(qp) = self.qps.get_mut(&number) {
            if !std::mem::replace(&mut qp.is_ready, true) {
                self.ready.push_back(number);
            }
        }
    }

    /// Delays the ACK of a queue pair until [`State::release_acks`].
    pub(crate) fn delay_ack(&mut self, number: u32, now: Time) {
        if !self.delayed.contains(&number) {
            self.delayed.push(number);
        }
        self.ack_deadline.get_or_insert(now + self.ack_delay);
    }

    /// Lets all queue pairs with delayed ACKs send them.
    pub(crate) fn release_acks(&mut self) {
        self.ack_deadline = None;
        while let Some(number) = self.delayed.pop() {
            self.mark_ready(number);
        }
    }

    /// Handles packets that have arrived at `to`, the address of a link. Their invariant CRCs were checked.
    pub(crate) fn handle_packets(&mut self, link: usize, from: Origin, to: IpAddr, packets: Chunks<'_>, now: Time) {
        let copy;
        let mut packets = if check::is_active() {
            // The checker and the device have to see the same bytes.
            copy = packets.rest().to_vec();
            Data::from(&copy).chunks(packets.chunk_len())
        } else {
            packets
        };
        let (bytes, count) = (packets.rest().len(), packets.remaining());
        RECEIVED.add(count, bytes);
        self.shared.packets = self.shared.packets.wrapping_add(count as u32);
        while let Some(datagram) = packets.next() {
            let Ok(packet) = Packet::parse(datagram) else { continue };
            let number = packet.header.dest_qp;
            if number == MAD_QP {
                self.cma.receive_mad(link, from, &packet);
            } else if let Transport::Ud { .. } = packet.header.transport {
                let route = route_header(from, to, datagram.len());
                if let Some(qp) = self.qps.get_mut(&number).filter(|_| number != MULTICAST_QP) {
                    qp.handle_datagram(&packet, &route, &mut self.shared);
                }
            } else if let Some(qp) = self.qps.get_mut(&number) {
                qp.handle(&packet, from.address, now, &mut self.shared);
                // The next packets of the run are compared with this one instead of parsed.
                if let Some(mut following) = Following::after(&packet) {
                    while let Some(packet) = packets.next_if(|datagram| following.next(datagram)) {
                        qp.handle(&packet, from.address, now, &mut self.shared);
                    }
                }
                if qp.awaits_establishment && qp.has_received() {
                    qp.awaits_establishment = false;
                    self.cma.establish_by_data(number);
                }
                self.mark_ready(number);
            }
        }
    }

    /// Handles a datagram to a multicast group, for all members in this process.
    pub(crate) fn handle_multicast(&mut self, from: Origin, gid: &[u8; 16], to: IpAddr, datagram: Data<'_>) {
        let Ok(packet) = Packet::parse(datagram) else { return };
        if packet.header.dest_qp != MULTICAST_QP {
            return;
        }
        let route = route_header(from, to, datagram.len());
        for member in self.groups.get(gid).into_iter().flatten() {
            if let Some(qp) = self.qps.get_mut(member) {
                qp.handle_datagram(&packet, &route, &mut self.shared);
            }
        }
    }

    /// Sets the timer of a queue pair, unless it is already set to an earlier time.
    pub(crate) fn set_timer(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let Some(at) = qp.wake_at() else { return };
        if qp.timer.is_none_or(|timer| at < timer) {
            qp.timer = Some(at);
            // Stale timers stay until they outnumber the others. A peer can have timers set often.
            if self.timers.len() > 64 + 4 * self.qps.len() {
                let qps = &self.qps;
                self.timers.retain(|Reverse((at, number))| qps.get(number).is_some_and(|qp| qp.timer == Some(*at)));
            }
            self.timers.push(Reverse((at, number)));
        }
    }

    /// The number of timers, including stale ones.
    #[cfg(test)]
    pub(crate) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// When to call [`State::expire`].
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        timer.into_iter().chain(self.ack_deadline).min()
    }

    /// Expires timers. All packets that arrived before `received_until` were handled, as for
    /// [`Requester::expire`](crate::transport::Requester::expire).
    pub(crate) fn expire(&mut self, now: Time, received_until: Time) {
        if self.timers.peek().is_none_or(|Reverse((at, _))| *at > now) {
            return;
        }
        let mut overdue = Vec::new();
        while let Some(Reverse((at, number))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.timers.pop();
            let Some(qp) = self.qps.get_mut(&number).filter(|qp| qp.timer == Some(at)) else { continue };
            qp.timer = None;
            // The queue pair may have moved its deadline since.
            let is_due = qp.expire(now, received_until, &mut self.shared);
            let is_overdue = qp.wake_at().is_some_and(|at| at <= now);
            if is_due {
                self.mark_ready(number);
            }
            if is_overdue { overdue.push(number) } else { self.set_timer(number) }
        }
        // The response may have arrived without being handled. Such timers stay due until all packets were handled.
        overdue.into_iter().for_each(|number| self.set_timer(number));
    }

    /// Moves the queue pairs of overrun completion queues to the error state.
    ///
    /// Call it before packets are sent: a peer must not get an ACK for a message whose completion was lost.
    pub(crate) fn fail_overruns(&mut self) {
        while let Some(cq) = self.shared.events.take_overrun() {
            for qp in self.qps.values_mut().filter(|qp| [qp.id.send_cq, qp.id.recv_cq].contains(&cq)) {
                if matches!(qp.state, IBV_QPS_RESET | IBV_QPS_ERR) {
                    continue;
                }
                qp.fail(&mut self.shared);
                self.shared.events.raise(qp.id.context, IBV_EVENT_QP_FATAL, qp.id.object);
            }
        }
    }

    /// Removes all objects of a context.
    pub(crate) fn close_context(&mut self, context: u32) {
        let qps: Vec<u32> = self.qps.values().filter(|qp| qp.id.context == context).map(|qp| qp.id.number).collect();
        for number in qps {
            self.groups.values_mut().for_each(|members| members.retain(|member| *member != number));
            _ = self.remove_qp(number);
        }
        self.groups.retain(|_, members| !members.is_empty());
        let Shared { keys, cqs, srqs, events, .. } = &mut self.shared;
        let of_cqs: Vec<u32> = cqs.iter().filter(|(_, cq)| cq.context == context).map(|(number, _)| number).collect();
        for number in of_cqs {
            let channel = cqs.remove(number).and_then(|cq| cq.channel);
            if let Some(channel) = channel.and_then(|channel| events.channels.get_mut(channel)) {
                channel.remove_cq(number);
                channel.users -= 1;
            }
            events.clear_overrun(number);
        }
        let of_srqs: Vec<u32> =
            srqs.iter().filter(|(_, srq)| srq.context == context).map(|(number, _)| number).collect();
        of_srqs.into_iter().for_each(|number| _ = srqs.remove(number));
        let pds: Vec<u32> = self.pds.iter().filter(|(_, of)| **of == context).map(|(number, _)| number).collect();
        for pd in pds {
            check::with(|check| check.domain_closed(pd));
            keys.remove_pd(pd);
            self.pds.remove(pd);
        }
        events.contexts.remove(context);
    }

    /// Whether a protection domain has any objects.
    pub(crate) fn uses_pd(&self, pd: u32) -> bool {
        self.shared.keys.has_pd(pd)
            || self.qps.values().any(|qp| qp.id.pd == pd)
            || self.shared.srqs.iter().any(|(_, srq)| srq.pd == pd)
    }

    /// Joins a multicast group.
    ///
    /// # Errors
    /// `EINVAL` if the queue pair is no datagram queue pair, if it is in the error state, or if the GID is no multicast address.
    pub(crate) fn join_group(&mut self, gid: [u8; 16], number: u32) -> Result<(), i32> {
        let is_datagram = self.qps.get(&number).is_some_and(|qp| qp.id.kind == IBV_QPT_UD && qp.state != IBV_QPS_ERR);
        if !is_datagram || !address(gid).is_multicast() {
            return Err(libc::EINVAL);
        }
        let members = self.groups.entry(gid).or_default();
        if !members.contains(&number) {
            members.push(number);
        }
        Ok(())
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// `EINVAL` if the queue pair is not a member.
    pub(crate) fn leave_group(&mut self, gid: [u8; 16], number: u32) -> Result<(), i32> {
        let members = self.groups.get_mut(&gid).ok_or(libc::EINVAL)?;
        let place = members.iter().position(|member| *member == number).ok_or(libc::EINVAL)?;
        members.remove(place);
        if members.is_empty() {
            self.groups.remove(&gid);
        }
        Ok(())
    }
}

fn next_number(number: u32) -> u32 {
    if number + 1 >= MULTICAST_QP { 16 } else { number + 1 }
}
