//! Hand-written declarations of types, constants and functions that are newer than the headers of `bindings.rs`.
//!
//! A test compares sizes, offsets and values with newer headers, if they are available. When `bindings.rs` moves to
//! newer headers, the generator says which of these to remove.

use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;

use crate::bindings::*;

/// Describes a memory region for `ibv_reg_mr_ex` (rdma-core 59).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mr_init_attr {
    /// Length in bytes.
    pub length: usize,
    /// Or-ed [`ibv_access_flags`].
    pub access: c_int,
    /// Valid fields of those below: or-ed [`ibv_mr_init_attr_mask`].
    pub comp_mask: u64,
    /// The address that a peer uses for the first byte.
    pub iova: u64,
    /// Address of the first byte.
    pub addr: *mut c_void,
    /// Descriptor of a dma-buf, instead of `addr`.
    pub fd: c_int,
    /// Offset of the region in the dma-buf.
    pub fd_offset: u64,
    /// Hints for the DMA transactions on this region.
    pub dmah: *mut ibv_dmah,
    /// The buffer that contains `addr` (rdma-core 64).
    pub buf: *mut ibv_buf,
}

/// Mask of valid fields in [`ibv_mr_init_attr`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct ibv_mr_init_attr_mask(pub u32);
/// `iova` is valid.
pub const IBV_REG_MR_MASK_IOVA: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 0);
/// `addr` is valid.
pub const IBV_REG_MR_MASK_ADDR: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 1);
/// `fd` is valid.
pub const IBV_REG_MR_MASK_FD: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 2);
/// `fd_offset` is valid.
pub const IBV_REG_MR_MASK_FD_OFFSET: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 3);
/// `dmah` is valid.
pub const IBV_REG_MR_MASK_DMAH: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 4);
/// `buf` is valid (rdma-core 64).
pub const IBV_REG_MR_MASK_BUF: ibv_mr_init_attr_mask = ibv_mr_init_attr_mask(1 << 5);

/// A handle with hints for DMA transactions (rdma-core 59).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_dmah {
    /// The context that the handle belongs to.
    pub context: *mut ibv_context,
}

/// Mask of valid fields in [`ibv_dmah_init_attr`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct ibv_dmah_init_attr_mask(pub u32);
/// `cpu_id` is valid.
pub const IBV_DMAH_INIT_ATTR_MASK_CPU_ID: ibv_dmah_init_attr_mask = ibv_dmah_init_attr_mask(1 << 0);
/// `ph` is valid.
pub const IBV_DMAH_INIT_ATTR_MASK_PH: ibv_dmah_init_attr_mask = ibv_dmah_init_attr_mask(1 << 1);
/// `tph_mem_type` is valid.
pub const IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE: ibv_dmah_init_attr_mask = ibv_dmah_init_attr_mask(1 << 2);

/// Memory type of a TLP processing hint.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct ibv_tph_mem_type(pub u32);
/// Volatile memory.
pub const IBV_TPH_MEM_TYPE_VM: ibv_tph_mem_type = ibv_tph_mem_type(0);
/// Persistent memory.
pub const IBV_TPH_MEM_TYPE_PM: ibv_tph_mem_type = ibv_tph_mem_type(1);

/// Describes a DMA handle for `ibv_alloc_dmah` (rdma-core 59).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_dmah_init_attr {
    /// Valid fields of those below: or-ed [`ibv_dmah_init_attr_mask`].
    pub comp_mask: u32,
    /// The CPU whose cache is the target.
    pub cpu_id: u32,
    /// PCIe processing hint.
    pub ph: u8,
    /// An [`ibv_tph_mem_type`].
    pub tph_mem_type: u8,
}

/// A buffer from `ibv_alloc_buf` (rdma-core 64).
#[repr(C)]
#[derive(Debug)]
pub struct ibv_buf {
    _opaque: [u8; 0],
}

