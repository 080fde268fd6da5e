//! The device, its lock, its sockets, and how it makes progress.

use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Instant;

use rdma_sys::{IBV_MTU_256, ibv_mtu};

use super::acknowledged::Acknowledged;
use super::direct::{Direct, Frequency};
use super::net_address;
use super::outgoing::{Looped, Parts, datagram, packet};
use super::polling::Polling;
use super::qp::{Qp, Sending, bytes};
use super::server;
use super::setup::{SetupError, addresses, is_by_udp};
use super::state::State;
use super::wakeups::Wakeups;
use crate::faults::Faults;
use crate::net::{Group, Inbox, Outbox, Readable, Socket};
use crate::transport::Time;

/// [`Look::Glance`] looks for multicast packets once in so many times.
const SELDOM: u32 = 8;

/// Packets that a queue pair may send before the next one has its turn.
const TURN: u32 = 64;

/// A device.
pub(crate) struct Device {
    core: Mutex<Core>,
    /// Acknowledged events. They have a separate lock: a thread that waits for one then queues for the device's lock.
    acknowledged: Acknowledged,
    pub(crate) server: server::Wake,
    pub(super) frequency: Frequency,
    pub(super) polling: Polling,
    /// The thread that holds it is the next to get the lock of the device.
    turn: Mutex<()>,
    /// A thread holds the turn, and waits for the lock.
    pub(super) is_wanted: AtomicBool,
    start: Instant,
}

/// The locked device. Dropping it unlocks the device and then wakes threads for the events raised meanwhile.
pub(crate) struct Locked<'a> {
    // Dropped before `wakeups`, so the device is unlocked when threads are woken.
    core: MutexGuard<'a, Core>,
    wakeups: Wakeups,
}

impl<'a> Locked<'a> {
    fn new(core: MutexGuard<'a, Core>) -> Locked<'a> {
        Locked { core, wakeups: Wakeups::default() }
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let events = &mut self.core.state.shared.events;
        if events.has_wakeups() {
            self.wakeups = events.take_wakeups();
        }
    }
}

/// Where to look for packets.
#[derive(Clone, Copy)]
pub(super) enum Look<'a> {
    /// All sockets and all peers on this host.
    Everywhere,
    /// Places where packets arrived recently, and all others now and then. For programs that poll again soon.
    Glance,
    /// Only the readable parts of each link.
    Readable(&'a [Readable]),
}

/// The part of the device that the lock protects.
pub(crate) struct Core {
    /// Something was sent to the device itself.
    is_own_peer: bool,
    /// Calls of [`Core::receive`].
    looks: u32,
    /// When the sockets were last seen empty.
    heard: Time,
    pub(crate) state: State,
    pub(crate) links: Vec<Link>,
    pub(super) direct: Direct,
    parts: Parts,
    /// The addresses of the links.
    own: Vec<IpAddr>,
}

/// An address of the device.
pub(crate) struct Link {
    pub(crate) socket: Socket,
    inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Groups that it hears, by GID.
    pub(crate) groups: Vec<([u8; 16], Group)>,
}

impl Link {
    fn new(socket: Socket, faults: Faults) -> Link {
        let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(faults));
        // Take descriptors and memory now, not with the first packet to the device itself.
        outbox.meet(&socket, socket.address(), Time(0));
        inbox.receive(&socket, |_, _| {});
        Link { socket, inbox, outbox, groups: Vec::new() }
    }

    pub(crate) fn set_faults(&mut self, faults: Faults, now: Time) {
        self.outbox.set_faults(&self.socket, faults, now);
    }
}

/// The device of this process, or the reason why there is none.
static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();

/// Returns the device of this process, and creates it the first time.
///
/// Returns `None` if it cannot be created, or belongs to the parent process. The reason is on standard error.
pub(crate) fn device() -> Option<&'static Device> {
    if server::is_child() {
        return None;
    }
    let made = DEVICE.get_or_init(|| {
        Device::new().map_err(|error| {
            let reason = error.to_string();
            eprintln!("rdma-soft: {reason}");
            reason
        })
    });
    let device = made.as_ref().ok()?;
    server::start(device);
    Some(device)
}

/// Returns the device of this process if it was created.
pub(super) fn existing() -> Option<&'static Device> {
    DEVICE.get()?.as_ref().ok()
}

