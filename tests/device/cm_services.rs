//! Datagram services that are found by address, and multicast groups that librdmacm joins.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};
use std::thread;
use std::time::{Duration, Instant};

use rdma_safe::cm::{
    Address, Cause, CmError, ConnectError, Connector, DATAGRAM_QKEY, DatagramListener, GroupMember, ServiceStatus, Step,
};
use rdma_safe::endpoint::DatagramSender;
use rdma_safe::{Buffer, DatagramEndpoint, Endpoint, Error, Gid, GidType, LinkLayer};

use crate::cm_connections::kernel_objects;
use crate::support::child::{in_own_process, open_files};
use crate::support::{DEADLINE, Rdma, device, error_of, lossless_device};

/// The device's IPv4 address, or `None` after printing why the test is skipped.
fn address(rdma: &Rdma) -> Option<Ipv4Addr> {
    let address = rdma.gid.gid.ipv4();
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

fn listener(address: Ipv4Addr) -> (DatagramListener, Address) {
    let listener = DatagramListener::bind((address, 0)).unwrap();
    let local = listener.local_address();
    (listener, local)
}

#[track_caller]
fn failure(error: Error) -> ConnectError {
    match error {
        Error::Cm(CmError::Connect(error)) => *error,
        other => panic!("{other:?}"),
    }
}

/// Waits for the next datagram.
#[track_caller]
fn arrival(endpoint: &mut DatagramEndpoint) -> (Buffer, DatagramSender) {
    loop {
        let done = endpoint.wait(DEADLINE).unwrap().ok().unwrap();
        if let Some(sender) = done.sender {
            return (done.work.buffer.expect("a receive has a buffer"), sender);
        }
    }
}

fn post(endpoint: &mut DatagramEndpoint, receives: usize) {
    for _ in 0..receives {
        let inbox = endpoint.pd().allocate(256).unwrap();
        endpoint.receive(inbox).unwrap();
    }
}

#[test]
fn a_service_is_found_and_answers() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            assert!(request.private_data().starts_with(b"who is there?\0"), "{request:?}");
            assert_eq!(request.local_address(), Some(local));
            assert_eq!(request.peer_address().unwrap().ip().unwrap().ip(), address);
            let pd = request.pd().unwrap();
            let mut endpoint = request.endpoint(Endpoint::builder(&pd).inline_data(32)).unwrap();
            assert_eq!((endpoint.qkey(), endpoint.port()), (DATAGRAM_QKEY, rdma.port));
            post(&mut endpoint, 1);
            request.accept(&endpoint, b"it is me").unwrap();
            let (question, sender) = arrival(&mut endpoint);
            assert_eq!(*question, *b"a question");
            let peer = endpoint.peer_of(&sender).unwrap();
            endpoint.send_inline(b"an answer", &peer).unwrap();
            let _ = endpoint.wait(DEADLINE).unwrap().ok().unwrap();
        });
        let connector = Connector::new().source((address, 0));
        let route = connector.resolve_datagrams(local).unwrap();
        assert_eq!(route.local_address().unwrap().ip().unwrap().ip(), address);
        let mut endpoint = route.endpoint(Endpoint::builder(route.pd()).inline_data(32)).unwrap();
        post(&mut endpoint, 1);
        let service = route.find(&endpoint, b"who is there?").unwrap();
        assert!(service.private_data.starts_with(b"it is me\0"), "{service:?}");
        // The peer stays usable without the connector that found it.
        drop(connector);
        endpoint.send_inline(b"a question", &service.peer).unwrap();
        let (answer, sender) = arrival(&mut endpoint);
        assert_eq!((&answer[..], sender.qp_num()), (&b"an answer"[..], service.peer.qp_num()));
    });
}

