//! The locked part of the device: its sockets and its progress.

use std::net::IpAddr;

use rdma_sys::IBV_QPS_RTS;

use super::deferral::Deferral;
use super::direct::Direct;
use super::link::Link;
use super::net_address::{self, Destination};
use super::outgoing::{Loopback, PayloadParts, send_datagram, send_packets};
use super::qp::{Answers, Qp, Sending};
use super::state::State;
use crate::net::{Group, Readable};
use crate::transport::Time;
use crate::wire::Chunks;

/// Number of scans of [`Sources::Recent`] per scan that includes multicast packets.
const MULTICAST_INTERVAL: u32 = 8;

/// Packets that a queue pair may send before the next one has its turn.
const TURN: u32 = 64;

/// Maximum packets of a run. The link is checked only before the first of them.
const MAX_RUN: u32 = 16;

/// Turns that send a whole window of a queue pair, which has at most 256 packets.
const WINDOW_TURNS: u32 = 4;

/// The sockets and rings to scan for packets.
#[derive(Clone, Copy)]
pub(super) enum Sources<'a> {
    /// All sockets, and all peers on this host.
    All,
    /// Sources of recent packets, and all others from time to time. For programs that poll again soon.
    Recent,
    /// Only the readable parts of each link.
    Readable(&'a [Readable]),
}

/// The part of the device that the lock protects.
pub(crate) struct Core {
    /// Whether a packet was sent to the device itself.
    pub(super) has_sent_to_self: bool,
    /// Number of calls of [`Core::receive`].
    scans: u32,
    /// All packets that arrived before this time were received.
    received_until: Time,
    pub(crate) state: State,
    pub(crate) links: Vec<Link>,
    pub(super) direct: Direct,
    pub(super) deferral: Deferral,
    pub(super) parts: PayloadParts,
    /// Addresses of the links.
    addresses: Vec<IpAddr>,
}

impl Core {
    pub(super) fn new(links: Vec<Link>) -> Core {
        Core {
            has_sent_to_self: false,
            scans: 0,
            received_until: Time(0),
            state: State::new(),
            direct: Direct::new(links.len()),
            deferral: Deferral::new(),
            addresses: links.iter().map(|link| link.socket.address()).collect(),
            links,
            parts: PayloadParts::new(),
        }
    }

    /// Receives packets, expires timers, and sends packets. Returns whether any packet has arrived.
    pub(crate) fn progress(&mut self, now: Time) -> bool {
        let any = self.receive(now, Sources::All);
        self.send(now);
        any
    }

    /// Like [`Core::progress`], but scans only `sources`, and delays ACKs that are likely to get a reply.
    pub(super) fn progress_from(&mut self, now: Time, sources: Sources<'_>) -> bool {
        let any = self.receive(now, sources);
        self.send_now(now, true);
        any
    }

    /// Receives packets and expires timers. Returns whether any packet has arrived.
    pub(super) fn receive(&mut self, now: Time, sources: Sources<'_>) -> bool {
        /// Longest time for which unrelated packets in the sockets may delay a timer, in nanoseconds.
        const FLOOD: u64 = 100_000_000;
        let mut any = false;
        for (index, Link { socket, inbox, outbox, .. }) in self.links.iter_mut().enumerate() {
            let to = socket.address();
            let state = &mut self.state;
            let each = |from, packets: Chunks<'_>| state.handle_packets(index, from, to, packets, now);
            any |= match sources {
                Sources::All => inbox.receive(socket, each),
                Sources::Recent => inbox.poll(socket, each),
                Sources::Readable(readable) => {
                    inbox.receive_readable(socket, readable.get(index).copied().unwrap_or_default(), each)
                }
            };
            if inbox.has_ready_senders() {
                inbox.take_ready_senders().for_each(|number| outbox.handle_ready_sender(number, now));
            }
        }
        self.scans = self.scans.wrapping_add(1);
        let is_multicast_due = match sources {
            Sources::All => true,
            Sources::Recent => self.scans % MULTICAST_INTERVAL == 0,
            Sources::Readable(_) => false,
        };
        if is_multicast_due {
            any |= self.receive_multicast();
        }
        // A timer expires only if the sockets held no response at that time.
        if self.links.iter().all(|link| link.inbox.is_drained()) {
            self.received_until = now;
        }
        self.state.expire(now, self.received_until.max(Time(now.0.saturating_sub(FLOOD))));
        self.state.fail_overruns();
        if self.state.cma.is_due(now) {
            self.handle_mads(now);
        }
        any
    }

