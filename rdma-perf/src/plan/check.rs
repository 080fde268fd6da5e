//! Checks a plan: limits of its values, and which tests each transport supports.

use std::time::Duration;

use super::receives::credit_window;
use super::{Connection, Length, Metric, Pinning, Plan, Verb, WarmUp};
use crate::cpu::MAX_CPU;
use crate::transport::{MAX_MTU, Transport};

/// Why a transport does not support a test, and which alternatives do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Unsupported {
    #[error("{transport} has no {verb}s: give {others}, or run a test that {transport} has: {tests}")]
    Verb { transport: &'static str, verb: &'static str, others: &'static str, tests: &'static str },
    #[error(
        "a message of {size} bytes does not fit into a datagram, which is one packet of {mtu} bytes at most: give --size up to \
         {mtu}, --all, or -c RC"
    )]
    Datagram { size: u64, mtu: u64 },
    #[error(
        "--mtu {asked} is more than the {port} bytes of the ports: leave it out to send datagrams of up to that size"
    )]
    Mtu { asked: u64, port: u64 },
    #[error("{0} has no acknowledgements: leave out --ack, or give -c RC")]
    Acknowledgement(&'static str),
    #[error(
        "{0} has no acknowledgements and no retries: leave out --qp-timeout, --retry-count and --rnr-retry, or give -c RC"
    )]
    Retries(&'static str),
    #[error("--validate cannot know when the last write over {0} has arrived: leave it out, add --imm, or give -c RC")]
    Validation(&'static str),
    #[error("--compat supports no {0}: leave out --compat perftest, or give -c RC")]
    Compat(&'static str),
    #[error("--use-srq is for `send bw` and `send lat` without --bidirectional: leave out one of them")]
    SharedReceives,
    #[error("--compat perftest gives each queue pair receives of its own: leave out --compat perftest or --use-srq")]
    SharedCompat,
    #[error(
        "librdmacm {}: leave out --rdma-cm, or give -c RC",
        match .0 {
            Transport::Ud => "only resolves the peers of datagrams and connects nothing",
            _ => "connects only RC queue pairs by IP address",
        }
    )]
    ConnectionManager(Transport),
    #[error(
        "--post-list {list} is more than the {window} messages that each queue pair may have in flight: give a larger \
         --rx-depth{}",
        if *.shared { ", which the queue pairs share, or fewer --qps" } else { "" }
    )]
    List { list: u32, window: u64, shared: bool },
}

impl Plan {
    /// Refuses values that no rdma-perf client sends, before memory is allocated for them.
    ///
    /// # Errors
    /// The reason, with the options that set the values.
    pub(crate) fn check(&self) -> Result<(), String> {
        const MAX_SIZE: u64 = 1 << 31;
        const MAX_DEPTH: u32 = 1 << 15;
        const MAX_LIST: u32 = 4096;
        /// Per queue pair: centuries of work.
        const MAX_ITERATIONS: u64 = 1 << 48;
        const MAX_TIME: Duration = Duration::from_secs(366 * 24 * 3600);
        const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

        let depths = [self.tx_depth, self.rx_depth, self.cq_mod];
        let time = |length| match length {
            Length::Iterations(iterations) => (1..=MAX_ITERATIONS).contains(&iterations),
            Length::Time(time) => !time.is_zero() && time <= MAX_TIME,
        };
        let warm_up = match self.warm_up {
            WarmUp::Iterations(iterations) => iterations <= MAX_ITERATIONS,
            WarmUp::Time(time) => time <= MAX_TIME,
        };
        let rate = self.rate.is_none_or(|rate| {
            let messages = rate.messages(1);
            messages.is_finite() && messages > 0.0
        });
        // With `compat` no thread supervises the run, so its length must be known in advance.
        let compat = !self.compat || (self.threads == 1 && !self.bidirectional && self.messages_of_lane().is_some());
        let sensible = (1..=4096).contains(&self.sizes.len())
            && self.sizes.iter().all(|size| (1..=MAX_SIZE).contains(size))
            && (self.verb != Verb::Atomic || self.sizes.iter().all(|size| *size == 8))
            && depths.iter().all(|depth| (1..=MAX_DEPTH).contains(depth))
            && self.cq_mod <= self.tx_depth
            && (1..=self.tx_depth.min(MAX_LIST)).contains(&self.post_list)
            && (1..=16384).contains(&self.qps)
            && (1..=256).contains(&self.threads)
            && self.queue_pairs() <= 65536
            && (self.metric == Metric::Bw || self.qps == 1)
            && self.inline <= 1 << 16
            && self.timeout <= MAX_TIMEOUT
            && time(self.length)
            && warm_up
            && rate
            && compat;
        if sensible {
            check_connection(self.connection)?;
            self.check_transport().map_err(|unfit| unfit.to_string())?;
            return check_pinning(&self.pinning);
        }
        Err(format!(
            "the plan is out of range; --tx-depth and --rx-depth go up to {MAX_DEPTH}, --post-list to {MAX_LIST} and \
             --tx-depth, --inline to 64 KiB, queue pairs of a thread to 16384, --timeout to a day"
        ))
    }

