//! Kernel modules. They are detected by the files they create, because built-in modules are in no list.

use super::finding::{Finding, Topic};
use crate::host::files::HostFiles;

pub(crate) fn check(host: &HostFiles, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if host.exists("/sys/class/infiniband_verbs/abi_version") || host.exists("/sys/module/ib_uverbs") {
        findings.push(Topic::Modules.ok("ib_uverbs is loaded: programs can open devices"));
    } else {
        let finding = Topic::Modules.problem("ib_uverbs is not loaded");
        findings.push(finding.why("Programs access devices through it.").fix(loading(host, "ib_uverbs", "")));
    }
    if host.exists("/sys/class/misc/rdma_cm") || host.exists("/sys/module/rdma_ucm") {
        findings.push(Topic::Modules.ok("rdma_ucm is loaded: programs can use the connection manager"));
    } else {
        let finding = Topic::Modules.note("rdma_ucm is not loaded");
        let why = "Programs that connect by librdmacm need it, and so does rdma-perf --rdma-cm.";
        findings.push(finding.why(why).fix(loading(host, "rdma_ucm", "")));
    }
    if devices.is_empty() && !host.exists("/sys/module/rdma_rxe") {
        let finding = Topic::Modules.note("rdma_rxe (SoftRoCE) is not loaded");
        findings.push(
            finding.why("It creates an RDMA device on any Ethernet interface.").fix(loading(host, "rdma_rxe", "")),
        );
    }
    findings
}

/// How to load `module` and what to run `then`. `modprobe` is not advised if the kernel has no such module, as in many
/// containers.
pub(crate) fn loading(host: &HostFiles, module: &str, then: &str) -> String {
    let release = host.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Module files use both spellings.
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
        "the kernel{of} has no module {module} in /lib/modules here: load it outside of this container, install the kernel's \
         package of extra modules (linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora), or use a guest whose \
         kernel has it"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    #[test]
    fn missing_modules_are_named() {
        let levels = |findings: Vec<Finding>| findings.into_iter().map(|finding| finding.level).collect::<Vec<_>>();
        let bare = check(&HostFiles::new("/nowhere"), &[]);
        assert_eq!(levels(bare), [Level::Problem, Level::Note, Level::Note]);
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband_verbs/abi_version", "6\n");
        scratch.write("/sys/class/misc/rdma_cm/dev", "10:61\n");
        assert_eq!(levels(check(&HostFiles::new(scratch.path("")), &["rxe0".into()])), [Level::Ok, Level::Ok]);
    }

    #[test]
    fn modprobe_is_advised_only_for_existing_modules() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
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
        assert!(!advice("ib_core").contains("modprobe"), "a dependency is not listed as a module");
    }
}