/// Operations of a queue pair that a completion counter counts.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct ibv_qp_attach_comp_cntr_op(pub u32);
/// Sends.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_SEND: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 0);
/// Receives.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_RECV: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 1);
/// RDMA reads.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 2);
/// RDMA reads by the peer.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 3);
/// RDMA writes.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 4);
/// RDMA writes by the peer.
pub const IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE: ibv_qp_attach_comp_cntr_op = ibv_qp_attach_comp_cntr_op(1 << 5);

/// Completion counter capabilities of a device (rdma-core 65).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_comp_cntr_caps {
    /// Largest value, after which a counter wraps.
    pub max_value: u64,
    /// Largest number of counters.
    pub max_counters: u32,
    /// Or-ed [`ibv_qp_attach_comp_cntr_op`].
    pub supported_qp_attach_ops: u32,
}

/// A completion counter (rdma-core 65).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_comp_cntr {
    /// The context that the counter belongs to.
    pub context: *mut ibv_context,
    /// The kernel's handle.
    pub handle: u32,
}

/// Unit of a completion counter.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub struct ibv_comp_cntr_type(pub u32);
/// Work requests.
pub const IBV_COMP_CNTR_TYPE_WRS: ibv_comp_cntr_type = ibv_comp_cntr_type(0);
/// Bytes.
pub const IBV_COMP_CNTR_TYPE_BYTES: ibv_comp_cntr_type = ibv_comp_cntr_type(1);

/// Describes a completion counter for `ibv_create_comp_cntr` (rdma-core 65).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_comp_cntr_init_attr {
    /// No bit is defined yet.
    pub comp_mask: u32,
    /// Unit of the counter; the C field is called `type`.
    pub type_: ibv_comp_cntr_type,
    /// No flag is defined yet.
    pub flags: u32,
}

/// Describes what `ibv_qp_attach_comp_cntr` attaches (rdma-core 65).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_qp_attach_comp_cntr_attr {
    /// No bit is defined yet.
    pub comp_mask: u32,
    /// Or-ed [`ibv_qp_attach_comp_cntr_op`].
    pub op_mask: u32,
}

// Layouts that a C compiler uses on every 64-bit target.
const _: () = {
    assert!(size_of::<ibv_mr_init_attr>() == 72 && align_of::<ibv_mr_init_attr>() == 8);
    assert!(offset_of!(ibv_mr_init_attr, access) == 8 && offset_of!(ibv_mr_init_attr, comp_mask) == 16);
    assert!(offset_of!(ibv_mr_init_attr, iova) == 24 && offset_of!(ibv_mr_init_attr, addr) == 32);
    assert!(offset_of!(ibv_mr_init_attr, fd) == 40 && offset_of!(ibv_mr_init_attr, fd_offset) == 48);
    assert!(offset_of!(ibv_mr_init_attr, dmah) == 56 && offset_of!(ibv_mr_init_attr, buf) == 64);
    assert!(size_of::<ibv_dmah>() == 8);
    assert!(size_of::<ibv_dmah_init_attr>() == 12 && align_of::<ibv_dmah_init_attr>() == 4);
    assert!(offset_of!(ibv_dmah_init_attr, cpu_id) == 4 && offset_of!(ibv_dmah_init_attr, ph) == 8);
    assert!(offset_of!(ibv_dmah_init_attr, tph_mem_type) == 9);
    assert!(size_of::<ibv_comp_cntr_caps>() == 16 && align_of::<ibv_comp_cntr_caps>() == 8);
    assert!(offset_of!(ibv_comp_cntr_caps, max_counters) == 8);
    assert!(offset_of!(ibv_comp_cntr_caps, supported_qp_attach_ops) == 12);
    assert!(size_of::<ibv_comp_cntr>() == 16 && offset_of!(ibv_comp_cntr, handle) == 8);
    assert!(size_of::<ibv_comp_cntr_init_attr>() == 12);
    assert!(offset_of!(ibv_comp_cntr_init_attr, type_) == 4);
    assert!(offset_of!(ibv_comp_cntr_init_attr, flags) == 8);
    assert!(size_of::<ibv_qp_attach_comp_cntr_attr>() == 8);
    assert!(offset_of!(ibv_qp_attach_comp_cntr_attr, op_mask) == 4);
};

