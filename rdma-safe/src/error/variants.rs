//! The error of calls on the control path.

use std::time::Duration;

use rdma_sys::LoadError;

use super::{Errno, HugePagesError, PagesError, Verb, limits, missing};
use crate::address::AddressError;
use crate::explain::{advice, advice_on_opening};
use crate::qp::ModifyError;
use crate::{CompletionError, PollError, PostError, QueuePairType};

/// A failed control-path operation: the verb, its `errno`, and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libibverbs or librdmacm could not be loaded.
    #[error(fmt = missing::load)]
    Load(&'static LoadError),

    /// The device list could not be read: `ibv_get_device_list(3)`.
    #[error(fmt = missing::device_list)]
    DeviceList {
        /// The reported error.
        errno: Errno,
    },

    /// libibverbs works, but reports no RDMA device.
    #[error("{}", missing::NO_DEVICE)]
    NoDevice,

    /// There are devices, but not the requested one.
    #[error("no RDMA device {requested}; present: {}{}", available.join(", "), missing::advice_on_name(requested))]
    DeviceNotFound {
        /// The requested device.
        requested: String,
        /// Names of the available devices.
        available: Vec<String>,
    },

    /// `ibv_fork_init(3)` failed, or was called too late.
    #[error("ibv_fork_init failed: {errno}; call rdma_safe::fork::init before any device is opened")]
    Fork {
        /// The reported error; `EINVAL` when the call is too late.
        errno: Errno,
    },

    /// `ibv_open_device(3)` failed.
    #[error("ibv_open_device({device}) failed: {errno}; {}", advice_on_opening(device, *errno))]
    OpenDevice {
        /// Name of the device.
        device: String,
        /// The reported error.
        errno: Errno,
    },

    /// A verb without a separate variant failed.
    #[error("{verb} failed on {device}: {errno}{}", advice(*verb, *errno))]
    Verb {
        /// The function that failed.
        verb: Verb,
        /// Name of the device.
        device: String,
        /// The reported error.
        errno: Errno,
    },

    /// The device has no such port; ports count from 1.
    #[error("{device} has no port {port}: its ports are 1 to {ports}")]
    NoSuchPort {
        /// Name of the device.
        device: String,
        /// The requested port.
        port: u8,
        /// Number of ports.
        ports: u8,
    },

    /// The port's GID table has no entry at this index, or the entry is empty.
    #[error(fmt = missing::no_such_gid)]
    NoSuchGid {
        /// Name of the device.
        device: String,
        /// The port.
        port: u8,
        /// The requested index.
        index: u32,
        /// Length of the port's GID table.
        table_len: u32,
    },

    /// The port has no usable GID.
    #[error(fmt = missing::no_gid)]
    NoGid {
        /// Name of the device.
        device: String,
        /// The port.
        port: u8,
    },

    /// The object was created in the parent of this process, see [`fork`](crate::fork).
    #[error(
        "{object} was opened before this process was forked, and belongs to the parent: open it again in this process"
    )]
    Inherited {
        /// Name of the device, or `rdma_cm` for an event channel or an id.
        object: String,
    },

    /// `ibv_alloc_pd(3)` failed.
    #[error("ibv_alloc_pd failed: {errno}; the device may be out of protection domains")]
    AllocPd {
        /// The reported error.
        errno: Errno,
    },

    /// Memory could not be allocated for registration.
    #[error("cannot allocate {len} bytes to register")]
    Allocate {
        /// Number of bytes.
        len: usize,
    },

    /// Huge pages could not be mapped.
    #[error(transparent)]
    MapHugePages(#[from] HugePagesError),

    /// The kernel did not make pages transparently huge, or did not place memory on a NUMA node.
    #[error(transparent)]
    Pages(#[from] PagesError),

    /// A region of zero length.
    #[error("a memory region or window must have at least one byte")]
    EmptyRegion,

    /// Remote access was requested for a buffer. Peers could then change the bytes behind its slices.
    #[error(
        "a Buffer cannot give peers access ({access:?}), because it derefs to a slice: use ProtectionDomain::expose"
    )]
    BufferAccess {
        /// The requested remote access.
        access: crate::Access,
    },

    /// A memory window cannot be bound to this region, or not with this access.
    #[error("a memory window cannot get this access to a region without {missing:?}: add it to the registration")]
    NotBindable {
        /// The access that the region lacks.
        missing: crate::Access,
    },

    /// A buffer cannot be split into parts of this size.
    #[error(fmt = limits::part_size)]
    PartSize {
        /// Size of a part in bytes.
        size: usize,
        /// Capacity of the buffer in bytes.
        capacity: usize,
    },

    /// Buffers cannot be joined.
    #[error("the buffers cannot be joined: {0}")]
    Join(crate::mr::JoinReason),

    /// The memory of a region cannot be returned.
    #[error("the memory cannot be returned: {0}")]
    Reclaim(crate::mr::ReclaimReason),

    /// `ibv_reg_mr(3)` failed.
    #[error("ibv_reg_mr of {len} bytes with {access:?} failed: {errno}{}", advice(Verb::RegMr, *errno))]
    RegisterMemory {
        /// Length of the region in bytes.
        len: usize,
        /// The requested access.
        access: crate::Access,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_reg_dmabuf_mr(3)` failed.
    #[error(fmt = limits::register_dmabuf)]
    RegisterDmaBuf {
        /// Start of the region in the DMA-BUF, in bytes.
        offset: u64,
        /// Length of the region in bytes.
        len: usize,
        /// The requested access.
        access: crate::Access,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_alloc_dm(3)` failed.
    #[error(fmt = limits::allocate_device_memory)]
    AllocateDeviceMemory {
        /// Requested length in bytes.
        len: usize,
        /// Requested alignment.
        align: usize,
        /// The device's `max_dm_size`.
        max: u64,
        /// The reported error.
        errno: Errno,
    },

    /// A range is not within its region.
    #[error("{len} bytes from offset {offset} do not fit into {region} bytes")]
    OutOfBounds {
        /// Start of the range.
        offset: usize,
        /// Length of the range.
        len: usize,
        /// Length of the region.
        region: usize,
    },

    /// Atomic access at an address that is not a multiple of the operand's size.
    #[error("offset {offset} is not aligned to the {align} bytes that an atomic operand needs")]
    Misaligned {
        /// Offset into the region.
        offset: usize,
        /// The required alignment.
        align: usize,
    },

    /// `ibv_create_comp_channel(3)` failed.
    #[error("ibv_create_comp_channel failed: {errno}; check the limit of open files (ulimit -n)")]
    CreateChannel {
        /// The reported error.
        errno: Errno,
    },

    /// Waiting on or reading a completion channel failed.
    #[error("{verb} on a completion channel failed: {errno}")]
    Channel {
        /// The function that failed.
        verb: Verb,
        /// The reported error.
        errno: Errno,
    },

    /// Waiting for or reading an asynchronous event failed.
    #[error("{verb} of the asynchronous events of {device} failed: {errno}; the device may be gone")]
    AsyncEvents {
        /// The function that failed.
        verb: Verb,
        /// Name of the device.
        device: String,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_create_cq_ex(3)` or `ibv_create_cq(3)` failed.
    #[error(fmt = limits::create_completion_queue)]
    CreateCompletionQueue {
        /// Requested number of entries.
        entries: u32,
        /// The device's `max_cqe`.
        max_entries: u32,
        /// The device's number of completion vectors.
        vectors: u32,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_resize_cq(3)` failed.
    #[error(fmt = limits::resize_completion_queue)]
    ResizeCompletionQueue {
        /// Requested number of entries.
        entries: u32,
        /// The device's `max_cqe`.
        max_entries: u32,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_modify_cq(3)` failed.
    #[error(fmt = limits::moderate_completion_queue)]
    ModerateCompletionQueue {
        /// Requested number of completions.
        count: u16,
        /// Requested period.
        period: Duration,
        /// The device's limits, if it reports any.
        limits: Option<crate::device::CqModeration>,
        /// The reported error.
        errno: Errno,
    },

    /// The provider cannot report these completion fields.
    #[error(fmt = missing::completion_fields)]
    CompletionFields {
        /// Requested fields that are optional, or that the device accepts without implementing them.
        fields: crate::WcFields,
    },

    /// Memory of a provider was to be registered in another domain than its own.
    #[error("{}", missing::FOREIGN_MEMORY)]
    ForeignMemory,

    /// A completion queue was to be created in a domain that is not a parent domain.
    #[error("a completion queue in a domain needs a parent domain: create one with ProtectionDomain::parent_domain")]
    NotParentDomain,

    /// Objects of different contexts cannot be combined, even if both belong to the same device.
    #[error("the {object} belongs to another context: create both from clones of one Context")]
    ForeignContext {
        /// The object.
        object: &'static str,
    },

    /// An adopted object has another parent than the given one.
    #[error(
        "the object was created with another {object}: pass the one that it was created with, or create it with this crate"
    )]
    WrongParent {
        /// The given parent.
        object: &'static str,
    },

    /// The thread that polls a completion queue cannot destroy or reset its queue pairs, or destroy its shared receive
    /// queues.
    #[error(fmt = limits::poll_in_progress)]
    PollInProgress {
        /// The function that failed.
        verb: Verb,
    },

    /// A completion queue without a channel cannot report events.
    #[error("{}", missing::NO_CHANNEL)]
    NoChannel,

    /// A queue pair has no address yet.
    #[error("the queue pair has no address yet; call QueuePair::init first, or init_datagrams for UD")]
    NotInitialised,

    /// An object cannot be destroyed while others use it.
    #[error("the {object} cannot be destroyed while there are {users} that use it; drop them first")]
    InUse {
        /// The object.
        object: &'static str,
        /// The objects that use it.
        users: &'static str,
    },

    /// An endpoint does not fit in its set: the queue may be too small for all completions.
    #[error(fmt = limits::endpoint_set)]
    EndpointSetFull {
        /// Number of completions that the set must have room for, with this endpoint.
        needed: u64,
        /// Number of completions that it has room for.
        capacity: u32,
    },

    /// The endpoint was removed from its set, or belongs to another set.
    #[error("the set has no such endpoint: it was removed, or belongs to another set")]
    NoSuchEndpoint,

    /// The operation is not available for queue pairs of this type.
    #[error("{operation} is not available for {qp_type} queue pairs; {advice}")]
    WrongType {
        /// The requested operation.
        operation: &'static str,
        /// The type.
        qp_type: QueuePairType,
        /// The suggested alternative.
        advice: &'static str,
    },

    /// The GID is not a multicast GID.
    #[error("{gid} is no multicast GID: these are ff00::/8 and ::ffff:224.0.0.0 to ::ffff:239.255.255.255")]
    NotMulticast {
        /// The GID.
        gid: crate::Gid,
    },

    /// `ibv_attach_mcast(3)` or `ibv_detach_mcast(3)` failed.
    #[error(fmt = limits::multicast)]
    Multicast {
        /// The function that failed.
        verb: Verb,
        /// The group.
        gid: crate::Gid,
        /// LID of the group.
        lid: u16,
        /// The reported error.
        errno: Errno,
    },

    /// An address vector was rejected, before or by `ibv_create_ah(3)`.
    #[error(transparent)]
    Address(#[from] Box<AddressError>),

    /// A completion reports a global route header, which is needed to identify the sender.
    #[error("the datagram has a global route header: pass the first 40 bytes of its receive, see Grh::parse")]
    NoGrh,

    /// A completion lacks fields.
    #[error("the completion queue was created without {fields:?}; see CompletionQueueBuilder::fields")]
    MissingFields {
        /// The fields that are needed.
        fields: crate::WcFields,
    },

    /// Connecting by address failed.
    #[error(transparent)]
    Cm(#[from] crate::cm::CmError),

    /// `ibv_create_qp_ex(3)` or `ibv_create_qp(3)` failed.
    #[error(fmt = limits::create_queue_pair)]
    CreateQueuePair {
        /// The type.
        qp_type: QueuePairType,
        /// The requested capacities.
        requested: crate::qp::QueuePairCapacity,
        /// The device's limits.
        limits: String,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_create_srq(3)` failed.
    #[error(fmt = limits::create_shared_receive_queue)]
    CreateSharedReceiveQueue {
        /// Requested number of work requests.
        work_requests: u32,
        /// Scatter/gather elements per work request.
        elements: u32,
        /// The device's `max_srq_wr`.
        max_work_requests: u32,
        /// The device's `max_srq_sge`.
        max_elements: u32,
        /// The device's `max_srq`.
        max_queues: u32,
        /// The reported error.
        errno: Errno,
    },

    /// A tag list exceeds the limits of the device.
    #[error(fmt = limits::tag_list)]
    TagList {
        /// The requested size.
        requested: crate::srq::TagListSize,
        /// Maximum number of tags.
        max_tags: u32,
        /// Maximum number of operations.
        max_ops: u32,
    },

    /// `ibv_create_wq(3)` failed.
    #[error(fmt = limits::create_work_queue)]
    CreateWorkQueue {
        /// Requested number of work requests.
        work_requests: u32,
        /// Scatter/gather elements per work request.
        elements: u32,
        /// The requested options.
        flags: crate::wq::WorkQueueFlags,
        /// The device's `max_wq_type_rq`.
        max_queues: u32,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_modify_wq(3)` failed to change the state of a work queue.
    #[error(fmt = limits::modify_work_queue)]
    ModifyWorkQueue {
        /// Former state, as far as known.
        from: crate::wq::WorkQueueState,
        /// Requested state.
        to: crate::wq::WorkQueueState,
        /// The reported error.
        errno: Errno,
    },

    /// An indirection table was rejected, before or by `ibv_create_rwq_ind_table(3)`.
    #[error(fmt = limits::indirection_table)]
    IndirectionTable {
        /// Requested number of entries.
        entries: usize,
        /// The device's `max_rwq_indirection_table_size`.
        max: u32,
        /// The reported error.
        errno: Errno,
    },

    /// Receive-side scaling was rejected, before or by `ibv_create_qp_ex(3)` with an indirection table.
    #[error(fmt = limits::rx_hash)]
    RxHash {
        /// The requested hash function.
        function: crate::device::RxHashFunctions,
        /// The requested fields.
        fields: crate::device::RxHashFields,
        /// Length of the key in bytes.
        key: usize,
        /// Capabilities of the device.
        caps: Box<crate::device::ReceiveSideScaling>,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_create_flow(3)` failed.
    #[error(fmt = limits::create_flow)]
    CreateFlow {
        /// Number of specifications in the rule.
        specs: usize,
        /// The reported error.
        errno: Errno,
    },

    /// A property of a queue pair cannot be changed in its present state.
    #[error("{change} in RESET or INIT, but the queue pair is in {state}")]
    WrongState {
        /// The requested change.
        change: &'static str,
        /// State of the queue pair.
        state: crate::QueuePairState,
    },

    /// A shared receive queue was not resized: `ibv_modify_srq(3)`.
    #[error(fmt = limits::resize_shared_receive_queue)]
    ResizeSharedReceiveQueue {
        /// Requested number of work requests.
        work_requests: u32,
        /// The present number, if the queue can only grow
        /// ([`Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE`](crate::device::Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE)).
        min_work_requests: Option<u32>,
        /// The device's `max_srq_wr`.
        max_work_requests: u32,
        /// The reported error.
        errno: Errno,
    },

    /// `ibv_modify_srq(3)` failed to arm the limit of a shared receive queue.
    #[error(fmt = limits::limit_shared_receive_queue)]
    LimitSharedReceiveQueue {
        /// Requested limit.
        limit: u32,
        /// Capacity of the queue.
        work_requests: u32,
        /// The reported error.
        errno: Errno,
    },

    /// The provider does not support these send operations.
    #[error("this device does not support {ops:?} on a queue pair of this type")]
    UnsupportedOperations {
        /// The requested operations.
        ops: crate::SendOps,
    },

    /// A transition was rejected, before or by `ibv_modify_qp(3)`.
    #[error(transparent)]
    Modify(#[from] Box<ModifyError>),

    /// A posting was refused.
    #[error(transparent)]
    Post(#[from] PostError),

    /// Polling a completion queue failed.
    #[error(transparent)]
    Poll(#[from] PollError),

    /// Work failed.
    #[error(transparent)]
    Work(#[from] CompletionError),

    /// The peer of an idle connection is gone.
    #[error(transparent)]
    ConnectionLost(#[from] crate::endpoint::ConnectionLost),

    /// An endpoint cannot have the requested keepalive.
    #[error(transparent)]
    Keepalive(#[from] crate::endpoint::KeepaliveError),

    /// A deadline passed.
    #[error(fmt = missing::no_completion)]
    Timeout {
        /// Time waited.
        waited: Duration,
    },

    /// The device lacks a feature.
    #[error("{device} does not support {feature}")]
    Unsupported {
        /// Name of the device.
        device: String,
        /// The feature.
        feature: &'static str,
    },
}
