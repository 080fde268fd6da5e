//! Sends that wait for space in the send queue.

use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Buffer, Endpoint, EndpointKey, EndpointSet, Error, ExposedRegion, Operation, PostError, ProtectionDomain,
    QueuePairType, WcStatus, Work, WorkId,
};

use crate::failing_destruction::Count;
use crate::fake::{Bad, Fake, Mode, PostFault};
use crate::support::{Interfaces, builder, connect, done, nothing, on_each_interface};

/// An endpoint with two sends and room for `pending` pending sends, and its peer.
fn short(pd: &ProtectionDomain, interfaces: Interfaces, pending: u32) -> (Endpoint, Endpoint) {
    let mut a = builder(pd, interfaces).send_depth(2).pending_sends(pending).build().unwrap();
    let mut b = builder(pd, interfaces).recv_depth(16).build().unwrap();
    connect(&mut a, &mut b);
    for _ in 0..16 {
        b.receive(pd.allocate(16).unwrap()).unwrap();
    }
    (a, b)
}

fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

fn counts(endpoint: &Endpoint) -> (u64, u64) {
    (endpoint.sends_in_flight(), endpoint.pending_sends())
}

/// Returns the received messages in order.
fn arrived(b: &mut Endpoint) -> Vec<Vec<u8>> {
    std::iter::from_fn(|| b.poll().unwrap().map(|done| done.ok().unwrap().buffer.unwrap().to_vec())).collect()
}

/// Sends the numbers from `first` to `last`, one byte each.
fn send(a: &mut Endpoint, pd: &ProtectionDomain, numbers: std::ops::RangeInclusive<u8>) -> Vec<WorkId> {
    numbers.map(|number| a.send(filled(pd, &[number])).unwrap()).collect()
}

#[test]
fn sends_beyond_the_queue_wait_and_are_posted_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = short(&pd, interfaces, 4);
        let ids = send(&mut a, &pd, 1..=6);
        assert_eq!((counts(&a), arrived(&mut b)), ((6, 4), vec![vec![1], vec![2]]));
        for (index, id) in ids.into_iter().enumerate() {
            let sent = done(&mut a);
            assert_eq!((sent.id, sent.operation), (id, Operation::Send));
            assert_eq!(sent.buffer.unwrap()[..], [index as u8 + 1]);
        }
        nothing(&mut a);
        assert_eq!((counts(&a), arrived(&mut b)), ((0, 0), vec![vec![3], vec![4], vec![5], vec![6]]));
        // The queue works as before.
        send(&mut a, &pd, 7..=8);
        assert_eq!((counts(&a), arrived(&mut b)), ((2, 0), vec![vec![7], vec![8]]));
    });
}

#[test]
fn beyond_the_bound_the_buffer_comes_back_with_an_error_that_names_the_endpoint() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = short(&pd, interfaces, 3);
        send(&mut a, &pd, 1..=5);
        let rejected = a.send(filled(&pd, b"sixth")).unwrap_err();
        let qp_num = a.queue_pair().number();
        assert_eq!(rejected.error, PostError::EndpointFull { qp_num, send_depth: 2, pending_sends: 3 });
        assert_eq!(rejected.buffer.unwrap()[..], *b"sixth");
        let text = rejected.error.to_string();
        for part in [&format!("{qp_num:#x}"), "EndpointBuilder::send_depth", "EndpointBuilder::pending_sends"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(done(&mut a).buffer.unwrap()[..], [1]);
        a.send(filled(&pd, b"sixth")).unwrap();
        assert_eq!(counts(&a), (5, 3));
    });
}

fn exposed(pd: &ProtectionDomain) -> ExposedRegion {
    pd.expose(Pages::new(16).unwrap(), Access::REMOTE).unwrap()
}

