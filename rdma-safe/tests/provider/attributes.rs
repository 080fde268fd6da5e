//! Attributes of devices and ports, each from its own field.

use rdma_safe::device::{
    AtomicCapability, DeviceCapabilities, OdpCapabilities, OdpOperations, PciAtomicSizes, RawPacketCapabilities,
    RxHashFields, RxHashFunctions, TagMatchingFlags,
};
use rdma_safe::error::Verb;
use rdma_safe::fork::{self, ForkStatus};
use rdma_safe::port::{LinkSpeed, LinkWidth, PhysicalState, PortCapabilities, PortCapabilities2};
use rdma_safe::sys::*;
use rdma_safe::{Error, QueuePairType};

use crate::fake::{Config, Fake, Port, fork_inits};

fn extended(attr: &mut ibv_device_attr_ex) {
    attr.odp_caps.general_caps = 3;
    attr.odp_caps.per_transport_caps.rc_odp_caps = 1;
    attr.odp_caps.per_transport_caps.uc_odp_caps = 2;
    attr.odp_caps.per_transport_caps.ud_odp_caps = 4;
    attr.xrc_odp_caps = 8 | 1 << 30;
    attr.completion_timestamp_mask = 0xffff_ffff;
    attr.device_cap_flags_ex = 1 << 34 | 1 << 40;
    attr.orig_attr.device_cap_flags = 1 << 20;
    attr.tso_caps = ibv_tso_caps { max_tso: 65_536, supported_qpts: 1 << 8 };
    attr.rss_caps = ibv_rss_caps {
        supported_qpts: 1 << 8,
        max_rwq_indirection_tables: 5,
        max_rwq_indirection_table_size: 6,
        rx_hash_fields_mask: 1 | 1 << 31,
        rx_hash_function: 1,
    };
    attr.max_wq_type_rq = 7;
    attr.packet_pacing_caps =
        ibv_packet_pacing_caps { qp_rate_limit_min: 8, qp_rate_limit_max: 9, supported_qpts: 1 << 2 };
    attr.raw_packet_caps = 5;
    attr.tm_caps = ibv_tm_caps { max_rndv_hdr_size: 10, max_num_tags: 11, flags: 1, max_ops: 12, max_sge: 13 };
    attr.cq_mod_caps = ibv_cq_moderation_caps { max_cq_count: 14, max_cq_period: 15 };
    attr.max_dm_size = 16;
    attr.pci_atomic_caps = ibv_pci_atomic_caps { fetch_add: 1, swap: 2, compare_swap: 6 };
    attr.phys_port_cnt_ex = 300;
}

#[test]
fn every_extended_attribute_has_its_field() {
    let fake = Fake::new(Config { change_device: extended, ..Config::default() });
    let context = fake.open();
    let attributes = context.attributes();

    let odp = attributes.on_demand_paging().unwrap();
    assert_eq!(odp.general, OdpCapabilities::SUPPORTED | OdpCapabilities::IMPLICIT);
    assert_eq!((odp.rc, odp.uc, odp.ud), (OdpOperations::SEND, OdpOperations::RECV, OdpOperations::WRITE));
    assert_eq!(odp.xrc.bits(), 8 | 1 << 30, "unknown bits are kept");
    assert_eq!(attributes.completion_timestamp_mask(), Some(0xffff_ffff));
    let both = DeviceCapabilities::RAW_SCATTER_FCS | DeviceCapabilities::ATOMIC_WRITE | DeviceCapabilities::XRC;
    assert_eq!(attributes.capabilities(), both, "both fields count");
    let tso = attributes.segmentation_offload().unwrap();
    assert_eq!((tso.max_payload, tso.qp_types.contains(QueuePairType::RAW_PACKET)), (65_536, true));
    let rss = attributes.receive_side_scaling().unwrap();
    assert_eq!((rss.max_indirection_tables, rss.max_indirection_table_size), (5, 6));
    assert_eq!(rss.hash_fields, RxHashFields::SRC_IPV4 | RxHashFields::INNER);
    assert_eq!(rss.hash_functions, RxHashFunctions::TOEPLITZ);
    assert_eq!(attributes.max_receive_work_queues(), 7);
    let pacing = attributes.packet_pacing().unwrap();
    assert_eq!((pacing.min_kbps, pacing.max_kbps), (8, 9));
    assert!(pacing.qp_types.contains(QueuePairType::RC) && !pacing.qp_types.contains(QueuePairType::UD));
    assert_eq!(attributes.raw_packets(), RawPacketCapabilities::CVLAN_STRIPPING | RawPacketCapabilities::IP_CSUM);
    let tags = attributes.tag_matching().unwrap();
    assert_eq!((tags.max_rendezvous_header, tags.max_tags, tags.max_ops, tags.max_sge), (10, 11, 12, 13));
    assert_eq!(tags.flags, TagMatchingFlags::RC);
    let moderation = attributes.cq_moderation().unwrap();
    assert_eq!((moderation.max_count, moderation.max_period), (14, 15));
    assert_eq!(attributes.max_device_memory(), 16);
    let pci = attributes.pci_atomics();
    assert_eq!((pci.fetch_add, pci.swap), (PciAtomicSizes::BYTES_4, PciAtomicSizes::BYTES_8));
    assert_eq!(pci.compare_swap, PciAtomicSizes::BYTES_8 | PciAtomicSizes::BYTES_16);
    assert_eq!((attributes.physical_ports(), attributes.ports()), (300, 1));
}