#[test]
fn one_endpoint_answers_many_requests_and_finds_many_services() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let mut serving: Option<DatagramEndpoint> = None;
            for _ in 0..3 {
                let request = listener.next(DEADLINE).unwrap().expect("a request in time");
                let pd = request.pd().unwrap();
                let endpoint = serving.get_or_insert_with(|| {
                    let mut endpoint = request.endpoint(Endpoint::builder(&pd)).unwrap();
                    post(&mut endpoint, 4);
                    endpoint
                });
                request.accept(endpoint, &[]).unwrap();
            }
            // The endpoint stays usable without its listener.
            drop(listener);
            let mut endpoint = serving.unwrap();
            let received = [(); 4].map(|()| arrival(&mut endpoint));
            (received.map(|(text, sender)| (text[0], sender.qp_num())), endpoint.queue_pair().number())
        });
        let connector = Connector::new();
        let (mut endpoint, first) = connector.find_datagrams(local.ip().unwrap()).unwrap();
        let mut found = vec![first];
        found.extend((0..2).map(|_| connector.resolve_datagrams(local).unwrap().find(&endpoint, &[]).unwrap()));
        let text = |byte| {
            let mut outbox = endpoint.pd().allocate(1).unwrap();
            outbox.fill_from(&[byte]).unwrap();
            outbox
        };
        let texts = [1, 2, 3, 4].map(text);
        for (text, service) in texts.into_iter().zip(found.iter().cycle()) {
            endpoint.send(text, &service.peer).unwrap();
        }
        let own = endpoint.queue_pair().number();
        let (received, number) = serving.join().unwrap();
        assert_eq!(received, [1, 2, 3, 4].map(|byte| (byte, own)));
        assert!(found.iter().all(|service| service.peer.qp_num() == number), "{found:?}");
    });
}

#[test]
fn a_missing_or_refusing_service_is_an_error() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let find = || failure(error_of(Connector::new().find_datagrams(local.ip().unwrap())));
    let refused = thread::scope(|scope| {
        let refusing = scope.spawn(|| {
            listener.next(DEADLINE).unwrap().expect("a request").reject(b"not today").unwrap();
            drop(listener.next(DEADLINE).unwrap().expect("a request"));
        });
        let errors = [(); 2].map(|()| find());
        refusing.join().unwrap();
        errors
    });
    for (error, expected) in refused.into_iter().zip([&b"not today\0"[..], b""]) {
        assert_eq!((error.step, error.peer), (Step::FindService, Some(local)));
        let Cause::Refused { status: ServiceStatus::REJECTED, private_data } = error.cause else { panic!("{error}") };
        assert!(private_data.starts_with(expected), "{private_data:?}");
    }
    drop(listener);
    let error = find();
    assert!(matches!(error.cause, Cause::Refused { status: ServiceStatus::UNSUPPORTED, .. }), "{error}");
    assert!(error.to_string().contains("start the peer first"), "{error}");
}

#[test]
fn finding_an_unresponsive_service_times_out() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    // The listener reads no request.
    let (listener, local) = listener(address);
    let (start, timeout) = (Instant::now(), Duration::from_millis(300));
    let error = failure(error_of(Connector::new().timeout(timeout).find_datagrams(local.ip().unwrap())));
    assert_eq!((error.step, error.cause), (Step::FindService, Cause::Timeout(timeout)));
    assert!(start.elapsed() < DEADLINE);
    drop(listener);
}

#[test]
fn an_endpoint_with_another_queue_key_neither_finds_nor_answers() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (mut listener, local) = listener(address);
    let other = rdma.endpoint(&rdma.pd()).build_datagrams(0x77).unwrap();
    let is_refused = |error: Error| {
        assert!(matches!(error, Error::Cm(CmError::OtherQueueKey { qkey: DATAGRAM_QKEY, endpoint: 0x77 })), "{error}");
    };
    is_refused(error_of(Connector::new().resolve_datagrams(local).unwrap().find(&other, &[])));
    thread::scope(|scope| {
        let asking = scope.spawn(|| failure(error_of(Connector::new().find_datagrams(local.ip().unwrap()))));
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        is_refused(error_of(request.accept(&other, &[])));
        let error = asking.join().unwrap();
        assert!(matches!(error.cause, Cause::Refused { status: ServiceStatus::REJECTED, .. }), "{error}");
    });
    let route = Connector::new().resolve_datagrams(local).unwrap();
    let endpoint = route.endpoint(Endpoint::builder(route.pd())).unwrap();
    let error = error_of(route.find(&endpoint, &[1; 181]));
    assert!(matches!(error, Error::Cm(CmError::PrivateData { len: 181, max: 180 })), "{error}");
}

