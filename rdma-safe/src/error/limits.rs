//! Messages of calls that mostly fail at a device limit: the requested value and the limit.

use std::fmt::{Formatter, Result};
use std::time::Duration;

use crate::error::Verb;
use crate::explain::advice;
use crate::{Errno, QueuePairType};

pub(super) fn allocate_device_memory(
    len: &usize,
    align: &usize,
    max: &u64,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "ibv_alloc_dm of {len} bytes with alignment {align} failed: {errno}; the device has {max} bytes in total, and the \
         alignment must be a power of two"
    )
}

pub(super) fn part_size(size: &usize, capacity: &usize, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "a buffer of {capacity} bytes cannot be split into parts of {size}: no part may be empty or larger than the buffer"
    )
}

pub(super) fn register_dmabuf(
    offset: &u64,
    len: &usize,
    access: &crate::Access,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "ibv_reg_dmabuf_mr of {len} bytes from {offset} with {access:?} failed: {errno}; the descriptor must belong to a \
         DMA-BUF that contains these bytes"
    )
}

pub(super) fn modify_work_queue(
    from: &crate::wq::WorkQueueState,
    to: &crate::wq::WorkQueueState,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "moving a work queue from {from} to {to} failed: {errno}; allowed are RESET to RDY, RDY to ERR, and any state to RESET"
    )
}

pub(super) fn create_completion_queue(
    entries: &u32,
    max_entries: &u32,
    vectors: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "creating a completion queue of {entries} entries failed: {errno}; the device allows 1 to {max_entries} \
         entries and completion vectors 0 to {}{}",
        vectors.saturating_sub(1),
        advice_unless_limit(Verb::CreateCq, *errno)
    )
}

pub(super) fn resize_completion_queue(
    entries: &u32,
    max_entries: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "resizing a completion queue to {entries} entries failed: {errno}; it needs room for its present completions, and \
         at most {max_entries} entries"
    )
}

pub(super) fn moderate_completion_queue(
    count: &u16,
    period: &Duration,
    limits: &Option<crate::device::CqModeration>,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "moderating events to {count} completions or {period:?} failed: {errno}; the device allows {}",
        moderation(*limits)
    )
}

pub(super) fn create_queue_pair(
    qp_type: &QueuePairType,
    requested: &crate::qp::QueuePairCapacity,
    limits: &str,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "creating {} queue pair failed: {errno}; asked for {requested}; the device allows {limits}{}{}",
        qp_type.with_article(),
        inline_data(requested.max_inline_data),
        advice_unless_limit(Verb::CreateQp, *errno)
    )
}

/// Hints at inline data, whose limit devices do not report.
fn inline_data(requested: u32) -> String {
    match requested {
        0 => String::new(),
        requested => format!(", and does not report its limit of inline data: try less than {requested} bytes"),
    }
}

pub(super) fn limit_shared_receive_queue(
    limit: &u32,
    work_requests: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "a limit of {limit} for a shared receive queue of {work_requests} work requests failed: {errno}; it can be 0 (none) \
         to {work_requests}"
    )
}

pub(super) fn multicast(verb: &Verb, gid: &crate::Gid, lid: &u16, errno: &Errno, f: &mut Formatter<'_>) -> Result {
    let advice = match *verb {
        Verb::DetachMcast => {
            "pass the GID and the LID that the queue pair was attached with; it can be detached once for each time"
        }
        _ => {
            "on InfiniBand the LID must be the group's, 0xc000 to 0xfffe; the device also limits the number of groups, and of \
             members per group (DeviceAttributes::max_mcast_grp, max_mcast_qp_attach)"
        }
    };
    write!(f, "{verb} of the group {gid} with LID {lid:#x} failed: {errno}; {advice}")
}

pub(super) fn create_shared_receive_queue(
    work_requests: &u32,
    elements: &u32,
    max_work_requests: &u32,
    max_elements: &u32,
    max_queues: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "creating a shared receive queue of {work_requests} work requests with {elements} elements failed: {errno}; the \
         device allows 1 to {max_work_requests} work requests with {max_elements} elements, and {max_queues} queues{}",
        advice_unless_limit(Verb::CreateSrq, *errno)
    )
}

