//! The service: one thread, which sleeps while it has nothing to do.

use std::collections::HashMap;
use std::io::Read;
use std::mem::take;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::failure::one_line;
use common::{Result, device};
use rdma_safe::cm::{Address, Handshake, Listener, Progress, SetConnection, SetDisconnected};
use rdma_safe::endpoint::Armed;
use rdma_safe::{Buffer, Completion, Endpoint, EndpointKey, EndpointSet, ProtectionDomain, ReceivePool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{MESSAGE, TIMEOUT};

/// Receives of the service, which all clients share.
const RECEIVES: u32 = 1024;
const CLIENTS: u32 = 256;
/// Answers in flight to one client.
const ANSWERS: u32 = 16;
/// Requests of one client that the service has not answered. A client that sends more is disconnected.
const REQUESTS: u32 = 64;

pub(super) struct Service {
    pd: ProtectionDomain,
    pool: ReceivePool,
    set: EndpointSet,
    listener: Option<Listener>,
    arriving: Vec<Handshake<SetConnection>>,
    clients: HashMap<EndpointKey, SetConnection>,
    leaving: Vec<Handshake<SetDisconnected>>,
    /// Readable after Ctrl-C or SIGTERM.
    signals: UnixStream,
    /// Time by which the service ends, after a signal.
    stop_by: Option<Instant>,
}

impl Service {
    pub(super) fn start(port: u16) -> Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        for signal in [SIGINT, SIGTERM] {
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        let pd = device::find(None)?.open()?.alloc_pd()?;
        let mut pool = ReceivePool::new(&pd, RECEIVES)?;
        for buffer in pd.allocate(RECEIVES as usize * MESSAGE)?.into_chunks(MESSAGE)? {
            pool.receive(buffer)?;
        }
        let set = EndpointSet::builder(pd.context(), RECEIVES + CLIENTS * ANSWERS).events(true).build()?;
        let listener = Listener::bind(("0.0.0.0", port))?.pd(&pd).timeout(TIMEOUT);
        println!("listening at {}", listener.local_address());
        let (listener, arriving, clients, leaving) = (Some(listener), Vec::new(), HashMap::new(), Vec::new());
        Ok(Service { pd, pool, set, listener, arriving, clients, leaving, signals, stop_by: None })
    }

    pub(super) fn run(mut self) -> Result<()> {
        while !self.has_stopped()? {
            self.accept();
            self.advance()?;
            // Bounded, so that clients that keep sending do not stop the rest of the loop.
            for _ in 0..RECEIVES {
                let Some((key, done)) = self.set.poll()? else { break };
                self.serve(key, done)?;
            }
            self.sleep()?;
        }
        Ok(())
    }

    /// Accepts the clients that have asked. An error concerns one client only.
    fn accept(&mut self) {
        while let Some(next) = self.listener.as_mut().and_then(|listener| listener.next(Duration::ZERO).transpose()) {
            let builder = Endpoint::builder(&self.pd).send_depth(ANSWERS);
            let builder = builder.receive_pool(&self.pool).receive_share(REQUESTS);
            match next.and_then(|request| request.start_accept_in(builder, &mut self.set, b"")) {
                Ok(handshake) => self.arriving.push(handshake),
                Err(error) => return log(None, &one_line(&error)),
            }
        }
    }

    /// Advances the handshakes of clients that connect or disconnect.
    fn advance(&mut self) -> Result<()> {
        for handshake in take(&mut self.arriving) {
            let (key, peer) = (handshake.key(), handshake.peer_address());
            match handshake.advance_in(&mut self.set) {
                Ok(Progress::Pending(handshake)) => self.arriving.push(handshake),
                Ok(Progress::Ready(client)) => {
                    log(peer, "connected");
                    self.clients.insert(key, client);
                }
                Err(error) => {
                    log(peer, &one_line(&error));
                    self.remove(key)?;
                }
            }
        }
        for handshake in take(&mut self.leaving) {
            match handshake.advance_in(&mut self.set) {
                Ok(Progress::Pending(handshake)) => self.leaving.push(handshake),
                Ok(Progress::Ready(disconnected)) => self.repost(disconnected.buffers)?,
                // The client has not confirmed. The connection has ended nevertheless.
                Err(error) => self.repost(error.buffers)?,
            }
        }
        Ok(())
    }

    /// Answers a message, or takes the buffer of an answer. Both may happen before the handshake is complete.
    fn serve(&mut self, key: EndpointKey, done: Completion) -> Result<()> {
        let Some(mut endpoint) = self.set.endpoint(key) else { return self.repost(done.buffer) };
        let (reason, buffer) = match done.ok() {
            Ok(done) if done.id.is_receive() && self.stop_by.is_none() => {
                let Some(mut buffer) = done.buffer else { return Ok(()) };
                let answer: Vec<_> = b"hello, ".iter().chain(&*buffer).copied().take(MESSAGE).collect();
                buffer.fill_from(&answer)?;
                let Err(rejected) = endpoint.send(buffer) else { return Ok(()) };
                (rejected.error.to_string(), rejected.buffer)
            }
            Ok(done) => return self.repost(done.buffer),
            Err(failed) => (endpoint.explain(&failed).to_string(), failed.0.buffer),
        };
        self.repost(buffer)?;
        self.end(key, &reason)
    }

    /// Posts buffers for the next messages.
    fn repost(&mut self, buffers: impl IntoIterator<Item = Buffer>) -> Result<()> {
        for buffer in buffers {
            self.pool.receive(buffer)?;
        }
        Ok(())
    }

    /// Removes the endpoint of a handshake that was dropped. Any other call of the set before would drop its buffers.
    fn remove(&mut self, key: EndpointKey) -> Result<()> {
        let buffers = self.set.remove(key)?;
        self.repost(buffers)
    }

    /// Disconnects a client, unless that has begun.
    fn end(&mut self, key: EndpointKey, reason: &str) -> Result<()> {
        if let Some(arriving) = self.arriving.iter().position(|handshake| handshake.key() == key) {
            log(self.arriving.swap_remove(arriving).peer_address(), reason);
            return self.remove(key);
        }
        let Some(client) = self.clients.remove(&key) else { return Ok(()) };
        log(client.peer_address(), reason);
        match client.start_disconnect(&mut self.set) {
            Ok(handshake) => self.leaving.push(handshake),
            Err(error) => self.repost(error.buffers)?,
        }
        Ok(())
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self) -> Result<()> {
        let armed = self.set.arm()?;
        let deadlines =
            self.arriving.iter().map(Handshake::deadline).chain(self.leaving.iter().map(Handshake::deadline));
        let now = (armed == Armed::Poll).then(Instant::now);
        let wake_at = deadlines.chain(self.set.keepalive_due()).chain(self.stop_by).chain(now).min();
        let timeout = wake_at.map(|time| time.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(Timespec::try_from).transpose()?;

        // For thousands of clients, use epoll(7).
        let clients = self.clients.values().map(AsFd::as_fd);
        let handshakes = self.arriving.iter().map(AsFd::as_fd).chain(self.leaving.iter().map(AsFd::as_fd));
        let others = self.listener.iter().map(AsFd::as_fd).chain(self.set.channel().map(AsFd::as_fd));
        let all = clients.chain(handshakes).chain(others).chain([self.signals.as_fd()]);
        let mut polled: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
        let is_readable: Vec<_> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();

        if is_readable.last() == Some(&true) {
            let _ = self.signals.read(&mut [0])?;
            self.stop_by.get_or_insert(Instant::now() + TIMEOUT);
            self.listener = None;
            self.arriving.clear();
        }
        let readable = self.clients.keys().copied().zip(is_readable).filter(|(_, is_readable)| *is_readable);
        for (key, _) in readable.collect::<Vec<_>>() {
            match self.clients.get_mut(&key).map(|client| client.is_connected(&mut self.set)) {
                Some(Ok(false)) => self.end(key, "disconnected")?,
                Some(Err(error)) => self.end(key, &one_line(&error))?,
                Some(Ok(true)) | None => {}
            }
        }
        Ok(())
    }

    /// Whether the service has stopped. After a signal, disconnects the clients that have all their answers.
    fn has_stopped(&mut self) -> Result<bool> {
        let Some(stop_by) = self.stop_by else { return Ok(false) };
        let has_all = |key: &_| self.set.endpoint(*key).is_none_or(|client| client.sends_in_flight() == 0);
        for key in self.clients.keys().copied().filter(has_all).collect::<Vec<_>>() {
            self.end(key, "disconnected by the service")?;
        }
        Ok(Instant::now() >= stop_by || self.clients.is_empty() && self.leaving.is_empty())
    }
}

fn log(peer: Option<Address>, text: &str) {
    println!("{}: {text}", peer.map_or_else(|| "a client".to_owned(), |peer| peer.to_string()));
}
