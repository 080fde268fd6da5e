//! Capabilities of a fake device, and the faults it can simulate.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use rdma_sys::*;

/// The capabilities and behavior of a fake device.
#[derive(Clone)]
pub(crate) struct Config {
    /// Whether `ibv_create_cq_ex` exists.
    pub(crate) extended_cq: bool,
    /// Whether `ibv_create_qp_ex` exists.
    pub(crate) extended_qp: bool,
    /// Whether `ibv_query_device_ex` exists.
    pub(crate) query_device_ex: bool,
    /// Whether the context is a `verbs_context`. Without it, none of the extended functions above exist.
    pub(crate) extended_context: bool,
    /// Changes the attributes that `ibv_query_device_ex` and `ibv_query_device` report.
    pub(crate) change_device: fn(&mut ibv_device_attr_ex),
    /// Support for shared receive queues, and for resizing them.
    pub(crate) srqs: bool,
    pub(crate) srq_resize: bool,
    /// Support for changing registrations, for DMA-BUFs, and for null regions.
    pub(crate) rereg: bool,
    pub(crate) dmabuf: bool,
    pub(crate) null_mr: bool,
    /// `enum ibv_odp_general_caps`; 0 for a device without on-demand paging and `ibv_advise_mr`.
    pub(crate) odp: u64,
    /// Whether device memory has the functions that copy.
    pub(crate) device_memory_copies: bool,
    /// Whether this is a confidential guest. There, unprotected provider memory is a DMA-BUF.
    pub(crate) confidential: bool,
    /// Support for resizing completion queues, and the highest moderation limits: completions and microseconds.
    pub(crate) cq_resize: bool,
    pub(crate) moderation: Option<(u16, u16)>,
    /// Maximum number of multicast groups; 0 for a device without multicast.
    pub(crate) groups: i32,
    /// Support for work queues, receive-side scaling, flows and counters.
    pub(crate) steering: bool,
    /// Operations that completion counters support; `None` for a device without completion counters.
    pub(crate) comp_cntrs: Option<u32>,
    /// Support for thread domains and parent domains.
    pub(crate) domains: bool,
    /// Support for creating completion queues in parent domains.
    pub(crate) domain_cqs: bool,
    /// Supported ECE options; `None` for a device without ECE.
    pub(crate) ece_options: Option<u32>,
    /// Whether `ibv_modify_qp_rate_limit` exists.
    pub(crate) rate_limits: bool,
    /// Result of `ibv_query_qp_data_in_order` for each operation.
    pub(crate) data_in_order: BTreeMap<u32, u32>,
    /// Whether `ibv_query_qp_data_in_order` supports flags.
    pub(crate) data_in_order_flags: bool,
    /// Sets the values that `ibv_query_rt_values_ex` reports; `None` for a device without this operation.
    pub(crate) raw_clock: Option<fn(&mut ibv_values_ex)>,
    /// Speed that `ibv_query_port_speed` reports, in 100 Mbit/s.
    pub(crate) port_speed: Option<u64>,
    /// Support for asynchronous events.
    pub(crate) async_events: bool,
    /// Whether the kernel supports `ibv_query_gid_ex` and `ibv_query_gid_table`.
    pub(crate) gid_queries: bool,
    /// Completion fields of extended queues.
    pub(crate) wc_flags: u64,
    /// Completion fields that creation accepts although their accessors are NULL.
    pub(crate) hollow_fields: u64,
    /// Whether extended queues lack `end_poll`.
    pub(crate) no_end_poll: bool,
    /// Send operations of extended queue pairs.
    pub(crate) send_ops: u64,
    /// Send operations that creation accepts although their function pointers are NULL.
    pub(crate) hollow_ops: u64,
    /// Whether UD queue pairs lack `wr_set_ud_addr`.
    pub(crate) no_ud_addr: bool,
    /// Scatter/gather elements granted to sends of extended queue pairs, regardless of the requested number.
    pub(crate) granted_sges: Option<u32>,
    /// Send work requests that classic queue pairs report as granted, regardless of the requested number.
    pub(crate) granted_sends: Option<u32>,
    /// Whether destroying a queue pair removes its completions, as mlx5 does. Otherwise they stay.
    pub(crate) sweeps: bool,
    /// Whether the device behaves like the rxe provider of rdma-core 44, including its bugs.
    pub(crate) rxe: bool,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) transport: ibv_transport_type,
    pub(crate) guid: u64,
    pub(crate) max_inline: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_srq_wr: u32,
    pub(crate) max_qp_rd_atom: i32,
    pub(crate) max_qp_init_rd_atom: i32,
    pub(crate) ports: Vec<Port>,
    /// GIDs of peers that cannot be resolved, with the errno of the attempt.
    pub(crate) unreachable: BTreeMap<[u8; 16], i32>,
}

/// A port.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) link_layer: u32,
    pub(crate) lid: u16,
    pub(crate) gids: Vec<FakeGid>,
    pub(crate) gid_table_len: i32,
    /// P_Keys in host byte order.
    pub(crate) pkeys: Vec<u16>,
    pub(crate) max_mtu: ibv_mtu,
    pub(crate) active_mtu: ibv_mtu,
    pub(crate) max_msg_sz: u32,
    /// Changes the attributes that `ibv_query_port` reports.
    pub(crate) change: fn(&mut ibv_port_attr),
}

