//! Asynchronous events of a device, its ports and its objects.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdma_safe::async_event::{AsyncEvent, AsyncEventType, AsyncSource};
use rdma_safe::qp::{QpId, QueuePairAttributes};
use rdma_safe::{AsyncEvents, Context, Device, PortState, QueuePair, QueuePairState};

use crate::channel::is_readable;
use crate::support::child::{in_own_process, open_files};
use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::{DEADLINE, Rdma, device, rounds, skip, within_deadline};

/// How long a test waits before it concludes that no event comes.
const NO_EVENT_WAIT: Duration = Duration::from_millis(50);

/// Waits for an event that `is_wanted`. Other events, which anything on the machine may cause, are ignored.
#[track_caller]
fn next(events: &AsyncEvents, what: &str, is_wanted: impl Fn(&AsyncEvent) -> bool) -> AsyncEvent {
    let start = Instant::now();
    let mut others = Vec::new();
    while start.elapsed() < DEADLINE {
        match events.wait(DEADLINE.saturating_sub(start.elapsed())).unwrap() {
            Some(event) if is_wanted(&event) => return event,
            Some(event) => others.push(event),
            None => break,
        }
    }
    panic!("no {what} within {DEADLINE:?}, only {others:?}")
}

fn drain(events: &AsyncEvents) {
    while events.try_event().unwrap().is_some() {}
}

/// Drains the send queue of `qp`, which raises the event SQ_DRAINED.
fn drain_sends(qp: &mut QueuePair) {
    let attributes = QueuePairAttributes::new().set_state(QueuePairState::SQD).set_sqd_event(true);
    qp.modify(&attributes).expect("a send queue can be drained");
}

fn source_of(qp: &QueuePair) -> AsyncSource {
    AsyncSource::Qp { id: qp.id(), number: qp.number() }
}

fn is_drained(event: &AsyncEvent, source: AsyncSource) -> bool {
    (event.event_type, event.source) == (AsyncEventType::SQ_DRAINED, source)
}

/// Whether the device is known to report overruns. Other devices may stop the queue pair earlier, or have
/// more entries than they report.
fn reports_overruns(rdma: &Rdma) -> bool {
    rdma.is_rxe() || rdma.is_soft()
}

/// Posts more work than the completion queue of `lab.a` has entries.
fn overrun(lab: &mut Lab) {
    let beyond = u64::from(lab.a.cq.capacity()) + 8;
    let (remote, local) = (lab.b.memory.remote(0), Data::One(lab.a.memory.sge(0..8)));
    for id in 0..beyond {
        lab.a.post(&[Wr::new(id, Op::Write(remote), local)]).unwrap();
    }
}

#[test]
fn events_of_an_overrun_name_their_objects_and_do_not_block_their_destruction() {
    let Some(rdma) = device() else { return };
    if !reports_overruns(&rdma) {
        return println!("skipped: not every device reports an overrun");
    }
    for mode in Mode::each() {
        let events = rdma.async_events().unwrap();
        drain(&events);
        let mut lab = Lab::builder(&rdma, mode).entries(7).depth(64).build();
        let mut expected = vec![(AsyncEventType::CQ_ERR, AsyncSource::Cq(lab.a.cq.id()))];
        // SoftRoCE leaves the queue pair as it is.
        if rdma.is_soft() {
            expected.push((AsyncEventType::QP_FATAL, source_of(&lab.a.qp)));
        }
        overrun(&mut lab);
        let is_expected = |event: &AsyncEvent| expected.contains(&(event.event_type, event.source));
        let mut held: Vec<AsyncEvent> = Vec::new();
        while held.len() < expected.len() {
            held.push(next(&events, "event of the overrun", |event| is_expected(event) && !held.contains(event)));
        }
        // SoftRoCE may raise more events of the queue. Neither unread events nor those in `held` block the destruction.
        let Lab { a, b, pd } = lab;
        a.qp.destroy().unwrap();
        drop((a.cq, a.memory, b, pd));
        assert!(held.iter().all(is_expected), "{mode}: {held:?}");
        drain(&events);
    }
}

#[test]
fn the_event_of_a_drained_send_queue_names_its_queue_pair() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        drain(&events);
        let source = source_of(&lab.a.qp);
        drain_sends(&mut lab.a.qp);
        let event = next(&events, "SQ_DRAINED", |event| event.event_type == AsyncEventType::SQ_DRAINED);
        assert_eq!(event.source, source);
        let number = lab.a.qp.number();
        lab.a.qp.destroy().unwrap();
        assert_eq!(event.to_string(), format!("SQ_DRAINED: queue pair {number:#08x}"));
    }
}

