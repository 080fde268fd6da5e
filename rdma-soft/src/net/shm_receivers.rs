//! Connections of same-host peers that send packets to this process.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use super::ring::Receiver;
use super::shm::{self, Shm};
use super::shm_handshake::{self, HandshakeError};
use super::unix::{self, Reserve};
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
    /// Address of the peer and its ring, after the handshake.
    incoming: Option<(IpAddr, Receiver)>,
    /// The peer may have sent wake bytes. Only arming and disarming read them, because another reader could take the wake-up of
    /// a sleeping thread.
    has_wake_byte: bool,
    /// The peer has closed the connection or violated the protocol.
    is_closed: bool,
}

impl ShmReceivers {
    /// Accepts connections, receives handshakes, and notes wake bytes, closed connections, and senders with room.
    pub(super) fn handle_events(&mut self, shm: &Shm) {
        for ready in shm.ready() {
            if let Some(sender) = shm::sender_number(&ready) {
                self.ready_senders.push(sender);
                continue;
            }
            let (receiver, has_ended) = match ready.token {
                shm::LISTENER_TOKEN => (self.accept(shm), false),
                token => (self.receivers.iter_mut().find(|receiver| receiver.token == token), ready.has_ended),
            };
            if let Some(receiver) = receiver {
                receiver.is_closed |= receiver.handle_ready(shm).is_err() | has_ended;
            }
        }
        // Remove a closed connection only when its ring is empty.
        for at in (0..self.receivers.len()).rev() {
            if self.receivers[at].is_closed && !self.receivers[at].has_message() {
                self.remove(at, shm);
            }
        }
    }

    /// Accepts a connection.
    fn accept(&mut self, shm: &Shm) -> Option<&mut ShmReceiver> {
        let connection = shm.accept(&mut self.reserve).ok()?;
        let token = self.next_token;
        shm.register(connection.as_fd(), token).ok()?;
        self.next_token += 1;
        self.receivers.push(ShmReceiver { connection, token, incoming: None, has_wake_byte: false, is_closed: false });
        self.receivers.last_mut()
    }

    fn remove(&mut self, at: usize, shm: &Shm) {
        // Closing is not enough, because a child process may hold the connection.
        let receiver = self.receivers.remove(at);
        shm.unregister(receiver.connection.as_fd());
        unix::shut_down(receiver.connection.as_fd());
    }

    pub(super) fn count(&self) -> usize {
        self.receivers.len()
    }

    /// Passes the next message of a peer to `handle`, with the peer's address. The peer may write to the message meanwhile.
    pub(super) fn take<R>(&mut self, at: usize, shm: &Shm, handle: impl FnOnce(IpAddr, Data<'_>) -> R) -> Option<R> {
        let ShmReceiver { connection, incoming, .. } = self.receivers.get_mut(at)?;
        let (address, receiver) = incoming.as_mut()?;
        let address = *address;
        match receiver.take(|message| handle(address, message)) {
            Ok(handled) => {
                if handled.is_some() && receiver.take_wakeup() {
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

    /// Whether a peer has woken this process since it was armed. Arming again reads its wake byte.
    pub(super) fn was_woken(&self) -> bool {
        let mut incoming = self.receivers.iter().filter_map(|receiver| receiver.incoming.as_ref());
        incoming.any(|(_, receiver)| receiver.was_woken())
    }

    /// Asks all peers to stop waking this process.
    pub(super) fn disarm(&mut self) {
        self.receivers.iter_mut().for_each(ShmReceiver::disarm);
    }

    /// Asks all peers to wake this process. Returns `false` if a message is already there.
    pub(super) fn arm(&mut self) -> bool {
        self.receivers.iter_mut().all(ShmReceiver::arm)
    }
}

impl ShmReceiver {
    fn has_message(&self) -> bool {
        self.incoming.as_ref().is_some_and(|(_, receiver)| receiver.has_message())
    }

    fn arm(&mut self) -> bool {
        self.disarm();
        self.incoming.as_mut().is_none_or(|(_, receiver)| receiver.arm())
    }

    /// Asks the peer to stop waking this process, and reads its wake byte.
    fn disarm(&mut self) {
        let was_woken = self.incoming.as_mut().is_some_and(|(_, receiver)| receiver.disarm());
        let has_byte = std::mem::take(&mut self.has_wake_byte);
        if was_woken {
            // The peer sends one byte for each time this side has armed. If the byte has not arrived yet, it causes one
            // spurious wake-up later, and is read then.
            shm::read_wake_byte(self.connection.as_fd());
        } else if has_byte {
            shm::drain_wake_bytes(self.connection.as_fd());
        }
    }

    /// Handles an event on the connection: the handshake, or later a wake byte.
    ///
    /// # Errors
    /// The peer violates the protocol, or has another version of it.
    fn handle_ready(&mut self, shm: &Shm) -> Result<(), HandshakeError> {
        if self.incoming.is_some() {
            self.has_wake_byte = true;
            return Ok(());
        }
        let (address, memory) = match shm_handshake::receive(self.connection.as_fd()) {
            Err(HandshakeError::Pending) => return Ok(()),
            handshake => handshake?,
        };
        // A peer may only claim an address of this host.
        if !shm.is_local_now(&address) {
            return Err(HandshakeError::Invalid);
        }
        self.incoming = Some((address, Receiver::new(memory.as_fd())?));
        Ok(())
    }
}