#[test]
fn a_device_without_the_extended_query_reports_only_what_the_old_query_has() {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        extended(attr);
        attr.orig_attr.device_cap_flags = 1 << 13;
    };
    let fake = Fake::new(Config { query_device_ex: false, change_device, ..Config::default() });
    let context = fake.open();
    let attributes = context.attributes();
    assert_eq!(attributes.capabilities(), DeviceCapabilities::SRQ_RESIZE);
    assert!(attributes.on_demand_paging().is_none());
    assert!(attributes.segmentation_offload().is_none());
    assert!(attributes.receive_side_scaling().is_none());
    assert!(attributes.packet_pacing().is_none());
    assert!(attributes.tag_matching().is_none());
    assert!(attributes.cq_moderation().is_none());
    assert_eq!((attributes.completion_timestamp_mask(), attributes.hca_core_clock()), (None, 0));
    assert_eq!((attributes.max_device_memory(), attributes.max_receive_work_queues()), (0, 0));
    assert_eq!(attributes.raw_packets(), RawPacketCapabilities::empty());
    assert_eq!(attributes.pci_atomics().swap, PciAtomicSizes::empty());
    assert_eq!(attributes.physical_ports(), 1);
}

#[test]
fn every_limit_has_its_field() {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        let orig = &mut attr.orig_attr;
        orig.page_size_cap = 101;
        orig.max_sge_rd = 102;
        orig.max_res_rd_atom = 103;
        orig.max_mw = 104;
        orig.max_ah = 105;
        orig.max_mcast_grp = 106;
        orig.max_mcast_qp_attach = 107;
        orig.max_total_mcast_qp_attach = 108;
        orig.max_raw_ipv6_qp = 109;
        orig.max_raw_ethy_qp = 110;
        orig.max_ee = 111;
        orig.max_ee_rd_atom = 112;
        orig.max_ee_init_rd_atom = 113;
        orig.max_rdd = 114;
        orig.max_fmr = 115;
        orig.max_map_per_fmr = 116;
        orig.max_srq = -1;
        orig.max_srq_wr = 117;
        orig.max_srq_sge = 118;
        orig.max_pkeys = 119;
        orig.local_ca_ack_delay = 120;
        orig.atomic_cap = IBV_ATOMIC_GLOB;
    };
    let fake = Fake::new(Config { change_device, ..Config::default() });
    let context = fake.open();
    let limits = context.attributes();
    assert_eq!(limits.page_size_cap(), 101);
    let seen = [
        limits.max_sge_rd(),
        limits.max_res_rd_atom(),
        limits.max_mw(),
        limits.max_ah(),
        limits.max_mcast_grp(),
        limits.max_mcast_qp_attach(),
        limits.max_total_mcast_qp_attach(),
        limits.max_raw_ipv6_qp(),
        limits.max_raw_ethy_qp(),
        limits.max_ee(),
        limits.max_ee_rd_atom(),
        limits.max_ee_init_rd_atom(),
        limits.max_rdd(),
        limits.max_fmr(),
        limits.max_map_per_fmr(),
        limits.max_srq_wr(),
        limits.max_srq_sge(),
        limits.max_pkeys().into(),
        limits.local_ca_ack_delay().into(),
    ];
    assert!(seen.into_iter().eq(102..=120), "{seen:?}");
    assert_eq!(limits.max_srq(), 0, "a negative limit counts as 0");
    assert_eq!(limits.atomic_capability(), AtomicCapability::GLOBAL);
}

