//! A SoftRoCE device for a single test, which can be removed.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::{Child, Command, Stdio};

use rdma_safe::Device;

use super::{Rdma, within_deadline};

const INTERFACE: &str = "own0";

fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).stdin(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// A SoftRoCE device on a dummy interface.
///
/// Dropping the value removes the device. The drop blocks until no process has the device open. librdmacm keeps it open until the
/// process ends.
pub(crate) struct OwnDevice;

impl OwnDevice {
    pub(crate) const NAME: &str = "rxe_own";
    pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 10, 1);
    pub(crate) const IPV6_ADDRESSES: [Ipv6Addr; 2] =
        [Ipv6Addr::new(0xfd00, 9, 10, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 9, 10, 0, 0, 0, 0, 2)];

    /// Creates the device. Returns `None` after printing why the test is skipped.
    pub(crate) fn new(rdma: &Rdma) -> Option<OwnDevice> {
        // SAFETY: no arguments.
        if !rdma.is_rxe() || unsafe { libc::geteuid() } != 0 {
            println!("skipped: adding and removing a device needs SoftRoCE and root");
            return None;
        }
        let own = OwnDevice;
        for command in [
            format!("ip link add {INTERFACE} type dummy"),
            format!("ip addr add {}/24 dev {INTERFACE}", Self::ADDRESS),
            format!("ip -6 addr add {}/64 dev {INTERFACE}", Self::IPV6_ADDRESSES[0]),
            format!("ip -6 addr add {}/64 dev {INTERFACE}", Self::IPV6_ADDRESSES[1]),
            format!("ip link set {INTERFACE} up"),
            format!("rdma link add {} type rxe netdev {INTERFACE}", Self::NAME),
        ] {
            assert!(run(&command), "{command}");
        }
        within_deadline("the new device", || {
            let gids = Device::by_name(Self::NAME).ok()?.open().ok()?.gids(1).ok()?;
            let has = |address: Ipv6Addr| gids.iter().any(|entry| Ipv6Addr::from(entry.gid) == address);
            (has(Self::ADDRESS.to_ipv6_mapped()) && Self::IPV6_ADDRESSES.into_iter().all(has)).then_some(())
        });
        Some(own)
    }

    /// Starts the removal of the device.
    pub(crate) fn remove(&self) -> Child {
        Command::new("rdma").args(["link", "delete", Self::NAME]).stdin(Stdio::null()).spawn().expect("the tool rdma")
    }

    /// Index of the network interface, which is the scope of link-local addresses.
    pub(crate) fn interface_index() -> u32 {
        let index = std::fs::read_to_string(format!("/sys/class/net/{INTERFACE}/ifindex")).expect("the interface");
        index.trim().parse().expect("a number")
    }

    pub(crate) fn exists(&self) -> bool {
        std::path::Path::new("/sys/class/infiniband").join(Self::NAME).exists()
    }
}

impl Drop for OwnDevice {
    fn drop(&mut self) {
        if self.exists() {
            run(&format!("rdma link delete {}", Self::NAME));
        }
        run(&format!("ip link delete {INTERFACE}"));
    }
}
