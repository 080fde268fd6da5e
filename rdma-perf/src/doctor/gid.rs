//! GIDs: the source addresses of connections.

use rdma_safe::Gid;

use super::finding::{Finding, Topic};
use crate::host::files::HostFiles;

#[derive(Clone, PartialEq, Debug)]
struct Entry {
    index: u32,
    gid: Gid,
    is_roce_v2: bool,
    interface: String,
}

pub(crate) fn check(host: &HostFiles, devices: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for device in devices {
        if host.is_iwarp(device) {
            findings.push(iwarp(device));
            continue;
        }
        let ports = format!("/sys/class/infiniband/{device}/ports");
        for port in host.names(&ports).unwrap_or_default() {
            // InfiniBand connects by LID, and its GID 0 always exists.
            if host.text(&format!("{ports}/{port}/link_layer")).is_ok_and(|layer| layer == "Ethernet") {
                findings.push(match table(host, &format!("{ports}/{port}")) {
                    Ok(entries) => judge(host, device, &port, &entries),
                    Err(finding) => finding,
                });
            }
        }
    }
    findings
}

/// iWARP does not connect by its GID.
fn iwarp(device: &str) -> Finding {
    let finding = Topic::Addresses.warning(format!("{device} is an iWARP device"));
    finding.why("iWARP connects over TCP by rdma_cm. rdma-perf supports InfiniBand and RoCE.")
}

/// Non-empty entries of the GID table.
fn table(host: &HostFiles, port: &str) -> Result<Vec<Entry>, Finding> {
    let indices = host.names(&format!("{port}/gids")).map_err(|error| Topic::Addresses.note(error.to_string()))?;
    let entry = |index: &String| {
        let gid: Gid = host.text(&format!("{port}/gids/{index}")).ok()?.parse().ok()?;
        let attribute = |name: &str| host.text(&format!("{port}/gid_attrs/{name}/{index}")).unwrap_or_default();
        (!gid.is_zero()).then(|| Entry {
            index: index.parse().unwrap_or(u32::MAX),
            gid,
            is_roce_v2: attribute("types") == "RoCE v2",
            interface: attribute("ndevs"),
        })
    };
    Ok(indices.iter().filter_map(entry).collect())
}

/// The order of `rdma_safe::Context::recommended_gid`, which needs an open device.
fn recommended(entries: &[Entry]) -> Option<&Entry> {
    let usable = entries.iter().filter(|entry| entry.index <= 255);
    usable.min_by_key(|entry| (!entry.is_roce_v2, entry.gid.is_link_local(), entry.gid.ipv4().is_none(), entry.index))
}

fn judge(host: &HostFiles, device: &str, port: &str, entries: &[Entry]) -> Finding {
    let at = format!("{device} port {port}");
    let Some(best) = recommended(entries) else {
        let finding = Topic::Addresses.problem(format!("{at} has no GID"));
        let why = "A GID appears when the network interface below the device is up and has an address.";
        return finding.why(why).fix("ip link set INTERFACE up && ip addr add ADDRESS/24 dev INTERFACE");
    };
    let Entry { index, gid, interface, .. } = best;
    let add = format!("ip addr add ADDRESS/24 dev {}", if interface.is_empty() { "INTERFACE" } else { interface });
    if !best.is_roce_v2 {
        let finding = Topic::Addresses.warning(format!("{at} has only RoCE v1 GIDs; the best is index {index}, {gid}"));
        let why = "RoCE v1 packets are not routed, and a RoCE v2 peer cannot connect to it.";
        return finding.why(why).fix(roce_v2_advice(host, device, &add));
    }
    let on = if interface.is_empty() { String::new() } else { format!(" of {interface}") };
    match gid.ipv4() {
        Some(address) => Topic::Addresses.ok(format!("{at}: use GID index {index}, RoCE v2, {address}{on}")),
        None => {
            let finding = Topic::Addresses
                .warning(format!("{at} has no RoCE v2 GID with an IPv4 address; the best is index {index}, {gid}{on}"));
            let why = if gid.is_link_local() {
                "A link-local address works only on the same link, and its index often differs between hosts."
            } else {
                "IPv6 works if both hosts have it, but many tools expect IPv4."
            };
            finding.why(why).fix(add)
        }
    }
}

/// mlx5 and some other drivers have a default RoCE mode in configfs. Drivers without it offer RoCE v2 for every IP
/// address.
fn roce_v2_advice(host: &HostFiles, device: &str, add: &str) -> String {
    if host.is_software(device) {
        return add.to_owned();
    }
    format!("{add} (and for rdma_cm: cma_roce_mode -d {device} -p 1 -m 2)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    fn found(table: &[(&str, &str)]) -> Finding {
        let scratch = Scratch::new();
        let port = "/sys/class/infiniband/mlx5_0/ports/1";
        scratch.write(&format!("{port}/link_layer"), "Ethernet\n");
        scratch.write(&format!("{port}/gids/255"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        for (index, (gid, kind)) in table.iter().enumerate() {
            scratch.write(&format!("{port}/gids/{index}"), gid);
            scratch.write(&format!("{port}/gid_attrs/types/{index}"), kind);
            scratch.write(&format!("{port}/gid_attrs/ndevs/{index}"), "eth0\n");
        }
        let mut findings = check(&HostFiles::new(scratch.path("")), &["mlx5_0".into()]);
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings.remove(0)
    }

    const LINK_LOCAL: &str = "fe80:0000:0000:0000:0202:c9ff:fe00:0001\n";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a09:0901\n";

    #[test]
    fn roce_v2_with_an_ipv4_address_is_recommended() {
        let finding =
            found(&[(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")]);
        assert_eq!(finding, Topic::Addresses.ok("mlx5_0 port 1: use GID index 3, RoCE v2, 10.9.9.1 of eth0"));
    }

    #[test]
    fn iwarp_has_no_gid_to_connect_from() {
        let scratch = Scratch::new();
        scratch.write("/sys/class/infiniband/siw0/node_type", "4: RNIC\n");
        scratch.write("/sys/class/infiniband/siw0/ports/1/link_layer", "Ethernet\n");
        let findings = check(&HostFiles::new(scratch.path("")), &["siw0".into()]);
        assert_eq!(findings[0].what, "siw0 is an iWARP device");
    }

    #[test]
    fn worse_gids_are_a_warning_and_none_is_a_problem() {
        let finding = found(&[(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")]);
        assert_eq!(finding.level, Level::Warning);
        assert!(finding.what.contains("index 1") && finding.why.unwrap().contains("link-local"));
        assert_eq!(finding.fix.as_deref(), Some("ip addr add ADDRESS/24 dev eth0"));
        assert!(found(&[(LINK_LOCAL, "IB/RoCE v1")]).what.contains("only RoCE v1"));
        assert_eq!(found(&[]).level, Level::Problem);
    }
}
