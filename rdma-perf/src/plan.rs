//! What is to be measured. The client makes it of its command line and tells the server, so that a server needs no options.

use std::time::Duration;

use rdma_safe::Mtu;
use serde::{Deserialize, Serialize};

use crate::transport::Transport;
use crate::units::Rate;

/// One test: everything that both ends have to agree upon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) verb: Verb,
    pub(crate) metric: Metric,
    pub(crate) transport: Transport,
    /// Bytes of a message, one run each.
    pub(crate) sizes: Vec<u64>,
    pub(crate) length: Length,
    /// Messages of each queue pair that are not measured, before those that are.
    pub(crate) warm_up: WarmUp,
    /// Sends in flight of each queue pair.
    pub(crate) tx_depth: u32,
    /// Receives posted of each queue pair.
    pub(crate) rx_depth: u32,
    /// Every so many sends one is signaled.
    pub(crate) cq_mod: u32,
    /// Sends posted with one doorbell.
    pub(crate) post_list: u32,
    /// Queue pairs of each thread.
    pub(crate) qps: u32,
    pub(crate) threads: u32,
    /// Messages up to this many bytes are sent inline.
    pub(crate) inline: u32,
    pub(crate) bidirectional: bool,
    pub(crate) events: bool,
    /// Immediate data with sends and writes.
    pub(crate) immediate: bool,
    pub(crate) atomic: Atomic,
    /// Write latency until the acknowledgement, instead of half of a ping-pong.
    pub(crate) acknowledged: bool,
    /// Reads and atomics outstanding; as many as the devices can unless set.
    pub(crate) outstanding: Option<u8>,
    pub(crate) post: Interface,
    pub(crate) poll: Interface,
    pub(crate) mtu: Option<Mtu>,
    pub(crate) huge_pages: bool,
    pub(crate) rate: Option<Rate>,
    pub(crate) validate: bool,
    /// Yield the processor when a poll finds nothing.
    pub(crate) yield_cpu: bool,
    /// How long nothing may complete before a run is given up.
    pub(crate) patience: Duration,
    /// Do as perftest does, to be compared with it.
    pub(crate) compat: bool,
    /// The queue pairs of a thread take receives of one queue.
    #[serde(default)]
    pub(crate) shared_receives: bool,
    /// The queue pairs are connected by address, by librdmacm.
    #[serde(default)]
    pub(crate) rdma_cm: bool,
    #[serde(default)]
    pub(crate) connection: Connection,
    #[serde(default)]
    pub(crate) pinning: Pinning,
}

/// How queue pairs are connected, at both ends: ibv_modify_qp(3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    /// Acknowledgement timeout: see [`Connection::timeout`].
    pub(crate) timeout: u8,
    pub(crate) retries: u8,
    /// 7 for ever.
    pub(crate) rnr_retries: u8,
}

/// Processors that the threads of each end are pinned to, in turns; to none, if there are none.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pinning {
    pub(crate) client: Vec<u32>,
    pub(crate) server: Vec<u32>,
}

/// The highest number of a processor that `cpu_set_t` has room for.
pub(crate) const MAX_CPU: u32 = 1023;

impl Connection {
    /// Those of rdma-safe.
    pub(crate) const DEFAULT: Connection =
        Connection { service_level: 0, traffic_class: 0, timeout: 14, retries: 6, rnr_retries: 7 };
    /// Five bits of a queue pair's attributes.
    pub(crate) const MAX_TIMEOUT: u8 = 31;

    /// The time that an exponent stands for: 4.096 µs times two to that power, or for ever for 0.
    pub(crate) fn timeout(exponent: u8) -> Duration {
        if exponent == 0 { Duration::MAX } else { Duration::from_nanos(4096 << exponent.min(Self::MAX_TIMEOUT)) }
    }

    fn check(self) -> Result<(), String> {
        let within =
            self.service_level <= 15 && self.timeout <= Self::MAX_TIMEOUT && self.retries <= 7 && self.rnr_retries <= 7;
        if within {
            return Ok(());
        }
        Err("the service level goes up to 15, the timeout of a queue pair to 31, retries to 7".into())
    }
}

