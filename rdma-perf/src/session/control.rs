//! The control connection between client and server: JSON messages over TCP, each after its length in four bytes.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cpu::CpuUse;
use crate::endpoint::cm::CmAddress;
use crate::endpoint::worker::WorkerAddress;
use crate::interrupt::{Interrupt, Interrupted};
use crate::plan::Plan;
use crate::report::Host;
use crate::stats::Bandwidth;

/// Protocol version, which must be the same at both ends.
pub(crate) const PROTOCOL: u32 = 4;

/// Longest frame, enough for thousands of queue pairs.
const MAX_FRAME: usize = 16 << 20;
/// Longest time to send a frame, and to receive the rest of one.
const FRAME_LIMIT: Duration = Duration::from_secs(30);
/// Longest time to resolve a host's name and try all but one of its addresses.
const RESOLVE_LIMIT: Duration = Duration::from_secs(50);

/// A message of the client.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first message: the test to run.
    Hello { protocol: u32, version: String, plan: Box<Plan>, host: Box<Host> },
    /// The client's queue pairs, for the server to connect to.
    Connect { workers: Vec<WorkerAddress> },
    /// Starts the run of size number `size` of the plan.
    Prepare { size: usize },
    /// All messages of the run have completed. `sent` is their number per worker and queue pair.
    Finished { sent: Vec<Vec<u64>> },
    /// The client has failed.
    Failed { reason: String },
    /// The client is done.
    Bye,
}

/// A message of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Reply to `Hello`: the server's queue pairs, and its address for `--rdma-cm`.
    Accepted {
        host: Box<Host>,
        workers: Vec<WorkerAddress>,
        #[serde(rename = "meeting")]
        cm_address: Option<CmAddress>,
    },
    /// Reply to `Connect`.
    Connected,
    /// Reply to `Prepare`.
    Prepared,
    /// Reply to `Finished`.
    Done { sent: Vec<Vec<u64>>, reverse: Option<Bandwidth>, validated: u64, cpu: Option<CpuUse> },
    /// The server has failed, at any time.
    Failed { reason: String },
}

/// One end of the control connection.
#[derive(Debug)]
pub(crate) struct Control {
    stream: TcpStream,
    /// Ends waits for replies.
    interrupt: Option<Arc<Interrupt>>,
}

impl Control {
    /// Connects to a server without starting a thread. In a process that has ever had two threads, the C library takes
    /// longer for each system call, which would distort a comparison with perftest. `interrupt` can end each wait for a
    /// reply.
    pub(crate) fn connect_single_threaded(
        host: &str,
        port: u16,
        limit: Duration,
        interrupt: &Arc<Interrupt>,
    ) -> Result<Self> {
        let mut control = Control::new(open(host, port, limit)?)?;
        control.interrupt = Some(interrupt.clone());
        interrupt.check()?;
        Ok(control)
    }

