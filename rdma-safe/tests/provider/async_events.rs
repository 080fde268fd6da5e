//! Asynchronous events of every kind, which soft0 does not raise, and failed reads.

use std::time::Instant;

use rdma_safe::async_event::{AsyncEvent, AsyncEventType, AsyncSource};
use rdma_safe::error::Verb;
use rdma_safe::{AsyncEvents, Context, Errno, Error};

use crate::fake::{Config, Element, Fake};
use crate::support::{DEADLINE, EXTENDED, Raw, raw_with};

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
        check(event_type, element, AsyncSource::Qp { id: qp.id(), number: qp.number() });
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
    assert_eq!(seen, AsyncEventType::KNOWN.len(), "every known kind is checked");
    assert_eq!(fake.unacknowledged(), 0);
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn an_event_of_an_unknown_kind_keeps_its_number_and_element() {
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
fn the_text_of_an_event_names_its_kind_and_object() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
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
fn a_device_without_asynchronous_events_is_refused_by_name() {
    let fake = Fake::new(Config { async_events: false, ..Config::default() });
    let error = fake.open().async_events().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { feature: "asynchronous events", .. }), "{error:?}");
    assert!(text.contains(fake.name()), "{text}");
    assert_eq!(fake.calls("ibv_get_async_event"), 0);
}

#[test]
fn a_failed_read_is_an_error() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    fake.fail("ibv_get_async_event", libc::EIO);
    let error = events.try_event().unwrap_err();
    assert!(
        matches!(error, Error::AsyncEvents { verb: Verb::GetAsyncEvent, errno: Errno(libc::EIO), .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains(fake.name()), "{error}");
    fake.heal("ibv_get_async_event");
    assert_eq!(events.try_event().unwrap(), None);
}

#[test]
fn an_interrupted_read_is_repeated() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    raise(&fake, &context, AsyncEventType::SM_CHANGE, Element::Number(2));
    fake.fail_once("ibv_get_async_event", libc::EINTR);
    assert_eq!(next(&events).source, AsyncSource::Port(2));
    assert_eq!(fake.calls("ibv_get_async_event"), 2);
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll(2)")]
fn waiting_for_events_of_a_removed_device_fails_at_once() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let events = context.async_events().unwrap();
    // The descriptor is readable by poll(2) without an event, like one whose other end is closed.
    fake.hang_up(&context);
    fake.fail("ibv_get_async_event", libc::EAGAIN);
    let start = Instant::now();
    let error = events.wait(DEADLINE).unwrap_err();
    assert!(matches!(error, Error::AsyncEvents { verb: Verb::PollFd, errno: Errno(libc::EIO), .. }), "{error:?}");
    assert!(start.elapsed() < DEADLINE);
}
