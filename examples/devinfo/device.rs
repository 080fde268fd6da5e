//! Attributes of a device.

use std::fmt::{self, Write};

use common::Result;
use rdma_safe::{Context, Device};
use rdma_sys::*;

use crate::{names, port};

/// Writes the attributes of a device and of one or all of its ports.
pub(crate) fn describe(out: &mut String, device: &Device, only: Option<u8>, verbose: bool) -> Result<()> {
    let context = device.open()?;
    if let Some(port) = only {
        context.query_port(port)?;
    }
    identity(out, device, &context)?;
    if verbose {
        limits(out, &context.attributes().as_raw().orig_attr)?;
        extended(out, context.attributes().as_raw())?;
        writeln!(out, "\tnum_comp_vectors:\t\t{}", context.completion_vectors())?;
    }
    for number in 1..=context.attributes().ports() {
        if only.is_none_or(|only| only == number) {
            port::describe(out, &context, number, verbose)?;
        }
    }
    Ok(())
}

fn identity(out: &mut String, device: &Device, context: &Context) -> fmt::Result {
    let (attributes, transport) = (context.attributes(), device.transport_type());
    let name = device.name();
    writeln!(out, "hca_id:\t{name}")?;
    writeln!(out, "\ttransport:\t\t\t{} ({})", names::transport(transport), transport.0)?;
    let firmware = attributes.firmware_version();
    if !firmware.is_empty() {
        writeln!(out, "\tfw_ver:\t\t\t\t{firmware}")?;
    }
    writeln!(out, "\tnode_guid:\t\t\t{}", attributes.node_guid())?;
    writeln!(out, "\tsys_image_guid:\t\t\t{}", attributes.sys_image_guid())?;
    writeln!(out, "\tvendor_id:\t\t\t{:#06x}", attributes.vendor_id())?;
    // ibv_devinfo prints an `int`.
    writeln!(out, "\tvendor_part_id:\t\t\t{}", attributes.vendor_part_id() as i32)?;
    writeln!(out, "\thw_ver:\t\t\t\t0x{:X}", attributes.hw_ver())?;
    let board = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/board_id")).unwrap_or_default();
    let board = board.strip_suffix('\n').unwrap_or(&board);
    if !board.is_empty() {
        writeln!(out, "\tboard_id:\t\t\t{board}")?;
    }
    writeln!(out, "\tphys_port_cnt:\t\t\t{}", attributes.ports())
}

fn limits(out: &mut String, attributes: &ibv_device_attr) -> fmt::Result {
    let ibv_device_attr { atomic_cap, max_fmr, max_srq, .. } = *attributes;
    writeln!(out, "\tmax_mr_size:\t\t\t{:#x}", attributes.max_mr_size)?;
    writeln!(out, "\tpage_size_cap:\t\t\t{:#x}", attributes.page_size_cap)?;
    writeln!(out, "\tmax_qp:\t\t\t\t{}", attributes.max_qp)?;
    writeln!(out, "\tmax_qp_wr:\t\t\t{}", attributes.max_qp_wr)?;
    writeln!(out, "\tdevice_cap_flags:\t\t{:#010x}", attributes.device_cap_flags)?;
    flags(out, attributes.device_cap_flags.into(), names::DEVICE_CAPS)?;
    writeln!(out, "\tmax_sge:\t\t\t{}", attributes.max_sge)?;
    writeln!(out, "\tmax_sge_rd:\t\t\t{}", attributes.max_sge_rd)?;
    writeln!(out, "\tmax_cq:\t\t\t\t{}", attributes.max_cq)?;
    writeln!(out, "\tmax_cqe:\t\t\t{}", attributes.max_cqe)?;
    writeln!(out, "\tmax_mr:\t\t\t\t{}", attributes.max_mr)?;
    writeln!(out, "\tmax_pd:\t\t\t\t{}", attributes.max_pd)?;
    writeln!(out, "\tmax_qp_rd_atom:\t\t\t{}", attributes.max_qp_rd_atom)?;
    writeln!(out, "\tmax_ee_rd_atom:\t\t\t{}", attributes.max_ee_rd_atom)?;
    writeln!(out, "\tmax_res_rd_atom:\t\t{}", attributes.max_res_rd_atom)?;
    writeln!(out, "\tmax_qp_init_rd_atom:\t\t{}", attributes.max_qp_init_rd_atom)?;
    writeln!(out, "\tmax_ee_init_rd_atom:\t\t{}", attributes.max_ee_init_rd_atom)?;
    writeln!(out, "\tatomic_cap:\t\t\t{} ({})", names::atomic_capability(atomic_cap), atomic_cap.0)?;
    writeln!(out, "\tmax_ee:\t\t\t\t{}", attributes.max_ee)?;
    writeln!(out, "\tmax_rdd:\t\t\t{}", attributes.max_rdd)?;
    writeln!(out, "\tmax_mw:\t\t\t\t{}", attributes.max_mw)?;
    writeln!(out, "\tmax_raw_ipv6_qp:\t\t{}", attributes.max_raw_ipv6_qp)?;
    writeln!(out, "\tmax_raw_ethy_qp:\t\t{}", attributes.max_raw_ethy_qp)?;
    writeln!(out, "\tmax_mcast_grp:\t\t\t{}", attributes.max_mcast_grp)?;
    writeln!(out, "\tmax_mcast_qp_attach:\t\t{}", attributes.max_mcast_qp_attach)?;
    writeln!(out, "\tmax_total_mcast_qp_attach:\t{}", attributes.max_total_mcast_qp_attach)?;
    writeln!(out, "\tmax_ah:\t\t\t\t{}", attributes.max_ah)?;
    writeln!(out, "\tmax_fmr:\t\t\t{max_fmr}")?;
    if max_fmr != 0 {
        writeln!(out, "\tmax_map_per_fmr:\t\t{}", attributes.max_map_per_fmr)?;
    }
    writeln!(out, "\tmax_srq:\t\t\t{max_srq}")?;
    if max_srq != 0 {
        writeln!(out, "\tmax_srq_wr:\t\t\t{}", attributes.max_srq_wr)?;
        writeln!(out, "\tmax_srq_sge:\t\t\t{}", attributes.max_srq_sge)?;
    }
    writeln!(out, "\tmax_pkeys:\t\t\t{}", attributes.max_pkeys)?;
    writeln!(out, "\tlocal_ca_ack_delay:\t\t{}", attributes.local_ca_ack_delay)
}

