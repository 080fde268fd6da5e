//! Connections of same-host peers that send packets to this process.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use super::ring::Receiver;
use super::shm::{self, Shm};
use super::shm_handshake::{self, HandshakeError, Passed};
use super::unix::{self, Reserve};
use super::wakeup::Wakeup;
use crate::wire::Data;

/// All connections.
#[derive(Default)]
pub(super) struct ShmReceivers {
    receivers: Vec<ShmReceiver>,
    /// Token of the next connection.
    next_token: u64,
    /// Numbers of [`ShmSender`](super::shm::ShmSender) connections that epoll has reported.
    ready_senders: Vec<usize>,
    reserve: Reserve,
}

/// A connection of a peer.
pub(super) struct ShmReceiver {
    connection: OwnedFd,
    token: u64,
    /// What the peer has passed, after the handshake.
    incoming: Option<Incoming>,
    /// The peer has closed the connection or violated the protocol.
    is_closed: bool,
}

/// What a peer has passed.
struct Incoming {
    address: IpAddr,
    ring: Receiver,
    wakeup: Wakeup,
    /// The peer has raised the wake-up. Only arming and disarming clear it, because otherwise a sleeping thread could miss it.
    is_raised: bool,
}

impl ShmReceivers {
    /// Accepts connections, receives handshakes, and notes wake-ups, closed connections, and senders with room.
    pub(super) fn handle_events(&mut self, shm: &Shm) {
        for ready in shm.ready() {
            if let Some(sender) = shm::sender_number(&ready) {
                self.ready_senders.push(sender);
                continue;
            }
            let (receiver, has_ended) = match ready.token {
                shm::LISTENER_TOKEN => (self.accept(shm), false),
                token => (self.find(token & !shm::WAKEUP_FLAG), ready.has_ended),
            };
            let Some(receiver) = receiver else { continue };
            match &mut receiver.incoming {
                Some(incoming) if ready.is_wakeup() && !has_ended => incoming.is_raised = true,
                _ => receiver.is_closed |= receiver.handle_ready(shm).is_err() | has_ended,
            }
        }
        // Remove a closed connection only when its ring is empty.
        for at in (0..self.receivers.len()).rev() {
            if self.receivers[at].is_closed && !self.receivers[at].has_message() {
                self.remove(at, shm);
            }
        }
    }

    fn find(&mut self, token: u64) -> Option<&mut ShmReceiver> {
        self.receivers.iter_mut().find(|receiver| receiver.token == token)
    }

    /// Accepts a connection.
    fn accept(&mut self, shm: &Shm) -> Option<&mut ShmReceiver> {
        let connection = shm.accept(&mut self.reserve).ok()?;
        let token = self.next_token;
        shm.register(connection.as_fd(), token).ok()?;
        self.next_token += 1;
        self.receivers.push(ShmReceiver { connection, token, incoming: None, is_closed: false });
        self.receivers.last_mut()
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
        // If the peer has not raised it yet, it causes one spurious wake-up later, and is cleared then.
        if self.ring.disarm() | std::mem::take(&mut self.is_raised) {
            self.wakeup.clear();
        }
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
        let (address, Passed { memory, wakeup }) = match shm_handshake::receive(self.connection.as_fd()) {
            Err(HandshakeError::Pending) => return Ok(()),
            handshake => handshake?,
        };
        // A peer may only claim an address of this host.
        if !shm.is_local_now(&address) {
            return Err(HandshakeError::Invalid);
        }
        let (ring, wakeup) = (Receiver::new(memory.as_fd())?, Wakeup::passed(wakeup));
        shm.register(wakeup.fd(), self.token | shm::WAKEUP_FLAG)?;
        self.incoming = Some(Incoming { address, ring, wakeup, is_raised: false });
        Ok(())
    }
}
