//! Random runs with forgotten batches, panicking closures, failing postings, late completions and broken connections. Each
//! buffer comes back once, in order, with the right completion.

mod steps;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use proptest::prelude::*;
use rdma_safe::endpoint::Armed;
use rdma_safe::interface::{Classic, Extended, Interface};
use rdma_safe::mr::Pages;
use rdma_safe::mw::{MemoryWindow, Type2};
use rdma_safe::sys::{
    IBV_ACCESS_REMOTE_WRITE, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WR_BIND_MW, Zeroed, ibv_inc_rkey,
    ibv_mw_bind_info, ibv_qp, ibv_send_wr,
};
use rdma_safe::{
    Access, Buffer, Completion, Endpoint, EndpointBuilder, ExposedRegion, Operation, PollError, PostError,
    ProtectionDomain, WcStatus, Work, WorkId,
};

use crate::support::RXE;
use crate::support::interposer::rig::{builder, cq_of};
use crate::support::interposer::{Bad, Config, Interposed, PostFault, interposed_with};
use crate::support::lab::Mode;
use crate::support::link::connect;
use steps::{End, FAULTS, FinalFault, Kind, Setup, Step, Verb, setup, step};

/// Expected completion of posted work. A buffer is identified by its capacity; 0 means no buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Expected {
    /// `None` if the posting did not return an identifier.
    id: Option<WorkId>,
    operation: Operation,
    tag: usize,
    silent: bool,
}

/// An endpoint and its expected completions.
struct Side<I: Interface> {
    endpoint: Endpoint<I>,
    sends: VecDeque<Expected>,
    receives: VecDeque<Expected>,
    /// Buffers in forgotten batches. They may be returned or dropped.
    forgotten: Vec<usize>,
}

/// The expected effect of a message on the receive that it consumes.
#[derive(Clone, Copy, Debug)]
struct Message {
    len: u32,
    imm: Option<u32>,
    key: Option<u32>,
    write: bool,
}

impl<I: Interface> Side<I> {
    fn new(endpoint: Endpoint<I>) -> Self {
        Side { endpoint, sends: VecDeque::new(), receives: VecDeque::new(), forgotten: Vec::new() }
    }

    /// Takes a completion, or drops it by a panic, and compares it with the expected one.
    fn take(&mut self, panic: bool) -> Option<(Completion, Expected)> {
        let mut shown = None;
        let closure = |completion: Completion| {
            shown = Some(completion);
            if panic {
                resume_unwind(Box::new(()))
            }
        };
        match catch_unwind(AssertUnwindSafe(|| self.endpoint.poll_with(closure))) {
            Ok(taken) => assert_eq!(taken.unwrap().is_some(), shown.is_some()),
            Err(_) => assert!(shown.is_some()),
        }
        let completion = shown?;
        let from = if completion.id.is_receive() { &mut self.receives } else { &mut self.sends };
        if completion.status == WcStatus::SUCCESS {
            while from.front().is_some_and(|expected| expected.silent && expected.id != Some(completion.id)) {
                from.pop_front();
            }
        } else {
            // Completed unsignaled work before a failure is not reported.
            while from.front().is_some_and(|expected| expected.silent && expected.id < Some(completion.id)) {
                from.pop_front();
            }
        }
        let expected = from.pop_front().expect("work that was posted");
        assert_eq!(completion.id, expected.id.unwrap_or(completion.id));
        assert_eq!(completion.buffer.as_ref().map_or(0, Buffer::capacity), expected.tag);
        let operation = completion.operation;
        if operation != Operation::ReceiveWrite {
            assert_eq!(operation, expected.operation);
        }
        Some((completion, expected))
    }

    fn close(self) {
        let forgotten = |tag: &usize| self.forgotten.contains(tag);
        let tags = self.endpoint.close().unwrap();
        let tags: Vec<_> = tags.iter().map(Buffer::capacity).filter(|tag| !forgotten(tag)).collect();
        let expected: Vec<_> =
            self.sends.iter().chain(&self.receives).map(|expected| expected.tag).filter(|tag| *tag != 0).collect();
        assert_eq!(tags, expected);
    }
}

