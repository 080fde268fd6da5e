//! Claims of ports.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use super::Shared;
use super::names::{Addresses, Family, Name};
use super::ports::Reservation;
use crate::net::unix;

/// Maximum claims of one address of a family with the same port, of all processes of a host.
pub(super) const SLOTS: u16 = 1024;

/// Why a port was not claimed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    /// Another claim has the same address and port.
    #[error("another listener has the same address and port")]
    InUse,
    /// Another claim has the same port, and one of the two is of all addresses.
    #[error("another listener has the port, at all addresses or at one that this claim of all addresses includes")]
    Overlap,
    /// [`SLOTS`] addresses of the family have claims of this port.
    #[error("{SLOTS} other addresses of this host have listeners at the port")]
    Crowded,
    /// All ports of the ephemeral range are claimed.
    #[error("no ephemeral port is free (net.ipv4.ip_local_port_range)")]
    NoFreePort,
    /// A system call failed, for example because the process has no free descriptor.
    #[error("{call}: {source}")]
    System {
        /// System call.
        call: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

impl ClaimError {
    /// Error number of `rdma_bind_addr(3)` in this case, as the kernel's connection manager sets it (`cma_check_port`).
    pub(crate) fn errno(&self) -> libc::c_int {
        match self {
            ClaimError::InUse => libc::EADDRINUSE,
            ClaimError::Overlap | ClaimError::Crowded | ClaimError::NoFreePort => libc::EADDRNOTAVAIL,
            ClaimError::System { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

fn system(call: &'static str) -> impl FnOnce(io::Error) -> ClaimError {
    move |source| ClaimError::System { call, source }
}

/// A claimed port. Dropping it frees the port.
pub(crate) struct Claim {
    shared: Arc<Shared>,
    /// Keys of the listening sockets.
    listening: Vec<u64>,
    /// Sockets that show the claim to others.
    marks: Vec<OwnedFd>,
    /// Sockets that answer lookups.
    answering: Vec<Arc<OwnedFd>>,
    reservation: Reservation,
}

impl Claim {
    pub(super) fn new(shared: &Arc<Shared>, space: u16, addresses: Addresses, port: u16) -> Result<Claim, ClaimError> {
        let reservation = Reservation::new(shared, space, addresses, port)?;
        let mut claim = Claim {
            shared: Arc::clone(shared),
            listening: Vec::new(),
            marks: Vec::new(),
            answering: Vec::new(),
            reservation,
        };
        let names = Names { space, port };
        match addresses {
            Addresses::One(address) => claim.add(names.claim_one(Name::One(address), Family::of(&address))?),
            _ => {
                for family in addresses.families() {
                    claim.add(names.claim_all(*family)?);
                }
            }
        }
        Ok(claim)
    }

    fn add(&mut self, (mark, answering): (OwnedFd, OwnedFd)) {
        self.marks.push(mark);
        self.answering.push(Arc::new(answering));
    }

    /// The claimed port.
    pub(crate) fn port(&self) -> u16 {
        self.reservation.port()
    }

    /// Makes lookups find this claim. [`Directory::handle_events`](super::Directory::handle_events) answers them.
    ///
    /// # Errors
    /// The system has no memory. No lookup finds the claim, which must be dropped.
    pub(crate) fn listen(&mut self) -> io::Result<()> {
        if !self.listening.is_empty() {
            return Ok(());
        }
        let result = self.answering.iter().try_for_each(|socket| {
            self.listening.push(self.shared.add_listener(socket)?);
            Ok(())
        });
        if result.is_err() {
            self.stop();
        }
        result
    }

    /// Ends the answers. Pending lookups find nobody.
    fn stop(&mut self) {
        self.listening.drain(..).for_each(|key| self.shared.remove_listener(key));
        // Closing a socket is not enough, because a child process may hold it.
        for socket in &self.answering {
            unix::shut_down(socket.as_fd());
            self.shared.lock().refuse(socket.as_fd());
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The sockets of a child are those of its parent, which stay open.
        if !self.shared.is_child() {
            self.stop();
        }
    }
}

/// The names of a port.
#[derive(Clone, Copy)]
struct Names {
    space: u16,
    port: u16,
}

impl Names {
    /// Takes a name. `None` if it is taken.
    fn take(self, kind: libc::c_int, name: Name) -> Result<Option<OwnedFd>, ClaimError> {
        match unix::bind(kind, &name.of(self.space, self.port)) {
            Ok(socket) => Ok(Some(socket)),
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => Ok(None),
            Err(error) => Err(system("bind")(error)),
        }
    }

    /// Takes a name that only marks a claim.
    fn mark(self, name: Name) -> Result<Option<OwnedFd>, ClaimError> {
        let mark = self.take(libc::SOCK_DGRAM, name)?;
        if let Some(mark) = &mark {
            // Others can connect to it, but their messages are refused.
            // SAFETY: the arguments are numbers.
            unsafe { libc::shutdown(mark.as_raw_fd(), libc::SHUT_RD) };
        }
        Ok(mark)
    }

    /// Claims one address. Returns the mark and the socket that answers.
    fn claim_one(self, name: Name, family: Family) -> Result<(OwnedFd, OwnedFd), ClaimError> {
        let answering = self.take(libc::SOCK_SEQPACKET, name)?.ok_or(ClaimError::InUse)?;
        let mark = self.take_slot(family)?;
        if self.is_any_marked([Name::All(family)])? {
            return Err(ClaimError::Overlap);
        }
        Ok((mark, answering))
    }

    fn take_slot(self, family: Family) -> Result<OwnedFd, ClaimError> {
        // Start anywhere, so most claims find a free number at once.
        let start = crate::random::seed() as u16 % SLOTS;
        for number in (start..SLOTS).chain(0..start) {
            if let Some(mark) = self.mark(Name::Slot(family, number))? {
                return Ok(mark);
            }
        }
        Err(ClaimError::Crowded)
    }

    /// Claims all addresses of a family. Returns the mark and the socket that answers.
    fn claim_all(self, family: Family) -> Result<(OwnedFd, OwnedFd), ClaimError> {
        let mark = self.mark(Name::All(family))?.ok_or(ClaimError::Overlap)?;
        let answering = self.take(libc::SOCK_SEQPACKET, Name::All(family))?.ok_or(ClaimError::Overlap)?;
        if self.is_any_marked((0..SLOTS).map(|number| Name::Slot(family, number)))? {
            return Err(ClaimError::Overlap);
        }
        Ok((mark, answering))
    }

    /// Whether any of these names marks a claim.
    fn is_any_marked(self, names: impl IntoIterator<Item = Name>) -> Result<bool, ClaimError> {
        #[cfg(test)]
        if let Some(race) = BEFORE_LOOKING.take() {
            race();
        }
        let probe = unix::socket(libc::SOCK_DGRAM).map_err(system("socket"))?;
        for name in names {
            match unix::connect(probe.as_fd(), &name.of(self.space, self.port)) {
                Ok(()) => return Ok(true),
                Err(error) => match error.raw_os_error() {
                    Some(libc::ECONNREFUSED) => {}
                    // A security policy forbids to connect, so there is a socket.
                    Some(libc::EACCES | libc::EPERM) => return Ok(true),
                    _ => return Err(system("connect")(error)),
                },
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
thread_local! {
    /// Called once by this thread, between the time when a claim has taken its names and its search for other claims.
    pub(in crate::net) static BEFORE_LOOKING: std::cell::RefCell<Option<Box<dyn FnOnce()>>> = const {
        std::cell::RefCell::new(None)
    };
}
