//! Packets of several queue pairs in one batch.

use super::link::Recorder;
use super::*;
use crate::faults::Faults;
use crate::random::Random;
use crate::wire::Trailer;

/// A packet with `len` bytes of payload.
#[derive(Clone, Copy, Debug)]
struct Sent {
    qp: u32,
    len: usize,
    is_datagram: bool,
}

impl Sent {
    fn header(&self, psn: u32) -> Header {
        let header = Header { dest_qp: self.qp, ..header(psn, self.len) };
        if !self.is_datagram {
            return header;
        }
        let transport = Transport::Ud { qkey: 0, source_qp: 1 };
        Header { transport, operation: Operation::SendOnly(Trailer::None), ..header }
    }
}

/// Sends these packets by one flush. Checks the CRC of each. Returns their indices in the order in which they are on the network.
fn sent_by(link: &Recorder, packets: &[Sent]) -> Vec<usize> {
    let mut outbox = Outbox::new(Faults::default());
    for (psn, packet) in (0..).zip(packets) {
        let (mut headers, payload) = (packet.header(psn).encode(packet.len), payload(psn, packet.len));
        // SAFETY: the payload is valid.
        unsafe {
            outbox.push(link, to(Recorder::PEER), Run::new(&mut headers, &[part(&payload)], payload.len(), 1), Time(0))
        };
    }
    outbox.flush(link, Time(0));
    let places = link.segments().into_iter().flat_map(|count| 0..count as u16);
    let check = |(bytes, place): (Vec<u8>, u16)| {
        let packet = Packet::parse(&*bytes).unwrap();
        let psn = packet.header.psn.get();
        let sent = packets[psn as usize];
        assert_eq!((packet.header, packet.payload.to_vec()), (sent.header(psn), payload(psn, sent.len)));
        assert_eq!(link.identification(&bytes), Some(place), "{psn}");
        psn as usize
    };
    link.packets().into_iter().zip(places).map(check).collect()
}

#[test]
fn packets_of_one_length_for_several_queue_pairs_share_a_message() {
    // A long message and an ACK for each.
    let of = |qp| [LONG, 40, 0].map(|len| Sent { qp, len, is_datagram: false });
    let link = Recorder::default();
    assert_eq!(sent_by(&link, &[of(1), of(2), of(3)].concat()), [0, 3, 6, 1, 4, 7, 2, 5, 8]);
    assert_eq!(link.segments(), [3; 3]);
}

#[test]
fn a_packet_whose_length_no_other_has_follows_longer_ones() {
    let of = |(qp, len)| Sent { qp, len, is_datagram: false };
    let link = Recorder::default();
    assert_eq!(sent_by(&link, &[(1, 80), (2, 80), (3, 120), (4, 60), (5, 100), (5, 40)].map(of)), [0, 1, 2, 3, 4, 5]);
    assert_eq!(link.segments(), [2, 2, 2]);
    let link = Recorder::default();
    // The last packet would overtake the one before, of the same queue pair.
    assert_eq!(sent_by(&link, &[(1, 80), (2, 120), (2, 60), (2, 40)].map(of)), [0, 1, 2, 3]);
    assert_eq!(link.segments(), [1, 2, 1]);
}

#[test]
fn a_run_fills_several_messages_and_batches() {
    const COUNT: u32 = 200;
    let link = Recorder::default();
    let mut outbox = Outbox::new(Faults::default());
    let payload = payload(0, LONG * COUNT as usize);
    let first = Psn::new(0xff_fffe);
    let mut headers = header(first.get(), LONG).encode(LONG);
    let parts = [part(&payload)];
    // SAFETY: the payload is valid.
    unsafe { outbox.push(&link, to(Recorder::PEER), Run::new(&mut headers, &parts, LONG, COUNT), Time(0)) };
    assert!(link.messages() > 0, "a full batch is sent");
    outbox.flush(&link, Time(0));
    assert_eq!(link.segments(), [62, 62, 62, 14]);
    for ((at, packet), payload) in (0..).zip(link.packets()).zip(payload.chunks(LONG)) {
        assert_eq!(link.identification(&packet), Some(at % 62));
        let packet = Packet::parse(&*packet).unwrap();
        assert_eq!((packet.header.psn, packet.payload.to_vec()), (first.add(at.into()), payload.to_vec()));
    }
}

#[test]
fn a_short_packet_ends_the_last_message_of_a_full_batch() {
    const MOST: usize = 65_507 / (12 + 1024 + 4);
    let long = [Sent { qp: 1, len: LONG, is_datagram: false }; MOST + 2];
    let short = [Sent { qp: 1, len: 40, is_datagram: false }; 2];
    let link = Recorder::default();
    sent_by(&link, &[&long[..], &short].concat());
    assert_eq!(link.segments(), [MOST, 3, 1]);
}

#[test]
fn packets_for_a_queue_pair_keep_their_order_and_datagrams_their_place() {
    let mut random = Random(22);
    for round in 0..if cfg!(miri) { 3 } else { 300 } {
        let lens = [0, 40, 100, 100, 300, LONG, LONG].map(|len| if round % 2 == 0 { len } else { len.min(100) });
        // Some numbers have the same last bits.
        let mut below = |most: usize| random.next() as usize % most;
        let packets: Vec<Sent> = (0..below(if cfg!(miri) { 60 } else { 500 }))
            .map(|_| Sent {
                qp: [1, 2, 3, 257, 258, 0x10001][below(6)],
                len: lens[below(7)],
                is_datagram: below(40) == 0,
            })
            .collect();
        let link = Recorder::default();
        let order = sent_by(&link, &packets);
        let mut places = vec![None; packets.len()];
        order.iter().enumerate().for_each(|(place, sent)| places[*sent] = Some(place));
        let places: Vec<usize> = places.into_iter().map(Option::unwrap).collect();
        assert_eq!(order.len(), packets.len());
        for (at, packet) in packets.iter().enumerate() {
            let is_ordered = |later: &Sent| packet.is_datagram || later.is_datagram || later.qp == packet.qp;
            for later in (at + 1..packets.len()).filter(|later| is_ordered(&packets[*later])) {
                assert!(places[at] < places[later], "{at} and {later} of {packets:?}");
            }
        }
    }
}
