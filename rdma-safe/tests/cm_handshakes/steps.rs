//! Steps, their retries and their deadlines.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use rdma_safe::cm::{Cause, Connector, DatagramListener, GroupMember, GroupRoute, Handshake, Listener, Progress, Step};
use rdma_safe::{Endpoint, Errno, Error};

use crate::network::{self, GROUP};
use crate::{Ends, SHORT, expect_objects, failure, pending, ready, sleep, timeout};

#[test]
fn each_step_of_resolving_is_retried() {
    let ends = Ends::new();
    let connector = ends.connector.clone().resolve_timeout(Duration::from_secs(5), 3);
    network::script(|script| (script.address_errors, script.route_errors) = (3, 3));
    let resolving = connector.start_resolve(ends.address()).unwrap();
    let route = ready(resolving);
    assert_eq!(route.local_address().unwrap().ip().unwrap().ip(), Ipv4Addr::LOCALHOST);
    assert_eq!((network::calls("resolve_addr"), network::calls("resolve_route")), (4, 4));
    for (address_errors, route_errors, step) in [(4, 0, Step::ResolveAddress), (3, 4, Step::ResolveRoute)] {
        network::script(|script| (script.address_errors, script.route_errors) = (address_errors, route_errors));
        let error = failure(connector.start_resolve(ends.address()).unwrap().advance());
        assert_eq!((error.step, error.cause), (step, Cause::Failed(Errno(libc::ETIMEDOUT))), "{error}");
    }
}

#[test]
fn advancing_without_an_event_changes_nothing() {
    let ends = Ends::new();
    let mut connecting = ends.connecting();
    let (deadline, before, calls) = (connecting.deadline(), network::objects(), network::calls("get_cm_event"));
    for _ in 0..100 {
        connecting = pending(connecting);
        assert_eq!((connecting.deadline(), connecting.step()), (deadline, Step::Connect));
    }
    expect_objects(before);
    assert_eq!(network::calls("get_cm_event") - calls, 100, "one call each");
}

#[test]
fn every_step_has_a_deadline() {
    let mut ends = Ends::new();
    let connector = ends.connector.clone().timeout(SHORT).resolve_timeout(Duration::from_millis(1), 1000);
    let before = network::objects();

    network::script(|script| script.loses_addresses = true);
    let error = timeout(connector.start_resolve(ends.address()).unwrap());
    assert_eq!((error.step, error.peer), (Step::ResolveAddress, Some(ends.address().into())));
    assert_eq!(error.cause, Cause::Timeout(Duration::from_millis(1001)));
    network::script(|script| (script.loses_addresses, script.loses_requests) = (false, true));

    let route = connector.resolve(ends.address()).unwrap();
    let error = timeout(route.prepare(Endpoint::builder(&ends.pd)).unwrap().start_connect(b"").unwrap());
    assert_eq!((error.step, error.cause), (Step::Connect, Cause::Timeout(SHORT)));

    let route = connector.resolve_datagrams(ends.address()).unwrap();
    let endpoint = route.endpoint(Endpoint::builder(&ends.pd)).unwrap();
    let error = timeout(route.start_find(&endpoint, b"").unwrap());
    assert_eq!((error.step, error.cause), (Step::FindService, Cause::Timeout(SHORT)));
    drop(endpoint);
    expect_objects(before);

    network::script(|script| (script.loses_requests, script.loses_confirmations) = (false, true));
    ends.listener = Listener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().pd(&ends.pd).timeout(SHORT);
    let connecting = ends.connecting();
    let accepting = ends.accepting();
    let mut connected = ready(connecting);
    let error = timeout(accepting);
    assert_eq!((error.step, error.cause), (Step::Accept, Cause::Timeout(SHORT)));
    assert!(!connected.is_connected().unwrap(), "the peer has given up");
}

#[test]
fn an_event_that_arrives_in_time_may_be_handled_after_the_deadline() {
    let mut ends = Ends::new();
    ends.connector = ends.connector.clone().timeout(SHORT);
    let connecting = ends.connecting();
    let accepting = ends.accepting();
    while Instant::now() < connecting.deadline() {
        std::hint::spin_loop();
    }
    let _connection = ready(connecting);
    assert!(ready(accepting).is_connected().unwrap());
}