struct World<'s> {
    soft: &'s Interposed,
    pd: ProtectionDomain,
    other: ProtectionDomain,
    exposed: ExposedRegion,
    /// Windows of the peer, each of which one send invalidates.
    windows: Vec<MemoryWindow<Type2>>,
    under_windows: ExposedRegion,
    peer: *mut ibv_qp,
    messages: VecDeque<Message>,
    next: usize,
    mode: Mode,
    most_pending: u32,
    /// Whether completions are held back until the next [`Step::Release`].
    late: bool,
}

/// Send depth of the peer, which only binds windows. It is more than the windows of a run.
const PEER_SENDS: u32 = 1024;
/// Length of written and read data.
const LEN: usize = 8;

impl World<'_> {
    fn buffer(&mut self) -> (Buffer, usize) {
        self.next += 1;
        let mut buffer = self.pd.allocate(8 * self.next).unwrap();
        buffer.set_len(LEN).unwrap();
        (buffer, 8 * self.next)
    }

    /// Binds a new window of the peer. Returns its remote key.
    fn bind_window(&mut self) -> u32 {
        let window = self.pd.memory_window::<Type2>().unwrap();
        let rkey = ibv_inc_rkey(window.rkey());
        let mut bind = ibv_send_wr { opcode: IBV_WR_BIND_MW, ..ibv_send_wr::zeroed() };
        // An endpoint has no function for this. Without IBV_SEND_SIGNALED it gets no completion of the binding.
        // SAFETY: the queue pair of the peer exists until the end of the run, and so do the window and its region.
        unsafe {
            bind.__bindgen_anon_2.bind_mw.mw = window.as_raw();
            bind.__bindgen_anon_2.bind_mw.rkey = rkey;
            let mr = self.under_windows.as_raw();
            let (addr, mw_access_flags) = ((*mr).addr.addr() as u64, IBV_ACCESS_REMOTE_WRITE.0);
            bind.__bindgen_anon_2.bind_mw.bind_info = ibv_mw_bind_info { mr, addr, length: 8, mw_access_flags };
            self.soft.post_send(self.peer, &mut bind);
        }
        self.windows.push(window);
        rkey
    }

    fn work(&mut self, verb: Verb, signaled: bool) -> (Work<'static>, Operation, usize, Option<Message>) {
        let remote = self.exposed.remote();
        let imm = self.next as u32;
        let plain = Message { len: LEN as u32, imm: None, key: None, write: false };
        let ((buffer, tag), inline) = (self.buffer(), &b"inline");
        let (work, operation, tag, message) = match verb {
            Verb::Send => (Work::send(buffer), Operation::Send, tag, Some(plain)),
            Verb::SendImm => {
                (Work::send(buffer).imm(imm), Operation::Send, tag, Some(Message { imm: Some(imm), ..plain }))
            }
            Verb::SendInvalidate => {
                let rkey = self.bind_window();
                let message = Message { key: Some(rkey), ..plain };
                (Work::send_invalidate(buffer, rkey), Operation::Send, tag, Some(message))
            }
            Verb::Write => (Work::write(buffer, remote), Operation::Write, tag, None),
            Verb::WriteImm => {
                let message = Message { imm: Some(imm), write: true, ..plain };
                (Work::write(buffer, remote).imm(imm), Operation::Write, tag, Some(message))
            }
            Verb::Read => (Work::read(buffer, remote), Operation::Read, tag, None),
            Verb::FetchAdd => (Work::fetch_add(buffer, remote, 1), Operation::Atomic, tag, None),
            Verb::Inline => (Work::send_inline(&inline[..]), Operation::Send, 0, Some(Message { len: 6, ..plain })),
        };
        (if signaled { work } else { work.unsignaled() }, operation, tag, message)
    }

    /// Posts one work request, with the shortest function for it.
    fn post<I: Interface>(&mut self, side: &mut Side<I>, verb: Verb, signaled: bool) {
        let remote = self.exposed.remote();
        let (work, operation, tag, message) = self.work(verb, signaled);
        let posted = match (verb, signaled) {
            (Verb::Send, true) => side.endpoint.send(recreated_buffer(&mut self.next, &self.pd)),
            (Verb::Write, true) => side.endpoint.write(recreated_buffer(&mut self.next, &self.pd), remote),
            (Verb::Read, true) => side.endpoint.read(recreated_buffer(&mut self.next, &self.pd), remote),
            _ => side.endpoint.post(work),
        };
        match posted {
            Ok(id) => {
                side.sends.push_back(Expected { id: Some(id), operation, tag, silent: tag == 0 && !signaled });
                self.messages.extend(message);
            }
            Err(rejected) => {
                assert!(matches!(rejected.error, PostError::EndpointFull { .. } | PostError::QueueFull { posted: 0 }));
                assert_eq!(rejected.buffer.map_or(0, |buffer| buffer.capacity()), tag);
            }
        }
    }

    fn batch<I: Interface>(&mut self, side: &mut Side<I>, work: &[(Verb, bool)], end: End) {
        let mut added = Vec::new();
        let filled = catch_unwind(AssertUnwindSafe(|| {
            let mut batch = side.endpoint.batch().unwrap();
            for (verb, signaled) in work {
                let (work, operation, tag, message) = self.work(*verb, *signaled);
                match batch.add(work) {
                    Ok(id) => {
                        added.push((Expected { id: Some(id), operation, tag, silent: tag == 0 && !signaled }, message))
                    }
                    Err(rejected) => assert_eq!(rejected.buffer.map_or(0, |buffer| buffer.capacity()), tag),
                }
            }
            match end {
                End::Post => return batch.post(),
                End::Drop => drop(batch),
                End::Forget => std::mem::forget(batch),
                End::Panic => resume_unwind(Box::new(())),
            }
            Ok(())
        }));
        if !matches!(end, End::Post) {
            if matches!(end, End::Forget) {
                side.forgotten.extend(added.iter().map(|(expected, _)| expected.tag));
            }
            return;
        }
        match filled.unwrap() {
            Ok(()) => {
                for (expected, message) in added {
                    side.sends.push_back(expected);
                    self.messages.extend(message);
                }
            }
            Err(unposted) => {
                let back: Vec<_> = unposted.buffers.iter().map(Buffer::capacity).collect();
                let tags: Vec<_> = added.iter().map(|(expected, _)| expected.tag).filter(|tag| *tag != 0).collect();
                assert_eq!(back, tags);
            }
        }
    }

    fn receive<I: Interface>(&mut self, side: &mut Side<I>) {
        let (buffer, tag) = self.buffer();
        match side.endpoint.receive(buffer) {
            Ok(id) => {
                side.receives.push_back(Expected { id: Some(id), operation: Operation::Receive, tag, silent: false })
            }
            Err(rejected) => {
                assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
                assert_eq!(rejected.buffer.unwrap().capacity(), tag);
            }
        }
    }

    fn foreign<I: Interface>(&mut self, side: &mut Side<I>) {
        for rejected in [
            side.endpoint.send(self.other.allocate(8).unwrap()).unwrap_err(),
            side.endpoint.receive(self.other.allocate(8).unwrap()).unwrap_err(),
        ] {
            let full = matches!(rejected.error, PostError::EndpointFull { .. } | PostError::QueueFull { posted: 0 });
            assert!(full || rejected.error == PostError::ForeignBuffer);
            assert!(rejected.buffer.unwrap().pd().is_same(&self.other));
        }
    }

    fn take<I: Interface>(&mut self, side: &mut Side<I>, panic: bool) -> bool {
        let Some((completion, expected)) = side.take(panic) else { return false };
        let buffer = completion.buffer.as_ref();
        if completion.status != WcStatus::SUCCESS {
            assert_eq!((completion.imm(), completion.invalidated_rkey(), completion.byte_len), (None, None, 0));
            return true;
        }
        match expected.operation {
            Operation::Receive => {
                let message = self.messages.pop_front().expect("a message that was sent");
                assert_eq!(completion.operation == Operation::ReceiveWrite, message.write);
                assert_eq!(completion.byte_len, message.len);
                assert_eq!((completion.imm(), completion.invalidated_rkey()), (message.imm, message.key));
                assert_eq!(buffer.unwrap().len() as u32, if message.write { 0 } else { message.len });
            }
            Operation::Read | Operation::Atomic => assert_eq!(completion.byte_len as usize, LEN),
            _ => assert_eq!(completion.byte_len, 0),
        }
        true
    }

    fn arm<I: Interface>(&mut self, side: &mut Side<I>) {
        // Miri has no poll(2), which waiting for events needs.
        if cfg!(miri) {
            return;
        }
        // The queue has all completions of this moment. Later ones are held back, so they do not disturb the check.
        self.soft.fetch(cq_of(side.endpoint.queue_pair()));
        self.soft.hold();
        if side.endpoint.arm().unwrap() == Armed::Wait {
            assert!(!self.take(side, false), "armed although there was a completion");
        }
        if !self.late {
            self.soft.release();
        }
    }

    fn poll_fails<I: Interface>(&mut self, side: &mut Side<I>) {
        let verb = self.mode.poll_verb();
        self.soft.fail(verb, libc::EIO);
        match side.endpoint.poll_with(|_| -> () { panic!("the closure must not run") }) {
            Err(PollError::Provider(_)) => {}
            other => assert!(matches!(other, Ok(None)), "{other:?}"),
        }
        self.soft.heal(verb);
    }

    fn doubt<I: Interface>(&mut self, side: &mut Side<I>, taken: bool) {
        self.soft.doubt_send(self.mode, taken);
        let (buffer, tag) = self.buffer();
        let rejected = match side.endpoint.send(buffer) {
            // The send is pending. Its result is unknown once it is posted.
            Ok(id) => {
                side.sends.push_back(Expected { id: Some(id), operation: Operation::Send, tag, silent: false });
                self.messages.push_back(Message { len: LEN as u32, imm: None, key: None, write: false });
                return;
            }
            Err(rejected) => rejected,
        };
        if matches!(rejected.error, PostError::EndpointFull { .. }) {
            return;
        }
        assert!(matches!(rejected.error, PostError::MaybePosted { .. }) && rejected.buffer.is_none());
        side.sends.push_back(Expected { id: None, operation: Operation::Send, tag, silent: false });
        if taken {
            self.messages.push_back(Message { len: LEN as u32, imm: None, key: None, write: false });
        }
        let (buffer, _) = self.buffer();
        assert_eq!(side.endpoint.receive(buffer).unwrap_err().error, PostError::EndpointFailed);
        assert_eq!(side.endpoint.batch().unwrap_err(), PostError::EndpointFailed);
    }

    /// Waits for the messages that have receives, and releases the completions that are held back.
    fn release<A: Interface, B: Interface>(&mut self, a: &Side<A>, b: &Side<B>) {
        let qp = b.endpoint.queue_pair();
        let sent = self.messages.len().saturating_sub(a.endpoint.pending_sends() as usize);
        // The endpoint may have polled completions that it has not returned yet.
        let polled = b.receives.len() - self.soft.receives_in_flight(qp.number());
        self.soft.await_completions(cq_of(qp), sent.min(b.receives.len()).saturating_sub(polled));
        self.soft.release();
        if self.late {
            self.soft.hold();
        }
    }

    fn step<A: Interface, B: Interface>(&mut self, a: &mut Side<A>, b: &mut Side<B>, step: &Step) {
        match step {
            Step::Post { verb, signaled } => self.post(a, *verb, *signaled),
            Step::Batch { work, end } => self.batch(a, work, *end),
            Step::Receive { peer: false } => self.receive(a),
            Step::Receive { peer: true } => self.receive(b),
            Step::Foreign { peer: false } => self.foreign(a),
            Step::Foreign { peer: true } => self.foreign(b),
            Step::Take { peer: false, panic } => _ = self.take(a, *panic),
            Step::Take { peer: true, panic } => _ = self.take(b, *panic),
            Step::Arm { peer: false } => self.arm(a),
            Step::Arm { peer: true } => self.arm(b),
            // A refused pending send ends the endpoint, unless other work is in flight.
            Step::Refuse if self.most_pending > 0 => {}
            Step::Refuse if self.mode.classic_qp => {
                self.soft.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
            }
            Step::Refuse => self.soft.fail_wr_complete(libc::ENOSPC, false),
            // The queue is polled only if no completion remains to be handed out.
            Step::PollFails { peer: false } if a.sends.is_empty() => self.poll_fails(a),
            Step::PollFails { peer: true } if b.receives.is_empty() => self.poll_fails(b),
            Step::PollFails { .. } => {}
            Step::Release => self.release(a, b),
        }
    }
}

