//! Requests for a listener that arrive as packets, from a sender that is no RNIC.

#[path = "cm_support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, UdpSocket};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use rdma_soft::abi::*;
use rdma_soft::cm::{MAD_QKEY, MAD_QP};
use rdma_soft::wire::cm::{Mad, Message, Req, service_id};
use rdma_soft::wire::{Header, IcrcSeed, Operation, Path, Psn, Trailer, Transport};
use rdma_sys::*;

use support::request;

const DEVICE: Ipv4Addr = Ipv4Addr::new(127, 55, 5, 5);
const SENDER: Ipv4Addr = Ipv4Addr::new(127, 55, 5, 6);
const PORT: u16 = 7711;
const BACKLOG: usize = 4;

/// Makes a listener that takes no requests. It stays until the process ends.
fn listen() {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let channel = rdma_create_event_channel();
        let mut id = null_mut();
        assert_eq!(rdma_create_id(channel, &mut id, null_mut(), RDMA_PS_TCP), 0);
        let mut address: libc::sockaddr_in = std::mem::zeroed();
        address.sin_family = libc::AF_INET as u16;
        address.sin_port = PORT.to_be();
        address.sin_addr.s_addr = u32::from(Ipv4Addr::LOCALHOST).to_be();
        assert_eq!(rdma_bind_addr(id, (&raw mut address).cast()), 0);
        assert_eq!(rdma_listen(id, BACKLOG as i32), 0);
    }
}

/// The packet of a request.
fn packet(from: SocketAddrV4, number: u32) -> Vec<u8> {
    let (source, dest) = (IpAddr::V4(*from.ip()), IpAddr::V4(Ipv4Addr::LOCALHOST));
    let req = Req {
        local_id: number,
        // A GUID that only soft0 has, but that of no process.
        guid: 0x02_73_30 << 40 | u64::from(number),
        service: service_id(RDMA_PS_TCP.0 as u16, PORT),
        ..request(source, dest, number, 1)
    };
    let mad = Mad { transaction: number.into(), message: Message::Req(req) }.encode();
    let header = Header {
        transport: Transport::Ud { qkey: MAD_QKEY, source_qp: MAD_QP },
        operation: Operation::SendOnly(Trailer::None),
        pkey: 0xffff,
        dest_qp: MAD_QP,
        psn: Psn::new(number),
        solicited: false,
        ack_request: false,
        migrated: true,
        congestion: (false, false),
    };
    let header = header.encode(mad.len());
    let path = Path::V4 { source: *from.ip(), dest: DEVICE, source_port: from.port() };
    let mut packet = [&header[..], &mad, &[0; 4]].concat();
    IcrcSeed::new(&path).write(0, &mut packet);
    packet
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn requests_that_end_at_once_take_no_more_memory_than_the_backlog() {
    // SAFETY: this program has one test. The main thread waits for it, and does not read the environment meanwhile.
    unsafe { std::env::set_var("RDMA_SOFT_ADDR", DEVICE.to_string()) };
    listen();
    let socket = UdpSocket::bind((SENDER, 0)).unwrap();
    let std::net::SocketAddr::V4(own) = socket.local_addr().unwrap() else { unreachable!() };
    // The sender is on this host, where no process has its GUID, so each request ends as soon as it arrives.
    let has_arrived = |before| rdma_soft::counters().received_packets > before;
    for number in 1..=500 {
        let before = rdma_soft::counters().received_packets;
        socket.send_to(&packet(own, number), (DEVICE, 4791)).unwrap();
        let start = Instant::now();
        while !has_arrived(before) {
            assert!(start.elapsed() < Duration::from_secs(60), "the request has not arrived");
            std::thread::yield_now();
        }
    }
    let objects = rdma_soft::objects();
    assert!(objects.cm_ids > 1 && objects.cm_ids <= 1 + BACKLOG, "{objects:?}");
}
