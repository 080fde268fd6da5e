//! The memory of a queue pair.

use core::ffi::c_int;
use std::sync::atomic::AtomicBool;

use rdma_sys::*;

use crate::device::Job;

/// The memory of an `ibv_qp`, which is the first part of `ex`.
#[repr(C)]
pub(super) struct QpObject {
    pub(super) ex: ibv_qp_ex,
    pub(super) limits: Limits,
    /// Whether a thread is between `ibv_wr_start` and its end. Only that thread uses the batch.
    pub(super) is_building: AtomicBool,
    pub(super) batch: Batch,
}

/// Limits of the work requests of a queue pair.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) kind: ibv_qp_type,
    pub(super) cap: ibv_qp_cap,
    pub(super) is_all_signaled: bool,
    pub(super) is_extended: bool,
}

/// Work requests between `ibv_wr_start` and `ibv_wr_complete`.
pub(super) struct Batch {
    /// The `count` requests of the batch, followed by unused ones whose memory is reused.
    pub(super) jobs: Vec<Job>,
    pub(super) count: usize,
    /// The first error of a request, or 0.
    pub(super) error: c_int,
}

impl Batch {
    pub(super) fn new() -> Self {
        Batch { jobs: Vec::new(), count: 0, error: 0 }
    }
}
