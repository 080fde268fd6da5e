//! Kernel modules, told by what they make: those that are built in are in no list of modules.

use super::finding::{Finding, Topic};
use super::host::Host;

pub(crate) fn check(host: &Host, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if host.exists("/sys/class/infiniband_verbs/abi_version") || host.exists("/sys/module/ib_uverbs") {
        findings.push(Topic::Modules.ok("ib_uverbs is loaded: programs can open devices"));
    } else {
        let finding = Topic::Modules.problem("ib_uverbs is not loaded");
        findings.push(finding.why("It opens devices to programs.").fix("modprobe ib_uverbs"));
    }
    if host.exists("/sys/class/misc/rdma_cm") || host.exists("/sys/module/rdma_ucm") {
        findings.push(Topic::Modules.ok("rdma_ucm is loaded: programs can use the connection manager"));
    } else {
        let finding = Topic::Modules.note("rdma_ucm is not loaded");
        let why = "Programs that connect by librdmacm need it; rdma-perf does not.";
        findings.push(finding.why(why).fix("modprobe rdma_ucm"));
    }
    if devices.is_empty() && !host.exists("/sys/module/rdma_rxe") {
        let finding = Topic::Modules.note("rdma_rxe (SoftRoCE) is not loaded");
        findings.push(finding.why("It makes an RDMA device of any Ethernet interface.").fix("modprobe rdma_rxe"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::scratch::Scratch;

    #[test]
    fn a_host_without_modules_is_told_which() {
        let levels = |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.level).collect::<Vec<_>>();
        let bare = check(&Host::new("/nowhere"), &[]);
        assert_eq!(levels(bare), [Level::Problem, Level::Note, Level::Note]);
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband_verbs/abi_version", "6\n");
        scratch.write("/sys/class/misc/rdma_cm/dev", "10:61\n");
        assert_eq!(levels(check(&Host::new(scratch.path("")), &["rxe0".into()])), [Level::Ok, Level::Ok]);
    }
}
