//! Kernel modules, told by what they make: those that are built in are in no list of modules.

use super::finding::{Finding, Topic};
use super::host::Host;

pub(crate) fn check(host: &Host, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if host.exists("/sys/class/infiniband_verbs/abi_version") || host.exists("/sys/module/ib_uverbs") {
        findings.push(Topic::Modules.ok("ib_uverbs is loaded: programs can open devices"));
    } else {
        let finding = Topic::Modules.problem("ib_uverbs is not loaded");
        findings.push(finding.why("It opens devices to programs.").fix(loading(host, "ib_uverbs", "")));
    }
    if host.exists("/sys/class/misc/rdma_cm") || host.exists("/sys/module/rdma_ucm") {
        findings.push(Topic::Modules.ok("rdma_ucm is loaded: programs can use the connection manager"));
    } else {
        let finding = Topic::Modules.note("rdma_ucm is not loaded");
        let why = "Programs that connect by librdmacm need it; rdma-perf does not.";
        findings.push(finding.why(why).fix(loading(host, "rdma_ucm", "")));
    }
    if devices.is_empty() && !host.exists("/sys/module/rdma_rxe") {
        let finding = Topic::Modules.note("rdma_rxe (SoftRoCE) is not loaded");
        findings
            .push(finding.why("It makes an RDMA device of any Ethernet interface.").fix(loading(host, "rdma_rxe", "")));
    }
    findings
}

/// How `module` comes into the kernel, and what to run `then`. Where the kernel has no such module, as in many a container,
/// `modprobe` does not help.
pub(crate) fn loading(host: &Host, module: &str, then: &str) -> String {
    let release = host.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Both spellings are in use for the files.
    let file = format!("/{}.ko", module.replace('-', "_"));
    let has = |list: &str| {
        let text = host.text(&format!("/lib/modules/{release}/{list}")).unwrap_or_default();
        text.lines().any(|line| line.split(':').next().unwrap_or_default().replace('-', "_").contains(&file))
    };
    if !release.is_empty() && (has("modules.dep") || has("modules.builtin")) {
        return format!("modprobe {module}{then}");
    }
    let of = if release.is_empty() { String::new() } else { format!(" {release}") };
    format!(
        "the kernel{of} has no module {module} in /lib/modules here: load it outside of this container, install the package of \
         the kernel with more modules (linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora), or take a guest \
         whose kernel has it"
    )
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

    #[test]
    fn a_module_that_the_kernel_has_is_loaded_and_another_is_not_advised() {
        let scratch = Scratch::new();
        let host = Host::new(scratch.path(""));
        let advice = |module| loading(&host, module, "");
        assert!(advice("ib_uverbs").starts_with("the kernel has no module ib_uverbs"), "{}", advice("ib_uverbs"));
        scratch.write("/proc/sys/kernel/osrelease", "6.1.0-56-amd64\n");
        assert!(!advice("ib_uverbs").contains("modprobe"), "{}", advice("ib_uverbs"));
        let dep = "kernel/drivers/infiniband/core/ib_uverbs.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz\n";
        scratch.write("/lib/modules/6.1.0-56-amd64/modules.dep", dep);
        scratch.write("/lib/modules/6.1.0-56-amd64/modules.builtin", "kernel/drivers/infiniband/sw/rxe/rdma-rxe.ko\n");
        assert_eq!(advice("ib_uverbs"), "modprobe ib_uverbs");
        assert_eq!(loading(&host, "rdma_rxe", " && rdma link"), "modprobe rdma_rxe && rdma link");
        let other = advice("rdma_ucm");
        assert!(other.contains("6.1.0-56-amd64") && !other.contains("modprobe"), "{other}");
        assert!(!advice("ib_core").contains("modprobe"), "what others depend on is no line of its own");
    }
}
