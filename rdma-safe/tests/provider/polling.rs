//! Taking completions: errors, unexpected completions, and cursors that are dropped or forgotten.

use rdma_safe::{Errno, Error, Operation, PollError, ProtectionDomain, WcFields, WcFlags, WcStatus, Work};

use crate::fake::{Config, Cqe, Fake};
use crate::support::{
    CLASSIC, DEADLINE, EXTENDED, Interfaces, Raw, done, endpoints, in_flight, nothing, on_each_interface, raw_with,
    seen,
};

fn raw(pd: &ProtectionDomain, interfaces: Interfaces) -> Raw {
    raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp)
}

fn numbered(wr_id: u64) -> Cqe {
    Cqe { wr_id, byte_len: 100 + wr_id as u32, ..Cqe::default() }
}

/// The function that a poll calls first.
fn first_call(interfaces: Interfaces) -> &'static str {
    if interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" }
}

#[test]
fn a_poll_error_is_not_taken_for_an_empty_queue() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        fake.fail(first_call(interfaces), libc::EIO);
        for _ in 0..2 {
            let error = raw.cq.poll().next().unwrap_err();
            assert_eq!(error, PollError::Provider(Errno(libc::EIO)));
            assert!(error.to_string().contains("overran, or the device is gone"), "{error}");
        }
        fake.heal(first_call(interfaces));
        fake.inject(raw.cq.as_raw(), numbered(5));
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 5);
    });
}

#[test]
fn a_failed_cursor_repeats_its_error_without_polling() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        fake.fail(first_call(interfaces), libc::EIO);
        let queue = raw.cq.as_raw();
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
        fake.heal(first_call(interfaces));
        fake.inject(queue, numbered(5));
        assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)), "the provider was polled again");
        drop(poll);
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 5);
    });
}

#[test]
fn an_error_during_a_poll_keeps_the_remaining_completions() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw(&pd, EXTENDED);
    (1..=3).for_each(|wr_id| fake.inject(raw.cq.as_raw(), numbered(wr_id)));
    fake.fail("next_poll", libc::EIO);
    let mut poll = raw.cq.poll();
    assert_eq!(poll.next().unwrap().unwrap().wr_id(), 1);
    assert_eq!(poll.next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
    drop(poll);
    fake.heal("next_poll");
    let rest: Vec<_> = seen(&mut raw.cq).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(rest, [2, 3]);
    assert_eq!(fake.calls("end_poll"), 2, "an error of next_poll does not end the session, dropping the cursor does");
}

#[test]
fn an_endpoint_takes_one_completion_at_a_time_and_leaves_the_others_in_the_queue() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (mut a, mut b) = endpoints(&pd, EXTENDED);
    for len in [5, 6] {
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.post(Work::send(pd.allocate(len).unwrap()).imm(7)).unwrap();
    }
    fake.fail("next_poll", libc::EIO);
    for len in [5, 6] {
        let sent = done(&mut a);
        assert_eq!((sent.operation, sent.buffer.unwrap().len()), (Operation::Send, len));
        let received = done(&mut b);
        assert_eq!((received.operation, received.imm(), received.byte_len), (Operation::Receive, Some(7), len as u32));
        assert_eq!(received.buffer.unwrap().len(), len);
    }
    assert_eq!((fake.calls("start_poll"), fake.calls("end_poll"), fake.calls("next_poll")), (4, 4, 0));
}

#[test]
fn an_overrun_queue_is_an_error() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        assert_eq!(raw.cq.capacity(), 64);
        (0..65).for_each(|wr_id| fake.inject(raw.cq.as_raw(), numbered(wr_id)));
        assert!(matches!(raw.cq.poll().next(), Err(PollError::Provider(_))));
    });
}

#[test]
fn an_endpoint_whose_queue_fails_says_so_and_gives_its_buffers_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(pd.allocate(4).unwrap()).unwrap();
        fake.fail(first_call(interfaces), libc::EIO);
        assert_eq!(b.poll().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
        let error = b.wait(DEADLINE).unwrap_err();
        assert!(matches!(error, Error::Poll(PollError::Provider(_))), "{error}");
        assert_eq!(in_flight(&b), (0, 1));
        assert_eq!(b.close().unwrap().len(), 1);
        fake.heal(first_call(interfaces));
        nothing(&mut a);
    });
}

