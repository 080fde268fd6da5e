//! Completion channels: every event is delivered.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdma_safe::endpoint::Armed;
use rdma_safe::{CompletionChannel, CompletionQueue, Endpoint, Errno, Error, ProtectionDomain, SendFlags};

use crate::support::child::in_own_process;
use crate::support::lab::{Data, Lab, Mode, Op, Side, Wr, cq_builder, next_ok, try_next};
use crate::support::link::{Link, connected};
use crate::support::{DEADLINE, Rdma, device, error_of, pattern, rounds, within_deadline};

/// How long a test waits before it concludes that no event comes.
const NO_EVENT_WAIT: Duration = Duration::from_millis(50);

/// A lab whose end `b` reports events on `channel`.
fn lab_with_events(rdma: &Rdma, mode: Mode, channel: &CompletionChannel) -> Lab {
    let builder = Lab::builder(rdma, mode);
    let mut lab = builder.connected(false).build();
    let cq = cq_builder(rdma, 64, mode).channel(channel).build().unwrap();
    lab.b.qp = builder.qp_builder(lab.pd.queue_pair(&cq, &cq)).build().unwrap();
    lab.b.cq = cq;
    let link = Link::default();
    let (a, b) = (lab.a.qp.number(), lab.b.qp.number());
    link.connect(rdma, &mut lab.a.qp, b).unwrap();
    link.connect(rdma, &mut lab.b.qp, a).unwrap();
    lab
}

fn send(side: &mut Side, id: u64, flags: SendFlags) {
    let data = Data::One(side.memory.sge(0..16));
    side.post(&[Wr::new(id, Op::Send, data).flags(SendFlags::SIGNALED | flags)]).unwrap();
    side.next_ok(id);
}

pub(crate) fn is_readable(channel: &impl AsFd, timeout: Duration) -> bool {
    let mut fd = libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid `pollfd` for the duration of the call.
    let ready = unsafe { libc::poll(&mut fd, 1, timeout.as_millis() as i32) };
    assert!(ready >= 0, "{}", std::io::Error::last_os_error());
    ready == 1 && fd.revents & libc::POLLIN != 0
}

#[test]
fn an_armed_queue_reports_one_event_that_names_it() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let channel = rdma.create_channel().unwrap();
        let mut lab = lab_with_events(&rdma, mode, &channel);
        for id in 0..3 {
            lab.b.receive(id, 0..64).unwrap();
        }
        assert!(channel.try_event().unwrap().is_none(), "{mode}: nothing was armed");
        lab.b.cq.arm(false).unwrap();
        send(&mut lab.a, 0, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}");
        lab.b.next_ok(0);
        // The queue is not armed again, so the next completion causes no event.
        send(&mut lab.a, 1, SendFlags::empty());
        lab.b.next_ok(1);
        assert_eq!(channel.wait(NO_EVENT_WAIT).unwrap(), None, "{mode}");
        lab.b.cq.arm(false).unwrap();
        send(&mut lab.a, 2, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}");
        lab.b.next_ok(2);
    }
}

#[test]
fn events_on_a_shared_channel_name_their_queue() {
    let Some(rdma) = device() else { return };
    let channel = rdma.create_channel().unwrap();
    let mut first = lab_with_events(&rdma, Mode::EXTENDED, &channel);
    let mut second = lab_with_events(&rdma, Mode::CLASSIC, &channel);
    assert_ne!(first.b.cq.id(), second.b.cq.id());
    for round in 0..4 {
        for lab in [&mut first, &mut second] {
            lab.b.receive(round, 0..64).unwrap();
            lab.b.cq.arm(false).unwrap();
        }
        let (one, other) = if round % 2 == 0 { (&mut first, &mut second) } else { (&mut second, &mut first) };
        send(&mut one.a, round, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(one.b.cq.id()));
        assert_eq!(channel.try_event().unwrap(), None, "the other queue has nothing to report");
        send(&mut other.a, round, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(other.b.cq.id()));
        one.b.next_ok(round);
        other.b.next_ok(round);
    }
    // Both queues are due: two events, one of each queue, in either order.
    let mut expected = vec![first.b.cq.id(), second.b.cq.id()];
    for lab in [&mut first, &mut second] {
        lab.b.receive(9, 0..64).unwrap();
        lab.b.cq.arm(false).unwrap();
        send(&mut lab.a, 9, SendFlags::empty());
    }
    for _ in 0..2 {
        let id = channel.wait(DEADLINE).unwrap().expect("an event of each queue");
        let position = expected.iter().position(|expected| *expected == id).expect("an event of each queue only once");
        expected.remove(position);
    }
    assert_eq!(channel.try_event().unwrap(), None);
}

