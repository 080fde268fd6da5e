//! Asynchronous events of a device, its ports and its objects.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdma_safe::{
    AsyncEvent, AsyncEventType, AsyncEvents, AsyncSource, Context, Device, PortState, QueuePairAttributes,
    QueuePairState,
};

use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::{DEADLINE, Rdma, device, skip, within_deadline};

/// Long enough for an event that should not come to come.
const QUIET: Duration = Duration::from_millis(50);

/// The next event that `wanted` takes; others, of what else happens on the machine, are passed over.
#[track_caller]
fn next(events: &AsyncEvents, what: &str, wanted: impl Fn(&AsyncEvent) -> bool) -> AsyncEvent {
    let start = Instant::now();
    let mut others = Vec::new();
    while start.elapsed() < DEADLINE {
        match events.wait(DEADLINE.saturating_sub(start.elapsed())).unwrap() {
            Some(event) if wanted(&event) => return event,
            Some(event) => others.push(event),
            None => break,
        }
    }
    panic!("no {what} within {DEADLINE:?}, only {others:?}")
}

fn drain(events: &AsyncEvents) {
    while events.try_event().unwrap().is_some() {}
}

/// Fills the completion queue of `lab.a` beyond its room.
fn overrun(lab: &mut Lab) {
    let beyond = u64::from(lab.a.cq.capacity()) + 8;
    let (remote, local) = (lab.b.memory.remote(0), Data::One(lab.a.memory.sge(0..8)));
    for id in 0..beyond {
        lab.a.post(&[Wr::new(id, Op::Write(remote), local)]).unwrap();
    }
}

#[test]
fn a_completion_queue_that_overruns_is_named() {
    let Some(rdma) = device() else { return };
    // Other devices may stop the queue pair, or have more room than they say.
    if !rdma.is_rxe() {
        return;
    }
    for mode in Mode::ALL {
        let events = rdma.async_events().unwrap();
        drain(&events);
        let mut lab = Lab::builder(&rdma, mode).entries(7).depth(64).build();
        let id = lab.a.cq.id();
        overrun(&mut lab);
        let event = next(&events, "CQ_ERR", |event| event.event_type == AsyncEventType::CQ_ERR);
        assert_eq!(event.source, AsyncSource::Cq(id), "{mode}");
        // More events of it may be there, read and unread: none of them keeps it from being destroyed.
        let Lab { a, b, pd } = lab;
        a.qp.destroy().unwrap();
        drop((a.cq, a.memory, b, pd));
        assert_eq!(event.source, AsyncSource::Cq(id));
        drain(&events);
    }
}

#[test]
fn a_drained_send_queue_is_named_and_its_queue_pair_can_go() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    drain(&events);
    let (id, number) = (lab.a.qp.id(), lab.a.qp.number());
    lab.a
        .qp
        .modify(&QueuePairAttributes::new().set_state(QueuePairState::SQD).set_sqd_event(true))
        .expect("a send queue can be drained");
    let event = next(&events, "SQ_DRAINED", |event| event.event_type == AsyncEventType::SQ_DRAINED);
    assert_eq!(event.source, AsyncSource::Qp { id, number });
    lab.a.qp.destroy().unwrap();
    assert_eq!(event.to_string(), format!("SQ_DRAINED: queue pair {number:#08x}"));
}

#[test]
fn events_that_nobody_reads_keep_nothing_from_going() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    drain(&events);
    let mut lab = Lab::builder(&rdma, Mode::ALL[0]).entries(7).depth(64).build();
    let id = lab.a.cq.id();
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::SQD).set_sqd_event(true)).unwrap();
    // The watchdog ends the test if this waits.
    drop(lab);
    while let Some(event) = events.try_event().unwrap() {
        assert_ne!(event.source, AsyncSource::Cq(id), "the kernel drops events with their object");
        assert!(!matches!(event.source, AsyncSource::Qp { .. }), "{event}");
    }
}

