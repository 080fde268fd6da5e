//! Processors: NUMA node, frequency, clock source and sharing.

use super::finding::{Finding, Topic};
use crate::host::files::{HostFiles, cpu_list};

pub(crate) fn check(host: &HostFiles, devices: &[String]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = devices.iter().filter_map(|device| numa(host, device)).collect();
    findings.push(governor(host));
    findings.extend(clock(host));
    findings.extend(threads(host));
    findings.extend(balancer(host));
    findings
}

/// `None` for devices without a NUMA node.
fn numa(host: &HostFiles, device: &str) -> Option<Finding> {
    if host.is_software(device) {
        return None;
    }
    let directory = format!("/sys/class/infiniband/{device}/device");
    let node = host.number(&format!("{directory}/numa_node"))?;
    let near = cpu_list(&host.text(&format!("{directory}/local_cpulist")).ok()?);
    let mine = cpu_list(&host.status("Cpus_allowed_list")?);
    let within = mine.iter().filter(|cpu| near.contains(cpu)).count();
    let at = format!("{device} is at NUMA node {node}");
    if within == mine.len() {
        return Some(Topic::Processors.ok(format!("{at}, and so are the processors of this process")));
    }
    let fix = format!("numactl --cpunodebind={node} --membind={node} rdma-perf …");
    let why = "Each doorbell and data access across nodes takes about 100 ns longer and costs bandwidth.";
    let finding = if within == 0 {
        Topic::Processors.warning(format!("{at}, and none of the processors of this process"))
    } else {
        Topic::Processors.note(format!(
            "{at}; this process may run on {within} processors of that node and on {} of others",
            mine.len() - within
        ))
    };
    Some(finding.why(why).fix(fix))
}

const CPUS: &str = "/sys/devices/system/cpu";

fn governor(host: &HostFiles) -> Finding {
    let names = match host.names(CPUS) {
        Ok(names) => names,
        Err(error) => return Topic::Processors.note(error.to_string()),
    };
    let mut governors: Vec<String> =
        names.iter().filter_map(|name| host.text(&format!("{CPUS}/{name}/cpufreq/scaling_governor")).ok()).collect();
    governors.sort();
    governors.dedup();
    match governors.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => Topic::Processors.note("the kernel does not control the processor frequency; in a guest, the host does"),
        ["performance"] => Topic::Processors.ok("the processors run at full speed (governor performance)"),
        some => Topic::Processors
            .warning(format!("the governor of the processors is {}", some.join(", ")))
            .why("Latencies are longer and vary between runs when a processor must first raise its frequency.")
            .fix("cpupower frequency-set -g performance"),
    }
}

/// Clock sources that the vDSO reads without a system call.
const FAST_CLOCKS: [&str; 5] =
    ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "riscv_clocksource"];

fn clock(host: &HostFiles) -> Option<Finding> {
    let clock = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource").ok()?;
    if FAST_CLOCKS.contains(&clock.as_str()) {
        return None;
    }
    let finding = Topic::Processors.note(format!("the clock is {clock}"));
    Some(finding.why("Reading it may need a system call, which takes as long as a short message."))
}

fn threads(host: &HostFiles) -> Option<Finding> {
    (host.number(&format!("{CPUS}/smt/active")) == Some(1)).then(|| {
        let finding = Topic::Processors.note("two threads share a core (SMT)");
        finding.why("A busy sibling slows down a polling thread: leave it idle for stable results.")
    })
}

fn balancer(host: &HostFiles) -> Option<Finding> {
    let processes = host.names("/proc").ok()?;
    let numbers = processes.iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let is_running = numbers
        .into_iter()
        .any(|process| host.text(&format!("/proc/{process}/comm")).is_ok_and(|name| name == "irqbalance"));
    is_running.then(|| {
        let finding = Topic::Processors.note("irqbalance moves interrupts between processors");
        finding.why("With --events this changes latencies.").fix("systemctl stop irqbalance")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    #[test]
    fn processors_of_another_node_are_a_warning() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        scratch.write("/sys/class/infiniband/mlx5_0/device/numa_node", "1\n");
        scratch.write("/sys/class/infiniband/mlx5_0/device/local_cpulist", "8-15\n");
        let with = |allowed: &str| {
            scratch.write("/proc/self/status", &format!("Cpus_allowed_list:\t{allowed}\n"));
            numa(&host, "mlx5_0").unwrap()
        };
        assert_eq!(with("0-7").level, Level::Warning);
        assert_eq!(with("8,9").level, Level::Ok);
        let both = with("0-15");
        assert_eq!((both.level, both.what.contains("8 processors of that node")), (Level::Note, true));
        assert!(both.fix.unwrap().starts_with("numactl --cpunodebind=1"));
        scratch.write("/sys/class/infiniband/mlx5_0/device/numa_node", "-1\n");
        assert_eq!(numa(&host, "mlx5_0"), None);
        assert_eq!(numa(&host, "rxe0"), None);
    }

    #[test]
    fn a_governor_other_than_performance_is_a_warning() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        assert_eq!(governor(&host).level, Level::Note);
        scratch.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n");
        assert_eq!(governor(&host).level, Level::Ok);
        scratch.write("/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
        assert_eq!(governor(&host).what, "the governor of the processors is performance, powersave");
    }

    #[test]
    fn causes_of_unstable_results_are_noted() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        assert_eq!((clock(&host), threads(&host), balancer(&host)), (None, None, None));
        scratch.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n");
        scratch.write("/sys/devices/system/cpu/smt/active", "1\n");
        scratch.write("/proc/4711/comm", "irqbalance\n");
        assert_eq!(check(&host, &[]).len(), 4);
        scratch.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n");
        assert_eq!(clock(&host), None);
    }
}
