//! Devices: what the kernel has, what libibverbs makes of it, and whether they may be opened.

use rustix::fs::Access;

use super::finding::{Finding, Topic};
use super::host::{Host, Unread};
use super::stack::Stack;
use super::{library, modules};

const CLASS: &str = "/sys/class/infiniband";

/// The devices of the kernel, or only the wanted one.
pub(crate) fn names(host: &Host, wanted: Option<&str>) -> Result<Vec<String>, Unread> {
    let names = host.names(CLASS)?;
    Ok(names.into_iter().filter(|name| wanted.is_none_or(|wanted| wanted == name)).collect())
}

pub(crate) fn check(host: &Host, stack: &Stack, wanted: Option<&str>) -> Vec<Finding> {
    let present = match names(host, None) {
        Ok(present) => present,
        Err(error) => return vec![Topic::Devices.problem(error.to_string())],
    };
    if present.is_empty() {
        return vec![none(host)];
    }
    if let Some(wanted) = wanted.filter(|wanted| !present.iter().any(|name| name == wanted)) {
        let problem = Topic::Devices.problem(format!("there is no device {wanted}; present: {}", present.join(", ")));
        return vec![problem.fix("name one of these with --device")];
    }
    let devices = present.iter().filter(|name| wanted.is_none_or(|wanted| wanted == *name));
    let mut findings: Vec<Finding> = devices.flat_map(|name| device(host, stack, name)).collect();
    if let (Ok(_), Err(error)) = (&stack.library, &stack.devices) {
        findings.push(Topic::Devices.problem(error));
    }
    findings
}

fn none(host: &Host) -> Finding {
    Topic::Devices
        .problem("the kernel has no RDMA device")
        .why(
            "Either there is no RDMA hardware (lspci), or its driver is not loaded (mlx5_ib, irdma, bnxt_re, efa …), or \
             this is a container or a guest that was not given the device. A software device works over any Ethernet \
             interface.",
        )
        .fix(modules::loading(host, "rdma_rxe", " && rdma link add rxe0 type rxe netdev INTERFACE"))
}

fn device(host: &Host, stack: &Stack, name: &str) -> Vec<Finding> {
    let driver = host.link_name(&format!("{CLASS}/{name}/device/driver"));
    let mut findings = node(host, name);
    match stack.device(name).map(|device| &device.opened) {
        Some(Ok(opened)) => {
            let driver = match driver {
                Some(driver) => format!("driver {driver}"),
                None if host.is_software(name) => "made of software".into(),
                None => "driver not known".into(),
            };
            let firmware = match opened.firmware.as_str() {
                "" => String::new(),
                firmware => format!(", firmware {firmware}"),
            };
            let ports = opened.ports.len();
            let ports = format!("{ports} port{}", if ports == 1 { "" } else { "s" });
            findings.push(Topic::Devices.ok(format!("{name}: {driver}{firmware}, {ports}")));
        }
        // Of a node that may not be opened libibverbs says that it does not exist.
        Some(Err(error)) if findings.is_empty() => findings.push(Topic::Devices.problem(format!("{name}: {error}"))),
        // Without a library or a device node, that is what is wrong.
        None if findings.is_empty() && stack.library.is_ok() && stack.devices.is_ok() => {
            findings.push(library::missing_provider(name, driver.as_deref()));
        }
        None if findings.is_empty() => {
            findings.push(Topic::Devices.note(format!("{name}: not opened, without libibverbs")))
        }
        _ => {}
    }
    findings
}

