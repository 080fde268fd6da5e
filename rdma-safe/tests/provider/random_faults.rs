//! Random runs with forgotten batches, panicking closures, failing postings and broken connections. Each buffer comes back
//! once, in order, with the right completion.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use proptest::prelude::*;
use rdma_safe::endpoint::Armed;
use rdma_safe::interface::{Classic, Extended, Interface};
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Buffer, Completion, Endpoint, EndpointBuilder, ExposedRegion, Operation, PollError, PostError,
    ProtectionDomain, WcStatus, Work, WorkId,
};

use crate::fake::{Bad, Config, Fake, Mode, PostFault};
use crate::support::{Interfaces, builder, connect};

#[derive(Clone, Copy, Debug)]
enum Verb {
    Send,
    SendImm,
    SendInvalidate,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    Inline,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Post,
    Drop,
    Forget,
    Panic,
}

/// A step of the random run. `peer` selects the endpoint.
#[derive(Clone, Debug)]
enum Step {
    /// Posts with `send`, `write` or `read` if there is a function for it.
    Post {
        verb: Verb,
        signaled: bool,
    },
    Batch {
        work: Vec<(Verb, bool)>,
        end: End,
    },
    Receive {
        peer: bool,
    },
    Foreign {
        peer: bool,
    },
    Take {
        peer: bool,
        panic: bool,
    },
    Arm {
        peer: bool,
    },
    Refuse,
    PollFails {
        peer: bool,
    },
    Progress,
}

fn verb() -> impl Strategy<Value = Verb> {
    use Verb::*;
    prop::sample::select(
        &[Send, Send, Send, SendImm, SendInvalidate, Write, WriteImm, Read, FetchAdd, Inline, Inline][..],
    )
}

fn step() -> impl Strategy<Value = Step> {
    let end = prop::sample::select(&[End::Post, End::Post, End::Drop, End::Forget, End::Panic][..]);
    prop_oneof![
        6 => (verb(), any::<bool>()).prop_map(|(verb, signaled)| Step::Post { verb, signaled }),
        3 => (prop::collection::vec((verb(), any::<bool>()), 0..5), end).prop_map(|(work, end)| Step::Batch { work, end }),
        4 => prop::bool::weighted(0.7).prop_map(|peer| Step::Receive { peer }),
        1 => any::<bool>().prop_map(|peer| Step::Foreign { peer }),
        8 => (any::<bool>(), prop::bool::weighted(0.2)).prop_map(|(peer, panic)| Step::Take { peer, panic }),
        2 => any::<bool>().prop_map(|peer| Step::Arm { peer }),
        1 => Just(Step::Refuse),
        1 => any::<bool>().prop_map(|peer| Step::PollFails { peer }),
        2 => Just(Step::Progress),
    ]
}

/// The final fault of a run.
#[derive(Clone, Copy, Debug)]
enum FinalFault {
    None,
    Break,
    /// A failed posting whose result the provider does not report.
    Doubt {
        taken: bool,
    },
}

const FAULTS: [FinalFault; 4] =
    [FinalFault::None, FinalFault::Break, FinalFault::Doubt { taken: false }, FinalFault::Doubt { taken: true }];

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

struct World<'f> {
    fake: &'f Fake,
    pd: ProtectionDomain,
    other: ProtectionDomain,
    exposed: ExposedRegion,
    keys: Vec<ExposedRegion>,
    messages: VecDeque<Message>,
    next: usize,
    interfaces: Interfaces,
    most_pending: u32,
    mode: Mode,
}

/// Length of written and read data.
const LEN: usize = 8;

impl World<'_> {
    fn buffer(&mut self) -> (Buffer, usize) {
        self.next += 1;
        let mut buffer = self.pd.allocate(8 * self.next).unwrap();
        buffer.set_len(LEN).unwrap();
        (buffer, 8 * self.next)
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
                let key = self.pd.expose(Pages::new(8).unwrap(), Access::REMOTE).unwrap();
                let rkey = key.remote().rkey;
                self.keys.push(key);
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
        if !cfg!(miri) && side.endpoint.arm().unwrap() == Armed::Wait && self.mode != Mode::AtPoll {
            assert!(!self.take(side, false), "armed although there was a completion");
        }
    }

    fn poll_fails<I: Interface>(&mut self, side: &mut Side<I>) {
        let verb = if self.interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" };
        self.fake.fail(verb, libc::EIO);
        match side.endpoint.poll_with(|_| -> () { panic!("the closure must not run") }) {
            Err(PollError::Provider(_)) => {}
            other => assert!(matches!(other, Ok(None)), "{other:?}"),
        }
        self.fake.heal(verb);
    }

    fn doubt<I: Interface>(&mut self, side: &mut Side<I>, taken: bool) {
        if self.interfaces.extended_qp {
            self.fake.fail_wr_complete(libc::EIO, taken);
        } else {
            self.fake.fail_post_send(PostFault { errno: libc::EIO, taken: taken.into(), bad: Bad::Null });
        }
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
            Step::Refuse if self.interfaces.extended_qp => self.fake.fail_wr_complete(libc::ENOSPC, false),
            Step::Refuse => {
                self.fake.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
            }
            // The queue is polled only if no completion remains to be handed out.
            Step::PollFails { peer: false } if a.sends.is_empty() => self.poll_fails(a),
            Step::PollFails { peer: true } if b.receives.is_empty() => self.poll_fails(b),
            Step::PollFails { .. } => {}
            Step::Progress => self.fake.progress(),
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
            world.fake.break_qp(a.endpoint.queue_pair().number());
            world.fake.break_qp(b.endpoint.queue_pair().number());
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

fn start(
    steps: &[Step],
    interfaces: Interfaces,
    fixed: bool,
    fault: FinalFault,
    depths: (u32, u32),
    mode: Mode,
    kind: u32,
) {
    let (depth, most_pending) = depths;
    let mut config = if kind == 1 { Config::rxe() } else { Config::default() };
    config.wc_flags |= u64::from(rdma_sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0);
    if kind == 2 {
        config.ports[0].max_msg_sz = 1 << 16;
    }
    let fake = Fake::new(config);
    let context = fake.open();
    let (pd, other) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let timestamps = kind == 3 && interfaces.extended_cq;
    let made = |builder: EndpointBuilder<'_>| builder.timestamps(timestamps).events(!cfg!(miri)).build().unwrap();
    let mut a = made(builder(&pd, interfaces).send_depth(depth).pending_sends(most_pending).recv_depth(2));
    let mut b = made(builder(&pd, interfaces).recv_depth(depth));
    connect(&mut a, &mut b);
    fake.set_mode(mode);
    let exposed = pd.expose(Pages::new(LEN).unwrap(), Access::REMOTE).unwrap();
    let mut world = World {
        fake: &fake,
        pd,
        other,
        exposed,
        keys: Vec::new(),
        messages: VecDeque::new(),
        next: 0,
        interfaces,
        most_pending,
        mode,
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
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 3 } else { 150 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn each_buffer_comes_back_once_whatever_goes_wrong(
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 30 } else { 150 }),
        extended_cq in any::<bool>(),
        extended_qp in any::<bool>(),
        fixed in any::<bool>(),
        fault in prop::sample::select(&FAULTS[..]),
        depths in (1_u32..9, prop_oneof![Just(0), 1_u32..6]),
        mode in prop_oneof![Just(Mode::AtPost), Just(Mode::AtPoll), Just(Mode::Manual)],
        kind in 0_u32..4,
    ) {
        start(&steps, Interfaces { extended_cq, extended_qp }, fixed, fault, depths, mode, kind);
    }
}
