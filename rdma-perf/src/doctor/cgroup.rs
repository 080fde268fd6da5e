//! Limits of the control group: the rdma and the memory controller (cgroup-v2.rst, cgroup-v1/rdma.rst of the kernel).

use super::finding::{Finding, Topic};
use super::host::{Host, amount};

pub(crate) fn check(host: &Host, devices: &[String]) -> Vec<Finding> {
    let groups = match host.text("/proc/self/cgroup") {
        Ok(groups) => groups,
        Err(error) => return vec![Topic::Cgroup.note(error.to_string())],
    };
    let mut findings = Vec::new();
    for directory in directories(&groups, "rdma") {
        findings.extend(rdma(host, &directory, devices));
    }
    if findings.is_empty() {
        findings.push(Topic::Cgroup.ok("RDMA objects are not limited"));
    }
    findings.push(memory(host, &groups));
    findings
}

/// The directories of this process' group and of those above it, for a controller.
fn directories(groups: &str, controller: &str) -> Vec<String> {
    let mut directories = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let base = match controllers {
            "" => "/sys/fs/cgroup".to_owned(),
            list if list.split(',').any(|name| name == controller) => format!("/sys/fs/cgroup/{list}"),
            _ => continue,
        };
        // A group outside of a container's namespace begins with dots.
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
        for len in (0..=parts.len()).rev() {
            directories.push(format!("{base}/{}", parts[..len].join("/")).trim_end_matches('/').to_owned());
        }
    }
    directories
}

/// Lines such as `mlx5_0 hca_handle=2 hca_object=2000`.
fn rdma(host: &Host, directory: &str, devices: &[String]) -> Vec<Finding> {
    let Ok(limits) = host.text(&format!("{directory}/rdma.max")) else { return Vec::new() };
    let used = host.text(&format!("{directory}/rdma.current")).unwrap_or_default();
    let mut findings = Vec::new();
    for line in limits.lines() {
        let (device, limits) = line.split_once(' ').unwrap_or((line, ""));
        if !devices.iter().any(|name| name == device) {
            continue;
        }
        for (what, limit) in limits.split_whitespace().filter_map(|limit| limit.split_once('=')) {
            let Ok(limit) = limit.parse::<u64>() else { continue };
            let used = usage(&used, device, what);
            let finding = if used >= limit {
                Topic::Cgroup.problem(format!("{device}: {what} is limited to {limit}, and {used} are in use"))
            } else {
                Topic::Cgroup.note(format!("{device}: {what} is limited to {limit}, of which {used} are in use"))
            };
            let why = match what {
                "hca_handle" => "Each opened device counts.",
                _ => "Each queue pair, completion queue, memory region and protection domain counts.",
            };
            findings.push(finding.why(why).fix(format!("echo \"{device} {what}=max\" > {directory}/rdma.max")));
        }
    }
    findings
}

fn usage(current: &str, device: &str, what: &str) -> u64 {
    let line = current.lines().find_map(|line| line.strip_prefix(device)?.strip_prefix(' '));
    let field =
        line.and_then(|line| line.split_whitespace().find_map(|field| field.strip_prefix(what)?.strip_prefix('=')));
    field.and_then(|used| used.parse().ok()).unwrap_or(0)
}

fn memory(host: &Host, groups: &str) -> Finding {
    let limits = directories(groups, "memory").into_iter().flat_map(|directory| {
        let names = ["memory.max", "memory.limit_in_bytes"];
        names.map(|name| host.number(&format!("{directory}/{name}")))
    });
    // Version 1 has a number of almost 2^63 for no limit.
    match limits.flatten().filter(|limit| *limit < 1 << 60).min() {
        None => Topic::Cgroup.ok("memory is not limited"),
        Some(limit) => Topic::Cgroup
            .note(format!("memory is limited to {}", amount(limit)))
            .why("Buffers count; a process that goes beyond is killed."),
    }
}

/// Bytes that this process' groups still have room for, if they are limited. What the kernel can take back counts as room.
pub(super) fn room(host: &Host) -> Option<u64> {
    let groups = host.text("/proc/self/cgroup").ok()?;
    let room = |directory: String| {
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
    directories(&groups, "memory").into_iter().filter_map(room).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::scratch::Scratch;

    #[test]
    fn groups_and_those_above_them_are_looked_at() {
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
    fn a_limit_that_is_reached_is_a_problem() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/job/step\n");
        scratch.write(
            "/sys/fs/cgroup/job/rdma.max",
            "mlx5_0 hca_handle=2 hca_object=2000\nmlx5_1 hca_handle=1 hca_object=max\n",
        );
        scratch.write("/sys/fs/cgroup/job/rdma.current", "mlx5_0 hca_handle=2 hca_object=20\n");
        scratch.write("/sys/fs/cgroup/memory.max", "max\n");
        scratch.write("/sys/fs/cgroup/job/memory.max", "2147483648\n");
        let findings = check(&Host::new(scratch.path("")), &["mlx5_0".into()]);
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert_eq!((findings[0].level, findings[1].level), (Level::Problem, Level::Note));
        assert_eq!(findings[1].what, "mlx5_0: hca_object is limited to 2000, of which 20 are in use");
        assert_eq!(findings[0].fix.as_deref(), Some("echo \"mlx5_0 hca_handle=max\" > /sys/fs/cgroup/job/rdma.max"));
        assert_eq!(findings[2].what, "memory is limited to 2 GiB");
    }

    #[test]
    fn room_is_that_of_the_fullest_group() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/job/step\n");
        let host = Host::new(scratch.path(""));
        assert_eq!(room(&host), None);
        scratch.write("/sys/fs/cgroup/job/memory.max", "1000\n");
        scratch.write("/sys/fs/cgroup/job/memory.current", "900\n");
        scratch.write("/sys/fs/cgroup/job/memory.stat", "anon 100\ninactive_file 300\n");
        scratch.write("/sys/fs/cgroup/job/step/memory.max", "max\n");
        scratch.write("/sys/fs/cgroup/job/step/memory.current", "100\n");
        assert_eq!(room(&host), Some(400));
        scratch.write("/proc/self/cgroup", "4:memory:/\n");
        scratch.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "500\n");
        scratch.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "600\n");
        assert_eq!(room(&host), Some(0));
    }

    #[test]
    fn without_limits_all_is_well() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/\n");
        scratch.write("/sys/fs/cgroup/rdma.max", "mlx5_0 hca_handle=max hca_object=max\n");
        let findings = check(&Host::new(scratch.path("")), &["mlx5_0".into()]);
        assert!(findings.iter().all(|finding| finding.level == Level::Ok), "{findings:?}");
        assert_eq!(check(&Host::new("/nowhere"), &[])[0].level, Level::Note);
    }
}