#[test]
fn unread_events_are_dropped_with_their_object() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    drain(&events);
    let mut overrun_lab = Lab::builder(&rdma, Mode::EXTENDED).entries(7).depth(64).build();
    let overrun_cq = AsyncSource::Cq(overrun_lab.a.cq.id());
    if reports_overruns(&rdma) {
        overrun(&mut overrun_lab);
        assert!(is_readable(&events, DEADLINE), "an event of the overrun");
    }
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let kept = source_of(&lab.b.qp);
    drain_sends(&mut lab.a.qp);
    drain_sends(&mut lab.b.qp);
    // The watchdog aborts the test if the destruction waits.
    lab.a.qp.destroy().unwrap();
    drop(overrun_lab);
    let event =
        next(&events, "SQ_DRAINED", |event| matches!(event.source, AsyncSource::Qp { .. } | AsyncSource::Cq(_)));
    assert_eq!(event.source, kept, "the queue pair that still exists");
    while let Some(event) = events.try_event().unwrap() {
        assert!(!matches!(event.source, AsyncSource::Qp { .. }) && event.source != overrun_cq, "{event}");
    }
}

#[test]
fn a_queue_pair_moved_to_the_error_state_raises_no_event() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    drain(&events);
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    let mut of_queue_pairs = Vec::new();
    while let Some(event) = events.wait(NO_EVENT_WAIT).unwrap() {
        of_queue_pairs.extend(matches!(event.source, AsyncSource::Qp { .. }).then_some(event));
    }
    // An RNIC may report it all the same.
    if rdma.is_rxe() || rdma.is_soft() {
        assert_eq!(of_queue_pairs, []);
    }
}

#[test]
fn a_wait_without_events_ends_after_its_timeout() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    drain(&events);
    let wait = Duration::from_millis(30);
    let start = Instant::now();
    // Anything on the machine may cause an event.
    if events.wait(wait).unwrap().is_none() {
        assert!(start.elapsed() >= wait);
    }
    events.wait(Duration::ZERO).unwrap();
    assert!(start.elapsed() < DEADLINE);
}

#[test]
fn an_event_ends_a_wait_of_any_length() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    for timeout in [DEADLINE, Duration::MAX] {
        let mut lab = Lab::new(&rdma, Mode::EXTENDED);
        drain(&events);
        let source = source_of(&lab.a.qp);
        std::thread::scope(|scope| {
            scope.spawn(|| while !is_drained(&events.wait(timeout).unwrap().expect("an event"), source) {});
            drain_sends(&mut lab.a.qp);
        });
        let source = source_of(&lab.b.qp);
        drain_sends(&mut lab.b.qp);
        within_deadline("an event without waiting", || {
            events.wait(Duration::ZERO).unwrap().filter(|event| is_drained(event, source))
        });
    }
}

#[test]
fn each_event_goes_to_one_of_many_threads() {
    let Some(rdma) = device() else { return };
    let mut labs: Vec<Lab> = (0..rounds(8, 2)).map(|_| Lab::new(&rdma, Mode::EXTENDED)).collect();
    let qps = || labs.iter().flat_map(|lab| [&lab.a.qp, &lab.b.qp]);
    let expected: Vec<QpId> = qps().map(QueuePair::id).collect();
    let readers = [(); 3].map(|()| rdma.async_events().unwrap());
    drain(&readers[0]);
    let read = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for events in readers {
            let (read, expected) = (&read, &expected);
            scope.spawn(move || {
                let start = Instant::now();
                // Once all events are read, each reader waits once more for a repeated one.
                let mut waits_left = 2;
                while waits_left > 0 && start.elapsed() < DEADLINE {
                    let event = events.wait(NO_EVENT_WAIT).unwrap();
                    let mut read = read.lock().unwrap();
                    if let Some(AsyncSource::Qp { id, .. }) = event.map(|event| event.source) {
                        read.extend(expected.contains(&id).then_some(id));
                    }
                    waits_left -= usize::from(read.len() >= expected.len());
                }
            });
        }
        for lab in &mut labs {
            drain_sends(&mut lab.a.qp);
            drain_sends(&mut lab.b.qp);
        }
    });
    let read = read.into_inner().unwrap();
    assert_eq!(read.len(), expected.len());
    assert!(expected.iter().all(|id| read.contains(id)));
}