    /// Connects to a server. `interrupt` ends this and later waits for replies.
    pub(crate) fn connect(host: &str, port: u16, limit: Duration, interrupt: Option<&Arc<Interrupt>>) -> Result<Self> {
        let (sender, receiver) = channel();
        let (over, ends) = UnixStream::pair()?;
        let name = host.to_owned();
        // Name resolution cannot be interrupted, so it runs in a separate thread.
        let thread = std::thread::Builder::new().name("connect".into()).spawn(move || {
            // The receiver is gone if the caller has given up.
            let _ = sender.send(open(&name, port, limit));
            drop(ends);
        })?;
        if !wait_readable(over.as_fd(), interrupt, Instant::now() + limit + RESOLVE_LIMIT)? {
            bail!(
                "cannot reach `{host}` within {} s; is this the name of the server?",
                (limit + RESOLVE_LIMIT).as_secs()
            );
        }
        let stream = receiver.recv().context("the connecting thread has ended")?;
        let _ = thread.join();
        let mut control = Control::new(stream?)?;
        control.interrupt = interrupt.cloned();
        Ok(control)
    }

    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(FRAME_LIMIT))?;
        // Without keepalive probes, a wait for a peer whose host is gone would never end.
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

    /// Receives the next message. Without `limit` it waits as long as the peer's host answers keepalive probes, because
    /// a test may take any time.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, limit: Option<Duration>) -> Result<T> {
        let mut len = [0; 4];
        self.read(&mut len[..1], limit)?;
        self.read(&mut len[1..], Some(FRAME_LIMIT))?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_FRAME {
            bail!("the peer does not speak the protocol of rdma-perf: it announced a message of {len} bytes");
        }
        let mut body = vec![0; len];
        self.read(&mut body, Some(FRAME_LIMIT))?;
        serde_json::from_slice(&body).context("the peer is another version of rdma-perf, or another program")
    }

    fn read(&mut self, buffer: &mut [u8], limit: Option<Duration>) -> Result<()> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut done = 0;
        while done < buffer.len() {
            // The deadline covers the whole buffer, so a peer that sends single bytes cannot extend it.
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(left) = left.map_or(Some(None), |left| (!left.is_zero()).then_some(Some(left))) else {
                bail!("no message from the peer for {} s", limit.unwrap_or_default().as_secs());
            };
            self.stream.set_read_timeout(left)?;
            match self.stream.read(&mut buffer[done..]) {
                Ok(0) => bail!(
                    "the peer has closed the control connection: it was stopped, or its own output has the reason"
                ),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) => return Err(error).context("the control connection failed; the peer or its host is gone"),
            }
        }
        Ok(())
    }

    /// Sends a request and waits for the reply, or for Ctrl-C. A failure of the server is an error.
    pub(crate) fn request(&mut self, request: &Request, limit: Duration) -> Result<Reply> {
        self.send(request)?;
        self.wait_reply(limit)
    }

    /// Waits for the reply to the last request, like [`Control::request`].
    pub(crate) fn wait_reply(&mut self, limit: Duration) -> Result<Reply> {
        if !wait_readable(self.stream.as_fd(), self.interrupt.as_ref(), Instant::now() + limit)? {
            bail!("no message from the peer for {} s", limit.as_secs());
        }
        self.reply(limit)
    }

    /// Whether a message or the end of the connection is pending.
    pub(crate) fn has_message(&self) -> Result<bool> {
        wait_readable(self.stream.as_fd(), None, Instant::now())
    }

    /// This host's address of the connection.
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

/// Connects to the first address that accepts.
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
            format!("cannot reach {address} by TCP; run `rdma-perf server` on {host} with the same --port")
        }),
        None => bail!("the host `{host}` has no address"),
    }
}

/// Waits until `fd` is readable, and returns `false` at the deadline. Fails on Ctrl-C.
fn wait_readable(fd: BorrowedFd<'_>, interrupt: Option<&Arc<Interrupt>>, deadline: Instant) -> Result<bool> {
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
    fn messages_arrive_unchanged() {
        let (mut ours, theirs) = pair();
        let mut theirs = Control::new(theirs).unwrap();
        theirs.send(&Request::Finished { sent: vec![vec![1, 2]] }).unwrap();
        theirs.send(&Request::Bye).unwrap();
        assert!(matches!(ours.receive(None).unwrap(), Request::Finished { sent } if sent == [[1, 2]]));
        assert!(matches!(ours.receive(None).unwrap(), Request::Bye));
    }

    #[test]
    fn a_silent_peer_causes_a_timeout() {
        let (mut ours, _theirs) = pair();
        let error = ours.receive::<Request>(Some(Duration::from_millis(50))).unwrap_err();
        assert!(error.to_string().contains("no message from the peer"), "{error}");
    }

    #[test]
    fn a_closed_connection_or_another_protocol_is_an_error() {
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
    fn a_server_failure_is_a_client_error() {
        let (mut ours, theirs) = pair();
        Control::new(theirs).unwrap().send(&Reply::Failed { reason: "no device".into() }).unwrap();
        let error = ours.reply(Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.to_string(), "the server: no device");
    }

    #[test]
    fn an_unreachable_server_is_an_error_with_advice() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = Control::connect("127.0.0.1", port, Duration::from_secs(5), None).unwrap_err();
        assert!(error.to_string().contains("run `rdma-perf server`"), "{error}");
    }

    #[test]
    fn ctrl_c_ends_waits_for_replies_and_connections() {
        let interrupt = Interrupt::for_test();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connect = || Control::connect("127.0.0.1", port, Duration::from_secs(5), Some(&interrupt));
        let mut ours = connect().unwrap();
        let signal = Arc::clone(&interrupt);
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            signal.press();
        });
        let error = ours.request(&Request::Bye, Duration::from_secs(60)).unwrap_err();
        assert!(error.is::<Interrupted>() && interrupt.check().is_err(), "{error}");
        thread.join().unwrap();
        assert!(connect().unwrap_err().is::<Interrupted>());
        let early = Interrupt::for_test();
        early.press_early();
        let connect = Control::connect("127.0.0.1", port, Duration::from_secs(5), Some(&early));
        assert!(connect.unwrap_err().is::<Interrupted>());
    }
}