#[test]
fn pending_operations_keep_their_order_and_a_batch_does_not_overtake_them() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let region = exposed(&pd);
        let (mut a, mut b) = short(&pd, interfaces, 8);
        send(&mut a, &pd, 1..=2);
        a.write(filled(&pd, b"written!"), region.remote()).unwrap();
        a.read(pd.allocate(8).unwrap(), region.remote()).unwrap();
        a.post(Work::fetch_add(pd.allocate(8).unwrap(), region.remote(), 0)).unwrap();
        a.post(Work::send_inline(b"inline").imm(7)).unwrap();
        a.send_inline(b"and another").unwrap();
        assert_eq!(counts(&a), (7, 5));
        let mut batch = a.batch().unwrap();
        let rejected = batch.add(Work::send_inline(b"overtakes")).unwrap_err();
        assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
        batch.post().unwrap();
        for _ in 0..2 {
            assert_eq!(done(&mut a).operation, Operation::Send);
        }
        assert_eq!(done(&mut a).operation, Operation::Write);
        let read = done(&mut a);
        assert_eq!((read.operation, &read.buffer.unwrap()[..]), (Operation::Read, &b"written!"[..]));
        let added = done(&mut a);
        assert_eq!(
            (added.operation, added.atomic_result()),
            (Operation::Atomic, Some(u64::from_ne_bytes(*b"written!")))
        );
        // No send is pending any more, so a batch has room after the inline sends.
        assert_eq!(done(&mut a).operation, Operation::Send);
        assert_eq!(a.pending_sends(), 0);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send_inline(b"batch")).unwrap();
        batch.post().unwrap();
        let imms: Vec<_> = std::iter::from_fn(|| b.poll().unwrap())
            .map(|done| (done.imm(), done.ok().unwrap().buffer.unwrap().to_vec()))
            .collect();
        let texts: [(_, &[u8]); 5] =
            [(None, &[1]), (None, &[2]), (Some(7), b"inline"), (None, b"and another"), (None, b"batch")];
        assert_eq!(imms, texts.map(|(imm, text)| (imm, text.to_vec())));
    });
}

#[test]
fn unsignaled_work_that_waits_comes_back_with_later_work() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(4).pending_sends(8).build().unwrap();
        let mut b = builder(&pd, interfaces).recv_depth(16).build().unwrap();
        connect(&mut a, &mut b);
        for _ in 0..12 {
            b.receive(pd.allocate(16).unwrap()).unwrap();
        }
        for number in 1..=12 {
            a.post(Work::send(filled(&pd, &[number])).unsignaled()).unwrap();
        }
        for number in 1..=12 {
            assert_eq!(done(&mut a).buffer.unwrap()[..], [number]);
        }
        nothing(&mut a);
        assert_eq!(arrived(&mut b), (1..=12).map(|number| vec![number]).collect::<Vec<_>>());
    });
}

#[test]
fn invalid_work_is_refused_at_once_instead_of_pending() {
    on_each_interface(|fake, interfaces| {
        let (pd, other) = (fake.pd(), fake.pd());
        let region = exposed(&pd);
        let (mut a, _b) = short(&pd, interfaces, 4);
        send(&mut a, &pd, 1..=3);
        let rejected = a.send(other.allocate(8).unwrap()).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.is_some()), (PostError::ForeignBuffer, true));
        assert_eq!(a.send_inline(&[0; 65]), Err(PostError::InlineTooLong { len: 65, max: 64 }));
        let rejected = a.write(pd.allocate(17).unwrap(), region.remote()).unwrap_err();
        assert!(matches!(rejected.error, PostError::RemoteTooShort { .. }));
        let rejected = a.post(Work::fetch_add(pd.allocate(4).unwrap(), region.remote(), 1)).unwrap_err();
        assert_eq!(rejected.error, PostError::AtomicOperand);
        assert_eq!(counts(&a), (3, 1));
    });
}

#[test]
fn pending_work_of_a_broken_connection_comes_back_flushed_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = short(&pd, interfaces, 4);
        fake.set_mode(Mode::Manual);
        send(&mut a, &pd, 1..=5);
        a.post(Work::send_inline(b"silent").unsignaled()).unwrap();
        fake.break_qp(a.queue_pair().number());
        fake.set_mode(Mode::AtPost);
        for number in 1..=5 {
            let failed = a.poll().unwrap().expect("a completion");
            assert_eq!((failed.status, &failed.buffer.unwrap()[..]), (WcStatus::WR_FLUSH_ERR, &[number][..]));
        }
        let silent = a.poll().unwrap().expect("a completion");
        assert_eq!((silent.status, silent.buffer.is_none()), (WcStatus::WR_FLUSH_ERR, true));
        nothing(&mut a);
        assert_eq!(counts(&a), (0, 0));
    });
}