#[test]
fn a_queue_armed_for_solicited_completions_sleeps_through_others() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let channel = rdma.create_channel().unwrap();
        let mut lab = lab_with_events(&rdma, mode, &channel);
        for id in 0..2 {
            lab.b.receive(id, 0..64).unwrap();
        }
        lab.b.cq.arm(true).unwrap();
        send(&mut lab.a, 0, SendFlags::empty());
        lab.b.next_ok(0);
        assert_eq!(channel.wait(NO_EVENT_WAIT).unwrap(), None, "{mode}");
        send(&mut lab.a, 1, SendFlags::SOLICITED);
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}");
        lab.b.next_ok(1);
    }
}

#[test]
fn completions_before_arming_cause_no_event_and_are_not_lost() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let channel = rdma.create_channel().unwrap();
        let mut lab = lab_with_events(&rdma, mode, &channel);
        for id in 0..3 {
            lab.b.receive(id, 0..64).unwrap();
        }
        send(&mut lab.a, 0, SendFlags::empty());
        send(&mut lab.a, 1, SendFlags::empty());
        // The completion of the second send proves that both messages have arrived.
        lab.b.cq.arm(false).unwrap();
        lab.b.next_ok(0);
        lab.b.next_ok(1);
        assert_eq!(try_next(&mut lab.b.cq), None, "{mode}");
        if rdma.is_rxe() {
            assert_eq!(channel.wait(NO_EVENT_WAIT).unwrap(), None, "{mode}");
        }
        send(&mut lab.a, 2, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}: the queue is still armed");
        lab.b.next_ok(2);
    }
}

#[test]
fn a_wait_without_an_event_times_out() {
    let Some(rdma) = device() else { return };
    let channel = rdma.create_channel().unwrap();
    assert_eq!(channel.try_event().unwrap(), None);
    for limit in [Duration::ZERO, Duration::from_micros(300), Duration::from_millis(30)] {
        let start = Instant::now();
        assert_eq!(channel.wait(limit).unwrap(), None);
        assert!(start.elapsed() >= limit);
        assert!(start.elapsed() < limit + DEADLINE);
    }
}

#[test]
fn a_queue_without_a_channel_cannot_be_armed() {
    let Some(rdma) = device() else { return };
    for mode in [Mode::EXTENDED, Mode::ALL[1]] {
        let mut cq = cq_builder(&rdma, 8, mode).build().unwrap();
        let error = error_of(cq.arm(false));
        assert!(matches!(error, Error::NoChannel), "{error:?}");
    }
    let mut endpoint = rdma.endpoint(&rdma.pd()).build().unwrap();
    assert!(endpoint.channel().is_none());
    assert!(matches!(error_of(endpoint.arm()), Error::NoChannel));
}

