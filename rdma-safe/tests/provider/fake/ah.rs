//! Address handles, and the headers of datagrams.

use std::ffi::c_int;
use std::net::Ipv6Addr;

use rdma_sys::*;

use super::state::{Alloc, State, enter, null, own, set_errno};

pub(super) struct Ah {
    pub(super) alloc: Alloc,
    pub(super) pd: usize,
    pub(super) attr: ibv_ah_attr,
}

pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    let attr = unsafe { *attr };
    enter(pd, "ibv_create_ah", |state, device| {
        if let Some(errno) = state.fault("ibv_create_ah") {
            return null(errno);
        }
        if state.pd(pd.addr(), "ibv_create_ah").is_none() {
            return null(libc::EINVAL);
        }
        if let Err(errno) = state.check_address(&attr) {
            return null(errno);
        }
        let handle = state.handle();
        let (alloc, raw) = Alloc::new(ibv_ah { context: unsafe { (*pd).context }, pd, handle });
        own(raw, device);
        state.ahs.insert(raw.addr(), Ah { alloc, pd: pd.addr(), attr });
        raw
    })
}

pub(super) unsafe extern "C" fn destroy_ah(raw: *mut ibv_ah) -> c_int {
    enter(raw, "ibv_destroy_ah", |state, _| {
        let address = raw.addr();
        if state.ah(address, "ibv_destroy_ah").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("ibv_destroy_ah") {
            return errno;
        }
        if state.qps.values().flat_map(|qp| &qp.sq).any(|wr| wr.destination.is_some_and(|to| to.ah == address)) {
            state.violation("ibv_destroy_ah of a handle that work in flight names");
        }
        let ah = state.ahs.remove(&address).unwrap();
        state.retire(ah.alloc);
        0
    })
}

/// Like libibverbs, replies from the GID that the datagram was sent to, to the GID of its sender.
pub(super) unsafe extern "C" fn init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    let wc = unsafe { *wc };
    enter(context, "ibv_init_ah_from_wc", |state, _| {
        if let Some(errno) = state.fault("ibv_init_ah_from_wc") {
            set_errno(errno);
            return -1;
        }
        let mut address = ibv_ah_attr {
            dlid: wc.slid,
            sl: wc.sl,
            src_path_bits: wc.dlid_path_bits,
            port_num: port,
            ..ibv_ah_attr::zeroed()
        };
        if wc.wc_flags & IBV_WC_GRH.0 != 0 {
            let bytes = unsafe { grh.cast::<[u8; 40]>().read() };
            let mapped = |at: usize| {
                let [a, b, c, d] = std::array::from_fn(|index| bytes[at + index]);
                std::net::Ipv4Addr::new(a, b, c, d).to_ipv6_mapped().octets()
            };
            let (from, to) = match bytes[0] >> 4 {
                6 => unsafe { ((*grh).sgid.raw, (*grh).dgid.raw) },
                _ => (mapped(32), mapped(36)),
            };
            let gids = &state.config.ports[usize::from(port) - 1].gids;
            let Some(source) = gids.iter().find(|gid| gid.gid == to) else {
                set_errno(libc::ENOENT);
                return -1;
            };
            address.is_global = 1;
            address.grh = ibv_global_route {
                dgid: ibv_gid { raw: from },
                flow_label: 0,
                sgid_index: source.index as u8,
                hop_limit: 0xff,
                traffic_class: 0,
            };
        }
        unsafe { attr.write(address) };
        0
    })
}

/// Derives the MAC address from the last bytes of the GID, and the VLAN from the first ones. An IPv4 address has no VLAN.
pub(super) unsafe extern "C" fn resolve_eth_l2_from_gid(
    context: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut u8,
    vlan: *mut u16,
) -> c_int {
    let attr = unsafe { *attr };
    enter(context, "ibv_resolve_eth_l2_from_gid", |state, _| {
        if let Some(errno) = state.fault("ibv_resolve_eth_l2_from_gid") {
            set_errno(errno);
            return -1;
        }
        if let Err(errno) = state.check_address(&attr) {
            return -errno;
        }
        let gid = unsafe { attr.grh.dgid.raw };
        let found = u16::from_be_bytes([gid[0], gid[1]]) & 0xfff;
        unsafe {
            mac.cast::<[u8; 6]>().write(gid[10..].try_into().unwrap());
            vlan.write(if found == 0 { u16::MAX } else { found });
        }
        0
    })
}

impl State {
    /// Applies the kernel's checks of an address vector; returns the errno of a failed check.
    pub(super) fn check_address(&self, address: &ibv_ah_attr) -> Result<(), i32> {
        let index = usize::from(address.port_num).checked_sub(1).ok_or(libc::EINVAL)?;
        let port = self.config.ports.get(index).ok_or(libc::EINVAL)?;
        if address.is_global == 0 {
            return if port.link_layer == IBV_LINK_LAYER_ETHERNET { Err(libc::EINVAL) } else { Ok(()) };
        }
        if !port.gids.iter().any(|gid| gid.index == u32::from(address.grh.sgid_index)) {
            return Err(libc::EINVAL);
        }
        let dgid = unsafe { address.grh.dgid.raw };
        self.config.unreachable.get(&dgid).map_or(Ok(()), |errno| Err(*errno))
    }

    /// The global route header of a datagram with `len` bytes; `None` if the datagram has no GRH.
    pub(super) fn header(&self, address: &ibv_ah_attr, len: usize) -> Option<[u8; 40]> {
        if address.is_global == 0 {
            return None;
        }
        let route = &address.grh;
        let port = &self.config.ports[usize::from(address.port_num) - 1];
        let source = port.gids.iter().find(|gid| gid.index == u32::from(route.sgid_index))?.gid;
        let destination = unsafe { route.dgid.raw };
        let mut header = [0; 40];
        match (Ipv6Addr::from(source).to_ipv4_mapped(), Ipv6Addr::from(destination).to_ipv4_mapped()) {
            (Some(from), Some(to)) => {
                let total = 20 + len as u16;
                header[20..24].copy_from_slice(&[0x45, route.traffic_class, (total >> 8) as u8, total as u8]);
                header[28..30].copy_from_slice(&[route.hop_limit, 17]);
                header[32..36].copy_from_slice(&from.octets());
                header[36..].copy_from_slice(&to.octets());
            }
            _ => {
                let first = 6 << 28 | u32::from(route.traffic_class) << 20 | route.flow_label;
                header[..4].copy_from_slice(&first.to_be_bytes());
                header[4..6].copy_from_slice(&(len as u16).to_be_bytes());
                header[6..8].copy_from_slice(&[0x1b, route.hop_limit]);
                header[8..24].copy_from_slice(&source);
                header[24..].copy_from_slice(&destination);
            }
        }
        Some(header)
    }
}
