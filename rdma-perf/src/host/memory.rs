//! Memory available to this process.

use super::cgroup;
use super::files::HostFiles;

/// Bytes available without swapping and without exceeding a control group's limit.
pub(crate) fn available() -> Option<u64> {
    available_of(&HostFiles::new("/"))
}

fn available_of(host: &HostFiles) -> Option<u64> {
    let info = host.text("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.and_then(|kib| kib.checked_mul(1024)).into_iter().chain(cgroup::headroom(host)).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch::Scratch;

    #[test]
    fn available_memory_is_the_minimum_of_host_and_group() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        assert_eq!(available_of(&host), None);
        scratch.write("/proc/meminfo", "MemTotal:  9999 kB\nMemAvailable:   2048 kB\n");
        assert_eq!(available_of(&host), Some(2 << 20));
        scratch.write("/proc/self/cgroup", "0::/\n");
        scratch.write("/sys/fs/cgroup/memory.max", "1048576\n");
        scratch.write("/sys/fs/cgroup/memory.current", "1048000\n");
        assert_eq!(available_of(&host), Some(576));
    }
}