pub(super) fn resize_shared_receive_queue(
    work_requests: &u32,
    min_work_requests: &Option<u32>,
    max_work_requests: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    if let Some(min) = min_work_requests {
        return write!(
            f,
            "resizing a shared receive queue to {work_requests} work requests was not tried: the queue has {min}, and on this \
             device it can only grow (Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE)"
        );
    }
    write!(
        f,
        "resizing a shared receive queue to {work_requests} work requests failed: {errno}; it needs room for its posted \
         receives and its limit, and at most {max_work_requests} work requests"
    )
}

pub(super) fn tag_list(
    requested: &crate::srq::TagListSize,
    max_tags: &u32,
    max_ops: &u32,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "a list of {} tags with {} outstanding operations exceeds the device: {max_tags} tags, {max_ops} operations",
        requested.tags, requested.ops
    )
}

pub(super) fn create_work_queue(
    work_requests: &u32,
    elements: &u32,
    flags: &crate::wq::WorkQueueFlags,
    max_queues: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "creating a work queue of {work_requests} work requests with {elements} elements and {flags:?} failed: {errno}; the \
         device allows {max_queues} queues"
    )
}

pub(super) fn indirection_table(entries: &usize, max: &u32, errno: &Errno, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "an indirection table of {entries} work queues failed: {errno}; the number must be a power of two, at most {max}"
    )
}

pub(super) fn rx_hash(
    function: &crate::device::RxHashFunctions,
    fields: &crate::device::RxHashFields,
    key: &usize,
    caps: &crate::device::ReceiveSideScaling,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "hashing packets by {function:?} of {fields:?} with a key of {key} bytes failed: {errno}; the device supports {:?} of \
         {:?}, usually with keys of 40 bytes",
        caps.hash_functions, caps.hash_fields
    )
}

pub(super) fn create_flow(specs: &usize, errno: &Errno, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "a flow of {specs} headers and actions failed: {errno}; EPERM means that CAP_NET_RAW is missing; EINVAL and \
         EOPNOTSUPP may mean that headers are not ordered from the outermost, or that masks do not cover whole fields"
    )
}

fn moderation(limits: Option<crate::device::CqModeration>) -> String {
    match limits {
        Some(found) => format!("{} completions and {} µs", found.max_count, found.max_period),
        None => "no values that it reports".to_owned(),
    }
}

/// Advice on errors other than `EINVAL`, which the limits do not explain.
fn advice_unless_limit(verb: Verb, errno: Errno) -> String {
    match errno.0 {
        libc::EINVAL => String::new(),
        _ => advice(verb, errno),
    }
}

pub(super) fn endpoint_set(needed: &u64, capacity: &u32, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "the endpoints of the set may need {needed} completion queue entries, and the queue has {capacity}: build the set with \
         {needed} entries (EndpointSet::builder), or reduce EndpointBuilder::send_depth and recv_depth"
    )
}

pub(super) fn poll_in_progress(verb: &Verb, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "this thread is polling a completion queue of the object, whose lock {verb} needs on some devices: drop the Poll \
         or Poller first"
    )
}

#[cfg(test)]
mod tests {
    use crate::error::Verb;
    use crate::qp::QueuePairCapacity;
    use crate::{Errno, Error, Gid, QueuePairType};

    const EINVAL: Errno = Errno(libc::EINVAL);

    fn create(max_inline_data: u32) -> String {
        let requested =
            QueuePairCapacity { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data };
        let limits = "16 work requests".to_owned();
        Error::CreateQueuePair { qp_type: QueuePairType::RC, requested, limits, errno: EINVAL }.to_string()
    }

    #[test]
    fn inline_data_is_mentioned_if_it_was_requested() {
        assert!(create(4096).contains("inline data: try less than 4096 bytes"), "{}", create(4096));
        assert!(create(0).ends_with("the device allows 16 work requests"), "{}", create(0));
    }

    #[test]
    fn attach_and_detach_errors_give_different_advice() {
        let of = |verb| Error::Multicast { verb, gid: Gid::default(), lid: 0xc000, errno: EINVAL }.to_string();
        let (join, leave) = (of(Verb::AttachMcast), of(Verb::DetachMcast));
        assert!(join.contains("0xc000 to 0xfffe") && join.contains("max_mcast_grp"), "{join}");
        assert!(leave.contains("attached with") && !leave.contains("0xfffe"), "{leave}");
    }

    #[test]
    fn a_limit_error_states_the_maximum() {
        let error = Error::LimitSharedReceiveQueue { limit: 9, work_requests: 8, errno: EINVAL }.to_string();
        assert!(error.ends_with("0 (none) to 8"), "{error}");
    }
}
