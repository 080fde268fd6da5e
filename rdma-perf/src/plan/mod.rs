//! The plan of a test. The client makes it from its command line and sends it to the server, which needs no options.

pub(crate) mod check;
pub(crate) mod layout;
pub(crate) mod receives;

use std::time::Duration;

use rdma_safe::Mtu;
use serde::{Deserialize, Serialize};

use crate::transport::Transport;
use crate::units::Rate;

/// One test: all settings that both ends share. JSON files have the same field names.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) verb: Verb,
    pub(crate) metric: Metric,
    pub(crate) transport: Transport,
    /// Message sizes in bytes, one run each.
    pub(crate) sizes: Vec<u64>,
    pub(crate) length: Length,
    /// Length of the unmeasured part at the start.
    pub(crate) warm_up: WarmUp,
    /// Sends in flight per queue pair.
    pub(crate) tx_depth: u32,
    /// Receives posted per queue pair.
    pub(crate) rx_depth: u32,
    /// Completion moderation: every how many sends one is signaled.
    pub(crate) cq_mod: u32,
    /// Sends per doorbell.
    pub(crate) post_list: u32,
    /// Queue pairs per thread.
    pub(crate) qps: u32,
    pub(crate) threads: u32,
    /// Longest message that is sent inline, in bytes.
    pub(crate) inline: u32,
    pub(crate) bidirectional: bool,
    pub(crate) events: bool,
    /// Immediate data with sends and writes.
    pub(crate) immediate: bool,
    pub(crate) atomic: Atomic,
    /// Write latency up to the acknowledgement, instead of half a ping-pong.
    pub(crate) acknowledged: bool,
    /// Reads and atomics outstanding; the maximum of the devices if `None`.
    pub(crate) outstanding: Option<u8>,
    pub(crate) post: Interface,
    pub(crate) poll: Interface,
    pub(crate) mtu: Option<Mtu>,
    pub(crate) huge_pages: bool,
    pub(crate) rate: Option<Rate>,
    pub(crate) validate: bool,
    /// Yield the processor after an empty poll.
    pub(crate) yield_cpu: bool,
    /// Longest time without a completion before the run fails.
    #[serde(rename = "patience")]
    pub(crate) timeout: Duration,
    /// Measure as perftest does.
    pub(crate) compat: bool,
    /// One shared receive queue per thread.
    #[serde(default)]
    pub(crate) shared_receives: bool,
    /// Queue pairs are connected by librdmacm.
    #[serde(default)]
    pub(crate) rdma_cm: bool,
    #[serde(default)]
    pub(crate) connection: Connection,
    #[serde(default)]
    pub(crate) pinning: Pinning,
}

/// Attributes of the queue pairs at both ends: ibv_modify_qp(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    /// ACK timeout as an exponent: see [`Connection::timeout`].
    pub(crate) timeout: u8,
    pub(crate) retries: u8,
    /// RNR retries; 7 is without limit.
    pub(crate) rnr_retries: u8,
}

/// Processors of the threads at each end, assigned round-robin. An empty list pins nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pinning {
    pub(crate) client: Vec<u32>,
    pub(crate) server: Vec<u32>,
}

impl Connection {
    /// The defaults of rdma-safe.
    pub(crate) const DEFAULT: Connection =
        Connection { service_level: 0, traffic_class: 0, timeout: 14, retries: 6, rnr_retries: 7 };
    /// The largest value of a five-bit attribute.
    pub(crate) const MAX_TIMEOUT: u8 = 31;

    /// The time of a timeout exponent: 4.096 µs times two to its power, or no timeout for 0.
    pub(crate) fn timeout(exponent: u8) -> Duration {
        if exponent == 0 { Duration::MAX } else { Duration::from_nanos(4096 << exponent.min(Self::MAX_TIMEOUT)) }
    }
}

impl Default for Connection {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verb {
    Send,
    Write,
    Read,
    Atomic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Bandwidth and message rate, with many messages in flight.
    Bw,
    /// Latency, with one message in flight.
    Lat,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Atomic {
    FetchAdd,
    CompareSwap,
}

/// The end of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Client,
    Server,
}

impl Role {
    fn other(self) -> Self {
        match self {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        }
    }
}

/// The verbs interface to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Interface {
    /// The extended one if the provider has it
    Auto,
    /// ibv_post_send, ibv_poll_cq
    Classic,
    /// ibv_wr_*, ibv_start_poll
    Extended,
}

/// How long to measure.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Length {
    /// Messages of each queue pair.
    Iterations(u64),
    Time(Duration),
}

