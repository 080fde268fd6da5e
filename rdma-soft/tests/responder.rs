//! What a peer may ask of a responder, and how much of it is kept.

#[allow(dead_code, reason = "of simulations with two ends")]
mod machine;

use machine::{BASE, MTU, Machine, RKEY};
use rdma_soft::transport::{Host, Outgoing, Responder, ResponderSettings};
use rdma_soft::wire::{Header, Nak, Operation, Psn, RemoteRange, Syndrome, Trailer, Transport};

const SETTINGS: ResponderSettings =
    ResponderSettings { psn: Psn::new(0xff_fffe), mtu: MTU, resources: 2, min_rnr_timer: 1 };

/// A responder, and a peer whose packets come in the order in which the test gives them.
struct Peer {
    machine: Machine,
    responder: Responder,
}

impl Peer {
    fn new() -> Peer {
        Peer { machine: Machine::new(), responder: Responder::new(SETTINGS) }
    }

    /// Packets after the first that is expected.
    fn ask(&mut self, number: u32, operation: Operation) {
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
        self.responder.handle(&header, &[], &mut self.machine);
    }

    fn answers(&mut self) -> Vec<Outgoing> {
        std::iter::from_fn(|| self.responder.transmit(&self.machine)).collect()
    }
}

fn read() -> Operation {
    Operation::ReadRequest(RemoteRange { address: BASE, rkey: RKEY, len: 8 })
}

fn nothing() -> Operation {
    Operation::WriteOnly(RemoteRange { address: 0, rkey: 0, len: 0 }, None)
}

fn refusal(outgoing: &Outgoing) -> Option<Syndrome> {
    match outgoing.operation {
        Operation::Acknowledge(ack) => Some(ack.syndrome),
        _ => None,
    }
}

#[test]
fn however_often_a_peer_is_refused_one_refusal_waits_to_be_sent() {
    let mut peer = Peer::new();
    for _ in 0..1000 {
        peer.ask(0, Operation::SendOnly(Trailer::None));
    }
    let answers = peer.answers();
    assert_eq!(answers.iter().map(refusal).collect::<Vec<_>>(), [Some(Syndrome::ReceiverNotReady(1))]);

    // One after the other is done, and what comes between is always missing.
    for number in 0..1000 {
        peer.ask(number, nothing());
        peer.ask(number + 2, nothing());
    }
    let answers = peer.answers();
    assert_eq!(answers.iter().map(refusal).collect::<Vec<_>>(), [Some(Syndrome::Nak(Nak::SequenceError))]);
    assert_eq!(answers[0].psn, SETTINGS.psn.add(1000));
}

#[test]
fn what_is_asked_for_again_before_it_was_answered_is_outstanding_once() {
    let mut peer = Peer::new();
    peer.ask(0, read());
    peer.ask(1, read());
    // No answer has come yet: a probe.
    peer.ask(0, read());
    peer.ask(0, read());
    // The answer to the first comes, after which the peer may have another one outstanding.
    assert!(matches!(peer.responder.transmit(&peer.machine).unwrap().operation, Operation::ReadOnly(_)));
    peer.ask(2, read());
    assert!(!peer.responder.has_failed());
    let of: Vec<_> = peer.answers().iter().map(|answer| answer.psn.since(SETTINGS.psn)).collect();
    assert_eq!(of, [1, 0, 0, 2]);
    // More than that is too many.
    (3..6).for_each(|number| peer.ask(number, read()));
    assert_eq!(peer.responder.failure(), Some(Nak::InvalidRequest));
}

#[test]
fn a_read_that_comes_twice_finds_its_memory_closed_and_harms_nobody() {
    let mut peer = Peer::new();
    peer.ask(0, read());
    assert_eq!(peer.answers().len(), 1);
    // The peer has its answer, says so by other means, and the region is deregistered.
    peer.machine.is_closed = true;
    peer.ask(0, read());
    let answers = peer.answers();
    assert_eq!(answers.iter().map(refusal).collect::<Vec<_>>(), [Some(Syndrome::Nak(Nak::RemoteAccess))]);
    assert_eq!(answers[0].psn, SETTINGS.psn, "of that read, for a peer that has no answer");
    assert!(!peer.responder.has_failed());
    peer.ask(1, nothing());
    assert_eq!(peer.answers().iter().map(refusal).collect::<Vec<_>>(), [Some(Syndrome::ACK)]);
    // One that is new is another matter.
    peer.ask(2, read());
    assert_eq!(peer.responder.failure(), Some(Nak::RemoteAccess));
    assert!(peer.machine.receive().is_none());
}
