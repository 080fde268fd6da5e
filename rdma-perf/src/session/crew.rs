//! The threads of one end, and what happens while they run.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Opened;
use crate::clock::Clock;
use crate::control::{Control, WorkerAddress};
use crate::cpu::{self, Pinned};
use crate::plan::{Plan, Role};
use crate::rdmacm::{self, Place, Reception, Visit, Visitor};
use crate::run::{Outcome, Runner, Shared, Task};
use crate::worker::{Check, Worker};

/// How often progress is told of.
const TICK: Duration = Duration::from_millis(100);

/// The workers of one end, each of which gets a thread.
pub(super) struct Crew {
    runners: Vec<Runner>,
    /// Processors of the threads, in turns.
    cpus: Vec<u32>,
    /// Becomes readable when a thread has said something.
    wake: OwnedFd,
}

/// Something that happened.
#[derive(Debug)]
pub(super) enum Happening {
    /// All workers have sent what they had to: the messages of each worker and queue pair.
    Sent(Vec<Vec<u64>>),
    /// The peer says something.
    Control,
    /// A worker failed.
    Failed(anyhow::Error),
    /// All workers are done.
    Ended,
    /// The user pressed Ctrl-C.
    Interrupted,
    /// The time is over.
    Tick,
}

enum Said {
    Sent(usize, Vec<u64>),
    Ended(usize, Box<Result<Outcome>>),
}

/// What the threads of one run say, and the way to tell them something.
pub(super) struct Watch<'c> {
    said: Receiver<Said>,
    wake: &'c OwnedFd,
    shared: &'c Shared,
    expected: &'c [AtomicU64],
    sent: Vec<Option<Vec<u64>>>,
    outcomes: Vec<Option<Outcome>>,
    told_sent: bool,
    ended: usize,
}

impl Crew {
    /// Creates the objects of all threads, which are going to run on `cpus`, for as long as `check` finds that it shall go on.
    pub(super) fn new(
        opened: &Opened,
        plan: &Plan,
        role: Role,
        clock: Clock,
        cpus: &[u32],
        check: Check<'_>,
    ) -> Result<Self> {
        cpu::check(cpus)?;
        let runner = |number| {
            // So that its memory is near.
            let _pinned = pinned(cpus, number as usize)?;
            Ok(Runner::new(Worker::new(&opened.pd, plan, role, &opened.init, check)?, plan, role, clock))
        };
        let runners = (0..plan.threads).map(runner).collect::<Result<_>>()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Crew { runners, cpus: cpus.to_vec(), wake })
    }

    pub(super) fn addresses(&self) -> Vec<WorkerAddress> {
        self.runners.iter().map(|runner| runner.worker.address()).collect()
    }

    /// Which interfaces it uses: `ibv_wr_*`, `ibv_start_poll`.
    pub(super) fn interfaces(&self) -> (bool, bool) {
        let worker = &self.runners[0].worker;
        (worker.lanes.iter().all(|lane| lane.qp.is_extended()), worker.send_cq.is_extended())
    }

    pub(super) fn connect(&mut self, peers: &[WorkerAddress], plan: &Plan, role: Role, check: Check<'_>) -> Result<()> {
        if peers.len() != self.runners.len() {
            bail!("the peer has {} threads for {} here", peers.len(), self.runners.len());
        }
        self.runners.iter_mut().zip(peers).try_for_each(|(runner, peer)| runner.worker.connect(peer, plan, role, check))
    }

    /// Connects by address to the `peers` that [`Crew::connect`] was told of.
    pub(super) fn visit(
        &mut self,
        visitor: &Visitor<'_>,
        peers: &[WorkerAddress],
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<()> {
        for (worker, (runner, peer)) in self.runners.iter_mut().zip(peers).enumerate() {
            for (number, (lane, peer)) in runner.worker.lanes.iter_mut().zip(&peer.queue_pairs).enumerate() {
                let id = visitor.connect(&mut lane.unconnected(peer), (worker, number), plan, check)?;
                lane.keep(id);
            }
        }
        Ok(())
    }

    /// Is connected to by those.
    pub(super) fn receive(
        &mut self,
        reception: &Reception,
        peers: &[WorkerAddress],
        place: Place<'_>,
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<()> {
        let mut established = 0;
        while established < plan.queue_pairs() {
            let (ticket, mut id) = match reception.next(check)? {
                Visit::Asked(ticket, id) => (ticket, id),
                Visit::Established => {
                    established += 1;
                    continue;
                }
            };
            let (worker, number) = (ticket.worker as usize, ticket.lane as usize);
            let lane = self.runners.get_mut(worker).and_then(|runner| runner.worker.lanes.get_mut(number));
            let peer = peers.get(worker).and_then(|peer| peer.queue_pairs.get(number));
            let (Some(lane), Some(peer)) = (lane.filter(|lane| !lane.is_connected()), peer) else {
                bail!(
                    "the client connects to queue pair {number} of thread {worker}, which is not there or is connected"
                );
            };
            rdmacm::accept(&mut lane.unconnected(peer), &mut id, place, plan)?;
            lane.keep(id);
        }
        Ok(())
    }

    pub(super) fn prepare(&mut self, plan: &Plan, index: usize) -> Result<()> {
        self.runners.iter_mut().try_for_each(|runner| runner.prepare(plan, index))
    }

    /// Compares what one size has left in memory, given what each queue pair here and at the peer has sent.
    pub(super) fn check(&self, plan: &Plan, index: usize, ours: &[Vec<u64>], theirs: &[Vec<u64>]) -> Result<u64> {
        let none = Vec::new();
        let mut compared = 0;
        for (number, runner) in self.runners.iter().enumerate() {
            let (ours, theirs) = (ours.get(number).unwrap_or(&none), theirs.get(number).unwrap_or(&none));
            compared += runner.check(plan, index, ours, theirs)?;
        }
        Ok(compared)
    }

    /// Runs one size, each worker in a thread, while `supervise` watches. When it returns, failed or not, the threads end as
    /// soon as they can.
    pub(super) fn run(
        &mut self,
        plan: &Plan,
        index: usize,
        shared: &Shared,
        supervise: impl FnOnce(&mut Watch<'_>) -> Result<()>,
    ) -> Result<Vec<Outcome>> {
        let (sender, said) = channel();
        let count = self.runners.len();
        let known = plan.messages_of_lane().filter(|_| plan.compat).map(|messages| messages * u64::from(plan.qps));
        let expected: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(known.unwrap_or(u64::MAX))).collect();
        let (wake, cpus) = (&self.wake, &self.cpus);
        std::thread::scope(|scope| {
            for (number, (runner, expected)) in self.runners.iter_mut().zip(&expected).enumerate() {
                let voice = Voice { sender: sender.clone(), wake, number };
                let mut body = move || {
                    let sent = |sent: &[u64]| voice.say(Said::Sent(number, sent.to_vec()));
                    let outcome = pinned(cpus, number)
                        .and_then(|_pinned| runner.run(&Task { plan, index, shared, expected, sent: &sent }));
                    voice.say(Said::Ended(number, Box::new(outcome)));
                };
                if plan.compat {
                    // perftest has no other thread, and with one each system call costs more: the kernel then counts who uses
                    // a descriptor. All that the peer could say meanwhile is known beforehand, or comes to light when nothing
                    // completes.
                    body();
                    continue;
                }
                let thread = std::thread::Builder::new().name(format!("worker-{number}"));
                if let Err(error) = thread.spawn_scoped(scope, body) {
                    shared.abort.store(true, Ordering::Relaxed);
                    return Err(error).context("cannot start a thread");
                }
            }
            drop(sender);
            let mut watch = Watch {
                said,
                wake,
                shared,
                expected: &expected,
                sent: vec![None; count],
                outcomes: (0..count).map(|_| None).collect(),
                told_sent: false,
                ended: 0,
            };
            let result = supervise(&mut watch);
            shared.abort.store(watch.ended < count, Ordering::Relaxed);
            result?;
            watch.outcomes.into_iter().collect::<Option<Vec<_>>>().context("a thread ended without a result")
        })
    }
}

/// Holds the calling thread, which is the one of this number, where it belongs.
fn pinned(cpus: &[u32], number: usize) -> Result<Option<Pinned>> {
    cpus.get(number % cpus.len().max(1)).map(|cpu| Pinned::to(*cpu)).transpose()
}

/// How a thread says something.
struct Voice<'c> {
    sender: Sender<Said>,
    wake: &'c OwnedFd,
    number: usize,
}

