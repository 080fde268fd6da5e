//! Asynchronous events: each says what it is about, and none keeps an object from being destroyed.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rdma_safe::{AsyncEvent, AsyncEventType, AsyncEvents, AsyncSource, Context, Errno, Error, QpId, QueuePair};

use crate::fake::{Config, Element, Fake};
use crate::support::{DEADLINE, EXTENDED, Raw, on_each_interface, raw_with};

const OF_QUEUE_PAIRS: [AsyncEventType; 8] = [
    AsyncEventType::QP_FATAL,
    AsyncEventType::QP_REQ_ERR,
    AsyncEventType::QP_ACCESS_ERR,
    AsyncEventType::COMM_EST,
    AsyncEventType::SQ_DRAINED,
    AsyncEventType::PATH_MIG,
    AsyncEventType::PATH_MIG_ERR,
    AsyncEventType::QP_LAST_WQE_REACHED,
];

const OF_PORTS: [AsyncEventType; 7] = [
    AsyncEventType::PORT_ACTIVE,
    AsyncEventType::PORT_ERR,
    AsyncEventType::LID_CHANGE,
    AsyncEventType::PKEY_CHANGE,
    AsyncEventType::SM_CHANGE,
    AsyncEventType::CLIENT_REREGISTER,
    AsyncEventType::GID_CHANGE,
];

const OF_DEVICES: [AsyncEventType; 2] = [AsyncEventType::DEVICE_FATAL, AsyncEventType::DEVICE_SPEED_CHANGE];

fn queues(context: &Context) -> Raw {
    raw_with(&context.alloc_pd().unwrap(), EXTENDED, rdma_safe::WcFields::STANDARD, |qp| qp)
}

fn raise(fake: &Fake, context: &Context, event_type: AsyncEventType, element: Element) {
    fake.raise(context, event_type.0, element);
}

#[track_caller]
fn next(events: &AsyncEvents) -> AsyncEvent {
    events.try_event().unwrap().expect("an event")
}

fn of(qp: &QueuePair) -> AsyncSource {
    AsyncSource::Qp { id: qp.id(), number: qp.number() }
}

#[test]
fn every_kind_of_event_names_its_object() {
    let fake = Fake::new(Config::steering());
    let context = fake.open();
    let events = context.async_events().unwrap();
    assert_eq!(events.try_event().unwrap(), None);
    let Raw { qp, cq } = queues(&context);
    let pd = context.alloc_pd().unwrap();
    let srq = pd.shared_receive_queue(4).build().unwrap();
    let wq = pd.work_queue(&cq, 4).build().unwrap();
    let element = Element::Qp(qp.as_raw());
    let mut seen = 0;
    let mut check = |event_type, element, source| {
        raise(&fake, &context, event_type, element);
        let event = next(&events);
        assert_eq!((event.event_type, event.source), (event_type, source));
        seen += 1;
    };
    for event_type in OF_QUEUE_PAIRS {
        check(event_type, element, of(&qp));
    }
    for event_type in OF_PORTS {
        check(event_type, Element::Number(3), AsyncSource::Port(3));
    }
    for event_type in OF_DEVICES {
        check(event_type, Element::Number(1), AsyncSource::WholeDevice);
    }
    check(AsyncEventType::CQ_ERR, Element::Cq(cq.as_raw()), AsyncSource::Cq(cq.id()));
    for event_type in [AsyncEventType::SRQ_ERR, AsyncEventType::SRQ_LIMIT_REACHED] {
        check(event_type, Element::Srq(srq.as_raw()), AsyncSource::Srq(srq.id()));
    }
    let source = AsyncSource::Wq { id: wq.id(), number: wq.number() };
    check(AsyncEventType::WQ_FATAL, Element::Wq(wq.as_raw()), source);
    assert_eq!(seen, AsyncEventType::KNOWN.len(), "a kind is not looked at");
    assert_eq!(fake.unacknowledged(), 0);
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn an_unknown_kind_keeps_its_number_and_what_came_with_it() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    for kind in [21, 1000, u32::MAX] {
        fake.raise(&context, kind, Element::Number(-7));
        let event = next(&events);
        assert_eq!((event.event_type, event.source), (AsyncEventType(kind), AsyncSource::Unknown(-7)));
        assert_eq!(event.to_string(), format!("asynchronous event {kind}: element -7"));
    }
}