#[test]
fn an_unlimited_timeout_has_a_far_deadline() {
    let ends = Ends::new();
    let connector = ends.connector.clone().timeout(Duration::MAX).resolve_timeout(Duration::MAX, 0);
    network::script(|script| script.loses_addresses = true);
    let resolving = pending(connector.start_resolve(ends.address()).unwrap());
    assert!(resolving.deadline() > Instant::now() + Duration::from_secs(86_400 * 365));
}

#[test]
fn the_removal_of_the_device_ends_a_handshake() {
    let ends = Ends::new();
    let connecting = ends.connecting();
    network::remove_device(connecting.channel().as_raw());
    assert_eq!(sleep([&connecting], None), 1);
    let error = failure(connecting.advance());
    assert_eq!((error.step, error.cause), (Step::Connect, Cause::DeviceRemoved));
}

#[test]
fn datagram_services_are_found_without_blocking() {
    let ends = Ends::new();
    let mut listener = DatagramListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().pd(&ends.pd);
    let find = |data: &[u8]| {
        let route = ready(ends.connector.start_resolve_datagrams(listener.local_address()).unwrap());
        let endpoint = route.endpoint(Endpoint::builder(&ends.pd)).unwrap();
        (route.start_find(&endpoint, data).unwrap(), endpoint)
    };
    let finding = [find(b"first"), find(b"second")];
    let abandoned = find(b"third");
    let serving = {
        assert_eq!(sleep([&listener], None), 1);
        let request = listener.next(Duration::ZERO).unwrap().expect("a request");
        assert_eq!(request.private_data(), b"first");
        let endpoint = request.endpoint(Endpoint::builder(&ends.pd)).unwrap();
        request.accept(&endpoint, b"found").unwrap();
        endpoint
    };
    drop(listener.next(Duration::ZERO).unwrap().expect("a request"));
    let [(found, _), (refused, _)] = finding;
    let service = ready(found);
    assert_eq!((&*service.private_data, service.peer.qp_num()), (&b"found"[..], serving.queue_pair().number()));
    let error = failure(refused.advance());
    assert!(matches!(error.cause, Cause::Refused { .. }), "{error}");
    drop(abandoned);
    let late = listener.next(Duration::ZERO).unwrap().expect("a request");
    assert_eq!(failure(late.accept(&serving, b"")).step, Step::Accept);
}

#[test]
fn a_group_is_joined_without_blocking() {
    let ends = Ends::new();
    let before = network::objects();
    let connector = ends.connector.clone().source((Ipv4Addr::LOCALHOST, 0));
    let resolving: Handshake<GroupRoute> = connector.start_resolve_group((GROUP, 0)).unwrap();
    assert!(resolving.deadline() <= Instant::now(), "there is nothing to wait for");
    let join = |route: GroupRoute| route.start_join(Endpoint::builder(&ends.pd)).unwrap();
    let joining: Handshake<GroupMember> = join(ready(resolving));
    let member = ready(joining);
    assert_eq!((member.group(), member.peer.qp_num()), ((GROUP, 0).into(), 0xff_ffff));
    drop(member);
    // Without a source, the address is resolved. Dropping leaves the group.
    let calls = network::calls("leave_multicast");
    drop(join(ready(ends.connector.start_resolve_group((GROUP, 0)).unwrap())));
    assert_eq!(network::calls("leave_multicast"), calls + 1);
    expect_objects(before);
}

#[test]
fn the_blocking_calls_return_the_errors_of_the_handshakes() {
    let ends = Ends::new();
    let connector = ends.connector.clone().timeout(SHORT);
    network::script(|script| script.loses_requests = true);
    let error = failure(connector.connect(ends.address()));
    assert_eq!((error.step, error.cause), (Step::Connect, Cause::Timeout(SHORT)));
    network::script(|script| script.loses_requests = false);
    drop(ends.listener);
    let error = failure(Connector::new().connect(error.peer.unwrap().ip().unwrap()));
    assert!(error.to_string().contains("start the peer first"), "{error}");
}

#[test]
fn waiting_for_a_handshake_started_elsewhere_ends_with_its_result() {
    let mut ends = Ends::new();
    let connecting = ends.connecting();
    let waiting = std::thread::spawn(|| connecting.wait());
    let accepting = ends.accepting();
    let mut client = waiting.join().unwrap().unwrap();
    let Ok(Progress::Ready(mut server)) = accepting.advance() else { panic!("the peer has confirmed") };
    ends.exchange(&mut client, &mut server, b"hello");
    assert!(matches!(client.wait(Duration::ZERO), Err(Error::Timeout { .. })));
}