impl Default for Connection {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Pinning {
    fn check(&self) -> Result<(), String> {
        let sensible = |list: &[u32]| list.len() <= MAX_CPU as usize + 1 && list.iter().all(|cpu| *cpu <= MAX_CPU);
        if sensible(&self.client) && sensible(&self.server) {
            return Ok(());
        }
        Err(format!("processors have numbers up to {MAX_CPU}, and threads are pinned to as many"))
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

/// Which end of the test it is.
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

/// Which of two interfaces of verbs to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Interface {
    /// The extended one where the provider has it
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

/// How much to run before measuring.
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
    /// Refuses what no client of ours would ask for, before anything is allocated for it.
    pub(crate) fn check(&self) -> Result<(), String> {
        const MAX_SIZE: u64 = 1 << 31;
        const MAX_DEPTH: u32 = 1 << 15;
        const MAX_LIST: u32 = 4096;
        /// Of each queue pair: centuries of work.
        const MAX_ITERATIONS: u64 = 1 << 48;
        const MAX_TIME: Duration = Duration::from_secs(366 * 24 * 3600);
        const MAX_PATIENCE: Duration = Duration::from_secs(24 * 3600);

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
        // Nobody looks after a thread that does as perftest does while it runs: it has to know when it is done.
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
            && self.patience <= MAX_PATIENCE
            && time(self.length)
            && warm_up
            && rate
            && compat;
        if sensible {
            self.connection.check()?;
            self.check_transport().map_err(|unfit| unfit.to_string())?;
            return self.pinning.check();
        }
        Err(format!(
            "the plan of the test makes no sense; --tx-depth and --rx-depth go up to {MAX_DEPTH}, --post-list to {MAX_LIST} and \
             --tx-depth, --inline to 64 KiB, queue pairs of a thread to 16384, --timeout to a day"
        ))
    }

    /// What is measured, in a few words.
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
        format!("{} {metric}{}{both}{queue_pairs}{threads}{shared}{by}", self.verb.name(), self.over())
    }

    /// What its latency is a latency of.
    pub(crate) fn latency_definition(&self) -> &'static str {
        match (self.metric, self.verb) {
            (Metric::Bw, _) if self.rate.is_some() => {
                "from when the rate would have had a signaled message posted, to its completion"
            }
            (Metric::Bw, _) if !self.transport.is_reliable() => {
                "from the post of a signaled message to its completion, which says that it was sent"
            }
            (Metric::Bw, _) => "from the post of a signaled message to its completion",
            (Metric::Lat, Verb::Read | Verb::Atomic) => "from the post to the completion: a whole round trip",
            (Metric::Lat, Verb::Write) if self.acknowledged => {
                "from the post to the acknowledgement: a whole round trip"
            }
            (Metric::Lat, Verb::Send | Verb::Write) => "one way: half of a round trip of two messages",
        }
    }

    /// Whether the peer has to do something for each message.
    pub(crate) fn is_two_sided(&self) -> bool {
        match self.verb {
            Verb::Send => true,
            Verb::Write => self.immediate || (self.metric == Metric::Lat && !self.acknowledged),
            Verb::Read | Verb::Atomic => false,
        }
    }

    /// Whether messages take receives of the peer.
    pub(crate) fn takes_receives(&self) -> bool {
        match self.verb {
            Verb::Send => true,
            Verb::Write => self.immediate,
            Verb::Read | Verb::Atomic => false,
        }
    }

    /// Whether this end sends, writes, reads or changes anything.
    pub(crate) fn sends(&self, role: Role) -> bool {
        role == Role::Client || self.bidirectional || (self.metric == Metric::Lat && self.is_two_sided())
    }

    /// Whether the other end does.
    pub(crate) fn is_sent_to(&self, role: Role) -> bool {
        self.sends(role.other())
    }

    /// Whether messages are seen by their last byte in memory.
    pub(crate) fn polls_memory(&self) -> bool {
        self.is_two_sided() && !self.takes_receives()
    }

    /// Messages of each queue pair and size, with those of the warm-up, if that is known beforehand.
    pub(crate) fn messages_of_lane(&self) -> Option<u64> {
        match (self.warm_up, self.length) {
            (WarmUp::Iterations(warm_up), Length::Iterations(messages)) => Some(warm_up + messages),
            _ => None,
        }
    }

    /// Queue pairs in all.
    pub(crate) fn queue_pairs(&self) -> u32 {
        self.qps * self.threads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn timeouts_are_powers_of_two() {
        assert_eq!(Connection::timeout(1), Duration::from_nanos(8192));
        assert_eq!(Connection::timeout(14), Duration::from_nanos(67_108_864));
        assert_eq!(Connection::timeout(31).as_secs(), 8796);
        assert_eq!(Connection::timeout(0), Duration::MAX);
    }

    #[test]
    fn what_no_queue_pair_has_is_refused() {
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

    #[test]
    fn plans_of_earlier_files_are_read() {
        let plan = sample::plan("send lat host");
        let mut value = serde_json::to_value(&plan).unwrap();
        let fields = value.as_object_mut().unwrap();
        assert!(fields.remove("connection").is_some() && fields.remove("pinning").is_some());
        assert_eq!(serde_json::from_value::<Plan>(value).unwrap(), plan);
    }
}
