//! Taking completions: errors, unexpected completions, and cursors that are dropped or forgotten.

use rdma_safe::sys::{IBV_WC_RECV, IBV_WC_WITH_IMM, Zeroed, ibv_wc, ibv_wc__bindgen_ty_1, ibv_wc_status};
use rdma_safe::{
    CompletionQueue, Errno, Error, Operation, PollError, PostError, ProtectionDomain, QueuePair, WcFields, WcFlags,
    WcStatus, Work,
};

use crate::support::interposer::rig::{cq_of, done, endpoints, nothing, on_each_mode};
use crate::support::interposer::{Config, interposed, interposed_with};
use crate::support::lab::{Mode, Wc};
use crate::support::{DEADLINE, in_flight};

/// A queue pair with a completion queue for both directions, which is not connected.
struct Raw {
    qp: QueuePair,
    cq: CompletionQueue,
}

fn raw_with(pd: &ProtectionDomain, mode: Mode, fields: WcFields) -> Raw {
    let cq = pd.context().completion_queue(64).fields(fields).classic(mode.classic_cq).build().unwrap();
    let qp = pd.queue_pair(&cq, &cq).classic(mode.classic_qp).build().unwrap();
    Raw { qp, cq }
}

/// Takes all available completions with one cursor.
fn seen(cq: &mut CompletionQueue) -> Vec<Wc> {
    let mut all = Vec::new();
    let mut poll = cq.poll();
    while let Some(wc) = poll.next().unwrap() {
        all.push(wc.into());
    }
    all
}

fn raw(pd: &ProtectionDomain, mode: Mode) -> Raw {
    raw_with(pd, mode, WcFields::STANDARD)
}

fn numbered(wr_id: u64) -> ibv_wc {
    ibv_wc { byte_len: 100 + wr_id as u32, ..of(wr_id) }
}

/// A successful completion of a send.
fn of(wr_id: u64) -> ibv_wc {
    ibv_wc { wr_id, ..ibv_wc::zeroed() }
}

/// Completion fields for each accessor.
fn with_all_fields(wr_id: u64, wc_flags: u32) -> ibv_wc {
    let imm = ibv_wc__bindgen_ty_1 { imm_data: 0x0506_0708_u32.to_be() };
    let origin = ibv_wc { src_qp: 21, slid: 22, sl: 3, dlid_path_bits: 4, ..of(wr_id) };
    ibv_wc { byte_len: 30, qp_num: 20, wc_flags, __bindgen_anon_1: imm, ..origin }
}

#[test]
fn a_poll_error_is_not_taken_for_an_empty_queue() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw(&pd, mode);
        soft.fail(mode.poll_verb(), libc::EIO);
        for _ in 0..2 {
            let error = raw.cq.poll().next().unwrap_err();
            assert_eq!(error, PollError::Provider(Errno(libc::EIO)));
            assert!(error.to_string().contains("overran, or the device is gone"), "{error}");
        }
        soft.heal(mode.poll_verb());
        soft.inject(raw.cq.as_raw(), numbered(5));
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 5);
    });
}

#[test]
fn a_failed_cursor_repeats_its_error_without_polling() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw(&pd, mode);
        soft.fail(mode.poll_verb(), libc::EIO);
        let queue = raw.cq.as_raw();
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
        soft.heal(mode.poll_verb());
        soft.inject(queue, numbered(5));
        assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)), "the provider was polled again");
        drop(poll);
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 5);
    });
}

#[test]
fn an_error_during_a_poll_keeps_the_remaining_completions() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let mut raw = raw(&pd, Mode::EXTENDED);
    (1..=3).for_each(|wr_id| soft.inject(raw.cq.as_raw(), numbered(wr_id)));
    soft.fail("next_poll", libc::EIO);
    let mut poll = raw.cq.poll();
    assert_eq!(poll.next().unwrap().unwrap().wr_id(), 1);
    assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
    drop(poll);
    soft.heal("next_poll");
    let rest: Vec<_> = seen(&mut raw.cq).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(rest, [2, 3]);
    assert_eq!(soft.calls("end_poll"), 2, "an error of next_poll does not end the session, dropping the cursor does");
}

