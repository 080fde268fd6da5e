//! Packet filters. They see rxe's packets on UDP port 4791, but not the RoCE packets of hardware.

use std::process::{Command, Stdio};

use super::finding::{Finding, Topic};
use crate::host::files::{HostFiles, NET_ADMIN};

/// Lists the rules: `nft list ruleset`, or its replacement in a test.
pub(crate) type Ruleset<'a> = &'a dyn Fn() -> Result<String, String>;

pub(crate) fn check(host: &HostFiles, devices: &[String], ruleset: Ruleset<'_>) -> Vec<Finding> {
    if devices.is_empty() {
        return Vec::new();
    }
    if devices.iter().all(|device| !host.is_software(device)) {
        return vec![Topic::Firewall.note(
            "hardware RoCE bypasses the packet filter of this host; filters between the hosts must pass UDP port 4791",
        )];
    }
    if !host.has_capability(NET_ADMIN) {
        let finding = Topic::Firewall.note("not checked: only root can read the rules");
        return vec![finding.why("SoftRoCE needs UDP port 4791.").fix("sudo rdma-perf doctor")];
    }
    let mut findings = vec![match ruleset() {
        Ok(rules) => judge(&rules),
        Err(error) => Topic::Firewall.note(format!("not checked: {error}")).why("SoftRoCE needs UDP port 4791."),
    }];
    // nft does not show the rules of legacy iptables.
    if host.text("/proc/net/ip_tables_names").is_ok_and(|tables| tables.lines().any(|table| table == "filter")) {
        let finding = Topic::Firewall.note("legacy iptables has rules as well, which were not checked");
        findings.push(finding.fix("iptables-legacy -C INPUT -p udp --dport 4791 -j ACCEPT"));
    }
    findings
}

/// The rules of nftables.
pub(crate) fn nft() -> Result<String, String> {
    let mut command = Command::new("nft");
    command.args(["list", "ruleset"]).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("nft cannot be run ({error})"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(format!("nft list ruleset failed: {}", message.lines().next().unwrap_or_default().trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

const ALLOW: &str = "nft add rule inet filter input udp dport 4791 accept";

/// Searches the text of the rules. Does not follow the path of packets through chains.
fn judge(rules: &str) -> Finding {
    let rule = |line: &&str| !line.trim_start().starts_with('#');
    let lines = || rules.lines().filter(rule);
    let own = |line: &&str| line.contains("4791");
    let blocks = |line: &str| line.contains("drop") || line.contains("reject");
    if let Some(line) = lines().filter(own).find(|line| blocks(line)) {
        return Topic::Firewall.problem(format!("a rule blocks UDP port 4791: {}", line.trim())).fix(ALLOW);
    }
    if let Some(line) = lines().filter(own).find(|line| line.contains("accept")) {
        return Topic::Firewall.ok(format!("a rule accepts UDP port 4791: {}", line.trim()));
    }
    if lines().any(|line| line.contains("hook input") && line.contains("policy drop") || blocks(line)) {
        let finding = Topic::Firewall.warning("some rules drop packets, and none accepts UDP port 4791");
        return finding.why("SoftRoCE uses this port. If it is blocked, messages fail after all retries.").fix(ALLOW);
    }
    Topic::Firewall.ok("no nftables rule drops packets")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    #[test]
    fn rules_are_read_for_port_4791() {
        let level = |rules: &str| judge(rules).level;
        assert_eq!(level(""), Level::Ok);
        let dropping = "table inet filter {\n chain input {\n  type filter hook input priority 0; policy drop;\n";
        assert_eq!(level(dropping), Level::Warning);
        assert_eq!(level(&format!("{dropping}  udp dport 4791 accept\n }}\n}}\n")), Level::Ok);
        assert_eq!(level("table x {\n udp dport 4791 drop\n}\n"), Level::Problem);
        assert_eq!(level("table x {\n ip saddr 10.0.0.0/8 reject\n}\n"), Level::Warning);
        assert_eq!(level("# drop 4791\n"), Level::Ok);
    }

    #[test]
    fn only_root_and_only_software_devices_are_checked() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        scratch.write("/sys/class/infiniband/mlx5_0/device/vendor", "0x15b3");
        let rules = || -> Result<String, String> { Ok(String::new()) };
        let what = |devices: &[&str]| {
            let devices: Vec<String> = devices.iter().map(|name| (*name).to_owned()).collect();
            check(&host, &devices, &rules).into_iter().map(|finding| finding.what).collect::<Vec<_>>()
        };
        assert!(what(&[]).is_empty());
        assert!(what(&["mlx5_0"])[0].contains("bypasses the packet filter"));
        assert!(what(&["mlx5_0", "rxe0"])[0].contains("only root"));
        scratch.write("/proc/self/status", "CapEff:\t0000000000001000\n");
        scratch.write("/proc/net/ip_tables_names", "nat\nfilter\n");
        assert_eq!(what(&["rxe0"]).len(), 2);
        let missing = || Err("nft cannot be run (missing)".to_owned());
        assert_eq!(check(&host, &["rxe0".into()], &missing)[0].what, "not checked: nft cannot be run (missing)");
    }
}