/// How long to warm up.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WarmUp {
    Iterations(u64),
    Time(Duration),
}

impl Verb {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Send => "send",
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Atomic => "atomic",
        }
    }
}

impl Plan {
    /// A short description of the test.
    pub(crate) fn title(&self) -> String {
        let metric = match self.metric {
            Metric::Bw => "bw",
            Metric::Lat => "lat",
        };
        let queue_pairs = match self.queue_pairs() {
            1 => String::new(),
            count => format!(", {count} queue pairs"),
        };
        let threads = if self.threads > 1 { format!(" in {} threads", self.threads) } else { String::new() };
        let both = if self.bidirectional { ", both ways" } else { "" };
        let shared = if self.shared_receives { ", shared receives" } else { "" };
        let by = if self.rdma_cm { ", by rdmacm" } else { "" };
        format!("{} {metric}{}{both}{queue_pairs}{threads}{shared}{by}", self.verb.name(), self.title_suffix())
    }

    /// The definition of the latency, which reports contain.
    pub(crate) fn latency_definition(&self) -> &'static str {
        match (self.metric, self.verb) {
            (Metric::Bw, _) if self.rate.is_some() => {
                "from the time at which --rate schedules a signaled message, to its completion"
            }
            (Metric::Bw, _) if !self.transport.is_reliable() => {
                "from the post of a signaled message to its completion, which means only that it was sent"
            }
            (Metric::Bw, _) => "from the post of a signaled message to its completion",
            (Metric::Lat, Verb::Read | Verb::Atomic) => "from the post to the completion: a whole round trip",
            (Metric::Lat, Verb::Write) if self.acknowledged => {
                "from the post to the acknowledgement: a whole round trip"
            }
            (Metric::Lat, Verb::Send | Verb::Write) => "one way: half of a round trip of two messages",
        }
    }

    /// Whether the peer takes part in each message.
    pub(crate) fn is_two_sided(&self) -> bool {
        match self.verb {
            Verb::Send => true,
            Verb::Write => self.immediate || (self.metric == Metric::Lat && !self.acknowledged),
            Verb::Read | Verb::Atomic => false,
        }
    }

    /// Whether messages consume receives of the peer.
    pub(crate) fn takes_receives(&self) -> bool {
        match self.verb {
            Verb::Send => true,
            Verb::Write => self.immediate,
            Verb::Read | Verb::Atomic => false,
        }
    }

    /// Whether this end posts sends, writes, reads or atomics.
    pub(crate) fn sends(&self, role: Role) -> bool {
        role == Role::Client || self.bidirectional || (self.metric == Metric::Lat && self.is_two_sided())
    }

    /// Whether the other end does.
    pub(crate) fn is_sent_to(&self, role: Role) -> bool {
        self.sends(role.other())
    }

    /// Whether messages are detected by polling their last byte in memory.
    pub(crate) fn polls_memory(&self) -> bool {
        self.is_two_sided() && !self.takes_receives()
    }

    /// Messages per queue pair and size, warm-up included, if the number is known in advance.
    pub(crate) fn messages_of_lane(&self) -> Option<u64> {
        match (self.warm_up, self.length) {
            (WarmUp::Iterations(warm_up), Length::Iterations(messages)) => Some(warm_up + messages),
            _ => None,
        }
    }

    /// Whether the receiver grants credits, because a message without a receive would be lost.
    pub(crate) fn has_credits(&self) -> bool {
        !self.transport.is_reliable() && self.metric == Metric::Bw && self.takes_receives()
    }

    /// The transport for a title; empty for RC.
    fn title_suffix(&self) -> String {
        if self.transport == Transport::Rc { String::new() } else { format!(" over {}", self.transport.name()) }
    }

    /// Queue pairs of all threads.
    pub(crate) fn queue_pairs(&self) -> u32 {
        self.qps * self.threads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    #[test]
    fn timeouts_are_powers_of_two() {
        assert_eq!(Connection::timeout(1), Duration::from_nanos(8192));
        assert_eq!(Connection::timeout(14), Duration::from_nanos(67_108_864));
        assert_eq!(Connection::timeout(31).as_secs(), 8796);
        assert_eq!(Connection::timeout(0), Duration::MAX);
    }

    #[test]
    fn plans_of_older_files_are_read() {
        let plan = sample::plan("send lat host");
        let mut value = serde_json::to_value(&plan).unwrap();
        let fields = value.as_object_mut().unwrap();
        assert!(fields.remove("connection").is_some() && fields.remove("pinning").is_some());
        assert_eq!(serde_json::from_value::<Plan>(value).unwrap(), plan);
    }
}