#[test]
fn pending_work_that_the_provider_refuses_comes_back_flushed() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = short(&pd, interfaces, 4);
        send(&mut a, &pd, 1..=2);
        send(&mut a, &pd, 3..=6);
        let doubtful = interfaces.extended_qp;
        if doubtful {
            fake.fail_wr_complete(libc::EIO, false);
        } else {
            fake.fail_post_send(PostFault { errno: libc::EINVAL, taken: 0, bad: Bad::FirstNotTaken });
        }
        assert_eq!(done(&mut a).buffer.unwrap()[..], [1]);
        assert_eq!(a.send(filled(&pd, &[7])).unwrap_err().error, PostError::EndpointFailed);
        assert_eq!(a.poll().unwrap().unwrap().buffer.unwrap()[..], [2]);
        let mut back = Vec::new();
        while let Some(flushed) = a.poll().unwrap() {
            assert_eq!(flushed.status, WcStatus::WR_FLUSH_ERR);
            back.push(flushed.buffer.unwrap()[0]);
        }
        // The provider may have accepted the third send. Its buffer and later ones stay until the queue pair is destroyed.
        assert_eq!(back, if doubtful { vec![] } else { vec![3, 4, 5, 6] });
        back.extend(a.close().unwrap().iter().map(|buffer| buffer[0]));
        assert_eq!(back, [3, 4, 5, 6]);
        assert_eq!(arrived(&mut b), [[1], [2]]);
    });
}

#[test]
fn a_full_provider_is_retried_at_the_next_completion() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = short(&pd, interfaces, 4);
        send(&mut a, &pd, 1..=4);
        if interfaces.extended_qp {
            fake.fail_wr_complete(libc::ENOSPC, false);
        } else {
            fake.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
        }
        for number in 1..=4 {
            assert_eq!(done(&mut a).buffer.unwrap()[..], [number]);
        }
        assert_eq!(arrived(&mut b), [[1], [2], [3], [4]]);
    });
}

#[test]
fn closing_returns_pending_buffers_and_dropping_frees_them() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = short(&pd, interfaces, 4);
        send(&mut a, &pd, 1..=5);
        let back: Vec<_> = a.close().unwrap().iter().map(|buffer| buffer[0]).collect();
        assert_eq!(back, [1, 2, 3, 4, 5]);

        let count = Count::default();
        let (mut a, _b) = short(&pd, interfaces, 4);
        (0..5).for_each(|_| _ = a.send(count.buffer(&pd)).unwrap());
        assert_eq!(count.freed(), 0);
        drop(a);
        assert_eq!(count.freed(), 5);
    });
}

#[test]
fn polling_a_set_posts_pending_sends_and_removal_returns_them() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let set = EndpointSet::builder(pd.context(), 2 * (2 + 8)).classic_poll(!interfaces.extended_cq);
        let mut set = set.build().unwrap();
        let ends = [(); 2].map(|()| {
            let key = builder(&pd, interfaces).send_depth(2).pending_sends(4).build_in(&mut set).unwrap();
            let mut peer = builder(&pd, interfaces).build().unwrap();
            let mut endpoint = set.endpoint(key).unwrap();
            endpoint.connect(&peer.address()).unwrap();
            peer.connect(&endpoint.address()).unwrap();
            (0..8).for_each(|_| _ = peer.receive(pd.allocate(16).unwrap()).unwrap());
            (key, peer)
        });
        for (key, _) in &ends {
            for number in 1..=6 {
                set.endpoint(*key).unwrap().send(filled(&pd, &[number])).unwrap();
            }
        }
        let full = set.endpoint(ends[1].0).unwrap().send(filled(&pd, b"x")).unwrap_err();
        let qp_num = set.endpoint(ends[1].0).unwrap().queue_pair().number();
        assert_eq!(full.error, PostError::EndpointFull { qp_num, send_depth: 2, pending_sends: 4 });
        let mut sent = [0, 0];
        for _ in 0..8 {
            let (key, done) = set.poll().unwrap().expect("a completion");
            let of = usize::from(key == ends[1].0);
            sent[of] += 1;
            assert_eq!(done.ok().unwrap().buffer.unwrap()[..], [sent[of]]);
        }
        let left: Vec<_> = set.remove(ends[0].0).unwrap().iter().map(|buffer| buffer[0]).collect();
        assert_eq!(left, (sent[0] + 1..=6).collect::<Vec<_>>());
        while let Some((_, done)) = set.poll().unwrap() {
            sent[1] += 1;
            assert_eq!(done.ok().unwrap().buffer.unwrap()[..], [sent[1]]);
        }
        assert_eq!(sent[1], 6);
    });
}

