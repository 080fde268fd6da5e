//! What can go wrong on the control path, and what to do about it.

mod absent;
mod call;
mod huge_pages;
mod limits;

use std::time::Duration;

use rdma_sys::LoadError;

pub use huge_pages::HugePagesError;

use crate::explain::{advice, advice_on_opening};
use crate::{AddressError, CompletionError, Errno, ModifyError, PollError, PostError, QueuePairType};

/// A failed control-path operation: which verb, its `errno`, and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libibverbs or librdmacm could not be loaded.
    #[error(fmt = absent::load)]
    Load(&'static LoadError),

    /// The device list could not be read: `ibv_get_device_list(3)`.
    #[error(
        "ibv_get_device_list failed: {errno}; {}; for a device of the kernel, check that the ib_uverbs kernel module is loaded \
         (modprobe ib_uverbs) and that /sys/class/infiniband_verbs can be read",
        absent::SOFT
    )]
    DeviceList {
        /// As reported.
        errno: Errno,
    },

    /// libibverbs works and reports no RDMA device.
    #[error("{}", absent::NO_DEVICE)]
    NoDevice,

    /// There are devices, but not this one.
    #[error("no RDMA device {wanted}; present: {}{}", available.join(", "), absent::advice_on_name(wanted))]
    DeviceNotFound {
        /// What was asked for.
        wanted: String,
        /// Names of the devices there are.
        available: Vec<String>,
    },

    /// `ibv_fork_init(3)` failed, or was too late.
    #[error("ibv_fork_init failed: {errno}; call rdma_safe::fork_init before any device is opened")]
    Fork {
        /// As reported; `EINVAL` when it is too late.
        errno: Errno,
    },

    /// `ibv_open_device(3)` failed.
    #[error("ibv_open_device({device}) failed: {errno}; {}", advice_on_opening(*errno))]
    OpenDevice {
        /// Name of the device.
        device: String,
        /// As reported.
        errno: Errno,
    },

    /// A verb failed that has no variant of its own.
    #[error("{verb} failed on {device}: {errno}{}", advice(verb, *errno))]
    Verb {
        /// The verb.
        verb: &'static str,
        /// Name of the device.
        device: String,
        /// As reported.
        errno: Errno,
    },

    /// The device has no such port; ports count from 1.
    #[error("{device} has no port {port}: its ports are 1 to {ports}")]
    NoSuchPort {
        /// Name of the device.
        device: String,
        /// The port asked for.
        port: u8,
        /// How many there are.
        ports: u8,
    },

    /// The port's GID table has no entry at this index, or the entry is empty.
    #[error(
        "{device} port {port} has no GID at index {index} (the table has {table_len} entries, many may be empty); \
         list them with the show_gids example or /sys/class/infiniband/{device}/ports/{port}/gids"
    )]
    NoSuchGid {
        /// Name of the device.
        device: String,
        /// The port.
        port: u8,
        /// The index asked for.
        index: u32,
        /// Length of the port's GID table.
        table_len: u32,
    },

    /// The port has no usable GID at all.
    #[error(
        "{device} port {port} has no usable GID; on RoCE a GID appears when the network interface below the device is \
         up and has an address"
    )]
    NoGid {
        /// Name of the device.
        device: String,
        /// The port.
        port: u8,
    },

    /// `ibv_alloc_pd(3)` failed.
    #[error("ibv_alloc_pd failed: {errno}; the device may be out of protection domains")]
    AllocPd {
        /// As reported.
        errno: Errno,
    },

    /// Memory could not be allocated for registration.
    #[error("cannot allocate {len} bytes to register")]
    Allocate {
        /// How many bytes.
        len: usize,
    },

    /// Huge pages could not be mapped.
    #[error(transparent)]
    MapHugePages(#[from] HugePagesError),

    /// Nothing to register: a zero-length region.
    #[error("a memory region or window must have at least one byte")]
    EmptyRegion,

    /// A buffer shall be open to peers, which could then change the bytes behind its slices.
    #[error(
        "a Buffer cannot give peers access ({access:?}), because it derefs to a slice: use ProtectionDomain::expose"
    )]
    BufferAccess {
        /// The remote rights asked for.
        access: crate::Access,
    },

    /// A region that a memory window cannot be bound to, or not with these rights.
    #[error("a memory window cannot be bound like this to a region without {missing:?}: register it with that, too")]
    NotBindable {
        /// What the region was registered without.
        missing: crate::Access,
    },

    /// A part that a buffer cannot be cut into.
    #[error(
        "a buffer of {capacity} bytes cannot be cut into parts of {size}: no part may be empty, and one has to fit"
    )]
    PartSize {
        /// Size of a part in bytes.
        size: usize,
        /// Bytes there are.
        capacity: usize,
    },

    /// `ibv_reg_mr(3)` failed.
    #[error("ibv_reg_mr of {len} bytes with {access:?} failed: {errno}{}", advice("ibv_reg_mr", *errno))]
    RegisterMemory {
        /// Length of the region in bytes.
        len: usize,
        /// Access asked for.
        access: crate::Access,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_reg_dmabuf_mr(3)` failed.
    #[error(
        "ibv_reg_dmabuf_mr of {len} bytes from {offset} with {access:?} failed: {errno}; the descriptor must be of a \
             DMA-BUF that has these bytes"
    )]
    RegisterDmaBuf {
        /// Where in the DMA-BUF the region begins, in bytes.
        offset: u64,
        /// Length of the region in bytes.
        len: usize,
        /// Access asked for.
        access: crate::Access,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_alloc_dm(3)` failed.
    #[error(fmt = limits::allocate_device_memory)]
    AllocateDeviceMemory {
        /// Bytes asked for.
        len: usize,
        /// Alignment asked for.
        align: usize,
        /// The device's `max_dm_size`.
        max: u64,
        /// As reported.
        errno: Errno,
    },

    /// A range does not lie within its region.
    #[error("bytes {offset}..{offset}+{len} do not lie within a region of {region} bytes")]
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
        /// Alignment needed.
        align: usize,
    },

    /// `ibv_create_comp_channel(3)` failed.
    #[error("ibv_create_comp_channel failed: {errno}; check the limit of open files (ulimit -n)")]
    CreateChannel {
        /// As reported.
        errno: Errno,
    },

    /// Waiting on or reading a completion channel failed.
    #[error("{call} on a completion channel failed: {errno}")]
    Channel {
        /// The call.
        call: &'static str,
        /// As reported.
        errno: Errno,
    },

    /// Waiting for or reading an asynchronous event failed.
    #[error("{call} of the asynchronous events of {device} failed: {errno}; the device may be gone")]
    AsyncEvents {
        /// The call.
        call: &'static str,
        /// Name of the device.
        device: String,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_create_cq_ex(3)` or `ibv_create_cq(3)` failed.
    #[error(fmt = limits::create_completion_queue)]
    CreateCompletionQueue {
        /// Entries asked for.
        entries: u32,
        /// The device's `max_cqe`.
        max_entries: u32,
        /// The device's number of completion vectors.
        vectors: u32,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_resize_cq(3)` failed.
    #[error(fmt = limits::resize_completion_queue)]
    ResizeCompletionQueue {
        /// Entries asked for.
        entries: u32,
        /// The device's `max_cqe`.
        max_entries: u32,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_modify_cq(3)` failed.
    #[error(fmt = limits::moderate_completion_queue)]
    ModerateCompletionQueue {
        /// Completions asked for.
        count: u16,
        /// Period asked for.
        period: Duration,
        /// The device's limits, if it reports any.
        allowed: Option<crate::CqModeration>,
        /// As reported.
        errno: Errno,
    },

    /// The provider cannot report these completion fields.
    #[error(
        "this device cannot report {fields:?} in a completion; leave them out of CompletionQueueBuilder::fields, and \
         EndpointBuilder::timestamps unset"
    )]
    CompletionFields {
        /// Requested fields that not every device has, or that this one accepts without having a function for them.
        fields: crate::WcFields,
    },

    /// Memory of a provider was to be registered in another domain than its own.
    #[error(
        "memory of a provider is registered in the domain that it was allocated from, of which a parent domain is another one: \
         call alloc_buf of the domain that is to register it"
    )]
    ForeignMemory,

    /// A completion queue was to go into a domain that is not a parent domain.
    #[error("a completion queue goes into a parent domain only: make one with ProtectionDomain::parent_domain")]
    NotParentDomain,

    /// Objects of different contexts do not go together, not even of one device that was opened twice.
    #[error("the {object} belongs to another context: make both from clones of one Context")]
    ForeignContext {
        /// Which object.
        object: &'static str,
    },

    /// An object of other code does not belong to what it is said to.
    #[error(
        "the object was made with another {object} than the one given: say what it was made with, or make it with this crate"
    )]
    WrongParent {
        /// What it was to be made with.
        object: &'static str,
    },

    /// A queue pair cannot be destroyed or reset, and a shared receive queue not be destroyed, by a thread that is polling one of
    /// its completion queues.
    #[error(
        "this thread is polling a completion queue of the object, whose lock {verb} needs on some devices: drop the Poll \
         or Poller first"
    )]
    PolledHere {
        /// The verb.
        verb: &'static str,
    },

    /// A completion queue without a channel cannot report events.
    #[error(
        "there is no completion channel to report events over: make the queue with CompletionQueueBuilder::channel, or the \
         endpoint with EndpointBuilder::events"
    )]
    NoChannel,

    /// A queue pair has no address of its own yet to connect from.
    #[error("the queue pair has no address yet; call QueuePair::init first, or init_datagrams where it is of UD")]
    NotInitialised,

    /// An object is not destroyed yet, since others need it.
    #[error("the {object} is not destroyed as long as there are {by} that use it; drop them first")]
    InUse {
        /// What was to be destroyed.
        object: &'static str,
        /// What uses it.
        by: &'static str,
    },

    /// An endpoint does not fit into its set: there may be more completions at once than the queue has room for.
    #[error(
        "the endpoints of the set can have {needed} completions at once, and its queue has room for {capacity}: build the set for \
         {needed} (EndpointSet::builder), or the endpoint for less work (EndpointBuilder::send_depth, recv_depth)"
    )]
    EndpointSetFull {
        /// Completions that the set has to have room for, with this endpoint.
        needed: u64,
        /// What it has room for.
        capacity: u32,
    },

    /// An endpoint was removed from its set before, or is of another set.
    #[error("the set has no such endpoint: it was removed, or is of another set")]
    NoSuchEndpoint,

    /// Queue pairs of this type cannot be made here, or do not have this.
    #[error("{what} is not for {qp_type} queue pairs; {instead}")]
    WrongType {
        /// What was asked for.
        what: &'static str,
        /// The type.
        qp_type: QueuePairType,
        /// What to do instead.
        instead: &'static str,
    },

    /// A GID that is not of a multicast group.
    #[error("{gid} is not of a multicast group: those are ff00::/8 and ::ffff:224.0.0.0 to ::ffff:239.255.255.255")]
    NotMulticast {
        /// The GID.
        gid: crate::Gid,
    },

    /// `ibv_attach_mcast(3)` or `ibv_detach_mcast(3)` failed.
    #[error(fmt = limits::multicast)]
    Multicast {
        /// The verb.
        verb: &'static str,
        /// The group.
        gid: crate::Gid,
        /// Its LID.
        lid: u16,
        /// As reported.
        errno: Errno,
    },

    /// An address vector was refused, or would have been: `ibv_create_ah(3)`.
    #[error(transparent)]
    Address(#[from] Box<AddressError>),

    /// A completion has a global route header, without which its sender cannot be found.
    #[error(
        "the completion says that the datagram has a global route header: give the first 40 bytes of its receive, Grh::of"
    )]
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
        /// The capacities asked for.
        asked: crate::QueuePairCapacity,
        /// The device's limits.
        allowed: String,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_create_srq(3)` failed.
    #[error(fmt = limits::create_shared_receive_queue)]
    CreateSharedReceiveQueue {
        /// Work requests asked for.
        work_requests: u32,
        /// Scatter/gather elements of each.
        elements: u32,
        /// The device's `max_srq_wr`.
        max_work_requests: u32,
        /// The device's `max_srq_sge`.
        max_elements: u32,
        /// The device's `max_srq`.
        max_queues: u32,
        /// As reported.
        errno: Errno,
    },

    /// A list of tags is longer than the device's.
    #[error(fmt = limits::tag_list)]
    TagList {
        /// What was asked for.
        asked: crate::TagListSize,
        /// Most tags.
        max_tags: u32,
        /// Most operations.
        max_ops: u32,
    },

    /// `ibv_create_wq(3)` failed.
    #[error(fmt = limits::create_work_queue)]
    CreateWorkQueue {
        /// Work requests asked for.
        work_requests: u32,
        /// Scatter/gather elements of each.
        elements: u32,
        /// Options asked for.
        flags: crate::WorkQueueFlags,
        /// The device's `max_wq_type_rq`.
        max_queues: u32,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_modify_wq(3)` failed to change the state of a work queue.
    #[error(
        "bringing a work queue from {from} to {to} failed: {errno}; it goes from RESET to RDY, to ERR, and to RESET again"
    )]
    ModifyWorkQueue {
        /// State it was in, as far as is known here.
        from: crate::WorkQueueState,
        /// State asked for.
        to: crate::WorkQueueState,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_create_rwq_ind_table(3)` failed, or would.
    #[error(fmt = limits::indirection_table)]
    IndirectionTable {
        /// Entries asked for.
        entries: usize,
        /// The device's `max_rwq_indirection_table_size`.
        max: u32,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_create_qp_ex(3)` with an indirection table failed, or would.
    #[error(fmt = limits::rx_hash)]
    RxHash {
        /// Hash function asked for.
        function: crate::RxHashFunctions,
        /// Fields asked for.
        fields: crate::RxHashFields,
        /// Length of the key in bytes.
        key: usize,
        /// What the device has.
        caps: Box<crate::ReceiveSideScaling>,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_create_flow(3)` failed.
    #[error(fmt = limits::create_flow)]
    CreateFlow {
        /// Specifications of the rule.
        specs: usize,
        /// As reported.
        errno: Errno,
    },

    /// Something that a queue pair cannot be given any more.
    #[error("{what} in RESET or INIT, but the queue pair is in {state}")]
    TooLate {
        /// What was asked for.
        what: &'static str,
        /// The state it is in.
        state: crate::QueuePairState,
    },

    /// `ibv_modify_srq(3)` failed to resize a shared receive queue.
    #[error(fmt = limits::resize_shared_receive_queue)]
    ResizeSharedReceiveQueue {
        /// Work requests asked for.
        work_requests: u32,
        /// The device's `max_srq_wr`.
        max_work_requests: u32,
        /// As reported.
        errno: Errno,
    },

    /// `ibv_modify_srq(3)` failed to arm the limit of a shared receive queue.
    #[error(fmt = limits::limit_shared_receive_queue)]
    LimitSharedReceiveQueue {
        /// The limit asked for.
        limit: u32,
        /// What the queue holds.
        work_requests: u32,
        /// As reported.
        errno: Errno,
    },

    /// The provider does not support these send operations.
    #[error("this device does not support {ops:?} on a queue pair of this type")]
    UnsupportedOperations {
        /// The operations asked for.
        ops: crate::SendOps,
    },

    /// `ibv_modify_qp(3)` failed, or would.
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

    /// A deadline passed.
    #[error("no completion within {waited:?}: the peer may be gone, or it never posted the matching work")]
    Timeout {
        /// How long was waited.
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

/// The result of a control-path operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
