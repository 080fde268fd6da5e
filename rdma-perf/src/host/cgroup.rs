//! Control groups of this process (cgroup-v2.rst of the kernel).

use super::files::HostFiles;

/// The directories of a controller for this process's group and all groups above it.
pub(crate) fn directories(groups: &str, controller: &str) -> Vec<String> {
    let mut directories = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let base = match controllers {
            "" => "/sys/fs/cgroup".to_owned(),
            list if list.split(',').any(|name| name == controller) => format!("/sys/fs/cgroup/{list}"),
            _ => continue,
        };
        // The path of a group outside of a container's namespace begins with dots.
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
        for len in (0..=parts.len()).rev() {
            directories.push(format!("{base}/{}", parts[..len].join("/")).trim_end_matches('/').to_owned());
        }
    }
    directories
}

/// Bytes that this process's groups may still allocate, if they have limits. Reclaimable page cache counts as free.
pub(super) fn headroom(host: &HostFiles) -> Option<u64> {
    let groups = host.text("/proc/self/cgroup").ok()?;
    let headroom = |directory: String| {
        [
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ]
        .into_iter()
        .find_map(|(limit, used, idle)| {
            let (limit, used) =
                (host.number(&format!("{directory}/{limit}"))?, host.number(&format!("{directory}/{used}"))?);
            let stat = host.text(&format!("{directory}/memory.stat")).unwrap_or_default();
            let idle = stat.lines().find_map(|line| line.strip_prefix(idle)?.trim().parse::<u64>().ok());
            Some(limit.saturating_sub(used.saturating_sub(idle.unwrap_or(0))))
        })
    };
    directories(&groups, "memory").into_iter().filter_map(headroom).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scratch::Scratch;

    #[test]
    fn the_groups_above_a_group_are_checked() {
        assert_eq!(
            directories("0::/a/b.service\n", "rdma"),
            ["/sys/fs/cgroup/a/b.service", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
        );
        assert_eq!(directories("0::/../../x\n", "rdma"), ["/sys/fs/cgroup/x", "/sys/fs/cgroup"]);
        assert_eq!(
            directories("4:rdma:/job\n3:cpu,cpuacct:/\n", "rdma"),
            ["/sys/fs/cgroup/rdma/job", "/sys/fs/cgroup/rdma"]
        );
    }

    #[test]
    fn headroom_is_that_of_the_fullest_group() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/job/step\n");
        let host = HostFiles::new(scratch.path(""));
        assert_eq!(headroom(&host), None);
        scratch.write("/sys/fs/cgroup/job/memory.max", "1000\n");
        scratch.write("/sys/fs/cgroup/job/memory.current", "900\n");
        scratch.write("/sys/fs/cgroup/job/memory.stat", "anon 100\ninactive_file 300\n");
        scratch.write("/sys/fs/cgroup/job/step/memory.max", "max\n");
        scratch.write("/sys/fs/cgroup/job/step/memory.current", "100\n");
        assert_eq!(headroom(&host), Some(400));
        scratch.write("/proc/self/cgroup", "4:memory:/\n");
        scratch.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "500\n");
        scratch.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "600\n");
        assert_eq!(headroom(&host), Some(0));
    }
}
