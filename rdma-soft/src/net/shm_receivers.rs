//! Connections of same-host peers that send packets to this process.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use super::ring::Receiver;
use super::shm::{self, Shm, Source};
use super::shm_handshake::{self, Descriptors, HandshakeError};
use super::unix::{self, Reserve};
use super::wakeup::Wakeup;
use crate::wire::Data;

/// All connections.
#[derive(Default)]
pub(super) struct ShmReceivers {
    receivers: Vec<ShmReceiver>,
    /// Number of the next connection.
    next_number: u64,
    /// Numbers of [`ShmSender`](super::shm::ShmSender) connections that epoll has reported.
    ready_senders: Vec<usize>,
    reserve: Reserve,
}

/// A connection of a peer.
pub(super) struct ShmReceiver {
    connection: OwnedFd,
    number: u64,
    /// Of the peer, after the handshake.
    incoming: Option<Incoming>,
    /// The peer has closed the connection or violated the protocol.
    is_closed: bool,
}

/// A peer's address, ring and wake-up.
struct Incoming {
    address: IpAddr,
    ring: Receiver,
    wakeup: Wakeup,
    /// The peer has raised the wake-up. Only arming and disarming clear it, because otherwise a sleeping thread could miss it.
    is_raised: bool,
    /// Whether it could not be cleared.
    is_broken: bool,
    /// Position in the ring when the wake-up was raised last, and how often in a row that was at this position.
    raised_at: (u64, u32),
}

/// A peer that raises its wake-up so often in a row without a message would keep the server thread busy.
const MOST_IN_VAIN: u32 = 1000;

impl ShmReceivers {
    /// Accepts connections, receives handshakes, and notes wake-ups, closed connections, and senders with room.
    pub(super) fn handle_events(&mut self, shm: &Shm) {
        for (source, has_ended) in shm.ready() {
            match source {
                Source::Listener => self.accept(shm),
                Source::Sender(number) => self.ready_senders.push(number),
                Source::Receiver(number) => {
                    if let Some(receiver) = self.find(number) {
                        receiver.is_closed |= receiver.handle_ready(shm).is_err() | has_ended;
                    }
                }
                Source::Wakeup(number) => {
                    if let Some(receiver) = self.find(number) {
                        receiver.is_closed |=
                            has_ended || !receiver.incoming.as_mut().is_some_and(Incoming::note_raised);
                    }
                }
            }
        }
        // Remove a closed connection only when its ring is empty.
        for at in (0..self.receivers.len()).rev() {
            if self.receivers[at].is_closed && !self.receivers[at].has_message() {
                self.remove(at, shm);
            }
        }
    }

    fn find(&mut self, number: u64) -> Option<&mut ShmReceiver> {
        self.receivers.iter_mut().find(|receiver| receiver.number == number)
    }

    /// Accepts a connection.
    fn accept(&mut self, shm: &Shm) {
        let (number, Ok(connection)) = (self.next_number, shm.accept(&mut self.reserve)) else { return };
        if shm.register(connection.as_fd(), Source::Receiver(number)).is_err() {
            return;
        }
        self.next_number += 1;
        let mut receiver = ShmReceiver { connection, number, incoming: None, is_closed: false };
        receiver.is_closed = receiver.handle_ready(shm).is_err();
        self.receivers.push(receiver);
    }

    fn remove(&mut self, at: usize, shm: &Shm) {
        // Closing is not enough, because a child process may hold the connection.
        let receiver = self.receivers.remove(at);
        shm.unregister(receiver.connection.as_fd());
        if let Some(incoming) = &receiver.incoming {
            shm.unregister(incoming.wakeup.fd());
        }
        unix::shut_down(receiver.connection.as_fd());
    }

    pub(super) fn count(&self) -> usize {
        self.receivers.len()
    }

