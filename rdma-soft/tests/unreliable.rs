//! Simulations of unreliable connections over a network that drops packets.

mod sim_host;

use proptest::prelude::*;
use rdma_soft::transport::{Completion, ReceiveId, Request, Status, UnreliableRequester, UnreliableResponder, Work};
use rdma_soft::wire::{Packet, Psn, Trailer, Transport};
use sim_host::{BASE, MEMORY, MTU, RKEY, SimHost, has_valid_icrc, pattern};

const PSN: Psn = Psn::new(0xff_fffe);

/// Two ends, with a network that drops chosen packets.
struct Net {
    sender: SimHost,
    requester: UnreliableRequester,
    receiver: SimHost,
    responder: UnreliableResponder,
    packets: usize,
}

impl Net {
    fn new(receives: u64) -> Self {
        let mut receiver = SimHost::new();
        receiver.restarts_receives = true;
        (0..receives).for_each(|id| receiver.post_receive(id));
        Net {
            sender: SimHost::new(),
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
            assert_eq!(self.sender.completions.len(), ended, "work completed before its data was copied");
            self.requester.taken(&mut self.sender);
            self.packets += 1;
            assert!(has_valid_icrc(&bytes));
            if !is_lost(self.packets - 1) {
                let Packet { header, payload } = Packet::parse(&bytes).unwrap();
                self.responder.handle(&header, payload, &mut self.receiver);
            }
        }
    }

    /// Completed receives: identifier, length and immediate data.
    fn arrived(&self) -> Vec<(u64, u32, Option<u32>)> {
        let received = |completion: &Completion| match completion {
            Completion::Received { id, status: Status::Success, len, imm, .. } => (id.0, *len, *imm),
            other => panic!("{other:?}"),
        };
        self.receiver.completions.iter().map(received).collect()
    }
}

#[test]
fn a_message_that_loses_a_packet_leaves_its_receive_to_the_next() {
    for lost in 0..3 {
        let mut net = Net::new(2);
        net.post(0, Request::Send(Trailer::Immediate(1)), 700);
        net.post(1, Request::Send(Trailer::Immediate(2)), 600);
        net.run(|packet| packet == lost);
        assert_eq!(net.arrived(), [(0, 600, Some(2))], "{lost}");
        assert_eq!(net.receiver.received[&0], pattern(1, 600));
        assert_eq!(net.sender.completions.len(), 2, "a sender does not learn of losses");
        assert_eq!(net.responder.abandon(), None);
    }
    let mut net = Net::new(1);
    net.post(0, Request::Send(Trailer::None), 700);
    net.run(|packet| packet == 2);
    assert_eq!(net.responder.abandon(), Some(ReceiveId(0)), "the incomplete receive must be flushed");
}

#[test]
fn a_message_without_receive_or_memory_is_dropped_and_the_next_arrives() {
    let mut net = Net::new(0);
    net.post(0, Request::Send(Trailer::None), 700);
    net.post(1, Request::Write { address: BASE, rkey: RKEY + 1, imm: None }, 700);
    net.post(2, Request::Write { address: BASE + MEMORY as u64 - 699, rkey: RKEY, imm: None }, 700);
    net.post(3, Request::Write { address: BASE, rkey: RKEY, imm: None }, 700);
    net.run(|_| false);
    assert_eq!(net.arrived(), []);
    assert_eq!(net.receiver.memory[..700], pattern(3, 700));
    assert!(net.receiver.memory[700..].iter().all(|byte| *byte == 0));
}

#[test]
fn work_that_needs_responses_is_rejected() {
    let mut requester = UnreliableRequester::new(PSN, MTU);
    for request in [Request::Read { address: 0, rkey: 0 }, Request::Send(Trailer::Invalidate(1))] {
        assert!(!requester.post(Work { id: 0, request, len: 8, is_fenced: false, is_solicited: false }));
    }
    assert_eq!(requester.transmit(), None);
}

proptest! {
    #![proptest_config(if cfg!(miri) { ProptestConfig::with_cases(4) } else { ProptestConfig::default() })]

    #[test]
    fn messages_arrive_whole_and_in_order(
        lens in prop::collection::vec(
            prop_oneof![0..10_usize, 250..260_usize, 0..1000_usize],
            1..if cfg!(miri) { 8 } else { 20 },
        ),
        lost in prop::collection::hash_set(0..60_usize, 0..20),
    ) {
        let mut net = Net::new(30);
        for (id, len) in (0..).zip(&lens) {
            net.post(id, Request::Send(Trailer::Immediate(id as u32)), *len);
        }
        net.run(|packet| lost.contains(&packet));
        // Find the messages that lost no packet.
        let mut first = 0;
        let mut expected = Vec::new();
        for (id, len) in (0_u32..).zip(&lens) {
            let packets = len.div_ceil(MTU as usize).max(1);
            if (first..first + packets).all(|packet| !lost.contains(&packet)) {
                expected.push((*len as u32, Some(id)));
            }
            first += packets;
        }
        let arrived = net.arrived();
        prop_assert_eq!(arrived.iter().map(|(_, len, imm)| (*len, *imm)).collect::<Vec<_>>(), expected);
        for (receive, len, imm) in arrived {
            let message = pattern(imm.unwrap().into(), len as usize);
            prop_assert_eq!(net.receiver.received.get(&receive), Some(&message));
        }
    }
}
