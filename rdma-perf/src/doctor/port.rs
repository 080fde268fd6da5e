//! Ports: state, speed, MTU.

use super::finding::{Finding, Level, Topic};
use super::stack::{Port, Stack};
use crate::host::files::HostFiles;

pub(crate) fn check(host: &HostFiles, stack: &Stack, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut active = 0;
    for device in devices {
        let directory = format!("/sys/class/infiniband/{device}/ports");
        let numbers = match host.names(&directory) {
            Ok(numbers) => numbers,
            Err(error) => {
                findings.push(Topic::Ports.note(error.to_string()));
                continue;
            }
        };
        for number in numbers {
            let state = state(host, device, &number, stack.port(device, &number));
            active += usize::from(state.level == Level::Ok);
            findings.push(state);
            if let Some(port) =
                stack.port(device, &number).filter(|port| port.is_active && port.is_ethernet && !host.is_iwarp(device))
            {
                findings.extend(mtu(device, &number, port, interface_mtu(host, device, &number)));
            }
        }
    }
    if active == 0 && !findings.is_empty() {
        findings.push(Topic::Ports.problem("no port is active").why("Only an active port can send."));
    }
    findings
}

fn state(host: &HostFiles, device: &str, number: &str, port: Option<Port>) -> Finding {
    let read = |name: &str| host.text(&format!("/sys/class/infiniband/{device}/ports/{number}/{name}"));
    let state = match read("state") {
        Ok(state) => state,
        Err(error) => return Topic::Ports.note(error.to_string()),
    };
    // The format is `4: ACTIVE`.
    let state = state.rsplit(' ').next().unwrap_or_default();
    let layer = read("link_layer").unwrap_or_default();
    let rate = read("rate").unwrap_or_default();
    let at = format!("{device} port {number}");
    if state == "ACTIVE" {
        let mtu = port
            .filter(|port| port.active_mtu > 0)
            .map_or_else(String::new, |port| format!(", MTU {}", port.active_mtu));
        // The rate that software devices report is not their speed.
        let rate = if host.is_software(device) { String::new() } else { format!(", {rate}") };
        return Topic::Ports.ok(format!("{at}: active, {layer}{rate}{mtu}"));
    }
    let finding = Topic::Ports.warning(format!("{at} is not active: {state}, {layer}"));
    if layer == "Ethernet" {
        let interface = host.interface(device, number).unwrap_or_else(|| "INTERFACE".into());
        finding.why("Its network interface is down or has no link.").fix(format!("ip link set {interface} up"))
    } else if state == "INIT" || state == "ARMED" {
        finding
            .why("The link is up, but no subnet manager has configured it.")
            .fix("systemctl start opensm (on one host)")
    } else {
        finding.why("The link is down: check the cable and the switch.")
    }
}

struct Interface {
    name: String,
    mtu: u64,
}

fn interface_mtu(host: &HostFiles, device: &str, number: &str) -> Option<Interface> {
    let name = host.interface(device, number)?;
    let mtu = host.number(&format!("/sys/class/net/{name}/mtu"))?;
    Some(Interface { name, mtu })
}

/// Headers that the kernel subtracts from the MTU of the interface (`iboe_get_mtu` in include/rdma/ib_addr.h).
const HEADERS: u64 = 40 + 8 + 12 + 4 + 28 + 4;