#[test]
fn the_descriptor_works_with_poll() {
    let Some(rdma) = device() else { return };
    let channel = rdma.create_channel().unwrap();
    let mut lab = lab_with_events(&rdma, Mode::EXTENDED, &channel);
    // SAFETY: reads the flags of a descriptor that the channel owns.
    let flags = unsafe { libc::fcntl(channel.as_fd().as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0, "edge-triggered reactors read until the descriptor would block");
    lab.b.receive(1, 0..64).unwrap();
    lab.b.cq.arm(false).unwrap();
    assert!(!is_readable(&channel, NO_EVENT_WAIT));
    send(&mut lab.a, 1, SendFlags::empty());
    assert!(is_readable(&channel, DEADLINE));
    assert_eq!(channel.try_event().unwrap(), Some(lab.b.cq.id()));
    assert!(!is_readable(&channel, Duration::ZERO), "reading the event makes the descriptor unreadable");
    lab.b.next_ok(1);
}

/// `ibv_destroy_cq` waits for events that were read but not acknowledged, so no event may remain unacknowledged.
#[test]
fn a_queue_can_be_destroyed_after_read_and_unread_events() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let channel = rdma.create_channel().unwrap();
        let mut lab = lab_with_events(&rdma, mode, &channel);
        let last = rounds(100, 4);
        for id in 0..last {
            lab.b.receive(id, 0..64).unwrap();
            lab.b.cq.arm(false).unwrap();
            send(&mut lab.a, id, SendFlags::empty());
            assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}");
            lab.b.next_ok(id);
        }
        // The last event is not read.
        lab.b.receive(last, 0..64).unwrap();
        lab.b.cq.arm(false).unwrap();
        send(&mut lab.a, last, SendFlags::empty());
        assert!(is_readable(&channel, DEADLINE), "{mode}");
        drop(lab);
        // The channel keeps working for other queues, whether or not the event was destroyed with its queue.
        let _ = channel.try_event().unwrap();
        let mut lab = lab_with_events(&rdma, mode, &channel);
        lab.b.receive(0, 0..64).unwrap();
        lab.b.cq.arm(false).unwrap();
        send(&mut lab.a, 0, SendFlags::empty());
        assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()), "{mode}");
        lab.b.next_ok(0);
    }
}

/// Runs `exchange` with two endpoints that wait for events.
fn with_events(rdma: &Rdma, mode: Mode, exchange: impl FnOnce(&ProtectionDomain, &mut Endpoint, &mut Endpoint)) {
    let pd = rdma.pd();
    let builder = rdma.endpoint(&pd).events(true).classic_post(mode.classic_qp).classic_poll(mode.classic_cq);
    let (mut a, mut b) = connected(builder);
    exchange(&pd, &mut a, &mut b);
}

#[test]
fn an_endpoint_that_waits_for_events_sees_every_completion() {
    const ROUNDS: u64 = rounds(40, 5);
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        with_events(&rdma, mode, |pd, a, b| {
            for buffer in pd.allocate(8 * 64).unwrap().into_chunks(64).unwrap() {
                b.receive(buffer).unwrap();
            }
            let mut outbox = pd.allocate(64).unwrap();
            let mut seen = 0;
            // Bursts of one to eight messages, so several completions may share an event.
            for round in 0..ROUNDS {
                let burst = round % 8 + 1;
                for index in 0..burst {
                    outbox.fill_from(&pattern(round * 8 + index, 64)).unwrap();
                    a.send(outbox).unwrap();
                    outbox = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
                }
                for index in 0..burst {
                    let done = b.wait(DEADLINE).unwrap().ok().unwrap();
                    let inbox = done.buffer.unwrap();
                    assert!(*inbox == *pattern(round * 8 + index, 64), "{mode}: message {index} of round {round}");
                    b.receive(inbox).unwrap();
                    seen += 1;
                }
            }
            assert_eq!(seen, (0..ROUNDS).map(|round| round % 8 + 1).sum::<u64>());
            assert!(matches!(error_of(b.wait(Duration::from_millis(5))), Error::Timeout { .. }));
        });
    }
}

