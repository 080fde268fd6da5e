//! Endpoints with a keepalive report that their peer is gone, and nothing while it is alive.

use std::time::{Duration, Instant};

use rdma_safe::device::Quirks;
use rdma_safe::endpoint::{Armed, ConnectionLost, KeepaliveError};
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Completion, CompletionChannel, Endpoint, EndpointBuilder, Error, InitOptions, Operation, PostError,
    QueuePairAddress, QueuePairType, ReceivePool, WcStatus, Work,
};

use crate::channel::is_readable;
use crate::support::lab::Mode;
use crate::support::link::{connect, connected};
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, Rdma, device, device_without_faults, error_of, filled, in_flight, within_deadline};

/// A time limit for connections that stay alive.
///
/// The peer is in the same process, so it answers even on a slow machine. It is reported only if a thread that has locked the
/// device, or the kernel of SoftRoCE, does not run for three eighths of the limit.
pub(crate) fn limit(rdma: &Rdma) -> Duration {
    Duration::from_secs(if rdma.is_rxe() { 5 } else { 2 })
}

/// A time limit for connections whose peer is gone.
pub(crate) fn short(rdma: &Rdma) -> Duration {
    Duration::from_millis(if rdma.is_rxe() { 1000 } else { 200 })
}

/// Time in which a silent peer is reported, and several probes are sent to another one.
pub(crate) fn periods(rdma: &Rdma) -> Duration {
    limit(rdma) * 5 / 4
}

/// Sleeps until a completion channel is readable or the keepalive is due.
pub(crate) fn sleep_until(due: Option<Instant>, channel: &CompletionChannel) {
    let due = due.expect("a keepalive");
    // `poll(2)` counts whole milliseconds.
    is_readable(channel, due.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
}

fn builder<'a>(rdma: &Rdma, pd: &'a rdma_safe::ProtectionDomain, mode: Mode) -> EndpointBuilder<'a> {
    let builder = rdma.endpoint(pd).keepalive(limit(rdma)).send_depth(4).recv_depth(4).inline_data(16);
    builder.classic_post(mode.classic_qp).classic_poll(mode.classic_cq)
}

/// Waits for the report of a lost connection.
#[track_caller]
fn lost(endpoint: &mut Endpoint) -> ConnectionLost {
    let report = endpoint.wait(DEADLINE).unwrap();
    assert_eq!((report.operation, report.buffer.is_none()), (Operation::Keepalive, true), "{report:?}");
    let lost = report.connection_lost().expect("the reason");
    let failed = error_of(report.ok());
    assert!(failed.to_string().contains(&lost.to_string()));
    assert!(matches!(Error::from(failed), Error::ConnectionLost(same) if same == lost));
    lost
}

/// Whether the status means that the peer is gone: no ACK within the time limit, or after the transport's retries.
fn is_gone(status: WcStatus) -> bool {
    [WcStatus::RESP_TIMEOUT_ERR, WcStatus::RETRY_EXC_ERR].contains(&status)
}

/// Polls both ends of connections for some time. Returns what they report.
#[track_caller]
fn poll_for(time: Duration, pairs: &mut [(Endpoint, Endpoint)]) -> Vec<Completion> {
    let (start, mut found) = (Instant::now(), Vec::new());
    while start.elapsed() < time {
        for (a, b) in &mut *pairs {
            found.extend(a.poll().unwrap());
            found.extend(b.poll().unwrap());
        }
    }
    found
}

#[test]
fn an_idle_connection_stays_connected() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let mut pairs: Vec<_> = Mode::each().map(|mode| connected(builder(&rdma, &pd, mode))).collect();
    for (a, b) in &mut pairs {
        for end in [a, b] {
            end.receive(pd.allocate(8).unwrap()).unwrap();
            assert_eq!(end.keepalive(), Some(limit(&rdma)));
            assert!(end.keepalive_due().is_some());
        }
    }
    let found = poll_for(periods(&rdma), &mut pairs);
    assert!(found.is_empty(), "{found:?}");
    for (mut a, mut b) in pairs {
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 1), (0, 1)));
        // It still carries messages.
        a.send_inline(b"hello").unwrap();
        let sent = a.wait(DEADLINE).unwrap().ok().unwrap();
        let received = b.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!((sent.operation, received.buffer.as_deref()), (Operation::Send, Some(&b"hello"[..])));
    }
}

#[test]
fn an_idle_connection_stays_connected_while_both_ends_sleep() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(builder(&rdma, &pd, Mode::EXTENDED).events(true));
    std::thread::scope(|scope| {
        for end in [&mut a, &mut b] {
            scope.spawn(|| {
                let error = error_of(end.wait(periods(&rdma)));
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
            });
        }
    });
}