/// What is wrong with `/dev/infiniband/uverbsN` of a device.
fn node(host: &Host, device: &str) -> Vec<Finding> {
    let class = "/sys/class/infiniband_verbs";
    let nodes = host.names(class).unwrap_or_default();
    let is_its = |node: &&String| host.text(&format!("{class}/{node}/ibdev")).is_ok_and(|name| name == device);
    let Some(node) = nodes.iter().find(is_its) else {
        let finding = Topic::Devices.problem(format!("{device} has no uverbs node"));
        return vec![finding.why("The kernel module ib_uverbs opens devices to programs.").fix(modules::loading(
            host,
            "ib_uverbs",
            "",
        ))];
    };
    let path = format!("/dev/infiniband/{node}");
    match rustix::fs::access(host.path(&path), Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Vec::new(),
        Err(rustix::io::Errno::NOENT) => vec![
            Topic::Devices
                .problem(format!("{path}, the node of {device}, is missing"))
                .why("udev makes it; a container has to be given it.")
                .fix(format!("udevadm trigger, or for a container: --device={path} --cap-add=IPC_LOCK")),
        ],
        Err(error) => vec![
            Topic::Devices
                .problem(format!("this user may not open {path}, the node of {device}: {error}"))
                .why("Verbs need it readable and writable; the kernel enforces protection behind it.")
                .fix(format!("chmod 0666 {path}, and for good a udev rule: KERNEL==\"uverbs*\", MODE=\"0666\"")),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::doctor::stack::{Opened, VerbsDevice};
    use crate::scratch::Scratch;

    fn stack(devices: &[&str]) -> Stack {
        let opened = || Ok(Opened { firmware: "16.35".into(), ports: Vec::new() });
        let devices = devices.iter().map(|name| VerbsDevice { name: (*name).into(), opened: opened() }).collect();
        Stack { library: Ok(None), devices: Ok(devices) }
    }

    fn tree() -> (Scratch, Host) {
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband/mlx5_0/node_type", "1: CA");
        scratch.write("/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
        scratch.write("/dev/infiniband/uverbs0", "");
        let host = Host::new(scratch.path(""));
        (scratch, host)
    }

    #[test]
    fn no_device_is_a_problem() {
        let finding = &check(&Host::new("/nowhere"), &stack(&[]), None)[0];
        assert_eq!(finding.level, Level::Problem);
        assert!(finding.fix.as_ref().unwrap().contains("rdma_rxe"));
    }

    #[test]
    fn a_device_of_another_name_is_not_there() {
        let (_scratch, host) = tree();
        let finding = &check(&host, &stack(&["mlx5_0"]), Some("mlx5_7"))[0];
        assert_eq!(finding.what, "there is no device mlx5_7; present: mlx5_0");
    }

    #[test]
    fn a_device_that_only_the_kernel_has_lacks_its_provider() {
        let (_scratch, host) = tree();
        let findings = check(&host, &stack(&[]), None);
        assert!(findings[0].what.starts_with("libibverbs does not know mlx5_0"), "{findings:?}");
        let without_library = Stack { library: Err("none".into()), devices: Err("none".into()) };
        assert_eq!(check(&host, &without_library, None)[0].level, Level::Note);
    }

    #[test]
    fn a_device_that_opens_is_ok() {
        let (_scratch, host) = tree();
        let findings = check(&host, &stack(&["mlx5_0"]), Some("mlx5_0"));
        assert_eq!(findings, [Topic::Devices.ok("mlx5_0: made of software, firmware 16.35, 0 ports")]);
    }

    #[test]
    fn a_device_that_does_not_open_is_one_problem() {
        let (scratch, host) = tree();
        let opened = Err("ibv_open_device failed".to_owned());
        let stack = Stack { library: Ok(None), devices: Ok(vec![VerbsDevice { name: "mlx5_0".into(), opened }]) };
        assert_eq!(check(&host, &stack, None), [Topic::Devices.problem("mlx5_0: ibv_open_device failed")]);
        std::fs::remove_file(scratch.path("dev/infiniband/uverbs0")).unwrap();
        let findings = check(&host, &stack, None);
        assert_eq!(findings.len(), 1, "the missing node is the reason: {findings:?}");
    }

    #[test]
    fn a_missing_node_is_named() {
        let (scratch, host) = tree();
        std::fs::remove_file(scratch.path("dev/infiniband/uverbs0")).unwrap();
        let findings = check(&host, &stack(&[]), None);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].what.contains("/dev/infiniband/uverbs0"), "{findings:?}");
        std::fs::remove_dir_all(scratch.path("sys/class/infiniband_verbs")).unwrap();
        let fix = check(&host, &stack(&[]), None)[0].fix.clone().unwrap();
        assert!(fix.contains("no module ib_uverbs"), "{fix}");
        scratch.write("/proc/sys/kernel/osrelease", "6.1.0\n");
        scratch.write("/lib/modules/6.1.0/modules.dep", "kernel/ib_uverbs.ko:\n");
        assert_eq!(check(&host, &stack(&[]), None)[0].fix.as_deref(), Some("modprobe ib_uverbs"));
    }
}
