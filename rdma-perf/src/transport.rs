//! Types of queue pairs, and which tests they can carry.

use rdma_safe::QueuePairType;
use serde::{Deserialize, Serialize};

use crate::datagram::{HEADER, MAX_MTU};
use crate::plan::{Connection, Metric, Plan, Verb};
use crate::run::credit_window;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "UPPER")]
pub(crate) enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection: sends and writes
    Uc,
    /// Unreliable datagrams: sends of one packet
    Ud,
}

/// Why a test is none of its transport, and what is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("{transport} has no {verb}s: give {others}, or one of the tests of {transport}, which are {tests}")]
    Verb { transport: &'static str, verb: &'static str, others: &'static str, tests: &'static str },
    #[error(
        "a message of {size} bytes is no datagram, which is one packet, of {mtu} bytes at most: give --size up to {mtu}, --all, or \
         -c RC"
    )]
    Datagram { size: u64, mtu: u64 },
    #[error(
        "--mtu {asked} is more than the {port} bytes of the ports: leave it out, and datagrams may be as long as that"
    )]
    Mtu { asked: u64, port: u64 },
    #[error("{0} acknowledges nothing: leave out --ack, or give -c RC")]
    Acknowledgement(&'static str),
    #[error(
        "{0} waits for no acknowledgement and tries nothing again: leave out --qp-timeout, --retry-count and --rnr-retry, or give \
         -c RC"
    )]
    Retries(&'static str),
    #[error(
        "nothing tells when the last one of many writes over {0} has arrived, so that memory could be compared: leave out \
         --validate, add --imm, or give -c RC"
    )]
    Validation(&'static str),
    #[error("{0} is compared with no other tool: leave out --compat perftest, or give -c RC")]
    Compat(&'static str),
    #[error(
        "--use-srq is for sends, of which one end takes receives or both do in turn: leave it out, or --bidirectional"
    )]
    SharedReceives,
    #[error("perftest's receives are each queue pair's own here: leave out --compat perftest or --use-srq")]
    SharedCompat,
    #[error(
        "librdmacm {}: leave out --rdma-cm, or give -c RC",
        match .0 {
            Transport::Ud => "finds who datagrams go to, and connects nothing",
            _ => "connects reliable connections only at an IP address",
        }
    )]
    Manager(Transport),
    #[error(
        "--post-list {list} is more than the {window} messages of a queue pair that may be on their way: give a larger \
         --rx-depth{}",
        if *.shared { ", which the queue pairs share, or fewer of these" } else { "" }
    )]
    List { list: u32, window: u64, shared: bool },
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Rc => "RC",
            Transport::Uc => "UC",
            Transport::Ud => "UD",
        }
    }

    pub(crate) fn queue_pair(self) -> QueuePairType {
        match self {
            Transport::Rc => QueuePairType::RC,
            Transport::Uc => QueuePairType::UC,
            Transport::Ud => QueuePairType::UD,
        }
    }

    /// Whether what is lost is sent again.
    pub(crate) fn is_reliable(self) -> bool {
        self == Transport::Rc
    }

    /// Bytes of a receive before those of the message.
    pub(crate) fn header(self) -> u64 {
        if self == Transport::Ud { HEADER } else { 0 }
    }

    fn tests(self) -> &'static str {
        match self {
            Transport::Rc => "send, write, read and atomic",
            Transport::Uc => "send and write",
            Transport::Ud => "send bw and send lat",
        }
    }

    fn carries(self, verb: Verb) -> bool {
        match self {
            Transport::Rc => true,
            Transport::Uc => matches!(verb, Verb::Send | Verb::Write),
            Transport::Ud => verb == Verb::Send,
        }
    }
}

impl Plan {
    /// Whether the transport can carry the test.
    pub(crate) fn check_transport(&self) -> Result<(), Unfit> {
        let transport = self.transport;
        let name = transport.name();
        if !transport.carries(self.verb) {
            let others = if Transport::Uc.carries(self.verb) { "-c RC or UC" } else { "-c RC" };
            return Err(Unfit::Verb { transport: name, verb: self.verb.name(), others, tests: transport.tests() });
        }
        if self.shared_receives {
            if self.verb != Verb::Send || self.bidirectional {
                return Err(Unfit::SharedReceives);
            }
            if self.compat {
                return Err(Unfit::SharedCompat);
            }
        }
        if transport.is_reliable() {
            return Ok(());
        }
        if self.rdma_cm {
            return Err(Unfit::Manager(transport));
        }
        if self.compat {
            return Err(Unfit::Compat(name));
        }
        if self.acknowledged {
            return Err(Unfit::Acknowledgement(name));
        }
        let Connection { timeout, retries, rnr_retries, .. } = Connection::DEFAULT;
        let asked = &self.connection;
        if (asked.timeout, asked.retries, asked.rnr_retries) != (timeout, retries, rnr_retries) {
            return Err(Unfit::Retries(name));
        }
        if self.validate && self.metric == Metric::Bw && !self.takes_receives() {
            return Err(Unfit::Validation(name));
        }
        let (list, window, shared) = (self.post_list, credit_window(self), self.shared_receives);
        if self.has_credits() && u64::from(list) > window {
            return Err(Unfit::List { list, window, shared });
        }
        // No path has more. What this one has is known when both ends are.
        self.check_datagrams(MAX_MTU)
    }

