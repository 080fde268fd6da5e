//! The owned API: failed work has the right status, and every buffer is returned.

use std::time::{Duration, Instant};

use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, ConnectOptions, Endpoint, EndpointBuilder, Error, Operation, PostError, QueuePairState, RemoteMemory,
    WcStatus, Work,
};

use crate::owned::wait;
use crate::support::link::connected;
use crate::support::{DEADLINE, device, error_of, in_flight, pattern};

/// Two connected ends with few retries.
fn with_few_retries(builder: EndpointBuilder<'_>) -> (Endpoint, Endpoint) {
    let options = ConnectOptions::default().retry_count(6).rnr_retry(1).min_rnr_timer(1);
    let (mut a, mut b) = (builder.clone().build().unwrap(), builder.build().unwrap());
    let (first, second) = (a.address(), b.address());
    a.connect_with(&second, &options).unwrap();
    b.connect_with(&first, &options).unwrap();
    (a, b)
}

/// Waits for the next completion, which must be a failure. Returns its operation, status and buffer contents.
#[track_caller]
fn wait_failed(endpoint: &mut Endpoint) -> (Operation, WcStatus, Vec<u8>) {
    let failed = error_of(endpoint.wait(DEADLINE).unwrap().ok()).0;
    (failed.operation, failed.status, failed.buffer.expect("the buffer is returned").to_vec())
}

#[test]
fn a_receive_that_is_too_small_fails_at_both_ends_and_returns_all_buffers() {
    let Some(rdma) = device() else { return };
    for events in [false, true] {
        let pd = rdma.pd();
        let (mut a, mut b) = connected(rdma.endpoint(&pd).events(events));
        for capacity in [15, 64] {
            b.receive(pd.allocate(capacity).unwrap()).unwrap();
        }
        for seed in 0..2 {
            let mut buffer = pd.allocate(16).unwrap();
            buffer.copy_from_slice(&pattern(seed, 16));
            a.send(buffer).unwrap();
        }
        let (sent, received) = if rdma.is_rxe() {
            (WcStatus::REM_OP_ERR, WcStatus::LOC_QP_OP_ERR)
        } else {
            (WcStatus::REM_INV_REQ_ERR, WcStatus::LOC_LEN_ERR)
        };
        assert_eq!(wait_failed(&mut a), (Operation::Send, sent, pattern(0, 16)));
        assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::WR_FLUSH_ERR, pattern(1, 16)));
        for (capacity, status) in [(15, received), (64, WcStatus::WR_FLUSH_ERR)] {
            let failed = error_of(b.wait(DEADLINE).unwrap().ok()).0;
            assert_eq!((failed.operation, failed.status, failed.byte_len), (Operation::Receive, status, 0));
            assert_eq!(failed.buffer.unwrap().capacity(), capacity);
        }
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
    }
}

#[test]
fn a_wrong_remote_key_is_a_remote_access_error_and_returns_the_buffer() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    region.store_u64(0, 5).unwrap();
    let bad = RemoteMemory { rkey: region.remote().rkey ^ 0xff, ..region.remote() };
    for operation in [Operation::Write, Operation::Read, Operation::Atomic] {
        let (mut a, _b) = connected(rdma.endpoint(&pd).peer_access(Access::REMOTE));
        let mut buffer = pd.allocate(8).unwrap();
        buffer.copy_from_slice(b"returned");
        a.post(match operation {
            Operation::Write => Work::write(buffer, bad),
            Operation::Read => Work::read(buffer, bad),
            _ => Work::fetch_add(buffer, bad, 1),
        })
        .unwrap();
        let failed = error_of(a.wait(DEADLINE).unwrap().ok());
        let text = failed.to_string();
        assert!(text.contains("remote access error") && text.contains("rkey"), "{text}");
        assert_eq!((failed.0.operation, failed.0.status), (operation, WcStatus::REM_ACCESS_ERR));
        assert_eq!(*failed.0.buffer.unwrap(), *b"returned");
        assert_eq!(region.load_u64(0).unwrap(), 5);
    }
}

