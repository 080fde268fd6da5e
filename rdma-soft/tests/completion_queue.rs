//! Overruns of completion queues, and arming of queues that are not empty.

mod connection;

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rdma_sys::*;

use connection::{Context, Pair};

/// Deadline of a test that hangs.
const HANG: Duration = Duration::from_secs(60);

/// Polls until `is_last` returns true or the queue fails.
fn poll(cq: *mut ibv_cq, mut is_last: impl FnMut(&ibv_wc) -> bool) -> Result<Vec<ibv_wc>, i32> {
    let (mut all, deadline) = (Vec::new(), Instant::now() + HANG);
    loop {
        assert!(Instant::now() < deadline, "{} completions", all.len());
        let mut wc = ibv_wc::zeroed();
        // SAFETY: the queue stays, and there is room for one completion.
        match unsafe { ibv_poll_cq(cq, 1, &mut wc) } {
            0 => {}
            1 => {
                all.push(wc);
                if is_last(&wc) {
                    return Ok(all);
                }
            }
            error => return Err(error),
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_overrun_fails_polls_and_queue_pairs_and_stops_acks() {
    const ROOM: i32 = 2;
    let context = Context::open();
    let (send_cq, recv_cq) = (context.cq(64, null_mut()), context.cq(ROOM, null_mut()));
    let pair = Pair::connect(&context, [(send_cq, send_cq), (recv_cq, recv_cq)]);
    (0..8).for_each(|_| pair.receive(1));
    let sent: Vec<bool> = (0..8).map(|_| pair.send(0, IBV_SEND_SIGNALED)).collect();
    assert_eq!(sent, [true; 8]);

    let mut acknowledged = 0;
    poll(send_cq, |wc| {
        acknowledged += i32::from(wc.status == IBV_WC_SUCCESS);
        wc.status == IBV_WC_RETRY_EXC_ERR
    })
    .unwrap();
    assert!(acknowledged <= ROOM, "{acknowledged} messages were acknowledged, and {ROOM} completions kept");

    let mut received = 0;
    let error = poll(recv_cq, |wc| {
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        received += 1;
        false
    });
    assert_eq!((received, error.err()), (ROOM, Some(-libc::EIO)));
    assert_eq!(pair.state(1), IBV_QPS_ERR);
    let mut events = [context.event(), context.event()];
    events.sort_by_key(|event| event.0);
    assert_eq!(events, [(IBV_EVENT_CQ_ERR.0, recv_cq as usize), (IBV_EVENT_QP_FATAL.0, pair.qps[1] as usize)]);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_queue_pair_on_an_overrun_queue_fails_with_its_first_completion() {
    let context = Context::open();
    let cq = context.cq(1, null_mut());
    let first = Pair::connect(&context, [(cq, cq), (cq, cq)]);
    (0..2).for_each(|_| first.receive(1));
    // Two flushed receives, for a queue with one entry.
    first.fail(1);
    let mut wc = ibv_wc::zeroed();
    // SAFETY: the queue stays, and there is room for one completion.
    let polls = [(); 2].map(|()| unsafe { ibv_poll_cq(cq, 1, &mut wc) });
    assert_eq!(polls, [1, -libc::EIO]);

    let second = Pair::connect(&context, [(cq, cq), (cq, cq)]);
    second.receive(1);
    assert!(second.send(0, IBV_SEND_SIGNALED));
    second.wait_for_state(0, IBV_QPS_ERR, HANG);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn arming_a_queue_that_is_not_empty_raises_one_event_at_once() {
    let context = Context::open();
    let channel = context.channel();
    let (send_cq, cq) = (context.cq(16, null_mut()), context.cq(16, channel));
    let pair = Pair::connect(&context, [(send_cq, send_cq), (cq, cq)]);
    pair.receive(1);
    assert!(pair.send(0, IBV_SEND_SIGNALED));
    // The peer sends the ACK after the completion of the receive.
    poll(send_cq, |_| true).unwrap();

    assert!(!context.takes_event(channel, cq), "the queue is not armed");
    connection::arm(cq, true);
    assert!(!context.takes_event(channel, cq), "the completion is not solicited");
    connection::arm(cq, false);
    connection::arm(cq, false);
    assert!(context.takes_event(channel, cq));
    assert!(!context.takes_event(channel, cq), "a pending event must not be repeated");
    connection::arm(cq, false);
    assert!(context.takes_event(channel, cq));
    assert_eq!(poll(cq, |_| true).unwrap().len(), 1, "an event must not consume a completion");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn arming_for_solicited_completions_finds_solicited_ones_and_errors() {
    let context = Context::open();
    let channel = context.channel();
    let (send_cq, cq) = (context.cq(16, null_mut()), context.cq(16, channel));
    let pair = Pair::connect(&context, [(send_cq, send_cq), (cq, cq)]);
    (0..3).for_each(|_| pair.receive(1));
    assert!(pair.send(0, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED));
    poll(send_cq, |_| true).unwrap();
    connection::arm(cq, true);
    assert!(context.takes_event(channel, cq));

    poll(cq, |_| true).unwrap();
    connection::arm(cq, true);
    assert!(!context.takes_event(channel, cq), "the queue is empty");
    pair.fail(1);
    assert!(context.takes_event(channel, cq), "a flushed receive is an error");
    connection::arm(cq, true);
    assert!(context.takes_event(channel, cq));
}

/// Destroys a queue that was overrun, and creates another one. Returns it if it has the same number.
fn after_an_overrun(context: &Context) -> Option<*mut ibv_cq> {
    let cq = context.cq(1, null_mut());
    let first = Pair::connect(context, [(cq, cq), (cq, cq)]);
    first.fail(0);
    // Both sends are flushed when posted. The second finds the queue full.
    assert!(first.send(0, IBV_SEND_SIGNALED));
    assert!(first.send(0, IBV_SEND_SIGNALED));
    // SAFETY: this test has created the objects, and nothing refers to them.
    let number = unsafe {
        let number = (*cq).handle;
        first.qps.iter().for_each(|qp| assert_eq!(rdma_soft::abi::ibv_destroy_qp(*qp), 0));
        assert_eq!(rdma_soft::abi::ibv_destroy_cq(cq), 0);
        number
    };
    let cq = context.cq(16, null_mut());
    // SAFETY: the queue stays.
    (unsafe { (*cq).handle } == number).then_some(cq)
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_overrun_does_not_affect_a_later_queue_with_the_same_number() {
    let context = Context::open();
    // Another test may take the number in between.
    let cq = (0..100).find_map(|_| after_an_overrun(&context)).expect("a queue with the number of an earlier one");
    let second = Pair::connect(&context, [(cq, cq), (cq, cq)]);
    second.receive(1);
    assert!(second.send(0, IBV_SEND_SIGNALED));
    for _ in 0..2 {
        let wc = poll(cq, |_| true).unwrap();
        assert_eq!(wc[0].status, IBV_WC_SUCCESS);
    }
    assert_eq!([second.state(0), second.state(1)], [IBV_QPS_RTS; 2]);
}