/// Why the device could not be created.
pub(crate) fn setup_error() -> Option<&'static str> {
    DEVICE.get()?.as_ref().err().map(String::as_str)
}

impl Device {
    pub(super) fn new() -> Result<Device, SetupError> {
        let faults: Faults = std::env::var("RDMA_SOFT_FAULTS").unwrap_or_default().parse()?;
        let (mut links, is_by_udp) = (Vec::new(), is_by_udp()?);
        for address in addresses()? {
            let socket = Socket::open(address)?;
            links.push(Link::new(if is_by_udp { socket.far() } else { socket }, faults));
        }
        let own = links.iter().map(|link: &Link| link.socket.address()).collect();
        Ok(Device {
            core: Mutex::new(Core {
                is_own_peer: false,
                looks: 0,
                heard: Time(0),
                state: State::new(),
                direct: Direct::new(links.len()),
                links,
                parts: Parts::new(),
                own,
            }),
            acknowledged: Acknowledged::default(),
            server: server::Wake::new()?,
            frequency: Frequency::new(),
            polling: Polling::default(),
            turn: Mutex::new(()),
            is_wanted: AtomicBool::new(false),
            start: Instant::now(),
        })
    }

    /// Locks the device if no other thread has. A poisoned lock is used: only a fault of this library can panic with the lock
    /// held, and then some work may be missing.
    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        match self.core.try_lock() {
            Ok(core) => Some(Locked::new(core)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Locked::new(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Locks the device for a short time. It takes a free lock even if another thread was woken to take it, so a program that posts
    /// all the time does not wait each time.
    pub(crate) fn lock(&self) -> Locked<'_> {
        self.try_lock().unwrap_or_else(|| self.lock_in_turn())
    }

    /// Locks the device after the threads that already wait. A lock goes to a thread that is awake. So a thread that locks again
    /// and again, for long each time, would otherwise keep out the threads that have to be woken.
    pub(super) fn lock_in_turn(&self) -> Locked<'_> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_wanted.store(true, Ordering::Relaxed);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_wanted.store(false, Ordering::Relaxed);
        Locked::new(core)
    }

    pub(crate) fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// The index of an address of the device among its GIDs.
    pub(crate) fn index_of(&self, address: IpAddr) -> Option<usize> {
        self.lock().links.iter().position(|link| link.socket.address() == address)
    }

    /// The greatest MTU of all addresses of the device.
    pub(crate) fn active_mtu(&self) -> ibv_mtu {
        let most = self.lock().links.iter().map(|link| link.socket.mtu()).max().unwrap_or(1024);
        (1..=5).rev().map(ibv_mtu).find(|mtu| bytes(*mtu) <= most).unwrap_or(IBV_MTU_256)
    }

    /// Unlocks the device after a post or a poll. Wakes the server for work that the caller leaves.
    pub(crate) fn leave(&self, core: Locked<'_>) {
        // A program that polls all the time sends the rest itself. The server would compete with it for the lock.
        let is_busy = core.is_busy() && !self.server.is_idle();
        let is_left = is_busy || core.blocked() & !self.server.watched() != 0;
        let at = match is_left {
            true => Some(Time(0)),
            // While the program polls, its polls expire timers. The server checks them when the program stops.
            false if self.server.is_idle() => None,
            false => core.wake_at(),
        };
        drop(core);
        if let Some(at) = at {
            self.server.wake_before(at);
        }
    }

    /// Sends packets that wait. If another thread has locked the device, that thread sends them.
    pub(super) fn send_the_rest(&self) {
        if let Some(mut core) = self.try_lock() {
            core.send(self.now());
        }
    }

    /// Says that an event was acknowledged, with the device locked.
    pub(crate) fn acknowledge(&self) {
        self.acknowledged.add();
    }

    /// Unlocks the device, waits until an event is acknowledged, and locks the device again.
    pub(crate) fn wait_for_acknowledgement<'a>(&'a self, core: Locked<'a>) -> Locked<'a> {
        self.acknowledged.wait(|| drop(core));
        self.lock_in_turn()
    }
}

impl Core {
    /// Receives packets, expires timers, and sends packets. Returns whether any packet has arrived.
    pub(crate) fn progress(&mut self, now: Time) -> bool {
        let any = self.receive(now, Look::Everywhere);
        self.send(now);
        any
    }

    /// Like [`Core::progress`], but looks only where `look` says, and delays ACKs for which the program is likely to reply.
    pub(super) fn progress_there(&mut self, now: Time, look: Look<'_>) -> bool {
        let any = self.receive(now, look);
        self.send_now(now, true);
        any
    }