#[test]
fn an_unexpected_completion_releases_nothing() {
    on_each_interface(|fake, interfaces| {
        const RECEIVE: u64 = 1 << 63;
        let pd = fake.pd();
        // Zero; in the past; in the future; a receive that was never posted; invalid values.
        let wr_ids = [0, RECEIVE | 1, 4, 1000, RECEIVE, 1, RECEIVE | 5, u64::MAX];
        for wr_id in wr_ids.into_iter().take(if cfg!(miri) { 2 } else { 8 }) {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            for _ in 0..4 {
                b.receive(pd.allocate(8).unwrap()).unwrap();
            }
            // Sequence number 1 of both directions has completed, 2 and 3 are in flight.
            a.send(pd.allocate(1).unwrap()).unwrap();
            let _ = (done(&mut a), done(&mut b));
            fake.set_mode(crate::fake::Mode::Manual);
            a.send(pd.allocate(2).unwrap()).unwrap();
            a.send(pd.allocate(3).unwrap()).unwrap();
            let endpoint = if wr_id & RECEIVE == 0 { &mut a } else { &mut b };
            let before = in_flight(endpoint);
            fake.inject(cq_of(endpoint.queue_pair()), Cqe { wr_id, ..Cqe::default() });
            assert_eq!(endpoint.poll().unwrap_err(), PollError::NotInFlight { wr_id });
            assert_eq!(in_flight(endpoint), before, "no buffer may be released");
            nothing(endpoint);

            fake.set_mode(crate::fake::Mode::AtPost);
            fake.progress();
            let lengths: Vec<_> = (0..2).map(|_| done(&mut b).byte_len).collect();
            assert_eq!(lengths, [2, 3], "correct completions are still taken");
            assert_eq!([done(&mut a).buffer.unwrap().len(), done(&mut a).buffer.unwrap().len()], [2, 3]);
        }
    });
}

/// The completion queue of an endpoint, which the endpoint does not expose.
fn cq_of(qp: &rdma_safe::QueuePair) -> *mut rdma_sys::ibv_cq {
    // SAFETY: the queue pair is valid while it is borrowed.
    unsafe { (*qp.as_raw()).send_cq }
}

#[test]
fn a_repeated_completion_is_an_error_and_the_buffer_is_released_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send(pd.allocate(8).unwrap()).unwrap();
        let cq = cq_of(a.queue_pair());
        fake.inject(cq, Cqe { wr_id: 1, ..Cqe::default() });
        assert_eq!(done(&mut a).buffer.unwrap().len(), 8);
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 1 });
        nothing(&mut a);
        assert_eq!(in_flight(&a), (0, 0));
    });
}

#[test]
fn a_receive_cannot_be_skipped() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let _first = b.receive(pd.allocate(8).unwrap()).unwrap();
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let second = 1 << 63 | 2;
        fake.inject(cq_of(b.queue_pair()), Cqe { wr_id: second, ..Cqe::default() });
        assert_eq!(b.poll().unwrap_err(), PollError::NotInFlight { wr_id: second });
        assert_eq!(in_flight(&b), (0, 2), "the device still has the first");
        nothing(&mut a);
    });
}

#[test]
fn signaled_work_cannot_be_skipped() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        fake.set_mode(crate::fake::Mode::Manual);
        a.post(Work::send(pd.allocate(8).unwrap()).unsignaled()).unwrap();
        a.post(Work::send(pd.allocate(8).unwrap())).unwrap();
        a.post(Work::send(pd.allocate(8).unwrap())).unwrap();
        fake.inject(cq_of(a.queue_pair()), Cqe { wr_id: 3, ..Cqe::default() });
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 3 });
        assert_eq!(in_flight(&a), (3, 0), "the second has not completed, so the device still has it");
    });
}

#[test]
fn a_completion_longer_than_its_buffer_is_cut_to_the_buffer() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = endpoints(&pd, interfaces);
        let mut inbox = pd.allocate(8).unwrap();
        inbox.set_len(3).unwrap();
        b.receive(inbox).unwrap();
        let cqe = Cqe { wr_id: 1 << 63 | 1, opcode: 128, byte_len: 1 << 30, ..Cqe::default() };
        fake.inject(cq_of(b.queue_pair()), cqe);
        let buffer = done(&mut b).buffer.unwrap();
        assert_eq!(buffer.len(), 8);
        // The completion was false: the device still has the buffer.
        drop(b);
    });
}

