//! Watching the processes of same-host peers.
//!
//! A process that dies sends no message. So two processes with connections to each other also connect Unix sockets, and the kernel
//! reports the end of either process at once. Each process listens at a name in the abstract namespace for every address of its
//! device. Only processes of one user watch each other, as with [shared memory](super::shm).

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::poll::Poll;
use super::sockaddr::SockAddr;
use super::unix::{self, Accepted, Reserve};

/// Version of the names. Processes with different versions do not watch each other.
const VERSION: u8 = 1;

/// The processes that this one watches, and those that watch it.
pub(crate) struct Presence {
    poll: Poll,
    listeners: Vec<OwnedFd>,
    /// Connections of processes that watch this one, by token.
    watchers: HashMap<u64, OwnedFd>,
    /// Connections to processes that this one watches, by the address of their device.
    watched: HashMap<IpAddr, (u64, OwnedFd)>,
    next: u64,
}

/// Tokens below this are indices of listeners.
const FIRST_TOKEN: u64 = 1 << 32;

fn name(address: IpAddr) -> SockAddr {
    SockAddr::unix(&format!("presence/{VERSION}/{address}"))
}

impl Presence {
    /// Lets peers watch this process, whose device has these addresses.
    ///
    /// # Errors
    /// The system has no descriptors, or another process has a name.
    pub(crate) fn new(addresses: impl Iterator<Item = IpAddr>) -> io::Result<Presence> {
        let (poll, mut listeners) = (Poll::new()?, Vec::new());
        for address in addresses {
            let listener = unix::bind(libc::SOCK_SEQPACKET, &name(address))?;
            unix::listen(listener.as_fd())?;
            // Edge-triggered, so a connection that cannot be accepted does not make a thread spin. It stays connected.
            poll.add(listener.as_fd(), listeners.len() as u64, libc::EPOLLIN | libc::EPOLLET)?;
            listeners.push(listener);
        }
        Ok(Presence { poll, listeners, watchers: HashMap::new(), watched: HashMap::new(), next: FIRST_TOKEN })
    }

    /// Descriptor that is readable when [`Presence::handle_events`] has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.fd()
    }

    /// Watches the process whose device has an address.
    ///
    /// # Errors
    /// `ECONNREFUSED` if there is no such process, and others if it cannot be watched.
    pub(crate) fn watch(&mut self, address: IpAddr) -> io::Result<()> {
        if self.watched.contains_key(&address) {
            return Ok(());
        }
        let token = self.new_token();
        let connect = || {
            let connection = unix::socket(libc::SOCK_SEQPACKET)?;
            unix::connect(connection.as_fd(), &name(address))?;
            if unix::peer_user(connection.as_fd())? != unix::own_user() {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            self.poll.add(connection.as_fd(), token, libc::EPOLLRDHUP)?;
            io::Result::Ok(connection)
        };
        let connection = connect()?;
        self.watched.insert(address, (token, connection));
        Ok(())
    }

    /// Stops watching other processes.
    pub(crate) fn unwatch_all(&mut self) {
        for (_, (_, connection)) in self.watched.drain() {
            // Closing it is not enough, because a child process may hold it.
            self.poll.remove(connection.as_fd());
            unix::shut_down(connection.as_fd());
        }
    }

    /// Accepts processes that watch this one, and reports the addresses of watched processes that have ended. Never blocks.
    pub(crate) fn handle_events(&mut self, mut ended: impl FnMut(IpAddr)) {
        for ready in self.poll.ready() {
            if ready.token < FIRST_TOKEN {
                self.accept(ready.token as usize);
            } else if let Some(connection) = self.watchers.remove(&ready.token) {
                self.poll.remove(connection.as_fd());
            } else if ready.has_ended {
                let of = self.watched.iter().find(|(_, (token, _))| *token == ready.token);
                let Some(address) = of.map(|(address, _)| *address) else { continue };
                if let Some((_, connection)) = self.watched.remove(&address) {
                    self.poll.remove(connection.as_fd());
                }
                ended(address);
            }
        }
    }

    fn accept(&mut self, index: usize) {
        // Without a reserve descriptor: a connection that is closed here would look like the end of this process.
        while let Some(Ok(Accepted::Normal(connection) | Accepted::Last(connection))) =
            self.listeners.get(index).map(|listener| unix::accept(listener.as_fd(), &mut Reserve::default()))
        {
            let is_trusted = unix::peer_user(connection.as_fd()).is_ok_and(|user| user == unix::own_user());
            let token = self.new_token();
            if is_trusted && self.poll.add(connection.as_fd(), token, libc::EPOLLRDHUP).is_ok() {
                self.watchers.insert(token, connection);
            }
        }
    }

    fn new_token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [127, 83, 10, last].into()
    }

    fn open(last: u8) -> Presence {
        Presence::new(std::iter::once(address(last))).unwrap()
    }

    fn ended(of: &mut Presence) -> Vec<IpAddr> {
        let mut all = Vec::new();
        of.handle_events(|address| all.push(address));
        all
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_end_of_a_watched_process_is_reported_once() {
        let (mut a, mut b) = (open(1), open(2));
        assert!(a.watch(address(2)).is_ok() && a.watch(address(2)).is_ok(), "a second time changes nothing");
        assert!(ended(&mut b).is_empty());
        assert_eq!((b.watchers.len(), ended(&mut a)), (1, vec![]));
        drop(b);
        assert_eq!(ended(&mut a), [address(2)]);
        assert!(ended(&mut a).is_empty());
        assert_eq!(a.watch(address(2)).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_process_that_ends_before_it_accepts_is_reported() {
        let (mut a, b) = (open(3), open(4));
        assert!(a.watch(address(4)).is_ok());
        drop(b);
        assert_eq!(ended(&mut a), [address(4)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_process_that_is_not_watched_any_more_forgets_its_watcher() {
        let (mut a, mut b) = (open(5), open(6));
        assert!(a.watch(address(6)).is_ok());
        assert!(ended(&mut b).is_empty());
        a.unwatch_all();
        assert_eq!((ended(&mut b), b.watchers.len()), (vec![], 0));
        drop(b);
        assert!(ended(&mut a).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn an_address_is_used_by_a_single_process() {
        let _a = open(7);
        assert!(Presence::new(std::iter::once(address(7))).is_err());
    }
}
