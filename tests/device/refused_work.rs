//! Work that a queue pair was not created for, or cannot do, is refused before the provider sees it.

use rdma_safe::mr::Pages;
use rdma_safe::sys::{IBV_ACCESS_MW_BIND, IBV_SEND_INLINE};
use rdma_safe::{Access, Error, Operation, PostError, Remote, RemoteMemory, SendFlags, SendOps, Work, WorkRequest};

use crate::support::interposer::rig::{done, endpoints, lab, next, on_each_mode};
use crate::support::interposer::{Config, interposed_with};
use crate::support::lab::{Data, Lab, Mode, Op, Wr};

#[test]
fn each_operation_can_be_enabled_alone() {
    on_each_mode(|soft, mode| {
        for enabled in (SendOps::RC | SendOps::WINDOWS).iter().step_by(if cfg!(miri) { 5 } else { 1 }) {
            let Lab { mut a, b: _b, pd } = lab(soft, mode).ops(enabled).build();
            let (buffer, remote) = (pd.allocate(8).unwrap(), Remote { address: 0x1000, rkey: 1 });
            let exposed = pd.expose(Pages::new(8).unwrap(), Access::MW_BIND).unwrap();
            assert_eq!(a.qp.operations(), enabled);
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
fn a_read_into_too_many_elements_is_refused() {
    on_each_mode(|soft, mode| {
        let mut lab = lab(soft, mode).build();
        let five = [lab.a.memory.sge(0..8); 5];
        let read = Op::Read(lab.b.memory.remote(0));
        let error = lab.a.post(&[Wr::new(1, read, Data::List(&five))]).unwrap_err();
        assert_eq!(error, PostError::TooManySges { count: 5, max: 4 });
        lab.a.post(&[Wr::new(1, read, Data::List(&five[..4]))]).unwrap();
        assert_eq!(lab.a.next_ok(1).byte_len, Some(32));
    });
}

#[test]
fn messages_beyond_the_port_or_the_peers_memory_are_given_back() {
    for mode in [Mode::EXTENDED, Mode::CLASSIC] {
        let config = Config { max_msg_sz: Some(100), ..Config::default() };
        let Some(soft) = interposed_with(config) else { return };
        let pd = soft.pd();
        let (mut a, _b) = endpoints(&soft, &pd, mode);
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
fn an_endpoint_refuses_atomics_on_other_than_eight_aligned_bytes() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let exposed = pd.expose(Pages::new(32).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote();
        let (mut a, _b) = endpoints(soft, &pd, mode);
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
    });
}

#[test]
fn refused_work_leaves_its_buffer_unchanged() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = endpoints(soft, &pd, mode);
        let misaligned = RemoteMemory { address: 0x1001, len: 8, rkey: 1 };
        let rejected = a.post(Work::fetch_add(pd.allocate(64).unwrap(), misaligned, 1)).unwrap_err();
        assert_eq!(rejected.error, PostError::AtomicOperand);
        assert_eq!(rejected.buffer.unwrap().len(), 64, "only accepted atomics set the length");
    });
}

#[test]
fn unknown_flags_do_not_reach_the_provider() {
    on_each_mode(|soft, mode| {
        let mut lab = lab(soft, mode).build();
        lab.b.receive(1, 0..8).unwrap();
        // Inline data that is requested through raw flags would bypass the length check.
        let smuggled = SendFlags::from_bits_retain(IBV_SEND_INLINE.0 | 1 << 20);
        let data = Data::One(lab.a.memory.sge(0..4));
        lab.a.post(&[Wr::new(1, Op::Send, data).flags(smuggled)]).unwrap();
        assert_eq!(soft.take_posted()[0].flags, 0);
        lab.b.next_ok(1);
    });
}

#[test]
fn loopback_cannot_access_memory_that_is_not_exposed() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut private = pd.allocate(8).unwrap();
        private.copy_from_slice(b"keep out");
        for rkey in [private.lkey(), 0, private.lkey() + 1].into_iter().take(if cfg!(miri) { 1 } else { 3 }) {
            let (mut a, _b) = endpoints(soft, &pd, mode);
            let forged = RemoteMemory { address: private.address(), len: 8, rkey };
            a.post(Work::write_inline(b"intruder", forged)).unwrap();
            let failed = next(&mut a);
            assert_eq!(failed.status, rdma_safe::WcStatus::REM_ACCESS_ERR);
        }
        assert_eq!(&private[..], b"keep out");
        let error = pd.register_with(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap_err();
        assert!(matches!(error, Error::BufferAccess { .. }), "buffers lend slices, so peers must not access them");
        let window = Access::from_bits_retain(IBV_ACCESS_MW_BIND.0);
        assert!(pd.register_with(Pages::new(8).unwrap(), window).is_err(), "not through a memory window, either");
    });
}