#[test]
fn a_peer_without_access_cannot_reach_exposed_memory() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let (mut a, _b) = connected(rdma.endpoint(&pd));
    a.write(pd.allocate(8).unwrap(), region.remote()).unwrap();
    let status = a.wait(DEADLINE).unwrap().status;
    assert!(matches!(status, WcStatus::REM_ACCESS_ERR | WcStatus::REM_INV_REQ_ERR), "{status:?}");
}

#[test]
fn a_peer_without_receives_exhausts_the_retries_and_returns_all_buffers() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = with_few_retries(rdma.endpoint(&pd));
    for seed in 0..5 {
        let mut buffer = pd.allocate(16).unwrap();
        buffer.copy_from_slice(&pattern(seed, 16));
        a.send(buffer).unwrap();
    }
    assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::RNR_RETRY_EXC_ERR, pattern(0, 16)));
    for seed in 1..5 {
        assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::WR_FLUSH_ERR, pattern(seed, 16)));
    }
    assert!(b.poll().unwrap().is_none());
    assert_eq!(a.queue_pair().query().unwrap().state(), Some(QueuePairState::ERR));
}

#[test]
fn unsignaled_work_completes_if_it_fails() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, _b) = with_few_retries(rdma.endpoint(&pd).inline_data(8));
    let id = a.post(Work::send_inline(b"silent").unsignaled()).unwrap();
    let failed = error_of(a.wait(DEADLINE).unwrap().ok()).0;
    assert_eq!((failed.id, failed.status), (id, WcStatus::RNR_RETRY_EXC_ERR));
    assert!(failed.buffer.is_none());
}

#[test]
fn a_peer_destroyed_mid_run_is_an_error_before_the_deadline() {
    let Some(rdma) = device() else { return };
    for events in [false, true] {
        let pd = rdma.pd();
        let (mut a, mut b) = with_few_retries(rdma.endpoint(&pd).events(events).send_depth(8).recv_depth(8));
        for buffer in pd.allocate(8 * 16).unwrap().into_chunks(16).unwrap() {
            a.receive(buffer).unwrap();
        }
        for round in 0..50 {
            b.receive(pd.allocate(1000).unwrap()).unwrap();
            let mut buffer = pd.allocate(1000).unwrap();
            buffer.copy_from_slice(&pattern(round, 1000));
            a.send(buffer).unwrap();
            assert!(*wait(&mut b).buffer.unwrap() == *pattern(round, 1000));
            assert_eq!(wait(&mut a).operation, Operation::Send);
        }
        drop(b);
        for seed in 0..8 {
            let mut buffer = pd.allocate(16).unwrap();
            buffer.copy_from_slice(&pattern(seed, 16));
            a.send(buffer).unwrap();
        }
        let start = Instant::now();
        assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::RETRY_EXC_ERR, pattern(0, 16)));
        assert!(start.elapsed() < DEADLINE);
        // All other work in flight is flushed: sends in order, and receives.
        let (mut sends, mut receives) = (1, 0);
        while (sends, receives) != (8, 8) {
            let (operation, status, bytes) = wait_failed(&mut a);
            assert_eq!(status, WcStatus::WR_FLUSH_ERR);
            if operation == Operation::Send {
                assert_eq!(bytes, pattern(sends, 16));
                sends += 1;
            } else {
                receives += 1;
            }
        }
        assert_eq!(in_flight(&a), (0, 0));
        assert!(matches!(error_of(a.wait(Duration::ZERO)), Error::Timeout { .. }));
        assert!(a.close().unwrap().is_empty());
    }
}

/// The time follows from `ConnectOptions::retry_count`; a device may take up to four times as long.
#[test]
fn a_lost_peer_is_detected_with_the_default_options() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = connected(rdma.endpoint(&pd));
    drop(b);
    let mut buffer = pd.allocate(8).unwrap();
    buffer.copy_from_slice(b"hello?!?");
    a.send(buffer).unwrap();
    assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::RETRY_EXC_ERR, b"hello?!?".to_vec()));
}

