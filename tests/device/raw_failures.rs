//! The raw door: how work fails, and what the completions say.

use std::ptr::NonNull;
use std::time::Instant;

use rdma_safe::sys::*;
use rdma_safe::{
    Access, ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairState, Remote, SendFlags, Sge, WcFlags,
    WcOpcode, WcStatus,
};

use crate::support::lab::{self, Data, Lab, MEMORY, Memory, Mode, Op, Wr};
use crate::support::link::{Link, PSN};
use crate::support::{DEADLINE, Rdma, device};

/// A connection whose ends do not wait for receives. SoftRoCE takes seven retries for no limit.
fn impatient() -> Link {
    Link { retry_count: 6, rnr_retry: 1, min_rnr_timer: 1, ..Link::default() }
}

fn connected(rdma: &Rdma, mode: Mode, link: Link) -> Lab {
    Lab::builder(rdma, mode).link(link).build()
}

#[test]
fn a_wrong_remote_key_is_a_remote_access_error_and_changes_nothing() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
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
    for mode in Mode::ALL {
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
fn a_queue_pair_without_the_right_refuses_what_its_memory_would_allow() {
    let Some(rdma) = device() else { return };
    for (granted, index) in [(Access::REMOTE_READ, 0), (Access::REMOTE_WRITE, 1), (Access::REMOTE_WRITE, 2)] {
        let mut lab = connected(&rdma, Mode::ALL[0], Link { access: granted, ..Link::default() });
        lab.b.memory.put_u64(0, 5);
        let to = lab.b.memory.remote(0);
        let op = [Op::Write(to), Op::Read(to), Op::FetchAdd(to, 1)][index];
        lab.a.post(&[Wr::new(1, op, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        let status = lab.a.next().status;
        // IBTA leaves open which of the two it is.
        assert!(matches!(status, WcStatus::REM_ACCESS_ERR | WcStatus::REM_INV_REQ_ERR), "{op:?}: {status:?}");
        assert_eq!(lab.b.memory.get_u64(0), 5, "{op:?}");
    }
}

#[test]
fn a_wrong_local_key_fails_at_the_sender() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
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
    for mode in Mode::ALL {
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
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, Link::default());
        lab.b.receive(1, 0..15).unwrap();
        lab.b.receive(2, 0..64).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..16)))]).unwrap();
        let (sent, received) = (lab.a.next(), lab.b.next());
        assert_eq!((sent.wr_id, received.wr_id), (1, 1), "{mode}");
        // SoftRoCE deviates from IBTA in both.
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
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, impatient());
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(1, Op::Send, from), Wr::new(2, Op::Send, from).flags(SendFlags::empty())]).unwrap();
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::RNR_RETRY_EXC_ERR), "{mode}");
        let wc = lab.a.next();
        assert_eq!((wc.wr_id, wc.status), (2, WcStatus::WR_FLUSH_ERR), "{mode}: what is behind it is flushed");
    }
}

#[test]
fn a_peer_that_is_gone_exhausts_the_retries_in_time() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, impatient());
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
        assert_eq!(a.qp.state(), QueuePairState::RTS, "the device does not tell");
        assert_eq!(a.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        assert_eq!(a.qp.state(), QueuePairState::ERR, "asking it updates the state");
    }
}

#[test]
fn a_failed_queue_pair_works_again_after_reset() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, impatient());
        let from = Data::One(lab.a.memory.sge(0..8));
        lab.a.post(&[Wr::new(1, Op::Send, from)]).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::RNR_RETRY_EXC_ERR, "{mode}");
        for side in [&mut lab.a, &mut lab.b] {
            side.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
        }
        let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
        // With other numbers than before: what is late is not taken for what is new.
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

/// A memory window of type 2, which a peer may invalidate.
struct Window<'p> {
    raw: NonNull<ibv_mw>,
    _pd: &'p ProtectionDomain,
}

impl<'p> Window<'p> {
    fn new(pd: &'p ProtectionDomain) -> Option<Self> {
        // SAFETY: the domain is valid, and borrowed for as long as the window is there.
        let raw = NonNull::new(unsafe { ibv_alloc_mw(pd.as_raw(), IBV_MW_TYPE_2) })?;
        Some(Window { raw, _pd: pd })
    }

    /// Binds it to `len` bytes at the start of `memory`; its key.
    fn bind(&self, qp: &QueuePair, memory: &Memory, len: u64) -> u32 {
        // SAFETY: the window is valid; zeros are valid for a structure of integers, pointers and unions of such.
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
        // SAFETY: the queue pair, the window and the region are valid, and `wr` is one work request; nothing else posts to
        // this send queue meanwhile.
        assert_eq!(unsafe { ibv_post_send(qp.as_raw(), &mut wr, &mut bad) }, 0);
        rkey
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        // SAFETY: the window is valid and freed once. The region that it is bound to may go before it.
        unsafe { ibv_dealloc_mw(self.raw.as_ptr()) };
    }
}

#[test]
fn a_send_can_take_a_key_away_from_its_owner() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, impatient());
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
        match wc.invalidated_rkey {
            Some(key) => assert_eq!(key, rkey, "{mode}"),
            // The kernel's rxe sets its own bit for it, which is that of a verified checksum in the verbs API.
            None => assert!(rdma.is_rxe() && wc.flags.contains(WcFlags::IP_CSUM_OK), "{mode}: {wc:?}"),
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

#[test]
fn a_send_cannot_take_away_the_key_of_a_region() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = connected(&rdma, mode, impatient());
        lab.b.receive(1, 0..64).unwrap();
        let rkey = lab.b.memory.raw().rkey();
        lab.a.post(&[Wr::new(1, Op::SendInvalidate(rkey), Data::One(lab.a.memory.sge(0..4)))]).unwrap();
        let wc = lab.a.next();
        if rdma.is_rxe() {
            // The message is acknowledged before the key is looked at: only the receiver learns that it went wrong.
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
