//! The directory of listeners on this host.
//!
//! A process that listens at a port claims a name: port space, port, and an IP address or all addresses. A client on the same
//! host looks up the device address of the process that listens there. The claimed address may be any address of the host. So
//! several processes can listen at different ports of `127.0.0.1`, although their devices have other addresses.
//!
//! # Names
//!
//! Each name is a Unix socket in the abstract namespace. It belongs to a network namespace, as ports do, and the kernel frees it
//! when its owner dies. A forked child that executes no program owns the name too, like any socket.
//!
//! | socket | name after `rdma-soft/cm/1/SPACE/PORT/` | purpose |
//! |---|---|---|
//! | `SOCK_SEQPACKET` | `ADDRESS` | answers lookups of an address |
//! | `SOCK_SEQPACKET` | `0.0.0.0` or `::` | answers lookups of all IPv4 or IPv6 addresses |
//! | `SOCK_DGRAM` | `0.0.0.0` or `::` | shows that all addresses are claimed |
//! | `SOCK_DGRAM` | `4/NUMBER` or `6/NUMBER` | shows that some address is claimed |
//!
//! # Conflicts
//!
//! Binding a name fails if it is taken, which excludes equal claims. A claim of one address also conflicts with a claim of all
//! addresses. Each claim first binds its own names and then looks for the other kind of name, so at least one of two claims sees
//! the other. If they race, both may fail. The number of a claim of one address is any free number below [`claim::SLOTS`]. A claim
//! of all addresses tries all numbers. A datagram socket can be connected to while it is bound, so looking for one has no effect on
//! its owner.
//!
//! # Lookups
//!
//! A lookup connects to the name of the address, or else to the name of all addresses. It waits for one [message](answer) with the
//! GUID and the addresses of the device. The connection ends without a message if the owner dies. Any process may bind any name, so
//! clients accept only listeners of their own user and of root, and leave out the others.

mod answer;
mod claim;
mod lookup;
mod names;
mod ports;

pub(crate) use claim::{Claim, ClaimError};
pub(crate) use lookup::{Lookup, LookupError};
pub(crate) use names::Addresses;
pub(crate) use ports::SourcePort;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::poll::Poll;
use super::presence::Process;
use super::unix::{self, AcceptError, Accepted, Reserve};
use answer::Answer;
use lookup::Pending;
use ports::Ports;

/// Maximum lookups that a listener answers in one call of [`Directory::handle_events`]. More are reported again.
const ANSWERS: usize = 64;

/// The directory, as one process sees it: its claims and its lookups.
pub(crate) struct Directory(Arc<Shared>);

/// The end of a lookup.
#[derive(Debug)]
pub(crate) struct Event {
    /// [`Lookup::number`].
    pub(crate) lookup: u64,
    /// The process that listens.
    pub(crate) result: Result<Process, LookupError>,
}

struct Shared {
    /// The listening sockets and the connections of lookups. Their tokens are the keys in [`State`].
    poll: Poll,
    state: Mutex<State>,
    /// GUID of the device of this process.
    guid: u64,
    /// Process that created this object.
    process: u32,
}

struct State {
    /// Next key.
    next: u64,
    listeners: HashMap<u64, Listener>,
    /// Keys of listeners that could not accept a connection.
    quiet: Vec<u64>,
    lookups: HashMap<u64, Pending>,
    ports: Ports,
    reserve: Reserve,
}

/// A socket that answers lookups.
struct Listener {
    socket: Arc<OwnedFd>,
    /// A connection could not be accepted. Epoll reports only new connections, so the thread that waits does not spin.
    is_quiet: bool,
}

