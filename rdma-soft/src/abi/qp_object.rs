//! What is behind a queue pair.

use core::ffi::c_int;
use std::sync::atomic::AtomicBool;

use rdma_sys::*;

use crate::device::Job;

/// What is behind an `ibv_qp`, which is the beginning of `ex`.
#[repr(C)]
pub(super) struct QpObject {
    pub(super) ex: ibv_qp_ex,
    pub(super) limits: Limits,
    /// Somebody is between `ibv_wr_start` and its end: what he puts together is his alone.
    pub(super) is_started: AtomicBool,
    pub(super) builder: Builder,
}

/// What its work may be.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) kind: ibv_qp_type,
    pub(super) cap: ibv_qp_cap,
    pub(super) is_all_signaled: bool,
    pub(super) is_extended: bool,
}

/// Work that is being put together.
pub(super) struct Builder {
    /// Those that were begun, and more that were used before.
    pub(super) jobs: Vec<Job>,
    pub(super) count: usize,
    /// Of what is the first to be wrong.
    pub(super) error: c_int,
}

impl Builder {
    pub(super) fn new() -> Self {
        Builder { jobs: Vec::new(), count: 0, error: 0 }
    }
}
