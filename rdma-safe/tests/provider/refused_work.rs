//! Work that a queue pair was not created for, or cannot do in its state, is refused before the provider sees it.

use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Error, Inline, Operation, PostError, QueuePairState, Remote, RemoteMemory, SendFlags, SendOps, Sge,
    WcFields, Work, WorkRequest,
};

use crate::fake::{Config, Fake};
use crate::support::{
    CLASSIC, EXTENDED, builder, connect, done, endpoints, in_flight, init, on_each_interface, post, raw_pair, raw_with,
    receive, rtr, seen, to_rts,
};

#[test]
fn an_operation_that_was_not_enabled_is_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (buffer, remote) = (pd.allocate(8).unwrap(), Remote { address: 0x1000, rkey: 1 });
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::MW_BIND).unwrap();
        for enabled in (SendOps::RC | SendOps::WINDOWS).iter().step_by(if cfg!(miri) { 5 } else { 1 }) {
            let make = || raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp.operations(enabled));
            let (mut a, b) = (make(), make());
            assert_eq!(a.qp.operations(), enabled);
            to_rts(&mut a.qp, b.qp.number());
            let wr = WorkRequest::new(1);
            let mut window = pd.memory_window().unwrap();
            let info = exposed.bind_info(0, 8, Access::REMOTE_READ).unwrap();
            let mut batch = a.qp.send_batch().unwrap();
            // SAFETY: nothing is posted.
            let results = unsafe {
                [
                    (SendOps::SEND, batch.send(wr, buffer.sge())),
                    (SendOps::SEND_WITH_IMM, batch.send_imm(wr, 1, buffer.sge())),
                    (SendOps::SEND_WITH_INV, batch.send_invalidate(wr, 1, buffer.sge())),
                    (SendOps::RDMA_WRITE, batch.write(wr, remote, buffer.sge())),
                    (SendOps::RDMA_WRITE_WITH_IMM, batch.write_imm(wr, remote, 1, buffer.sge())),
                    (SendOps::RDMA_READ, batch.read(wr, remote, buffer.sge())),
                    (SendOps::ATOMIC_CMP_AND_SWP, batch.compare_swap(wr, remote, 1, 2, buffer.sge())),
                    (SendOps::ATOMIC_FETCH_AND_ADD, batch.fetch_add(wr, remote, 1, buffer.sge())),
                    (SendOps::BIND_MW, batch.bind(wr, &mut window, info).map(drop)),
                    (SendOps::LOCAL_INV, batch.invalidate(wr, 1)),
                ]
            };
            for (op, result) in results {
                let expected = if op == enabled { Ok(()) } else { Err(PostError::NotEnabled { op }) };
                assert_eq!(result, expected);
            }
            assert_eq!(batch.len(), 1);
        }
    });
}

#[test]
fn operations_that_reliable_connections_lack_cannot_be_enabled() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let unknown = SendOps::from_bits_retain(1 << 40);
    let error = pd.queue_pair(&cq, &cq).operations(SendOps::SEND | unknown).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == unknown), "{error}");
}

#[test]
fn inline_data_that_is_too_long_is_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, interfaces);
        assert_eq!(a.qp.capacity().max_inline_data, 64);
        let (long, half) = ([0; 65], [0; 33]);
        let lists: [&[&[u8]]; 2] = [&[&long], &[&half, &half]];
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            let error = batch.send(WorkRequest::new(1), Inline(&long)).unwrap_err();
            assert_eq!(error, PostError::InlineTooLong { len: 65, max: 64 });
            for (list, len) in lists.into_iter().zip([65, 66]) {
                let error = batch.send(WorkRequest::new(1), rdma_safe::post::InlineList(list)).unwrap_err();
                assert_eq!(error, PostError::InlineTooLong { len, max: 64 });
            }
            batch.send(WorkRequest::new(1), Inline(&long[..64])).unwrap();
        }
        drop(batch);

        let (mut a, _b) = endpoints(&pd, interfaces);
        let error = a.send_inline(&long).unwrap_err();
        assert_eq!(error, PostError::InlineTooLong { len: 65, max: 64 });
        assert!(error.to_string().contains("QueuePairBuilder::inline_data"), "{error}");
        assert_eq!(in_flight(&a), (0, 0));
    });
}

#[test]
fn too_many_elements_are_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let buffer = pd.allocate(8).unwrap();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let five = [buffer.sge(); 5];
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            let error = batch.send(WorkRequest::new(1), &five[..]).unwrap_err();
            assert_eq!(error, PostError::TooManySges { count: 5, max: 4 });
            let remote = Remote { address: 0, rkey: 0 };
            let error = batch.read(WorkRequest::new(1), remote, &five[..]).unwrap_err();
            assert_eq!(error, PostError::TooManySges { count: 5, max: 4 });
            batch.send(WorkRequest::new(1), &five[..4]).unwrap();
        }
        drop(batch);
        let mut batch = b.qp.recv_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            assert_eq!(batch.receive(1, &five), Err(PostError::TooManySges { count: 5, max: 4 }));
            batch.receive(1, &five[..4]).unwrap();
        }
    });
}

