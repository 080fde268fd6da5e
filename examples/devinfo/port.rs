//! Attributes of a port.

use std::fmt::Write;

use common::{Result, gid};
use rdma_safe::address::GidEntry;
use rdma_safe::device::TransportType;
use rdma_safe::{Context, GidType, LinkLayer};

use crate::names;

pub(crate) fn describe(out: &mut String, context: &Context, number: u8, verbose: bool) -> Result<()> {
    let attributes = context.query_port(number)?;
    let port = attributes.as_raw();
    writeln!(out, "\t\tport:\t{number}")?;
    writeln!(out, "\t\t\tstate:\t\t\t{} ({})", names::port_state(port.state), port.state.0)?;
    writeln!(out, "\t\t\tmax_mtu:\t\t{} ({})", names::mtu(port.max_mtu), port.max_mtu.0)?;
    writeln!(out, "\t\t\tactive_mtu:\t\t{} ({})", names::mtu(port.active_mtu), port.active_mtu.0)?;
    writeln!(out, "\t\t\tsm_lid:\t\t\t{}", port.sm_lid)?;
    writeln!(out, "\t\t\tport_lid:\t\t{}", port.lid)?;
    writeln!(out, "\t\t\tport_lmc:\t\t{:#04x}", port.lmc)?;
    writeln!(out, "\t\t\tlink_layer:\t\t{}", names::link_layer(port.link_layer))?;
    if verbose {
        writeln!(out, "\t\t\tmax_msg_sz:\t\t{:#x}", port.max_msg_sz)?;
        writeln!(out, "\t\t\tport_cap_flags:\t\t{:#010x}", port.port_cap_flags)?;
        writeln!(out, "\t\t\tport_cap_flags2:\t{:#06x}", port.port_cap_flags2)?;
        writeln!(out, "\t\t\tmax_vl_num:\t\t{} ({})", names::virtual_lanes(port.max_vl_num), port.max_vl_num)?;
        writeln!(out, "\t\t\tbad_pkey_cntr:\t\t{:#x}", port.bad_pkey_cntr)?;
        writeln!(out, "\t\t\tqkey_viol_cntr:\t\t{:#x}", port.qkey_viol_cntr)?;
        writeln!(out, "\t\t\tsm_sl:\t\t\t{}", port.sm_sl)?;
        writeln!(out, "\t\t\tpkey_tbl_len:\t\t{}", port.pkey_tbl_len)?;
        writeln!(out, "\t\t\tgid_tbl_len:\t\t{}", port.gid_tbl_len)?;
        writeln!(out, "\t\t\tsubnet_timeout:\t\t{}", port.subnet_timeout)?;
        writeln!(out, "\t\t\tinit_type_reply:\t{}", port.init_type_reply)?;
        writeln!(out, "\t\t\tactive_width:\t\t{}X ({})", names::width(port.active_width), port.active_width)?;
        // Speeds from 400 Gbit/s on do not fit into `active_speed`.
        let speed = match port.active_speed_ex {
            0 => port.active_speed.into(),
            speed => speed,
        };
        writeln!(out, "\t\t\tactive_speed:\t\t{} ({speed})", names::speed(speed))?;
        if context.transport_type() == TransportType::IB {
            let state = port.phys_state;
            writeln!(out, "\t\t\tphys_state:\t\t{} ({state})", names::physical_state(state))?;
        }
        let is_ethernet = attributes.link_layer() == LinkLayer::ETHERNET;
        for line in context.gids(number)?.iter().filter_map(|entry| gid_line(entry, is_ethernet)) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(writeln!(out)?)
}

/// The line of a GID. `None` for those that ibv_devinfo leaves out.
fn gid_line(entry: &GidEntry, is_ethernet: bool) -> Option<String> {
    let GidEntry { gid, index, gid_type, .. } = *entry;
    if gid.0[8..] == [0; 8] {
        return None;
    }
    let text = match gid_type {
        GidType::INFINIBAND | GidType::ROCE_V1 => gid::in_full(gid),
        GidType::ROCE_V2 => gid.to_string(),
        _ => return None,
    };
    let protocol = match gid_type {
        _ if !is_ethernet => "",
        GidType::ROCE_V2 => ", RoCE v2",
        _ => ", RoCE v1",
    };
    Some(format!("\t\t\tGID[{index:3}]:\t\t{text}{protocol}"))
}