#[test]
fn a_peer_that_vanishes_is_reported_while_only_receives_are_outstanding() {
    let Some(rdma) = device() else { return };
    for (mode, events) in Mode::each().flat_map(|mode| [(mode, false), (mode, true)]) {
        let pd = rdma.pd();
        let (mut a, b) = connected(builder(&rdma, &pd, mode).keepalive(short(&rdma)).events(events));
        let peer = b.address().qp_num;
        for _ in 0..2 {
            a.receive(pd.allocate(8).unwrap()).unwrap();
        }
        drop(b);
        let lost = lost(&mut a);
        assert_eq!((lost.qp_num, lost.within), (peer, short(&rdma)));
        assert!(is_gone(lost.status), "{lost}");
        // The work in flight comes back, and the endpoint takes no more.
        for _ in 0..2 {
            let flushed = a.wait(DEADLINE).unwrap();
            assert_eq!((flushed.operation, flushed.status), (Operation::Receive, WcStatus::WR_FLUSH_ERR));
            assert!(flushed.buffer.is_some());
        }
        assert_eq!(in_flight(&a), (0, 0));
        assert!(matches!(a.wait(DEADLINE), Err(Error::ConnectionLost(same)) if same == lost));
        assert!(a.poll().unwrap().is_none(), "it is reported once");
        let refused = a.send(pd.allocate(8).unwrap()).unwrap_err();
        assert_eq!((refused.error, refused.buffer.is_some()), (PostError::EndpointFailed, true));
        assert_eq!(a.keepalive_due(), None);
        assert!(a.close().unwrap().is_empty());
    }
}

#[test]
fn closing_a_lost_connection_returns_all_buffers() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = connected(builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma)));
    for buffer in [filled(&pd, b"one"), filled(&pd, b"two")] {
        a.receive(buffer).unwrap();
    }
    drop(b);
    lost(&mut a);
    let buffers = a.close().unwrap();
    assert_eq!(buffers.iter().map(|buffer| buffer.to_vec()).collect::<Vec<_>>(), [b"one", b"two"]);
}

#[test]
fn a_program_that_sleeps_on_the_descriptor_wakes_when_the_keepalive_is_due() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = connected(builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma)).events(true));
    a.receive(pd.allocate(8).unwrap()).unwrap();
    drop(b);
    let mut sleeps = 0;
    let report = loop {
        if let Some(done) = a.poll().unwrap() {
            break done;
        }
        if a.arm().unwrap() == Armed::Poll {
            continue;
        }
        sleep_until(a.keepalive_due(), a.channel().unwrap());
        sleeps += 1;
    };
    assert!(is_gone(report.connection_lost().unwrap().status));
    assert!(sleeps >= 2, "one sleep before the probe, and one before the report: {sleeps}");
}

#[test]
fn a_sender_that_waits_for_a_receive_is_not_reported() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    if rdma.quirks().contains(Quirks::MISSING_RECEIVES_TIME_OUT) {
        return println!("skipped: SoftRoCE may report missing receives as a peer that is gone");
    }
    let pd = rdma.pd();
    let mut pairs = Vec::new();
    for (mode, signaled) in Mode::each().flat_map(|mode| [(mode, true), (mode, false)]) {
        let (mut a, b) = connected(builder(&rdma, &pd, mode));
        let work = Work::send(filled(&pd, b"patience"));
        a.post(if signaled { work } else { work.unsignaled() }).unwrap();
        pairs.push((a, b));
    }
    let found = poll_for(periods(&rdma), &mut pairs);
    assert!(found.is_empty(), "{found:?}");
    for (mut a, mut b) in pairs {
        assert_eq!(a.sends_in_flight(), 1);
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let received = within_deadline("a message", || {
            // An unsignaled send comes back after a probe that was posted behind it.
            assert!(a.poll().unwrap().is_none_or(|done| done.operation == Operation::Send && done.ok().is_ok()));
            b.poll().unwrap()
        });
        assert_eq!(received.ok().unwrap().buffer.as_deref(), Some(&b"patience"[..]));
    }
}

#[test]
fn a_probe_returns_the_buffers_of_unsignaled_sends() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let (mut a, mut b) = connected(builder(&rdma, &pd, mode).send_depth(8));
        for index in 0..3_u8 {
            b.receive(pd.allocate(1).unwrap()).unwrap();
            a.post(Work::send(filled(&pd, &[index])).unsignaled()).unwrap();
        }
        let mut sent = Vec::new();
        within_deadline("all sends", || {
            _ = b.poll().unwrap();
            sent.extend(a.poll().unwrap());
            (sent.len() == 3).then_some(())
        });
        for (index, done) in sent.into_iter().enumerate() {
            let done = done.ok().unwrap();
            assert_eq!((done.operation, done.buffer.as_deref()), (Operation::Send, Some(&[index as u8][..])));
        }
        assert_eq!(in_flight(&a), (0, 0));
    }
}

