//! The TCP connection by which client and server agree: frames of JSON, each after its length in four bytes.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rdma_safe::{QueuePairAddress, RemoteMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::rdmacm::Meeting;
use crate::report::{Bandwidth, CpuUse, Host};
use crate::run::Interrupted;

/// Changes with the messages. Both ends have to have the same.
pub(crate) const PROTOCOL: u32 = 4;

/// Longest frame: thousands of queue pairs fit.
const MAX_FRAME: usize = 16 << 20;
/// How long a frame may take to arrive whole once it has begun, and to be sent.
const FRAME_LIMIT: Duration = Duration::from_secs(30);
/// How long finding a host's addresses, and trying all but one of them, may take.
const RESOLVE_LIMIT: Duration = Duration::from_secs(50);

/// What the client says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first: what is to be done.
    Hello { protocol: u32, version: String, plan: Box<Plan>, host: Box<Host> },
    /// The client's queue pairs: those of the server are to be connected to them.
    Connect { workers: Vec<WorkerAddress> },
    /// A run begins: which of the plan's sizes.
    Prepare { size: usize },
    /// All messages of the run were posted and have completed: how many each queue pair of each worker sent.
    Finished { sent: Vec<Vec<u64>> },
    /// The client gives up.
    Failed { reason: String },
    /// The end.
    Bye,
}

/// What the server answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// To `Hello`: the server's queue pairs, and where they are connected to, if that is by address.
    Accepted { host: Box<Host>, workers: Vec<WorkerAddress>, meeting: Option<Meeting> },
    /// To `Connect`.
    Connected,
    /// To `Prepare`.
    Prepared,
    /// To `Finished`.
    Done { sent: Vec<Vec<u64>>, reverse: Option<Bandwidth>, validated: u64, cpu: Option<CpuUse> },
    /// The server cannot go on, at any time.
    Failed { reason: String },
}

/// What a worker's peer has to know of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerAddress {
    pub(crate) queue_pairs: Vec<LaneAddress>,
    /// See [`CreditLine`](crate::credit::CreditLine).
    pub(crate) credits: Option<QueuePairAddress>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LaneAddress {
    pub(crate) queue_pair: QueuePairAddress,
    /// Memory for writes, reads and atomics of the peer.
    pub(crate) target: RemoteMemory,
}

/// One end of the control connection.
#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    /// Ends waits for answers to what was asked.
    interrupt: Option<Arc<Interrupt>>,
}

impl Control {
    /// Connects to a server, from the calling thread: in a process that has ever had two threads, the C library takes longer over
    /// each system call, which a comparison with one that has not would show. `interrupt` ends later waits for answers.
    pub(crate) fn connect_alone(host: &str, port: u16, limit: Duration, interrupt: &Arc<Interrupt>) -> Result<Self> {
        let mut control = Control::new(open(host, port, limit)?)?;
        control.interrupt = Some(interrupt.clone());
        interrupt.check()?;
        Ok(control)
    }

