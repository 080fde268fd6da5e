//! Failing postings: who owns the memory afterwards, and which calls still work.

use std::sync::Arc;

use rdma_safe::{Endpoint, Errno, PostError, ProtectionDomain, QueuePairState, WcStatus, Work};

use crate::support::interposer::rig::{done, endpoints, lab, nothing, on_each_mode};
use crate::support::interposer::{Bad, PostFault, interposed};
use crate::support::lab::{Data, Mode, Op, Side, Wr, try_next};
use crate::support::{filled, in_flight};

/// A send of one byte.
fn send(id: u64) -> Wr<'static> {
    Wr::new(id, Op::Send, Data::Inline(b"x"))
}

/// Takes the completions of these work requests, which are all that there are.
#[track_caller]
fn only_complete(side: &mut Side, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        side.next_ok(id);
    }
    assert_eq!(try_next(&mut side.cq), None);
}

/// Failures of a chain of three work requests, with the expected error.
fn chain_faults() -> Vec<(PostFault, PostError)> {
    let fault = |errno, taken, bad| PostFault { errno, taken, bad };
    let in_doubt = |errno| PostError::MaybePosted { errno: Errno(errno) };
    vec![
        (fault(libc::ENOMEM, 0, Bad::FirstNotTaken), PostError::QueueFull { posted: 0 }),
        (fault(libc::ENOMEM, 2, Bad::FirstNotTaken), PostError::QueueFull { posted: 2 }),
        (fault(libc::ENOSPC, 1, Bad::FirstNotTaken), PostError::QueueFull { posted: 1 }),
        (fault(libc::EINVAL, 1, Bad::FirstNotTaken), PostError::Refused { posted: 1, errno: Errno(libc::EINVAL) }),
        (fault(libc::EINVAL, 0, Bad::Null), in_doubt(libc::EINVAL)),
        (fault(libc::ENOMEM, 2, Bad::Null), in_doubt(libc::ENOMEM)),
        (fault(libc::EIO, 2, Bad::Untouched), in_doubt(libc::EIO)),
        (fault(libc::EIO, 3, Bad::Null), in_doubt(libc::EIO)),
        (fault(libc::EINVAL, 1, Bad::Elsewhere), in_doubt(libc::EINVAL)),
        (fault(libc::EINVAL, 1, Bad::Between), in_doubt(libc::EINVAL)),
    ]
}

#[test]
fn a_chain_of_sends_that_fails_says_how_far_it_got() {
    on_each_mode(|soft, mode| {
        if !mode.classic_qp {
            return;
        }
        for (fault, expected) in chain_faults().into_iter().step_by(if cfg!(miri) { 4 } else { 1 }) {
            let mut lab = lab(soft, mode).build();
            for _ in 0..4 {
                lab.b.receive(9, 0..8).unwrap();
            }
            soft.fail_post_send(fault);
            assert_eq!(lab.a.post(&[send(1), send(2), send(3)]).unwrap_err(), expected, "{fault:?}");
            // Accepted work is executed, and the queue still works.
            lab.a.post(&[send(4)]).unwrap();
            only_complete(&mut lab.a, (1..=fault.taken as u64).chain([4]));
        }
    });
}

#[test]
fn a_chain_of_receives_that_fails_says_how_far_it_got() {
    on_each_mode(|soft, mode| {
        for (fault, expected) in chain_faults().into_iter().step_by(if cfg!(miri) { 4 } else { 1 }) {
            let mut lab = lab(soft, mode).build();
            soft.fail_post_recv(fault);
            let sges = [lab.b.memory.sge(0..8)];
            let error = lab.b.receive_batch(&[(1, &sges[..]), (2, &sges), (3, &sges)]).unwrap_err();
            assert_eq!(error, expected, "{fault:?}");
            lab.b.receive(4, 0..8).unwrap();
            for _ in 0..=fault.taken {
                lab.a.post(&[send(0)]).unwrap();
            }
            only_complete(&mut lab.b, (1..=fault.taken as u64).chain([4]));
        }
    });
}

