//! Messages that Linux sent, from the packets in the corpus.

use std::net::IpAddr;

use rdma_soft::wire::cm::{Drep, Dreq, IpHeader, Mad, Message, PS_TCP, Path, Rep, Req, Rtu, service_id, service_port};
use rdma_soft::wire::{Packet, Transport};

/// Connections of rping and file_transfer between two machines with Linux 6.1's rxe.
const RXE: &[u8] = include_bytes!("../corpus/rxe-6.1.pcap");

/// The payloads of all datagrams to queue pair 1.
fn mads() -> Vec<Vec<u8>> {
    let mut rest = &RXE[24..];
    let mut found = Vec::new();
    while let Some((record, after)) = rest.split_at_checked(16) {
        let len = u32::from_le_bytes(record[8..12].try_into().unwrap()) as usize;
        let (frame, after) = after.split_at(len);
        rest = after;
        // Ethernet pads short frames, so take the length from the UDP header.
        let udp_len = usize::from(u16::from_be_bytes([frame[38], frame[39]]));
        let packet = Packet::parse(&frame[42..34 + udp_len]).unwrap();
        if let (1, Transport::Ud { .. }) = (packet.header.dest_qp, packet.header.transport) {
            found.push(packet.payload.to_vec());
        }
    }
    found
}

/// Private data that starts with `data`.
fn padded<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    padded[..data.len()].copy_from_slice(data);
    padded
}

fn mapped(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 9, last]
}

/// The connection of rping to port 7174, which has no private data.
fn rping() -> [Message; 5] {
    let (active, passive) = (0xd2b9_70f2, 0x8b06_568d);
    let header = IpHeader { source: "10.9.9.2:47920".parse().unwrap(), destination: IpAddr::from([10, 9, 9, 1]) };
    let req = Req {
        local_id: active,
        vendor_id: 0,
        ece_options: 0,
        service: service_id(PS_TCP, 7174),
        guid: 0x5054_00ff_fe09_0902,
        qkey: 0,
        qpn: 0x14,
        responder_resources: 1,
        initiator_depth: 1,
        remote_timeout: 20,
        transport: 0,
        flow_control: false,
        psn: 0x85_6fca,
        local_timeout: 20,
        retry_count: 7,
        pkey: 0xffff,
        mtu: 5,
        rdc_exists: false,
        rnr_retry_count: 7,
        max_cm_retries: 15,
        srq: false,
        extended_transport: 0,
        path: Path {
            local_lid: 0xffff,
            remote_lid: 0xffff,
            local_gid: mapped(2),
            remote_gid: mapped(1),
            flow_label: 0x6_c6d6,
            traffic_class: 0,
            hop_limit: 64,
            rate: 0,
            service_level: 0,
            subnet_local: false,
            ack_timeout: 19,
        },
        alternate: None,
        private_data: padded(&header.encode()),
    };
    let rep = Rep {
        local_id: passive,
        remote_id: active,
        qkey: 0,
        qpn: 0x14,
        psn: 0xf8_7e63,
        responder_resources: 1,
        initiator_depth: 1,
        ack_delay: 15,
        failover: 0,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        guid: 0x5054_00ff_fe09_0901,
        vendor_id: 0,
        ece_options: 0,
        private_data: [0; 196],
    };
    [
        Message::Req(req),
        Message::Rep(rep),
        Message::Rtu(Rtu { local_id: active, remote_id: passive, private_data: [0; 224] }),
        Message::Dreq(Dreq { local_id: active, remote_id: passive, remote_qpn: 0x14, private_data: [0; 220] }),
        Message::Drep(Drep { local_id: passive, remote_id: active, private_data: [0; 224] }),
    ]
}

#[test]
fn messages_of_linux_are_decoded_and_encoded_to_the_same_bytes() {
    let mads = mads();
    assert_eq!(mads.len(), 10);
    for bytes in &mads {
        assert_eq!(Mad::decode(bytes).unwrap().encode(), bytes[..]);
    }
    for (bytes, message) in mads.iter().zip(rping()) {
        assert_eq!(Mad::decode(bytes), Ok(Mad { transaction: 0x2_f270_b9d2, message }));
    }
}

#[test]
fn private_data_follows_the_ip_header() {
    let messages: Vec<Message> = mads()[5..].iter().map(|bytes| Mad::decode(bytes).unwrap().message).collect();
    let [Message::Req(req), Message::Rep(rep), ..] = &messages[..] else { panic!("{messages:?}") };
    assert_eq!(service_port(req.service), Some((PS_TCP, 7475)));
    let header = IpHeader { source: "10.9.9.2:55815".parse().unwrap(), destination: IpAddr::from([10, 9, 9, 1]) };
    assert_eq!(IpHeader::decode(&req.private_data), Some(header));
    assert_eq!(req.private_data[IpHeader::LEN..], padded::<56>(b"file_transfer 1"));
    assert_eq!(rep.private_data, padded(b"file_transfer 1"));
    assert!(req.flow_control && rep.flow_control);
}
