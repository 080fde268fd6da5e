//! All that a device holds, but for its sockets: objects, who has something to send, who is to be woken, who is in which group.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::net::IpAddr;

use rdma_sys::{IBV_EVENT_QP_FATAL, IBV_QPS_ERR, IBV_QPS_RESET, IBV_QPT_UD};

use super::ack_delay::ACK_DELAY;
use super::events::Events;
use super::host::{Identity, Shared};
use super::keys::{Keys, Spread};
use super::net_address::{address, route_header};
use super::qp::Qp;
use super::slab::Slab;
use super::traffic::RECEIVED;
use crate::net::Origin;
use crate::transport::Time;
use crate::wire::{Packet, Transport};

/// The number that datagrams to groups go to.
pub(crate) const MULTICAST_QP: u32 = 0xff_ffff;

/// All that a device holds.
pub(crate) struct State {
    pub(crate) shared: Shared,
    pub(crate) qps: HashMap<u32, Box<Qp>, BuildHasherDefault<Spread>>,
    next_qp: u32,
    /// With something to send, in turn.
    pub(crate) ready: VecDeque<u32>,
    /// With something to send that waits until its way takes more. They count as ready.
    pub(crate) held: Vec<u32>,
    /// Queue pairs with a [delayed](super::ack_delay::AckDelay) ACK. Some may have sent it since.
    pub(crate) delayed: Vec<u32>,
    /// Deadline of the delayed ACKs.
    pub(crate) acks_at: Option<Time>,
    /// The earliest first. What a queue pair does not know of any more is of no meaning.
    timers: BinaryHeap<Reverse<(Time, u32)>>,
    /// Members of groups, by GID.
    pub(crate) groups: HashMap<[u8; 16], Vec<u32>>,
    /// Protection domains.
    pub(crate) pds: Slab<u32>,
}

impl State {
    pub(crate) fn new() -> Self {
        let mut keys = Keys::new();
        // So that a number that a peer knows of an earlier process means nothing in this one. Those before 16 are reserved.
        let next_qp = 16 + (keys.draw() as u32 & 0x7f_ffff);
        State {
            shared: Shared { keys, cqs: Slab::new(1), srqs: Slab::new(1), events: Events::new(), packets: 0 },
            qps: HashMap::default(),
            next_qp,
            ready: VecDeque::with_capacity(64),
            held: Vec::new(),
            delayed: Vec::new(),
            acks_at: None,
            timers: BinaryHeap::with_capacity(64),
            groups: HashMap::new(),
            pds: Slab::new(1),
        }
    }

    /// Adds a queue pair, with a number that was not used for long.
    pub(crate) fn add_qp(&mut self, mut id: Identity) -> u32 {
        while self.qps.contains_key(&self.next_qp) {
            self.next_qp = following(self.next_qp);
        }
        let number = self.next_qp;
        self.next_qp = following(number);
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
        number
    }