#[test]
fn an_endpoint_takes_one_completion_at_a_time_and_leaves_the_others_in_the_queue() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let (mut a, mut b) = endpoints(&soft, &pd, Mode::EXTENDED);
    for len in [5, 6] {
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.post(Work::send(pd.allocate(len).unwrap()).imm(7)).unwrap();
    }
    for end in [&a, &b] {
        soft.await_completions(cq_of(end.queue_pair()), 2);
    }
    soft.fail("next_poll", libc::EIO);
    for len in [5, 6] {
        let sent = done(&mut a);
        assert_eq!((sent.operation, sent.buffer.unwrap().len()), (Operation::Send, len));
        let received = done(&mut b);
        assert_eq!((received.operation, received.imm(), received.byte_len), (Operation::Receive, Some(7), len as u32));
        assert_eq!(received.buffer.unwrap().len(), len);
    }
    assert_eq!((soft.calls("start_poll"), soft.calls("end_poll"), soft.calls("next_poll")), (4, 4, 0));
}

#[test]
fn an_overrun_queue_is_an_error() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let Raw { qp, mut cq } = raw(&pd, mode);
        assert_eq!(cq.capacity(), 64);
        (0..65).for_each(|wr_id| soft.inject(cq.as_raw(), numbered(wr_id)));
        assert!(matches!(cq.poll().next(), Err(PollError::Provider(_))));
        drop(qp);
    });
}

#[test]
fn an_endpoint_whose_queue_fails_returns_the_error_and_its_buffers() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        b.receive(pd.allocate(4).unwrap()).unwrap();
        soft.fail(mode.poll_verb(), libc::EIO);
        assert_eq!(b.poll().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
        let error = b.wait(DEADLINE).unwrap_err();
        assert!(matches!(error, Error::Poll(PollError::Provider(_))), "{error}");
        assert_eq!(in_flight(&b), (0, 1));
        assert_eq!(b.close().unwrap().len(), 1);
        soft.heal(mode.poll_verb());
        nothing(&mut a);
    });
}

#[test]
fn an_unexpected_completion_releases_nothing() {
    on_each_mode(|soft, mode| {
        const RECEIVE: u64 = 1 << 63;
        let pd = soft.pd();
        // Zero; in the past; in the future; a receive that was never posted; invalid values.
        let wr_ids = [0, RECEIVE | 1, 4, 1000, RECEIVE, 1, RECEIVE | 5, u64::MAX];
        for wr_id in wr_ids.into_iter().take(if cfg!(miri) { 2 } else { 8 }) {
            let (mut a, mut b) = endpoints(soft, &pd, mode);
            for _ in 0..4 {
                b.receive(pd.allocate(8).unwrap()).unwrap();
            }
            // Sequence number 1 of both directions has completed, 2 and 3 are in flight.
            a.send(pd.allocate(1).unwrap()).unwrap();
            let _ = (done(&mut a), done(&mut b));
            soft.hold();
            a.send(pd.allocate(2).unwrap()).unwrap();
            a.send(pd.allocate(3).unwrap()).unwrap();
            let endpoint = if wr_id & RECEIVE == 0 { &mut a } else { &mut b };
            let before = in_flight(endpoint);
            soft.inject(cq_of(endpoint.queue_pair()), of(wr_id));
            assert_eq!(endpoint.poll().unwrap_err(), PollError::NotInFlight { wr_id });
            assert_eq!(in_flight(endpoint), before, "no buffer may be released");
            nothing(endpoint);

            soft.release();
            let lengths: Vec<_> = (0..2).map(|_| done(&mut b).byte_len).collect();
            assert_eq!(lengths, [2, 3], "correct completions are still taken");
            assert_eq!([done(&mut a).buffer.unwrap().len(), done(&mut a).buffer.unwrap().len()], [2, 3]);
        }
    });
}

#[test]
fn an_unexpected_flush_changes_no_outcome() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        for _ in 0..2 {
            b.receive(pd.allocate(8).unwrap()).unwrap();
        }
        soft.hold();
        a.post(Work::send(pd.allocate(1).unwrap()).unsignaled()).unwrap();
        a.send(pd.allocate(2).unwrap()).unwrap();
        // Work that was never posted.
        let flushed = ibv_wc { status: ibv_wc_status(WcStatus::WR_FLUSH_ERR.0), ..of(1000) };
        soft.inject(cq_of(a.queue_pair()), flushed);
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 1000 });
        soft.release();
        assert_eq!([done(&mut a).buffer.unwrap().len(), done(&mut a).buffer.unwrap().len()], [1, 2]);
    });
}

#[test]
fn a_repeated_completion_is_an_error_and_the_buffer_is_released_once() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        soft.change_completions(|wc| vec![wc, wc]);
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send(pd.allocate(8).unwrap()).unwrap();
        assert_eq!(done(&mut a).buffer.unwrap().len(), 8);
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 1 });
        nothing(&mut a);
        assert_eq!(in_flight(&a), (0, 0));
    });
}