#[test]
fn a_failed_wr_complete_is_in_doubt_unless_the_queue_was_full() {
    on_each_mode(|soft, mode| {
        if mode.classic_qp {
            return;
        }
        let in_doubt = |errno| PostError::MaybePosted { errno: Errno(errno) };
        for (calls, (errno, taken, expected)) in [
            (libc::ENOMEM, false, PostError::QueueFull { posted: 0 }),
            (libc::ENOSPC, false, PostError::QueueFull { posted: 0 }),
            (libc::EINVAL, false, in_doubt(libc::EINVAL)),
            (libc::EIO, true, in_doubt(libc::EIO)),
        ]
        .into_iter()
        .enumerate()
        {
            let mut lab = lab(soft, mode).build();
            lab.b.receive(9, 0..8).unwrap();
            lab.b.receive(9, 0..8).unwrap();
            soft.fail_wr_complete(errno, taken);
            assert_eq!(lab.a.post(&[send(1)]).unwrap_err(), expected);
            // The lock was released.
            lab.a.post(&[send(2)]).unwrap();
            only_complete(&mut lab.a, if taken { 1..=2 } else { 2..=2 });
            assert_eq!(soft.calls("ibv_wr_complete"), 2 * (calls + 1));
        }
        assert_eq!(soft.calls("wr_abort"), 0);
    });
}

/// Checks that the endpoint refuses all work and returns the buffers.
fn is_poisoned(endpoint: &mut Endpoint, pd: &ProtectionDomain) {
    let rejected = endpoint.send(filled(pd, b"again")).unwrap_err();
    assert_eq!(rejected.error, PostError::EndpointFailed);
    assert_eq!(&rejected.buffer.unwrap()[..], b"again");
    let rejected = endpoint.receive(filled(pd, b"again")).unwrap_err();
    assert_eq!(rejected.error, PostError::EndpointFailed);
    assert_eq!(&rejected.buffer.unwrap()[..], b"again");
    assert_eq!(endpoint.send_inline(b"x"), Err(PostError::EndpointFailed));
    assert_eq!(endpoint.batch().unwrap_err(), PostError::EndpointFailed);
}

#[test]
fn a_send_in_doubt_keeps_its_buffer_and_ends_the_endpoint() {
    on_each_mode(|soft, mode| {
        for taken in [false, true] {
            let pd = soft.pd();
            let (mut a, _b) = endpoints(soft, &pd, mode);
            a.receive(filled(&pd, b"inbox")).unwrap();
            soft.doubt_send(mode, taken);
            let before = soft.live().mrs;
            let rejected = a.send(filled(&pd, b"in doubt")).unwrap_err();
            assert_eq!(rejected.error, PostError::MaybePosted { errno: Errno(libc::EIO) });
            assert!(rejected.buffer.is_none());
            assert_eq!(soft.live().mrs, before + 1, "the memory is still registered");
            assert_eq!(a.queue_pair().state(), QueuePairState::ERR);
            is_poisoned(&mut a, &pd);

            // Posted work is flushed and comes back.
            let mut flushed = Vec::new();
            while let Some(completion) = a.poll().unwrap() {
                assert_eq!(completion.status, WcStatus::WR_FLUSH_ERR);
                flushed.push(completion.buffer.unwrap().to_vec());
            }
            flushed.sort();
            let expected: &[&[u8]] = if taken { &[b"in doubt", b"inbox"] } else { &[b"inbox"] };
            assert_eq!(flushed, expected);
            let left = a.close().unwrap();
            assert_eq!(left.len(), usize::from(!taken), "the others are returned after the queue pair is destroyed");
        }
    });
}

#[test]
fn dropping_an_endpoint_in_doubt_frees_its_buffers_after_its_queue_pair() {
    on_each_mode(|soft, mode| {
        for taken in [false, true] {
            let pd = soft.pd();
            let (mut a, b) = endpoints(soft, &pd, mode);
            soft.doubt_send(mode, taken);
            // Moving the queue pair to the error state fails, too.
            soft.fail("ibv_modify_qp", libc::EIO);
            a.send(filled(&pd, b"in doubt")).unwrap_err();
            soft.heal("ibv_modify_qp");
            is_poisoned(&mut a, &pd);
            // The provider reports the deregistration of memory that a queue pair uses.
            drop((a, b));
            assert_eq!(soft.live().mrs, 0);
        }
    });
}

#[test]
fn a_receive_reported_as_not_accepted_returns_its_buffer() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        for (errno, expected) in [
            (libc::ENOMEM, PostError::QueueFull { posted: 0 }),
            (libc::EINVAL, PostError::Refused { posted: 0, errno: Errno(libc::EINVAL) }),
        ] {
            soft.fail_post_recv(PostFault { errno, taken: 0, bad: Bad::FirstNotTaken });
            let rejected = b.receive(filled(&pd, b"mine")).unwrap_err();
            assert_eq!(rejected.error, expected);
            assert_eq!(&rejected.buffer.unwrap()[..], b"mine");
            assert_eq!(in_flight(&b), (0, 0));
            assert_eq!(b.queue_pair().state(), QueuePairState::RTS);
        }
        b.receive(filled(&pd, b"mine")).unwrap();
        a.send(filled(&pd, b"hi")).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"hi");
        nothing(&mut b);
    });
}