#[test]
fn an_event_says_in_words_what_happened_to_what() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    let Raw { qp, .. } = queues(&context);
    raise(&fake, &context, AsyncEventType::QP_FATAL, Element::Qp(qp.as_raw()));
    assert_eq!(next(&events).to_string(), format!("QP_FATAL: queue pair {:#08x}", qp.number()));
    raise(&fake, &context, AsyncEventType::PORT_ERR, Element::Number(1));
    assert_eq!(next(&events).to_string(), "PORT_ERR: port 1");
    raise(&fake, &context, AsyncEventType::DEVICE_FATAL, Element::Number(0));
    assert_eq!(next(&events).to_string(), "DEVICE_FATAL: device");
    let srq = context.alloc_pd().unwrap().shared_receive_queue(4).build().unwrap();
    raise(&fake, &context, AsyncEventType::SRQ_ERR, Element::Srq(srq.as_raw()));
    let text = next(&events).to_string();
    let number = text.strip_prefix("SRQ_ERR: shared receive queue ").expect("the kind and the object");
    assert!(number.parse::<u64>().is_ok_and(|number| number > 0), "{text}");
}

#[test]
fn an_object_whose_event_is_held_can_be_destroyed() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let events = context.async_events().unwrap();
        let Raw { qp, cq } = raw_with(&context.alloc_pd().unwrap(), interfaces, rdma_safe::WcFields::STANDARD, |qp| qp);
        raise(fake, &context, AsyncEventType::QP_FATAL, Element::Qp(qp.as_raw()));
        raise(fake, &context, AsyncEventType::CQ_ERR, Element::Cq(cq.as_raw()));
        let held = [next(&events), next(&events)];
        assert_eq!(fake.unacknowledged(), 0, "acknowledged as it was read");
        let sources = [of(&qp), AsyncSource::Cq(cq.id())];
        // The provider complains of a destruction that would wait.
        qp.destroy().unwrap();
        drop(cq);
        assert_eq!(held.map(|event| event.source), sources, "what it says of an object that is gone stays");
        assert_eq!(fake.live().qps + fake.live().cqs, 0);
    });
}

#[test]
fn the_events_of_an_object_that_is_gone_are_gone() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    let Raw { qp, cq } = queues(&context);
    raise(&fake, &context, AsyncEventType::COMM_EST, Element::Qp(qp.as_raw()));
    raise(&fake, &context, AsyncEventType::PORT_ERR, Element::Number(1));
    raise(&fake, &context, AsyncEventType::CQ_ERR, Element::Cq(cq.as_raw()));
    drop(qp);
    drop(cq);
    assert_eq!(next(&events).source, AsyncSource::Port(1));
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn queue_pairs_are_told_apart_for_ever() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let mut seen = BTreeMap::new();
    for round in 0..8 {
        let raw = if round % 2 == 0 { queues(&context) } else { queues(&fake.open()) };
        assert_eq!(seen.insert(format!("{:?}", raw.qp.id()), raw.qp.number()), None);
        let id: QpId = raw.qp.id();
        assert_eq!(id, raw.qp.id());
    }
}

#[test]
fn events_keep_the_device_open_and_nothing_else() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    let other = events.clone();
    raise(&fake, &context, AsyncEventType::GID_CHANGE, Element::Number(1));
    drop((context, events));
    assert_eq!(fake.live().contexts, 1);
    assert_eq!(next(&other).event_type, AsyncEventType::GID_CHANGE);
    assert_eq!(other.context().device_name(), fake.name());
    drop(other);
    assert_eq!(fake.live().contexts, 0);
}

#[test]
fn a_device_without_events_says_so() {
    let fake = Fake::new(Config { async_events: false, ..Config::default() });
    let error = fake.open().async_events().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { feature: "asynchronous events", .. }), "{error:?}");
    assert!(text.contains(fake.name()), "{text}");
    assert_eq!(fake.calls("ibv_get_async_event"), 0);
}

