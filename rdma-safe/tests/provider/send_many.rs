//! `send_many`: one doorbell and one completion queue entry for many buffers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_safe::interface::Extended;
use rdma_safe::{Buffer, Endpoint, Errno, Operation, PollError, PostError, ProtectionDomain, WcStatus, Work};

use crate::endpoint_sets::Service;
use crate::fake::{Bad, Config, Cqe, Fake, Mode, PostFault};
use crate::support::{CLASSIC, EXTENDED, builder, endpoints, in_flight, nothing, on_each_interface};

/// Longer buffers do not take the fast path.
const LONG: usize = (1 << 20) + 1;

fn numbered(pd: &ProtectionDomain, number: u32) -> Buffer {
    numbered_in(pd, number, 4)
}

fn numbered_in(pd: &ProtectionDomain, number: u32, capacity: usize) -> Buffer {
    let mut buffer = pd.allocate(capacity).unwrap();
    buffer.fill_from(&number.to_ne_bytes()).unwrap();
    buffer
}

fn number(buffer: &Buffer) -> u32 {
    u32::from_ne_bytes(buffer[..].try_into().unwrap())
}

fn receives(pd: &ProtectionDomain, b: &mut Endpoint, count: u32) {
    for _ in 0..count {
        b.receive(pd.allocate(16).unwrap()).unwrap();
    }
}

/// The numbers in the buffers of all completions, which succeeded, taken `max` at a time.
fn taken(endpoint: &mut Endpoint, operation: Operation, max: usize) -> Vec<u32> {
    let mut numbers = Vec::new();
    loop {
        let count = endpoint.poll_each(max, |done| {
            assert_eq!((done.status, done.operation), (WcStatus::SUCCESS, operation));
            numbers.push(number(&done.buffer.unwrap()));
        });
        match count.unwrap() {
            0 => return numbers,
            count => assert!(count <= max),
        }
    }
}

#[test]
fn many_buffers_take_one_doorbell_and_few_completion_entries() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let doorbell = if interfaces.extended_qp { "wr_complete" } else { "ibv_post_send" };
        for max in [1, 2, 3, 32] {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 6);
            let (doorbells, _) = (fake.calls(doorbell), fake.take_posted());
            let buffers = (0..6).map(|number| (numbered(&pd, number), 10 + number));
            assert_eq!(a.send_many_with_user_data(buffers).unwrap(), 6);
            assert_eq!(fake.calls(doorbell), doorbells + 1);
            let signaled: Vec<_> = fake.take_posted().iter().map(|posted| posted.flags & 2 != 0).collect();
            // At most half of the queue waits for one entry.
            assert_eq!(signaled, [false, false, false, true, false, true]);
            assert_eq!(in_flight(&a), (6, 0));
            let mut user_data = Vec::new();
            while a.poll_each(max, |done| user_data.push(done.user_data)).unwrap() != 0 {}
            assert_eq!(user_data, [10, 11, 12, 13, 14, 15]);
            assert_eq!(taken(&mut b, Operation::Receive, max), [0, 1, 2, 3, 4, 5]);
            assert_eq!(in_flight(&a), (0, 0));
        }
    });
}

#[test]
fn single_polls_return_the_same_buffers() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for round in 0..4 {
            receives(&pd, &mut b, 5);
            assert_eq!(a.send_many((0..4).map(|index| numbered(&pd, round + index))).unwrap(), 4);
            a.send(numbered(&pd, 99)).unwrap();
            let mut sent = Vec::new();
            while let Some(done) = a.poll().unwrap() {
                sent.push(number(&done.ok().unwrap().buffer.unwrap()));
            }
            assert_eq!(sent, [round, round + 1, round + 2, round + 3, 99]);
            assert_eq!(taken(&mut b, Operation::Receive, 8), sent);
        }
    });
}

#[test]
fn sending_nothing_succeeds_also_on_an_endpoint_without_a_connection() {
    on_each_interface(|fake, interfaces| {
        let mut a = builder(&fake.pd(), interfaces).build().unwrap();
        assert_eq!(a.send_many([]).unwrap(), 0);
        let refused = a.send_many([numbered(&fake.pd(), 0)]).unwrap_err();
        assert_eq!((refused.posted, refused.buffers.len()), (0, 1));
    });
}

