//! The worker threads of one end, and their supervision.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::control::Control;
use super::device::OpenDevice;
use crate::clock::Clock;
use crate::cpu;
use crate::cpu::Pinned;
use crate::endpoint::cm;
use crate::endpoint::cm::{CmConnector, CmEvent, CmListener, DevicePort};
use crate::endpoint::worker::{Worker, WorkerAddress};
use crate::interrupt::Check;
use crate::plan::{Plan, Role};
use crate::run::{Outcome, Runner, Shared, Task};

/// Interval of progress updates.
const TICK: Duration = Duration::from_millis(100);

/// The state of all worker threads of one end.
pub(super) struct Threads {
    runners: Vec<Runner>,
    /// Processors of the threads, assigned round-robin.
    cpus: Vec<u32>,
    /// Becomes readable when a thread has sent a message.
    wake: OwnedFd,
}

/// An event that [`Supervisor::next`] waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// All workers have sent their messages: the number per worker and queue pair.
    Sent(Vec<Vec<u64>>),
    /// A message of the peer is pending.
    Control,
    /// A worker has failed.
    Failed(anyhow::Error),
    /// All workers are done.
    Ended,
    /// The user pressed Ctrl-C.
    Interrupted,
    /// The interval for progress updates has passed.
    Tick,
}

enum ThreadMessage {
    Sent(usize, Vec<u64>),
    Ended(usize, Box<Result<Outcome>>),
}

/// Receives messages of the threads of one run, and controls them.
pub(super) struct Supervisor<'c> {
    messages: Receiver<ThreadMessage>,
    wake: &'c OwnedFd,
    shared: &'c Shared,
    expected: &'c [AtomicU64],
    sent: Vec<Option<Vec<u64>>>,
    outcomes: Vec<Option<Outcome>>,
    sent_reported: bool,
    ended: usize,
}

impl Threads {
    /// Creates the objects of all threads, which will run on `cpus`. `check` ends it early.
    pub(super) fn new(
        opened: &OpenDevice,
        plan: &Plan,
        role: Role,
        clock: Clock,
        cpus: &[u32],
        check: Check<'_>,
    ) -> Result<Self> {
        cpu::check(cpus)?;
        let runner = |number| {
            // Pinned, so that memory is allocated on the NUMA node of the thread.
            let _pinned = pinned(cpus, number as usize)?;
            Ok(Runner::new(Worker::new(&opened.pd, plan, role, &opened.init, check)?, plan, role, clock))
        };
        let runners = (0..plan.threads).map(runner).collect::<Result<_>>()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Threads { runners, cpus: cpus.to_vec(), wake })
    }

    pub(super) fn addresses(&self) -> Vec<WorkerAddress> {
        self.runners.iter().map(|runner| runner.worker.address()).collect()
    }

    /// Whether this end posts by `ibv_wr_*`, and whether it polls by `ibv_start_poll`.
    pub(super) fn interfaces(&self) -> (bool, bool) {
        let worker = &self.runners[0].worker;
        (worker.lanes.iter().all(|lane| lane.qp.is_extended()), worker.send_cq.is_extended())
    }

    pub(super) fn connect(&mut self, peers: &[WorkerAddress], plan: &Plan, role: Role, check: Check<'_>) -> Result<()> {
        if peers.len() != self.runners.len() {
            bail!("the peer has {} threads, this end has {}", peers.len(), self.runners.len());
        }
        self.runners.iter_mut().zip(peers).try_for_each(|(runner, peer)| runner.worker.connect(peer, plan, role, check))
    }

    /// Connects to `peers` by librdmacm, after [`Threads::connect`].
    pub(super) fn connect_by_address(
        &mut self,
        connector: &CmConnector<'_>,
        peers: &[WorkerAddress],
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<()> {
        for (worker, (runner, peer)) in self.runners.iter_mut().zip(peers).enumerate() {
            for (number, (lane, peer)) in runner.worker.lanes.iter_mut().zip(&peer.queue_pairs).enumerate() {
                let id = connector.connect(&mut lane.cm_queue_pair(peer), (worker, number), plan, check)?;
                lane.set_id(id);
            }
        }
        Ok(())
    }

    /// Accepts connections of `peers` by librdmacm.
    pub(super) fn accept_by_address(
        &mut self,
        listener: &CmListener,
        peers: &[WorkerAddress],
        device_port: DevicePort<'_>,
        plan: &Plan,
        check: Check<'_>,
    ) -> Result<()> {
        let mut established = 0;
        while established < plan.queue_pairs() {
            let (data, mut id) = match listener.next(check)? {
                CmEvent::Request(data, id) => (data, id),
                CmEvent::Established => {
                    established += 1;
                    continue;
                }
            };
            let (worker, number) = (data.worker as usize, data.lane as usize);
            let lane = self.runners.get_mut(worker).and_then(|runner| runner.worker.lanes.get_mut(number));
            let peer = peers.get(worker).and_then(|peer| peer.queue_pairs.get(number));
            let (Some(lane), Some(peer)) = (lane.filter(|lane| !lane.is_connected()), peer) else {
                bail!(
                    "the client connects to queue pair {number} of thread {worker}, which does not exist or is already connected"
                );
            };
            cm::accept(&mut lane.cm_queue_pair(peer), &mut id, device_port, plan)?;
            lane.set_id(id);
        }
        Ok(())
    }

    pub(super) fn prepare(&mut self, plan: &Plan, index: usize) -> Result<()> {
        self.runners.iter_mut().try_for_each(|runner| runner.prepare(plan, index))
    }

    /// Compares memory after one size, given the messages per queue pair that this end and the peer have sent.
    pub(super) fn check(&self, plan: &Plan, index: usize, ours: &[Vec<u64>], theirs: &[Vec<u64>]) -> Result<u64> {
        let none = Vec::new();
        let mut compared = 0;
        for (number, runner) in self.runners.iter().enumerate() {
            let (ours, theirs) = (ours.get(number).unwrap_or(&none), theirs.get(number).unwrap_or(&none));
            compared += runner.check(plan, index, ours, theirs)?;
        }
        Ok(compared)
    }

    /// Runs one size with one thread per worker, supervised by `supervise`. When that returns, the threads end as soon
    /// as possible.
    pub(super) fn run(
        &mut self,
        plan: &Plan,
        index: usize,
        shared: &Shared,
        supervise: impl FnOnce(&mut Supervisor<'_>) -> Result<()>,
    ) -> Result<Vec<Outcome>> {
        let (sender, messages) = channel();
        let count = self.runners.len();
        let known = plan.messages_of_lane().filter(|_| plan.compat).map(|messages| messages * u64::from(plan.qps));
        let expected: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(known.unwrap_or(u64::MAX))).collect();
        let (wake, cpus) = (&self.wake, &self.cpus);
        std::thread::scope(|scope| {
            for (number, (runner, expected)) in self.runners.iter_mut().zip(&expected).enumerate() {
                let notifier = Notifier { sender: sender.clone(), wake, number };
                let mut body = move || {
                    let sent = |sent: &[u64]| notifier.notify(ThreadMessage::Sent(number, sent.to_vec()));
                    let outcome = pinned(cpus, number)
                        .and_then(|_pinned| runner.run(&Task { plan, index, shared, expected, sent: &sent }));
                    notifier.notify(ThreadMessage::Ended(number, Box::new(outcome)));
                };
                if plan.compat {
                    // perftest has no other thread, and a second thread makes each system call slower, because the
                    // kernel then counts references to descriptors. The peer's messages are known in advance, and its
                    // failure shows as a timeout.
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
            let mut supervisor = Supervisor {
                messages,
                wake,
                shared,
                expected: &expected,
                sent: vec![None; count],
                outcomes: (0..count).map(|_| None).collect(),
                sent_reported: false,
                ended: 0,
            };
            let result = supervise(&mut supervisor);
            shared.abort.store(supervisor.ended < count, Ordering::Relaxed);
            result?;
            supervisor.outcomes.into_iter().collect::<Option<Vec<_>>>().context("a thread ended without a result")
        })
    }
}

/// Pins the calling thread to the processor of thread `number`.
fn pinned(cpus: &[u32], number: usize) -> Result<Option<Pinned>> {
    cpus.get(number % cpus.len().max(1)).map(|cpu| Pinned::to(*cpu)).transpose()
}

/// Sends messages of one thread to the supervisor.
struct Notifier<'c> {
    sender: Sender<ThreadMessage>,
    wake: &'c OwnedFd,
    number: usize,
}

impl Notifier<'_> {
    fn notify(&self, message: ThreadMessage) {
        // The send fails after the run was aborted.
        let _ = self.sender.send(message);
        let _ = rustix::io::write(self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Notifier<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let bug = anyhow::anyhow!("a thread panicked; this is a bug in rdma-perf");
            self.notify(ThreadMessage::Ended(self.number, Box::new(Err(bug))));
        }
    }
}