impl Voice<'_> {
    fn say(&self, said: Said) {
        // Nobody listens any more when the run was given up.
        let _ = self.sender.send(said);
        let _ = rustix::io::write(self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Voice<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let fault = anyhow::anyhow!("a thread panicked; this is a fault of rdma-perf");
            self.say(Said::Ended(self.number, Box::new(Err(fault))));
        }
    }
}

impl Watch<'_> {
    /// Waits for the next thing to happen; with `ticks`, that can be that a tenth of a second has passed. The wait ends at
    /// the latest when the threads do, which give up when nothing completes, or when the control connection breaks.
    pub(super) fn next(&mut self, control: &Control, interrupt: Option<&impl AsFd>, ticks: bool) -> Result<Happening> {
        loop {
            while let Ok(said) = self.said.try_recv() {
                match said {
                    Said::Sent(number, sent) => self.sent[number] = Some(sent),
                    Said::Ended(number, result) => {
                        self.ended += 1;
                        match *result {
                            Ok(outcome) => self.outcomes[number] = Some(outcome),
                            Err(error) => return Ok(Happening::Failed(error)),
                        }
                        if self.ended == self.outcomes.len() {
                            return Ok(Happening::Ended);
                        }
                    }
                }
                if !self.told_sent && self.sent.iter().all(Option::is_some) {
                    self.told_sent = true;
                    return Ok(Happening::Sent(self.sent.iter().flatten().cloned().collect()));
                }
            }
            let timeout = ticks.then(|| Timespec::try_from(TICK)).transpose()?;
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
            fds.extend(interrupt.map(|fd| PollFd::new(fd, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Ok(Happening::Tick),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno).context("poll(2) failed"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                // Whoever writes next makes it readable again.
                let _ = rustix::io::read(self.wake, &mut [0; 8]);
                continue;
            }
            if ready.get(2) == Some(&true) {
                return Ok(Happening::Interrupted);
            }
            return Ok(Happening::Control);
        }
    }

    /// Tells each worker how many messages its peer has sent in all.
    pub(super) fn expect(&self, sent: &[Vec<u64>]) {
        for (expected, sent) in self.expected.iter().zip(sent) {
            let sum = sent.iter().fold(0, |sum: u64, sent| sum.saturating_add(*sent));
            expected.store(sum, Ordering::Release);
        }
    }

    /// No more messages; those under way are finished.
    pub(super) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}