crate::macros::flags!(ibv_mr_init_attr_mask, ibv_dmah_init_attr_mask, ibv_qp_attach_comp_cntr_op);
crate::macros::zeroed!(
    ibv_mr_init_attr,
    ibv_dmah,
    ibv_dmah_init_attr,
    ibv_comp_cntr_caps,
    ibv_comp_cntr,
    ibv_comp_cntr_init_attr,
    ibv_qp_attach_comp_cntr_attr
);

// Values that later releases added to enums of `bindings.rs`.

/// The speed of a port changed (rdma-core 62).
pub const IBV_EVENT_DEVICE_SPEED_CHANGE: ibv_event_type = ibv_event_type(20);
/// DMA needs bounce buffers: a confidential guest (rdma-core 64). A bit of `device_cap_flags_ex`.
pub const IBV_DEVICE_CC_DMA_BOUNCE: u64 = 1 << 41;
/// Flush supports on-demand paging.
pub const IBV_ODP_SUPPORT_FLUSH: ibv_odp_transport_cap_bits = ibv_odp_transport_cap_bits(1 << 6);
/// Atomic write supports on-demand paging.
pub const IBV_ODP_SUPPORT_ATOMIC_WRITE: ibv_odp_transport_cap_bits = ibv_odp_transport_cap_bits(1 << 7);
/// Queries the order of data that only the device reads.
pub const IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY: ibv_query_qp_data_in_order_flags =
    ibv_query_qp_data_in_order_flags(1 << 1);
/// Allows `ibv_alloc_buf` to return memory that a confidential guest shares with its host (rdma-core 64).
pub const IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC: ibv_parent_domain_init_attr_mask =
    ibv_parent_domain_init_attr_mask(1 << 2);
/// `rdma_resolve_addrinfo` succeeded (rdma-core 60).
pub const RDMA_CM_EVENT_ADDRINFO_RESOLVED: rdma_cm_event_type = rdma_cm_event_type(16);
/// `rdma_resolve_addrinfo` failed (rdma-core 60).
pub const RDMA_CM_EVENT_ADDRINFO_ERROR: rdma_cm_event_type = rdma_cm_event_type(17);
/// An event of `rdma_write_cm_event`. The first eight bytes of `rdma_cm_event::param` are that call's `arg` (rdma-core 60).
pub const RDMA_CM_EVENT_USER: rdma_cm_event_type = rdma_cm_event_type(18);
/// An internal event of librdmacm (rdma-core 60).
pub const RDMA_CM_EVENT_INTERNAL: rdma_cm_event_type = rdma_cm_event_type(19);
/// Queries the subnet administrator (rdma-core 60).
pub const RAI_SA: u32 = 0x10;
/// Queries the name service (rdma-core 60).
pub const RAI_DNS: u32 = 0x20;

// The generator uses these types for the table fields of these names.

