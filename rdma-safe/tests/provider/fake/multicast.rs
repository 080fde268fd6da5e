//! Multicast groups.

use std::ffi::c_int;

use rdma_sys::*;

use super::state::{State, enter};

/// The GID and, on InfiniBand, the LID.
pub(super) type Group = ([u8; 16], u16);

/// Destination queue pair number of multicast datagrams.
const MULTICAST_QP: u32 = 0xff_ffff;

fn group(gid: *const ibv_gid, lid: u16) -> Group {
    (unsafe { (*gid).raw }, lid)
}

pub(super) unsafe extern "C" fn attach_mcast(raw: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    let group = group(gid, lid);
    enter(raw, "ibv_attach_mcast", |state, _| {
        if let Some(errno) = state.fault("ibv_attach_mcast") {
            return errno;
        }
        let Some(qp) = state.qp(raw.addr(), "ibv_attach_mcast") else { return libc::EINVAL };
        if qp.qp_type != IBV_QPT_UD {
            return libc::EINVAL;
        }
        let on_infiniband = state.config.ports[0].link_layer != IBV_LINK_LAYER_ETHERNET;
        if on_infiniband && !(0xc000..0xffff).contains(&lid) {
            return libc::EINVAL;
        }
        let mut others: Vec<_> = state.groups.iter().map(|(group, _)| *group).filter(|other| *other != group).collect();
        others.dedup();
        if others.len() >= state.config.groups as usize {
            return libc::ENOMEM;
        }
        if !state.groups.contains(&(group, raw.addr())) {
            state.groups.push((group, raw.addr()));
        }
        0
    })
}

pub(super) unsafe extern "C" fn detach_mcast(raw: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    let group = group(gid, lid);
    enter(raw, "ibv_detach_mcast", |state, _| {
        if let Some(errno) = state.fault("ibv_detach_mcast") {
            return errno;
        }
        if state.qp(raw.addr(), "ibv_detach_mcast").is_none() {
            return libc::EINVAL;
        }
        let Some(found) = state.groups.iter().position(|member| *member == (group, raw.addr())) else {
            return libc::EINVAL;
        };
        state.groups.remove(found);
        0
    })
}

impl State {
    /// The queue pairs that receive a datagram with this address and destination number.
    pub(super) fn receivers(&self, address: &ibv_ah_attr, number: u32) -> Vec<usize> {
        if number != MULTICAST_QP {
            return self.receiver(number, IBV_QPT_UD).into_iter().collect();
        }
        let gid = unsafe { address.grh.dgid.raw };
        let members = self.groups.iter().filter(|((group, _), _)| *group == gid).map(|(_, member)| *member);
        members.filter(|member| matches!(self.qps[member].state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD)).collect()
    }
}