#[test]
fn arming_an_endpoint_reports_whether_to_wait_or_poll() {
    let Some(rdma) = device() else { return };
    with_events(&rdma, Mode::EXTENDED, |pd, a, b| {
        for buffer in pd.allocate(128).unwrap().into_chunks(64).unwrap() {
            b.receive(buffer).unwrap();
        }
        let (first, second) = pd.allocate(2).unwrap().into_split(1).unwrap();
        assert_eq!(b.arm().unwrap(), Armed::Wait, "nothing has happened yet");
        assert!(!is_readable(b.channel().unwrap(), NO_EVENT_WAIT));
        a.send(first).unwrap();
        assert!(is_readable(b.channel().unwrap(), DEADLINE));
        assert_eq!(b.arm().unwrap(), Armed::Poll, "a message has already arrived");
        let done = b.poll().unwrap().expect("the completion that arming has found").ok().unwrap();
        assert_eq!(done.byte_len, 1);
        assert!(b.poll().unwrap().is_none());
        assert_eq!(b.arm().unwrap(), Armed::Wait);
        a.send(second).unwrap();
        assert!(is_readable(b.channel().unwrap(), DEADLINE));
        assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().byte_len, 1);
    });
}

#[test]
fn threads_that_wait_on_one_channel_share_its_events() {
    const EVENTS: u64 = rounds(50, 4);
    let Some(rdma) = device() else { return };
    let channel = rdma.create_channel().unwrap();
    let mut lab = lab_with_events(&rdma, Mode::EXTENDED, &channel);
    let (id, taken) = (lab.b.cq.id(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let channel = channel.clone();
            scope.spawn(|| {
                let channel = channel;
                while taken.load(Ordering::SeqCst) < EVENTS {
                    // One thread gets the last event, and the wait of the other times out.
                    if let Some(event) = channel.wait(NO_EVENT_WAIT).unwrap() {
                        assert_eq!(event, id);
                        taken.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
        for count in 1..=EVENTS {
            lab.b.receive(count, 0..64).unwrap();
            lab.b.cq.arm(false).unwrap();
            send(&mut lab.a, count, SendFlags::empty());
            lab.b.next_ok(count);
            within_deadline("an event", || (taken.load(Ordering::SeqCst) == count).then_some(()));
        }
    });
    assert_eq!(channel.try_event().unwrap(), None);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no limit of descriptors")]
fn an_error_names_the_limit_of_file_descriptors() {
    let Some(rdma) = device() else { return };
    in_own_process("channel::an_error_names_the_limit_of_file_descriptors", || {
        // The lowest free number is the limit, so no descriptor is left.
        let used = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
        let limit = libc::rlimit { rlim_cur: used, rlim_max: used };
        // SAFETY: a valid structure for the duration of the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        let error = error_of(rdma.create_channel());
        let text = error.to_string();
        assert!(matches!(error, Error::CreateChannel { errno: Errno(libc::EMFILE) }), "{error:?}");
        assert!(text.contains("ulimit -n"), "{text}");
        let pd = rdma.pd();
        let error = error_of(rdma.endpoint(&pd).events(true).build());
        assert!(matches!(error, Error::CreateChannel { errno: Errno(libc::EMFILE) }), "{error:?}");
        rdma.endpoint(&pd).build().expect("without events no descriptor is needed");
    });
}

/// The first of two completions consumes the event, and the second causes none.
#[test]
fn two_completions_behind_one_event_are_both_polled() {
    let Some(rdma) = device() else { return };
    let channel = rdma.create_channel().unwrap();
    let mut lab = lab_with_events(&rdma, Mode::EXTENDED, &channel);
    lab.b.receive(1, 0..64).unwrap();
    lab.b.receive(2, 0..64).unwrap();
    lab.b.cq.arm(false).unwrap();
    send(&mut lab.a, 1, SendFlags::empty());
    send(&mut lab.a, 2, SendFlags::empty());
    assert_eq!(channel.wait(DEADLINE).unwrap(), Some(lab.b.cq.id()));
    assert_eq!(channel.try_event().unwrap(), None, "one event for one arm");
    let both = |cq: &mut CompletionQueue| (next_ok(cq, 1), next_ok(cq, 2));
    both(&mut lab.b.cq);
}
