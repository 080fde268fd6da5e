//! The raw API: failures and the statuses of their completions.

use std::ptr::NonNull;
use std::time::Instant;

use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::sys::*;
use rdma_safe::{
    Access, ProtectionDomain, QueuePair, QueuePairState, Remote, SendFlags, Sge, WcFlags, WcOpcode, WcStatus,
};

use crate::support::lab::{self, Data, Lab, MEMORY, Memory, Mode, Op, Wr};
use crate::support::link::{Link, PSN};
use crate::support::{DEADLINE, Rdma, device, within_deadline};

/// Connection attributes with few retries. SoftRoCE treats seven retries as unlimited.
fn few_retries() -> Link {
    Link { retry_count: 6, rnr_retry: 1, min_rnr_timer: 1, ..Link::default() }
}

fn connected(rdma: &Rdma, mode: Mode, link: Link) -> Lab {
    Lab::builder(rdma, mode).link(link).build()
}

#[test]
fn a_wrong_remote_key_is_a_remote_access_error_and_changes_nothing() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let bad = |remote: Remote| Remote { rkey: remote.rkey ^ 0xff, ..remote };
        for index in 0..4 {
            let mut lab = connected(&rdma, mode, Link::default());
            lab.b.memory.put_u64(0, 5);
            let to = bad(lab.b.memory.remote(0));
            let op = [Op::Write(to), Op::Read(to), Op::FetchAdd(to, 1), Op::CompareSwap(to, 5, 1)][index];
            lab.a.post(&[Wr::new(1, op, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
            let wc = lab.a.next();
            assert_eq!((wc.wr_id, wc.status), (1, WcStatus::REM_ACCESS_ERR), "{mode}: {op:?}");
            assert_eq!(lab.b.memory.get_u64(0), 5, "{mode}: {op:?}");
        }
    }
}

#[test]
fn an_address_outside_the_region_is_a_remote_access_error() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, Link::default());
        let end = MEMORY;
        lab.a.memory.put(0, &[0xff; 8]);
        let op = Op::Write(lab.b.memory.remote(end - 4));
        lab.a.post(&[Wr::new(1, op, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR, "{mode}");
        assert_eq!(lab.b.memory.get(end - 4..end), [0; 4], "{mode}");
    }
}

#[test]
fn a_queue_pair_without_an_access_right_refuses_what_its_region_allows() {
    let Some(rdma) = device() else { return };
    for (granted, index) in [(Access::REMOTE_READ, 0), (Access::REMOTE_WRITE, 1), (Access::REMOTE_WRITE, 2)] {
        let mut lab = connected(&rdma, Mode::EXTENDED, Link { access: granted, ..Link::default() });
        lab.b.memory.put_u64(0, 5);
        let to = lab.b.memory.remote(0);
        let op = [Op::Write(to), Op::Read(to), Op::FetchAdd(to, 1)][index];
        lab.a.post(&[Wr::new(1, op, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        let status = lab.a.next().status;
        // IBTA allows both statuses.
        assert!(matches!(status, WcStatus::REM_ACCESS_ERR | WcStatus::REM_INV_REQ_ERR), "{op:?}: {status:?}");
        assert_eq!(lab.b.memory.get_u64(0), 5, "{op:?}");
    }
}

#[test]
fn a_wrong_local_key_fails_at_the_sender() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, Link::default());
        lab.b.receive(1, 0..64).unwrap();
        let sge = lab.a.memory.sge(0..8);
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(Sge { lkey: sge.lkey ^ 0xff, ..sge }))]).unwrap();
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (1, lab::local_failure(&rdma)), "{mode}");
    }
}

#[test]
fn memory_of_another_domain_cannot_be_sent() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, Link::default());
        let foreign = Memory::new(&rdma.pd(), 4096);
        lab.b.receive(1, 0..64).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(foreign.sge(0..8)))]).unwrap();
        let status = lab.a.next().status;
        assert_eq!(status, lab::local_failure(&rdma), "{mode}");
        drop(lab);
    }
}

#[test]
fn a_receive_that_is_too_small_fails_at_both_ends() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, Link::default());
        lab.b.receive(1, 0..15).unwrap();
        lab.b.receive(2, 0..64).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..16)))]).unwrap();
        let (sent, received) = (lab.a.next(), lab.b.next());
        assert_eq!((sent.wr_id, received.wr_id), (1, 1), "{mode}");
        // SoftRoCE deviates from IBTA in both statuses.
        let expected = if rdma.is_rxe() {
            (WcStatus::REM_OP_ERR, WcStatus::LOC_QP_OP_ERR)
        } else {
            (WcStatus::REM_INV_REQ_ERR, WcStatus::LOC_LEN_ERR)
        };
        assert_eq!((sent.status, received.status), expected, "{mode}");
        assert_eq!(lab.b.memory.get(15..16), [0], "{mode}");
        let flushed = lab.b.next();
        assert_eq!((flushed.wr_id, flushed.status), (2, WcStatus::WR_FLUSH_ERR), "{mode}");
    }
}