#[test]
fn a_receive_in_doubt_keeps_its_buffer_and_ends_the_endpoint() {
    on_each_mode(|soft, mode| {
        for taken in [0, 1] {
            let pd = soft.pd();
            let (_a, mut b) = endpoints(soft, &pd, mode);
            soft.fail_post_recv(PostFault { errno: libc::EINVAL, taken, bad: Bad::Null });
            let rejected = b.receive(filled(&pd, b"in doubt")).unwrap_err();
            assert_eq!(rejected.error, PostError::MaybePosted { errno: Errno(libc::EINVAL) });
            assert!(rejected.buffer.is_none());
            assert_eq!(b.queue_pair().state(), QueuePairState::ERR);
            is_poisoned(&mut b, &pd);
            let flushed = b.poll().unwrap();
            assert_eq!(flushed.is_some(), taken == 1);
            assert_eq!(b.close().unwrap().len(), 1 - taken);
        }
    });
}

/// Work that the provider surely did not accept goes back to its owner. Nothing else changes.
#[test]
fn a_send_reported_as_not_accepted_returns_its_buffer() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        soft.refuse_send(mode);
        let rejected = a.send(filled(&pd, b"mine")).unwrap_err();
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        assert_eq!(&rejected.buffer.expect("the device did not accept it")[..], b"mine");
        assert_eq!(in_flight(&a), (0, 0));
        b.receive(filled(&pd, b"inbox")).unwrap();
        a.send(filled(&pd, b"hi")).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"hi");
    });
}

#[test]
fn a_batch_in_doubt_keeps_all_its_buffers() {
    on_each_mode(|soft, mode| {
        for taken in [false, true] {
            let pd = soft.pd();
            let (mut a, _b) = endpoints(soft, &pd, mode);
            soft.doubt_send(mode, taken);
            let mut batch = a.batch().unwrap();
            batch.add(Work::send(filled(&pd, b"one"))).unwrap();
            batch.add(Work::send(filled(&pd, b"two")).unsignaled()).unwrap();
            assert_eq!(batch.post().unwrap_err().error, PostError::MaybePosted { errno: Errno(libc::EIO) });
            is_poisoned(&mut a, &pd);
            let mut back = Vec::new();
            while let Some(completion) = a.poll().unwrap() {
                assert_eq!(completion.status, WcStatus::WR_FLUSH_ERR);
                back.push(completion.buffer.unwrap());
            }
            back.extend(a.close().unwrap());
            let back: Vec<&[u8]> = back.iter().map(|buffer| &buffer[..]).collect();
            assert_eq!(back, [b"one", b"two"]);
        }
    });
}

#[test]
fn a_batch_reported_as_not_accepted_returns_its_buffers_in_order() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        soft.refuse_send(mode);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, b"one")).unsignaled()).unwrap();
        batch.add(Work::send_inline(b"two")).unwrap();
        batch.add(Work::send(filled(&pd, b"three"))).unwrap();
        let unposted = batch.post().unwrap_err();
        assert_eq!(unposted.error, PostError::QueueFull { posted: 0 });
        let buffers: Vec<&[u8]> = unposted.buffers.iter().map(|buffer| &buffer[..]).collect();
        assert_eq!(buffers, [&b"one"[..], b"three"]);
        assert_eq!((in_flight(&a), a.queue_pair().state()), ((0, 0), QueuePairState::RTS));
        b.receive(filled(&pd, b"inbox")).unwrap();
        a.send(filled(&pd, b"go on")).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"go on");
        assert_eq!(&done(&mut a).buffer.unwrap()[..], b"go on");
    });
}

#[test]
fn a_partly_accepted_batch_returns_the_other_buffers() {
    on_each_mode(|soft, mode| {
        if !mode.classic_qp {
            return;
        }
        for (taken, errno) in [(1, libc::ENOMEM), (2, libc::EINVAL)] {
            let pd = soft.pd();
            let (mut a, _b) = endpoints(soft, &pd, mode);
            soft.fail_post_send(PostFault { errno, taken, bad: Bad::FirstNotTaken });
            let mut batch = a.batch().unwrap();
            for bytes in [&b"one"[..], b"two", b"three"] {
                batch.add(Work::send(filled(&pd, bytes)).unsignaled()).unwrap();
            }
            let unposted = batch.post().unwrap_err();
            let posted = taken as u32;
            let expected = match errno {
                libc::ENOMEM => PostError::QueueFull { posted },
                _ => PostError::Refused { posted, errno: Errno(errno) },
            };
            assert_eq!(unposted.error, expected);
            let rest: Vec<usize> = unposted.buffers.iter().map(|buffer| buffer.len()).collect();
            assert_eq!(rest, [3, 3, 5][taken..]);
            is_poisoned(&mut a, &pd);
            let mut flushed = Vec::new();
            while let Some(completion) = a.poll().unwrap() {
                assert_eq!(completion.status, WcStatus::WR_FLUSH_ERR);
                flushed.push(completion.buffer.unwrap().len());
            }
            assert_eq!(flushed, [3, 3, 5][..taken]);
            assert_eq!(a.close().unwrap().len(), 0);
        }
    });
}

