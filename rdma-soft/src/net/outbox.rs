//! Packets to send.

use std::net::IpAddr;

use super::backlog::Backlog;
use super::batch::{Batch, append, path};
use super::fault_queue::FaultQueue;
use super::mmsg::SendMessages;
use super::shm_senders::ShmSenders;
use super::socket::Link;
use super::{MAX_MESSAGE, Run, To};
use crate::faults::Faults;
use crate::transport::Time;
use crate::wire::{IcrcSeed, UDP_PORT};

/// Packets to send, batched to save system calls.
pub(crate) struct Outbox {
    batch: Batch,
    backlog: Backlog,
    shm_senders: ShmSenders,
    buffers: SendMessages,
    faults: Option<FaultQueue>,
    is_blocked: bool,
}

impl Outbox {
    /// Creates an empty outbox that injects `faults`.
    pub(crate) fn new(faults: Faults) -> Outbox {
        Outbox {
            batch: Batch::new(),
            backlog: Backlog::default(),
            shm_senders: ShmSenders::new(),
            buffers: SendMessages::new(),
            faults: FaultQueue::new(faults),
            is_blocked: false,
        }
    }

    /// Connects to a same-host peer before the first packet for it.
    pub(crate) fn connect(&mut self, socket: &impl Link, peer: IpAddr, now: Time) {
        self.shm_senders.connect(socket, peer, now);
    }

    /// Handles an event of the connection with this number: its peer has made room, or has closed it. The event may be of an
    /// earlier connection with this number.
    pub(crate) fn handle_ready_sender(&mut self, number: usize, now: Time) {
        self.shm_senders.handle_event(number, now);
    }

    /// Replaces the faults to inject. Packets that are held back are sent next.
    pub(crate) fn set_faults(&mut self, socket: &impl Link, faults: Faults, now: Time) {
        self.release(socket, Time(u64::MAX), now);
        self.faults = FaultQueue::new(faults);
    }

    /// Queues the packets that the fault injection held back until `until`.
    fn release(&mut self, socket: &impl Link, until: Time, now: Time) {
        let Outbox { faults: Some(faults), shm_senders, backlog, .. } = self else { return };
        faults.release(until, |to, packet| {
            if shm_senders.connect(socket, to.address, now) {
                shm_senders.queue_packet(to, &packet, now);
            } else {
                let segment = packet.len();
                backlog.push(to, packet, segment);
            }
        });
    }

    /// Adds the packets of a run. May send earlier packets, and the first of the run. CRCs are zero in shared memory unless faults
    /// are injected.
    ///
    /// The payload is copied, because peers may write to memory that is being sent, and the packet must match its CRC. The copy
    /// is cheap: the CRC and the kernel then find the data in the cache.
    ///
    /// # Safety
    /// Each part of the payload is valid for reads.
    pub(crate) unsafe fn push(&mut self, socket: &impl Link, to: To, mut run: Run<'_>, now: Time) {
        if let Some(faults) = &mut self.faults {
            let path = path(socket.address(), UDP_PORT, to.address);
            if let Some(path) = path.filter(|_| run.packet_len() <= MAX_MESSAGE) {
                let seed = IcrcSeed::new(&path);
                while !run.is_empty() {
                    let mut packet = Vec::new();
                    // SAFETY: the caller's promise.
                    unsafe { append(&mut packet, &seed, 0, &mut run) };
                    faults.push(to, packet, now);
                }
            }
            return;
        }
        if self.shm_senders.connect(socket, to.address, now) {
            // SAFETY: the caller's promise.
            unsafe { self.shm_senders.push(to, run, now) };
            return;
        }
        loop {
            let use_gso = self.uses_gso(socket);
            // SAFETY: the caller's promise.
            if unsafe { self.batch.push(socket, to, &mut run, use_gso) } {
                break;
            }
            self.flush(socket, now);
        }
    }

    /// Whether messages may have several packets.
    fn uses_gso(&self, socket: &impl Link) -> bool {
        socket.supports_gso() && !self.backlog.lacks_gso
    }

    /// Whether [`flush`](Outbox::flush) would do nothing.
    #[inline]
    pub(crate) fn is_idle(&self, now: Time) -> bool {
        self.batch.is_empty()
            && self.shm_senders.is_published()
            && self.backlog.is_empty()
            && self.shm_senders.has_no_backlog()
            && self.faults.is_none()
            && !self.shm_senders.is_idle_check_due(now)
    }

    /// Sends all packets, and closes connections to same-host peers that were not used for a while.
    ///
    /// Packets that the socket does not accept are copied and sent by the next call. A destination error drops its packets.
    pub(crate) fn flush(&mut self, socket: &impl Link, now: Time) {
        self.shm_senders.publish();
        self.release(socket, now, now);
        self.shm_senders.retry(now);
        self.shm_senders.close_idle(socket, now);
        let was_blocked = !self.backlog.send(&mut self.buffers, socket);
        if !self.batch.is_empty() {
            let use_gso = self.uses_gso(socket);
            let Outbox { batch, backlog, buffers, .. } = self;
            batch.send(buffers, socket, backlog, use_gso);
            // An error of the first message may concern only that message. Try the others once.
            if !was_blocked {
                self.backlog.send(&mut self.buffers, socket);
            }
        }
        self.is_blocked = !self.backlog.is_empty();
    }

    /// Asks same-host peers to wake the thread that waits at [`Socket::shm_fd`](super::Socket::shm_fd) for room. Returns `false` if
    /// there is room already.
    pub(crate) fn arm_wakeup(&mut self) -> bool {
        self.shm_senders.arm()
    }

    /// Wakes the same-host peers that packets were sent to since the last call, even if they have not armed their wake-up.
    pub(crate) fn kick(&mut self) {
        self.shm_senders.kick();
    }

    /// Whether packets for `to` are pending. New packets for it should wait.
    pub(crate) fn is_blocked_for(&self, to: &IpAddr) -> bool {
        self.shm_senders.has_backlog_for(to) || (self.is_blocked && !self.shares_memory_with(to))
    }

    /// Whether packets for `to` go through shared memory.
    pub(crate) fn shares_memory_with(&self, to: &IpAddr) -> bool {
        self.shm_senders.is_connected(to)
    }

    /// Number of connected same-host peers.
    #[cfg(test)]
    pub(super) fn shm_peers(&self) -> usize {
        self.shm_senders.connected()
    }

    /// Whether the UDP socket has not accepted all packets. It becomes writable when it accepts more.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Returns when to call [`flush`](Outbox::flush) again: for packets that were held back or not accepted, or to close unused
    /// connections.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        let faults = self.faults.as_ref().and_then(FaultQueue::wake_at);
        faults.into_iter().chain(self.shm_senders.wake_at()).min()
    }
}