#[test]
fn sending_many_stops_where_the_queue_is_full() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 8);
        let mut buffers = (0..10).map(|number| numbered(&pd, number));
        assert_eq!(a.send_many(&mut buffers).unwrap(), 8);
        assert_eq!(a.send_many(&mut buffers).unwrap(), 0);
        assert_eq!(buffers.len(), 2);
        assert_eq!(taken(&mut a, Operation::Send, 32).len(), 8);
        assert_eq!(taken(&mut b, Operation::Receive, 32).len(), 8);
        receives(&pd, &mut b, 2);
        assert_eq!(a.send_many(&mut buffers).unwrap(), 2);
        assert_eq!(a.send_many(&mut buffers).unwrap(), 0);
        assert_eq!(taken(&mut a, Operation::Send, 32), [8, 9]);
        nothing(&mut a);
    });
}

/// The work requests of a classic queue pair are in a list of the length that the provider reports.
#[test]
fn many_are_sent_in_parts_if_the_provider_grants_fewer() {
    let fake = Fake::new(Config { granted_sends: Some(2), ..Config::interfaces(false, false) });
    let pd = fake.pd();
    let (mut a, mut b) = endpoints(&pd, CLASSIC);
    receives(&pd, &mut b, 5);
    let mut buffers = (0..5).map(|number| numbered(&pd, number));
    for sent in [2, 2, 1, 0] {
        assert_eq!(a.send_many(&mut buffers).unwrap(), sent);
    }
    assert_eq!(taken(&mut a, Operation::Send, 32), [0, 1, 2, 3, 4]);
    assert_eq!(taken(&mut b, Operation::Receive, 32), [0, 1, 2, 3, 4]);
}

#[test]
fn buffers_that_need_the_slow_path_are_sent_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for long in 0..3 {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 5);
            let capacity = |index| if index == long { LONG } else { 4 };
            let buffers = (0..5).map(|index| numbered_in(&pd, index, capacity(index)));
            assert_eq!(a.send_many(buffers).unwrap(), 5);
            assert_eq!(taken(&mut a, Operation::Send, 32), [0, 1, 2, 3, 4]);
            assert_eq!(taken(&mut b, Operation::Receive, 32), [0, 1, 2, 3, 4]);
        }
    });
}

#[test]
fn a_foreign_buffer_comes_back_and_those_before_it_are_sent() {
    on_each_interface(|fake, interfaces| {
        let (pd, other) = (fake.pd(), fake.pd());
        for foreign in 0..3 {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 3);
            let buffers = (0..4).map(|index| numbered(if index == foreign { &other } else { &pd }, index));
            let failed = a.send_many(buffers).unwrap_err();
            assert_eq!((failed.error, failed.posted), (PostError::ForeignBuffer, foreign as usize));
            assert_eq!(failed.buffers.iter().map(number).collect::<Vec<_>>(), (foreign..4).collect::<Vec<_>>());
            assert_eq!(taken(&mut a, Operation::Send, 32), (0..foreign).collect::<Vec<_>>());
        }
    });
}

#[test]
fn a_refusal_returns_the_buffers_that_were_not_sent() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 4);
        if interfaces.extended_qp {
            fake.fail_wr_complete(libc::ENOSPC, false);
        } else {
            fake.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
        }
        let failed = a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap_err();
        assert_eq!((failed.error, failed.posted), (PostError::QueueFull { posted: 0 }, 0));
        assert_eq!(failed.buffers.iter().map(number).collect::<Vec<_>>(), [0, 1, 2, 3]);
        // The endpoint is as before.
        assert_eq!(a.send_many(failed.buffers).unwrap(), 4);
        assert_eq!(taken(&mut a, Operation::Send, 32), [0, 1, 2, 3]);
    });
}

#[test]
fn buffers_that_the_device_may_have_stay_until_the_endpoint_is_closed() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        if interfaces.extended_qp {
            fake.fail_wr_complete(libc::EIO, true);
        } else {
            fake.fail_post_send(PostFault { errno: libc::EIO, taken: 2, bad: Bad::Untouched });
        }
        let failed = a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap_err();
        assert!(matches!(failed.error, PostError::MaybePosted { .. }), "{failed}");
        assert_eq!((failed.posted, failed.buffers.len()), (4, 0));
        let rejected = a.send_many([numbered(&pd, 9)]).unwrap_err();
        assert_eq!((rejected.error, rejected.buffers.len()), (PostError::EndpointFailed, 1));
        let mut returned = 0;
        while let Some(done) = a.poll().unwrap() {
            returned += usize::from(done.buffer.is_some());
        }
        assert_eq!(returned + a.close().unwrap().len(), 4);
    });
}

