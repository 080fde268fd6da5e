//! Messages and addresses for the tests of the connection manager.

pub(crate) mod host;
pub(crate) mod plant;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rdma_soft::cm::Peer;
use rdma_soft::wire::cm::{
    AdditionalInfo, IpHeader, PS_TCP, PS_UDP, Path, Rep, Req, SidrRep, SidrReq, SidrStatus, service_id,
};

/// Service of the listeners for connections.
pub(crate) const SERVICE: u64 = service_id(PS_TCP, 7471);
/// Service of the listeners for lookups.
pub(crate) const DATAGRAMS: u64 = service_id(PS_UDP, 7471);

/// Address of the host with a number.
pub(crate) fn address(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, host + 1))
}

/// The host with a number, as another host sees it.
pub(crate) fn peer(host: u8) -> Peer {
    Peer { link: 0, address: address(host), is_local: false }
}

/// Private data of a message from `from` to `to`: the header, and zeros.
fn private_data<const N: usize>(from: IpAddr, to: IpAddr) -> [u8; N] {
    let header = IpHeader { source: SocketAddr::new(from, 4000), destination: to };
    let mut data = [0; N];
    data[..IpHeader::LEN].copy_from_slice(&header.encode());
    data
}

/// Service timeout of the manager's MRAs: the one of Linux.
pub(crate) const SERVICE_TIMEOUT: u8 = 24;

/// A request of `from` for a connection to [`SERVICE`] at `to`, for [`Manager::connect`](rdma_soft::cm::Manager::connect).
pub(crate) fn request(from: IpAddr, to: IpAddr, qpn: u32, psn: u32) -> Req {
    Req {
        local_id: 0,
        vendor_id: 0,
        ece_options: 0,
        service: SERVICE,
        guid: 0,
        qkey: 0,
        qpn,
        responder_resources: 4,
        initiator_depth: 2,
        remote_timeout: 0,
        transport: 0,
        flow_control: false,
        psn,
        local_timeout: 0,
        retry_count: 7,
        pkey: 0xffff,
        mtu: 3,
        rdc_exists: false,
        rnr_retry_count: 6,
        max_cm_retries: 0,
        srq: false,
        extended_transport: 0,
        path: Path { ack_timeout: 14, hop_limit: 64, traffic_class: 3, ..Path::default() },
        alternate: None,
        private_data: private_data(from, to),
    }
}

/// A reply to a request, for [`Manager::accept`](rdma_soft::cm::Manager::accept).
pub(crate) fn reply(qpn: u32, psn: u32) -> Rep {
    Rep {
        local_id: 0,
        remote_id: 0,
        qkey: 0,
        qpn,
        psn,
        responder_resources: 2,
        initiator_depth: 4,
        ack_delay: 0,
        failover: 0,
        flow_control: false,
        rnr_retry_count: 5,
        srq: false,
        guid: 0,
        vendor_id: 0,
        ece_options: 0,
        private_data: [0; 196],
    }
}

/// A lookup of [`DATAGRAMS`] at `to`, for [`Manager::look_up`](rdma_soft::cm::Manager::look_up).
pub(crate) fn lookup(from: IpAddr, to: IpAddr) -> SidrReq {
    SidrReq { id: 0, pkey: 0xffff, service: DATAGRAMS, private_data: private_data(from, to) }
}

/// A reply to a lookup, for [`Manager::reply_lookup`](rdma_soft::cm::Manager::reply_lookup).
pub(crate) fn lookup_reply(qpn: u32) -> SidrRep {
    SidrRep {
        id: 0,
        status: SidrStatus::SUCCESS,
        qpn,
        service: 0,
        qkey: 0x0123_4567,
        info: AdditionalInfo::NONE,
        vendor_id: 0,
        ece_options: 0,
        private_data: [0; 136],
    }
}

/// How much a test does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scale {
    /// A few seconds in a debug build.
    Quick,
    /// Minutes in a release build: `RDMA_TEST_SCALE=full`.
    Full,
    /// An hour in a release build: `RDMA_TEST_SCALE=soak`.
    Soak,
}

/// The scale of this run.
pub(crate) fn scale() -> Scale {
    match std::env::var("RDMA_TEST_SCALE").unwrap_or_default().as_str() {
        "" | "quick" => Scale::Quick,
        "full" => Scale::Full,
        "soak" => Scale::Soak,
        other => panic!("RDMA_TEST_SCALE={other} is none of quick, full, soak"),
    }
}

/// A xorshift64* generator.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        // A zero state would stay zero. The product spreads small seeds.
        if self.0 < 1 << 32 {
            self.0 = (self.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}
