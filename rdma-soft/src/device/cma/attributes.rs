//! Attributes for the state changes of an id's queue pair.

use rdma_sys::*;

use super::id::{Id, IdState};
use crate::cm::{Ended, Negotiated, Phase};
use crate::device::Core;
use crate::net::Origin;

/// Returns the address vector of a device with this GID, for packets that leave by a link.
pub(super) fn address_vector(gid: [u8; 16], link: usize, traffic_class: u8) -> ibv_ah_attr {
    let grh = ibv_global_route {
        dgid: ibv_gid { raw: gid },
        sgid_index: link as u8,
        hop_limit: Origin::HOPS,
        traffic_class,
        ..ibv_global_route::zeroed()
    };
    ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() }
}

/// Which attributes of a connection are known.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing of the peer.
    Nothing,
    /// This side has sent a REQ.
    OwnRequest,
    /// Everything.
    All,
    /// The connection has ended.
    Ended,
}

impl Core {
    /// Returns the attributes that move an id's queue pair to `state`, and their mask: `rdma_init_qp_attr` of rdma-core.
    ///
    /// # Errors
    /// `EINVAL` if they are not known yet or any more, `ENXIO` if the device was removed.
    pub(crate) fn cm_attributes(&self, number: u32, state: ibv_qp_state) -> Result<(ibv_qp_attr, u32), i32> {
        let cma = &self.state.cma;
        cma.check_device(number)?;
        let id = cma.id(number)?;
        // The device of an id that is bound to all addresses is not known.
        let link = id.link.ok_or(libc::EINVAL)?;
        let connection = id.connection.filter(|_| !id.is_datagram());
        let negotiated = connection.and_then(|connection| cma.manager.negotiated(connection));
        let known = match connection.map(|connection| cma.manager.phase(connection)) {
            None => Known::Nothing,
            Some(Some(Phase::ReqSent)) => Known::OwnRequest,
            Some(None | Some(Phase::Timewait(Ended::Failed | Ended::Disconnected))) => Known::Ended,
            Some(Some(Phase::DreqSent | Phase::DreqReceived)) => Known::Ended,
            Some(Some(_)) => Known::All,
        };
        match (state, known, negotiated) {
            (IBV_QPS_INIT, Known::Nothing, _) => Ok(init(id)),
            (IBV_QPS_INIT, Known::OwnRequest | Known::All, Some(negotiated)) => {
                let (attr, mask) = init(id);
                let reads = if negotiated.responder_resources > 0 {
                    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC
                } else {
                    ibv_access_flags(0)
                };
                Ok((ibv_qp_attr { qp_access_flags: (IBV_ACCESS_REMOTE_WRITE | reads).0, ..attr }, mask))
            }
            (IBV_QPS_RTR, Known::All, Some(negotiated)) => Ok(ready_to_receive(id, link, negotiated)),
            (IBV_QPS_RTS, Known::All, Some(negotiated)) => Ok(ready_to_send(id, negotiated)),
            _ => Err(libc::EINVAL),
        }
    }
}

fn init(id: &Id) -> (ibv_qp_attr, u32) {
    let base = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, pkey_index: 0, ..ibv_qp_attr::zeroed() };
    match id.is_datagram() {
        true => (ibv_qp_attr { qkey: id.qkey(), ..attr }, (base | IBV_QP_QKEY).0),
        false => (attr, (base | IBV_QP_ACCESS_FLAGS).0),
    }
}

fn ready_to_receive(id: &Id, link: usize, negotiated: &Negotiated) -> (ibv_qp_attr, u32) {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        ah_attr: address_vector(id.remote_gid.unwrap_or_default(), link, negotiated.traffic_class),
        path_mtu: ibv_mtu(negotiated.mtu.into()),
        dest_qp_num: negotiated.remote_qpn,
        // On the passive side, `receive_psn` is not known before the reply.
        rq_psn: id.psn,
        max_dest_rd_atomic: negotiated.responder_resources,
        min_rnr_timer: 0,
        ..ibv_qp_attr::zeroed()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    (attr, mask.0)
}

fn ready_to_send(id: &Id, negotiated: &Negotiated) -> (ibv_qp_attr, u32) {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: negotiated.send_psn,
        timeout: id.options.ack_timeout.unwrap_or(negotiated.ack_timeout),
        retry_cnt: negotiated.retry_count,
        rnr_retry: negotiated.rnr_retry_count,
        max_rd_atomic: negotiated.initiator_depth,
        ..ibv_qp_attr::zeroed()
    };
    let mask =
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    (attr, mask.0)
}

/// Whether the state of an id allows it to join multicast groups.
pub(super) fn may_join(id: &Id) -> bool {
    id.is_datagram() && matches!(id.state, IdState::Bound | IdState::AddressResolved) && id.link.is_some()
}