#[test]
fn a_part_that_the_provider_took_is_in_doubt_and_the_rest_comes_back() {
    on_each_interface(|fake, interfaces| {
        if interfaces.extended_qp {
            // `ibv_wr_complete` posts all or nothing.
            return;
        }
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 4);
        fake.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 2, bad: Bad::FirstNotTaken });
        let failed = a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap_err();
        // The two are unsignaled. If the device has sent them already, nothing will say so.
        assert_eq!(failed.error, PostError::MaybePosted { errno: Errno(libc::ENOMEM) });
        assert_eq!((failed.posted, failed.buffers.iter().map(number).collect::<Vec<_>>()), (2, vec![2, 3]));
        let rejected = a.send_many([numbered(&pd, 9)]).unwrap_err();
        assert_eq!(rejected.error, PostError::EndpointFailed);
        let mut returned = 0;
        while let Some(done) = a.poll().unwrap() {
            returned += usize::from(done.buffer.is_some());
        }
        assert_eq!(returned + a.close().unwrap().len(), 2);
    });
}

#[test]
fn a_panic_of_the_iterator_posts_nothing_and_loses_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for long in [false, true] {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 1);
            let (_, before) = (fake.take_posted(), fake.live().mrs);
            let sent = catch_unwind(AssertUnwindSafe(|| {
                a.send_many((0..4).map(|number| match number {
                    2 => panic!("the iterator panics"),
                    number => numbered_in(&pd, number, if long { LONG } else { 4 }),
                }))
            }));
            assert!(sent.is_err());
            assert_eq!((fake.take_posted().len(), fake.live().mrs, in_flight(&a)), (0, before, (0, 0)));
            a.send(numbered(&pd, 7)).unwrap();
            assert_eq!(taken(&mut a, Operation::Send, 32), [7]);
            assert_eq!(taken(&mut b, Operation::Receive, 32), [7]);
        }
    });
}

#[test]
fn a_failure_within_a_run_fails_the_sends_from_there_on() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for capacity in [16, 16, 2, 16] {
            b.receive(pd.allocate(capacity).unwrap()).unwrap();
        }
        assert_eq!(a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap(), 4);
        let mut seen = Vec::new();
        while a.poll_each(32, |done| seen.push((done.status, number(&done.buffer.unwrap())))).unwrap() != 0 {}
        let numbers: Vec<_> = seen.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers, [0, 1, 2, 3]);
        assert_eq!([seen[0].0, seen[1].0, seen[3].0], [WcStatus::SUCCESS, WcStatus::SUCCESS, WcStatus::WR_FLUSH_ERR]);
        assert!(![WcStatus::SUCCESS, WcStatus::WR_FLUSH_ERR].contains(&seen[2].0), "{seen:?}");
    });
}

#[test]
fn other_unsignaled_work_may_come_before_a_run() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 4);
        a.post(Work::send_inline(&0_u32.to_ne_bytes()).unsignaled()).unwrap();
        a.post(Work::send(numbered(&pd, 1)).unsignaled()).unwrap();
        assert_eq!(a.send_many((2..4).map(|number| numbered(&pd, number))).unwrap(), 2);
        // The first has no buffer, and is reported only if it fails.
        assert_eq!(taken(&mut a, Operation::Send, 32), [1, 2, 3]);
        assert_eq!(taken(&mut b, Operation::Receive, 32), [0, 1, 2, 3]);
    });
}

#[test]
fn an_endpoint_that_is_not_connected_returns_the_buffer() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).build().unwrap();
        let failed = a.send_many([numbered(&pd, 0)]).unwrap_err();
        assert!(matches!(failed.error, PostError::NotReady { .. }), "{failed}");
        assert_eq!((failed.posted, failed.buffers.len()), (0, 1));
    });
}

#[test]
fn a_forgotten_batch_is_ended_before_many_are_sent() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 4);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send_inline(b"forgotten")).unwrap();
        std::mem::forget(batch);
        assert_eq!(a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap(), 4);
        assert_eq!(taken(&mut a, Operation::Send, 32), [0, 1, 2, 3]);
        assert_eq!(taken(&mut b, Operation::Receive, 32), [0, 1, 2, 3]);
    });
}

#[test]
fn an_iterator_that_panics_after_a_forgotten_batch_posts_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        receives(&pd, &mut b, 2);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(numbered(&pd, 0))).unwrap();
        std::mem::forget(batch);
        let sent = catch_unwind(AssertUnwindSafe(|| a.send_many(std::iter::once_with(|| panic!("it panics")))));
        assert!(sent.is_err());
        assert_eq!(in_flight(&a), (0, 0));
        assert_eq!(a.send_many([numbered(&pd, 1), numbered(&pd, 2)]).unwrap(), 2);
        assert_eq!(taken(&mut a, Operation::Send, 32), [1, 2]);
        assert_eq!(taken(&mut b, Operation::Receive, 32), [1, 2]);
    });
}

