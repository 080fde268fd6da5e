//! The provider's deviations, without this crate's workarounds. A deviation that is seen must be in `Quirks`.
//!
//! A deviation in `Quirks` need not be seen, because a library does not report its patch level.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rdma_safe::device::Quirks;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::sys::*;
use rdma_safe::{QueuePair, QueuePairState, WcStatus};

use crate::support::lab::{self, Data, Lab, Mode, Op, Wr, post, try_next};
use crate::support::link::{Link, PSN};
use crate::support::{DEADLINE, Rdma, device, within_deadline};

/// Fails if the provider `deviates` and `quirk` is not in its `Quirks`.
#[track_caller]
fn known(rdma: &Rdma, quirk: Quirks, deviates: bool) {
    println!("{quirk:?}: {}", if deviates { "seen" } else { "not seen" });
    assert!(!deviates || rdma.quirks().contains(quirk), "{quirk:?} is not among {:?}", rdma.quirks());
}

/// A lab with extended queue pairs and completion queues, or `None` if the device has none.
fn extended(rdma: &Rdma) -> Option<Lab> {
    let lab = Lab::builder(rdma, Mode::EXTENDED).inline(64).build();
    (lab.a.qp.is_extended() && lab.a.cq.is_extended()).then_some(lab)
}

fn qp_ex(qp: &QueuePair) -> *mut ibv_qp_ex {
    // SAFETY: the queue pair is valid and was made with send operations.
    unsafe { (verbs().unwrap().ibv_qp_to_qp_ex)(qp.as_raw()) }
}

/// Posts one signaled send to `qp`. `set` sets its data.
fn send(qp: *mut ibv_qp_ex, id: u64, flags: ibv_send_flags, set: impl FnOnce(*mut ibv_qp_ex)) {
    // SAFETY: a valid extended queue pair in RTS, to which nothing else is posted meanwhile.
    unsafe {
        ibv_wr_start(qp);
        (*qp).wr_id = id;
        (*qp).wr_flags = (IBV_SEND_SIGNALED | flags).0;
        ibv_wr_send(qp);
        set(qp);
        assert_eq!(ibv_wr_complete(qp), 0);
    }
}

const NO_FLAGS: ibv_send_flags = ibv_send_flags(0);

#[test]
fn polling_to_the_end_of_a_queue_repeats_no_completion() {
    let Some(rdma) = device() else { return };
    let Some(mut lab) = extended(&rdma) else { return };
    let cq = lab.a.cq.as_raw().cast::<ibv_cq_ex>();
    let write = |id| Wr::new(id, Op::Write(lab.b.memory.remote(0)), Data::One(lab.a.memory.sge(0..8)));
    // Polls to the end of the queue. Returns identifiers and statuses.
    let take = || {
        let mut taken = Vec::new();
        // SAFETY: a valid extended completion queue, which nothing else polls meanwhile.
        unsafe {
            let mut result = ibv_start_poll(cq, &mut ibv_poll_cq_attr { comp_mask: 0 });
            if result != 0 {
                return taken;
            }
            // With the deviation the queue has no end.
            while result == 0 && taken.len() < 100 {
                taken.push(((*cq).wr_id, (*cq).status));
                result = ibv_next_poll(cq);
            }
            ibv_end_poll(cq);
        }
        taken
    };
    let first: Vec<Wr<'_>> = (1..=3).map(write).collect();
    let mut seen = Vec::new();
    post(lab.a.qp.send_batch(), &first).unwrap();
    within_deadline("three completions", || {
        seen.extend(take());
        (seen.len() >= 3).then_some(())
    });
    post(lab.a.qp.send_batch(), &[write(4)]).unwrap();
    within_deadline("one more", || {
        seen.extend(take());
        (seen.len() >= 4).then_some(())
    });
    let expected: Vec<_> = (1..=4).map(|id| (id, IBV_WC_SUCCESS)).collect();
    known(&rdma, Quirks::ONE_COMPLETION_PER_POLL, seen != expected);
}

/// A queue pair created without this crate, which does not combine the extended interface with lists if that is broken.
struct Direct(NonNull<ibv_qp>);