    /// Whether the transport supports the test.
    fn check_transport(&self) -> Result<(), Unsupported> {
        let transport = self.transport;
        let name = transport.name();
        if !supports(transport, self.verb) {
            let others = if supports(Transport::Uc, self.verb) { "-c RC or UC" } else { "-c RC" };
            return Err(Unsupported::Verb {
                transport: name,
                verb: self.verb.name(),
                others,
                tests: tests_of(transport),
            });
        }
        if self.shared_receives {
            if self.verb != Verb::Send || self.bidirectional {
                return Err(Unsupported::SharedReceives);
            }
            if self.compat {
                return Err(Unsupported::SharedCompat);
            }
        }
        if transport.is_reliable() {
            return Ok(());
        }
        if self.rdma_cm {
            return Err(Unsupported::ConnectionManager(transport));
        }
        if self.compat {
            return Err(Unsupported::Compat(name));
        }
        if self.acknowledged {
            return Err(Unsupported::Acknowledgement(name));
        }
        let Connection { timeout, retries, rnr_retries, .. } = Connection::DEFAULT;
        let asked = &self.connection;
        if (asked.timeout, asked.retries, asked.rnr_retries) != (timeout, retries, rnr_retries) {
            return Err(Unsupported::Retries(name));
        }
        if self.validate && self.metric == Metric::Bw && !self.takes_receives() {
            return Err(Unsupported::Validation(name));
        }
        let (list, window, shared) = (self.post_list, credit_window(self), self.shared_receives);
        if self.has_credits() && u64::from(list) > window {
            return Err(Unsupported::List { list, window, shared });
        }
        // 4096 is the largest path MTU. The actual path MTU is known only once the MTUs of both ends are known.
        self.check_datagrams(MAX_MTU)
    }

    /// Refuses messages that do not fit into one packet of ports with this MTU. Applies to UD only.
    pub(crate) fn check_datagrams(&self, port: u64) -> Result<(), Unsupported> {
        if self.transport != Transport::Ud {
            return Ok(());
        }
        let mtu = self.path_mtu(port);
        if mtu > port {
            return Err(Unsupported::Mtu { asked: mtu, port });
        }
        match self.sizes.iter().find(|size| **size > mtu) {
            Some(size) => Err(Unsupported::Datagram { size: *size, mtu }),
            None => Ok(()),
        }
    }

    /// Removes sizes that do not fit into one packet of ports with this MTU. Applies to UD only. If no size is left,
    /// the largest packet becomes the only size.
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

    /// The requested MTU, or the ports' MTU.
    fn path_mtu(&self, port: u64) -> u64 {
        self.mtu.and_then(|mtu| mtu.bytes()).map_or(port, u64::from)
    }
}

fn tests_of(transport: Transport) -> &'static str {
    match transport {
        Transport::Rc => "send, write, read and atomic",
        Transport::Uc => "send and write",
        Transport::Ud => "send bw and send lat",
    }
}

fn supports(transport: Transport, verb: Verb) -> bool {
    match transport {
        Transport::Rc => true,
        Transport::Uc => matches!(verb, Verb::Send | Verb::Write),
        Transport::Ud => verb == Verb::Send,
    }
}