#[test]
fn a_panic_while_a_run_is_taken_loses_no_other_buffer() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for at in 0..4 {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 4);
            assert_eq!(a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap(), 4);
            let mut numbers = Vec::new();
            let polled = catch_unwind(AssertUnwindSafe(|| {
                a.poll_each(32, |done| {
                    numbers.push(number(&done.buffer.unwrap()));
                    assert!(numbers.len() <= at, "the program panics");
                })
            }));
            assert!(polled.is_err());
            numbers.extend(taken(&mut a, Operation::Send, 32));
            assert_eq!((numbers, in_flight(&a)), (vec![0, 1, 2, 3], (0, 0)));
        }
        let mut service = Service::new(&pd, interfaces, 1, None);
        receives(&pd, &mut service.peers[0], 4);
        let mut endpoint = service.set.endpoint(service.keys[0]).unwrap();
        assert_eq!(endpoint.send_many((0..4).map(|number| numbered(&pd, number))).unwrap(), 4);
        let polled = catch_unwind(AssertUnwindSafe(|| service.set.poll_each(32, |_, _| panic!("the program panics"))));
        assert!(polled.is_err());
        let mut numbers = Vec::new();
        while service.set.poll_each(2, |_, done| numbers.push(number(&done.buffer.unwrap()))).unwrap() != 0 {}
        // A set with a classic queue, which polls singly, loses the same one.
        assert_eq!(numbers, [1, 2, 3]);
    });
}

/// A provider that completes a signaled send before an earlier one.
#[test]
fn a_completion_that_skips_a_signaled_send_ends_the_endpoint() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for max in [1, 2, 32] {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            receives(&pd, &mut b, 6);
            fake.set_mode(Mode::Manual);
            assert_eq!(a.send_many((0..6).map(|number| numbered(&pd, number))).unwrap(), 6);
            // SAFETY: the queue pair exists.
            let (cq, qp_num) = (unsafe { (*a.queue_pair().as_raw()).send_cq }, a.queue_pair().number());
            fake.inject(cq, Cqe { wr_id: 6, qp_num, ..Cqe::default() });
            fake.progress();
            let mut seen = 0;
            let error = loop {
                match a.poll_each(max, |_| seen += 1) {
                    Ok(count) => assert!(count != 0, "{seen}"),
                    Err(error) => break error,
                }
            };
            assert_eq!(error, PollError::NotInFlight { wr_id: 6 });
            assert_eq!(seen, 0, "the completion is not believed at all");
            let rejected = a.send_many([numbered(&pd, 9)]).unwrap_err();
            assert_eq!(rejected.error, PostError::EndpointFailed);
            fake.set_mode(Mode::AtPost);
        }
    });
}

#[test]
fn a_fixed_interface_sends_many() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (a, mut b) = endpoints(&pd, EXTENDED);
    receives(&pd, &mut b, 4);
    let mut a = a.with_interface::<Extended>().ok().unwrap();
    assert_eq!(a.send_many((0..4).map(|number| numbered(&pd, number))).unwrap(), 4);
    let mut sent = Vec::new();
    assert_eq!(a.poll_each(32, |done| sent.push(number(&done.buffer.unwrap()))).unwrap(), 4);
    assert_eq!(sent, [0, 1, 2, 3]);
    assert_eq!(taken(&mut b, Operation::Receive, 32), sent);
}

#[test]
fn a_set_hands_out_the_runs_of_its_endpoints() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for max in [1, 3, 32] {
            let mut service = Service::new(&pd, interfaces, 2, None);
            for (index, key) in service.keys.clone().into_iter().enumerate() {
                receives(&pd, &mut service.peers[index], 6);
                let mut endpoint = service.set.endpoint(key).unwrap();
                let first = index as u32 * 10;
                assert_eq!(endpoint.send_many((first..first + 5).map(|number| numbered(&pd, number))).unwrap(), 5);
                endpoint.send(numbered(&pd, first + 5)).unwrap();
            }
            let mut seen = Vec::new();
            while service.set.poll_each(max, |key, done| seen.push((key, number(&done.buffer.unwrap())))).unwrap() != 0
            {
            }
            for (index, key) in service.keys.iter().enumerate() {
                let numbers: Vec<_> = seen.iter().filter(|(from, _)| from == key).map(|(_, number)| *number).collect();
                assert_eq!(numbers, (0..6).map(|number| index as u32 * 10 + number).collect::<Vec<_>>());
            }
        }
    });
}