#[test]
fn a_batch_holds_at_most_max_batch_requests() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let buffer = pd.allocate(8).unwrap();
        let make = || raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp.max_batch(3));
        let (mut a, mut b) = (make(), make());
        to_rts(&mut a.qp, b.qp.number());
        to_rts(&mut b.qp, a.qp.number());
        let mut batch = b.qp.recv_batch().unwrap();
        // SAFETY: the memory outlives the queue pair, and the test does not read it.
        unsafe {
            (1..=3).for_each(|wr_id| batch.receive(wr_id, &[buffer.sge()]).unwrap());
            assert_eq!(batch.receive(4, &[buffer.sge()]), Err(PostError::BatchFull { max: 3 }));
        }
        batch.post().unwrap();
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: inline data needs no memory after the call.
        unsafe {
            (1..=3).for_each(|wr_id| batch.send(WorkRequest::new(wr_id).signaled(), Inline(b"x")).unwrap());
            if !interfaces.extended_qp {
                assert_eq!(batch.send(WorkRequest::new(4), Inline(b"x")), Err(PostError::BatchFull { max: 3 }));
            }
        }
        assert_eq!(batch.len(), 3);
        batch.post().unwrap();
        assert_eq!((seen(&mut a.cq).len(), seen(&mut b.cq).len()), (3, 3));
    });
}

#[test]
fn work_is_refused_in_a_wrong_state_and_the_error_names_the_state() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let buffer = pd.allocate(8).unwrap();
        let mut raw = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp);
        let not_ready = |state| PostError::NotReady { state };
        assert_eq!(raw.qp.send_batch().unwrap_err(), not_ready(QueuePairState::RESET));
        assert_eq!(raw.qp.recv_batch().unwrap_err(), not_ready(QueuePairState::RESET));
        assert_eq!(receive!(raw, 1, buffer.sge()), Err(not_ready(QueuePairState::RESET)));
        raw.qp.modify(&init()).unwrap();
        assert_eq!(raw.qp.send_batch().unwrap_err(), not_ready(QueuePairState::INIT));
        receive!(raw, 1, buffer.sge()).unwrap();
        raw.qp.modify(&rtr(raw.qp.number())).unwrap();
        assert_eq!(raw.qp.send_batch().unwrap_err(), not_ready(QueuePairState::RTR));
        assert!(not_ready(QueuePairState::RTR).to_string().contains("is in RTR"));
        raw.qp.modify(&crate::support::rts()).unwrap();
        post!(raw, send(WorkRequest::new(2).signaled(), Inline(b"self"));).unwrap();
        assert_eq!(&buffer[..4], b"self");

        let mut endpoint = builder(&pd, interfaces).build().unwrap();
        let rejected = endpoint.send(pd.allocate(8).unwrap()).unwrap_err();
        assert_eq!(rejected.error, not_ready(QueuePairState::INIT));
        assert_eq!(rejected.buffer.unwrap().len(), 8);
        endpoint.receive(pd.allocate(8).unwrap()).unwrap();
        assert_eq!(fake.calls("wr_start") + fake.calls("ibv_post_send"), 1);
    });
}

#[test]
fn a_buffer_of_another_domain_is_given_back() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let (pd, other) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let rejected = a.send(other.allocate(8).unwrap()).unwrap_err();
        assert_eq!(rejected.error, PostError::ForeignBuffer);
        assert!(rejected.buffer.unwrap().pd().is_same(&other));
        let rejected = b.receive(other.allocate(8).unwrap()).unwrap_err();
        assert_eq!(rejected.error, PostError::ForeignBuffer);
        assert!(rejected.buffer.is_some());
        assert_eq!(fake.calls("ibv_post_recv"), 0);
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
    });
}

