//! Configures an rxe device over an Ethernet interface, on the host or in a guest.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::config::{DEVICE, ETHERNET_MTU};
use crate::process;
use crate::wait;

/// Name of the dummy interface below the device.
pub(crate) const INTERFACE: &str = "wire0";

const CLASS: &str = "/sys/class/infiniband";

/// Sets the address and the MTU of `interface`, and adds the device to it.
pub(crate) fn configure(interface: &str, address: Ipv4Addr) -> Result<()> {
    let address = format!("{address}/24");
    let mtu = ETHERNET_MTU.to_string();
    process::output(Command::new("ip").args(["addr", "add", &address, "dev", interface]))?;
    process::output(Command::new("ip").args(["link", "set", interface, "mtu", &mtu, "up"]))?;
    process::output(Command::new("rdma").args(["link", "add", DEVICE, "type", "rxe", "netdev", interface]))?;
    Ok(())
}

/// Waits until the port is active, GID 1 is `address`, and a device node exists.
pub(crate) fn wait_until_ready(address: Ipv4Addr, limit: Duration) -> Result<()> {
    let port = Path::new(CLASS).join(DEVICE).join("ports/1");
    let read = |name: &str| fs::read_to_string(port.join(name)).unwrap_or_default();
    let gid = mapped_gid(address);
    let ready = wait::until(limit, || {
        let node = fs::read_dir("/dev/infiniband").is_ok_and(|mut nodes| nodes.next().is_some());
        let ready = node && read("state").contains("ACTIVE") && read("gids/1").trim() == gid;
        ready.then_some(())
    });
    ready.with_context(|| {
        let (state, found) = (read("state"), read("gids/1"));
        format!("{DEVICE} is not ready: port state {state:?}, GID 1 {found:?} instead of {gid}")
    })
}

/// Names of this machine's rxe devices.
pub(crate) fn devices() -> Vec<String> {
    let mut devices = Vec::new();
    for entry in fs::read_dir(CLASS).into_iter().flatten().flatten() {
        // A software device has no bus device. Unlike siw, rxe has a file `parent`, which names its interface.
        let path: PathBuf = entry.path();
        if !path.join("device").exists() && path.join("parent").exists() {
            devices.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    devices.sort();
    devices
}

/// The GID of `address`, formatted as in sysfs.
fn mapped_gid(address: Ipv4Addr) -> String {
    let segments = address.to_ipv6_mapped().segments();
    segments.map(|segment| format!("{segment:04x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_maps_to_the_gid_that_sysfs_prints() {
        assert_eq!(mapped_gid(Ipv4Addr::new(10, 9, 9, 1)), "0000:0000:0000:0000:0000:ffff:0a09:0901");
    }
}
