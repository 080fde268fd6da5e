//! The two ends of a scenario: the same function runs on both hosts, and each host plays each role once.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::Instant;

use rdma_safe::Error;
use rdma_safe::cm::{CmError, CmId, ConnectError, Connector, EventChannel, EventKind};

use crate::barrier::Barrier;
use crate::lab::LIMIT;
use crate::network::Host;

/// This end, with the device of its host.
pub(super) struct Pair {
    pub(super) host: Host,
    barrier: Barrier,
    /// Addresses of this host and of the other one, with port 0.
    pub(super) own: SocketAddr,
    pub(super) peer: SocketAddr,
    port: u16,
    pub(super) connector: Connector,
}

impl Pair {
    /// Connects the ends.
    pub(super) fn new() -> Pair {
        let host = Host::from_env().expect("there are two hosts");
        let barrier = Barrier::new(&host);
        let address = |text: &str| SocketAddr::new(text.parse::<IpAddr>().expect("an address"), 0);
        let (own, peer) = (address(&host.own), address(&host.peer));
        Pair { host, barrier, own, peer, port: 20_000, connector: Connector::new() }
    }

    /// Uses the link-local IPv6 addresses from now on.
    pub(super) fn use_ipv6(&mut self) {
        let own = self.host.link_local().expect("the interface has an IPv6 address");
        let peer = self.barrier.exchange(&own);
        let index = std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", self.host.interface));
        let index = index.expect("the interface exists").trim().parse().expect("a number");
        let address = |text: &str| {
            let ip: Ipv6Addr = text.parse().expect("an IPv6 address");
            SocketAddr::from(SocketAddrV6::new(ip, 0, 0, index))
        };
        (self.own, self.peer) = (address(&own), address(&peer));
    }

    /// Whether this host has the kernel's device.
    pub(super) fn has_rxe(&self) -> bool {
        self.host.is_first
    }

    /// Waits until the other end has called this as often.
    pub(super) fn meet(&mut self) {
        self.barrier.wait();
    }

    /// Waits until the process at the other end has ended.
    pub(super) fn wait_for_end(&mut self) {
        self.barrier.wait_for_end();
    }

    /// Runs a scenario twice, in both roles. The other end begins to connect when `listen` has returned.
    pub(super) fn in_both_roles<L>(
        &mut self,
        name: &str,
        listen: impl Fn(&Pair, SocketAddr) -> L,
        serve: impl Fn(&mut Pair, L),
        connect: impl Fn(&mut Pair, SocketAddr),
    ) {
        for first_serves in [true, false] {
            let start = Instant::now();
            self.port += 1;
            let serves = first_serves == self.host.is_first;
            let mut at = if serves { self.own } else { self.peer };
            at.set_port(self.port);
            if serves {
                let listener = listen(self, at);
                self.meet();
                serve(self, listener);
            } else {
                self.meet();
                connect(self, at);
            }
            self.meet();
            let server = if first_serves { "rxe0" } else { "soft0" };
            println!("{:.1} s: {name}, {server} listens", start.elapsed().as_secs_f64());
        }
    }
}

/// Different bytes for each seed.
pub(super) fn pattern<const N: usize>(seed: u8) -> [u8; N] {
    std::array::from_fn(|at| (at as u8).wrapping_mul(7) ^ seed)
}

/// Why a connection could not be established.
#[track_caller]
pub(super) fn failure<T>(result: Result<T, Error>) -> ConnectError {
    match result.err() {
        Some(Error::Cm(CmError::Connect(error))) => *error,
        other => panic!("{other:?}"),
    }
}

/// Waits for the next event, which must be of `id`.
#[track_caller]
pub(super) fn next(channel: &EventChannel, id: CmId) -> EventKind {
    let event = channel.wait(LIMIT).unwrap().expect("an event in time");
    assert_eq!(event.id, id, "{:?}", event.kind);
    event.kind
}