#[test]
fn queue_pairs_are_destroyed_while_another_thread_reads_their_events() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The object of an event may be destroyed right after the event is read.
            while !is_done.load(Ordering::Relaxed) {
                if events.try_event().unwrap().is_none() {
                    std::thread::yield_now();
                }
            }
        });
        for _ in 0..rounds(100, 3) {
            let mut lab = Lab::new(&rdma, Mode::EXTENDED);
            drain_sends(&mut lab.a.qp);
            drain_sends(&mut lab.b.qp);
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn queue_pair_ids_are_not_reused() {
    let Some(rdma) = device() else { return };
    let mut ids: Vec<QpId> = Vec::new();
    for _ in 0..4 {
        let other = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
        for context in [&*rdma, &other] {
            let cq = context.completion_queue(4).build().unwrap();
            let qp = context.alloc_pd().unwrap().queue_pair(&cq, &cq).build().unwrap();
            assert_eq!(qp.id(), qp.id());
            assert!(!ids.contains(&qp.id()), "{:?} among {ids:?}", qp.id());
            ids.push(qp.id());
        }
    }
}

#[test]
fn events_keep_their_context_open() {
    let Some(rdma) = device() else { return };
    in_own_process("async_events::events_keep_their_context_open", || {
        let files = open_files();
        let context = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
        let first = context.async_events().unwrap();
        let events = first.clone();
        drop((context, first));
        drain(&events);
        assert_eq!(events.context().device_name(), rdma.device_name());
        assert!(events.context().query_port(rdma.port).is_ok());
        assert!(cfg!(miri) || open_files() > files);
        drop(events);
        assert_eq!(open_files(), files);
    });
}

#[test]
fn the_descriptor_of_events_is_non_blocking() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    // SAFETY: the descriptor is open, and the call only reads its flags.
    let flags = unsafe { libc::fcntl(events.as_fd().as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0);
}

/// A second SoftRoCE device on a network interface that no other test uses.
struct Spare;

impl Spare {
    const INTERFACE: &'static str = "spare0";
    const DEVICE: &'static str = "spare_rxe0";

    fn new() -> Self {
        run("ip", &["link", "add", Self::INTERFACE, "type", "dummy"]);
        let spare = Spare;
        run("ip", &["link", "set", Self::INTERFACE, "up"]);
        run("rdma", &["link", "add", Self::DEVICE, "type", "rxe", "netdev", Self::INTERFACE]);
        spare
    }

    fn open(&self) -> Context {
        let context = within_deadline("a device node", || Device::by_name(Self::DEVICE).ok()?.open().ok());
        let active = || (context.query_port(1).unwrap().state() == PortState::ACTIVE).then_some(());
        within_deadline("an active port", active);
        context
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // Errors are ignored: a panic here would hide the panic of the test.
        for (program, arguments) in
            [("rdma", ["link", "delete", Self::DEVICE]), ("ip", ["link", "delete", Self::INTERFACE])]
        {
            let _ = Command::new(program).args(arguments).output();
        }
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("the program is installed");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_port_that_goes_down_and_up_is_reported_by_number() {
    let Some(rdma) = device() else { return };
    // A test must not take down the link of an RNIC, and soft0 has none.
    if !rdma.is_rxe() {
        return println!("skipped: only SoftRoCE has a link that can go down");
    }
    let spare = Spare::new();
    let context = spare.open();
    let events = context.async_events().unwrap();
    let other_events = rdma.async_events().unwrap();
    drain(&events);
    drain(&other_events);
    for (state, expected) in [("down", AsyncEventType::PORT_ERR), ("up", AsyncEventType::PORT_ACTIVE)] {
        run("ip", &["link", "set", Spare::INTERFACE, state]);
        let event = next(&events, state, |event| event.event_type == expected);
        assert_eq!(event.source, AsyncSource::Port(1));
        assert_eq!(event.to_string(), format!("{expected}: port 1"));
    }
    while let Some(event) = other_events.try_event().unwrap() {
        let is_of_spare = [AsyncEventType::PORT_ERR, AsyncEventType::PORT_ACTIVE].contains(&event.event_type);
        assert!(!is_of_spare, "{event} of another device");
    }
}

/// The example, on the device of the tests. `None` after printing why the test is skipped.
fn example(rdma: &Rdma, arguments: &[&str]) -> Option<Command> {
    let tests = std::env::current_exe().expect("the test's program has a path");
    let file = tests.parent()?.parent()?.join("examples/async_events");
    if !file.is_file() {
        return skip(&format!("{} is not there; build it with `cargo build --example async_events`", file.display()));
    }
    let mut command = Command::new(file);
    command.args(["-d", rdma.device_name()]).args(arguments).stdin(Stdio::null());
    Some(command)
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no programs")]
fn a_signal_ends_the_example_with_success() {
    let Some(rdma) = device() else { return };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let Some(mut command) = example(&rdma, &[]) else { return };
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the program starts");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, format!("watching {}\n", rdma.device_name()));
        // SAFETY: the child was not waited for yet, so the process number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let status = within_deadline("the end of the program", || child.try_wait().unwrap());
        assert!(status.success(), "{status}");
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert!(rest.lines().last().is_some_and(|line| line.starts_with("n_events=")), "{rest}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no programs")]
fn the_example_ends_after_its_time_and_refuses_an_unknown_device() {
    let Some(rdma) = device() else { return };
    let Some(mut command) = example(&rdma, &["-t", "0"]) else { return };
    let start = Instant::now();
    let output = command.output().unwrap();
    assert!(output.status.success() && start.elapsed() < DEADLINE);
    assert!(String::from_utf8_lossy(&output.stdout).starts_with(&format!("watching {}\n", rdma.device_name())));
    let Some(mut command) = example(&rdma, &["-d", "no_such_device"]) else { return };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("no RDMA device named no_such_device"), "{text}");
}