/// A member of `group` with posted receives.
fn member(address: Ipv4Addr, group: Ipv4Addr, only_sends: bool) -> GroupMember {
    let route = Connector::new().source((address, 0)).resolve_group((group, 0)).unwrap();
    let route = if only_sends { route.send_only() } else { route };
    let pd = route.pd().clone();
    let mut member = route.join(Endpoint::builder(&pd).inline_data(32)).unwrap();
    post(&mut member.endpoint, 8);
    member
}

#[track_caller]
fn send_to_group(member: &mut GroupMember, text: &[u8]) {
    member.endpoint.send_inline(text, &member.peer).unwrap();
}

#[test]
fn group_members_receive_multicasts_until_they_leave() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    if rdma.query_port(rdma.port).unwrap().link_layer() != LinkLayer::ETHERNET {
        return println!("skipped: the subnet manager creates the groups");
    }
    let group = Ipv4Addr::new(239, 1, 2, 7);
    let mut members = [(); 2].map(|()| member(address, group, false));
    let mut speaker = member(address, group, true);
    for member in &mut members {
        assert_eq!((member.group(), member.gid()), ((group, 0).into(), Gid::from(group)));
        assert_eq!((member.peer.qp_num(), member.endpoint.qkey()), (0xff_ffff, DATAGRAM_QKEY));
        assert!(member.is_member().unwrap());
    }
    send_to_group(&mut speaker, b"for both");
    for member in &mut members {
        let (text, sender) = arrival(&mut member.endpoint);
        assert_eq!((&text[..], sender.qp_num()), (&b"for both"[..], speaker.endpoint.queue_pair().number()));
        assert_eq!(sender.grh().expect("a header").dgid(), Gid::from(group));
    }
    // A member that has left is reached by its own address only.
    let [first, mut second] = members;
    let mut alone = first.leave().unwrap();
    send_to_group(&mut second, b"for the other");
    assert_eq!(*arrival(&mut second.endpoint).0, *b"for the other");
    let direct = speaker.endpoint.peer(&alone.address()).unwrap();
    speaker.endpoint.send_inline(b"for you", &direct).unwrap();
    assert_eq!(*arrival(&mut alone).0, *b"for you");
    // A dropped member leaves the group. The address handle stays valid as long as it is held.
    let all = second.peer.clone();
    drop(second);
    drop(speaker);
    assert_eq!(all.qp_num(), 0xff_ffff);
}

/// IPv6 addresses of the port, with their interface as scope.
fn addresses_of_ipv6(rdma: &Rdma) -> Vec<SocketAddrV6> {
    let gids = rdma.gids(rdma.port).unwrap();
    let of_v6 = gids.iter().filter(|entry| entry.gid.ipv4().is_none() && entry.gid_type == rdma.gid.gid_type);
    of_v6.map(|entry| SocketAddrV6::new(entry.gid.into(), 0, 0, entry.interface_index)).collect()
}

