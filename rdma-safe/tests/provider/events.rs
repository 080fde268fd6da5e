//! Completion channels: no wakeup is lost, and no event is left over.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rdma_safe::endpoint::Armed;
use rdma_safe::error::Verb;
use rdma_safe::{CompletionQueue, Endpoint, EndpointSet, Errno, Error, ProtectionDomain, Work};

use crate::endpoint_sets::{Service, pool};
use crate::fake::{Config, Cqe, Fake};
use crate::support::{
    DEADLINE, EXTENDED, Interfaces, builder, connect, done, in_flight, nothing, on_each_interface, seen,
};

const SHORT: Duration = Duration::from_millis(1);

fn queue(pd: &ProtectionDomain, interfaces: Interfaces, channel: &rdma_safe::CompletionChannel) -> CompletionQueue {
    let builder = pd.context().completion_queue(16).channel(channel);
    builder.classic(!interfaces.extended_cq).build().unwrap()
}

fn complete(fake: &Fake, cq: &CompletionQueue, wr_id: u64) {
    fake.inject(cq.as_raw(), Cqe { wr_id, ..Cqe::default() });
}

fn endpoints(pd: &ProtectionDomain, interfaces: Interfaces) -> (Endpoint, Endpoint) {
    let build = || crate::support::builder(pd, interfaces).events(true).build().unwrap();
    let (mut a, mut b) = (build(), build());
    connect(&mut a, &mut b);
    (a, b)
}

#[test]
fn an_armed_queue_reports_its_next_completion_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let channel = pd.context().create_channel().unwrap();
        let mut cq = queue(&pd, interfaces, &channel);
        complete(fake, &cq, 1);
        assert_eq!(channel.try_event().unwrap(), None, "not armed");
        cq.arm(false).unwrap();
        assert_eq!(channel.try_event().unwrap(), None, "completions from before arming raise no event");
        complete(fake, &cq, 2);
        complete(fake, &cq, 3);
        assert_eq!(channel.try_event().unwrap(), Some(cq.id()));
        assert_eq!(channel.try_event().unwrap(), None, "arming raises one event");
        assert_eq!(seen(&mut cq).len(), 3);
        assert_eq!(fake.calls("ibv_ack_cq_events"), 1, "acknowledged when it is read");
    });
}

#[test]
fn arming_an_endpoint_without_events_fails_and_keeps_its_completions() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let build = || builder(&pd, interfaces).keepalive(Duration::from_secs(10)).build().unwrap();
        let (mut a, mut b) = (build(), build());
        connect(&mut a, &mut b);
        for number in 0..2 {
            b.receive(pd.allocate(16).unwrap()).unwrap();
            let mut buffer = pd.allocate(16).unwrap();
            buffer.fill_from(&[number]).unwrap();
            a.send(buffer).unwrap();
            if number == 0 {
                // The keepalive takes completions before the queue is armed.
                assert!(matches!(a.arm(), Err(Error::NoChannel)));
            }
        }
        for number in 0..2 {
            assert_eq!(a.poll().unwrap().and_then(|done| done.buffer).as_deref(), Some(&[number][..]));
        }
        assert!(a.poll().unwrap().is_none());
        assert_eq!(in_flight(&a), (0, 0));
    });
}

#[test]
fn events_on_a_shared_channel_identify_their_queue() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let channel = pd.context().create_channel().unwrap();
        let mut queues = [(); 3].map(|()| queue(&pd, interfaces, &channel));
        for cq in &mut queues {
            cq.arm(false).unwrap();
        }
        complete(fake, &queues[2], 1);
        complete(fake, &queues[0], 1);
        let ids = [channel.try_event().unwrap().unwrap(), channel.try_event().unwrap().unwrap()];
        assert_eq!(ids, [queues[2].id(), queues[0].id()]);
        assert_ne!(queues[0].id(), queues[1].id());
    });
}

#[test]
fn a_queue_armed_for_solicited_completions_sleeps_through_others() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let channel = pd.context().create_channel().unwrap();
        let mut cq = queue(&pd, interfaces, &channel);
        cq.arm(true).unwrap();
        complete(fake, &cq, 1);
        assert_eq!(channel.try_event().unwrap(), None);
        fake.inject(cq.as_raw(), Cqe { wr_id: 2, status: 5, ..Cqe::default() });
        assert_eq!(channel.try_event().unwrap(), Some(cq.id()), "an error counts as solicited");
    });
}

