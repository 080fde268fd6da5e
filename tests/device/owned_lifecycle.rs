//! Endpoints are created and dropped, connected or not, with and without work in flight.

use rdma_safe::mr::Pages;
use rdma_safe::qp::ModifyError;
use rdma_safe::{Access, ConnectOptions, Error, GidType, Mtu, QueuePairState, Work};

use crate::owned::wait;
use crate::support::child::{expect_kernel_objects, in_own_process, open_files};
use crate::support::lab::Mode;
use crate::support::link::connected;
use crate::support::{device, error_of, in_flight, pattern};

#[test]
fn endpoints_dropped_in_any_state_leak_nothing() {
    let Some(rdma) = device() else { return };
    in_own_process("owned_lifecycle::endpoints_dropped_in_any_state_leak_nothing", || {
        let pd = rdma.pd();
        let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE_WRITE).unwrap();
        let files = open_files();
        for index in 0..100_usize {
            let mode = Mode::ALL[index % Mode::ALL.len()];
            let builder = rdma
                .endpoint(&pd)
                .events(index % 2 == 0)
                .classic_post(mode.classic_qp)
                .classic_poll(mode.classic_cq)
                .peer_access(Access::REMOTE);
            // 200 endpoints in all, dropped in different states.
            let (mut a, mut b) = match index % 5 {
                0 => (builder.clone().build().unwrap(), builder.build().unwrap()),
                _ => connected(builder),
            };
            b.receive(pd.allocate(64).unwrap()).unwrap();
            if index % 5 > 1 {
                a.send(pd.allocate(64).unwrap()).unwrap();
            }
            if index % 5 > 2 {
                drop(wait(&mut b));
                a.write(pd.allocate(8).unwrap(), region.remote()).unwrap();
            }
            match index % 3 {
                0 => drop((a, b)),
                1 => drop((b, a)),
                _ => {
                    let buffers = a.close().unwrap().len() + b.close().unwrap().len();
                    assert!(buffers <= 3, "{buffers} buffers, at most three were posted");
                }
            }
        }
        assert_eq!(open_files(), files, "file descriptors");
        for (kind, expected) in [("qp", 0), ("cq", 0), ("mr", 1), ("pd", 1)] {
            expect_kernel_objects(kind, expected);
        }
        drop((region, pd));
        expect_kernel_objects("mr", 0);
        expect_kernel_objects("pd", 0);
    });
}

#[test]
fn an_endpoint_with_work_in_flight_can_be_dropped() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for round in 0..10 {
        let (mut a, mut b) = connected(rdma.endpoint(&pd).peer_access(Access::REMOTE));
        let region = pd.expose(Pages::new(1 << 16).unwrap(), Access::REMOTE).unwrap();
        for _ in 0..4 {
            // Reads and writes in flight, sends without a receive, and receives without a send.
            a.write(pd.allocate(1 << 16).unwrap(), region.remote()).unwrap();
            a.read(pd.allocate(1 << 16).unwrap(), region.remote()).unwrap();
            a.send(pd.allocate(1 << 16).unwrap()).unwrap();
            b.receive(pd.allocate(64).unwrap()).unwrap();
        }
        // The region is dropped first, then the endpoints with their buffers in flight.
        if round % 2 == 0 {
            drop(region);
            drop((a, b));
        } else {
            drop((b, a));
            drop(region);
        }
    }
    // The device still works.
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    b.receive(pd.allocate(64).unwrap()).unwrap();
    a.send(pd.allocate(64).unwrap()).unwrap();
    assert_eq!(wait(&mut b).byte_len, 64);
}

#[test]
fn a_forgotten_batch_does_not_lock_the_endpoint() {
    let Some(rdma) = device() else { return };
    for classic in [false, true] {
        let pd = rdma.pd();
        let (mut a, mut b) = connected(rdma.endpoint(&pd).classic_post(classic).inline_data(16));
        for _ in 0..2 {
            b.receive(pd.allocate(64).unwrap()).unwrap();
        }
        let mut batch = a.batch().unwrap();
        batch.add(Work::send_inline(b"forgotten").unsignaled()).unwrap();
        std::mem::forget(batch);
        a.send_inline(b"remembered").unwrap();
        assert_eq!(*wait(&mut b).buffer.unwrap(), *b"remembered", "the forgotten work is not sent");
        a.send_inline(b"and this").unwrap();
        assert_eq!(*wait(&mut b).buffer.unwrap(), *b"and this");
    }
}