#[test]
fn dropping_a_cursor_keeps_completions_that_were_not_taken() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        // More than one batch of `ibv_poll_cq`, and twice around the end of the ring.
        let mut expected = 0..;
        let mut injected = 0;
        for round in 0..if cfg!(miri) { 3 } else { 12 } {
            for _ in 0..20 {
                fake.inject(raw.cq.as_raw(), numbered(injected));
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
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        for wr_id in 0..6 {
            fake.inject(raw.cq.as_raw(), numbered(wr_id));
        }
        for wr_id in 0..4 {
            let mut poll = raw.cq.poll();
            assert_eq!(poll.next().unwrap().unwrap().wr_id(), wr_id);
            std::mem::forget(poll);
        }
        assert_eq!(seen(&mut raw.cq).len(), 2);

        // The queue is dropped while a forgotten cursor is open. Destroying it under the provider's lock would deadlock.
        fake.inject(raw.cq.as_raw(), numbered(7));
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap().unwrap().wr_id(), 7);
        std::mem::forget(poll);
        let Raw { qp, cq } = raw;
        drop(cq);
        drop(qp);
        if interfaces.extended_cq {
            assert_eq!(fake.calls("end_poll"), 6);
        }
    });
}

#[test]
fn an_empty_cursor_stays_empty_without_polling() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw(&pd, interfaces);
        fake.inject(raw.cq.as_raw(), numbered(1));
        let cq = raw.cq.as_raw();
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap().unwrap().wr_id(), 1);
        assert!(poll.next().unwrap().is_none());
        let calls = || ["start_poll", "next_poll", "end_poll", "ibv_poll_cq"].map(|verb| fake.calls(verb));
        let before = calls();
        fake.inject(cq, numbered(2));
        assert!(poll.next().unwrap().is_none());
        assert_eq!(calls(), before);
        drop(poll);
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 2);
    });
}

#[test]
fn a_session_ends_exactly_if_it_began() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw(&pd, EXTENDED);
    drop(raw.cq.poll());
    assert_eq!((fake.calls("start_poll"), fake.calls("end_poll")), (0, 0), "an unused cursor makes no call");
    assert!(raw.cq.poll().next().unwrap().is_none());
    assert_eq!((fake.calls("start_poll"), fake.calls("end_poll")), (1, 0), "no end_poll after an empty start_poll");
    fake.inject(raw.cq.as_raw(), numbered(1));
    seen(&mut raw.cq);
    assert_eq!((fake.calls("start_poll"), fake.calls("next_poll"), fake.calls("end_poll")), (2, 1, 1));
}

#[test]
fn a_field_that_a_provider_accepts_and_lacks_is_refused() {
    let wc_flags = (WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP).bits();
    for lacks in [WcFields::COMPLETION_TIMESTAMP, WcFields::BYTE_LEN] {
        let fake = Fake::new(Config { wc_flags, hollow_fields: lacks.bits(), ..Config::default() });
        let asked = WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP;
        let error = fake.open().completion_queue(8).fields(asked).build().unwrap_err();
        assert!(matches!(error, Error::CompletionFields { fields } if fields == lacks), "{error}");
        assert_eq!(fake.live().cqs, 0, "the incomplete queue is destroyed");
    }
}

#[test]
fn a_queue_without_mandatory_accessors_is_polled_by_poll_cq() {
    for (hollow_fields, no_end_poll) in [(WcFields::BYTE_LEN.bits(), false), (WcFields::IMM.bits(), false), (0, true)] {
        let fake = Fake::new(Config { hollow_fields, no_end_poll, ..Config::default() });
        let mut cq = fake.open().completion_queue(8).build().unwrap();
        fake.inject(cq.as_raw(), numbered(5));
        let [wc] = seen(&mut cq)[..] else { panic!("one completion") };
        assert_eq!((wc.wr_id, wc.byte_len, cq.is_extended()), (5, Some(105), false));
        assert_eq!(fake.live().cqs, 1);
    }
}