#[test]
fn messages_beyond_the_port_or_the_peers_memory_are_given_back() {
    let mut config = Config::default();
    config.ports[0].max_msg_sz = 100;
    for interfaces in [EXTENDED, CLASSIC] {
        let fake = Fake::new(config.clone());
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(50).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote();
        let buffer = |len| pd.allocate(len).unwrap();
        let too_long = PostError::MessageTooLong { len: 101, max: 100 };
        let too_short = PostError::RemoteTooShort { len: 51, remote: 50 };
        for (work, error, len) in [
            (Work::send(buffer(101)), too_long, 101),
            (Work::write(buffer(101), remote), too_long, 101),
            (Work::write(buffer(51), remote), too_short, 51),
            (Work::read(buffer(51), remote), too_short, 51),
        ] {
            let rejected = a.post(work).unwrap_err();
            assert_eq!((rejected.error, rejected.buffer.unwrap().len()), (error, len));
        }
        let rejected = a.post(Work::write_inline(&[0; 51], remote)).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.is_none()), (too_short, true));
        assert!(rejected.to_string().contains("51 bytes to transfer"), "{rejected}");
        a.write(buffer(50), remote).unwrap();
        assert_eq!(done(&mut a).operation, Operation::Write);
    }
}

#[test]
fn atomic_operands_must_be_eight_aligned_bytes() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let exposed = pd.expose(Pages::new(32).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let odd = pd.allocate(16).unwrap().into_split(4).unwrap().1;
        let small = pd.allocate(7).unwrap();
        let cases = [
            (Work::fetch_add(odd, remote, 1), PostError::AtomicOperand),
            (Work::fetch_add(small, remote, 1), PostError::AtomicOperand),
            (Work::fetch_add(pd.allocate(8).unwrap(), remote.slice(4, 8).unwrap(), 1), PostError::AtomicOperand),
            (Work::compare_swap(pd.allocate(8).unwrap(), remote.slice(1, 8).unwrap(), 1, 2), PostError::AtomicOperand),
            (
                Work::compare_swap(pd.allocate(8).unwrap(), remote.slice(0, 7).unwrap(), 1, 2),
                PostError::RemoteTooShort { len: 8, remote: 7 },
            ),
        ];
        for (work, error) in cases {
            let rejected = a.post(work).unwrap_err();
            assert_eq!(rejected.error, error);
            assert!(rejected.buffer.is_some());
        }
        let (mut a, _b) = raw_pair(&pd, interfaces);
        let result = pd.allocate(16).unwrap();
        let mut batch = a.qp.send_batch().unwrap();
        let short = Sge { len: 4, ..result.sge() };
        // SAFETY: nothing is posted.
        unsafe {
            assert_eq!(batch.fetch_add(WorkRequest::new(1), remote, 1, short), Err(PostError::AtomicOperand));
            assert_eq!(batch.fetch_add(WorkRequest::new(1), remote, 1, result.sge()), Err(PostError::AtomicOperand));
        }
        assert!(batch.is_empty());
    });
}

#[test]
fn refused_work_leaves_its_buffer_unchanged() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let misaligned = RemoteMemory { address: 0x1001, len: 8, rkey: 1 };
        let rejected = a.post(Work::fetch_add(pd.allocate(64).unwrap(), misaligned, 1)).unwrap_err();
        assert_eq!(rejected.error, PostError::AtomicOperand);
        assert_eq!(rejected.buffer.unwrap().len(), 64, "only accepted atomics set the length");
    });
}

#[test]
fn unknown_flags_do_not_reach_the_provider() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let buffer = pd.allocate(8).unwrap();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        receive!(b, 1, buffer.sge()).unwrap();
        // Inline data that is requested through raw flags would bypass the length check.
        let smuggled = SendFlags::from_bits_retain(rdma_sys::IBV_SEND_INLINE.0 | 1 << 20);
        fake.take_posted();
        post!(a, send(WorkRequest::new(1).with_flags(smuggled), Sge { len: 4, ..buffer.sge() });).unwrap();
        assert_eq!(fake.take_posted()[0].flags, 0);
        fake.take_violations();
    });
}

#[test]
fn loopback_cannot_access_memory_that_is_not_exposed() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut private = pd.allocate(8).unwrap();
        private.copy_from_slice(b"keep out");
        for rkey in [private.lkey(), 0, private.lkey() + 1].into_iter().take(if cfg!(miri) { 1 } else { 3 }) {
            let mut a = builder(&pd, interfaces).build().unwrap();
            let mut b = builder(&pd, interfaces).build().unwrap();
            connect(&mut a, &mut b);
            let forged = RemoteMemory { address: private.address(), len: 8, rkey };
            a.post(Work::write_inline(b"intruder", forged)).unwrap();
            let failed = a.poll().unwrap().unwrap();
            assert_eq!(failed.status, rdma_safe::WcStatus::REM_ACCESS_ERR);
        }
        assert_eq!(&private[..], b"keep out");
        let error = pd.register_with(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap_err();
        assert!(matches!(error, Error::BufferAccess { .. }), "buffers lend slices, so peers must not access them");
        let window = Access::from_bits_retain(rdma_sys::IBV_ACCESS_MW_BIND.0);
        assert!(pd.register_with(Pages::new(8).unwrap(), window).is_err(), "not through a memory window, either");
    });
}