    /// Whether all messages are packets, where they have to be, that ports of this MTU carry.
    pub(crate) fn check_datagrams(&self, port: u64) -> Result<(), Unfit> {
        if self.transport != Transport::Ud {
            return Ok(());
        }
        let mtu = self.path_mtu(port);
        if mtu > port {
            return Err(Unfit::Mtu { asked: mtu, port });
        }
        match self.sizes.iter().find(|size| **size > mtu) {
            Some(size) => Err(Unfit::Datagram { size: *size, mtu }),
            None => Ok(()),
        }
    }

    /// Leaves out sizes that ports of this MTU do not carry in a packet, if they have to; of sizes that are all longer, there is
    /// one left, that of the longest packet.
    pub(crate) fn cut_datagrams(&mut self, port: u64) {
        if self.transport != Transport::Ud {
            return;
        }
        let mtu = self.path_mtu(port).min(port);
        self.sizes.retain(|size| *size <= mtu);
        if self.sizes.is_empty() {
            self.sizes.push(mtu);
        }
    }

    /// The MTU that was asked for, or that of the ports.
    fn path_mtu(&self, port: u64) -> u64 {
        self.mtu.and_then(|mtu| mtu.bytes()).map_or(port, u64::from)
    }

    /// Whether the sender has to be told what the peer has room for: a message that finds no receive would be lost.
    pub(crate) fn has_credits(&self) -> bool {
        !self.transport.is_reliable() && self.metric == Metric::Bw && self.takes_receives()
    }

