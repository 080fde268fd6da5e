//! Limits of the control group: the rdma and memory controllers (cgroup-v2.rst, cgroup-v1/rdma.rst of the kernel).

use super::finding::{Finding, Topic};
use crate::host::cgroup::directories;
use crate::host::files::HostFiles;
use crate::units::amount;

pub(crate) fn check(host: &HostFiles, devices: &[String]) -> Vec<Finding> {
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

/// Checks lines such as `mlx5_0 hca_handle=2 hca_object=2000`.
fn rdma(host: &HostFiles, directory: &str, devices: &[String]) -> Vec<Finding> {
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
                "hca_handle" => "Each open device counts towards it.",
                _ => "Each queue pair, completion queue, memory region and protection domain counts towards it.",
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

fn memory(host: &HostFiles, groups: &str) -> Finding {
    let limits = directories(groups, "memory").into_iter().flat_map(|directory| {
        let names = ["memory.max", "memory.limit_in_bytes"];
        names.map(|name| host.number(&format!("{directory}/{name}")))
    });
    // Version 1 reports no limit as a number near 2^63.
    match limits.flatten().filter(|limit| *limit < 1 << 60).min() {
        None => Topic::Cgroup.ok("memory is not limited"),
        Some(limit) => Topic::Cgroup
            .note(format!("memory is limited to {}", amount(limit)))
            .why("Buffers count towards it. A process that exceeds it is killed."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    #[test]
    fn a_reached_limit_is_a_problem() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/job/step\n");
        scratch.write(
            "/sys/fs/cgroup/job/rdma.max",
            "mlx5_0 hca_handle=2 hca_object=2000\nmlx5_1 hca_handle=1 hca_object=max\n",
        );
        scratch.write("/sys/fs/cgroup/job/rdma.current", "mlx5_0 hca_handle=2 hca_object=20\n");
        scratch.write("/sys/fs/cgroup/memory.max", "max\n");
        scratch.write("/sys/fs/cgroup/job/memory.max", "2147483648\n");
        let findings = check(&HostFiles::new(scratch.path("")), &["mlx5_0".into()]);
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert_eq!((findings[0].level, findings[1].level), (Level::Problem, Level::Note));
        assert_eq!(findings[1].what, "mlx5_0: hca_object is limited to 2000, of which 20 are in use");
        assert_eq!(findings[0].fix.as_deref(), Some("echo \"mlx5_0 hca_handle=max\" > /sys/fs/cgroup/job/rdma.max"));
        assert_eq!(findings[2].what, "memory is limited to 2 GiB");
    }

    #[test]
    fn without_limits_all_findings_are_ok() {
        let scratch = Scratch::new();
        scratch.write("/proc/self/cgroup", "0::/\n");
        scratch.write("/sys/fs/cgroup/rdma.max", "mlx5_0 hca_handle=max hca_object=max\n");
        let findings = check(&HostFiles::new(scratch.path("")), &["mlx5_0".into()]);
        assert!(findings.iter().all(|finding| finding.level == Level::Ok), "{findings:?}");
        assert_eq!(check(&HostFiles::new("/nowhere"), &[])[0].level, Level::Note);
    }
}