    fn receive_multicast(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.links.len() {
            let mut groups = std::mem::take(&mut self.links[at].groups);
            for (gid, group) in &mut groups {
                // Members in this process get the device's own packets when they are sent.
                let Core { state, addresses, links, .. } = self;
                any |= links[at].inbox.receive_group(group, |from, packets| {
                    if !addresses.contains(&from.address) {
                        packets.for_each(|datagram| state.handle_multicast(from, gid, group.address(), datagram));
                    }
                });
            }
            self.links[at].groups = groups;
        }
        any
    }

    /// Joins the multicast groups that have members, on one link of each interface, and leaves all others.
    pub(crate) fn update_groups(&mut self) {
        let Core { state, links, .. } = self;
        for link in &mut *links {
            link.groups.retain(|(gid, _)| state.groups.contains_key(gid));
        }
        for gid in state.groups.keys() {
            for at in 0..links.len() {
                let interface = links[at].socket.interface();
                let is_joined = links.iter().any(|link| {
                    link.socket.interface() == interface && link.groups.iter().any(|(joined, _)| joined == gid)
                });
                if is_joined {
                    continue;
                }
                // The system refuses a group of the other address family. Members in this process still reach each other.
                if let Ok(group) = Group::join(&links[at].socket, net_address::address(*gid)) {
                    links[at].groups.push((*gid, group));
                }
            }
        }
    }

    /// KiB that a connection may have in flight. All connections share the receive buffer of a socket.
    pub(crate) fn window(&self) -> u16 {
        let held = self.links.iter().map(|link| link.socket.receive_buffer()).min().unwrap_or(0);
        (held / 3 / 1024).clamp(32, 1024) as u16
    }

    /// Receives packets that the device has sent to itself.
    pub(crate) fn receive_own(&mut self, now: Time) {
        if std::mem::take(&mut self.has_sent_to_self) {
            self.progress(now);
        }
    }