impl Direct {
    fn new(rdma: &Rdma, lab: &Lab, peer: u32) -> Direct {
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.send_cq = lab.a.cq.as_raw();
        attr.recv_cq = lab.a.cq.as_raw();
        attr.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 1, max_inline_data: 0 };
        attr.qp_type = IBV_QPT_RC;
        attr.pd = lab.pd.as_raw();
        attr.send_ops_flags = IBV_QP_EX_WITH_SEND.0.into();
        attr.comp_mask = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).0;
        // SAFETY: the context, the domain and the completion queue are valid and outlive the queue pair.
        let qp = NonNull::new(unsafe { ibv_create_qp_ex(rdma.as_raw(), &mut attr) }).expect("a queue pair");
        let link = Link::default();
        for step in [link.to_init(rdma), link.to_rtr(rdma, peer), link.to_rts()] {
            let (mut raw, mask) = (*step.as_raw(), step.mask().bits());
            // SAFETY: the queue pair is valid, and the call does not keep the attributes.
            assert_eq!(unsafe { (verbs().unwrap().ibv_modify_qp)(qp.as_ptr(), &mut raw, mask as i32) }, 0);
        }
        Direct(qp)
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue pair is valid.
        unsafe { (*self.0.as_ptr()).qp_num }
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once.
        unsafe { (verbs().unwrap().ibv_destroy_qp)(self.0.as_ptr()) };
    }
}

#[test]
fn a_list_of_elements_has_its_whole_length() {
    let Some(rdma) = device() else { return };
    let builder = Lab::builder(&rdma, Mode::EXTENDED).connected(false);
    let mut lab = builder.build();
    if !lab.a.qp.is_extended() {
        return;
    }
    let direct = Direct::new(&rdma, &lab, lab.b.qp.number());
    Link::default().connect(&rdma, &mut lab.b.qp, direct.number()).unwrap();
    lab.b.receive(1, 0..4096).unwrap();
    let list = [lab.a.memory.sge(0..8), lab.a.memory.sge(100..200)];
    // SAFETY: the queue pair is valid and was made with send operations.
    let qp = unsafe { (verbs().unwrap().ibv_qp_to_qp_ex)(direct.0.as_ptr()) };
    // SAFETY: called as `send` says; `Sge` has the layout of `ibv_sge`.
    send(qp, 2, NO_FLAGS, |qp| unsafe { ibv_wr_set_sge_list(qp, list.len(), list.as_ptr().cast()) });
    let received = lab.b.next_ok(1).byte_len;
    lab.a.next_ok(2);
    known(&rdma, Quirks::SGE_LISTS_MISCOUNTED, received != Some(108));
}

#[test]
fn an_inline_list_has_its_whole_length() {
    let Some(rdma) = device() else { return };
    let Some(mut lab) = extended(&rdma) else { return };
    lab.b.receive(1, 0..64).unwrap();
    let list =
        [&b"in"[..], b"line"].map(|piece| ibv_data_buf { addr: piece.as_ptr().cast_mut().cast(), length: piece.len() });
    // SAFETY: called as `send` says; the pieces are static.
    let set = |qp| unsafe { ibv_wr_set_inline_data_list(qp, list.len(), list.as_ptr()) };
    send(qp_ex(&lab.a.qp), 2, IBV_SEND_INLINE, set);
    let received = lab.b.next_ok(1).byte_len;
    lab.a.next_ok(2);
    known(&rdma, Quirks::INLINE_LISTS_EMPTY, received != Some(6));
}

#[test]
fn inline_data_needs_no_flag() {
    let Some(rdma) = device() else { return };
    let Some(mut lab) = extended(&rdma) else { return };
    lab.b.receive(1, 0..64).unwrap();
    // SAFETY: called as `send` says; the bytes are static and only read.
    let set = |qp| unsafe { ibv_wr_set_inline_data(qp, b"inline".as_ptr().cast_mut().cast(), 6) };
    send(qp_ex(&lab.a.qp), 2, NO_FLAGS, set);
    let status = lab.a.next().status;
    let failure = lab::local_failure(&rdma);
    assert!(matches!(status, WcStatus::SUCCESS) || status == failure, "{status:?}, not {failure:?}");
    known(&rdma, Quirks::INLINE_NEEDS_FLAG, status != WcStatus::SUCCESS);
}