    /// Takes a queue pair away, with all that is left of it.
    ///
    /// # Errors
    /// `EBUSY` while it is in a group.
    pub(crate) fn remove_qp(&mut self, number: u32) -> Result<(), i32> {
        if self.groups.values().any(|members| members.contains(&number)) {
            return Err(libc::EBUSY);
        }
        let Some(qp) = self.qps.remove(&number) else { return Err(libc::EINVAL) };
        let Identity { send_cq, recv_cq, srq, context, object, .. } = qp.id;
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = self.shared.cqs.get_mut(cq) {
                cq.sweep(number);
                cq.users -= 1;
            }
        }
        if let Some(srq) = srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            srq.users -= 1;
        }
        self.shared.keys.forget_qp(number);
        self.shared.events.forget(context, object);
        Ok(())
    }

    /// It has something to send, or to settle.
    pub(crate) fn wake(&mut self, number: u32) {
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
        self.acks_at.get_or_insert(now + ACK_DELAY);
    }

    /// Lets all queue pairs with delayed ACKs send them.
    pub(crate) fn release_acks(&mut self) {
        self.acks_at = None;
        while let Some(number) = self.delayed.pop() {
            self.wake(number);
        }
    }

    /// Takes a packet that has come from there to here, and is as it was sent.
    pub(crate) fn arrived(&mut self, from: Origin, to: IpAddr, datagram: &[u8], now: Time) {
        RECEIVED.add(datagram.len());
        self.shared.packets = self.shared.packets.wrapping_add(1);
        let Ok(packet) = Packet::parse(datagram) else { return };
        let number = packet.header.dest_qp;
        if let Transport::Ud { .. } = packet.header.transport {
            let route = route_header(from, to, datagram.len());
            if let Some(qp) = self.qps.get_mut(&number).filter(|_| number != MULTICAST_QP) {
                qp.handle_datagram(&packet, &route, &mut self.shared);
            }
        } else if let Some(qp) = self.qps.get_mut(&number) {
            qp.handle(&packet, from.address, now, &mut self.shared);
            self.wake(number);
        }
    }

    /// Takes a datagram to a group, for all of its members here.
    pub(crate) fn arrived_for_group(&mut self, from: Origin, gid: &[u8; 16], to: IpAddr, datagram: &[u8]) {
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

    /// Says when to wake it, if that is earlier than was said before.
    pub(crate) fn set_timer(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(&number) else { return };
        let Some(at) = qp.wake_at() else { return };
        if qp.timer.is_none_or(|timer| at < timer) {
            qp.timer = Some(at);
            // Those of no meaning are left where they are, until they are more than the others: a peer may have them set often.
            if self.timers.len() > 64 + 4 * self.qps.len() {
                let qps = &self.qps;
                self.timers.retain(|Reverse((at, number))| qps.get(number).is_some_and(|qp| qp.timer == Some(*at)));
            }
            self.timers.push(Reverse((at, number)));
        }
    }

    /// How many there are, also of no meaning.
    #[cfg(test)]
    pub(crate) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// When to call [`State::expire`].
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        timer.into_iter().chain(self.acks_at).min()
    }

    /// Does what has become due, as [`Requester::expire`](crate::transport::Requester::expire).
    pub(crate) fn expire(&mut self, now: Time, heard: Time) {
        if self.timers.peek().is_none_or(|Reverse((at, _))| *at > now) {
            return;
        }
        let mut unheard = Vec::new();
        while let Some(Reverse((at, number))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            self.timers.pop();
            let Some(qp) = self.qps.get_mut(&number).filter(|qp| qp.timer == Some(at)) else { continue };
            qp.timer = None;
            // It may have put it off meanwhile.
            let is_due = qp.expire(now, heard, &mut self.shared);
            let is_unheard = qp.wake_at().is_some_and(|at| at <= now);
            if is_due {
                self.wake(number);
            }
            if is_unheard { unheard.push(number) } else { self.set_timer(number) }
        }
        // The answer that they wait for may have arrived unheard: they stay due until all was heard.
        unheard.into_iter().for_each(|number| self.set_timer(number));
    }

    /// Puts the queue pairs of overrun completion queues into the error state. Their peers must not get an ACK for a message
    /// whose completion was lost, so this comes before anything is sent.
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

    /// Takes away all that is in a context.
    pub(crate) fn close(&mut self, context: u32) {
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
                channel.forget(number);
                channel.users -= 1;
            }
            events.forget_overrun(number);
        }
        let of_srqs: Vec<u32> =
            srqs.iter().filter(|(_, srq)| srq.context == context).map(|(number, _)| number).collect();
        of_srqs.into_iter().for_each(|number| _ = srqs.remove(number));
        let pds: Vec<u32> = self.pds.iter().filter(|(_, of)| **of == context).map(|(number, _)| number).collect();
        for pd in pds {
            keys.forget_pd(pd);
            self.pds.remove(pd);
        }
        events.contexts.remove(context);
    }

    /// Whether anything uses a protection domain.
    pub(crate) fn uses_pd(&self, pd: u32) -> bool {
        self.shared.keys.has_pd(pd)
            || self.qps.values().any(|qp| qp.id.pd == pd)
            || self.shared.srqs.iter().any(|(_, srq)| srq.pd == pd)
    }

    /// Joins a group.
    ///
    /// # Errors
    /// `EINVAL` for what is no datagram queue pair.
    pub(crate) fn join(&mut self, gid: [u8; 16], number: u32) -> Result<(), i32> {
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

    /// Leaves it.
    ///
    /// # Errors
    /// `EINVAL` for one that is not in it.
    pub(crate) fn leave(&mut self, gid: [u8; 16], number: u32) -> Result<(), i32> {
        let members = self.groups.get_mut(&gid).ok_or(libc::EINVAL)?;
        let place = members.iter().position(|member| *member == number).ok_or(libc::EINVAL)?;
        members.remove(place);
        if members.is_empty() {
            self.groups.remove(&gid);
        }
        Ok(())
    }
}

fn following(number: u32) -> u32 {
    if number + 1 >= MULTICAST_QP { 16 } else { number + 1 }
}