    /// Receives packets and expires timers. Returns whether any packet has arrived.
    pub(super) fn receive(&mut self, now: Time, look: Look<'_>) -> bool {
        /// Nanoseconds for which unrelated packets in the sockets may delay a timer.
        const FLOOD: u64 = 100_000_000;
        let mut any = false;
        for (index, Link { socket, inbox, outbox, .. }) in self.links.iter_mut().enumerate() {
            let to = socket.address();
            let state = &mut self.state;
            let each = |from, datagram: &[u8]| state.arrived(from, to, datagram, now);
            any |= match look {
                Look::Everywhere => inbox.receive(socket, each),
                Look::Glance => inbox.glance(socket, each),
                Look::Readable(readable) => {
                    inbox.receive_from(socket, readable.get(index).copied().unwrap_or_default(), each)
                }
            };
            if inbox.has_ended() {
                inbox.ended().for_each(|number| outbox.end(number, now));
            }
        }
        self.looks = self.looks.wrapping_add(1);
        let hears_groups = match look {
            Look::Everywhere => true,
            Look::Glance => self.looks % SELDOM == 0,
            Look::Readable(_) => false,
        };
        if hears_groups {
            any |= self.hear_groups();
        }
        // A timer expires only if the answer was not in a socket by then.
        if self.links.iter().all(|link| link.inbox.has_all()) {
            self.heard = now;
        }
        self.state.expire(now, self.heard.max(Time(now.0.saturating_sub(FLOOD))));
        self.state.fail_overruns();
        any
    }

    fn hear_groups(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.links.len() {
            let mut groups = std::mem::take(&mut self.links[at].groups);
            for (gid, group) in &mut groups {
                // Members of the group in this process get the device's own packets when they are sent.
                let Core { state, own, links, .. } = self;
                any |= links[at].inbox.receive_group(group, |from, datagram| {
                    if !own.contains(&from.address) {
                        state.arrived_for_group(from, gid, group.address(), datagram);
                    }
                });
            }
            self.links[at].groups = groups;
        }
        any
    }

    /// Joins the multicast groups that have members, on one link of each interface, and leaves all others.
    pub(crate) fn follow_groups(&mut self) {
        let Core { state, links, .. } = self;
        for link in &mut *links {
            link.groups.retain(|(gid, _)| state.groups.contains_key(gid));
        }
        for gid in state.groups.keys() {
            for at in 0..links.len() {
                let interface = links[at].socket.interface();
                let is_heard = links.iter().any(|link| {
                    link.socket.interface() == interface && link.groups.iter().any(|(heard, _)| heard == gid)
                });
                if is_heard {
                    continue;
                }
                // The system refuses a group of the other address family. Members in this process still reach each other.
                if let Ok(group) = Group::join(&links[at].socket, net_address::address(*gid)) {
                    links[at].groups.push((*gid, group));
                }
            }
        }
    }

    /// KiB that a connection may have in flight. Connections share the receive buffer of a socket.
    pub(crate) fn window(&self) -> u16 {
        let held = self.links.iter().map(|link| link.socket.receive_buffer()).min().unwrap_or(0);
        (held / 3 / 1024).clamp(32, 1024) as u16
    }

    /// Receives packets that the device has sent to itself since the last call.
    pub(crate) fn take_own(&mut self, now: Time) {
        if std::mem::take(&mut self.is_own_peer) {
            self.progress(now);
        }
    }

    /// When to call [`Core::progress`] next even if no packet arrives.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let links = self.links.iter().filter_map(|link| link.outbox.wake_at());
        links.chain(self.state.wake_at()).min()
    }

    pub(crate) fn is_blocked(&self, link: usize) -> bool {
        self.links[link].outbox.is_blocked()
    }

    /// A bit for each link that is blocked. Links after the 63rd share the last bit.
    pub(crate) fn blocked(&self) -> u64 {
        let blocked = (0..self.links.len()).filter(|link| self.is_blocked(*link));
        blocked.fold(0, |bits, link| bits | 1 << link.min(63))
    }

    /// Tells peers on this host that packets need not wake the server any more.
    pub(super) fn wake_up(&mut self) {
        self.links.iter_mut().for_each(|link| link.inbox.wake_up());
    }