fn extended(out: &mut String, attributes: &ibv_device_attr_ex) -> fmt::Result {
    on_demand_paging(out, attributes)?;
    match attributes.completion_timestamp_mask {
        0 => writeln!(out, "\tcompletion_timestamp_mask not supported")?,
        mask => writeln!(out, "\tcompletion timestamp_mask:\t\t\t{mask:#018x}")?,
    }
    match attributes.hca_core_clock {
        0 => writeln!(out, "\tcore clock not supported")?,
        clock => writeln!(out, "\thca_core_clock:\t\t\t{clock}kHZ")?,
    }
    if attributes.raw_packet_caps != 0 {
        writeln!(out, "\traw packet caps:")?;
        known_flags(out, attributes.raw_packet_caps.into(), names::RAW_PACKET)?;
    }
    writeln!(out, "\tdevice_cap_flags_ex:\t\t0x{:X}", attributes.device_cap_flags_ex)?;
    // The lower half repeats `device_cap_flags`.
    flags(out, attributes.device_cap_flags_ex & !u64::from(u32::MAX), names::DEVICE_CAPS_EX)?;
    segmentation(out, &attributes.tso_caps)?;
    receive_side_scaling(out, &attributes.rss_caps)?;
    writeln!(out, "\tmax_wq_type_rq:\t\t\t{}", attributes.max_wq_type_rq)?;
    let pacing = &attributes.packet_pacing_caps;
    writeln!(out, "\tpacket_pacing_caps:")?;
    writeln!(out, "\t\tqp_rate_limit_min:\t{}kbps", pacing.qp_rate_limit_min)?;
    writeln!(out, "\t\tqp_rate_limit_max:\t{}kbps", pacing.qp_rate_limit_max)?;
    if pacing.qp_rate_limit_max != 0 {
        supported_types(out, pacing.supported_qpts)?;
    }
    tag_matching(out, &attributes.tm_caps)?;
    let moderation = &attributes.cq_mod_caps;
    if moderation.max_cq_count != 0 && moderation.max_cq_period != 0 {
        writeln!(out, "\n\tcq moderation caps:")?;
        writeln!(out, "\t\tmax_cq_count:\t{}", moderation.max_cq_count)?;
        writeln!(out, "\t\tmax_cq_period:\t{} us\n", moderation.max_cq_period)?;
    }
    if attributes.max_dm_size != 0 {
        writeln!(out, "\tmaximum available device memory:\t{}Bytes\n", attributes.max_dm_size)?;
    }
    Ok(())
}