#[test]
fn a_queue_pair_in_error_is_heard_of_only_where_the_device_says_so() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    drain(&events);
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    let mut of_queue_pairs = Vec::new();
    while let Some(event) = events.wait(QUIET).unwrap() {
        of_queue_pairs.extend(matches!(event.source, AsyncSource::Qp { .. }).then_some(event));
    }
    if rdma.is_rxe() {
        assert_eq!(of_queue_pairs, [], "SoftRoCE of kernels 6.1 and 6.12 reports no errors of queue pairs");
    }
}

#[test]
fn waiting_for_no_event_ends_in_time() {
    let Some(rdma) = device() else { return };
    let events = rdma.async_events().unwrap();
    drain(&events);
    let wait = Duration::from_millis(30);
    let start = Instant::now();
    // What happens on the machine is nobody's fault.
    if events.wait(wait).unwrap().is_none() {
        assert!(start.elapsed() >= wait);
    }
    assert!(start.elapsed() < DEADLINE);
}

#[test]
fn threads_share_the_events_of_a_context() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    let id = lab.a.qp.id();
    let readers = [rdma.async_events().unwrap(), rdma.async_events().unwrap(), rdma.async_events().unwrap()];
    drain(&readers[0]);
    let drained = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for events in readers {
            let drained = &drained;
            scope.spawn(move || {
                let is_ours = |event: AsyncEvent| matches!(event.source, AsyncSource::Qp { id: of, .. } if of == id);
                let start = Instant::now();
                // Once more after somebody has it: there might be a second.
                let mut rounds_left = 2;
                while rounds_left > 0 && start.elapsed() < DEADLINE {
                    let event = events.wait(QUIET).unwrap();
                    drained.fetch_add(usize::from(event.is_some_and(is_ours)), Ordering::SeqCst);
                    rounds_left -= usize::from(drained.load(Ordering::SeqCst) > 0);
                }
            });
        }
        lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::SQD).set_sqd_event(true)).unwrap();
    });
    assert_eq!(drained.into_inner(), 1, "one event goes to one reader");
}

/// A second SoftRoCE device on an interface of its own, whose link can go down without harm to anyone.
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
        // A panic of the test is the one to be seen.
        for (program, arguments) in
            [("rdma", ["link", "delete", Self::DEVICE]), ("ip", ["link", "delete", Self::INTERFACE])]
        {
            let _ = Command::new(program).args(arguments).output();
        }
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("the program is there");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_port_that_goes_down_and_up_is_reported_by_number() {
    let Some(rdma) = device() else { return };
    // Nobody's network is to be cut for a test.
    if !rdma.is_rxe() {
        return;
    }
    let spare = Spare::new();
    let context = spare.open();
    let events = context.async_events().unwrap();
    let here = rdma.async_events().unwrap();
    drain(&events);
    drain(&here);
    for (state, expected) in [("down", AsyncEventType::PORT_ERR), ("up", AsyncEventType::PORT_ACTIVE)] {
        run("ip", &["link", "set", Spare::INTERFACE, state]);
        let event = next(&events, state, |event| event.event_type == expected);
        assert_eq!(event.source, AsyncSource::Port(1));
        assert_eq!(event.to_string(), format!("{expected}: port 1"));
    }
    while let Some(event) = here.try_event().unwrap() {
        let ours = [AsyncEventType::PORT_ERR, AsyncEventType::PORT_ACTIVE].contains(&event.event_type);
        assert!(!ours, "{event} of another device");
    }
}

/// The example, on the device of the tests; `None` after having said why the test is skipped.
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
fn the_example_ends_well_by_a_signal() {
    let Some(rdma) = device() else { return };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let Some(mut command) = example(&rdma, &[]) else { return };
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the program starts");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, format!("watching {}\n", rdma.device_name()));
        // SAFETY: a signal to a child that was not waited for yet.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let status = within_deadline("the end of the program", || child.try_wait().unwrap());
        assert!(status.success(), "{status}");
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert!(rest.lines().last().is_some_and(|line| line.starts_with("n_events=")), "{rest}");
    }
}

#[test]
fn the_example_ends_in_time_and_refuses_what_it_does_not_know() {
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