/// Recreates the buffer that `World::work` has just created.
fn recreated_buffer(next: &mut usize, pd: &ProtectionDomain) -> Buffer {
    let mut buffer = pd.allocate(8 * *next).unwrap();
    buffer.set_len(LEN).unwrap();
    buffer
}

fn run<A: Interface, B: Interface>(
    world: &mut World<'_>,
    a: Endpoint<A>,
    b: Endpoint<B>,
    steps: &[Step],
    fault: FinalFault,
) {
    let (mut a, mut b) = (Side::new(a), Side::new(b));
    let (first, last) = steps.split_at(steps.len() / 2);
    first.iter().for_each(|step| world.step(&mut a, &mut b, step));
    // Endpoints may be moved at any time, here to the heap.
    let (mut a, mut b) = (Box::new(a), Box::new(b));
    last.iter().for_each(|step| world.step(&mut a, &mut b, step));
    match fault {
        FinalFault::None => {}
        FinalFault::Break => {
            for number in [a.endpoint.queue_pair().number(), b.endpoint.queue_pair().number()] {
                // SAFETY: only this thread uses the queue pair.
                unsafe { world.soft.break_qp(number) };
            }
        }
        FinalFault::Doubt { taken } => world.doubt(&mut a, taken),
    }
    if !matches!(fault, FinalFault::None) {
        while world.take(&mut a, false) {}
        while world.take(&mut b, false) {}
    }
    a.close();
    b.close();
}