impl Supervisor<'_> {
    /// Waits for the next event. `ticks` enables [`Event::Tick`]. The wait ends at the latest when the threads end,
    /// which have a timeout, or when the control connection fails.
    pub(super) fn next(&mut self, control: &Control, interrupt: Option<&impl AsFd>, ticks: bool) -> Result<Event> {
        loop {
            while let Ok(message) = self.messages.try_recv() {
                match message {
                    ThreadMessage::Sent(number, sent) => self.sent[number] = Some(sent),
                    ThreadMessage::Ended(number, result) => {
                        self.ended += 1;
                        match *result {
                            Ok(outcome) => self.outcomes[number] = Some(outcome),
                            Err(error) => return Ok(Event::Failed(error)),
                        }
                        if self.ended == self.outcomes.len() {
                            return Ok(Event::Ended);
                        }
                    }
                }
                if !self.sent_reported && self.sent.iter().all(Option::is_some) {
                    self.sent_reported = true;
                    return Ok(Event::Sent(self.sent.iter().flatten().cloned().collect()));
                }
            }
            let timeout = ticks.then(|| Timespec::try_from(TICK)).transpose()?;
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
            fds.extend(interrupt.map(|fd| PollFd::new(fd, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Ok(Event::Tick),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno).context("poll(2) failed"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                // A later message makes it readable again.
                let _ = rustix::io::read(self.wake, &mut [0; 8]);
                continue;
            }
            if ready.get(2) == Some(&true) {
                return Ok(Event::Interrupted);
            }
            return Ok(Event::Control);
        }
    }

    /// Tells each worker how many messages its peer has sent.
    pub(super) fn set_expected(&self, sent: &[Vec<u64>]) {
        for (expected, sent) in self.expected.iter().zip(sent) {
            let sum = sent.iter().fold(0, |sum: u64, sent| sum.saturating_add(*sent));
            expected.store(sum, Ordering::Release);
        }
    }

    /// Stops posting. Messages in flight still complete.
    pub(super) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}