    /// When to call [`Core::progress`] next even if no packet arrives.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let links = self.links.iter().filter_map(|link| link.outbox.wake_at());
        links.chain(self.state.wake_at()).chain(self.state.cma.wake_at()).min()
    }

    pub(crate) fn is_blocked(&self, link: usize) -> bool {
        self.links[link].outbox.is_blocked()
    }

    /// A bit for each link that is blocked. Links after the 63rd share the last bit.
    pub(crate) fn blocked(&self) -> u64 {
        let blocked = (0..self.links.len()).filter(|link| self.is_blocked(*link));
        blocked.fold(0, |bits, link| bits | 1 << link.min(63))
    }

    /// Tells peers on this host that their packets need not wake the server any more.
    pub(super) fn disarm_wakeups(&mut self) {
        self.links.iter_mut().for_each(|link| link.inbox.disarm_wakeup());
    }

    /// Asks peers on this host to wake the thread that waits for the sockets. Returns `false` if a packet or room is already there.
    pub(crate) fn arm_wakeups(&mut self) -> bool {
        self.links.iter_mut().all(|link| link.inbox.arm_wakeup() && link.outbox.arm_wakeup())
    }

    /// Whether a queue pair has packets to send, and its link is not blocked.
    pub(crate) fn is_busy(&self) -> bool {
        !self.state.ready.is_empty()
    }

    /// Whether the link of a queue pair is blocked for its peer.
    fn is_qp_blocked(&self, number: u32) -> bool {
        self.state.qps.get(&number).is_some_and(|qp| is_qp_blocked(qp, &self.links))
    }

    /// Notes a post with `bytes` of data, while the server is idle. Returns whether it waits until the program polls.
    pub(super) fn defer(&mut self, number: u32, bytes: u64, now: Time) -> bool {
        let Core { state, links, deferral, .. } = self;
        let Some(qp) = state.qps.get(&number).filter(|qp| qp.state == IBV_QPS_RTS) else { return false };
        let Some(Destination { link, address, .. }) = qp.peer else { return false };
        !links[link].outbox.shares_memory_with(&address) && deferral.post(number, bytes, now)
    }

    /// Gives each queue pair that has packets to send its turn.
    pub(crate) fn send(&mut self, now: Time) {
        self.send_now(now, false);
    }

    /// Like [`Core::send`]. With `may_delay`, an ACK that is likely to get a reply waits for it, for a limited time.
    pub(super) fn send_now(&mut self, now: Time, may_delay: bool) {
        let may_delay = may_delay && self.state.ack_deadline.is_none_or(|at| now < at);
        if !may_delay {
            self.state.release_acks();
        }
        // Most polls have nothing to send.
        if self.state.ready.is_empty()
            && self.state.blocked.is_empty()
            && self.links.iter().all(|link| link.outbox.is_idle(now))
        {
            self.state.fail_overruns();
            return;
        }
        for link in &mut self.links {
            link.outbox.flush(&link.socket, now);
        }
        let State { qps, blocked, ready, .. } = &mut self.state;
        blocked.retain(|number| {
            let is_blocked = qps.get(number).is_some_and(|qp| is_qp_blocked(qp, &self.links));
            if !is_blocked {
                ready.push_back(*number);
            }
            is_blocked
        });
        self.deferral.end();
        let answers = if may_delay { Answers::DelayAcks } else { Answers::Send };
        for _ in 0..self.state.ready.len() {
            let Some(number) = self.state.ready.pop_front() else { break };
            let is_left = self.turn(number, now, answers);
            let is_blocked = is_left && self.is_qp_blocked(number);
            if let Some(qp) = self.state.qps.get_mut(&number) {
                qp.is_ready = is_left;
                match (is_left, is_blocked) {
                    (true, true) => self.state.blocked.push(number),
                    (true, false) => self.state.ready.push_back(number),
                    (false, _) => {}
                }
            }
            self.state.set_timer(number);
        }
        self.state.fail_overruns();
        for link in &mut self.links {
            link.outbox.flush(&link.socket, now);
        }
    }

    /// Like [`Core::send`], with further turns for queue pairs that have a whole window to send.
    pub(super) fn send_windows(&mut self, now: Time) {
        self.send(now);
        for _ in 1..WINDOW_TURNS {
            if !self.is_busy() {
                break;
            }
            self.send(now);
        }
    }

    /// Sends packets and completes the finished work of a queue pair, even if its socket is blocked.
    pub(crate) fn update_qp_state(&mut self, number: u32, now: Time) {
        self.send_windows(now);
        if let Some(qp) = self.state.qps.get_mut(&number) {
            qp.update_state(&mut self.state.shared);
        }
        self.state.fail_overruns();
    }

    /// Sends packets of a queue pair, at most [`TURN`]. Returns whether more are left.
    fn turn(&mut self, number: u32, now: Time, answers: Answers) -> bool {
        let Core { state, links, parts, has_sent_to_self, .. } = self;
        let mut loopback = Vec::new();
        let State { qps, shared, .. } = state;
        let Some(qp) = qps.get_mut(&number) else { return false };
        let (mut is_left, mut sent) = (true, 0);
        while sent < TURN && !is_qp_blocked(qp, links) {
            match qp.transmit(now, answers, shared) {
                None => {
                    qp.update_state(shared);
                    is_left = false;
                    break;
                }
                Some(Sending::Packet(transport, first)) => {
                    *has_sent_to_self |= qp.peer.is_some_and(|peer| links[peer.link].socket.address() == peer.address);
                    let count = 1 + qp.extend_run(&first, MAX_RUN.min(TURN - sent) - 1, shared);
                    send_packets(qp, shared, links, parts, (transport, &first, count), now);
                    sent += count;
                }
                Some(Sending::Datagram(psn)) => {
                    loopback.extend(send_datagram(qp, shared, links, parts, has_sent_to_self, psn, now));
                    sent += 1;
                }
            }
        }
        if qp.ack_delay.is_waiting() {
            state.delay_ack(number, now);
        }
        for Loopback { from, group, datagram } in loopback {
            let to = net_address::address(group);
            state.handle_multicast(from, &group, to, (&datagram).into());
        }
        is_left
    }
}

/// Whether the link of a queue pair is blocked for its peer.
fn is_qp_blocked(qp: &Qp, links: &[Link]) -> bool {
    qp.destination().is_some_and(|to| links[to.link].outbox.is_blocked_for(&to.address))
}