#[test]
fn a_receive_cannot_be_skipped() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        let _first = b.receive(pd.allocate(8).unwrap()).unwrap();
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let second = 1 << 63 | 2;
        soft.inject(cq_of(b.queue_pair()), of(second));
        assert_eq!(b.poll().unwrap_err(), PollError::NotInFlight { wr_id: second });
        assert_eq!(in_flight(&b), (0, 2), "the device still has the first");
        nothing(&mut a);
    });
}

#[test]
fn signaled_work_cannot_be_skipped() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = endpoints(soft, &pd, mode);
        soft.hold();
        a.post(Work::send(pd.allocate(8).unwrap()).unsignaled()).unwrap();
        a.post(Work::send(pd.allocate(8).unwrap())).unwrap();
        a.post(Work::send(pd.allocate(8).unwrap())).unwrap();
        soft.inject(cq_of(a.queue_pair()), of(3));
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 3 });
        assert_eq!(in_flight(&a), (3, 0), "the second has not completed, so the device still has it");
    });
}

#[test]
fn a_completion_longer_than_its_buffer_is_cut_to_the_buffer() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (_a, mut b) = endpoints(soft, &pd, mode);
        let mut inbox = pd.allocate(8).unwrap();
        inbox.set_len(3).unwrap();
        b.receive(inbox).unwrap();
        let cqe = ibv_wc { opcode: IBV_WC_RECV, byte_len: 1 << 30, ..of(1 << 63 | 1) };
        soft.inject(cq_of(b.queue_pair()), cqe);
        let buffer = done(&mut b).buffer.unwrap();
        assert_eq!(buffer.len(), 8);
        // The completion was false: the device still has the buffer.
        drop(b);
    });
}

#[test]
fn dropping_a_cursor_keeps_completions_that_were_not_taken() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw(&pd, mode);
        // More than one batch of `ibv_poll_cq`, and twice around the end of the ring.
        let mut expected = 0..;
        let mut injected = 0;
        for round in 0..if cfg!(miri) { 3 } else { 12 } {
            for _ in 0..20 {
                soft.inject(raw.cq.as_raw(), numbered(injected));
                injected += 1;
            }
            for take in [3, 0, 5, 1, round % 4] {
                let mut poll = raw.cq.poll();
                for _ in 0..take {
                    let wc = poll.next().unwrap().unwrap();
                    let wr_id = expected.next().unwrap();
                    assert_eq!((wc.wr_id(), wc.byte_len()), (wr_id, Some(100 + wr_id as u32)));
                }
            }
            let rest: Vec<_> = seen(&mut raw.cq).iter().map(|wc| wc.wr_id).collect();
            assert_eq!(rest, expected.by_ref().take(rest.len()).collect::<Vec<_>>());
            assert_eq!(expected.start, injected, "none is lost and none is repeated");
        }
    });
}

#[test]
fn a_forgotten_cursor_ends_with_the_next_one() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw(&pd, mode);
        for wr_id in 0..6 {
            soft.inject(raw.cq.as_raw(), numbered(wr_id));
        }
        for wr_id in 0..4 {
            let mut poll = raw.cq.poll();
            assert_eq!(poll.next().unwrap().unwrap().wr_id(), wr_id);
            std::mem::forget(poll);
        }
        assert_eq!(seen(&mut raw.cq).len(), 2);

        // The queue is dropped while a forgotten cursor is open. Destroying it under the provider's lock would deadlock.
        soft.inject(raw.cq.as_raw(), numbered(7));
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap().unwrap().wr_id(), 7);
        std::mem::forget(poll);
        let Raw { qp, cq } = raw;
        drop(cq);
        drop(qp);
        if !mode.classic_cq {
            assert_eq!(soft.calls("end_poll"), 6);
        }
    });
}

#[test]
fn an_empty_cursor_stays_empty_without_polling() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw(&pd, mode);
        soft.inject(raw.cq.as_raw(), numbered(1));
        let cq = raw.cq.as_raw();
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap().unwrap().wr_id(), 1);
        assert!(poll.next().unwrap().is_none());
        let calls = || ["start_poll", "next_poll", "end_poll", "ibv_poll_cq"].map(|verb| soft.calls(verb));
        let before = calls();
        soft.inject(cq, numbered(2));
        assert!(poll.next().unwrap().is_none());
        assert_eq!(calls(), before);
        drop(poll);
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 2);
    });
}

