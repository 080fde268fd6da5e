//! Objects may be dropped in any order. Each is destroyed once, after its dependents.

use std::any::Any;

use rdma_safe::address::AddressVector;
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Device, Endpoint, WcFields, Work};

use crate::fake::{Config, Cqe, Fake, Live, Mode};
use crate::support::{Interfaces, in_every_order, init, on_each_interface};

type Object = Box<dyn Any>;

/// Memory of a raw region, owned by the test.
struct Memory(*mut [u8]);

impl Memory {
    fn new() -> Self {
        Memory(Box::into_raw(Box::new([0; 64])))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, and dropped once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

const KINDS: [&str; 12] = [
    "Device",
    "Context",
    "ProtectionDomain",
    "Buffer",
    "Buffer",
    "ExposedRegion",
    "RawMemoryRegion",
    "CompletionChannel",
    "CompletionQueue",
    "QueuePair",
    "Endpoint",
    "AddressHandle",
];

/// One object of each of the [`KINDS`], in this order. The queue is armed and has an unread event and an open cursor, and the
/// endpoint has work in flight in both directions.
fn one_of_each(fake: &Fake, interfaces: Interfaces, memory: &Memory) -> Vec<Object> {
    fake.set_mode(Mode::Manual);
    let device = Device::by_name(fake.name()).unwrap();
    let context = device.open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let (first, second) = pd.allocate(64).unwrap().into_split(32).unwrap();
    let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    // SAFETY: the memory outlives all objects, and no work names it.
    let raw = unsafe { pd.register_raw(memory.0.cast(), 64, Access::LOCAL_WRITE).unwrap() };

    let channel = context.create_channel().unwrap();
    let cq = context.completion_queue(16).fields(WcFields::STANDARD).channel(&channel).classic(!interfaces.extended_cq);
    let mut cq = cq.build().unwrap();
    cq.arm(false).unwrap();
    (0..3).for_each(|wr_id| fake.inject(cq.as_raw(), Cqe { wr_id, ..Cqe::default() }));
    let mut poll = cq.poll();
    assert_eq!(poll.next().unwrap().unwrap().wr_id(), 0);
    std::mem::forget(poll);

    let qp = pd.queue_pair(&cq, &cq).send_depth(4).recv_depth(4).classic(!interfaces.extended_qp);
    let mut qp = qp.build().unwrap();
    qp.modify(&init()).unwrap();

    let mut endpoint = Endpoint::builder(&pd)
        .send_depth(4)
        .recv_depth(4)
        .events(true)
        .classic_poll(!interfaces.extended_cq)
        .classic_post(!interfaces.extended_qp)
        .build()
        .unwrap();
    endpoint.connect(&endpoint.address()).unwrap();
    endpoint.receive(pd.allocate(32).unwrap()).unwrap();
    endpoint.send(pd.allocate(32).unwrap()).unwrap();
    endpoint.post(Work::write(pd.allocate(32).unwrap(), exposed.remote()).unsignaled()).unwrap();

    let address = AddressVector::from_gid(1, context.recommended_gid(1).unwrap().gid, 1);
    let handle = pd.address_handle(&address).unwrap();

    vec![
        Box::new(device),
        Box::new(context),
        Box::new(pd),
        Box::new(first),
        Box::new(second),
        Box::new(exposed),
        Box::new(raw),
        Box::new(channel),
        Box::new(cq),
        Box::new(qp),
        Box::new(endpoint),
        Box::new(handle),
    ]
}

/// Drops the objects in this order and checks the violations that the provider recorded.
fn drop_in(order: &[usize], fake: &Fake, interfaces: Interfaces, memory: &Memory) {
    let mut objects: Vec<Option<Object>> = one_of_each(fake, interfaces, memory).into_iter().map(Some).collect();
    let before = fake.live();
    assert_eq!(before, Live { contexts: 1, pds: 1, mrs: 6, channels: 2, cqs: 2, qps: 2, ahs: 1, ..Live::default() });
    for index in order {
        drop(objects[*index].take().expect("each object occurs once in an order"));
    }
    let names = || order.iter().map(|index| KINDS[*index]).collect::<Vec<_>>().join(", ");
    assert_eq!(fake.live(), Live::default(), "after {}", names());
    let violations = fake.take_violations();
    assert!(violations.is_empty(), "after {}: {violations:#?}", names());
}

fn each_destroyed_once(fake: &Fake, rounds: usize) {
    let destroyed = |verb, count| assert_eq!(fake.calls(verb), rounds * count, "{verb}");
    destroyed("ibv_close_device", 1);
    destroyed("ibv_dealloc_pd", 1);
    destroyed("ibv_dereg_mr", 6);
    destroyed("ibv_destroy_comp_channel", 2);
    destroyed("ibv_destroy_cq", 2);
    destroyed("ibv_destroy_qp", 2);
    destroyed("ibv_destroy_ah", 1);
}

#[test]
#[cfg_attr(miri, ignore = "1056 orders; Miri takes some in which every object meets others")]
fn every_pair_of_objects_may_be_dropped_in_either_order() {
    on_each_interface(|fake, interfaces| {
        let memory = Memory::new();
        let mut rounds = 0;
        for first in 0..KINDS.len() {
            for second in (0..KINDS.len()).filter(|second| *second != first) {
                let others = || (0..KINDS.len()).filter(|index| ![first, second].contains(index));
                drop_in(&[first, second].into_iter().chain(others()).collect::<Vec<_>>(), fake, interfaces, &memory);
                // The two objects are last, after all others in reverse order.
                drop_in(&others().rev().chain([first, second]).collect::<Vec<_>>(), fake, interfaces, &memory);
                rounds += 2;
            }
        }
        each_destroyed_once(fake, rounds);
    });
}

/// Drops forward, backward, and in zigzag orders from each object, so each object is dropped next to several others.
#[test]
fn objects_may_be_dropped_in_and_against_the_order_of_their_creation() {
    on_each_interface(|fake, interfaces| {
        let memory = Memory::new();
        let all = KINDS.len();
        let mut orders = vec![(0..all).collect::<Vec<_>>(), (0..all).rev().collect()];
        for first in (0..all).step_by(if cfg!(miri) { 4 } else { 1 }) {
            let step = |index: usize| if index % 2 == 0 { all - index / 2 } else { index.div_ceil(2) };
            orders.push((0..all).map(|index| (first + step(index)) % all).collect());
        }
        orders.iter().for_each(|order| drop_in(order, fake, interfaces, &memory));
        each_destroyed_once(fake, orders.len());
    });
}

/// All orders of the objects that keep others alive: device, context, domain, channel, completion queue, queue pair, endpoint.
#[test]
#[cfg_attr(miri, ignore = "5040 orders")]
fn the_objects_that_hold_others_may_be_dropped_in_every_order() {
    let fake = Fake::new(Config::default());
    let memory = Memory::new();
    let holders = [0, 1, 2, 7, 8, 9, 10];
    let mut rounds = 0;
    in_every_order(&holders, &mut |order| {
        // Memory and the address handle are dropped first in half of the orders, and last in the other half.
        let regions = [3, 4, 5, 6, 11];
        let order: Vec<usize> = match rounds % 2 {
            0 => regions.into_iter().chain(order.iter().copied()).collect(),
            _ => order.iter().copied().chain(regions).collect(),
        };
        let interfaces = Interfaces { extended_cq: rounds % 4 < 2, extended_qp: rounds % 8 < 4 };
        drop_in(&order, &fake, interfaces, &memory);
        rounds += 1;
    });
    assert_eq!(rounds, 5040);
    each_destroyed_once(&fake, rounds);
}

#[test]
fn memory_in_flight_is_deregistered_after_the_queue_pair_is_gone() {
    on_each_interface(|fake, interfaces| {
        let memory = Memory::new();
        let mut objects = one_of_each(fake, interfaces, &memory);
        let endpoint = objects.swap_remove(10);
        drop(objects);
        assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 3, channels: 1, cqs: 1, qps: 1, ..Live::default() });
        // The provider reports the deregistration of memory that a queue pair uses.
        drop(endpoint);
        assert_eq!(fake.live(), Live::default());
    });
}

#[test]
fn clones_share_what_they_are_clones_of() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let pd = context.alloc_pd().unwrap();
    let channel = context.create_channel().unwrap();
    let clones = (context.clone(), pd.clone(), channel.clone());
    drop((context, pd, channel));
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, channels: 1, ..Live::default() });
    drop(clones);
    assert_eq!(fake.live(), Live::default());
    let calls = ["ibv_close_device", "ibv_dealloc_pd", "ibv_destroy_comp_channel"].map(|verb| fake.calls(verb));
    assert_eq!(calls, [1, 1, 1]);
}

#[test]
fn a_device_list_may_go_before_what_was_opened_from_it() {
    let fake = Fake::new(Config::default());
    let devices = rdma_safe::devices().unwrap();
    let device = devices.iter().find(|device| device.name() == fake.name()).unwrap().clone();
    drop(devices);
    assert_eq!(device.name(), fake.name());
    let context = device.open().unwrap();
    drop(device);
    assert_eq!(context.device_name(), fake.name());
    assert_eq!(context.query_port(1).unwrap().gid_table_len(), 16);
}