#[test]
fn datagrams_do_not_wait() {
    let fake = Fake::new(crate::fake::Config::default());
    let pd = fake.pd();
    let error = Endpoint::builder(&pd).pending_sends(1).build_datagrams(7).unwrap_err();
    let expected = matches!(
        error,
        Error::WrongType { operation: "EndpointBuilder::pending_sends", qp_type: QueuePairType::UD, .. }
    );
    assert!(expected, "{error}");
}

/// An endpoint in a set, and its peer.
fn member(
    pd: &ProtectionDomain,
    set: &mut EndpointSet,
    interfaces: Interfaces,
    sends: u32,
    pending: u32,
) -> (EndpointKey, Endpoint) {
    let key = builder(pd, interfaces).send_depth(sends).pending_sends(pending).build_in(set).unwrap();
    let mut peer = builder(pd, interfaces).recv_depth(16).build().unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    endpoint.connect(&peer.address()).unwrap();
    peer.connect(&endpoint.address()).unwrap();
    (0..16).for_each(|_| _ = peer.receive(pd.allocate(16).unwrap()).unwrap());
    (key, peer)
}

/// Posts six sends, of which two are signaled, and a pending one. The first completion releases three.
fn seven(pd: &ProtectionDomain, post: &mut dyn FnMut(Work<'_>)) {
    (1..=7).for_each(|number| post(Work::send(filled(pd, &[number])).unsignaled()));
}

#[test]
fn a_send_between_two_completions_of_a_set_does_not_overtake_pending_sends() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let set = EndpointSet::builder(pd.context(), 64).classic_poll(!interfaces.extended_cq);
        let mut set = set.build().unwrap();
        let (key, mut peer) = member(&pd, &mut set, interfaces, 6, 1);
        seven(&pd, &mut |work| _ = set.endpoint(key).unwrap().post(work).unwrap());
        fake.take_posted();
        for number in 1..=2 {
            assert_eq!(set.poll().unwrap().unwrap().1.buffer.unwrap()[..], [number]);
        }
        set.endpoint(key).unwrap().send(filled(&pd, &[8])).unwrap();
        for number in 3..=8 {
            assert_eq!(set.poll().unwrap().unwrap().1.ok().unwrap().buffer.unwrap()[..], [number]);
        }
        assert_eq!(fake.take_posted().iter().map(|posted| posted.wr_id).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(arrived(&mut peer), [1, 2, 3, 4, 5, 6, 7, 8].map(|number| vec![number]));
    });
}

#[test]
fn a_send_does_not_overtake_sends_that_a_full_provider_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(6).pending_sends(1).build().unwrap();
        let mut b = builder(&pd, interfaces).recv_depth(16).build().unwrap();
        connect(&mut a, &mut b);
        (0..16).for_each(|_| _ = b.receive(pd.allocate(16).unwrap()).unwrap());
        seven(&pd, &mut |work| _ = a.post(work).unwrap());
        let refuse = || {
            if interfaces.extended_qp {
                fake.fail_wr_complete(libc::ENOSPC, false);
            } else {
                fake.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
            }
        };
        fake.take_posted();
        for number in 1..=2 {
            refuse();
            assert_eq!(done(&mut a).buffer.unwrap()[..], [number]);
        }
        assert_eq!(a.pending_sends(), 1);
        refuse();
        let rejected = a.send(filled(&pd, &[8])).unwrap_err();
        assert!(matches!(rejected.error, PostError::EndpointFull { .. }), "{}", rejected.error);
        // The provider has room again. Pending sends are posted first.
        a.send(rejected.buffer.unwrap()).unwrap();
        for number in 3..=8 {
            assert_eq!(done(&mut a).buffer.unwrap()[..], [number]);
        }
        assert_eq!(fake.take_posted().iter().map(|posted| posted.wr_id).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(arrived(&mut b), [1, 2, 3, 4, 5, 6, 7, 8].map(|number| vec![number]));
    });
}