#[test]
fn a_peer_that_vanishes_behind_unsignaled_sends_is_reported() {
    let Some(rdma) = device_without_faults("a lost packet is a silent peer") else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma)));
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.post(Work::send(filled(&pd, b"received")).unsignaled()).unwrap();
    assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().buffer.as_deref(), Some(&b"received"[..]));
    drop(b);
    let mut found = Vec::new();
    let lost = loop {
        let done = a.wait(DEADLINE).unwrap();
        match done.connection_lost() {
            Some(lost) => break lost,
            None => found.push(done.operation),
        }
    };
    assert!(is_gone(lost.status), "{lost}");
    found.extend(std::iter::from_fn(|| a.wait(DEADLINE).ok()).map(|done| done.operation));
    assert_eq!(found, [Operation::Send]);
}

#[test]
fn failed_work_is_the_only_report_of_a_lost_connection() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = connected(builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma)));
    a.receive(pd.allocate(8).unwrap()).unwrap();
    drop(b);
    a.send(pd.allocate(8).unwrap()).unwrap();
    let found: Vec<_> = (0..2).map(|_| a.wait(DEADLINE).unwrap()).map(|done| (done.operation, done.status)).collect();
    assert_eq!(found, [(Operation::Send, WcStatus::RETRY_EXC_ERR), (Operation::Receive, WcStatus::WR_FLUSH_ERR)]);
    let more = error_of(a.wait(2 * short(&rdma)));
    assert!(matches!(more, Error::Timeout { .. }), "{more}");
}

#[test]
fn the_ack_timeout_is_lowered_to_the_time_limit() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let timeout = |within: Option<Duration>| {
        let (a, _b) = connected(rdma.endpoint(&pd).keepalive(within));
        a.queue_pair().query().unwrap().timeout().unwrap()
    };
    let total = |exponent: u8| Duration::from_nanos(4096 << exponent) * 7;
    assert_eq!([timeout(None), timeout(Some(Duration::from_secs(3600)))], [14, 14]);
    let short = timeout(Some(Duration::from_millis(200)));
    let stretch = if rdma.is_rxe() { 1 } else { 4 };
    assert!(stretch * total(short) <= Duration::from_millis(200), "{short}");
    assert!(stretch * total(short + 1) > Duration::from_millis(200), "{short}");
}

#[test]
fn pool_receives_do_not_hide_a_peer_that_vanishes() {
    let Some(rdma) = device() else { return };
    for events in [false, true] {
        let pd = rdma.pd();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        pool.receive(pd.allocate(8).unwrap()).unwrap();
        let builder = builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma));
        let mut a = builder.clone().events(events).receive_pool(&pool).build().unwrap();
        let mut b = builder.build().unwrap();
        connect(&mut a, &mut b);
        drop(b);
        assert!(is_gone(lost(&mut a).status));
        assert!(matches!(a.wait(DEADLINE), Err(Error::ConnectionLost(_))));
        drop(a);
        assert_eq!(pool.close().unwrap().len(), 1, "the receive stays in the pool");
    }
}

#[test]
fn an_address_without_the_right_to_write_is_refused_before_connecting() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let build = |keepalive: Option<Duration>| rdma.endpoint(&pd).keepalive(keepalive).build().unwrap();
    let (mut a, b) = (build(Some(limit(&rdma))), build(None));
    assert_eq!([a.address().remote_write, b.address().remote_write], [true, false]);
    let error = error_of(a.connect(&b.address()));
    let qp_num = b.address().qp_num;
    assert!(matches!(error, Error::Keepalive(KeepaliveError::RefusedByPeer { qp_num: peer }) if peer == qp_num));
    let text = error.to_string();
    assert!(text.contains("Access::REMOTE_WRITE") && text.contains("with_remote_write"), "{text}");
    drop(b);
    // The endpoint is unchanged and can be connected to another peer.
    let mut b = rdma.endpoint(&pd).peer_access(Access::REMOTE_WRITE).build().unwrap();
    assert!(b.address().remote_write);
    connect(&mut a, &mut b);
    // An address in another format says nothing about the right.
    let QueuePairAddress { qp_num, psn, gid, mtu, .. } = b.address();
    let foreign = QueuePairAddress::new(qp_num, psn, gid, mtu);
    assert!(!foreign.remote_write && foreign.with_remote_write().remote_write);
}

