//! Facts that the kernel reports about this host.

pub(crate) mod cgroup;
pub(crate) mod files;
pub(crate) mod memory;
