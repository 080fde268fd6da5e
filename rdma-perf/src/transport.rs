//! Types of queue pairs, and which tests they can carry.

use rdma_safe::QueuePairType;
use serde::{Deserialize, Serialize};

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
}

/// Why a test is none of its transport, and what is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("{transport} has no {verb}s: give -c RC, or one of the tests of {transport}, which are {tests}")]
    Verb { transport: &'static str, verb: &'static str, tests: &'static str },
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
    #[error(
        "over {0} each queue pair has receives of its own, so that none is lost for want of one: leave out --use-srq, or give -c RC"
    )]
    SharedUnreliable(&'static str),
    #[error("perftest's receives are each queue pair's own here: leave out --compat perftest or --use-srq")]
    SharedCompat,
    #[error("--post-list {list} is more than the {window} messages that may be on their way: give a larger --rx-depth")]
    List { list: u32, window: u64 },
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Rc => "RC",
            Transport::Uc => "UC",
        }
    }

    pub(crate) fn queue_pair(self) -> QueuePairType {
        match self {
            Transport::Rc => QueuePairType::RC,
            Transport::Uc => QueuePairType::UC,
        }
    }

    /// Whether what is lost is sent again.
    pub(crate) fn is_reliable(self) -> bool {
        self == Transport::Rc
    }

    fn tests(self) -> &'static str {
        match self {
            Transport::Rc => "send, write, read and atomic",
            Transport::Uc => "send and write",
        }
    }

    fn carries(self, verb: Verb) -> bool {
        match self {
            Transport::Rc => true,
            Transport::Uc => matches!(verb, Verb::Send | Verb::Write),
        }
    }
}

impl Plan {
    /// Whether the transport can carry the test.
    pub(crate) fn check_transport(&self) -> Result<(), Unfit> {
        let transport = self.transport;
        let name = transport.name();
        if !transport.carries(self.verb) {
            return Err(Unfit::Verb { transport: name, verb: self.verb.name(), tests: transport.tests() });
        }
        if self.shared_receives {
            if self.verb != Verb::Send || self.bidirectional {
                return Err(Unfit::SharedReceives);
            }
            if !transport.is_reliable() {
                return Err(Unfit::SharedUnreliable(name));
            }
            if self.compat {
                return Err(Unfit::SharedCompat);
            }
        }
        if transport.is_reliable() {
            return Ok(());
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
        if self.has_credits() && u64::from(self.post_list) > credit_window(self) {
            return Err(Unfit::List { list: self.post_list, window: credit_window(self) });
        }
        Ok(())
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
            let unreliable = of(test, |plan| plan.transport = Transport::Uc);
            if test.starts_with("send") || test.starts_with("write") {
                assert_eq!(unreliable, Ok(()), "{test}");
            } else {
                let reason = unreliable.unwrap_err().to_string();
                assert!(reason.contains("-c RC") && reason.contains("send and write"), "{reason}");
            }
        }
    }

    #[test]
    fn what_only_acknowledgements_make_possible_is_refused_without() {
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
    fn receives_are_shared_by_sends() {
        let shared = |arguments: &str, transport| {
            of(arguments, |plan| (plan.shared_receives, plan.transport) = (true, transport))
        };
        for (test, reason) in [
            ("send bw h -q 4", None),
            ("send lat h", None),
            ("write bw h --imm", Some(Unfit::SharedReceives)),
            ("read lat h", Some(Unfit::SharedReceives)),
            ("send bw h -b", Some(Unfit::SharedReceives)),
            ("send bw h --compat perftest", Some(Unfit::SharedCompat)),
        ] {
            assert_eq!(shared(test, Transport::Rc).err(), reason, "{test}");
        }
        assert_eq!(shared("send bw h", Transport::Uc), Err(Unfit::SharedUnreliable("UC")));
        assert_eq!(shared("send lat h", Transport::Uc), Err(Unfit::SharedUnreliable("UC")));
    }

    #[test]
    fn a_list_of_sends_fits_into_the_window() {
        let list = |transport| of("send bw h -s 64 -n 640 -l 64 -t 64 -r 64", |plan| plan.transport = transport);
        assert_eq!(list(Transport::Rc), Ok(()));
        assert_eq!(list(Transport::Uc), Err(Unfit::List { list: 64, window: 33 }));
        assert_eq!(of("send bw h -s 64 -n 640 -l 32 -t 64 -r 64", |plan| plan.transport = Transport::Uc), Ok(()));
    }
}
