//! Checks the kernel's devices, libibverbs' devices, and the permission to open them.

use rustix::fs::Access;

use super::finding::{Finding, Topic};
use super::stack::Stack;
use super::{library, modules};
use crate::host::files::{HostFiles, ReadError};

const CLASS: &str = "/sys/class/infiniband";

/// Names of the kernel's devices, or only the wanted one.
pub(crate) fn names(host: &HostFiles, wanted: Option<&str>) -> Result<Vec<String>, ReadError> {
    let names = host.names(CLASS)?;
    Ok(names.into_iter().filter(|name| wanted.is_none_or(|wanted| wanted == name)).collect())
}

pub(crate) fn check(host: &HostFiles, stack: &Stack, wanted: Option<&str>) -> Vec<Finding> {
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

fn none(host: &HostFiles) -> Finding {
    Topic::Devices
        .problem("the kernel has no RDMA device")
        .why(
            "Either there is no RDMA hardware (lspci), or its driver is not loaded (mlx5_ib, irdma, bnxt_re, efa …), or \
             the device was not passed to this container or guest. A software device works over any Ethernet interface.",
        )
        .fix(modules::loading(host, "rdma_rxe", " && rdma link add rxe0 type rxe netdev INTERFACE"))
}

fn device(host: &HostFiles, stack: &Stack, name: &str) -> Vec<Finding> {
    let driver = host.link_name(&format!("{CLASS}/{name}/device/driver"));
    let mut findings = node(host, name);
    match stack.device(name).map(|device| &device.opened) {
        Some(Ok(opened)) => {
            let driver = match driver {
                Some(driver) => format!("driver {driver}"),
                None if host.is_software(name) => "software device".into(),
                None => "unknown driver".into(),
            };
            let firmware = match opened.firmware.as_str() {
                "" => String::new(),
                firmware => format!(", firmware {firmware}"),
            };
            let ports = opened.ports.len();
            let ports = format!("{ports} port{}", if ports == 1 { "" } else { "s" });
            findings.push(Topic::Devices.ok(format!("{name}: {driver}{firmware}, {ports}")));
        }
        // libibverbs reports a node without permission as missing.
        Some(Err(error)) if findings.is_empty() => findings.push(Topic::Devices.problem(format!("{name}: {error}"))),
        // The missing library or device node is reported instead.
        None if findings.is_empty() && stack.library.is_ok() && stack.devices.is_ok() => {
            findings.push(library::missing_provider(name, driver.as_deref()));
        }
        None if findings.is_empty() => {
            findings.push(Topic::Devices.note(format!("{name}: not opened, because libibverbs is missing")))
        }
        _ => {}
    }
    findings
}

/// Problems of a device's `/dev/infiniband/uverbsN`.
fn node(host: &HostFiles, device: &str) -> Vec<Finding> {
    let class = "/sys/class/infiniband_verbs";
    let nodes = host.names(class).unwrap_or_default();
    let is_its = |node: &&String| host.text(&format!("{class}/{node}/ibdev")).is_ok_and(|name| name == device);
    let Some(node) = nodes.iter().find(is_its) else {
        let finding = Topic::Devices.problem(format!("{device} has no uverbs node"));
        return vec![
            finding.why("Programs access devices through the kernel module ib_uverbs.").fix(modules::loading(
                host,
                "ib_uverbs",
                "",
            )),
        ];
    };
    let path = format!("/dev/infiniband/{node}");
    match rustix::fs::access(host.path(&path), Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Vec::new(),
        Err(rustix::io::Errno::NOENT) => vec![
            Topic::Devices
                .problem(format!("{path}, the node of {device}, is missing"))
                .why("udev creates it. A container needs it passed in.")
                .fix(format!("udevadm trigger, or for a container: --device={path} --cap-add=IPC_LOCK")),
        ],
        Err(error) => vec![
            Topic::Devices
                .problem(format!("this user may not open {path}, the node of {device}: {error}"))
                .why("Verbs need read and write permission. The kernel still protects processes from each other.")
                .fix(format!("chmod 0666 {path}, and permanently a udev rule: KERNEL==\"uverbs*\", MODE=\"0666\"")),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::doctor::stack::{OpenedDevice, VerbsDevice};
    use crate::testing::scratch::Scratch;

    fn stack(devices: &[&str]) -> Stack {
        let opened = || Ok(OpenedDevice { firmware: "16.35".into(), ports: Vec::new() });
        let devices = devices.iter().map(|name| VerbsDevice { name: (*name).into(), opened: opened() }).collect();
        Stack { library: Ok(None), devices: Ok(devices) }
    }

    fn tree() -> (Scratch, HostFiles) {
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband/mlx5_0/node_type", "1: CA");
        scratch.write("/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
        scratch.write("/dev/infiniband/uverbs0", "");
        let host = HostFiles::new(scratch.path(""));
        (scratch, host)
    }

    #[test]
    fn no_device_is_a_problem() {
        let finding = &check(&HostFiles::new("/nowhere"), &stack(&[]), None)[0];
        assert_eq!(finding.level, Level::Problem);
        assert!(finding.fix.as_ref().unwrap().contains("rdma_rxe"));
    }

    #[test]
    fn an_unknown_device_name_is_a_problem() {
        let (_scratch, host) = tree();
        let finding = &check(&host, &stack(&["mlx5_0"]), Some("mlx5_7"))[0];
        assert_eq!(finding.what, "there is no device mlx5_7; present: mlx5_0");
    }

    #[test]
    fn a_device_unknown_to_libibverbs_lacks_its_provider() {
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
        assert_eq!(findings, [Topic::Devices.ok("mlx5_0: software device, firmware 16.35, 0 ports")]);
    }

    #[test]
    fn a_device_that_does_not_open_is_one_problem() {
        let (scratch, host) = tree();
        let opened = Err("ibv_open_device failed".to_owned());
        let stack = Stack { library: Ok(None), devices: Ok(vec![VerbsDevice { name: "mlx5_0".into(), opened }]) };
        assert_eq!(check(&host, &stack, None), [Topic::Devices.problem("mlx5_0: ibv_open_device failed")]);
        std::fs::remove_file(scratch.path("dev/infiniband/uverbs0")).unwrap();
        let findings = check(&host, &stack, None);
        assert_eq!(findings.len(), 1, "only the missing node is reported: {findings:?}");
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
