//! Connects queue pairs by explicit state changes.

use rdma_safe::address::{AddressVector, GlobalRoute};
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{Access, Endpoint, EndpointBuilder, QueuePair, QueuePairState, Result};

use super::Rdma;

/// Initial packet sequence number of every raw connection of the tests.
pub(crate) const PSN: u32 = 0x12_3456;

/// Attributes of a connection, with defaults that suit a peer on the same device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    /// Packet sequence number of the first packet.
    pub(crate) psn: u32,
    pub(crate) access: Access,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) rd_atomic: u8,
}

impl Default for Link {
    fn default() -> Self {
        Link {
            psn: PSN,
            access: Access::REMOTE,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            rd_atomic: 4,
        }
    }
}

impl Link {
    pub(crate) fn to_init(self, rdma: &Rdma) -> QueuePairAttributes {
        QueuePairAttributes::new()
            .set_state(QueuePairState::INIT)
            .set_port(rdma.port)
            .set_pkey_index(0)
            .set_access(self.access)
    }

    pub(crate) fn to_rtr(self, rdma: &Rdma, remote: u32) -> QueuePairAttributes {
        let mtu = rdma.query_port(rdma.port).expect("the port can be queried").active_mtu();
        QueuePairAttributes::new()
            .set_state(QueuePairState::RTR)
            .set_address(address(rdma))
            .set_path_mtu(mtu)
            .set_dest_qp_num(remote)
            .set_rq_psn(self.psn)
            .set_max_dest_rd_atomic(self.rd_atomic)
            .set_min_rnr_timer(self.min_rnr_timer)
    }

    pub(crate) fn to_rts(self) -> QueuePairAttributes {
        QueuePairAttributes::new()
            .set_state(QueuePairState::RTS)
            .set_sq_psn(self.psn)
            .set_timeout(self.timeout)
            .set_retry_count(self.retry_count)
            .set_rnr_retry(self.rnr_retry)
            .set_max_rd_atomic(self.rd_atomic)
    }

    /// Moves `qp` from RESET to RTS.
    pub(crate) fn connect(self, rdma: &Rdma, qp: &mut QueuePair, remote: u32) -> Result<()> {
        qp.modify(&self.to_init(rdma))?;
        qp.modify(&self.to_rtr(rdma, remote))?;
        qp.modify(&self.to_rts())
    }
}

/// The address vector of the port itself.
pub(crate) fn address(rdma: &Rdma) -> AddressVector {
    let lid = rdma.query_port(rdma.port).expect("the port can be queried").lid();
    let route = GlobalRoute {
        dgid: rdma.gid.gid,
        sgid_index: u8::try_from(rdma.gid.index).expect("a GID index that an address vector can have"),
        hop_limit: 64,
        traffic_class: 0,
        flow_label: 0,
    };
    AddressVector { route: Some(route), ..AddressVector::from_lid(rdma.port, lid) }
}

/// Two endpoints built by `builder`, connected to each other.
pub(crate) fn connected(builder: EndpointBuilder<'_>) -> (Endpoint, Endpoint) {
    let mut ends = (builder.clone().build().expect("an endpoint"), builder.build().expect("an endpoint"));
    connect(&mut ends.0, &mut ends.1);
    ends
}

/// Connects two endpoints to each other.
pub(crate) fn connect(a: &mut Endpoint, b: &mut Endpoint) {
    let (first, second) = (a.address(), b.address());
    a.connect(&second).expect("the first end connects");
    b.connect(&first).expect("the second end connects");
}
