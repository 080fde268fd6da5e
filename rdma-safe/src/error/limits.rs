//! Messages of calls that mostly fail at a limit of the device: what was asked for, and what it has.

use std::fmt::{Formatter, Result};
use std::time::Duration;

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
        "ibv_alloc_dm of {len} bytes at a multiple of {align} failed: {errno}; the device has {max} bytes in all, and the \
         alignment is a power of two"
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
        if_denied("ibv_create_cq", *errno)
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
        "resizing a completion queue to {entries} entries failed: {errno}; it cannot be smaller than what is in it, nor larger \
         than {max_entries}"
    )
}

pub(super) fn moderate_completion_queue(
    count: &u16,
    period: &Duration,
    allowed: &Option<crate::CqModeration>,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "moderating events to {count} completions or {period:?} failed: {errno}; the device allows {}",
        moderation(*allowed)
    )
}

pub(super) fn create_queue_pair(
    qp_type: &QueuePairType,
    asked: &crate::QueuePairCapacity,
    allowed: &str,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "creating {} queue pair failed: {errno}; asked for {asked}; the device allows {allowed}{}{}",
        qp_type.with_article(),
        inline_data(asked.max_inline_data),
        if_denied("ibv_create_qp", *errno)
    )
}

/// How much of it there can be, no device reports.
fn inline_data(asked: u32) -> String {
    match asked {
        0 => String::new(),
        asked => format!(", and does not say how much inline data: try less than {asked} bytes"),
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
        "a limit of {limit} for a shared receive queue of {work_requests} work requests failed: {errno}; it can be from 0, for \
         none, to {work_requests}"
    )
}

pub(super) fn multicast(
    verb: &&'static str,
    gid: &crate::Gid,
    lid: &u16,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    let advice = match *verb {
        "ibv_detach_mcast" => {
            "a queue pair is detached with the GID and the LID that it was attached with, and once for each time"
        }
        _ => {
            "on InfiniBand the LID must be the group's, 0xc000 to 0xfffe; and a device has room for so many groups and members of \
             one (DeviceAttributes::max_mcast_grp, max_mcast_qp_attach)"
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
        if_denied("ibv_create_srq", *errno)
    )
}

pub(super) fn resize_shared_receive_queue(
    work_requests: &u32,
    max_work_requests: &u32,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "resizing a shared receive queue to {work_requests} work requests failed: {errno}; it cannot be smaller than what is \
         posted or than its limit, nor larger than {max_work_requests}"
    )
}

pub(super) fn tag_list(asked: &crate::TagListSize, max_tags: &u32, max_ops: &u32, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "a list of {} tags with {} operations outstanding is more than the device has: {max_tags} tags, {max_ops} operations",
        asked.tags, asked.ops
    )
}

pub(super) fn create_work_queue(
    work_requests: &u32,
    elements: &u32,
    flags: &crate::WorkQueueFlags,
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
        "an indirection table of {entries} work queues failed: {errno}; there must be a power of two of them, at most {max}"
    )
}

pub(super) fn rx_hash(
    function: &crate::RxHashFunctions,
    fields: &crate::RxHashFields,
    key: &usize,
    caps: &crate::ReceiveSideScaling,
    errno: &Errno,
    f: &mut Formatter<'_>,
) -> Result {
    write!(
        f,
        "spreading packets by {function:?} of {fields:?} with a key of {key} bytes failed: {errno}; the device has {:?} of {:?}, \
         mostly with keys of 40 bytes",
        caps.hash_functions, caps.hash_fields
    )
}

pub(super) fn create_flow(specs: &usize, errno: &Errno, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "a flow of {specs} headers and actions failed: {errno}; EPERM asks for CAP_NET_RAW, EINVAL and EOPNOTSUPP for headers \
         from the outermost inwards and for masks of whole fields"
    )
}

fn moderation(allowed: Option<crate::CqModeration>) -> String {
    match allowed {
        Some(found) => format!("{} completions and {} µs", found.max_count, found.max_period),
        None => "none that it reports".to_owned(),
    }
}

/// What the limits of the device do not explain.
fn if_denied(verb: &str, errno: Errno) -> String {
    match errno.0 {
        libc::EINVAL => String::new(),
        _ => advice(verb, errno),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Errno, Error, Gid, QueuePairCapacity, QueuePairType};

    const EINVAL: Errno = Errno(libc::EINVAL);

    fn create(max_inline_data: u32) -> String {
        let asked =
            QueuePairCapacity { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data };
        let allowed = "16 work requests".to_owned();
        Error::CreateQueuePair { qp_type: QueuePairType::RC, asked, allowed, errno: EINVAL }.to_string()
    }

    #[test]
    fn inline_data_is_suspected_where_it_was_asked_for() {
        assert!(create(4096).contains("inline data: try less than 4096 bytes"), "{}", create(4096));
        assert!(create(0).ends_with("the device allows 16 work requests"), "{}", create(0));
    }

    #[test]
    fn groups_are_joined_and_left_for_different_reasons() {
        let of = |verb| Error::Multicast { verb, gid: Gid::default(), lid: 0xc000, errno: EINVAL }.to_string();
        let (join, leave) = (of("ibv_attach_mcast"), of("ibv_detach_mcast"));
        assert!(join.contains("0xc000 to 0xfffe") && join.contains("max_mcast_grp"), "{join}");
        assert!(leave.contains("attached with") && !leave.contains("0xfffe"), "{leave}");
    }

    #[test]
    fn a_limit_says_how_high_it_can_be() {
        let error = Error::LimitSharedReceiveQueue { limit: 9, work_requests: 8, errno: EINVAL }.to_string();
        assert!(error.ends_with("from 0, for none, to 8"), "{error}");
    }
}