/// An entry of a GID table.
#[derive(Clone, Copy)]
pub(crate) struct FakeGid {
    pub(crate) index: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) gid_type: ibv_gid_type,
    pub(crate) interface: u32,
}

impl FakeGid {
    pub(crate) fn roce_v2(index: u32, address: Ipv4Addr) -> Self {
        FakeGid { index, gid: address.to_ipv6_mapped().octets(), gid_type: IBV_GID_TYPE_ROCE_V2, interface: 7 }
    }

    pub(crate) fn new(index: u32, address: Ipv6Addr, gid_type: ibv_gid_type) -> Self {
        FakeGid { index, gid: address.octets(), gid_type, interface: 7 }
    }
}

impl Port {
    /// RoCE, with a link-local GID at index 0 and an IPv4 one at index 1.
    pub(crate) fn ethernet() -> Self {
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 1);
        Port {
            link_layer: IBV_LINK_LAYER_ETHERNET,
            lid: 0,
            gids: vec![
                FakeGid::new(0, link_local, IBV_GID_TYPE_ROCE_V1),
                FakeGid::roce_v2(1, Ipv4Addr::new(10, 9, 9, 1)),
            ],
            gid_table_len: 16,
            pkeys: vec![0xffff],
            max_mtu: IBV_MTU_4096,
            active_mtu: IBV_MTU_1024,
            max_msg_sz: 1 << 20,
            change: |_| {},
        }
    }

    /// InfiniBand, with a LID and a GID of the default subnet.
    pub(crate) fn infiniband() -> Self {
        let gid = Ipv6Addr::new(0xfe80, 0, 0, 0, 2, 0xc903, 0, 1);
        Port {
            link_layer: IBV_LINK_LAYER_INFINIBAND,
            lid: 0x11,
            gids: vec![FakeGid::new(0, gid, IBV_GID_TYPE_IB)],
            pkeys: vec![0xffff, 0x8001],
            ..Port::ethernet()
        }
    }
}

impl Default for Config {
    /// A RoCE device with one port and almost all capabilities.
    fn default() -> Self {
        Config {
            extended_cq: true,
            extended_qp: true,
            query_device_ex: true,
            extended_context: true,
            change_device: |_| {},
            rereg: true,
            dmabuf: true,
            null_mr: true,
            cq_resize: true,
            moderation: None,
            srqs: true,
            srq_resize: true,
            groups: 16,
            steering: false,
            comp_cntrs: None,
            domains: true,
            domain_cqs: true,
            ece_options: Some(0xff),
            rate_limits: true,
            data_in_order: BTreeMap::new(),
            data_in_order_flags: true,
            raw_clock: None,
            port_speed: None,
            async_events: true,
            gid_queries: true,
            wc_flags: u64::from(IBV_WC_STANDARD_FLAGS),
            odp: 0,
            device_memory_copies: true,
            confidential: false,
            hollow_fields: 0,
            no_end_poll: false,
            send_ops: 0x3ff,
            hollow_ops: 0,
            no_ud_addr: false,
            granted_sges: None,
            granted_sends: None,
            sweeps: false,
            rxe: false,
            vendor_id: 0x02c9,
            vendor_part_id: 0,
            transport: IBV_TRANSPORT_IB,
            guid: 0x0200_00ff_fe00_0001,
            max_inline: 256,
            max_sge: 8,
            max_cqe: 4096,
            max_qp_wr: 4096,
            max_srq_wr: 2048,
            max_qp_rd_atom: 8,
            max_qp_init_rd_atom: 8,
            ports: vec![Port::ethernet()],
            unreachable: BTreeMap::new(),
        }
    }
}

impl Config {
    /// A device with or without extended completion queues and extended queue pairs.
    pub(crate) fn interfaces(extended_cq: bool, extended_qp: bool) -> Self {
        Config { extended_cq, extended_qp, ..Config::default() }
    }

    /// A device with work queues, flows and counters.
    pub(crate) fn steering() -> Self {
        Config { steering: true, ..Config::default() }
    }

    /// SoftRoCE of rdma-core 44.
    pub(crate) fn rxe() -> Self {
        Config { rxe: true, vendor_id: 0xff_ffff, ..Config::default() }
    }
}

/// The time at which posted work is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// When it is posted.
    AtPost,
    /// When a completion queue is polled.
    AtPoll,
    /// When the test calls [`Fake::progress`](super::Fake::progress).
    Manual,
}

/// How a posting fails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostFault {
    pub(crate) errno: i32,
    /// Number of work requests that the device accepts although the call fails.
    pub(crate) taken: usize,
    pub(crate) bad: Bad,
}

/// The value of `bad_wr` after a failed posting.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bad {
    /// The first work request that was not accepted, as the manual page says.
    FirstNotTaken,
    /// Unchanged.
    Untouched,
}
