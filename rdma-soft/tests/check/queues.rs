//! Queues, events and the life of objects.

use std::ptr::null_mut;

use rdma_soft::abi::*;
use rdma_soft::check::{Kind, Options};
use rdma_sys::*;

use crate::world::World;

const EMPTY: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_completion_queue_that_can_overrun_is_reported() {
    let world = World::with(Options::default(), 2);
    world.receive(1, EMPTY);
    world.receive(2, EMPTY);
    assert_eq!(world.reports(), []);
    world.receive(3, EMPTY);
    let report = world.report(Kind::CqCanOverrun);
    assert_eq!((report.qp, report.wr_id), (world.qp(1), Some(3)));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn completions_that_wait_count_as_entries() {
    let world = World::with(Options::default(), 2);
    for wr_id in 1..=2 {
        world.receive(wr_id, EMPTY);
        world.send(7, EMPTY);
        assert_eq!(world.sent(), IBV_WC_SUCCESS);
    }
    assert_eq!(world.received(), IBV_WC_SUCCESS);
    world.receive(3, EMPTY);
    assert_eq!(world.reports(), []);
    world.receive(4, EMPTY);
    assert_eq!(world.report(Kind::CqCanOverrun).wr_id, Some(4));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_overrun_is_reported() {
    let world = World::with("suppress=cq-can-overrun".parse().unwrap(), 1);
    world.receive(1, EMPTY);
    world.receive(2, EMPTY);
    world.send(7, EMPTY);
    assert_eq!(world.sent(), IBV_WC_SUCCESS);
    world.send(8, EMPTY);
    let report = world.wait_for_report(Kind::CqOverrun);
    assert_eq!((report.qp, report.wr_id), (world.qp(1), Some(2)));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_send_queue_that_fills_with_unsignaled_work_is_reported() {
    let mut world = World::new();
    let (from, to) = (world.memory(8), world.memory(8));
    let write = |wr_id, flags| world.post(wr_id, from.sge(), IBV_WR_RDMA_WRITE, flags, (to.address, to.key));
    (0..7).for_each(|wr_id| write(wr_id, ibv_send_flags(0)));
    write(7, IBV_SEND_SIGNALED);
    assert_eq!(world.sent(), IBV_WC_SUCCESS);
    (0..7).for_each(|wr_id| write(10 + wr_id, ibv_send_flags(0)));
    // The device has sent and acknowledged the earlier writes once a later one has completed.
    assert_eq!(world.reports(), []);
    write(17, ibv_send_flags(0));
    let report = world.report(Kind::UnsignaledFull);
    assert_eq!((report.qp, report.wr_id), (world.qp(0), Some(17)));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_thread_that_sleeps_while_completions_wait_is_reported() {
    let world = World::new();
    world.receive(1, EMPTY);
    world.send(7, EMPTY);
    assert_eq!(world.sent(), IBV_WC_SUCCESS);
    // The receive has completed as well, since its acknowledgement has arrived. The queue was never armed.
    let (channel, cq) = (world.channel as usize, world.recv_cq as usize);
    let sleeper = std::thread::spawn(move || {
        let (mut found, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel and the queue exist until this thread has ended.
        unsafe {
            assert_eq!(ibv_get_cq_event(channel as *mut ibv_comp_channel, &mut found, &mut context), 0);
            assert_eq!(found as usize, cq);
            ibv_ack_cq_events(found, 1);
        }
    });
    world.wait_for_report(Kind::LostWakeup);
    // SAFETY: the queue exists.
    assert_eq!(unsafe { ibv_req_notify_cq(world.recv_cq, 0) }, 0);
    sleeper.join().unwrap();
    assert_eq!(world.reports(), []);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn threads_that_sleep_otherwise_are_reported_after_a_second() {
    let world = World::new();
    // SAFETY: the channel exists.
    let fd = unsafe { (*world.channel).fd };
    world.receive(1, EMPTY);
    world.send(7, EMPTY);
    assert_eq!(world.sent(), IBV_WC_SUCCESS);
    let sleeper = std::thread::spawn(move || {
        let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid structure.
        assert_eq!(unsafe { libc::poll(&mut wanted, 1, -1) }, 1);
    });
    let report = world.wait_for_report(Kind::LostWakeup);
    assert!(report.to_string().contains("all threads of the program sleep"), "{report}");
    // SAFETY: the queue exists. It has a completion, so the event is raised at once.
    assert_eq!(unsafe { ibv_req_notify_cq(world.recv_cq, 0) }, 0);
    sleeper.join().unwrap();
    assert_eq!(world.reports(), []);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_thread_that_sleeps_after_arming_is_not_reported() {
    let world = World::new();
    let (channel, cq) = (world.channel, world.recv_cq);
    for _ in 0..10 {
        // SAFETY: the channel and the queue exist.
        unsafe {
            assert_eq!(ibv_req_notify_cq(cq, 0), 0);
            world.receive(1, EMPTY);
            world.send(7, EMPTY);
            let (mut found, mut context) = (null_mut(), null_mut());
            assert_eq!(ibv_get_cq_event(channel, &mut found, &mut context), 0);
            ibv_ack_cq_events(found, 1);
        }
        assert_eq!((world.sent(), world.received()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
    }
    assert_eq!(world.reports(), []);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn events_that_are_not_acknowledged_are_reported() {
    let world = World::new();
    // SAFETY: the objects exist. The queue is destroyed once, by the other thread, which waits for the acknowledgement.
    unsafe {
        let cq = ibv_create_cq(world.context, 4, null_mut(), world.channel, 0);
        let mut init = ibv_qp_init_attr { send_cq: cq, recv_cq: cq, qp_type: IBV_QPT_RC, ..ibv_qp_init_attr::zeroed() };
        init.cap = ibv_qp_cap { max_recv_wr: 1, ..ibv_qp_cap::zeroed() };
        let qp = ibv_create_qp(world.pd, &mut init);
        assert_eq!(ibv_req_notify_cq(cq, 0), 0);
        // A receive that is flushed raises the event.
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, ..ibv_qp_attr::zeroed() };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(ibv_modify_qp(qp, &mut attr, mask.0 as i32), 0);
        assert_eq!(ibv_post_recv(qp, &mut ibv_recv_wr::zeroed(), &mut null_mut()), 0);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(ibv_modify_qp(qp, &mut attr, IBV_QP_STATE.0 as i32), 0);
        let (mut found, mut context) = (null_mut(), null_mut());
        assert_eq!(ibv_get_cq_event(world.channel, &mut found, &mut context), 0);
        assert_eq!((found, ibv_destroy_qp(qp)), (cq, 0));
        let address = cq as usize;
        let destroyer = std::thread::spawn(move || assert_eq!(ibv_destroy_cq(address as *mut ibv_cq), 0));
        world.wait_for_report(Kind::UnackedEvents);
        ibv_ack_cq_events(cq, 1);
        destroyer.join().unwrap();
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_message_without_a_receive_is_reported() {
    let world = World::new();
    world.send(7, EMPTY);
    let report = world.wait_for_report(Kind::ReceiverNotReady);
    assert_eq!(report.qp, world.qp(1));
    world.receive(8, EMPTY);
    assert_eq!(world.sent(), IBV_WC_SUCCESS);
    assert_eq!(world.reports(), [], "it is reported once for each queue pair");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_receive_that_is_too_small_is_reported() {
    let mut world = World::new();
    let (from, to) = (world.memory(100), world.memory(99));
    world.receive(8, to.sge());
    world.send(7, from.sge());
    assert_eq!(world.received(), IBV_WC_LOC_LEN_ERR);
    let report = world.report(Kind::ReceiveTooSmall);
    assert_eq!((report.qp, report.wr_id), (world.qp(1), Some(8)));
    assert_eq!((report.memory, report.region.map(|region| region.key)), (Some((to.address, 99)), Some(to.key)));
    // SAFETY: the queue exists.
    let cq = unsafe { (*world.recv_cq).handle };
    assert_eq!(
        report.text,
        format!(
            "a message of at least 100 bytes is longer than its receive, which has 99 bytes in 1 elements. Its completion is in \
             completion queue {cq}"
        )
    );
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_receive_that_is_too_small_has_the_backtrace_of_its_post() {
    let mut world = World::with("backtrace".parse().unwrap(), 16);
    let (from, to) = (world.memory(2), world.memory(1));
    world.receive(8, to.sge());
    world.send(7, from.sge());
    assert_eq!(world.received(), IBV_WC_LOC_LEN_ERR);
    let report = world.report(Kind::ReceiveTooSmall);
    assert!(report.backtrace.unwrap().contains("World::receive"), "the receive, not the send");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn objects_that_are_left_in_a_closed_context_are_reported() {
    let world = World::new();
    // SAFETY: the objects are created from the context. None of them is used after the context is closed.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        ibv_free_device_list(list);
        assert!(!ibv_alloc_pd(context).is_null());
        assert!(!ibv_create_cq(context, 1, null_mut(), null_mut(), 0).is_null());
        assert_eq!(ibv_close_device(context), 0);
    }
    let report = world.report(Kind::Leaked);
    assert_eq!(report.text, "a context is closed: 1 completion queues, 1 protection domains not destroyed");
    let [cq, pd] = &report.objects[..] else { panic!("{report}") };
    assert!(cq.description.starts_with("completion queue ") && cq.backtrace.is_none(), "{report}");
    assert!(cq.description.ends_with(": 0 completions wait in 1 entries, used 0 times by queue pairs"), "{report}");
    assert!(pd.description.starts_with("protection domain "), "{report}");
}

/// Creates a queue of one entry. Its name is in the backtrace.
#[inline(never)]
unsafe fn create_queue(context: *mut ibv_context) -> *mut ibv_cq {
    // SAFETY: the context is open.
    unsafe { ibv_create_cq(context, 1, null_mut(), null_mut(), 0) }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_leaked_object_has_the_backtrace_of_its_creation() {
    let world = World::with("backtrace,limit=2".parse().unwrap(), 16);
    // SAFETY: as above. The destroyed queue is not used again.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        ibv_free_device_list(list);
        // The number of a destroyed queue is reused, and not its backtrace.
        assert_eq!(ibv_destroy_cq(ibv_create_cq(context, 1, null_mut(), null_mut(), 0)), 0);
        let leaked = [create_queue(context), create_queue(context), create_queue(context)];
        assert!(leaked.iter().all(|cq| !cq.is_null()));
        assert_eq!(ibv_close_device(context), 0);
    }
    let report = world.report(Kind::Leaked);
    assert_eq!(report.text, "a context is closed: 3 completion queues not destroyed");
    assert_eq!(report.objects.len(), 2, "the limit of the options");
    for object in &report.objects {
        assert!(object.backtrace.as_ref().unwrap().contains("create_queue"), "{report}");
    }
    assert_eq!(report.to_string().matches("  created at\n").count(), 2, "{report}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn each_leaked_object_is_described() {
    let mut world = World::new();
    let memory = world.memory(100);
    world.receive(0x15, memory.sge());
    let qp = world.qp(1).unwrap();
    let reports = world.abandon();
    let Some(report) = reports.iter().find(|report| report.kind == Kind::Leaked) else { panic!("{reports:?}") };
    let find = |start: String| report.objects.iter().any(|object| object.description.starts_with(&start));
    let posted = "RC in RTS, 0 of 8 sends outstanding, 1 of 8 receives posted from wr_id 0x15, completion queues ";
    assert!(find(format!("queue pair {qp:#x}: {posted}")), "{report}");
    let (from, to, key) = (memory.address, memory.address + 100, memory.key);
    assert!(find(format!("memory region {from:#x} to {to:#x}, 100 bytes, key {key:#x}")), "{report}");
}
