//! Each forbidden call that the interposer knows is recorded.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use rdma_safe::sys::{
    Zeroed, ibv_end_poll, ibv_next_poll, ibv_poll_cq, ibv_poll_cq_attr, ibv_post_recv, ibv_post_send, ibv_qp_attr,
    ibv_req_notify_cq, ibv_start_poll, ibv_wc, ibv_wc_read_opcode, ibv_wr_abort, ibv_wr_start, verbs,
};

use super::rig::lab;
use super::{Interposed, interposed};
use crate::support::lab::Mode;

/// Takes the recorded violations.
fn recorded(soft: &Interposed) -> String {
    soft.take_violations().join("; ")
}

#[test]
fn a_forbidden_call_fails_the_test() {
    let Some(soft) = interposed() else { return };
    let cq = soft.completion_queue(4).build().expect("a completion queue");
    // SAFETY: the queue exists. The interposer records the call without calling soft0.
    unsafe { ibv_end_poll(cq.as_raw_ex().expect("an extended queue").as_ptr()) };
    drop(cq);
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(soft)));
    let message = dropped.expect_err("dropping the device panics");
    assert!(message.downcast_ref::<String>().expect("a message").contains("end_poll without start_poll"));
}

#[test]
fn forbidden_calls_around_a_poll_are_recorded() {
    let Some(soft) = interposed() else { return };
    let queue = soft.completion_queue(4).build().expect("a completion queue");
    let (cq, verbs) = (queue.as_raw(), verbs().expect("the functions"));
    let raw = queue.as_raw_ex().expect("an extended queue").as_ptr();
    soft.fail("ibv_destroy_cq", libc::EBUSY);
    soft.fail("ibv_resize_cq", libc::ENOSYS);
    let mut attr = ibv_poll_cq_attr::zeroed();
    // SAFETY: the queue exists. Calls that soft0 could not survive are recorded without calling it.
    unsafe {
        ibv_end_poll(raw);
        assert_eq!(recorded(&soft), "end_poll without start_poll");
        assert_eq!(ibv_next_poll(raw), libc::EINVAL);
        assert_eq!(recorded(&soft), "next_poll outside of start_poll and end_poll");
        _ = ibv_wc_read_opcode(raw);
        assert_eq!(recorded(&soft), "read_opcode while the cursor is on no completion");
        attr.comp_mask = 1;
        assert_eq!(ibv_start_poll(raw, &mut attr), libc::ENOENT);
        assert_eq!(recorded(&soft), "start_poll with a comp_mask that is not defined");

        attr.comp_mask = 0;
        soft.inject(cq, ibv_wc::zeroed());
        assert_eq!((ibv_start_poll(raw, &mut attr), recorded(&soft)), (0, String::new()));
        assert_eq!(ibv_start_poll(raw, &mut attr), libc::EINVAL);
        assert_eq!(recorded(&soft), "deadlock: start_poll between start_poll and end_poll");
        assert_eq!(ibv_poll_cq(cq, 1, &mut ibv_wc::zeroed()), 0);
        assert_eq!(recorded(&soft), "deadlock: ibv_poll_cq between start_poll and end_poll");
        ibv_req_notify_cq(cq, 0);
        assert_eq!(recorded(&soft), "deadlock: ibv_req_notify_cq while this thread polls");
        (verbs.ibv_resize_cq)(cq, 8);
        assert_eq!(recorded(&soft), "deadlock: ibv_resize_cq while this thread polls");
        (verbs.ibv_destroy_cq)(cq);
        assert_eq!(recorded(&soft), "ibv_destroy_cq between start_poll and end_poll");
        ibv_end_poll(raw);
    }
    assert_eq!(recorded(&soft), "");
    soft.heal("ibv_destroy_cq");
}

#[test]
fn forbidden_calls_during_a_batch_are_recorded() {
    let Some(soft) = interposed() else { return };
    let lab = lab(&soft, Mode::EXTENDED).build();
    let (qp, cq, verbs) = (lab.a.qp.as_raw(), lab.a.cq.as_raw(), verbs().expect("the functions"));
    let raw = lab.a.qp.as_raw_ex().expect("an extended queue pair").as_ptr();
    soft.fail("ibv_destroy_qp", libc::EBUSY);
    soft.fail("ibv_modify_qp", libc::EINVAL);
    // SAFETY: the objects exist. The interposer makes calls fail that soft0 could not survive.
    unsafe {
        ibv_wr_start(raw);
        assert_eq!(recorded(&soft), "");
        ibv_wr_start(raw);
        assert_eq!(recorded(&soft), "deadlock: wr_start between wr_start and wr_complete");
        assert_eq!(ibv_poll_cq(cq, 1, &mut ibv_wc::zeroed()), 0);
        assert_eq!(recorded(&soft), "deadlock: polling between wr_start and wr_complete");
        ibv_req_notify_cq(cq, 0);
        assert_eq!(recorded(&soft), "deadlock: ibv_req_notify_cq between wr_start and wr_complete");
        (verbs.ibv_modify_qp)(qp, &mut ibv_qp_attr::zeroed(), 0);
        assert_eq!(recorded(&soft), "ibv_modify_qp between wr_start and wr_complete");
        (verbs.ibv_destroy_qp)(qp);
        assert_eq!(recorded(&soft), "ibv_destroy_qp between wr_start and wr_complete");
        ibv_wr_abort(raw);
    }
    assert_eq!(recorded(&soft), "");
    soft.heal("ibv_destroy_qp");
}

#[test]
fn empty_chains_and_memory_that_is_deregistered_in_use_are_recorded() {
    let Some(soft) = interposed() else { return };
    let mut lab = lab(&soft, Mode::EXTENDED).build();
    let (qp, verbs) = (lab.a.qp.as_raw(), verbs().expect("the functions"));
    // SAFETY: the queue pair exists, and soft0 is not called.
    unsafe {
        assert_eq!(ibv_post_send(qp, null_mut(), &mut null_mut()), 0);
        assert_eq!(recorded(&soft), "ibv_post_send of no chain");
        assert_eq!(ibv_post_recv(qp, null_mut(), &mut null_mut()), 0);
        assert_eq!(recorded(&soft), "ibv_post_recv of no chain");
    }
    soft.fail("ibv_dereg_mr", libc::EBUSY);
    let mr = lab.a.memory.raw().as_raw();
    // SAFETY: the region exists, and is not deregistered.
    let deregister = || unsafe { (verbs.ibv_dereg_mr)(mr) };
    assert_eq!((deregister(), recorded(&soft)), (libc::EBUSY, String::new()));
    lab.a.receive(1, 0..8).expect("a receive");
    assert_eq!(deregister(), libc::EBUSY);
    assert_eq!(recorded(&soft), "ibv_dereg_mr of memory that posted work names");
    soft.heal("ibv_dereg_mr");
}