#[test]
fn a_receive_in_doubt_ends_a_forgotten_batch_first() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let (mut a, _b) = endpoints(&soft, &pd, Mode::EXTENDED);
    std::mem::forget(a.batch().unwrap());
    soft.fail_post_recv(PostFault { errno: libc::EIO, taken: 0, bad: Bad::Null });
    // The provider reports a change of the queue pair between wr_start and wr_complete.
    let rejected = a.receive(pd.allocate(8).unwrap()).unwrap_err();
    assert_eq!(rejected.error, PostError::MaybePosted { errno: Errno(libc::EIO) });
}

#[test]
fn lists_that_the_provider_did_not_accept_come_back() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (mut a, mut b) = endpoints(soft, &pd, mode);
        let payload = pd.share(vec![7; 10]).unwrap();
        soft.refuse_send(mode);
        let rejected = a.send_list(payload.clone()).unwrap_err();
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        assert!(rejected.list.is_some_and(|list| list.byte_len() == 10) && rejected.buffer.is_none());

        soft.fail_post_recv(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken });
        let rejected = b.receive_list(filled(&pd, b"mine")).unwrap_err();
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        let list = rejected.list.unwrap();
        assert_eq!((list.byte_len(), in_flight(&b)), (4, (0, 0)));

        soft.refuse_send(mode);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send_list(payload.slice(..1).unwrap()).unsignaled()).unwrap();
        batch.add(Work::send(filled(&pd, b"two"))).unwrap();
        batch.add(Work::send_list(payload.slice(..3).unwrap())).unwrap();
        let unposted = batch.post().unwrap_err();
        assert_eq!(unposted.error, PostError::QueueFull { posted: 0 });
        let lens: Vec<_> = unposted.lists.iter().map(|list| list.byte_len()).collect();
        assert_eq!((lens, unposted.buffers.len(), in_flight(&a)), (vec![1, 3], 1, (0, 0)));

        b.receive_list(list).unwrap();
        a.send_list(payload.slice(..2).unwrap()).unwrap();
        assert_eq!(done(&mut b).list.unwrap().byte_len(), 2);
        assert_eq!(done(&mut a).list.unwrap().byte_len(), 2);
    });
}

#[test]
fn lists_in_doubt_stay_until_the_endpoint_is_closed() {
    on_each_mode(|soft, mode| {
        for taken in [false, true] {
            let pd = soft.pd();
            let (mut a, mut b) = endpoints(soft, &pd, mode);
            let owner: Arc<[u8]> = vec![7; 10].into();
            soft.doubt_send(mode, taken);
            let rejected = a.send_list(pd.share(Arc::clone(&owner)).unwrap()).unwrap_err();
            assert_eq!(rejected.error, PostError::MaybePosted { errno: Errno(libc::EIO) });
            assert!(rejected.list.is_none());
            is_poisoned(&mut a, &pd);
            assert_eq!(a.receive_list(filled(&pd, b"again")).unwrap_err().error, PostError::EndpointFailed);
            assert_eq!(a.send_list(filled(&pd, b"again")).unwrap_err().error, PostError::EndpointFailed);
            assert_eq!(Arc::strong_count(&owner), 2, "the device may read it");
            assert_eq!(a.close().unwrap().len(), 0);
            assert_eq!(Arc::strong_count(&owner), 1);

            soft.fail_post_recv(PostFault { errno: libc::EINVAL, taken: taken.into(), bad: Bad::Null });
            let rejected = b.receive_list(filled(&pd, b"in doubt")).unwrap_err();
            assert_eq!(rejected.error, PostError::MaybePosted { errno: Errno(libc::EINVAL) });
            assert!(rejected.list.is_none() && b.queue_pair().state() == QueuePairState::ERR);
            assert_eq!(b.close().unwrap().len(), 1);
        }
    });
}
