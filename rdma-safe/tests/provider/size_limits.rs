//! Queues without room or with little room, buffers too long for a gate, and devices with short messages.

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Operation, PostError, ProtectionDomain, ReceivePool, Work};

use crate::fake::{Config, Cqe, Fake};
use crate::support::{
    CLASSIC, EXTENDED, builder, connect, done, endpoints, in_flight, nothing, on_each_interface, one_under_miri,
};

fn tagged(pd: &ProtectionDomain, tag: usize) -> Buffer {
    pd.allocate(tag).unwrap()
}

#[test]
fn a_queue_of_depth_zero_is_full_and_one_of_depth_one_is_not() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(0).recv_depth(1).build().unwrap();
        let mut b = builder(&pd, interfaces).send_depth(1).recv_depth(0).build().unwrap();
        connect(&mut a, &mut b);
        let full = PostError::QueueFull { posted: 0 };
        let sends_full = |endpoint: &rdma_safe::Endpoint, send_depth| PostError::EndpointFull {
            qp_num: endpoint.queue_pair().number(),
            send_depth,
            pending_sends: 0,
        };
        let rejected = a.send(tagged(&pd, 1)).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.unwrap().len()), (sends_full(&a, 0), 1));
        assert_eq!(a.send_inline(b"x"), Err(sends_full(&a, 0)));
        assert!(a.batch().unwrap().is_empty());
        let rejected = b.receive(tagged(&pd, 1)).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.unwrap().len()), (full, 1));
        nothing(&mut a);
        for tag in 1..=5 {
            a.receive(tagged(&pd, 9)).unwrap();
            assert_eq!(a.receive(tagged(&pd, 9)).unwrap_err().error, full);
            b.post(Work::send(tagged(&pd, tag)).unsignaled()).unwrap();
            assert_eq!(b.send(tagged(&pd, 9)).unwrap_err().error, sends_full(&b, 1));
            assert_eq!(done(&mut a).buffer.unwrap().len(), tag);
            assert_eq!(done(&mut b).buffer.unwrap().len(), tag);
            nothing(&mut a);
            nothing(&mut b);
        }
    });
}

#[test]
fn depths_beyond_any_device_are_refused_before_memory_is_allocated_for_them() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let deep = |sends, receives| builder(&pd, interfaces).send_depth(sends).recv_depth(receives);
        for (sends, receives) in [(u32::MAX, 1), (1, u32::MAX), (1 << 31, 1), (1, 1 << 31)] {
            assert!(deep(sends, receives).build().is_err());
            assert!(deep(sends, receives).build_datagrams(1).is_err());
        }
        for depth in [u32::MAX, 1 << 31] {
            assert!(ReceivePool::new(&pd, depth).is_err());
        }
    });
}

#[test]
fn a_completion_of_unposted_work_is_an_error() {
    on_each_interface(|fake, interfaces| {
        for depth in [1, 2, 3] {
            let pd = fake.pd();
            let mut a = builder(&pd, interfaces).send_depth(depth).recv_depth(depth).build().unwrap();
            // SAFETY: the queue pair is valid, and the field is set at creation.
            let cq = unsafe { (*a.queue_pair().as_raw()).send_cq };
            for tag in 0..depth as usize {
                a.receive(tagged(&pd, 1 + tag)).unwrap();
            }
            let future = 1 << 63 | (u64::from(depth) + 1);
            for wr_id in [1, future, 1 << 63] {
                fake.inject(cq, Cqe { wr_id, opcode: 128, ..Cqe::default() });
                assert!(a.poll().is_err(), "{wr_id:#x}");
            }
            assert_eq!(in_flight(&a), (0, u64::from(depth)));
            let tags: Vec<_> = a.close().unwrap().iter().map(|buffer| buffer.len()).collect();
            assert_eq!(tags, (1..=depth as usize).collect::<Vec<_>>());
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "megabytes")]
fn buffers_too_long_for_a_gate_are_transferred() {
    const MIB: usize = 1 << 20;
    let mut config = Config::default();
    config.ports[0].max_msg_sz = 4 << 20;
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(config.clone());
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(2 * MIB).unwrap(), Access::REMOTE).unwrap();
        for len in [MIB - 1, MIB, MIB + 1, 2 * MIB] {
            b.receive(tagged(&pd, 2 * MIB)).unwrap();
            a.send(tagged(&pd, len)).unwrap();
            a.write(tagged(&pd, len), exposed.remote()).unwrap();
            a.read(tagged(&pd, len), exposed.remote()).unwrap();
            assert_eq!(done(&mut b).byte_len as usize, len);
            for operation in [Operation::Send, Operation::Write, Operation::Read] {
                let completion = done(&mut a);
                assert_eq!((completion.operation, completion.buffer.unwrap().len()), (operation, len));
            }
        }
        let too_long = a.send(tagged(&pd, (4 << 20) + 1)).unwrap_err();
        assert!(matches!(too_long.error, PostError::MessageTooLong { .. }));
        let (first, second) = tagged(&pd, 2 * MIB).into_split(MIB).unwrap();
        b.receive(first).unwrap();
        a.send(second).unwrap();
        assert_eq!(done(&mut b).buffer.unwrap().len(), MIB);
        assert_eq!(done(&mut a).buffer.unwrap().len(), MIB);
    }
}

#[test]
fn released_reads_report_their_length() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        a.post(Work::read(tagged(&pd, 24), exposed.remote()).unsignaled()).unwrap();
        a.post(Work::fetch_add(tagged(&pd, 32), exposed.remote(), 1).unsignaled()).unwrap();
        a.read(tagged(&pd, 40), exposed.remote()).unwrap();
        for len in [24, 8, 40] {
            let completion = done(&mut a);
            assert_eq!((completion.byte_len, completion.buffer.unwrap().len()), (len, len as usize));
        }
    });
}

#[test]
fn a_receive_never_reports_more_bytes_than_its_buffer_has() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        for _ in 0..2 {
            a.receive(tagged(&pd, 8)).unwrap();
        }
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let cq = unsafe { (*a.queue_pair().as_raw()).recv_cq };
        let false_completion =
            |number: u64| Cqe { wr_id: 1 << 63 | number, opcode: 128, byte_len: 1 << 30, ..Cqe::default() };
        fake.inject(cq, false_completion(1));
        let usual = done(&mut a);
        // A forgotten batch closes the gate.
        std::mem::forget(a.batch().unwrap());
        fake.inject(cq, false_completion(2));
        let unusual = done(&mut a);
        assert_eq!((usual.byte_len, unusual.byte_len), (8, 8));
        let buffers = [usual.buffer.unwrap(), unusual.buffer.unwrap()];
        assert_eq!(buffers.each_ref().map(|buffer| buffer.len()), [8, 8]);
        // The device still has the receives.
        drop(a);
    });
}
