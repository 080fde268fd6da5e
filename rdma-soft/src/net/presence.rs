//! Watching the processes of same-host peers.
//!
//! A process that dies sends no message. So two processes with connections to each other also connect Unix sockets, and the kernel
//! reports the end of either process at once. Only processes of one user watch each other, as with
//! [shared memory](super::shm).
//!
//! Each process listens at a name in the abstract namespace: the GUID of its device. The GUID is random and new for each process,
//! and no other process learns it before the name is bound. So no other user can bind the name first and make the process seem
//! dead, and a process that has the address of a dead one is not taken for it.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::poll::Poll;
use super::sockaddr::SockAddr;
use super::unix::{self, Accepted, Reserve};

/// Version of the names. Processes with different versions do not watch each other.
const VERSION: u8 = 2;

/// Most processes that are accepted in one call of [`Presence::handle_events`]. The device is locked meanwhile.
const ACCEPTS: usize = 16;

/// A process with a device: an address of the device, and its GUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Process {
    pub(crate) address: IpAddr,
    pub(crate) guid: u64,
}

/// The processes that this one watches, and those that watch it.
pub(crate) struct Presence {
    poll: Poll,
    listener: OwnedFd,
    /// Connections of processes that watch this one, by token.
    watchers: HashMap<u64, OwnedFd>,
    /// Connections to processes that this one watches.
    watched: HashMap<Process, (u64, OwnedFd)>,
    next: u64,
}

/// Token of the listener.
const LISTENER: u64 = 0;

/// Edge-triggered, so a connection that cannot be accepted does not make a thread spin. It stays connected.
const NEW_WATCHERS: libc::c_int = libc::EPOLLIN | libc::EPOLLET;

fn name(guid: u64) -> SockAddr {
    SockAddr::unix(&format!("presence/{VERSION}/{guid:016x}"))
}

impl Presence {
    /// Lets peers watch this process, whose device has this GUID.
    ///
    /// # Errors
    /// The system has no descriptors.
    pub(crate) fn new(guid: u64) -> io::Result<Presence> {
        let poll = Poll::new()?;
        let listener = unix::bind(libc::SOCK_SEQPACKET, &name(guid))?;
        unix::listen(listener.as_fd())?;
        poll.add(listener.as_fd(), LISTENER, NEW_WATCHERS)?;
        Ok(Presence { poll, listener, watchers: HashMap::new(), watched: HashMap::new(), next: LISTENER })
    }

    /// Descriptor that is readable when [`Presence::handle_events`] has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.fd()
    }

    /// Watches a process.
    ///
    /// # Errors
    /// `ECONNREFUSED` if it has ended, and others if it cannot be watched.
    pub(crate) fn watch(&mut self, process: Process) -> io::Result<()> {
        if self.watched.contains_key(&process) {
            return Ok(());
        }
        let token = self.new_token();
        let connect = || {
            let connection = unix::socket(libc::SOCK_SEQPACKET)?;
            unix::connect(connection.as_fd(), &name(process.guid))?;
            if unix::peer_user(connection.as_fd())? != unix::own_user() {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            self.poll.add(connection.as_fd(), token, libc::EPOLLRDHUP)?;
            io::Result::Ok(connection)
        };
        let connection = connect()?;
        self.watched.insert(process, (token, connection));
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

    /// Accepts processes that watch this one, and reports watched processes that have ended.
    ///
    /// It never blocks, and accepts a limited number. The descriptor stays readable if there are more.
    pub(crate) fn handle_events(&mut self, mut ended: impl FnMut(Process)) {
        for ready in self.poll.ready() {
            if ready.token == LISTENER {
                self.accept();
            } else if let Some(connection) = self.watchers.remove(&ready.token) {
                self.poll.remove(connection.as_fd());
            } else if ready.has_ended {
                let found = self.watched.iter().find(|(_, (token, _))| *token == ready.token);
                let Some(process) = found.map(|(process, _)| *process) else { continue };
                if let Some((_, connection)) = self.watched.remove(&process) {
                    self.poll.remove(connection.as_fd());
                }
                ended(process);
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            // Without a reserve descriptor: a connection that is closed here would look like the end of this process.
            let Ok(Accepted::Normal(connection) | Accepted::Last(connection)) =
                unix::accept(self.listener.as_fd(), &mut Reserve::default())
            else {
                return;
            };
            let is_trusted = unix::peer_user(connection.as_fd()).is_ok_and(|user| user == unix::own_user());
            let token = self.new_token();
            if is_trusted && self.poll.add(connection.as_fd(), token, libc::EPOLLRDHUP).is_ok() {
                self.watchers.insert(token, connection);
            }
        }
        // Makes the descriptor readable again if more processes wait. This fails only without memory in the kernel; then they are
        // accepted with the next one.
        _ = self.poll.modify(self.listener.as_fd(), LISTENER, NEW_WATCHERS);
    }

    fn new_token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(guid: u64) -> Process {
        Process { address: [127, 83, 10, 1].into(), guid: guid_of(guid) }
    }

    /// A GUID that no other process uses.
    fn guid_of(number: u64) -> u64 {
        u64::from(std::process::id()) << 32 | number
    }

    fn open(number: u64) -> Presence {
        Presence::new(guid_of(number)).unwrap()
    }

    fn ended(of: &mut Presence) -> Vec<Process> {
        let mut all = Vec::new();
        of.handle_events(|process| all.push(process));
        all
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_end_of_a_watched_process_is_reported_once() {
        let (mut a, mut b) = (open(1), open(2));
        assert!(a.watch(process(2)).is_ok() && a.watch(process(2)).is_ok(), "a second time changes nothing");
        assert!(ended(&mut b).is_empty());
        assert_eq!((b.watchers.len(), ended(&mut a)), (1, vec![]));
        drop(b);
        assert_eq!(ended(&mut a), [process(2)]);
        assert!(ended(&mut a).is_empty());
        assert_eq!(a.watch(process(2)).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_process_that_ends_before_it_accepts_is_reported() {
        let (mut a, b) = (open(3), open(4));
        assert!(a.watch(process(4)).is_ok());
        drop(b);
        assert_eq!(ended(&mut a), [process(4)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_process_that_is_not_watched_any_more_forgets_its_watcher() {
        let (mut a, mut b) = (open(5), open(6));
        assert!(a.watch(process(6)).is_ok());
        assert!(ended(&mut b).is_empty());
        a.unwatch_all();
        assert_eq!((ended(&mut b), b.watchers.len()), (vec![], 0));
        drop(b);
        assert!(ended(&mut a).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_call_accepts_a_limited_number_and_the_next_one_the_rest() {
        let mut watched = open(7);
        let mut others: Vec<Presence> = (0..=ACCEPTS as u64).map(|number| open(100 + number)).collect();
        others.iter_mut().for_each(|other| other.watch(process(7)).unwrap());
        assert_eq!((ended(&mut watched), watched.watchers.len()), (vec![], ACCEPTS));
        assert_eq!((ended(&mut watched), watched.watchers.len()), (vec![], ACCEPTS + 1));
    }
}