#[test]
fn a_failed_read_is_an_error_and_not_the_absence_of_events() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    fake.fail("ibv_get_async_event", libc::EIO);
    let error = events.try_event().unwrap_err();
    assert!(
        matches!(error, Error::AsyncEvents { call: "ibv_get_async_event", errno: Errno(libc::EIO), .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains(fake.name()), "{error}");
    fake.heal("ibv_get_async_event");
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn a_read_that_is_interrupted_is_repeated() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    raise(&fake, &context, AsyncEventType::SM_CHANGE, Element::Number(2));
    fake.fail_once("ibv_get_async_event", libc::EINTR);
    assert_eq!(next(&events).source, AsyncSource::Port(2));
    assert_eq!(fake.calls("ibv_get_async_event"), 2);
}

#[test]
fn the_descriptor_does_not_block() {
    use std::os::fd::AsFd;

    let fake = Fake::new(Config::default());
    let events = fake.open().async_events().unwrap();
    // SAFETY: the descriptor is open; asking for flags changes nothing.
    let flags = unsafe { libc::fcntl(events.as_fd().as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0);
}

#[test]
fn each_event_goes_to_one_of_many_threads() {
    const READERS: usize = 4;
    const EVENTS: u32 = if cfg!(miri) { 20 } else { 400 };
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let seen = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            let (events, seen) = (context.async_events().unwrap(), &seen);
            scope.spawn(move || {
                let start = Instant::now();
                while seen.lock().unwrap().len() < EVENTS as usize && start.elapsed() < DEADLINE {
                    match events.try_event().unwrap() {
                        Some(event) => seen.lock().unwrap().push(event.source),
                        None => std::thread::yield_now(),
                    }
                }
            });
        }
        for port in 1..=EVENTS {
            raise(&fake, &context, AsyncEventType::PORT_ACTIVE, Element::Number(port as i32));
        }
    });
    let mut seen = seen.into_inner().unwrap();
    seen.sort_by_key(|source| if let AsyncSource::Port(port) = source { *port } else { 0 });
    assert!(seen.iter().copied().eq((1..=EVENTS).map(AsyncSource::Port)), "{seen:?}");
}

#[test]
fn objects_come_and_go_while_their_events_are_read() {
    let rounds = if cfg!(miri) { 5 } else { 200 };
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (events, done) = (context.async_events().unwrap(), &done);
        scope.spawn(move || {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                // What it names may be gone already; the provider complains of a stale pointer.
                if events.try_event().unwrap().is_none() {
                    std::thread::yield_now();
                }
            }
        });
        let start = Instant::now();
        for _ in 0..rounds {
            let raw = queues(&context);
            raise(&fake, &context, AsyncEventType::QP_FATAL, Element::Qp(raw.qp.as_raw()));
            // A real library waits in the destruction; this one complains.
            while (fake.queued(&context) > 0 || fake.unacknowledged() > 0) && start.elapsed() < DEADLINE {
                std::thread::yield_now();
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

// Miri has no poll(2).
#[cfg(not(miri))]
mod waiting {
    use super::*;

    #[test]
    fn waiting_for_an_event_ends_in_time() {
        let fake = Fake::new(Config::default());
        let events = fake.open().async_events().unwrap();
        let wait = Duration::from_millis(20);
        let start = Instant::now();
        assert_eq!(events.wait(wait).unwrap(), None);
        assert!(start.elapsed() >= wait && start.elapsed() < DEADLINE);
        assert_eq!(events.wait(Duration::ZERO).unwrap(), None);
    }

    #[test]
    fn an_event_ends_a_wait_of_any_length() {
        let fake = Fake::new(Config::default());
        let context = fake.open();
        let events = context.async_events().unwrap();
        for timeout in [DEADLINE, Duration::MAX] {
            let start = Instant::now();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| events.wait(timeout).unwrap().unwrap());
                std::thread::sleep(Duration::from_millis(10));
                raise(&fake, &context, AsyncEventType::PORT_ACTIVE, Element::Number(1));
                assert_eq!(waiter.join().unwrap().event_type, AsyncEventType::PORT_ACTIVE);
            });
            assert!(start.elapsed() < DEADLINE);
        }
        raise(&fake, &context, AsyncEventType::PORT_ERR, Element::Number(1));
        assert_eq!(events.wait(Duration::ZERO).unwrap().unwrap().event_type, AsyncEventType::PORT_ERR);
    }

    #[test]
    fn a_wait_for_events_of_a_device_that_is_gone_fails_at_once() {
        let fake = Fake::new(Config::default());
        let context = fake.open();
        let events = context.async_events().unwrap();
        // As a descriptor with nobody at the other end: readable by poll(2), without an event.
        fake.hang_up(&context);
        fake.fail("ibv_get_async_event", libc::EAGAIN);
        let start = Instant::now();
        let error = events.wait(DEADLINE).unwrap_err();
        assert!(matches!(error, Error::AsyncEvents { call: "poll(2)", errno: Errno(libc::EIO), .. }), "{error:?}");
        assert!(start.elapsed() < DEADLINE);
    }
}