#[test]
fn a_peer_without_receives_exhausts_the_retries() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, few_retries());
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(1, Op::Send, from), Wr::new(2, Op::Send, from).flags(SendFlags::empty())]).unwrap();
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::RNR_RETRY_EXC_ERR), "{mode}");
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (2, WcStatus::WR_FLUSH_ERR), "{mode}: later work is flushed");
    }
}

#[test]
fn the_vendor_error_of_a_software_device_is_zero() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, Link::default());
        let remote = lab.b.memory.remote(0);
        let wrong = Remote { rkey: remote.rkey ^ 0xff, ..remote };
        lab.a.post(&[Wr::new(1, Op::Write(wrong), Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        within_deadline("a completion", || {
            let mut poll = lab.a.cq.poll();
            let wc = poll.next().unwrap()?;
            let error = wc.ok().unwrap_err();
            assert_eq!((error.status, error.vendor_error), (WcStatus::REM_ACCESS_ERR, wc.vendor_error()), "{mode}");
            if rdma.is_rxe() || rdma.is_soft() {
                assert_eq!(wc.vendor_error(), 0, "{mode}");
            }
            Some(())
        });
    }
}

#[test]
fn a_destroyed_peer_exhausts_the_retries() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, few_retries());
        lab.b.receive(1, 0..64).unwrap();
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(1, Op::Send, from)]).unwrap();
        lab.a.next_ok(1);
        let Lab { mut a, b, .. } = lab;
        let to = b.memory.remote(0);
        drop(b.qp);
        let start = Instant::now();
        a.post(&[Wr::new(2, Op::Write(to), from), Wr::new(3, Op::Send, from)]).unwrap();
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (2, WcStatus::RETRY_EXC_ERR), "{mode}");
        assert!(start.elapsed() < DEADLINE);
        let wc = a.next();
        assert_eq!((wc.wr_id, wc.status), (3, WcStatus::WR_FLUSH_ERR), "{mode}");
        assert_eq!(a.qp.state(), QueuePairState::RTS, "the state is unknown until it is queried");
        assert_eq!(a.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        assert_eq!(a.qp.state(), QueuePairState::ERR, "the query updates the state");
    }
}

#[test]
fn a_failed_queue_pair_works_again_after_reset() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, few_retries());
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(1, Op::Send, from)]).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::RNR_RETRY_EXC_ERR, "{mode}");
        for side in [&mut lab.a, &mut lab.b] {
            side.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
        }
        let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
        // With other PSNs than before, so that late packets are not accepted.
        let link = Link { psn: PSN + 1000, ..Link::default() };
        link.connect(&rdma, &mut lab.a.qp, b).unwrap();
        link.connect(&rdma, &mut lab.b.qp, a).unwrap();
        for id in 10..20 {
            lab.b.receive(id, 0..64).unwrap();
            lab.a.memory.put_u64(0, id);
            lab.a.post(&[Wr::new(id, Op::Send, from)]).unwrap();
            lab.a.next_ok(id);
            lab.b.next_ok(id);
            assert_eq!(lab.b.memory.get_u64(0), id, "{mode}");
        }
    }
}

/// A memory window of type 2, which the peer may invalidate.
struct Window<'p> {
    raw: NonNull<ibv_mw>,
    _pd: &'p ProtectionDomain,
}

impl<'p> Window<'p> {
    fn new(pd: &'p ProtectionDomain) -> Option<Self> {
        // SAFETY: the domain is valid, and borrowed for the lifetime of the window.
        let raw = NonNull::new(unsafe { ibv_alloc_mw(pd.as_raw(), IBV_MW_TYPE_2) })?;
        Some(Window { raw, _pd: pd })
    }

