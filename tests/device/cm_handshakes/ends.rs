//! Two ends on one device, and handshakes that one thread advances.

use std::fmt::Debug;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rdma_safe::cm::{
    ConnectError, Connection, Connector, EventChannel, Handshake, Listener, Outcome, PreparedRequest, Progress, Request,
};
use rdma_safe::{Endpoint, Error, ProtectionDomain, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::is_readable;
use crate::cm::address;
use crate::cm_connections::failure;
use crate::support::{DEADLINE, Rdma, device, error_of, filled, pattern};

/// Both ends of the tests, on one device.
pub(super) struct Ends {
    pub(super) rdma: Rdma,
    pub(super) pd: ProtectionDomain,
    pub(super) connector: Connector,
    pub(super) listener: Listener,
    pub(super) address: Ipv4Addr,
}

impl Ends {
    /// `None` after printing why the test is skipped.
    pub(super) fn new() -> Option<Ends> {
        let rdma = device()?;
        let address = address(&rdma)?;
        let pd = rdma.pd();
        let listener = Listener::bind((address, 0)).unwrap().pd(&pd);
        Some(Ends { connector: Connector::new().pd(&pd), listener, pd, rdma, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.listener.local_address().ip().unwrap()
    }

    pub(super) fn connecting(&self) -> Handshake<Connection> {
        self.connecting_with(&self.connector)
    }

    /// A client that has sent its request, with a posted receive.
    pub(super) fn connecting_with(&self, connector: &Connector) -> Handshake<Connection> {
        let route = connector.start_resolve(self.address()).unwrap().wait().unwrap();
        let mut prepared = route.prepare(Endpoint::builder(&self.pd)).unwrap();
        prepared.receive(self.pd.allocate(512).unwrap()).unwrap();
        prepared.start_connect(b"hello").unwrap()
    }

    pub(super) fn request(&mut self) -> Request {
        self.listener.next(DEADLINE).unwrap().expect("a request in time")
    }

    pub(super) fn prepared(&self, request: Request) -> Result<PreparedRequest> {
        let mut prepared = request.prepare(Endpoint::builder(&self.pd))?;
        prepared.receive(self.pd.allocate(512).unwrap()).unwrap();
        Ok(prepared)
    }

    /// A server that has accepted the next request, with a posted receive.
    pub(super) fn accepting(&mut self) -> Handshake<Connection> {
        let request = self.request();
        self.prepared(request).unwrap().start_accept(b"welcome").unwrap()
    }

    /// Both ends of a connection, the connecting one first.
    pub(super) fn connected(&mut self) -> [Connection; 2] {
        let connecting = self.connecting();
        let accepting = self.accepting();
        let [client, server] = finish([connecting, accepting]);
        [client.unwrap(), server.unwrap()]
    }

    /// Checks that the listener still serves a client.
    #[track_caller]
    pub(super) fn serves_another_client(&mut self) {
        let [mut client, mut server] = self.connected();
        exchange(&mut client, &mut server, 1);
    }
}

/// Both ends, or the return of a test that is skipped.
macro_rules! ends {
    () => {{
        let Some(ends) = $crate::cm_handshakes::ends::Ends::new() else { return };
        ends
    }};
}

pub(super) use ends;

#[track_caller]
pub(super) fn exchange(from: &mut Connection, to: &mut Connection, seed: u64) {
    let message = pattern(seed, 300);
    let outbox = filled(from.pd(), &message);
    from.send(outbox).unwrap();
    assert!(to.wait(DEADLINE).unwrap().ok().unwrap().buffer.as_deref() == Some(&message[..]));
    let _ = from.wait(DEADLINE).unwrap().ok().unwrap();
}

/// Sleeps until a descriptor is readable or a deadline has passed.
#[track_caller]
pub(super) fn sleep<'a>(fds: impl IntoIterator<Item = BorrowedFd<'a>>, until: impl IntoIterator<Item = Instant>) {
    let mut polled: Vec<_> = fds.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let until = until.into_iter().min();
    let left = until.map_or(DEADLINE, |until| until.saturating_duration_since(Instant::now()).min(DEADLINE));
    let ready = poll(&mut polled, Some(&Timespec::try_from(left).unwrap())).unwrap();
    assert!(ready > 0 || until.is_some_and(|until| until <= Instant::now()), "no descriptor becomes readable");
}

/// Advances handshakes by readiness until all have ended.
#[track_caller]
pub(super) fn finish<T: Outcome<Context = ()> + Debug, const N: usize>(
    handshakes: [Handshake<T>; N],
) -> [Result<T, T::Error>; N] {
    finish_with(handshakes, |_, handshake| handshake.advance())
}

/// Like [`finish`]. `advance` advances the handshake with the number.
#[track_caller]
pub(super) fn finish_with<T: Outcome + Debug, const N: usize>(
    handshakes: [Handshake<T>; N],
    mut advance: impl FnMut(usize, Handshake<T>) -> Result<Progress<T>, T::Error>,
) -> [Result<T, T::Error>; N] {
    let mut pending: Vec<_> = handshakes.into_iter().enumerate().collect();
    let mut results: Vec<_> = (0..N).map(|_| None).collect();
    loop {
        for (number, handshake) in std::mem::take(&mut pending) {
            match advance(number, handshake) {
                Ok(Progress::Pending(handshake)) => pending.push((number, handshake)),
                Ok(Progress::Ready(result)) => results[number] = Some(Ok(result)),
                Err(error) => results[number] = Some(Err(error)),
            }
        }
        if pending.is_empty() {
            let results: Vec<_> = results.into_iter().map(|result| result.expect("a result")).collect();
            return results.try_into().unwrap_or_else(|_| unreachable!("as many as before"));
        }
        let fds = pending.iter().map(|(_, handshake)| handshake.as_fd());
        sleep(fds, pending.iter().map(|(_, handshake)| handshake.deadline()));
    }
}

/// Advances all handshakes once. Keeps those in progress, and returns the results of the others.
pub(super) fn advance_all<T: Outcome<Context = (), Error: Debug>>(handshakes: &mut Vec<Handshake<T>>) -> Vec<T> {
    let mut results = Vec::new();
    for handshake in std::mem::take(handshakes) {
        match handshake.advance().unwrap() {
            Progress::Ready(result) => results.push(result),
            Progress::Pending(handshake) => handshakes.push(handshake),
        }
    }
    results
}

/// The error of the only handshake, which ends before the [`DEADLINE`] of the tests.
#[track_caller]
pub(super) fn error<T: Outcome<Context = (), Error = Error> + Debug>(handshake: Handshake<T>) -> ConnectError {
    let [result] = finish([handshake]);
    failure(error_of(result))
}

/// Advances a handshake that has to stay pending.
#[track_caller]
pub(super) fn pending<T: Outcome<Context = (), Error: Debug> + Debug>(handshake: Handshake<T>) -> Handshake<T> {
    match handshake.advance().unwrap() {
        Progress::Pending(handshake) => handshake,
        Progress::Ready(result) => panic!("{result:?}"),
    }
}

/// Waits until an event has arrived, and leaves it in the channel.
#[track_caller]
pub(crate) fn wait_for_event(channel: &EventChannel) {
    assert!(is_readable(channel, DEADLINE), "an event in time");
}