fn link(attr: &mut ibv_port_attr) {
    attr.port_cap_flags = 1 << 16 | 1 << 26;
    attr.port_cap_flags2 = 1 << 5;
    attr.bad_pkey_cntr = 1;
    attr.qkey_viol_cntr = 2;
    attr.sm_lid = 3;
    attr.lmc = 4;
    attr.max_vl_num = 5;
    attr.sm_sl = 6;
    attr.subnet_timeout = 7;
    attr.init_type_reply = 8;
    attr.active_width = 2;
    attr.active_speed = 128;
    attr.phys_state = 5;
    attr.flags = 1;
}

#[test]
fn every_attribute_of_a_port_has_its_field() {
    let wide = |attr: &mut ibv_port_attr| {
        link(attr);
        attr.active_speed_ex = 256;
        (attr.active_width, attr.max_vl_num, attr.flags) = (77, 9, 0);
    };
    let ports = vec![Port { change: link, ..Port::infiniband() }, Port { change: wide, ..Port::infiniband() }];
    let fake = Fake::new(Config { ports, ..Config::default() });
    let context = fake.open();
    let port = context.query_port(1).unwrap();
    assert_eq!(port.capabilities(), PortCapabilities::CM | PortCapabilities::IP_BASED_GIDS);
    assert_eq!(port.capabilities2(), PortCapabilities2::LINK_SPEED_HDR);
    assert_eq!((port.bad_pkeys(), port.bad_qkeys(), port.subnet_manager_lid()), (1, 2, 3));
    assert_eq!((port.lid_mask_bits(), port.virtual_lanes(), port.subnet_manager_sl()), (4, Some(15), 6));
    assert_eq!((port.subnet_timeout(), port.init_type_reply()), (7, 8));
    assert_eq!((port.active_width(), port.active_speed()), (LinkWidth(2), LinkSpeed::NDR));
    assert_eq!(port.nominal_mbps(), Some(400_000));
    assert_eq!(port.physical_state(), PhysicalState::LINK_UP);
    assert!(port.needs_global_route());

    let port = context.query_port(2).unwrap();
    assert_eq!(port.active_speed(), LinkSpeed::XDR, "the newer field counts");
    assert_eq!((port.nominal_mbps(), port.virtual_lanes()), (None, None), "undefined codes");
    assert!(!port.needs_global_route());
}

#[test]
fn the_speed_of_a_port_is_in_mbit() {
    let fake = Fake::new(Config { port_speed: Some(4_000), ..Config::default() });
    let context = fake.open();
    assert_eq!(context.port_speed(1).unwrap(), 400_000);
    for port in [0, 2] {
        let error = context.port_speed(port).unwrap_err();
        assert!(matches!(error, Error::NoSuchPort { ports: 1, .. }), "{error}");
    }
    assert_eq!(fake.calls("ibv_query_port_speed"), 1);
    fake.fail("ibv_query_port_speed", libc::EIO);
    let error = context.port_speed(1).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryPortSpeed, .. }), "{error}");
}

#[test]
fn forking_cannot_be_prepared_once_a_device_was_opened() {
    let fake = Fake::new(Config::default());
    drop(fake.open());
    assert_eq!(fork::status().unwrap(), ForkStatus::DISABLED);
    let error = fork::init().unwrap_err();
    assert!(matches!(error, Error::Fork { errno } if errno.0 == libc::EINVAL), "{error:?}");
    assert!(error.to_string().contains("before any device is opened"), "{error}");
    assert_eq!(fork_inits(), 0, "ibv_fork_init is not called: another thread may be registering memory");
}