/// Checks the RoCE path MTU, the largest power of two whose packets fit into frames of the interface.
fn mtu(device: &str, number: &str, port: Port, interface: Option<Interface>) -> Option<Finding> {
    let Port { active_mtu, max_mtu, .. } = port;
    if active_mtu == 0 || active_mtu >= max_mtu {
        return None;
    }
    let at = format!("{device} port {number}: RoCE MTU {active_mtu} of {max_mtu}");
    let Some(Interface { name, mtu }) = interface else {
        return Some(Topic::Ports.note(format!("{at}; its interface is unknown")));
    };
    // Rounded up, as the documentation of RNICs recommends.
    let wanted = (u64::from(max_mtu) + HEADERS).next_multiple_of(100);
    if mtu >= u64::from(active_mtu) * 2 + HEADERS {
        let finding = Topic::Ports.warning(format!("{at}, although {name} has MTU {mtu}"));
        return Some(
            finding
                .why("The device has not adopted it.")
                .fix(format!("ip link set {name} down && ip link set {name} up")),
        );
    }
    let finding = Topic::Ports.warning(format!("{at}, because {name} has MTU {mtu}"));
    let why = "Large messages need more packets than necessary. The switches and the other hosts must support frames \
               of this size as well.";
    Some(finding.why(why).fix(format!("ip link set {name} mtu {wanted}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::stack::{OpenedDevice, VerbsDevice};
    use crate::testing::scratch::Scratch;

    fn tree(state: &str, layer: &str, interface_mtu: u32) -> (Scratch, HostFiles) {
        let scratch = Scratch::new();
        let port = "/sys/class/infiniband/rxe0/ports/1";
        scratch.write(&format!("{port}/state"), state);
        scratch.write(&format!("{port}/link_layer"), layer);
        scratch.write(&format!("{port}/rate"), "100 Gb/sec (4X EDR)\n");
        scratch.write(&format!("{port}/gid_attrs/ndevs/0"), "eth0\n");
        scratch.write("/sys/class/net/eth0/mtu", &interface_mtu.to_string());
        let host = HostFiles::new(scratch.path(""));
        (scratch, host)
    }

    fn stack(active_mtu: u32) -> Stack {
        let port = Port { number: 1, is_active: true, is_ethernet: true, active_mtu, max_mtu: 4096 };
        let opened = Ok(OpenedDevice { firmware: String::new(), ports: vec![port] });
        Stack { library: Ok(None), devices: Ok(vec![VerbsDevice { name: "rxe0".into(), opened }]) }
    }

    fn found(state: &str, layer: &str, interface_mtu: u32, active_mtu: u32) -> Vec<Finding> {
        let (_scratch, host) = tree(state, layer, interface_mtu);
        check(&host, &stack(active_mtu), &["rxe0".into()])
    }

    #[test]
    fn a_small_interface_mtu_limits_the_roce_mtu() {
        let findings = found("4: ACTIVE", "Ethernet", 1500, 1024);
        assert_eq!(findings[0], Topic::Ports.ok("rxe0 port 1: active, Ethernet, MTU 1024"));
        assert_eq!(findings[1].what, "rxe0 port 1: RoCE MTU 1024 of 4096, because eth0 has MTU 1500");
        assert_eq!(findings[1].fix.as_deref(), Some("ip link set eth0 mtu 4200"));
        assert_eq!(found("4: ACTIVE", "Ethernet", 4200, 4096).len(), 1);
        assert!(found("4: ACTIVE", "Ethernet", 9000, 1024)[1].what.ends_with("although eth0 has MTU 9000"));
    }

    #[test]
    fn a_host_without_an_active_port_has_a_problem() {
        let findings = found("1: DOWN", "Ethernet", 1500, 1024);
        assert_eq!(findings[0].fix.as_deref(), Some("ip link set eth0 up"));
        assert_eq!(findings.last().unwrap().level, Level::Problem);
        assert!(found("2: INIT", "InfiniBand", 1500, 4096)[0].fix.as_ref().unwrap().contains("opensm"));
    }

    #[test]
    fn a_port_whose_state_cannot_be_read_is_a_note() {
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband/rxe0/ports/1/rate", "");
        let findings = check(&HostFiles::new(scratch.path("")), &stack(1024), &["rxe0".into()]);
        assert_eq!(findings[0].level, Level::Note);
        assert!(findings[0].what.contains("ports/1/state cannot be read"), "{findings:?}");
    }
}
