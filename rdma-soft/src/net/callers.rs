//! Peers on this host from which packets come by the shorter way.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use super::near::{self, Near};
use super::ring::Receiver;

/// Who has come.
#[derive(Default)]
pub(super) struct Callers {
    all: Vec<Caller>,
    /// Of the next.
    number: u64,
    /// Ways to peers that have ended, by number.
    ended: Vec<usize>,
}

/// A connection of a peer.
pub(super) struct Caller {
    connection: OwnedFd,
    number: u64,
    /// Of which address it is, which it says first, and what it sends.
    sends: Option<(IpAddr, Receiver)>,
    /// It has woken this end. That is taken away by who goes to sleep, and by nobody else, who would take it from a sleeper.
    has_woken: bool,
    /// It sends no more.
    has_gone: bool,
}

impl Callers {
    /// Sees who has come, who has woken this end, and who has gone.
    pub(super) fn attend(&mut self, near: &Near) {
        for ready in near.ready() {
            if let Some(lane) = ready.lane() {
                self.ended.push(lane);
                continue;
            }
            let (caller, has_ended) = match ready.number {
                near::LISTENER => (self.admit(near), false),
                number => (self.all.iter_mut().find(|caller| caller.number == number), ready.has_ended),
            };
            if let Some(caller) = caller {
                caller.has_gone |= caller.attend(near).is_err() | has_ended;
            }
        }
        // What was sent before comes first.
        for at in (0..self.all.len()).rev() {
            if self.all[at].has_gone && !self.all[at].has_some() {
                self.dismiss(at, near);
            }
        }
    }

    /// Lets a new one in.
    fn admit(&mut self, near: &Near) -> Option<&mut Caller> {
        let connection = near.accept().ok()?;
        let number = self.number;
        near.hear(connection.as_fd(), number).ok()?;
        self.number += 1;
        self.all.push(Caller { connection, number, sends: None, has_woken: false, has_gone: false });
        self.all.last_mut()
    }

    fn dismiss(&mut self, at: usize, near: &Near) {
        // A child of this process may have the connection, too: then closing does not do it.
        near.forget(self.all.remove(at).connection.as_fd());
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Copies the next message of one of them to there: who sent it, and how long it is.
    pub(super) fn take(&mut self, at: usize, near: &Near, to: &mut [u8]) -> Option<(IpAddr, usize)> {
        let (address, receiver) = self.all.get_mut(at)?.sends.as_mut()?;
        let address = *address;
        match receiver.take(to) {
            Ok(len) => len.map(|len| (address, len)),
            // It is no peer.
            Err(_) => {
                self.dismiss(at, near);
                None
            }
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The ways to peers that were seen to have ended, by number.
    pub(super) fn ended(&mut self) -> impl Iterator<Item = usize> + '_ {
        self.ended.drain(..)
    }

    /// Asks all of them not to wake this end any more.
    pub(super) fn wake_up(&mut self) {
        self.all.iter_mut().for_each(Caller::wake_up);
    }

    /// Has all of them wake this end: `false` where something has come already.
    pub(super) fn sleep(&mut self) -> bool {
        self.all.iter_mut().all(Caller::sleep)
    }
}

impl Caller {
    fn has_some(&self) -> bool {
        self.sends.as_ref().is_some_and(|(_, receiver)| receiver.has_some())
    }

    fn sleep(&mut self) -> bool {
        self.wake_up();
        self.sends.as_mut().is_none_or(|(_, receiver)| receiver.sleep())
    }

    /// Asks the peer not to wake this end any more, and reads the byte that has woken it.
    fn wake_up(&mut self) {
        let was_woken = self.sends.as_mut().is_some_and(|(_, receiver)| receiver.wake_up());
        if std::mem::take(&mut self.has_woken) {
            near::take_wakes(self.connection.as_fd());
        } else if was_woken {
            // The peer sends one byte each time it finds this end asleep. If the byte has not arrived yet, it wakes this end in
            // vain later, and is read then.
            near::take_wake(self.connection.as_fd());
        }
    }

    /// Sees to what has come by the connection.
    ///
    /// # Errors
    /// It is no peer.
    fn attend(&mut self, near: &Near) -> io::Result<()> {
        if self.sends.is_some() {
            self.has_woken = true;
            return Ok(());
        }
        let (address, memory) = match near::introduction(self.connection.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            said => said?,
        };
        // Nobody speaks for another host.
        if !near.is_near_by_now(&address) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.sends = Some((address, Receiver::new(memory.as_fd())?));
        Ok(())
    }
}