#[test]
fn ipv6_services_are_found_and_ipv6_groups_joined_if_supported() {
    let Some(rdma) = lossless_device() else { return };
    let addresses = addresses_of_ipv6(&rdma);
    if addresses.is_empty() {
        return println!("skipped: the port has no IPv6 GID");
    }
    for own in addresses {
        println!("{own}");
        let mut listener = DatagramListener::bind_with(own, 4).unwrap();
        let local = listener.local_address();
        let connector = Connector::new().source(own);
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let request = listener.next(DEADLINE).unwrap().expect("a request in time");
                let pd = request.pd().unwrap();
                let mut endpoint = request.endpoint(Endpoint::builder(&pd)).unwrap();
                post(&mut endpoint, 1);
                request.accept(&endpoint, b"six").unwrap();
                assert_eq!(*arrival(&mut endpoint).0, *b"over six");
            });
            let route = connector.resolve_datagrams(local).unwrap();
            let mut endpoint = route.endpoint(Endpoint::builder(route.pd()).inline_data(32)).unwrap();
            let service = route.find(&endpoint, &[]).unwrap();
            assert!(service.private_data.starts_with(b"six\0"), "{service:?}");
            endpoint.send_inline(b"over six", &service.peer).unwrap();
            serving.join().unwrap();
        });
        let group = SocketAddrV6::new(Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 9), 0, 0, own.scope_id());
        let route = connector.resolve_group(group).unwrap();
        let pd = route.pd().clone();
        let joined = route.join(Endpoint::builder(&pd).inline_data(32));
        if rdma.gid.gid_type == GidType::ROCE_V2 {
            let error = failure(error_of(joined));
            assert_eq!((error.step, error.peer), (Step::JoinGroup, Some(group.into())));
            assert!(error.to_string().contains("only IPv4 groups"), "{error}");
            continue;
        }
        let mut member = joined.unwrap();
        assert_eq!(member.gid(), Gid::from(*group.ip()));
        post(&mut member.endpoint, 1);
        send_to_group(&mut member, b"to six");
        assert_eq!(*arrival(&mut member.endpoint).0, *b"to six");
    }
}

#[test]
fn a_group_needs_a_local_source_and_any_domain_of_the_device() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    // A documentation address (RFC 5737), which no device has.
    let nowhere = Connector::new().source((Ipv4Addr::new(192, 0, 2, 1), 0));
    let error = failure(error_of(nowhere.resolve_group((Ipv4Addr::new(239, 1, 2, 8), 0))));
    assert_eq!(error.step, Step::ResolveAddress);
    let connector = Connector::new().source((address, 0));
    let route = connector.resolve_group((Ipv4Addr::new(239, 1, 2, 8), 0)).unwrap();
    let other = rdma.pd();
    // A protection domain of the user on the same device is accepted.
    let member = route.join(Endpoint::builder(&other)).unwrap();
    assert!(member.endpoint.pd().is_same(&other));
}

#[test]
fn services_and_group_members_leak_nothing() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    if rdma.query_port(rdma.port).unwrap().link_layer() != LinkLayer::ETHERNET {
        return println!("skipped: the subnet manager creates the groups");
    }
    in_own_process("cm_services::services_and_group_members_leak_nothing", || {
        let (mut listener, local) = listener(address);
        let connector = Connector::new().source((address, 0));
        let mut before = None;
        for round in 0..50 {
            thread::scope(|scope| {
                let serving = scope.spawn(|| {
                    let request = listener.next(DEADLINE).unwrap().expect("a request in time");
                    let pd = request.pd().unwrap();
                    let endpoint = request.endpoint(Endpoint::builder(&pd)).unwrap();
                    // Every other request is dropped, and so rejected.
                    match round % 2 {
                        0 => request.accept(&endpoint, &[]).unwrap(),
                        _ => drop(request),
                    }
                });
                assert_eq!(connector.find_datagrams(local.ip().unwrap()).is_ok(), round % 2 == 0);
                serving.join().unwrap();
            });
            let route = connector.resolve_group((Ipv4Addr::new(239, 1, 2, 10), 0)).unwrap();
            let pd = route.pd().clone();
            let member = route.join(Endpoint::builder(&pd)).unwrap();
            match round % 2 {
                0 => drop(member.leave().unwrap()),
                _ => drop(member),
            }
            // The first round opens the device, here and in librdmacm.
            if round == 1 {
                before = Some((open_files(), kernel_objects()));
            }
        }
        assert_eq!(Some((open_files(), kernel_objects())), before);
    });
}
