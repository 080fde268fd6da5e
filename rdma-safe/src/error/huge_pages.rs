//! Errors of mapping huge pages.

use std::fmt;

use crate::Errno;

/// Huge pages could not be mapped: `mmap(2)` with `MAP_HUGETLB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HugePagesError {
    /// Requested length in bytes.
    pub len: usize,
    /// Number of 2 MiB pages needed.
    pub pages: usize,
    /// Number of free pages right after the call; `None` if the kernel has no pages of this size.
    pub free: Option<usize>,
    /// The reported error; `ENOMEM` when too few pages are free.
    pub errno: Errno,
}

/// The kernel did not make pages transparently huge, or did not place memory on a NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// The administrator has disabled transparent huge pages.
    #[error(
        "{len} bytes cannot have transparent huge pages, because /sys/kernel/mm/transparent_hugepage/enabled is `never`: as \
         root, write `madvise` to it"
    )]
    Never {
        /// Requested length in bytes.
        len: usize,
    },

    /// `madvise(2)` with `MADV_HUGEPAGE` failed, with `EINVAL` if the kernel has no transparent huge pages.
    #[error(
        "madvise of {len} bytes with MADV_HUGEPAGE failed: {errno}; EINVAL means a kernel without transparent huge pages \
         (CONFIG_TRANSPARENT_HUGEPAGE)"
    )]
    Transparent {
        /// Requested length in bytes.
        len: usize,
        /// The reported error.
        errno: Errno,
    },

    /// `mbind(2)` failed, with `EINVAL` if the host has no such node.
    #[error(
        "placing {len} bytes on NUMA node {node} failed: {errno}; /sys/devices/system/node/has_memory lists the nodes with \
         memory, and a container may forbid mbind(2)"
    )]
    Node {
        /// Requested node.
        node: u32,
        /// Length of the memory in bytes.
        len: usize,
        /// The reported error.
        errno: Errno,
    },
}

impl fmt::Display for HugePagesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HugePagesError { len, pages, free, errno } = self;
        write!(f, "mapping {len} bytes of huge pages failed: {errno}; {pages} pages of 2 MiB are needed")?;
        match free {
            Some(free) if free < pages => {
                let missing = pages - free;
                write!(f, " and {free} are free: as root, raise /proc/sys/vm/nr_hugepages by at least {missing}")
            }
            Some(free) => {
                write!(
                    f,
                    " and {free} are free, some of them reserved by other mappings (see HugePages_Rsvd in /proc/meminfo), "
                )?;
                write!(f, "or a cgroup allows fewer (hugetlb.2MB.max): raise the limit, or /proc/sys/vm/nr_hugepages")
            }
            None => write!(f, " and this kernel has no huge pages of that size: see /proc/sys/vm/nr_hugepages"),
        }
    }
}

impl std::error::Error for HugePagesError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_sysctl_and_the_missing_pages() {
        for (free, advice) in [
            (
                Some(2),
                "3 pages of 2 MiB are needed and 2 are free: as root, raise /proc/sys/vm/nr_hugepages by at least 1",
            ),
            (Some(3), "hugetlb.2MB.max"),
            (None, "this kernel has no huge pages of that size"),
        ] {
            let error = HugePagesError { len: 5 << 20, pages: 3, free, errno: Errno(libc::ENOMEM) }.to_string();
            assert!(
                error.contains("os error 12") && error.contains("nr_hugepages") && error.contains(advice),
                "{error}"
            );
        }
    }
}