#[test]
fn a_peer_that_refuses_the_keepalive_is_named_as_the_cause() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut a = rdma.endpoint(&pd).keepalive(limit(&rdma)).build().unwrap();
    let mut b = rdma.endpoint(&pd).build().unwrap();
    // The address promises a right that the queue pair does not have.
    a.connect(&b.address().with_remote_write()).unwrap();
    b.connect(&a.address()).unwrap();
    a.receive(pd.allocate(8).unwrap()).unwrap();
    let lost = within_deadline("the report", || {
        _ = b.poll().unwrap();
        a.poll().unwrap()
    });
    let lost = lost.connection_lost().expect("the reason");
    let expected = if rdma.is_rxe() { WcStatus::REM_INV_REQ_ERR } else { WcStatus::REM_ACCESS_ERR };
    assert_eq!(lost.status, expected);
    assert!(lost.to_string().contains("IBV_ACCESS_REMOTE_WRITE"), "{lost}");
}

#[test]
fn the_right_to_write_gives_access_to_nothing_without_a_key() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    // Memory that peers may read, and memory of the endpoint.
    let readable = pd.expose(Pages::new(64).unwrap(), Access::REMOTE_READ).unwrap();
    let (mut a, mut b) = connected(builder(&rdma, &pd, Mode::EXTENDED));
    a.write(pd.allocate(8).unwrap(), readable.remote()).unwrap();
    let status = within_deadline("a completion", || {
        _ = b.poll().unwrap();
        a.poll().unwrap()
    });
    assert_eq!(status.status, WcStatus::REM_ACCESS_ERR);
    assert_eq!(readable.load_u64(0).unwrap(), 0);
}

#[test]
fn keepalives_that_cannot_work_are_refused() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for within in [Duration::ZERO, Duration::from_millis(9), Duration::from_secs(24 * 60 * 60 + 1)] {
        let error = error_of(rdma.endpoint(&pd).keepalive(within).build());
        assert!(matches!(error, Error::Keepalive(KeepaliveError::OutOfRange { within: same }) if same == within));
    }
    let unreliable = rdma.endpoint(&pd).qp_type(QueuePairType::UC);
    for refused in [
        error_of(unreliable.clone().keepalive(limit(&rdma)).build()),
        error_of(rdma.endpoint(&pd).keepalive(limit(&rdma)).build_datagrams(1)),
    ] {
        assert!(matches!(refused, Error::WrongType { operation: "EndpointBuilder::keepalive", .. }), "{refused}");
    }
    assert_eq!(unreliable.keepalive(None).build().unwrap().keepalive(), None);
    rdma.endpoint(&pd).keepalive(None).build_datagrams(1).unwrap();
    assert_eq!(rdma.endpoint(&pd).build().unwrap().keepalive(), None, "off by default");
    // A raw queue pair says in its address what it permits.
    let cq = rdma.completion_queue(4).build().unwrap();
    for access in [Access::empty(), Access::REMOTE_WRITE] {
        let mut qp = pd.queue_pair(&cq, &cq).send_depth(1).recv_depth(1).build().unwrap();
        let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index).peer_access(access);
        assert_eq!(qp.init(&options).unwrap().remote_write, !access.is_empty());
    }
}

/// The role of a peer process: it connects to the address in `role`, reports its own, and waits to be killed.
fn serve_until_killed(rdma: &Rdma, role: &str) -> ! {
    let pd = rdma.pd();
    let mut endpoint = rdma.endpoint(&pd).keepalive(limit(rdma)).events(true).build().unwrap();
    endpoint.connect(&serde_json::from_str(role).unwrap()).unwrap();
    peer::report(serde_json::to_string(&endpoint.address()).unwrap());
    peer::wait_to_be_killed()
}

#[cfg(not(miri))]
fn report_of_a_peer_process(test: &str, end: impl Fn(Peer) -> Option<Peer>) {
    let Some(rdma) = device() else { return };
    if let Some(role) = peer::role() {
        serve_until_killed(&rdma, &role);
    }
    for events in [false, true] {
        let pd = rdma.pd();
        let builder = builder(&rdma, &pd, Mode::EXTENDED).keepalive(short(&rdma));
        let mut a = builder.events(events).build().unwrap();
        let mut peer = Peer::start(test, serde_json::to_string(&a.address()).unwrap());
        a.receive(pd.allocate(8).unwrap()).unwrap();
        a.connect(&serde_json::from_str(&peer.next_report()).unwrap()).unwrap();
        let peer = end(peer);
        assert!(is_gone(lost(&mut a).status));
        assert_eq!(a.close().unwrap().len(), 1);
        drop(peer);
    }
}

#[test]
#[cfg(not(miri))]
fn a_killed_peer_process_is_reported() {
    report_of_a_peer_process("keepalive::a_killed_peer_process_is_reported", |peer| {
        peer.kill();
        None
    });
}

#[test]
#[cfg(not(miri))]
fn a_stopped_peer_process_is_reported() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() && peer::role().is_none() {
        return println!("skipped: the device of a stopped process answers");
    }
    report_of_a_peer_process("keepalive::a_stopped_peer_process_is_reported", |peer| {
        peer.stop();
        Some(peer)
    });
}
