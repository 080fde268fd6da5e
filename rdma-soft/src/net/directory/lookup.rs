//! Lookups of listeners.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::names::{Family, Name};
use super::{Shared, State, answer};
use crate::net::poll::Poll;
use crate::net::presence::Process;
use crate::net::socket::check_neg;
use crate::net::unix;

/// Why a lookup has found no device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LookupError {
    /// No process listens at the port, or it died before it answered.
    #[error("no process listens at this address and port")]
    NobodyListens,
    /// The process that listens belongs to another user, except root.
    #[error("a process of user {uid} listens, which is neither this user nor root")]
    OtherUser {
        /// User of that process.
        uid: libc::uid_t,
    },
    /// The process that listens has a protocol that this one does not know.
    #[error("the process that listens has version {version} of the protocol, and this one has {}", answer::VERSION)]
    OtherVersion {
        /// Its version.
        version: u8,
    },
    /// Too many lookups wait for the process that listens. Try again later.
    #[error("too many lookups wait for the process that listens")]
    Busy,
    /// A system call failed, for example because the process has no free descriptor.
    #[error("{call}: {source}")]
    System {
        /// System call.
        call: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

fn system(call: &'static str) -> impl FnOnce(io::Error) -> LookupError {
    move |source| LookupError::System { call, source }
}

/// A lookup that waits for its answer. Dropping it cancels it.
pub(crate) struct Lookup {
    shared: Arc<Shared>,
    number: u64,
}

impl Lookup {
    pub(super) fn new(shared: &Arc<Shared>, space: u16, address: IpAddr, port: u16) -> Result<Lookup, LookupError> {
        // Like Linux, connect to this host if the address is unspecified.
        let address = match address.to_canonical() {
            IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            address => address,
        };
        let target = Target { space, address, port };
        let pending = target.connect(&target.names())?;
        let mut state = shared.lock();
        let number = state.new_key();
        pending.register(&shared.poll, number)?;
        state.lookups.insert(number, pending);
        Ok(Lookup { shared: Arc::clone(shared), number })
    }

    /// Number of this lookup in its [`Event`](super::Event). It is not used again.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        if self.shared.is_child() {
            return;
        }
        if let Some(pending) = self.shared.lock().lookups.remove(&self.number) {
            self.shared.poll.remove(pending.connection.as_fd());
        }
    }
}

/// A port of an address.
#[derive(Clone, Copy)]
struct Target {
    space: u16,
    address: IpAddr,
    port: u16,
}

impl Target {
    /// Names of the listeners that the lookup may find.
    fn names(self) -> [Name; 2] {
        [Name::One(self.address), Name::All(Family::of(&self.address))]
    }

    /// Connects to the first of these names that has a listener. They are the last ones of [`names`](Target::names).
    ///
    /// A listener of another user is left out, because any user can bind the name of an address below that of all addresses.
    fn connect(self, names: &[Name]) -> Result<Pending, LookupError> {
        let mut result = Err(LookupError::NobodyListens);
        for (at, name) in names.iter().enumerate() {
            let connection = unix::socket(libc::SOCK_SEQPACKET).map_err(system("socket"))?;
            match unix::connect(connection.as_fd(), &name.of(self.space, self.port)) {
                Ok(()) => {
                    let uid = unix::peer_user(connection.as_fd()).map_err(system("SO_PEERCRED"))?;
                    if answer::is_accepted(uid, unix::own_user()) {
                        return Ok(Pending { connection, target: self, left: names.len() - at - 1 });
                    }
                    result = Err(LookupError::OtherUser { uid });
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::ECONNREFUSED) => {}
                    Some(libc::EAGAIN) => return Err(LookupError::Busy),
                    _ => return Err(system("connect")(error)),
                },
            }
        }
        result
    }
}

/// A lookup that is connected to a listener.
pub(super) struct Pending {
    connection: OwnedFd,
    target: Target,
    /// Names that are left to try if the listener does not answer.
    left: usize,
}

impl Pending {
    fn register(&self, poll: &Poll, number: u64) -> Result<(), LookupError> {
        poll.add(self.connection.as_fd(), number, libc::EPOLLIN | libc::EPOLLRDHUP).map_err(system("epoll_ctl"))
    }

    /// Receives the answer. `None` if it has not arrived.
    fn receive(&self, own: &[IpAddr]) -> Option<Result<Process, LookupError>> {
        let mut bytes = [0; answer::MAX_BYTES];
        match receive(self.connection.as_fd(), &mut bytes) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
            // The listener has closed the connection, or died.
            Err(_) | Ok(0) => Some(Err(LookupError::NobodyListens)),
            Ok(len) => Some(answer::decode(&bytes[..len]).and_then(|(guid, addresses)| {
                let address = answer::select(&addresses, self.target.address, own).ok_or(LookupError::NobodyListens)?;
                Ok(Process { address, guid })
            })),
        }
    }
}

fn receive(connection: BorrowedFd<'_>, to: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the pointer and the length describe the buffer. The call has no room for descriptors, so the kernel discards any
    // that arrive.
    let len = unsafe { libc::recv(connection.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), 0) };
    check_neg(len as libc::c_int)
}

impl State {
    /// Handles an event of a lookup. Returns the result if the lookup has ended.
    pub(super) fn continue_lookup(
        &mut self,
        number: u64,
        own: &[IpAddr],
        poll: &Poll,
    ) -> Option<Result<Process, LookupError>> {
        let result = self.lookups.get(&number)?.receive(own)?;
        let ended = self.lookups.remove(&number)?;
        poll.remove(ended.connection.as_fd());
        let Pending { connection, target, left } = ended;
        drop(connection);
        if left == 0 || !matches!(result, Err(LookupError::NobodyListens)) {
            return Some(result);
        }
        let names = target.names();
        let next =
            target.connect(&names[names.len() - left..]).and_then(|next| next.register(poll, number).map(|()| next));
        match next {
            Ok(next) => {
                self.lookups.insert(number, next);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}
