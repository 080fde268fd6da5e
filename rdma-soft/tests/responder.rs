//! Limits of what a peer may request of a responder.

#[allow(dead_code, reason = "used by simulations with two ends")]
mod sim_host;

use rdma_soft::transport::{Host, Outgoing, Responder, ResponderSettings};
use rdma_soft::wire::{Header, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer, Transport};
use sim_host::{BASE, MTU, RKEY, SimHost};

const SETTINGS: ResponderSettings =
    ResponderSettings { psn: Psn::new(0xff_fffe), mtu: MTU, resources: 2, min_rnr_timer: 1 };

/// A responder, and a peer whose requests the test chooses.
struct Peer {
    host: SimHost,
    responder: Responder,
}

impl Peer {
    fn new() -> Peer {
        Peer { host: SimHost::new(), responder: Responder::new(SETTINGS) }
    }

    /// Sends a request, `number` PSNs after the first.
    fn request(&mut self, number: u32, operation: Operation) {
        let header = Header {
            transport: Transport::Rc,
            operation,
            pkey: 0xffff,
            dest_qp: 2,
            psn: SETTINGS.psn.add(number),
            solicited: false,
            ack_request: true,
            migrated: true,
            congestion: (false, false),
        };
        self.responder.handle(&header, (&[]).into(), &mut self.host);
    }

    fn responses(&mut self) -> Vec<Outgoing> {
        std::iter::from_fn(|| self.responder.transmit(&self.host)).collect()
    }
}

fn read() -> Operation {
    Operation::ReadRequest(RemoteRange { address: BASE, rkey: RKEY, len: 8 })
}

fn empty_write() -> Operation {
    Operation::WriteOnly(RemoteRange { address: 0, rkey: 0, len: 0 }, None)
}

fn syndrome(outgoing: &Outgoing) -> Option<Syndrome> {
    match outgoing.operation {
        Operation::Acknowledge(ack) => Some(ack.syndrome),
        _ => None,
    }
}

#[test]
fn at_most_one_nak_is_pending() {
    let mut peer = Peer::new();
    for _ in 0..1000 {
        peer.request(0, Operation::SendOnly(Trailer::None));
    }
    let responses = peer.responses();
    assert_eq!(responses.iter().map(syndrome).collect::<Vec<_>>(), [Some(Syndrome::ReceiverNotReady(1))]);

    // One request arrives in order, and then one behind a gap.
    for number in 0..1000 {
        peer.request(number, empty_write());
        peer.request(number + 2, empty_write());
    }
    let responses = peer.responses();
    assert_eq!(responses.iter().map(syndrome).collect::<Vec<_>>(), [Some(Syndrome::Nak(Nak::SequenceError))]);
    assert_eq!(responses[0].psn, SETTINGS.psn.add(1000));
}

#[test]
fn a_retransmitted_read_counts_as_outstanding_once() {
    let mut peer = Peer::new();
    peer.request(0, read());
    peer.request(1, read());
    // A retransmission before the first response.
    peer.request(0, read());
    peer.request(0, read());
    // After the first response, the peer may have another read outstanding.
    assert!(matches!(peer.responder.transmit(&peer.host).unwrap().operation, Operation::ReadOnly(_)));
    peer.request(2, read());
    assert!(!peer.responder.has_failed());
    let psns: Vec<_> = peer.responses().iter().map(|response| response.psn.since(SETTINGS.psn)).collect();
    assert_eq!(psns, [1, 0, 0, 2]);
    // Three outstanding reads exceed the responder resources.
    (3..6).for_each(|number| peer.request(number, read()));
    assert_eq!(peer.responder.failure(), Some(Nak::InvalidRequest));
}

#[test]
fn a_duplicate_read_of_closed_memory_does_not_fail_the_connection() {
    let mut peer = Peer::new();
    peer.request(0, read());
    assert_eq!(peer.responses().len(), 1);
    // The peer has its response and tells the program by other means, which deregisters the region.
    peer.host.is_closed = true;
    peer.request(0, read());
    let responses = peer.responses();
    assert_eq!(responses.iter().map(syndrome).collect::<Vec<_>>(), [Some(Syndrome::Nak(Nak::RemoteAccess))]);
    assert_eq!(responses[0].psn, SETTINGS.psn, "the NAK must have the PSN of the read");
    assert!(!peer.responder.has_failed());
    peer.request(1, empty_write());
    assert_eq!(peer.responses().iter().map(syndrome).collect::<Vec<_>>(), [Some(Syndrome::ACK)]);
    // A new read of closed memory is fatal.
    peer.request(2, read());
    assert_eq!(peer.responder.failure(), Some(Nak::RemoteAccess));
    assert!(peer.host.receive().is_none());
}

#[test]
fn a_request_for_zero_bytes_needs_access_to_the_queue_pair_but_no_key() {
    let empty_read = || Operation::ReadRequest(RemoteRange { address: 0, rkey: 0, len: 0 });
    let empty_write_imm = || Operation::WriteOnly(RemoteRange { address: 0, rkey: 0, len: 0 }, Some(7));
    for request in [empty_write, empty_read, empty_write_imm] {
        let mut peer = Peer::new();
        peer.host.post_receive(1);
        peer.request(0, request());
        assert_eq!(peer.responses().iter().map(syndrome).collect::<Vec<_>>(), [answer(request())]);

        let mut peer = Peer::new();
        peer.host.post_receive(1);
        peer.host.denies_access = true;
        peer.request(0, request());
        assert_eq!(peer.responder.failure(), Some(Nak::RemoteAccess));
        assert!(peer.host.receive().is_some(), "the receive is not used up");
    }
}

/// The syndrome of the response to an accepted request; `None` in a response to a read.
fn answer(request: Operation) -> Option<Syndrome> {
    match request {
        Operation::ReadRequest(_) => None,
        _ => Some(Syndrome::ACK),
    }
}