#[test]
fn fields_that_were_not_asked_for_are_none_and_never_read() {
    let all = WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP;
    let fake = Fake::new(Config { wc_flags: all.bits(), ..Config::default() });
    let pd = fake.pd();
    let names = WcFields::STANDARD.iter().chain([WcFields::COMPLETION_TIMESTAMP, WcFields::empty(), all]);
    for fields in names {
        let mut raw = raw_with(&pd, EXTENDED, fields, |qp| qp);
        assert_eq!(raw.cq.fields(), fields);
        let wc_flags = rdma_sys::IBV_WC_WITH_IMM.0;
        let imm_data = 0x0506_0708_u32.to_be();
        let cqe = Cqe { wr_id: 9, qp_num: 20, byte_len: 30, imm_data, wc_flags, ..Cqe::default() };
        fake.inject(raw.cq.as_raw(), cqe);
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
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut raw = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp);
        for (flags, imm) in [(rdma_sys::IBV_WC_WITH_IMM.0, Some(0x0506_0708)), (0, None)] {
            let cqe =
                Cqe { qp_num: 20, byte_len: 30, imm_data: 0x0506_0708_u32.to_be(), wc_flags: flags, ..Cqe::default() };
            fake.inject(raw.cq.as_raw(), cqe);
            let mut poll = raw.cq.poll();
            let wc = poll.next().unwrap().unwrap();
            let fields = wc.standard().expect("all of them");
            assert_eq!((fields.byte_len(), fields.imm(), fields.qp_num()), (30, imm, 20));
            let origin = (fields.src_qp(), fields.slid(), fields.sl(), fields.dlid_path_bits());
            // The provider sets these fields only for accessors, not in `ibv_wc`.
            assert_eq!(origin, if interfaces.extended_cq { (21, 22, 3, 4) } else { (0, 0, 0, 0) });
            assert!(format!("{fields:?}").contains("byte_len: 30"));
        }
    });
}

#[test]
fn a_failed_completion_names_the_queue_pair_only_if_it_is_known() {
    for interfaces in [EXTENDED, CLASSIC] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let mut raw = raw_with(&pd, interfaces, WcFields::empty(), |qp| qp);
        fake.inject(raw.cq.as_raw(), Cqe { wr_id: 3, status: 12, vendor_err: 9, qp_num: 20, ..Cqe::default() });
        let mut poll = raw.cq.poll();
        let error = poll.next().unwrap().unwrap().ok().unwrap_err();
        assert_eq!((error.status, error.vendor_error, error.wr_id), (WcStatus::RETRY_EXC_ERR, 9, 3));
        assert_eq!(error.qp_num, (!interfaces.extended_cq).then_some(20));
    }
}

#[test]
fn completions_outlive_their_queue_pair() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let Raw { qp, mut cq } = raw(&pd, interfaces);
        fake.inject(cq.as_raw(), numbered(1));
        qp.destroy().unwrap();
        assert_eq!(seen(&mut cq)[0].wr_id, 1);
    });
}

#[test]
fn a_queue_pair_is_destroyed_when_a_forgotten_cursor_ends() {
    on_each_interface(|fake, interfaces| {
        for again in [true, false] {
            let pd = fake.pd();
            let Raw { qp, mut cq } = raw(&pd, interfaces);
            fake.inject(cq.as_raw(), numbered(1));
            let mut poll = cq.poll();
            assert!(poll.next().unwrap().is_some());
            std::mem::forget(poll);
            // Destroying the queue pair now would deadlock on the lock that this thread holds.
            drop(qp);
            assert_eq!(fake.live().qps, usize::from(interfaces.extended_cq));
            if again {
                drop(cq.poll());
                assert_eq!(fake.live().qps, 0);
            }
            drop(cq);
            assert_eq!((fake.live().qps, fake.live().cqs), (0, 0));
        }
    });
}

#[test]
fn a_private_return_code_of_the_provider_is_not_reported_as_errno() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw(&pd, EXTENDED);
    for code in [-1, -2, i32::MIN] {
        fake.fail("start_poll", code);
        assert_eq!(raw.cq.poll().next().unwrap_err(), PollError::Provider(Errno(libc::EIO)));
    }
}

#[test]
fn unsignaled_work_before_a_flushed_request_is_not_counted_as_done() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        fake.set_mode(crate::fake::Mode::Manual);
        a.post(Work::send(pd.allocate(1).unwrap()).unsignaled()).unwrap();
        a.post(Work::send_inline(b"x").unsignaled()).unwrap();
        a.send(pd.allocate(3).unwrap()).unwrap();
        // Some providers flush only signaled work.
        let flushed = Cqe { wr_id: 3, status: WcStatus::WR_FLUSH_ERR.0, vendor_err: 9, ..Cqe::default() };
        fake.inject(cq_of(a.queue_pair()), flushed);
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
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        fake.inject(cq_of(a.queue_pair()), Cqe::default());
        assert_eq!(a.poll().unwrap_err(), PollError::NotInFlight { wr_id: 0 });
        let rejected = a.send(pd.allocate(5).unwrap()).unwrap_err();
        assert_eq!(rejected.error, rdma_safe::PostError::EndpointFailed);
        assert_eq!(rejected.buffer.unwrap().len(), 5);
    });
}