#[test]
fn work_of_a_forgotten_batch_is_not_reported_as_done() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).inline_data(16));
    b.receive(pd.allocate(64).unwrap()).unwrap();
    let mut batch = a.batch().unwrap();
    batch.add(Work::send(pd.allocate(64).unwrap())).unwrap();
    batch.add(Work::send(pd.allocate(64).unwrap())).unwrap();
    std::mem::forget(batch);
    assert_eq!(in_flight(&a), (0, 0), "nothing was posted");
    let sent = a.send_inline(b"sent").unwrap();
    assert_eq!(*wait(&mut b).buffer.unwrap(), *b"sent");
    let done = wait(&mut a);
    assert_eq!((done.id, done.buffer.is_none()), (sent, true), "the first completion is of the posted work");
    assert!(a.poll().unwrap().is_none(), "the only completion");
    assert!(a.close().unwrap().is_empty());
}

#[test]
fn both_ends_can_be_moved_to_other_threads() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).events(true));
    const ROUNDS: u64 = 100;
    std::thread::scope(|scope| {
        let pd = &pd;
        let sending = scope.spawn(move || {
            let mut outbox = pd.allocate(128).unwrap();
            for round in 0..ROUNDS {
                outbox.fill_from(&pattern(round, 100)).unwrap();
                a.send(outbox).unwrap();
                outbox = wait(&mut a).buffer.unwrap();
            }
        });
        let receiving = scope.spawn(move || {
            for buffer in pd.allocate(4 * 128).unwrap().into_chunks(128).unwrap() {
                b.receive(buffer).unwrap();
            }
            for round in 0..ROUNDS {
                let inbox = wait(&mut b).buffer.unwrap();
                assert!(*inbox == *pattern(round, 100), "round {round}");
                b.receive(inbox).unwrap();
            }
            b
        });
        // The receiving end must exist until the last ACK has arrived.
        sending.join().unwrap();
        drop(receiving.join().unwrap());
    });
}

#[test]
fn connect_options_reach_the_device() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = (rdma.endpoint(&pd).build().unwrap(), rdma.endpoint(&pd).build().unwrap());
    assert_eq!(a.queue_pair().query().unwrap().state(), Some(QueuePairState::INIT));
    let options = ConnectOptions::default()
        .mtu(Mtu::MTU_1024)
        .timeout(12)
        .retry_count(3)
        .rnr_retry(5)
        .min_rnr_timer(9)
        .traffic_class(32)
        .hop_limit(5)
        .rd_atomic(2);
    a.connect_with(&b.address(), &options).unwrap();
    let set = a.queue_pair().query().unwrap();
    assert_eq!((set.state(), set.path_mtu()), (Some(QueuePairState::RTS), Some(Mtu::MTU_1024)));
    assert_eq!((set.timeout(), set.retry_count(), set.rnr_retry()), (Some(12), Some(3), Some(5)));
    assert_eq!((set.min_rnr_timer(), set.max_rd_atomic()), (Some(9), Some(2)));
    assert_eq!((set.dest_qp_num(), set.rq_psn()), (Some(b.address().qp_num), Some(b.address().psn)));
    assert_eq!(set.sq_psn(), Some(a.address().psn));
    if rdma.gid.gid_type == GidType::ROCE_V2 {
        let route = set.address().unwrap().route.unwrap();
        // The hop limit is not checked: the kernel uses that of its route.
        assert_eq!(route.traffic_class, 32);
        assert_eq!((route.dgid, u32::from(route.sgid_index)), (rdma.gid.gid, rdma.gid.index));
    }
    let error = error_of(a.connect(&b.address()));
    let Error::Modify(error) = error else { panic!("{error:?}") };
    assert!(matches!(*error, ModifyError::InvalidTransition { .. }), "connecting twice: {error:?}");
}

#[test]
fn an_unusable_gid_index_is_refused() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let used: Vec<u32> = rdma.gids(rdma.port).unwrap().iter().map(|entry| entry.index).collect();
    let empty = (0..256).find(|index| !used.contains(index)).unwrap();
    for wanted in [empty, 256, u32::MAX] {
        let error = error_of(rdma.endpoint(&pd).gid_index(wanted).build());
        let Error::NoSuchGid { port, index, table_len, .. } = error else { panic!("{wanted}: {error:?}") };
        assert_eq!((port, index), (rdma.port, wanted));
        assert!(table_len > 0);
    }
}