    /// Binds the window to the first `len` bytes of `memory`. Returns its key.
    fn bind(&self, qp: &QueuePair, memory: &Memory, len: u64) -> u32 {
        // SAFETY: the window is valid. All-zero bytes are valid for a structure of integers, pointers and unions of these.
        let (rkey, mut wr) = unsafe { (ibv_inc_rkey((*self.raw.as_ptr()).rkey), std::mem::zeroed::<ibv_send_wr>()) };
        wr.wr_id = 555;
        wr.opcode = IBV_WR_BIND_MW;
        wr.send_flags = IBV_SEND_SIGNALED.0;
        wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: self.raw.as_ptr(),
            rkey,
            bind_info: ibv_mw_bind_info {
                mr: memory.raw().as_raw(),
                addr: memory.raw().address(),
                length: len,
                mw_access_flags: (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ).0,
            },
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair, the window and the region are valid, and `wr` is one complete work request. Nothing else
        // posts to this send queue during the call.
        assert_eq!(unsafe { ibv_post_send(qp.as_raw(), &mut wr, &mut bad) }, 0);
        rkey
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        // SAFETY: the window is valid and freed once. Its region may have been deregistered earlier.
        unsafe { ibv_dealloc_mw(self.raw.as_ptr()) };
    }
}

#[test]
fn a_send_with_invalidate_closes_a_memory_window() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, few_retries());
        let pd = lab.pd.clone();
        let access = Access::LOCAL_WRITE | Access::from_bits_retain(IBV_ACCESS_MW_BIND.0);
        let memory = Memory::with_access(&pd, 4096, access);
        let Some(window) = Window::new(&pd) else {
            assert!(!rdma.is_rxe(), "SoftRoCE has memory windows");
            return println!("skipped: {} has no memory windows of type 2", rdma.device_name());
        };
        let rkey = window.bind(&lab.b.qp, &memory, 4096);
        lab.b.next_ok(555);
        let to = Remote { rkey, address: memory.remote(8).address };
        lab.a.memory.put(0, b"by key");
        let from = Data::One(lab.a.memory.sge(0..6));
        lab.a.post(&[Wr::new(1, Op::Write(to), from)]).unwrap();
        lab.a.next_ok(1);
        assert_eq!(memory.get(8..14), b"by key", "{mode}: the window was open");

        lab.b.receive(2, 0..64).unwrap();
        lab.a.post(&[Wr::new(2, Op::SendInvalidate(rkey), from)]).unwrap();
        let wc = lab.b.next_ok(2);
        assert_eq!(wc.imm, None, "{mode}");
        if rdma.is_rxe() {
            // Its kernel sets a bit that means a verified checksum in the verbs API.
            assert!(wc.invalidated_rkey.is_none() && wc.flags.contains(WcFlags::IP_CSUM_OK), "{mode}: {wc:?}");
        } else {
            assert_eq!(wc.invalidated_rkey, Some(rkey), "{mode}: {wc:?}");
        }
        assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RECV, Some(6)), "{mode}");
        lab.a.next_ok(2);

        lab.a.memory.put(0, b"denied");
        lab.a.post(&[Wr::new(3, Op::Write(to), from)]).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR, "{mode}: the window is closed");
        assert_eq!(memory.get(8..14), b"by key", "{mode}");
        drop((window, lab));
    }
}

/// rdma-safe reports no key without the flag, so this test calls the poll functions of C.
#[test]
fn softroce_reports_an_invalidated_key_without_its_flag() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() {
        return println!("skipped: {} is not SoftRoCE", rdma.device_name());
    }
    let mut lab = connected(&rdma, Mode::EXTENDED, few_retries());
    let pd = lab.pd.clone();
    let memory = Memory::with_access(&pd, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let window = Window::new(&pd).expect("SoftRoCE has memory windows");
    let rkey = window.bind(&lab.b.qp, &memory, 4096);
    lab.b.next_ok(555);
    lab.b.receive(1, 0..64).unwrap();
    lab.a.post(&[Wr::new(2, Op::SendInvalidate(rkey), Data::One(lab.a.memory.sge(0..6)))]).unwrap();
    lab.a.next_ok(2);
    assert!(lab.b.cq.is_extended());
    let cq = lab.b.cq.as_raw().cast::<ibv_cq_ex>();
    let (key, flags) = within_deadline("a completion", || {
        // SAFETY: a valid extended completion queue with the standard fields, which nothing else polls meanwhile.
        unsafe {
            (ibv_start_poll(cq, &mut ibv_poll_cq_attr { comp_mask: 0 }) == 0).then(|| {
                assert_eq!(((*cq).wr_id, (*cq).status), (1, IBV_WC_SUCCESS));
                let read = (ibv_wc_read_invalidated_rkey(cq), WcFlags::from_bits_retain(ibv_wc_read_wc_flags(cq)));
                ibv_end_poll(cq);
                read
            })
        }
    });
    assert_eq!(key, rkey);
    assert!(flags.contains(WcFlags::IP_CSUM_OK) && !flags.contains(WcFlags::WITH_INV), "{flags:?}");
    drop((window, lab));
}

