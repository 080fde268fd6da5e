//! A device that one test has for itself, to change its addresses, and to remove it.

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

/// It is removed when this is dropped, which waits until no process has it open: librdmacm has until a process ends.
pub(crate) struct OwnDevice;

impl OwnDevice {
    pub(crate) const NAME: &str = "rxe_own";
    pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 10, 1);
    pub(crate) const SIXES: [Ipv6Addr; 2] =
        [Ipv6Addr::new(0xfd00, 9, 10, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 9, 10, 0, 0, 0, 0, 2)];

    /// `None` after having said why the test is skipped.
    pub(crate) fn new(rdma: &Rdma) -> Option<OwnDevice> {
        // SAFETY: no arguments.
        if !rdma.is_rxe() || unsafe { libc::geteuid() } != 0 {
            println!("skipped: it takes SoftRoCE, and root, to add a device and remove it");
            return None;
        }
        let own = OwnDevice;
        for command in [
            format!("ip link add {INTERFACE} type dummy"),
            format!("ip addr add {}/24 dev {INTERFACE}", Self::ADDRESS),
            format!("ip -6 addr add {}/64 dev {INTERFACE}", Self::SIXES[0]),
            format!("ip -6 addr add {}/64 dev {INTERFACE}", Self::SIXES[1]),
            format!("ip link set {INTERFACE} up"),
            format!("rdma link add {} type rxe netdev {INTERFACE}", Self::NAME),
        ] {
            assert!(run(&command), "{command}");
        }
        within_deadline("a device that is ready", || {
            let gids = Device::by_name(Self::NAME).ok()?.open().ok()?.gids(1).ok()?;
            let has = |address: Ipv6Addr| gids.iter().any(|entry| Ipv6Addr::from(entry.gid) == address);
            (has(Self::ADDRESS.to_ipv6_mapped()) && Self::SIXES.into_iter().all(has)).then_some(())
        });
        Some(own)
    }

    /// Begins to remove it.
    pub(crate) fn remove(&self) -> Child {
        Command::new("rdma").args(["link", "delete", Self::NAME]).stdin(Stdio::null()).spawn().expect("the tool rdma")
    }

    /// The number of its interface, which link-local addresses need.
    pub(crate) fn interface_index() -> u32 {
        let index = std::fs::read_to_string(format!("/sys/class/net/{INTERFACE}/ifindex")).expect("the interface");
        index.trim().parse().expect("a number")
    }

    pub(crate) fn is_there(&self) -> bool {
        std::path::Path::new("/sys/class/infiniband").join(Self::NAME).exists()
    }
}

impl Drop for OwnDevice {
    fn drop(&mut self) {
        if self.is_there() {
            run(&format!("rdma link delete {}", Self::NAME));
        }
        run(&format!("ip link delete {INTERFACE}"));
    }
}
