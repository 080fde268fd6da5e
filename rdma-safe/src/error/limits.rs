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
        "creating {} queue pair failed: {errno}; asked for {asked}; the device allows {allowed}{}",
        qp_type.with_article(),
        if_denied("ibv_create_qp", *errno)
    )
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