fn start(steps: &[Step], fault: FinalFault, setup: Setup) {
    let Setup { mode, fixed, depth, most_pending, late, kind } = setup;
    let mut config = Config { further_fields: IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0.into(), ..Config::default() };
    match kind {
        Kind::Rxe => config.vendor_id = Some(RXE),
        Kind::ShortMessages => config.max_msg_sz = Some(1 << 16),
        Kind::Plain | Kind::Timestamps => {}
    }
    let Some(soft) = interposed_with(config) else { return };
    let (pd, other) = (soft.pd(), soft.pd());
    let timestamps = matches!(kind, Kind::Timestamps) && !mode.classic_cq;
    let made = |builder: EndpointBuilder<'_>| builder.timestamps(timestamps).events(!cfg!(miri)).build().unwrap();
    let mut a = made(builder(&soft, &pd, mode).send_depth(depth).pending_sends(most_pending).recv_depth(2));
    let mut b = made(builder(&soft, &pd, mode).send_depth(PEER_SENDS).recv_depth(depth));
    connect(&mut a, &mut b);
    if late {
        soft.hold();
    }
    let exposed = pd.expose(Pages::new(LEN).unwrap(), Access::REMOTE).unwrap();
    let mut world = World {
        soft: &soft,
        windows: Vec::new(),
        under_windows: pd.expose(Pages::new(8).unwrap(), Access::MW_BIND).unwrap(),
        peer: b.queue_pair().as_raw(),
        pd,
        other,
        exposed,
        messages: VecDeque::new(),
        next: 0,
        mode,
        most_pending,
        late,
    };
    match fixed {
        false => run(&mut world, a, b, steps, fault),
        true => match a.with_interface::<Extended>() {
            Ok(a) => run(&mut world, a, b.with_interface::<Extended>().unwrap(), steps, fault),
            Err(a) => match a.with_interface::<Classic>() {
                Ok(a) => run(&mut world, a, b.with_interface::<Classic>().unwrap(), steps, fault),
                Err(a) => run(&mut world, a, b, steps, fault),
            },
        },
    }
    if matches!(kind, Kind::Rxe) {
        assert_eq!(soft.calls("next_poll"), 0, "SoftRoCE repeats completions after next_poll");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 150 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn each_buffer_comes_back_once_despite_faults(
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 30 } else { 150 }),
        fault in prop::sample::select(&FAULTS[..]),
        setup in setup(),
    ) {
        start(&steps, fault, setup);
    }
}