#[test]
fn a_refused_send_is_not_executed() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
    let link = Link::default();
    let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
    link.connect(&rdma, &mut lab.b.qp, a).unwrap();
    for id in 0..2 {
        lab.b.receive(id, 0..64).unwrap();
    }
    lab.a.qp.modify(&link.to_init(&rdma)).unwrap();
    lab.a.memory.put(0, b"refused");
    let mut sge = ibv_sge { addr: lab.a.memory.raw().address(), length: 7, lkey: lab.a.memory.raw().lkey() };
    let mut wr = ibv_send_wr::zeroed();
    (wr.wr_id, wr.sg_list, wr.num_sge) = (1, &mut sge, 1);
    (wr.opcode, wr.send_flags) = (IBV_WR_SEND, IBV_SEND_SIGNALED.0);
    let mut bad = std::ptr::null_mut();
    // SAFETY: the queue pair and the work request are valid. The memory belongs to the lab.
    assert_ne!(unsafe { ibv_post_send(lab.a.qp.as_raw(), &mut wr, &mut bad) }, 0, "not in INIT");
    lab.a.qp.modify(&link.to_rtr(&rdma, b)).unwrap();
    lab.a.qp.modify(&link.to_rts().set_sq_psn(PSN)).unwrap();
    lab.a.post(&[Wr::new(2, Op::Send, Data::One(lab.a.memory.sge(0..3)))]).unwrap();
    let first = lab.a.next();
    assert_eq!(first.status, WcStatus::SUCCESS);
    known(&rdma, Quirks::REFUSED_SENDS_EXECUTE, first.wr_id == 1);
}

#[test]
fn a_receive_posted_in_the_error_state_is_flushed() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    lab.a.receive(1, 0..64).unwrap();
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    assert_eq!(lab.a.next().status, WcStatus::WR_FLUSH_ERR);
    lab.a.receive(2, 0..64).unwrap();
    // A device without the quirk flushes it before the deadline.
    let is_quirk = rdma.quirks().contains(Quirks::LATE_RECEIVES_NOT_FLUSHED);
    let (start, limit) = (Instant::now(), if is_quirk { Duration::from_millis(100) } else { DEADLINE });
    let mut flushed = None;
    while flushed.is_none() && start.elapsed() < limit {
        flushed = try_next(&mut lab.a.cq);
    }
    known(&rdma, Quirks::LATE_RECEIVES_NOT_FLUSHED, flushed.is_none());
}

/// In IBTA a `retry_cnt` of 7 is seven retries. SoftRoCE retries forever, as with an `rnr_retry` of 7.
#[test]
fn seven_retries_to_an_absent_peer_end() {
    let Some(rdma) = device() else { return };
    for (retry_count, limit) in [(6, true), (7, !rdma.is_rxe())] {
        let mut lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
        let link = Link { timeout: 8, retry_count, ..Link::default() };
        let peer = lab.b.qp.number();
        link.connect(&rdma, &mut lab.a.qp, peer).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        if limit {
            assert_eq!(lab.a.next().status, WcStatus::RETRY_EXC_ERR, "{retry_count}");
        } else {
            // Eight attempts take about 8 ms.
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(try_next(&mut lab.a.cq), None, "SoftRoCE now ends {retry_count} retries");
        }
    }
}

/// With an `rnr_retry` of 7 the sender retries forever, as long as the peer answers with RNR NAKs.
#[test]
fn a_send_waits_seconds_for_a_receive() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
    let link = Link { retry_count: 6, rnr_retry: 7, ..Link::default() };
    let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
    link.connect(&rdma, &mut lab.a.qp, b).unwrap();
    link.connect(&rdma, &mut lab.b.qp, a).unwrap();
    lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
    let (start, mut ended) = (Instant::now(), None);
    while ended.is_none() && start.elapsed() < Duration::from_secs(3) {
        ended = try_next(&mut lab.a.cq);
    }
    let status = ended.as_ref().map(|wc| wc.status);
    known(&rdma, Quirks::MISSING_RECEIVES_TIME_OUT, status == Some(WcStatus::RETRY_EXC_ERR));
    if status != Some(WcStatus::RETRY_EXC_ERR) {
        assert_eq!(status, None, "the send waits for the receive");
        lab.b.receive(1, 0..64).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::SUCCESS);
    }
}

#[test]
fn only_softroce_has_the_quirks_of_softroce() {
    let Some(rdma) = device() else { return };
    if rdma.is_soft() {
        assert_eq!(rdma.quirks(), Quirks::empty());
    }
    let of_rxe = Quirks::INLINE_NEEDS_FLAG | Quirks::REFUSED_SENDS_EXECUTE | Quirks::LATE_RECEIVES_NOT_FLUSHED;
    assert_eq!(rdma.quirks().contains(of_rxe), rdma.is_rxe(), "{:?}", rdma.quirks());
}