    /// Asks peers on this host to wake the thread that waits for the sockets. Returns `false` if a packet has already arrived.
    pub(crate) fn sleep(&mut self) -> bool {
        self.links.iter_mut().all(|link| link.inbox.sleep())
    }

    /// Whether a queue pair has packets to send, and its link is not blocked.
    pub(crate) fn is_busy(&self) -> bool {
        !self.state.ready.is_empty()
    }

    /// Whether the link to the queue pair's peer is blocked.
    fn is_held(&self, number: u32) -> bool {
        self.state.qps.get(&number).is_some_and(|qp| is_held(qp, &self.links))
    }

    /// Gives each queue pair that has packets to send its turn.
    pub(crate) fn send(&mut self, now: Time) {
        self.send_now(now, false);
    }

    /// Like [`Core::send`]. With `may_delay`, an ACK for which a reply is likely waits for it, for a limited time.
    pub(super) fn send_now(&mut self, now: Time, may_delay: bool) {
        let may_delay = may_delay && self.state.acks_at.is_none_or(|at| now < at);
        if !may_delay {
            self.state.release_acks();
        }
        // Most polls have nothing to send.
        if self.state.ready.is_empty()
            && self.state.held.is_empty()
            && self.links.iter().all(|link| link.outbox.is_empty())
        {
            self.state.fail_overruns();
            return;
        }
        for link in &mut self.links {
            link.outbox.flush(&link.socket, now);
        }
        let State { qps, held, ready, .. } = &mut self.state;
        held.retain(|number| {
            let is_held = qps.get(number).is_some_and(|qp| is_held(qp, &self.links));
            if !is_held {
                ready.push_back(*number);
            }
            is_held
        });
        for _ in 0..self.state.ready.len() {
            let Some(number) = self.state.ready.pop_front() else { break };
            let is_left = self.turn(number, now, may_delay);
            let is_held = is_left && self.is_held(number);
            if let Some(qp) = self.state.qps.get_mut(&number) {
                qp.is_ready = is_left;
                match (is_left, is_held) {
                    (true, true) => self.state.held.push(number),
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

    /// Completes the finished work of a queue pair, even if its socket is blocked.
    pub(crate) fn settle(&mut self, number: u32, now: Time) {
        self.send(now);
        if let Some(qp) = self.state.qps.get_mut(&number) {
            qp.settle(&mut self.state.shared);
        }
        self.state.fail_overruns();
    }

    /// Sends packets of a queue pair, at most [`TURN`]. Returns whether more are left.
    fn turn(&mut self, number: u32, now: Time, may_delay: bool) -> bool {
        let Core { state, links, parts, is_own_peer, .. } = self;
        let mut looped = Vec::new();
        let State { qps, shared, .. } = state;
        let Some(qp) = qps.get_mut(&number) else { return false };
        let mut is_left = true;
        for _ in 0..TURN {
            if is_held(qp, links) {
                break;
            }
            match qp.transmit(now, may_delay, shared) {
                None => {
                    qp.settle(shared);
                    is_left = false;
                    break;
                }
                Some(Sending::Packet(transport, outgoing)) => {
                    *is_own_peer |= qp.peer.is_some_and(|peer| links[peer.link].socket.address() == peer.address);
                    packet(qp, shared, links, parts, transport, &outgoing, now);
                }
                Some(Sending::Datagram(psn)) => {
                    looped.extend(datagram(qp, shared, links, parts, is_own_peer, psn, now));
                }
            }
        }
        if qp.ack_delay.is_waiting() {
            state.delay_ack(number, now);
        }
        for Looped { from, group, datagram } in looped {
            let to = net_address::address(group);
            state.arrived_for_group(from, &group, to, &datagram);
        }
        is_left
    }
}

/// Whether the link to the queue pair's peer is blocked.
fn is_held(qp: &Qp, links: &[Link]) -> bool {
    qp.destination().is_some_and(|to| links[to.link].outbox.is_blocked_for(&to.address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn who_waits_for_the_device_has_it_before_who_takes_it_again() {
        let device = Device::new().unwrap();
        for _ in 0..100 {
            let had = AtomicBool::new(false);
            let core = device.lock();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _core = device.lock();
                    had.store(true, Ordering::SeqCst);
                });
                while !device.is_wanted.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                drop(core);
                let _core = device.lock_in_turn();
                assert!(had.load(Ordering::SeqCst));
            });
        }
    }
}
