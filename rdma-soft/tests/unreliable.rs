//! Unreliable connections over a network that loses.

mod machine;

use machine::{BASE, MEMORY, MTU, Machine, RKEY, is_whole, pattern};
use proptest::prelude::*;
use rdma_soft::transport::{Completion, ReceiveId, Request, Status, UnreliableRequester, UnreliableResponder, Work};
use rdma_soft::wire::{Packet, Psn, Trailer, Transport};

const PSN: Psn = Psn::new(0xff_fffe);

/// What a sender's work becomes at a receiver when those packets are lost.
struct Wire {
    sender: Machine,
    requester: UnreliableRequester,
    receiver: Machine,
    responder: UnreliableResponder,
    packets: usize,
}

impl Wire {
    fn new(receives: u64) -> Self {
        let mut receiver = Machine::new();
        receiver.reuses = true;
        (0..receives).for_each(|id| receiver.post_receive(id));
        Wire {
            sender: Machine::new(),
            requester: UnreliableRequester::new(PSN, MTU),
            receiver,
            responder: UnreliableResponder::new(PSN, MTU),
            packets: 0,
        }
    }

    fn post(&mut self, id: u64, request: Request, len: usize) {
        self.sender.data.insert(id, pattern(id, len));
        let work = Work { id, request, len: len as u32, is_fenced: false, is_solicited: false };
        assert!(self.requester.post(work));
    }

    fn run(&mut self, is_lost: impl Fn(usize) -> bool) {
        while let Some(outgoing) = self.requester.transmit() {
            assert!(!outgoing.ack_request);
            let ended = self.sender.completions.len();
            let bytes = self.sender.encode(&outgoing, Transport::Uc);
            assert_eq!(self.sender.completions.len(), ended, "work ends after its data was taken");
            self.requester.taken(&mut self.sender);
            self.packets += 1;
            assert!(is_whole(&bytes));
            if !is_lost(self.packets - 1) {
                let Packet { header, payload } = Packet::parse(&bytes).unwrap();
                self.responder.handle(&header, payload, &mut self.receiver);
            }
        }
    }

    /// Receives that were filled, with the immediate data.
    fn arrived(&self) -> Vec<(u64, u32, Option<u32>)> {
        let received = |completion: &Completion| match completion {
            Completion::Received { id, status: Status::Success, len, imm, .. } => (id.0, *len, *imm),
            other => panic!("{other:?}"),
        };
        self.receiver.completions.iter().map(received).collect()
    }
}

#[test]
fn a_message_of_which_a_packet_is_lost_leaves_its_receive_to_the_next() {
    for lost in 0..3 {
        let mut wire = Wire::new(2);
        wire.post(0, Request::Send(Trailer::Immediate(1)), 700);
        wire.post(1, Request::Send(Trailer::Immediate(2)), 600);
        wire.run(|packet| packet == lost);
        assert_eq!(wire.arrived(), [(0, 600, Some(2))], "{lost}");
        assert_eq!(wire.receiver.inboxes[&0], pattern(1, 600));
        assert_eq!(wire.sender.completions.len(), 2, "who sends never knows");
        assert_eq!(wire.responder.abandon(), None);
    }
    let mut wire = Wire::new(1);
    wire.post(0, Request::Send(Trailer::None), 700);
    wire.run(|packet| packet == 2);
    assert_eq!(wire.responder.abandon(), Some(ReceiveId(0)), "it is flushed with the others");
}

#[test]
fn what_finds_no_receive_or_no_memory_is_dropped_and_the_next_arrives() {
    let mut wire = Wire::new(0);
    wire.post(0, Request::Send(Trailer::None), 700);
    wire.post(1, Request::Write { address: BASE, rkey: RKEY + 1, imm: None }, 700);
    wire.post(2, Request::Write { address: BASE + MEMORY as u64 - 699, rkey: RKEY, imm: None }, 700);
    wire.post(3, Request::Write { address: BASE, rkey: RKEY, imm: None }, 700);
    wire.run(|_| false);
    assert_eq!(wire.arrived(), []);
    assert_eq!(wire.receiver.memory[..700], pattern(3, 700));
    assert!(wire.receiver.memory[700..].iter().all(|byte| *byte == 0));
}

#[test]
fn work_that_needs_answers_is_refused() {
    let mut requester = UnreliableRequester::new(PSN, MTU);
    for request in [Request::Read { address: 0, rkey: 0 }, Request::Send(Trailer::Invalidate(1))] {
        assert!(!requester.post(Work { id: 0, request, len: 8, is_fenced: false, is_solicited: false }));
    }
    assert_eq!(requester.transmit(), None);
}

proptest! {
    #![proptest_config(if cfg!(miri) { ProptestConfig::with_cases(4) } else { ProptestConfig::default() })]

    #[test]
    fn what_arrives_is_whole_and_in_order(
        lens in prop::collection::vec(
            prop_oneof![0..10_usize, 250..260_usize, 0..1000_usize],
            1..if cfg!(miri) { 8 } else { 20 },
        ),
        lost in prop::collection::hash_set(0..60_usize, 0..20),
    ) {
        let mut wire = Wire::new(30);
        for (id, len) in (0..).zip(&lens) {
            wire.post(id, Request::Send(Trailer::Immediate(id as u32)), *len);
        }
        wire.run(|packet| lost.contains(&packet));
        // Which messages are whole.
        let mut first = 0;
        let mut expected = Vec::new();
        for (id, len) in (0_u32..).zip(&lens) {
            let packets = len.div_ceil(MTU as usize).max(1);
            if (first..first + packets).all(|packet| !lost.contains(&packet)) {
                expected.push((*len as u32, Some(id)));
            }
            first += packets;
        }
        let arrived = wire.arrived();
        prop_assert_eq!(arrived.iter().map(|(_, len, imm)| (*len, *imm)).collect::<Vec<_>>(), expected);
        for (receive, len, imm) in arrived {
            let message = pattern(imm.unwrap().into(), len as usize);
            prop_assert_eq!(wire.receiver.inboxes.get(&receive), Some(&message));
        }
    }
}