    /// What a title says of the transport: nothing of the usual one.
    pub(crate) fn over(&self) -> String {
        if self.transport == Transport::Rc { String::new() } else { format!(" over {}", self.transport.name()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    fn of(arguments: &str, change: impl FnOnce(&mut Plan)) -> Result<(), Unfit> {
        let mut plan = sample::plan(arguments);
        change(&mut plan);
        plan.check_transport()
    }

    #[test]
    fn each_transport_carries_its_tests_and_names_them() {
        for test in ["send bw h", "send lat h", "write bw h", "write lat h", "read bw h", "read lat h", "atomic bw h"] {
            assert_eq!(of(test, |_| ()), Ok(()), "{test}");
            let (send, write) = (test.starts_with("send"), test.starts_with("write"));
            for (transport, carried, tests) in
                [(Transport::Uc, send || write, "send and write"), (Transport::Ud, send, "send bw and send lat")]
            {
                let change = |plan: &mut Plan| (plan.transport, plan.sizes) = (transport, vec![8]);
                let unreliable = of(test, change);
                if carried {
                    assert_eq!(unreliable, Ok(()), "{test}");
                    continue;
                }
                let reason = unreliable.unwrap_err().to_string();
                let others = if write { "-c RC or UC," } else { "-c RC," };
                assert!(reason.contains(others) && reason.contains(tests), "{reason}");
            }
        }
    }

    #[test]
    fn a_datagram_is_a_packet() {
        let over_ud = |arguments: &str, port| {
            let mut plan = sample::plan(arguments);
            plan.transport = Transport::Ud;
            plan.check_datagrams(port)
        };
        assert_eq!(over_ud("send bw h -s 2,4096", 4096), Ok(()));
        assert_eq!(over_ud("send bw h -s 2,4097", 4096), Err(Unfit::Datagram { size: 4097, mtu: 4096 }));
        assert_eq!(over_ud("send bw h -s 1025", 1024), Err(Unfit::Datagram { size: 1025, mtu: 1024 }));
        assert_eq!(over_ud("send bw h -s 1024 -m 512", 4096), Err(Unfit::Datagram { size: 1024, mtu: 512 }));
        assert_eq!(over_ud("send bw h -s 64 -m 2048", 1024), Err(Unfit::Mtu { asked: 2048, port: 1024 }));
        let reason = of("send bw h -s 5000", |plan| plan.transport = Transport::Ud).unwrap_err().to_string();
        assert!(reason.contains("of 5000 bytes") && reason.contains("--size up to 4096"), "{reason}");
        assert_eq!(sample::plan("send bw h -s 8M").check_datagrams(256), Ok(()), "of datagrams only");
    }

    #[test]
    fn sizes_that_are_no_datagrams_are_left_out() {
        let cut = |arguments: &str, port| {
            let mut plan = sample::plan(arguments);
            plan.cut_datagrams(port);
            plan.sizes
        };
        assert_eq!(cut("send bw h -c UD -a", 1024), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
        assert_eq!(cut("send bw h -c UD -a -m 256", 1024).last(), Some(&256));
        assert_eq!((cut("send bw h -c UD", 1024), cut("send bw h -c UD -m 512", 1024)), (vec![1024], vec![512]));
        assert_eq!(cut("send bw h -a", 1024).last(), Some(&(8 << 20)), "of datagrams only");
    }

    #[test]
    fn what_only_acknowledgements_make_possible_is_refused_without() {
        let over_ud = |arguments: &str| of(arguments, |plan| plan.transport = Transport::Ud);
        assert_eq!(over_ud("send lat h --retry-count 1"), Err(Unfit::Retries("UD")));
        assert_eq!(over_ud("send lat h --compat perftest"), Err(Unfit::Compat("UD")));
        let over_uc = |arguments: &str| of(arguments, |plan| plan.transport = Transport::Uc);
        assert_eq!(over_uc("write lat h --ack"), Err(Unfit::Acknowledgement("UC")));
        for option in ["--qp-timeout 10", "--retry-count 1", "--rnr-retry 0"] {
            assert_eq!(over_uc(&format!("send bw h {option}")), Err(Unfit::Retries("UC")), "{option}");
        }
        assert_eq!(over_uc("write bw h --validate"), Err(Unfit::Validation("UC")));
        for fine in ["write bw h --validate --imm", "write lat h --validate", "send bw h --validate"] {
            assert_eq!(over_uc(fine), Ok(()), "{fine}");
        }
        assert_eq!(over_uc("send bw h --compat perftest"), Err(Unfit::Compat("UC")));
    }

    #[test]
    fn reliable_connections_only_are_made_by_rdmacm() {
        for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
            let refused = of("send bw h -s 64 -R", |plan| plan.transport = transport);
            let expected = if transport.is_reliable() { Ok(()) } else { Err(Unfit::Manager(transport)) };
            assert_eq!(refused, expected);
        }
        let reason = Unfit::Manager(Transport::Ud).to_string();
        assert!(reason.contains("connects nothing: leave out --rdma-cm, or give -c RC"), "{reason}");
    }

    #[test]
    fn receives_are_shared_by_sends() {
        let shared = |arguments: &str, transport| {
            of(arguments, |plan| (plan.shared_receives, plan.transport) = (true, transport))
        };
        for (test, reason) in [
            ("send bw h -s 64 -q 4", None),
            ("send lat h", None),
            ("write bw h --imm", Some(Unfit::SharedReceives)),
            ("read lat h", Some(Unfit::SharedReceives)),
            ("send bw h -b", Some(Unfit::SharedReceives)),
            ("send bw h --compat perftest", Some(Unfit::SharedCompat)),
        ] {
            assert_eq!(shared(test, Transport::Rc).err(), reason, "{test}");
        }
        for transport in [Transport::Uc, Transport::Ud] {
            assert_eq!(shared("send bw h -s 64 -q 4", transport), Ok(()));
            assert_eq!(shared("send lat h -s 64", transport), Ok(()));
            // Each of them has to be sure of one.
            assert_eq!(shared("send bw h -s 64 -q 9 -r 16", Transport::Rc), Ok(()));
            let few = shared("send bw h -s 64 -q 10 -r 16", transport);
            assert_eq!(few, Err(Unfit::List { list: 1, window: 0, shared: true }));
            assert!(
                few.unwrap_err().to_string().ends_with("--rx-depth, which the queue pairs share, or fewer of these")
            );
        }
    }

    #[test]
    fn a_list_of_sends_fits_into_the_window() {
        let list = |transport| of("send bw h -s 64 -n 640 -l 64 -t 64 -r 64", |plan| plan.transport = transport);
        assert_eq!(list(Transport::Rc), Ok(()));
        assert_eq!(list(Transport::Uc), Err(Unfit::List { list: 64, window: 33, shared: false }));
        assert_eq!(of("send bw h -s 64 -n 640 -l 32 -t 64 -r 64", |plan| plan.transport = Transport::Uc), Ok(()));
    }
}