fn check_connection(connection: Connection) -> Result<(), String> {
    let within = connection.service_level <= 15
        && connection.timeout <= Connection::MAX_TIMEOUT
        && connection.retries <= 7
        && connection.rnr_retries <= 7;
    if within {
        return Ok(());
    }
    Err("the service level goes up to 15, the timeout of a queue pair to 31, retries to 7".into())
}

fn check_pinning(pinning: &Pinning) -> Result<(), String> {
    let sensible = |list: &[u32]| list.len() <= MAX_CPU as usize + 1 && list.iter().all(|cpu| *cpu <= MAX_CPU);
    if sensible(&pinning.client) && sensible(&pinning.server) {
        return Ok(());
    }
    Err(format!("processors have numbers up to {MAX_CPU}, and a list may name each of them once"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    fn of(arguments: &str, change: impl FnOnce(&mut Plan)) -> Result<(), Unsupported> {
        let mut plan = sample::plan(arguments);
        change(&mut plan);
        plan.check_transport()
    }

    #[test]
    fn each_transport_supports_its_tests_and_names_them() {
        for test in ["send bw h", "send lat h", "write bw h", "write lat h", "read bw h", "read lat h", "atomic bw h"] {
            assert_eq!(of(test, |_| ()), Ok(()), "{test}");
            let (send, write) = (test.starts_with("send"), test.starts_with("write"));
            for (transport, supported, tests) in
                [(Transport::Uc, send || write, "send and write"), (Transport::Ud, send, "send bw and send lat")]
            {
                let change = |plan: &mut Plan| (plan.transport, plan.sizes) = (transport, vec![8]);
                let unreliable = of(test, change);
                if supported {
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
    fn a_datagram_is_one_packet() {
        let over_ud = |arguments: &str, port| {
            let mut plan = sample::plan(arguments);
            plan.transport = Transport::Ud;
            plan.check_datagrams(port)
        };
        assert_eq!(over_ud("send bw h -s 2,4096", 4096), Ok(()));
        assert_eq!(over_ud("send bw h -s 2,4097", 4096), Err(Unsupported::Datagram { size: 4097, mtu: 4096 }));
        assert_eq!(over_ud("send bw h -s 1025", 1024), Err(Unsupported::Datagram { size: 1025, mtu: 1024 }));
        assert_eq!(over_ud("send bw h -s 1024 -m 512", 4096), Err(Unsupported::Datagram { size: 1024, mtu: 512 }));
        assert_eq!(over_ud("send bw h -s 64 -m 2048", 1024), Err(Unsupported::Mtu { asked: 2048, port: 1024 }));
        let reason = of("send bw h -s 5000", |plan| plan.transport = Transport::Ud).unwrap_err().to_string();
        assert!(reason.contains("of 5000 bytes") && reason.contains("--size up to 4096"), "{reason}");
        assert_eq!(sample::plan("send bw h -s 8M").check_datagrams(256), Ok(()), "applies to datagrams only");
    }

    #[test]
    fn sizes_too_long_for_a_datagram_are_left_out() {
        let cut = |arguments: &str, port| {
            let mut plan = sample::plan(arguments);
            plan.cut_datagrams(port);
            plan.sizes
        };
        assert_eq!(cut("send bw h -c UD -a", 1024), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
        assert_eq!(cut("send bw h -c UD -a -m 256", 1024).last(), Some(&256));
        assert_eq!((cut("send bw h -c UD", 1024), cut("send bw h -c UD -m 512", 1024)), (vec![1024], vec![512]));
        assert_eq!(cut("send bw h -a", 1024).last(), Some(&(8 << 20)), "applies to datagrams only");
    }

    #[test]
    fn options_that_need_acknowledgements_are_refused_without_them() {
        let over_ud = |arguments: &str| of(arguments, |plan| plan.transport = Transport::Ud);
        assert_eq!(over_ud("send lat h --retry-count 1"), Err(Unsupported::Retries("UD")));
        assert_eq!(over_ud("send lat h --compat perftest"), Err(Unsupported::Compat("UD")));
        let over_uc = |arguments: &str| of(arguments, |plan| plan.transport = Transport::Uc);
        assert_eq!(over_uc("write lat h --ack"), Err(Unsupported::Acknowledgement("UC")));
        for option in ["--qp-timeout 10", "--retry-count 1", "--rnr-retry 0"] {
            assert_eq!(over_uc(&format!("send bw h {option}")), Err(Unsupported::Retries("UC")), "{option}");
        }
        assert_eq!(over_uc("write bw h --validate"), Err(Unsupported::Validation("UC")));
        for fine in ["write bw h --validate --imm", "write lat h --validate", "send bw h --validate"] {
            assert_eq!(over_uc(fine), Ok(()), "{fine}");
        }
        assert_eq!(over_uc("send bw h --compat perftest"), Err(Unsupported::Compat("UC")));
    }

    #[test]
    fn rdmacm_connects_only_reliable_connections() {
        for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
            let refused = of("send bw h -s 64 -R", |plan| plan.transport = transport);
            let expected =
                if transport.is_reliable() { Ok(()) } else { Err(Unsupported::ConnectionManager(transport)) };
            assert_eq!(refused, expected);
        }
        let reason = Unsupported::ConnectionManager(Transport::Ud).to_string();
        assert!(reason.contains("connects nothing: leave out --rdma-cm, or give -c RC"), "{reason}");
    }

    #[test]
    fn only_sends_share_receives() {
        let shared = |arguments: &str, transport| {
            of(arguments, |plan| (plan.shared_receives, plan.transport) = (true, transport))
        };
        for (test, reason) in [
            ("send bw h -s 64 -q 4", None),
            ("send lat h", None),
            ("write bw h --imm", Some(Unsupported::SharedReceives)),
            ("read lat h", Some(Unsupported::SharedReceives)),
            ("send bw h -b", Some(Unsupported::SharedReceives)),
            ("send bw h --compat perftest", Some(Unsupported::SharedCompat)),
        ] {
            assert_eq!(shared(test, Transport::Rc).err(), reason, "{test}");
        }
        for transport in [Transport::Uc, Transport::Ud] {
            assert_eq!(shared("send bw h -s 64 -q 4", transport), Ok(()));
            assert_eq!(shared("send lat h -s 64", transport), Ok(()));
            // Each queue pair needs at least one receive.
            assert_eq!(shared("send bw h -s 64 -q 9 -r 16", Transport::Rc), Ok(()));
            let few = shared("send bw h -s 64 -q 10 -r 16", transport);
            assert_eq!(few, Err(Unsupported::List { list: 1, window: 0, shared: true }));
            assert!(few.unwrap_err().to_string().ends_with("--rx-depth, which the queue pairs share, or fewer --qps"));
        }
    }

    #[test]
    fn a_post_list_fits_into_the_credit_window() {
        let list = |transport| of("send bw h -s 64 -n 640 -l 64 -t 64 -r 64", |plan| plan.transport = transport);
        assert_eq!(list(Transport::Rc), Ok(()));
        assert_eq!(list(Transport::Uc), Err(Unsupported::List { list: 64, window: 33, shared: false }));
        assert_eq!(of("send bw h -s 64 -n 640 -l 32 -t 64 -r 64", |plan| plan.transport = Transport::Uc), Ok(()));
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let plan = sample::plan("write bw host");
        assert_eq!(plan.check(), Ok(()));
        for connection in [
            Connection { service_level: 16, ..Connection::DEFAULT },
            Connection { timeout: 32, ..Connection::DEFAULT },
            Connection { retries: 8, ..Connection::DEFAULT },
            Connection { rnr_retries: 8, ..Connection::DEFAULT },
        ] {
            assert!(Plan { connection, ..plan.clone() }.check().is_err(), "{connection:?}");
        }
        let refused = |pinning| Plan { pinning, ..plan.clone() }.check().is_err();
        assert!(refused(Pinning { client: vec![MAX_CPU + 1], server: Vec::new() }));
        assert!(refused(Pinning { client: Vec::new(), server: vec![u32::MAX] }));
        assert!(refused(Pinning { client: Vec::new(), server: vec![0; 5000] }));
    }
}
