//! Objects are destroyed in the only legal order, in whatever order they are dropped.

use std::time::Instant;

use rdma_safe::cq::CompletionQueueBuilder;
use rdma_safe::mr::Pages;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    Access, Buffer, CompletionChannel, CompletionQueue, Context, Device, Endpoint, Error, ExposedRegion,
    ProtectionDomain, QueuePair, QueuePairState, SendFlags, WcStatus,
};

use crate::support::child::{expect_kernel_objects, in_own_process, open_files};
use crate::support::lab::{Data, Lab, Memory, Mode, Op, Wr, cq_builder, next, post};
use crate::support::link::{Link, connected};
use crate::support::{DEADLINE, Rdma, device, error_of, within_deadline};

/// Objects that depend on one another and can be dropped in any order.
///
/// The index in the result of `objects` identifies the kind.
enum Object {
    Device(#[allow(dead_code)] Device),
    Context(#[allow(dead_code)] Context),
    Domain(#[allow(dead_code)] ProtectionDomain),
    Channel(#[allow(dead_code)] CompletionChannel),
    Queue(#[allow(dead_code)] CompletionQueue),
    Pair(#[allow(dead_code)] QueuePair),
    Raw(#[allow(dead_code)] Memory),
    Buffer(#[allow(dead_code)] Buffer),
    Part(#[allow(dead_code)] Buffer),
    Exposed(#[allow(dead_code)] ExposedRegion),
    Endpoint(#[allow(dead_code)] Box<Endpoint>),
    Peer(#[allow(dead_code)] Box<Endpoint>),
}

const KINDS: usize = 12;

/// An object of each kind, with work in flight and unread events, and the memory of raw work, which outlives the objects.
fn objects(rdma: &Rdma, mode: Mode) -> ([Object; KINDS], Memory) {
    let device = Device::by_name(rdma.device_name()).unwrap();
    let context = device.open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let channel = context.create_channel().unwrap();
    let builder = context.completion_queue(16).channel(&channel);
    let mut queue = builder.classic(mode.classic_cq).build().unwrap();
    let builder = pd.queue_pair(&queue, &queue);
    let mut pair = builder.classic(mode.classic_qp).build().unwrap();
    let memory = Memory::new(&pd, 4096);
    // Connected to itself, with a receive and a send whose event is not read.
    let number = pair.number();
    Link::default().connect(rdma, &mut pair, number).unwrap();
    queue.arm(false).unwrap();
    // SAFETY: the memory tolerates any access, and the caller frees it after the queue pair.
    unsafe { pair.receive(1, memory.sge(0..64)) }.unwrap();
    let send = Wr::new(2, Op::Send, Data::One(memory.sge(64..128))).flags(SendFlags::SIGNALED | SendFlags::SOLICITED);
    post(pair.send_batch(), &[send]).unwrap();

    let builder = Endpoint::builder(&pd).port(rdma.port).gid_index(rdma.gid.index);
    let (mut endpoint, mut peer) = connected(builder.events(true).peer_access(Access::REMOTE));
    let exposed = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE).unwrap();
    let mut parts = pd.allocate(3 * 64).unwrap().into_chunks(64).unwrap();
    endpoint.write(parts.pop().unwrap(), exposed.remote()).unwrap();
    peer.receive(parts.pop().unwrap()).unwrap();
    let objects = [
        Object::Device(device),
        Object::Context(context),
        Object::Channel(channel),
        Object::Queue(queue),
        Object::Pair(pair),
        Object::Raw(Memory::new(&pd, 100)),
        Object::Buffer(pd.allocate(64).unwrap()),
        Object::Part(parts.pop().unwrap()),
        Object::Exposed(exposed),
        Object::Endpoint(Box::new(endpoint)),
        Object::Peer(Box::new(peer)),
        Object::Domain(pd),
    ];
    (objects, memory)
}

#[test]
fn any_two_objects_can_be_dropped_first_without_leaks() {
    let Some(rdma) = device() else { return };
    in_own_process("drop_order::any_two_objects_can_be_dropped_first_without_leaks", || {
        let (first, memory) = objects(&rdma, Mode::EXTENDED);
        drop(first);
        drop(memory);
        let files = open_files();
        for first in 0..KINDS {
            for second in (0..KINDS).filter(|second| *second != first) {
                let mode = Mode::ALL[(first + second) % Mode::ALL.len()];
                let (objects, memory) = objects(&rdma, mode);
                let mut objects = objects.map(Some);
                let start = Instant::now();
                drop(objects[first].take());
                drop(objects[second].take());
                // The others are dropped in order of creation or in reverse.
                if first < second {
                    drop(objects)
                } else {
                    objects.into_iter().rev().for_each(drop)
                }
                drop(memory);
                assert!(start.elapsed() < DEADLINE, "object {first}, then {second}, took {:?}", start.elapsed());
            }
        }
        assert_eq!(open_files(), files, "file descriptors");
        for kind in ["qp", "cq", "mr", "pd"] {
            expect_kernel_objects(kind, 0);
        }
    });
}

#[test]
fn objects_of_a_queue_pair_can_be_dropped_in_any_order_without_leaks() {
    let Some(rdma) = device() else { return };
    in_own_process("drop_order::objects_of_a_queue_pair_can_be_dropped_in_any_order_without_leaks", || {
        let files = open_files();
        let mut orders = 0;
        for_each_permutation(&mut [0, 1, 2, 3, 4, 5], 0, &mut |order| {
            let mode = Mode::ALL[orders % Mode::ALL.len()];
            orders += 1;
            let context = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
            let pd = context.alloc_pd().unwrap();
            let channel = context.create_channel().unwrap();
            let queue = cq_builder_of(&context, mode).channel(&channel).build().unwrap();
            let pair = pd.queue_pair(&queue, &queue).build().unwrap();
            let buffer = pd.allocate(64).unwrap();
            let mut objects = [
                Some(Object::Context(context)),
                Some(Object::Domain(pd)),
                Some(Object::Channel(channel)),
                Some(Object::Queue(queue)),
                Some(Object::Pair(pair)),
                Some(Object::Buffer(buffer)),
            ];
            for index in order {
                drop(objects[*index].take());
            }
        });
        assert_eq!(orders, 720);
        assert_eq!(open_files(), files, "file descriptors");
        for kind in ["qp", "cq", "mr", "pd"] {
            expect_kernel_objects(kind, 0);
        }
    });
}

fn cq_builder_of(context: &Context, mode: Mode) -> CompletionQueueBuilder {
    let builder = context.completion_queue(16);
    builder.classic(mode.classic_cq)
}

fn for_each_permutation(items: &mut [usize; 6], from: usize, body: &mut impl FnMut(&[usize; 6])) {
    if from == items.len() {
        return body(items);
    }
    for index in from..items.len() {
        items.swap(from, index);
        for_each_permutation(items, from + 1, body);
        items.swap(from, index);
    }
}

#[test]
fn a_queue_pair_can_be_destroyed_in_every_state_with_work_in_flight() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for steps in 0..5 {
            let builder = Lab::builder(&rdma, mode).connected(false);
            let Lab { mut a, b, .. } = builder.build();
            let link = Link::default();
            let changes = [
                link.to_init(&rdma),
                link.to_rtr(&rdma, b.qp.number()),
                link.to_rts(),
                QueuePairAttributes::new().set_state(QueuePairState::ERR),
            ];
            for change in &changes[..steps] {
                a.qp.modify(change).unwrap();
                a.receive(1, 0..64).unwrap();
            }
            if steps == 3 {
                // The peer does not respond.
                a.post(&[Wr::new(2, Op::Send, Data::One(a.memory.sge(0..64)))]).unwrap();
            }
            a.qp.destroy().unwrap();
        }
    }
}

/// To destroy a queue pair, some providers take the lock of its completion queue, which a cursor of the same thread may hold.
#[test]
fn dropping_a_queue_pair_while_its_queue_is_polled_does_not_deadlock() {
    let Some(rdma) = device() else { return };
    in_own_process("drop_order::dropping_a_queue_pair_while_its_queue_is_polled_does_not_deadlock", || {
        for mode in Mode::each() {
            for destroy in [false, true] {
                let Lab { mut a, b, .. } = Lab::new(&rdma, mode);
                let write = |id| Wr::new(id, Op::Write(b.memory.remote(0)), Data::One(a.memory.sge(0..8)));
                post(a.qp.send_batch(), &[write(1), write(2)]).unwrap();
                let is_extended = a.cq.is_extended();
                within_deadline("a completion", || {
                    let mut poll = a.cq.poll();
                    let completion = poll.next().unwrap()?;
                    let reset = a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET));
                    match reset {
                        Err(error) => {
                            assert!(is_extended && matches!(error, Error::PollInProgress { .. }), "{error:?}")
                        }
                        Ok(()) => assert!(!is_extended, "{mode}: the cursor holds the lock"),
                    }
                    assert_eq!((completion.wr_id(), completion.status()), (1, WcStatus::SUCCESS), "{mode}");
                    Some(())
                });
                if !is_extended {
                    continue;
                }
                let (mut cq, mut qp) = (a.cq, Some(a.qp));
                within_deadline("a completion", || {
                    let mut poll = cq.poll();
                    let completion = poll.next().unwrap()?;
                    let qp = qp.take().expect("exactly one more completion");
                    if destroy {
                        let error = error_of(qp.destroy());
                        assert!(matches!(error, Error::PollInProgress { .. }), "{mode}: {error:?}");
                    } else {
                        drop(qp);
                    }
                    expect_kernel_objects("qp", 2);
                    assert_eq!((completion.wr_id(), completion.status()), (2, WcStatus::SUCCESS), "{mode}");
                    Some(())
                });
                expect_kernel_objects("qp", 1);
                drop(b);
                expect_kernel_objects("qp", 0);
            }
        }
    });
}

#[test]
fn objects_of_different_contexts_cannot_be_combined() {
    let Some(rdma) = device() else { return };
    let other = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
    let (pd, channel) = (other.alloc_pd().unwrap(), other.create_channel().unwrap());
    let cq = rdma.completion_queue(8).build().unwrap();
    let own = other.completion_queue(8).build().unwrap();
    for classic in [false, true] {
        for (send, recv) in [(&cq, &own), (&own, &cq), (&cq, &cq)] {
            let error = error_of(pd.queue_pair(send, recv).classic(classic).build());
            assert!(matches!(error, Error::ForeignContext { object: "completion queue" }), "{error:?}");
        }
        let error = error_of(rdma.completion_queue(8).channel(&channel).classic(classic).build());
        assert!(matches!(error, Error::ForeignContext { object: "completion channel" }), "{error:?}");
    }
}

/// Queues and queue pairs keep their context and domain, so work completes after the handles of both were dropped.
#[test]
fn a_queue_outlives_the_handles_of_its_parents() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let context = Device::by_name(rdma.device_name()).unwrap().open().unwrap();
        let pd = context.alloc_pd().unwrap();
        let mut queue = cq_builder_of(&context, mode).build().unwrap();
        let mut pair = pd.queue_pair(&queue, &queue).build().unwrap();
        let memory = Memory::new(&pd, 4096);
        drop((context, pd));
        let number = pair.number();
        Link::default().connect(&rdma, &mut pair, number).unwrap();
        memory.put(0, b"to itself");
        // SAFETY: the memory tolerates any access and is freed after the queue pair.
        unsafe { pair.receive(1, memory.sge(100..200)) }.unwrap();
        post(pair.send_batch(), &[Wr::new(2, Op::Send, Data::One(memory.sge(0..9)))]).unwrap();
        let mut ids = [next(&mut queue).wr_id, next(&mut queue).wr_id];
        ids.sort_unstable();
        assert_eq!(ids, [1, 2], "{mode}");
        assert_eq!(memory.get(100..109), b"to itself");
        drop(pair);
        drop(memory);
        let _ = cq_builder(&rdma, 8, mode);
    }
}