fn on_demand_paging(out: &mut String, attributes: &ibv_device_attr_ex) -> fmt::Result {
    let caps = &attributes.odp_caps;
    writeln!(out, "\tgeneral_odp_caps:")?;
    flags(out, caps.general_caps, names::ODP_GENERAL)?;
    let transports = [
        ("rc", caps.per_transport_caps.rc_odp_caps),
        ("uc", caps.per_transport_caps.uc_odp_caps),
        ("ud", caps.per_transport_caps.ud_odp_caps),
        ("xrc", attributes.xrc_odp_caps),
    ];
    for (transport, caps) in transports {
        writeln!(out, "\t{transport}_odp_caps:")?;
        match caps {
            0 => writeln!(out, "\t\t\t\t\tNO SUPPORT")?,
            caps => flags(out, caps.into(), names::ODP_TRANSPORT)?,
        }
    }
    Ok(())
}

fn segmentation(out: &mut String, caps: &ibv_tso_caps) -> fmt::Result {
    writeln!(out, "\ttso_caps:")?;
    // ibv_devinfo prints an `int`.
    writeln!(out, "\t\tmax_tso:\t\t\t{}", caps.max_tso as i32)?;
    match caps.max_tso {
        0 => Ok(()),
        _ => supported_types(out, caps.supported_qpts),
    }
}

fn receive_side_scaling(out: &mut String, caps: &ibv_rss_caps) -> fmt::Result {
    writeln!(out, "\trss_caps:")?;
    writeln!(out, "\t\tmax_rwq_indirection_tables:\t\t\t{}", caps.max_rwq_indirection_tables)?;
    writeln!(out, "\t\tmax_rwq_indirection_table_size:\t\t\t{}", caps.max_rwq_indirection_table_size)?;
    writeln!(out, "\t\trx_hash_function:\t\t\t\t{:#x}", caps.rx_hash_function)?;
    writeln!(out, "\t\trx_hash_fields_mask:\t\t\t\t0x{:X}", caps.rx_hash_fields_mask)?;
    match caps.supported_qpts {
        0 => Ok(()),
        types => supported_types(out, types),
    }
}

fn tag_matching(out: &mut String, caps: &ibv_tm_caps) -> fmt::Result {
    if caps.max_num_tags == 0 {
        return writeln!(out, "\ttag matching not supported");
    }
    writeln!(out, "\tmax_rndv_hdr_size:\t\t{}", caps.max_rndv_hdr_size)?;
    writeln!(out, "\tmax_num_tags:\t\t\t{}", caps.max_num_tags)?;
    writeln!(out, "\tmax_ops:\t\t\t{}", caps.max_ops)?;
    writeln!(out, "\tmax_sge:\t\t\t{}", caps.max_sge)?;
    writeln!(out, "\tflags:")?;
    known_flags(out, caps.flags.into(), &[(IBV_TM_CAP_RC.0.into(), "IBV_TM_CAP_RC")])
}

fn supported_types(out: &mut String, types: u32) -> fmt::Result {
    writeln!(out, "\t\tsupported_qp:")?;
    flags(out, types.into(), names::QP_TYPES)
}

fn known_flags(out: &mut String, set: u64, names: &[(u64, &str)]) -> fmt::Result {
    names.iter().filter(|(flag, _)| set & flag != 0).try_for_each(|(_, name)| writeln!(out, "\t\t\t\t\t{name}"))
}

fn flags(out: &mut String, set: u64, names: &[(u64, &str)]) -> fmt::Result {
    known_flags(out, set, names)?;
    match names.iter().fold(set, |set, (flag, _)| set & !flag) {
        0 => Ok(()),
        unknown => writeln!(out, "\t\t\t\t\tUnknown flags: 0x{unknown:X}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_flags_print_as_a_number() {
        let mut out = String::new();
        flags(&mut out, 0x4000_0003, names::DEVICE_CAPS).unwrap();
        assert_eq!(out, "\t\t\t\t\tRESIZE_MAX_WR\n\t\t\t\t\tBAD_PKEY_CNTR\n\t\t\t\t\tUnknown flags: 0x40000000\n");
    }

    #[test]
    fn queue_pair_types_are_bits() {
        let mut out = String::new();
        supported_types(&mut out, 1 << 8 | 1 << 4 | 1 << 2).unwrap();
        assert_eq!(
            out,
            "\t\tsupported_qp:\n\t\t\t\t\tSUPPORT_RAW_PACKET\n\t\t\t\t\tSUPPORT_UD\n\t\t\t\t\tUnknown flags: 0x4\n"
        );
    }
}