impl Directory {
    /// Creates a directory without claims, for a process whose device has this GUID.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(crate) fn new(guid: u64) -> io::Result<Directory> {
        let mut reserve = Reserve::default();
        reserve.refill();
        let state = State {
            next: 0,
            listeners: HashMap::new(),
            quiet: Vec::new(),
            lookups: HashMap::new(),
            ports: Ports::new(),
            reserve,
        };
        let (poll, process) = (Poll::new()?, std::process::id());
        Ok(Directory(Arc::new(Shared { poll, state: Mutex::new(state), guid, process })))
    }

    /// Claims a port of a port space at these addresses, or a free port of the kernel's ephemeral range if `port` is 0.
    ///
    /// Lookups find the claim once it [listens](Claim::listen). Dropping the claim frees the port. A claim of all addresses makes
    /// a thousand system calls for each family, which takes some milliseconds.
    ///
    /// # Errors
    /// Another claim conflicts with it, in this process or in another one. [`ClaimError::errno`] has Linux's error number.
    pub(crate) fn claim(&self, space: u16, addresses: Addresses, port: u16) -> Result<Claim, ClaimError> {
        if port != 0 {
            return Claim::new(&self.0, space, addresses, port);
        }
        for _ in 0..ports::ephemeral().len() {
            let port = self.0.lock().ports.next_candidate();
            match Claim::new(&self.0, space, addresses, port) {
                Err(ClaimError::InUse | ClaimError::Overlap | ClaimError::Crowded) => {}
                result => return result,
            }
        }
        Err(ClaimError::NoFreePort)
    }

    /// Allocates a port for the local end of a connection. It takes no descriptor.
    ///
    /// The port is unique among the claims and source ports of this process at this address. Other processes may use it, too,
    /// because nothing identifies a connection by its source port. Packets go to the device address and the queue pair, messages
    /// of the connection manager go to the device address and the communication id, and each device address has one owner. A
    /// lookup of the port never finds the connection. A program that wants to listen at the port claims it instead.
    ///
    /// # Errors
    /// [`ClaimError::NoFreePort`] if all ports of the kernel's ephemeral range are allocated.
    pub(crate) fn source_port(&self, space: u16, address: IpAddr) -> Result<SourcePort, ClaimError> {
        ports::source_port(&self.0, space, Addresses::new(address, false))
    }

    /// Starts to look up who listens at a port of an address.
    ///
    /// An [`Event`] reports the result later. There is no time limit: a listener that is stopped never answers. The caller has
    /// a timer and drops the lookup, which cancels it.
    ///
    /// # Errors
    /// The result is already known. [`LookupError::Busy`] asks the caller to try again later.
    pub(crate) fn lookup(&self, space: u16, address: IpAddr, port: u16) -> Result<Lookup, LookupError> {
        Lookup::new(&self.0, space, address, port)
    }

    /// Descriptor that is readable when [`handle_events`](Directory::handle_events) has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.poll.fd()
    }

    /// Answers lookups of other processes with the addresses of this process's device, and reports results of own lookups.
    ///
    /// It never blocks and handles a limited number of events. The descriptor stays readable if there are more. `each` may start
    /// and drop lookups and claims. A lookup that another thread drops during the call may still be reported.
    pub(crate) fn handle_events(&self, own: &[IpAddr], each: &mut impl FnMut(Event)) {
        let answer = Answer::new(self.0.guid, own);
        for ready in self.0.poll.ready() {
            let mut state = self.0.lock();
            if state.listeners.contains_key(&ready.token) {
                state.serve(ready.token, &answer, &self.0.poll);
            } else if let Some(result) = state.continue_lookup(ready.token, own, &self.0.poll) {
                drop(state);
                each(Event { lookup: ready.token, result });
            }
        }
        let mut state = self.0.lock();
        for key in std::mem::take(&mut state.quiet) {
            state.serve(key, &answer, &self.0.poll);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of the state is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process was forked after the object was created. It shares sockets and the epoll set with its parent, and the
    /// lock may be held by a thread that exists only there.
    fn is_child(&self) -> bool {
        self.process != std::process::id()
    }

    /// Makes a socket answer lookups. Returns its key.
    fn add_listener(&self, socket: &Arc<OwnedFd>) -> io::Result<u64> {
        let mut state = self.lock();
        let key = state.new_key();
        unix::listen(socket.as_fd())?;
        self.poll.add(socket.as_fd(), key, libc::EPOLLIN)?;
        state.listeners.insert(key, Listener { socket: Arc::clone(socket), is_quiet: false });
        Ok(key)
    }

    fn remove_listener(&self, key: u64) {
        if let Some(listener) = self.lock().listeners.remove(&key) {
            self.poll.remove(listener.socket.as_fd());
        }
    }
}

impl State {
    fn new_key(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Closes all connections that wait at a socket, which accepts no more.
    fn refuse(&mut self, socket: BorrowedFd<'_>) {
        self.reserve.refill();
        while let Ok(Accepted::Normal(connection) | Accepted::Last(connection)) =
            unix::accept(socket, &mut self.reserve)
        {
            unix::shut_down(connection.as_fd());
            drop(connection);
            self.reserve.refill();
        }
    }

    /// Answers pending lookups at a listener.
    fn serve(&mut self, key: u64, answer: &Answer, poll: &Poll) {
        let State { listeners, reserve, quiet, .. } = self;
        let Some(listener) = listeners.get_mut(&key) else { return };
        reserve.refill();
        let mut is_exhausted = false;
        for _ in 0..ANSWERS {
            match unix::accept(listener.socket.as_fd(), reserve) {
                Ok(Accepted::Normal(connection)) => answer.send(connection.as_fd()),
                Ok(Accepted::Last(connection)) => {
                    answer.send(connection.as_fd());
                    drop(connection);
                    reserve.refill();
                }
                Err(AcceptError::Retry(_)) => break,
                Err(AcceptError::Exhausted(_)) => {
                    is_exhausted = true;
                    break;
                }
            }
        }
        if is_exhausted != listener.is_quiet {
            let events = if is_exhausted { libc::EPOLLIN | libc::EPOLLET } else { libc::EPOLLIN };
            if poll.modify(listener.socket.as_fd(), key, events).is_ok() {
                listener.is_quiet = is_exhausted;
            }
        }
        if listener.is_quiet && !quiet.contains(&key) {
            quiet.push(key);
        }
    }
}

#[cfg(test)]
pub(super) use claim::BEFORE_LOOKING;

/// Names for tests that do not follow the protocol.
#[cfg(test)]
pub(super) mod test_names {
    use std::net::IpAddr;

    use super::names::{Family, Name};
    use crate::net::sockaddr::SockAddr;

    pub(in crate::net) fn one(space: u16, port: u16, address: IpAddr) -> SockAddr {
        Name::One(address).of(space, port)
    }

    pub(in crate::net) fn all_ipv4(space: u16, port: u16) -> SockAddr {
        Name::All(Family::V4).of(space, port)
    }
}