#[test]
fn a_session_ends_exactly_if_it_began() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let mut raw = raw(&pd, Mode::EXTENDED);
    drop(raw.cq.poll());
    assert_eq!((soft.calls("start_poll"), soft.calls("end_poll")), (0, 0), "an unused cursor makes no call");
    assert!(raw.cq.poll().next().unwrap().is_none());
    assert_eq!((soft.calls("start_poll"), soft.calls("end_poll")), (1, 0), "no end_poll after an empty start_poll");
    soft.inject(raw.cq.as_raw(), numbered(1));
    seen(&mut raw.cq);
    assert_eq!((soft.calls("start_poll"), soft.calls("next_poll"), soft.calls("end_poll")), (2, 1, 1));
}

#[test]
fn a_field_that_a_provider_accepts_and_lacks_is_refused() {
    for lacks in [WcFields::COMPLETION_TIMESTAMP, WcFields::BYTE_LEN] {
        let further_fields = WcFields::COMPLETION_TIMESTAMP.bits();
        let config = Config { further_fields, hollow_fields: lacks.bits(), ..Config::default() };
        let Some(soft) = interposed_with(config) else { return };
        let asked = WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP;
        let error = soft.completion_queue(8).fields(asked).build().unwrap_err();
        assert!(matches!(error, Error::CompletionFields { fields } if fields == lacks), "{error}");
        assert_eq!((soft.calls("create_cq_ex"), soft.live().cqs), (1, 0), "the incomplete queue is destroyed");
    }
}

#[test]
fn a_queue_without_mandatory_accessors_is_polled_by_poll_cq() {
    for (hollow_fields, no_end_poll) in [(WcFields::BYTE_LEN.bits(), false), (WcFields::IMM.bits(), false), (0, true)] {
        let Some(soft) = interposed_with(Config { hollow_fields, no_end_poll, ..Config::default() }) else { return };
        let mut cq = soft.completion_queue(8).build().unwrap();
        soft.inject(cq.as_raw(), numbered(5));
        let [wc] = &seen(&mut cq)[..] else { panic!("one completion") };
        assert_eq!((wc.wr_id, wc.byte_len, cq.is_extended()), (5, Some(105), false));
        assert_eq!(soft.live().cqs, 1);
    }
}

#[test]
fn a_field_that_was_not_requested_is_none_and_is_not_read() {
    let all = WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP;
    let further_fields = WcFields::COMPLETION_TIMESTAMP.bits();
    let Some(soft) = interposed_with(Config { further_fields, ..Config::default() }) else { return };
    let pd = soft.pd();
    let names = WcFields::STANDARD.iter().chain([WcFields::COMPLETION_TIMESTAMP, WcFields::empty(), all]);
    for fields in names {
        let mut raw = raw_with(&pd, Mode::EXTENDED, fields);
        assert_eq!(raw.cq.fields(), fields);
        soft.inject(raw.cq.as_raw(), with_all_fields(9, IBV_WC_WITH_IMM.0));
        let mut poll = raw.cq.poll();
        let wc = poll.next().unwrap().unwrap();
        assert_eq!((wc.wr_id(), wc.status(), wc.flags()), (9, WcStatus::SUCCESS, WcFlags::WITH_IMM));
        let has = |field| fields.contains(field);
        assert_eq!(wc.byte_len(), has(WcFields::BYTE_LEN).then_some(30));
        assert_eq!(wc.imm(), has(WcFields::IMM).then_some(0x0506_0708));
        assert_eq!(wc.qp_num(), has(WcFields::QP_NUM).then_some(20));
        assert_eq!(wc.src_qp(), has(WcFields::SRC_QP).then_some(21));
        assert_eq!(wc.slid(), has(WcFields::SLID).then_some(22));
        assert_eq!(wc.sl(), has(WcFields::SL).then_some(3));
        assert_eq!(wc.dlid_path_bits(), has(WcFields::DLID_PATH_BITS).then_some(4));
        assert_eq!(wc.completion_timestamp(), has(WcFields::COMPLETION_TIMESTAMP).then_some(1_000_009));
        let never = (wc.completion_wallclock_ns(), wc.cvlan(), wc.flow_tag(), wc.invalidated_rkey());
        assert_eq!(never, (None, None, None, None));
        assert_eq!(wc.standard().is_some(), has(WcFields::STANDARD));
        assert!(format!("{wc:?}").contains("wr_id: 9"));
        let error = wc.ok();
        assert_eq!(error, Ok(()));
    }
}

