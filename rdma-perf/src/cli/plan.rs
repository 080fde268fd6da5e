//! Makes a plan from the options.

use super::TestArgs;
use super::help::has_5000_messages;
use crate::plan::{Atomic, Connection, Interface, Length, Metric, Plan, Verb, WarmUp};
use crate::transport::{MAX_MTU, Transport};
use crate::units;

impl TestArgs {
    /// The plan of a test of `verb`, with defaults filled in.
    ///
    /// # Errors
    /// Options that contradict each other or do not apply to the test, with the reason.
    pub(crate) fn plan(&self, verb: Verb, metric: Metric) -> Result<Plan, String> {
        let (load, verbs) = (&self.load, &self.verbs);
        let compat = verbs.compat.is_some();
        let datagrams = verbs.connection == Transport::Ud;
        let sizes = match (&load.size, load.all, verb, metric) {
            (None, false, Verb::Atomic, _) => vec![8],
            (_, true, Verb::Atomic, _) => return Err("atomic operations work on 8 bytes: leave out --all".into()),
            (Some(sizes), _, Verb::Atomic, _) if sizes.0 != [8] => {
                return Err("atomic operations work on 8 bytes: leave out --size".into());
            }
            (Some(sizes), ..) => sizes.0.clone(),
            (None, true, ..) if datagrams => units::sizes("2..4K")?,
            (None, true, ..) => units::sizes("2..8M")?,
            (None, false, _, Metric::Bw) if datagrams => vec![MAX_MTU],
            (None, false, _, Metric::Bw) => vec![65536],
            (None, false, _, Metric::Lat) => vec![2],
        };
        let length = match (load.iters, load.duration) {
            (_, Some(time)) if time.is_zero() => return Err("--duration must be more than zero".into()),
            (_, Some(_)) if compat => {
                return Err("--compat perftest works with --iters: perftest keeps no samples of timed runs".into());
            }
            (_, Some(time)) => Length::Time(time),
            (Some(iters), None) => Length::Iterations(iters),
            (None, None) => {
                let iterations: u64 = if has_5000_messages(verb, metric) { 5000 } else { 1000 };
                Length::Iterations(iterations.next_multiple_of(verbs.post_list.into()))
            }
        };
        let qps = load.qps.unwrap_or(load.threads);
        if qps % load.threads != 0 {
            return Err(format!("{qps} queue pairs cannot be spread evenly over {} threads", load.threads));
        }
        if metric == Metric::Lat && qps != load.threads {
            return Err("a latency test has one queue pair for each thread: give --threads instead of --qps".into());
        }
        if metric == Metric::Lat && load.bidirectional {
            return Err("latency covers both directions anyway: leave out --bidirectional".into());
        }
        let (tx_depth, cq_mod) = self.depths(&sizes, length, metric)?;
        let mut plan = Plan {
            verb,
            metric,
            transport: verbs.connection,
            sizes,
            length,
            warm_up: self.warm_up(length, compat)?,
            tx_depth,
            rx_depth: verbs.rx_depth.next_multiple_of(2),
            cq_mod,
            post_list: verbs.post_list,
            qps: qps / load.threads,
            threads: load.threads,
            inline: verbs.inline,
            bidirectional: load.bidirectional,
            events: verbs.events,
            immediate: verbs.imm,
            atomic: verbs.atomic.unwrap_or(Atomic::FetchAdd),
            acknowledged: verbs.ack,
            outstanding: verbs.outstanding,
            post: if compat { Interface::Classic } else { verbs.post },
            poll: if compat { Interface::Classic } else { verbs.poll },
            mtu: self.connection.mtu,
            huge_pages: verbs.huge_pages,
            rate: load.rate,
            validate: load.validate,
            shared_receives: verbs.use_srq,
            rdma_cm: self.connection.rdma_cm,
            connection: Connection {
                service_level: self.connection.sl,
                traffic_class: self.connection.tclass,
                timeout: self.connection.qp_timeout,
                retries: self.connection.retry_count,
                rnr_retries: self.connection.rnr_retry,
            },
            pinning: self.processors.pinning(),
            yield_cpu: self.processors.yield_cpu,
            timeout: verbs.timeout,
            compat,
        };
        if load.has_default_sizes() {
            plan.cut_datagrams(MAX_MTU);
        }
        self.check(&plan)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self, plan: &Plan) -> Result<(), String> {
        if plan.immediate && matches!(plan.verb, Verb::Read | Verb::Atomic) {
            return Err("only sends and writes carry immediate data: leave out --imm".into());
        }
        if plan.acknowledged && (plan.verb != Verb::Write || plan.metric != Metric::Lat || plan.immediate) {
            return Err("--ack is for `write lat` without --imm".into());
        }
        if self.verbs.atomic.is_some() && plan.verb != Verb::Atomic {
            return Err("only `atomic` has atomic operations: leave out --atomic".into());
        }
        if plan.outstanding.is_some() && matches!(plan.verb, Verb::Send | Verb::Write) {
            return Err("--outstanding limits reads and atomics only: leave it out".into());
        }
        if plan.inline > 0 && matches!(plan.verb, Verb::Read | Verb::Atomic) {
            return Err("reads and atomics have nothing to send inline: leave out --inline".into());
        }
        if plan.events && plan.verb == Verb::Write && plan.is_two_sided() && !plan.immediate {
            return Err("`write lat` polls memory to detect writes: for --events add --imm or --ack".into());
        }
        if plan.metric == Metric::Lat && plan.rate.is_some() {
            return Err("a latency test has only one message in flight: leave out --rate".into());
        }
        if plan.metric == Metric::Lat && self.out.min_bandwidth.is_some() {
            return Err("a latency test has no bandwidth: leave out --min-bandwidth".into());
        }
        if plan.events && plan.rate.is_some() {
            return Err("--rate polls the clock and never sleeps: leave out --events".into());
        }
        if plan.compat {
            if plan.threads > 1 {
                return Err("perftest has one thread: leave out --threads".into());
            }
            if plan.bidirectional || plan.rate.is_some() || plan.validate {
                return Err("--compat perftest works without --bidirectional, --rate and --validate".into());
            }
        }
        Ok(())
    }