#[test]
fn events_of_a_destroyed_queue_are_dropped() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let channel = pd.context().create_channel().unwrap();
        let (mut first, mut second) = (queue(&pd, interfaces, &channel), queue(&pd, interfaces, &channel));
        first.arm(false).unwrap();
        second.arm(false).unwrap();
        complete(fake, &first, 1);
        complete(fake, &second, 1);
        drop(first);
        assert_eq!(channel.try_event().unwrap(), Some(second.id()));
        assert_eq!(channel.try_event().unwrap(), None);
    });
}

#[test]
fn what_cannot_be_armed_says_why() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let builder = pd.context().completion_queue(4);
        let mut cq = builder.classic(!interfaces.extended_cq).build().unwrap();
        let error = cq.arm(false).unwrap_err();
        assert!(matches!(error, Error::NoChannel), "{error}");
        assert_eq!(fake.calls("ibv_req_notify_cq"), 0);
        let channel = pd.context().create_channel().unwrap();
        let mut cq = queue(&pd, interfaces, &channel);
        fake.fail("ibv_req_notify_cq", libc::EIO);
        let error = cq.arm(false).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::ReqNotifyCq, errno: Errno(libc::EIO), .. }), "{error}");
        fake.fail("ibv_get_cq_event", libc::EIO);
        let error = channel.try_event().unwrap_err();
        assert!(matches!(error, Error::Channel { verb: Verb::GetCqEvent, errno: Errno(libc::EIO) }), "{error}");
    });
}

#[test]
fn the_descriptor_is_ready_while_there_is_an_event() {
    use std::os::fd::AsFd;

    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let channel = pd.context().create_channel().unwrap();
    let fd = channel.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and reading its flags changes nothing.
    assert_ne!(unsafe { libc::fcntl(fd, libc::F_GETFL) } & libc::O_NONBLOCK, 0, "an empty channel does not block");
    assert_eq!(channel.try_event().unwrap(), None);
}

#[test]
fn arming_an_endpoint_reports_completions_that_are_already_there() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(pd.allocate(8).unwrap()).unwrap();
        b.receive(pd.allocate(8).unwrap()).unwrap();
        assert_eq!(b.arm().unwrap(), Armed::Wait, "no completion yet: an event will follow");
        a.send(pd.allocate(3).unwrap()).unwrap();
        assert!(b.channel().unwrap().try_event().unwrap().is_some());
        assert_eq!(b.arm().unwrap(), Armed::Poll, "the completion is already there");
        assert_eq!(done(&mut b).byte_len, 3);
        assert_eq!(b.arm().unwrap(), Armed::Wait);
        nothing(&mut b);

        let armed = fake.calls("ibv_req_notify_cq");
        let reads = fake.calls("ibv_get_cq_event");
        assert_eq!(a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap().len(), 3);
        assert_eq!((fake.calls("ibv_req_notify_cq"), fake.calls("ibv_get_cq_event")), (armed, reads));
    });
}

#[test]
fn a_set_reads_its_channel_once_for_each_event() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let pool = pool(&pd);
        let set = EndpointSet::builder(pd.context(), 64).events(true).classic_poll(!interfaces.extended_cq);
        let mut service = Service { set: set.build().unwrap(), keys: Vec::new(), peers: Vec::new() };
        service.add(&pd, interfaces, Some(&pool));
        let before = fake.calls("ibv_get_cq_event");
        let reads = || fake.calls("ibv_get_cq_event") - before;
        assert_eq!((service.set.arm().unwrap(), reads()), (Armed::Wait, 0), "the first event comes after arming");
        for event in 1..=3 {
            service.say(0, b"message");
            assert_eq!(service.next_text(), (0, b"message".to_vec()));
            assert_eq!((service.set.arm().unwrap(), reads()), (Armed::Wait, event));
        }
        // Without an event, arming raises one more at most.
        assert_eq!((service.set.arm().unwrap(), reads()), (Armed::Wait, 4));
        service.say(0, b"message");
        assert_eq!(service.next_text(), (0, b"message".to_vec()));
        assert_eq!((service.set.arm().unwrap(), reads()), (Armed::Wait, 5));

        // Another queue has the same channel.
        let channel = service.set.channel().unwrap().clone();
        let mut other = queue(&pd, interfaces, &channel);
        other.arm(false).unwrap();
        complete(fake, &other, 1);
        assert_eq!(service.set.arm().unwrap(), Armed::Wait);
        assert_eq!(channel.try_event().unwrap(), None, "all events are taken");
    });
}

