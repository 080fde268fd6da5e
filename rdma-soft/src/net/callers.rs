//! Peers on this host from which packets come by the shorter way.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::near::Near;

/// Who has come.
#[derive(Default)]
pub(super) struct Callers {
    all: Vec<Caller>,
    /// Of the next.
    number: u64,
}

/// A connection of a peer.
pub(super) struct Caller {
    connection: OwnedFd,
    number: u64,
    /// Which it says first.
    pub(super) address: Option<IpAddr>,
}

impl Callers {
    pub(super) fn get(&mut self, number: u64) -> Option<&mut Caller> {
        self.all.iter_mut().find(|caller| caller.number == number)
    }

    /// Lets a new one in.
    pub(super) fn admit(&mut self, near: &Near) -> Option<u64> {
        let connection = near.accept().ok()?;
        let number = self.number;
        near.watch(connection.as_fd(), number).ok()?;
        self.number += 1;
        self.all.push(Caller { connection, number, address: None });
        Some(number)
    }

    /// It has gone.
    pub(super) fn dismiss(&mut self, number: u64, near: &Near) {
        self.all.retain(|caller| {
            if caller.number == number {
                // A child of this process may have the connection, too: then closing does not do it.
                near.forget(caller.connection.as_fd());
            }
            caller.number != number
        });
    }
}

impl Caller {
    pub(super) fn fd(&self) -> libc::c_int {
        self.connection.as_raw_fd()
    }

    /// What it says first is which address it is. Whether it is one of this host.
    pub(super) fn introduce(&mut self, message: &[u8], near: &Near) -> bool {
        let said = std::str::from_utf8(message).ok().and_then(|text| text.parse().ok());
        self.address = said.filter(|address| near.is_near(address));
        self.address.is_some()
    }
}