#[test]
fn work_posted_after_a_failure_fails_and_returns_its_buffer() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = with_few_retries(rdma.endpoint(&pd));
    drop(b);
    a.send(pd.allocate(8).unwrap()).unwrap();
    assert_eq!(a.wait(DEADLINE).unwrap().status, WcStatus::RETRY_EXC_ERR);
    let mut buffer = pd.allocate(8).unwrap();
    buffer.copy_from_slice(b"too late");
    a.send(buffer).unwrap();
    assert_eq!(wait_failed(&mut a), (Operation::Send, WcStatus::WR_FLUSH_ERR, b"too late".to_vec()));
}

#[test]
fn close_returns_a_receive_posted_after_a_failure() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = with_few_retries(rdma.endpoint(&pd));
    drop(b);
    a.send(pd.allocate(8).unwrap()).unwrap();
    assert_eq!(a.wait(DEADLINE).unwrap().status, WcStatus::RETRY_EXC_ERR);
    // SoftRoCE accepts the receive and never flushes it.
    let mut buffer = pd.allocate(24).unwrap();
    buffer.fill_from(b"kept").unwrap();
    match a.receive(buffer) {
        Ok(_) => {
            let buffers = a.close().unwrap();
            assert_eq!(buffers.iter().map(|buffer| buffer.capacity()).collect::<Vec<_>>(), [24]);
        }
        Err(rejected) => assert_eq!(rejected.buffer.map(|buffer| buffer.capacity()), Some(24)),
    }
}

#[test]
fn a_message_longer_than_the_port_carries_is_refused() {
    let Some(rdma) = device() else { return };
    let max = rdma.query_port(rdma.port).unwrap().max_message_size();
    if max > 64 << 20 {
        return println!("skipped: a message beyond the limit of {max} bytes takes too much memory");
    }
    let pd = rdma.pd();
    let (mut a, _b) = connected(rdma.endpoint(&pd));
    let len = max as usize + 1;
    let rejected = error_of(a.send(pd.allocate(len).unwrap()));
    assert_eq!(rejected.error, PostError::MessageTooLong { len, max });
    assert_eq!(rejected.buffer.map(|buffer| buffer.len()), Some(len));
}

#[test]
fn close_returns_every_buffer_in_flight_with_its_bytes() {
    let Some(rdma) = device() else { return };
    for events in [false, true] {
        let pd = rdma.pd();
        let (mut a, mut b) = connected(rdma.endpoint(&pd).events(events));
        // A completed send that was not polled, sends in flight, and receives.
        b.receive(pd.allocate(16).unwrap()).unwrap();
        for seed in 0..4 {
            let mut buffer = pd.allocate(16).unwrap();
            buffer.copy_from_slice(&pattern(seed, 16));
            a.send(buffer).unwrap();
        }
        assert!(*wait(&mut b).buffer.unwrap() == *pattern(0, 16));
        for capacity in [100, 200] {
            a.receive(pd.allocate(capacity).unwrap()).unwrap();
        }
        let buffers = a.close().unwrap();
        let (sends, receives) = buffers.split_at(4);
        for (seed, buffer) in (0..).zip(sends) {
            assert!(**buffer == *pattern(seed, 16));
        }
        assert_eq!(receives.iter().map(|buffer| buffer.capacity()).collect::<Vec<_>>(), [100, 200]);
        // The returned buffers can be used again.
        let (mut c, mut d) = connected(rdma.endpoint(&pd));
        let mut buffers = buffers.into_iter();
        let outbox = buffers.next().unwrap();
        d.receive(buffers.next().unwrap()).unwrap();
        c.send(outbox).unwrap();
        assert!(*wait(&mut d).buffer.unwrap() == *pattern(0, 16));
    }
}

#[test]
fn no_work_completes_twice() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = with_few_retries(rdma.endpoint(&pd).send_depth(4).recv_depth(4));
    let mut seen = std::collections::HashSet::new();
    for _ in 0..20 {
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send(pd.allocate(8).unwrap()).unwrap();
        assert!(seen.insert(wait(&mut a).id));
        drop(wait(&mut b));
    }
    for _ in 0..4 {
        a.send(pd.allocate(8).unwrap()).unwrap();
    }
    for _ in 0..4 {
        let done = a.wait(DEADLINE).unwrap();
        assert_ne!(done.status, WcStatus::SUCCESS);
        assert!(seen.insert(done.id), "{:?} completes twice", done.id);
    }
    assert!(a.poll().unwrap().is_none());
}