#[test]
fn an_endpoint_without_events_cannot_be_armed() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut endpoint = crate::support::builder(&pd, interfaces).build().unwrap();
        assert!(endpoint.channel().is_none());
        let error = endpoint.arm().unwrap_err();
        assert!(matches!(error, Error::NoChannel), "{error}");
        let error = endpoint.wait(SHORT).unwrap_err();
        assert!(matches!(error, Error::Timeout { waited: SHORT }), "{error}");
    });
}

// Miri has no poll(2).
#[cfg(not(miri))]
mod waiting {
    use super::*;

    #[test]
    fn waiting_for_nothing_ends_in_time() {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let channel = pd.context().create_channel().unwrap();
            let wait = Duration::from_millis(20);
            let start = Instant::now();
            assert_eq!(channel.wait(wait).unwrap(), None);
            assert!(start.elapsed() >= wait);
            assert_eq!(channel.wait(Duration::ZERO).unwrap(), None);

            let (mut a, _b) = endpoints(&pd, interfaces);
            let start = Instant::now();
            let error = a.wait(wait).unwrap_err();
            assert!(matches!(error, Error::Timeout { waited } if waited == wait), "{error}");
            assert!(start.elapsed() >= wait && start.elapsed() < DEADLINE);
            assert!(error.to_string().contains("the peer may be gone"), "{error}");
        });
    }

    #[test]
    fn a_wait_is_ended_by_another_thread() {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let (mut a, mut b) = endpoints(&pd, interfaces);
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for length in 1..=200 {
                        a.send(pd.allocate(length).unwrap()).unwrap();
                        assert_eq!(a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap().len(), length);
                    }
                });
                for length in 1..=200 {
                    b.receive(pd.allocate(200).unwrap()).unwrap();
                    assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().byte_len, length);
                }
            });
            assert!(start.elapsed() < DEADLINE, "a lost wakeup would end only by the timeout");
        });
    }

    #[test]
    fn draining_the_channel_from_outside_loses_no_wakeup() {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let (mut a, mut b) = endpoints(&pd, interfaces);
            for _ in 0..2 {
                b.receive(pd.allocate(8).unwrap()).unwrap();
            }
            assert_eq!(b.arm().unwrap(), Armed::Wait);
            a.send(pd.allocate(1).unwrap()).unwrap();
            while b.channel().unwrap().try_event().unwrap().is_some() {}
            assert_eq!(done(&mut b).byte_len, 1);
            nothing(&mut b);
            // The queue is no longer armed, since other code has read its event.
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    a.send(pd.allocate(2).unwrap()).unwrap();
                });
                assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().byte_len, 2);
            });
            assert!(start.elapsed() < DEADLINE);
        });
    }

    #[test]
    fn an_old_event_does_not_end_a_wait() {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let (mut a, mut b) = endpoints(&pd, interfaces);
            b.receive(pd.allocate(8).unwrap()).unwrap();
            assert_eq!(b.arm().unwrap(), Armed::Wait);
            a.send(pd.allocate(1).unwrap()).unwrap();
            assert_eq!(done(&mut b).byte_len, 1);
            // The event of that completion is still in the channel.
            let error = b.wait(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
        });
    }

    #[test]
    fn unsignaled_work_does_not_end_a_wait() {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let (mut a, _b) = endpoints(&pd, interfaces);
            let exposed = pd.expose(rdma_safe::mr::Pages::new(8).unwrap(), rdma_safe::Access::REMOTE_WRITE).unwrap();
            for _ in 0..4 {
                a.post(Work::write_inline(b"x", exposed.remote()).unsignaled()).unwrap();
            }
            let error = a.wait(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert_eq!(in_flight(&a), (0, 0));
        });
    }

    #[test]
    fn an_endpoint_does_not_wait_to_be_armed() {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let mut endpoint = builder(&pd, EXTENDED).events(true).build().unwrap();
        endpoint.channel().unwrap().set_blocking(true).unwrap();
        assert_eq!(endpoint.arm().unwrap(), Armed::Wait);
    }
}

#[test]
fn arming_closes_a_forgotten_cursor() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let channel = pd.context().create_channel().unwrap();
    let mut cq = pd.context().completion_queue(8).channel(&channel).build().unwrap();
    fake.inject(cq.as_raw(), Cqe { wr_id: 1, ..Cqe::default() });
    let mut poll = cq.poll();
    assert!(poll.next().unwrap().is_some());
    std::mem::forget(poll);
    // The provider reports a call while its lock is held.
    cq.arm(false).unwrap();
}