    /// Connects to a server; `interrupt` ends this and later waits for answers.
    pub(crate) fn connect(host: &str, port: u16, limit: Duration, interrupt: Option<&Arc<Interrupt>>) -> Result<Self> {
        let (sender, receiver) = channel();
        let (over, ends) = UnixStream::pair()?;
        let name = host.to_owned();
        // Name servers are asked by a call that cannot be interrupted.
        let thread = std::thread::Builder::new().name("connect".into()).spawn(move || {
            // Whoever has given up does not listen.
            let _ = sender.send(open(&name, port, limit));
            drop(ends);
        })?;
        if !readable(over.as_fd(), interrupt, Instant::now() + limit + RESOLVE_LIMIT)? {
            bail!(
                "cannot reach `{host}` within {} s; is it the name of the server?",
                (limit + RESOLVE_LIMIT).as_secs()
            );
        }
        let stream = receiver.recv().context("the thread that connects has ended")?;
        let _ = thread.join();
        let mut control = Control::new(stream?)?;
        control.interrupt = interrupt.cloned();
        Ok(control)
    }

    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(FRAME_LIMIT))?;
        // A peer whose host is gone says nothing: without these probes a wait for it would never end.
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(5))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(2))?;
        sockopt::set_tcp_keepcnt(&stream, 5)?;
        Ok(Control { stream, interrupt: None })
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let body = serde_json::to_vec(message)?;
        let mut frame = Vec::with_capacity(4 + body.len());
        frame.extend(u32::try_from(body.len())?.to_le_bytes());
        frame.extend(body);
        self.stream.write_all(&frame).context("the peer has closed the control connection")
    }

    /// The next message. Without `limit` it waits for as long as the peer's host answers the probes of TCP: a test may
    /// take any time.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, limit: Option<Duration>) -> Result<T> {
        let mut len = [0; 4];
        self.read(&mut len[..1], limit)?;
        self.read(&mut len[1..], Some(FRAME_LIMIT))?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_FRAME {
            bail!("the peer does not speak the protocol of rdma-perf: a message of {len} bytes");
        }
        let mut body = vec![0; len];
        self.read(&mut body, Some(FRAME_LIMIT))?;
        serde_json::from_slice(&body).context("the peer speaks another version of rdma-perf, or is none")
    }

    fn read(&mut self, buffer: &mut [u8], limit: Option<Duration>) -> Result<()> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut done = 0;
        while done < buffer.len() {
            // Of what is left, so that a peer that sends byte by byte does not begin it anew.
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(left) = left.map_or(Some(None), |left| (!left.is_zero()).then_some(Some(left))) else {
                bail!("the peer says nothing for {} s", limit.unwrap_or_default().as_secs());
            };
            self.stream.set_read_timeout(left)?;
            match self.stream.read(&mut buffer[done..]) {
                Ok(0) => bail!("the peer has closed the control connection: it was ended, or says why it gave up"),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) => return Err(error).context("the control connection broke; the peer or its host is gone"),
            }
        }
        Ok(())
    }

    /// Asks the server and waits for its answer, or for Ctrl-C; what the server failed with is the error.
    pub(crate) fn ask(&mut self, request: &Request, limit: Duration) -> Result<Reply> {
        self.send(request)?;
        self.answer(limit)
    }

    /// Waits for the answer to what was asked last, as [`Control::ask`] does.
    pub(crate) fn answer(&mut self, limit: Duration) -> Result<Reply> {
        if !readable(self.stream.as_fd(), self.interrupt.as_ref(), Instant::now() + limit)? {
            bail!("the peer says nothing for {} s", limit.as_secs());
        }
        self.reply(limit)
    }

    /// Whether the peer has said something, or is gone.
    pub(crate) fn has_news(&self) -> Result<bool> {
        readable(self.stream.as_fd(), None, Instant::now())
    }

    /// The address by which the peer has reached this host.
    pub(crate) fn own_address(&self) -> Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip().to_canonical())
    }

    pub(crate) fn reply(&mut self, limit: Duration) -> Result<Reply> {
        match self.receive(Some(limit))? {
            Reply::Failed { reason } => bail!("the server: {reason}"),
            reply => Ok(reply),
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A connection to the first address that answers.
fn open(host: &str, port: u16, limit: Duration) -> Result<TcpStream> {
    let addresses = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve the host `{host}`; give a name or an IP address of the server"))?;
    let mut last = None;
    for address in addresses {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some((address, error)),
        }
    }
    match last {
        Some((address, error)) => Err(error).with_context(|| {
            format!("cannot reach {address} by TCP; run `rdma-perf server` on {host}, with the same --port")
        }),
        None => bail!("the host `{host}` has no address"),
    }
}

/// Waits until there is something to read or the deadline is over, whichever it is, or fails at Ctrl-C.
fn readable(fd: BorrowedFd<'_>, interrupt: Option<&Arc<Interrupt>>, deadline: Instant) -> Result<bool> {
    interrupt.map_or(Ok(()), |interrupt| interrupt.check())?;
    loop {
        let timeout = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
        let mut fds = vec![PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        fds.extend(interrupt.map(|interrupt| PollFd::from_borrowed_fd(interrupt.as_fd(), PollFlags::IN)));
        let count = match poll(&mut fds, Some(&timeout)) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno).context("poll(2) failed"),
        };
        if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
            return Err(Interrupted.into());
        }
        return Ok(count > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let ours = Control::connect("127.0.0.1", port, Duration::from_secs(5), None).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (mut ours, theirs) = pair();
        let mut theirs = Control::new(theirs).unwrap();
        theirs.send(&Request::Finished { sent: vec![vec![1, 2]] }).unwrap();
        theirs.send(&Request::Bye).unwrap();
        assert!(matches!(ours.receive(None).unwrap(), Request::Finished { sent } if sent == [[1, 2]]));
        assert!(matches!(ours.receive(None).unwrap(), Request::Bye));
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let (mut ours, _theirs) = pair();
        let error = ours.receive::<Request>(Some(Duration::from_millis(50))).unwrap_err();
        assert!(error.to_string().contains("says nothing"), "{error}");
    }

    #[test]
    fn a_peer_that_is_gone_or_speaks_otherwise_is_an_error() {
        let (mut ours, theirs) = pair();
        drop(theirs);
        assert!(ours.receive::<Request>(None).unwrap_err().to_string().contains("closed"));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(ours.receive::<Request>(None).unwrap_err().to_string().contains("does not speak"));
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"\x02\0\0\0{}").unwrap();
        assert!(ours.receive::<Request>(None).unwrap_err().to_string().contains("another version"));
    }

    #[test]
    fn the_servers_failure_is_the_clients_error() {
        let (mut ours, theirs) = pair();
        Control::new(theirs).unwrap().send(&Reply::Failed { reason: "no device".into() }).unwrap();
        let error = ours.reply(Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.to_string(), "the server: no device");
    }

    #[test]
    fn nobody_listening_is_an_error_that_says_what_to_do() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = Control::connect("127.0.0.1", port, Duration::from_secs(5), None).unwrap_err();
        assert!(error.to_string().contains("run `rdma-perf server`"), "{error}");
    }

    #[test]
    fn ctrl_c_ends_the_wait_for_an_answer_and_for_a_connection() {
        let interrupt = Interrupt::of_test();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connect = || Control::connect("127.0.0.1", port, Duration::from_secs(5), Some(&interrupt));
        let mut ours = connect().unwrap();
        let presser = Arc::clone(&interrupt);
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            presser.press();
        });
        let error = ours.ask(&Request::Bye, Duration::from_secs(60)).unwrap_err();
        assert!(error.is::<Interrupted>() && interrupt.check().is_err(), "{error}");
        thread.join().unwrap();
        assert!(connect().unwrap_err().is::<Interrupted>());
        let early = Interrupt::of_test();
        early.press_early();
        let connect = Control::connect("127.0.0.1", port, Duration::from_secs(5), Some(&early));
        assert!(connect.unwrap_err().is::<Interrupted>());
    }
}