    /// Send queue depth and completion moderation, by perftest's rules.
    fn depths(&self, sizes: &[u64], length: Length, metric: Metric) -> Result<(u32, u32), String> {
        let verbs = &self.verbs;
        let default_depth = if metric == Metric::Bw { 128 } else { 1 };
        let mut tx_depth = verbs.tx_depth.unwrap_or(default_depth);
        if metric == Metric::Lat {
            tx_depth = 1;
        }
        if let Length::Iterations(iterations) = length {
            tx_depth = tx_depth.min(u32::try_from(iterations).unwrap_or(u32::MAX));
            if iterations % u64::from(verbs.post_list) != 0 {
                return Err(format!("{iterations} messages are not a multiple of --post-list {}", verbs.post_list));
            }
        }
        if verbs.post_list > tx_depth {
            return Err(format!("--post-list {} is more than --tx-depth {tx_depth}", verbs.post_list));
        }
        let large = sizes.iter().all(|size| *size > 8192) && !verbs.events;
        let cq_mod = match verbs.cq_mod {
            Some(cq_mod) => cq_mod,
            None if verbs.post_list > 1 => verbs.post_list,
            None if large => 1,
            None => 100,
        };
        let cq_mod = cq_mod.min(tx_depth);
        if verbs.post_list > 1 && verbs.post_list % cq_mod != 0 && cq_mod % verbs.post_list != 0 {
            return Err(format!("--post-list {} and --cq-mod {cq_mod}: one must divide the other", verbs.post_list));
        }
        Ok((tx_depth, cq_mod))
    }

    fn warm_up(&self, length: Length, compat: bool) -> Result<WarmUp, String> {
        match (&self.load.warm_up, length) {
            (Some(_), _) if compat => Err("perftest does not warm up: leave out --warm-up".into()),
            _ if compat => Ok(WarmUp::Iterations(0)),
            (Some(text), Length::Time(_)) => units::duration(text).map(WarmUp::Time),
            (Some(text), Length::Iterations(_)) => text
                .parse()
                .map(WarmUp::Iterations)
                .map_err(|_| format!("--warm-up `{text}` is not a number of messages")),
            (None, Length::Time(time)) => Ok(WarmUp::Time(time / 10)),
            (None, Length::Iterations(iterations)) => {
                let list = u64::from(self.verbs.post_list);
                Ok(WarmUp::Iterations((iterations / 10).next_multiple_of(list)))
            }
        }
    }
}