    /// Passes the next message of a peer to `handle`, with the peer's address. The peer may write to the message meanwhile.
    pub(super) fn take<R>(&mut self, at: usize, shm: &Shm, handle: impl FnOnce(IpAddr, Data<'_>) -> R) -> Option<R> {
        let ShmReceiver { connection, incoming, .. } = self.receivers.get_mut(at)?;
        let Incoming { address, ring, .. } = incoming.as_mut()?;
        match ring.take(|message| handle(*address, message)) {
            Ok(handled) => {
                if handled.is_some() && ring.take_wakeup() {
                    // A failure is ignored: the peer is gone, or looks again soon.
                    _ = shm::send_wake_byte(connection.as_fd());
                }
                handled
            }
            // The ring is broken.
            Err(_) => {
                self.remove(at, shm);
                None
            }
        }
    }

    pub(super) fn has_ready_senders(&self) -> bool {
        !self.ready_senders.is_empty()
    }

    /// Takes the numbers of [`ShmSender`](super::shm::ShmSender) connections that epoll has reported.
    pub(super) fn take_ready_senders(&mut self) -> impl Iterator<Item = usize> + '_ {
        self.ready_senders.drain(..)
    }

    /// Whether a peer has woken this process since it was armed. Arming again clears the wake-up.
    pub(super) fn was_woken(&self) -> bool {
        let mut incoming = self.receivers.iter().filter_map(|receiver| receiver.incoming.as_ref());
        incoming.any(|incoming| incoming.ring.was_woken())
    }

    /// Asks all peers to stop waking this process.
    pub(super) fn disarm(&mut self) {
        self.receivers.iter_mut().filter_map(|receiver| receiver.incoming.as_mut()).for_each(Incoming::disarm);
    }

    /// Asks all peers to wake this process. Returns `false` if a message is already there.
    pub(super) fn arm(&mut self) -> bool {
        self.receivers.iter_mut().filter_map(|receiver| receiver.incoming.as_mut()).all(Incoming::arm)
    }
}

impl Incoming {
    fn arm(&mut self) -> bool {
        self.disarm();
        self.ring.arm()
    }

    /// Asks the peer to stop waking this process, and clears its wake-up.
    fn disarm(&mut self) {
        // A peer that raises it later causes one spurious wake-up. The next call clears that.
        if self.ring.disarm() | std::mem::take(&mut self.is_raised) {
            self.is_broken |= self.wakeup.clear().is_err();
        }
    }

    /// The peer has raised the wake-up. Returns whether that is possible for a peer that keeps the protocol.
    fn note_raised(&mut self) -> bool {
        if !std::mem::replace(&mut self.is_raised, true) {
            let (at, times) = self.raised_at;
            let position = self.ring.position();
            self.raised_at = (position, if position == at { times + 1 } else { 0 });
        }
        !self.is_broken && self.raised_at.1 < MOST_IN_VAIN
    }
}

impl ShmReceiver {
    fn has_message(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.ring.has_message())
    }

    /// Receives the handshake. Later, the peer sends nothing through the connection.
    ///
    /// # Errors
    /// The peer violates the protocol, or has another version of it.
    fn handle_ready(&mut self, shm: &Shm) -> Result<(), HandshakeError> {
        if self.incoming.is_some() {
            return Err(HandshakeError::Invalid);
        }
        let (address, Descriptors { memory, wakeup }) = match shm_handshake::receive(self.connection.as_fd()) {
            Err(HandshakeError::Pending) => return Ok(()),
            handshake => handshake?,
        };
        // A peer may only claim an address of this host.
        if !shm.is_local_now(&address) {
            return Err(HandshakeError::Invalid);
        }
        let (ring, wakeup) = (Receiver::new(memory.as_fd())?, Wakeup::from_peer(wakeup)?);
        shm.register(wakeup.fd(), Source::Wakeup(self.number))?;
        self.incoming = Some(Incoming { address, ring, wakeup, is_raised: false, is_broken: false, raised_at: (0, 0) });
        Ok(())
    }
}