#[test]
fn a_send_with_invalidate_does_not_invalidate_a_region() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = connected(&rdma, mode, few_retries());
        lab.b.receive(1, 0..64).unwrap();
        let rkey = lab.b.memory.raw().rkey();
        lab.a.post(&[Wr::new(1, Op::SendInvalidate(rkey), Data::One(lab.a.memory.sge(0..4)))]).unwrap();
        let wc = lab.a.next();
        if rdma.is_rxe() {
            // SoftRoCE acknowledges the message before it checks the key, so only the receiver gets an error.
            assert_eq!(wc.status, WcStatus::SUCCESS, "{mode}");
        } else {
            assert_ne!(wc.status, WcStatus::SUCCESS, "{mode}");
        }
        let wc = lab.b.next();
        assert_eq!(wc.wr_id, 1, "{mode}");
        assert_ne!(wc.status, WcStatus::SUCCESS, "{mode}: only windows and fast-registered regions can be invalidated");
        assert_eq!(lab.b.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        // The key still works on another connection.
        let mut c = connected(&rdma, mode, Link::default());
        let builder = Lab::builder(&rdma, mode);
        c.a.qp = builder.qp_builder(lab.pd.queue_pair(&c.a.cq, &c.a.cq)).build().unwrap();
        c.b.qp = builder.qp_builder(lab.pd.queue_pair(&c.b.cq, &c.b.cq)).build().unwrap();
        Link::default().connect(&rdma, &mut c.a.qp, c.b.qp.number()).unwrap();
        Link::default().connect(&rdma, &mut c.b.qp, c.a.qp.number()).unwrap();
        lab.a.memory.put(0, b"still valid");
        let write = Wr::new(1, Op::Write(lab.b.memory.remote(500)), Data::One(lab.a.memory.sge(0..11)));
        c.a.post(&[write]).unwrap();
        c.a.next_ok(1);
        assert_eq!(lab.b.memory.get(500..511), b"still valid", "{mode}");
    }
}

/// A connected queue pair with an operation that rdma-safe does not enable, because the device does not report it.
struct WithAtomicWrite(NonNull<ibv_qp>);

impl WithAtomicWrite {
    fn connected(rdma: &Rdma, lab: &Lab) -> Self {
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        (attr.send_cq, attr.recv_cq, attr.pd) = (lab.a.cq.as_raw(), lab.a.cq.as_raw(), lab.pd.as_raw());
        attr.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        attr.qp_type = IBV_QPT_RC;
        attr.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE.0.into();
        attr.comp_mask = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).0;
        // SAFETY: the context, the domain and the completion queue are valid and outlive the queue pair.
        let raw = NonNull::new(unsafe { ibv_create_qp_ex(rdma.as_raw(), &mut attr) }).expect("a queue pair");
        let link = Link::default();
        for step in [link.to_init(rdma), link.to_rtr(rdma, lab.b.qp.number()), link.to_rts()] {
            let mut attributes = *step.as_raw();
            let mask = step.mask().bits() as i32;
            // SAFETY: the queue pair is valid, and the attributes are valid during the call.
            assert_eq!(unsafe { (verbs().unwrap().ibv_modify_qp)(raw.as_ptr(), &mut attributes, mask) }, 0);
        }
        WithAtomicWrite(raw)
    }

    /// Posts a signaled atomic write of `word`.
    fn post(&self, id: u64, remote: Remote, word: [u8; 8]) {
        // SAFETY: a valid queue pair in RTS, which was created with this operation. The provider copies the word.
        unsafe {
            let qp = (verbs().unwrap().ibv_qp_to_qp_ex)(self.0.as_ptr());
            ibv_wr_start(qp);
            (*qp).wr_id = id;
            (*qp).wr_flags = IBV_SEND_SIGNALED.0;
            ibv_wr_atomic_write(qp, remote.rkey, remote.address, word.as_ptr().cast());
            assert_eq!(ibv_wr_complete(qp), 0);
        }
    }
}

impl Drop for WithAtomicWrite {
    fn drop(&mut self) {
        // SAFETY: the queue pair is valid and destroyed once.
        unsafe { (verbs().unwrap().ibv_destroy_qp)(self.0.as_ptr()) };
    }
}

#[test]
fn an_atomic_write_is_accepted_and_then_fails() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() || rdma.is_newer_rxe() {
        return println!("skipped: only the provider of older SoftRoCE accepts operations that its kernel lacks");
    }
    let mut lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
    let qp = WithAtomicWrite::connected(&rdma, &lab);
    qp.post(1, lab.b.memory.remote(0), *b"at once!");
    let wc = lab.a.next();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::LOC_QP_OP_ERR));
    assert_eq!(lab.b.memory.get(0..8), [0; 8]);
    drop(qp);
}