#[test]
fn standard_fields_are_available_on_every_device() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut raw = raw_with(&pd, mode, WcFields::STANDARD);
        for (flags, imm) in [(IBV_WC_WITH_IMM.0, Some(0x0506_0708)), (0, None)] {
            soft.inject(raw.cq.as_raw(), with_all_fields(0, flags));
            let mut poll = raw.cq.poll();
            let wc = poll.next().unwrap().unwrap();
            let fields = wc.standard().expect("all of them");
            assert_eq!((fields.byte_len(), fields.imm(), fields.qp_num()), (30, imm, 20));
            let origin = (fields.src_qp(), fields.slid(), fields.sl(), fields.dlid_path_bits());
            assert_eq!(origin, (21, 22, 3, 4));
            assert!(format!("{fields:?}").contains("byte_len: 30"));
        }
    });
}

#[test]
fn a_failed_completion_names_the_queue_pair_only_if_it_is_known() {
    for mode in [Mode::EXTENDED, Mode::CLASSIC] {
        let Some(soft) = interposed() else { return };
        let pd = soft.pd();
        let mut raw = raw_with(&pd, mode, WcFields::empty());
        soft.inject(raw.cq.as_raw(), ibv_wc { status: ibv_wc_status(12), vendor_err: 9, qp_num: 20, ..of(3) });
        let mut poll = raw.cq.poll();
        let error = poll.next().unwrap().unwrap().ok().unwrap_err();
        assert_eq!((error.status, error.vendor_error, error.wr_id), (WcStatus::RETRY_EXC_ERR, 9, 3));
        assert_eq!(error.qp_num, (mode.classic_cq).then_some(20));
    }
}

#[test]
fn completions_outlive_their_queue_pair() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let Raw { qp, mut cq } = raw(&pd, mode);
        soft.inject(cq.as_raw(), numbered(1));
        qp.destroy().unwrap();
        assert_eq!(seen(&mut cq)[0].wr_id, 1);
    });
}

#[test]
fn a_queue_pair_is_destroyed_when_a_forgotten_cursor_ends() {
    on_each_mode(|soft, mode| {
        for again in [true, false] {
            let pd = soft.pd();
            let Raw { qp, mut cq } = raw(&pd, mode);
            soft.inject(cq.as_raw(), numbered(1));
            let mut poll = cq.poll();
            assert!(poll.next().unwrap().is_some());
            std::mem::forget(poll);
            // Destroying the queue pair now would deadlock on the lock that this thread holds.
            drop(qp);
            assert_eq!(soft.live().qps, usize::from(!mode.classic_cq));
            if again {
                drop(cq.poll());
                assert_eq!(soft.live().qps, 0);
            }
            drop(cq);
            assert_eq!((soft.live().qps, soft.live().cqs), (0, 0));
        }
    });
}

#[test]
fn a_private_return_code_of_the_provider_is_not_reported_as_errno() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let mut raw = raw(&pd, Mode::EXTENDED);
    for code in [-1, -2, i32::MIN] {
        soft.fail("start_poll", code);
        assert_eq!(raw.cq.poll().next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
    }
}

#[test]
fn unsignaled_work_before_a_flushed_request_is_not_counted_as_done() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = endpoints(soft, &pd, mode);
        soft.hold();
        a.post(Work::send(pd.allocate(1).unwrap()).unsignaled()).unwrap();
        a.post(Work::send_inline(b"x").unsignaled()).unwrap();
        a.send(pd.allocate(3).unwrap()).unwrap();
        // Some providers flush only signaled work.
        let flushed = ibv_wc { status: ibv_wc_status(WcStatus::WR_FLUSH_ERR.0), vendor_err: 9, ..of(3) };
        soft.inject(cq_of(a.queue_pair()), flushed);
        let mut kept = Vec::new();
        for length in [Some(1), None, Some(3)] {
            let completion = a.poll().unwrap().unwrap();
            assert_eq!((completion.status, completion.vendor_error), (WcStatus::WR_FLUSH_ERR, 9));
            assert_eq!(completion.buffer.as_ref().map(|buffer| buffer.len()), length);
            kept.push(completion);
        }
        nothing(&mut a);
        // The flush was false: the device still has the buffers.
        drop(a);
    });
}

#[test]
fn an_endpoint_refuses_work_after_an_impossible_completion() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, _b) = endpoints(soft, &pd, mode);
        soft.inject(cq_of(a.queue_pair()), of(0));
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 0 });
        let rejected = a.send(pd.allocate(5).unwrap()).unwrap_err();
        assert_eq!(rejected.error, PostError::EndpointFailed);
        assert_eq!(rejected.buffer.unwrap().len(), 5);
    });
}
