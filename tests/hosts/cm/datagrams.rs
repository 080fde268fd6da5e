//! Lookups of datagram services, and datagrams.

use std::net::SocketAddr;

use rdma_safe::cm::{Cause, DatagramListener, DatagramRequest, ServiceStatus, Step};
use rdma_safe::endpoint::DatagramEndpoint;
use rdma_safe::{Endpoint, Peer};

use super::pair::{Pair, failure, pattern};
use crate::lab::LIMIT;

/// Greatest lengths of private data.
const LOOKUP: usize = 180;
const ANSWER: usize = 136;

const MESSAGE: usize = 500;

fn listen(_: &Pair, at: SocketAddr) -> DatagramListener {
    DatagramListener::bind(at).unwrap()
}

/// Waits for a datagram, and returns its sender.
fn receive(endpoint: &mut DatagramEndpoint, expected: &[u8]) -> Peer {
    loop {
        let done = endpoint.wait(LIMIT).unwrap().ok().unwrap();
        if let Some(sender) = done.sender {
            assert_eq!(done.work.buffer.as_deref(), Some(expected));
            return endpoint.peer_of(&sender).unwrap();
        }
    }
}

fn send(endpoint: &mut DatagramEndpoint, message: &[u8], to: &Peer) {
    let mut outbox = endpoint.pd().allocate(message.len()).unwrap();
    outbox.fill_from(message).unwrap();
    endpoint.send(outbox, to).unwrap();
}

/// The next lookup without private data.
///
/// Linux reports a retransmission of the first lookup as another lookup if the program has answered before it arrives.
fn next_other(listener: &mut DatagramListener) -> DatagramRequest {
    loop {
        let request = listener.next(LIMIT).unwrap().expect("a lookup in time");
        if request.private_data() != pattern::<LOOKUP>(5) {
            return request;
        }
    }
}

/// A lookup with private data finds a service, which then answers a datagram. Another lookup is refused.
pub(super) fn lookups(pair: &mut Pair) {
    pair.in_both_roles(
        "lookups of a datagram service",
        listen,
        |_, mut listener| {
            let request = listener.next(LIMIT).unwrap().expect("a lookup in time");
            assert_eq!(request.private_data(), pattern::<LOOKUP>(5));
            let pd = request.pd().unwrap();
            let mut endpoint = request.endpoint(Endpoint::builder(&pd)).unwrap();
            endpoint.receive(pd.allocate(MESSAGE).unwrap()).unwrap();
            request.accept(&endpoint, &pattern::<ANSWER>(6)).unwrap();
            let peer = receive(&mut endpoint, &pattern::<MESSAGE>(7));
            send(&mut endpoint, &pattern::<MESSAGE>(8), &peer);
            next_other(&mut listener).reject(&pattern::<ANSWER>(9)).unwrap();
        },
        |pair, to| {
            let route = pair.connector.resolve_datagrams(to).unwrap();
            let mut endpoint = route.endpoint(Endpoint::builder(route.pd())).unwrap();
            endpoint.receive(route.pd().allocate(MESSAGE).unwrap()).unwrap();
            let service = route.find(&endpoint, &pattern::<LOOKUP>(5)).unwrap();
            assert_eq!(*service.private_data, pattern::<ANSWER>(6));
            send(&mut endpoint, &pattern::<MESSAGE>(7), &service.peer);
            receive(&mut endpoint, &pattern::<MESSAGE>(8));
            let error = failure(pair.connector.find_datagrams(to));
            let Cause::Refused { status: ServiceStatus::REJECTED, private_data } = error.cause else {
                panic!("{error}")
            };
            assert_eq!(error.step, Step::FindService);
            assert_eq!(*private_data, pattern::<ANSWER>(9));
        },
    );
}

/// Nobody listens for datagrams at a port.
pub(super) fn missing_services(pair: &mut Pair) {
    pair.in_both_roles(
        "a port without a datagram service",
        |_, _| (),
        |_, ()| (),
        |pair, to| {
            let error = failure(pair.connector.find_datagrams(to));
            assert!(matches!(error.cause, Cause::Refused { status: ServiceStatus::UNSUPPORTED, .. }), "{error}");
        },
    );
}