/// `ibv_alloc_buf`
pub type ibv_alloc_buf_fn = unsafe extern "C" fn(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void;
/// `ibv_alloc_dmah`
pub type ibv_alloc_dmah_fn =
    unsafe extern "C" fn(context: *mut ibv_context, attr: *mut ibv_dmah_init_attr) -> *mut ibv_dmah;
/// `ibv_create_comp_cntr`
pub type ibv_create_comp_cntr_fn =
    unsafe extern "C" fn(context: *mut ibv_context, cc_attr: *mut ibv_comp_cntr_init_attr) -> *mut ibv_comp_cntr;
/// `ibv_dealloc_dmah`
pub type ibv_dealloc_dmah_fn = unsafe extern "C" fn(dmah: *mut ibv_dmah) -> c_int;
/// `ibv_destroy_comp_cntr`
pub type ibv_destroy_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr) -> c_int;
/// `ibv_dm_export_dmabuf_fd`
pub type ibv_dm_export_dmabuf_fd_fn = unsafe extern "C" fn(dm: *mut ibv_dm) -> c_int;
/// `ibv_export_buf_dmabuf_fd`
pub type ibv_export_buf_dmabuf_fd_fn = unsafe extern "C" fn(buf: *mut ibv_buf) -> c_int;
/// `ibv_free_buf`
pub type ibv_free_buf_fn = unsafe extern "C" fn(buf: *mut ibv_buf);
/// `ibv_inc_comp_cntr`
pub type ibv_inc_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, amount: u64) -> c_int;
/// `ibv_inc_err_comp_cntr`
pub type ibv_inc_err_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, amount: u64) -> c_int;
/// `ibv_qp_attach_comp_cntr`
pub type ibv_qp_attach_comp_cntr_fn = unsafe extern "C" fn(
    qp: *mut ibv_qp,
    comp_cntr: *mut ibv_comp_cntr,
    attr: *mut ibv_qp_attach_comp_cntr_attr,
) -> c_int;
/// `_ibv_query_comp_cntr_caps`
pub type _ibv_query_comp_cntr_caps_fn =
    unsafe extern "C" fn(context: *mut ibv_context, caps: *mut ibv_comp_cntr_caps, caps_size: usize) -> c_int;
/// `ibv_query_port_speed`
pub type ibv_query_port_speed_fn =
    unsafe extern "C" fn(context: *mut ibv_context, port_num: u32, port_speed: *mut u64) -> c_int;
/// `ibv_read_comp_cntr`
pub type ibv_read_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, value: *mut u64) -> c_int;
/// `ibv_read_err_comp_cntr`
pub type ibv_read_err_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, value: *mut u64) -> c_int;
/// `ibv_reg_buf_mr`
pub type ibv_reg_buf_mr_fn = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr;
/// `ibv_reg_mr_ex`
pub type ibv_reg_mr_ex_fn = unsafe extern "C" fn(pd: *mut ibv_pd, mr_init_attr: *mut ibv_mr_init_attr) -> *mut ibv_mr;
/// `ibv_set_comp_cntr`
pub type ibv_set_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, value: u64) -> c_int;
/// `ibv_set_err_comp_cntr`
pub type ibv_set_err_comp_cntr_fn = unsafe extern "C" fn(comp_cntr: *mut ibv_comp_cntr, value: u64) -> c_int;
/// `rdma_query_addrinfo`
pub type rdma_query_addrinfo_fn = unsafe extern "C" fn(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int;
/// `rdma_resolve_addrinfo`
pub type rdma_resolve_addrinfo_fn = unsafe extern "C" fn(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int;
/// `rdma_write_cm_event`
pub type rdma_write_cm_event_fn =
    unsafe extern "C" fn(id: *mut rdma_cm_id, event: rdma_cm_event_type, status: c_int, arg: u64) -> c_int;
/// `repoll_create`
pub type repoll_create_fn = unsafe extern "C" fn(flags: c_int) -> c_int;
/// `repoll_ctl`
pub type repoll_ctl_fn =
    unsafe extern "C" fn(epfd: c_int, op: c_int, fd: c_int, event: *mut libc::epoll_event) -> c_int;
/// `repoll_wait`
pub type repoll_wait_fn =
    unsafe extern "C" fn(epfd: c_int, events: *mut libc::epoll_event, maxevents: c_int, timeout: c_int) -> c_int;

// Two older functions that are exported, but declared in no installed header.

/// `ibv_dontfork_range`
pub type ibv_dontfork_range_fn = unsafe extern "C" fn(base: *mut c_void, size: usize) -> c_int;
/// `ibv_dofork_range`
pub type ibv_dofork_range_fn = unsafe extern "C" fn(base: *mut c_void, size: usize) -> c_int;
