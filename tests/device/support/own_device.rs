//! A device for a single test with several addresses: SoftRoCE, which can be removed, or soft0.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6, UdpSocket};
use std::process::{Child, Command, Stdio};

use rdma_safe::Device;

use super::{Rdma, network, within_deadline};

const INTERFACE: &str = "own0";

fn run(command: &str) -> bool {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).stdin(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// The interface also has the one that the kernel makes from its MAC address.
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 9, 10, 1);

/// Adds an interface of this kind with all addresses.
fn add_interface(kind: &str) {
    let own = OwnDevice::ADDRESS;
    let [one, two] = OwnDevice::IPV6_ADDRESSES;
    for command in [
        format!("ip link add {INTERFACE} type {kind}"),
        format!("ip addr add {own}/24 dev {INTERFACE}"),
        format!("ip -6 addr add {one}/64 dev {INTERFACE} nodad"),
        format!("ip -6 addr add {two}/64 dev {INTERFACE} nodad"),
        format!("ip -6 addr add {LINK_LOCAL}/64 dev {INTERFACE} nodad"),
        format!("ip link set {INTERFACE} up"),
    ] {
        assert!(run(&command), "{command}");
    }
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
        add_interface("dummy");
        let command = format!("rdma link add {} type rxe netdev {INTERFACE}", Self::NAME);
        assert!(run(&command), "{command}");
        within_deadline("the new device", || {
            let gids = Device::by_name(Self::NAME).ok()?.open().ok()?.gids(1).ok()?;
            let has = |address: Ipv6Addr| gids.iter().any(|entry| Ipv6Addr::from(entry.gid) == address);
            (has(Self::ADDRESS.to_ipv6_mapped()) && Self::IPV6_ADDRESSES.into_iter().all(has)).then_some(())
        });
        Some(own)
    }

    /// For soft0: moves this process to a network namespace with such an interface. Call it before the first verb.
    pub(crate) fn enter_network() {
        network::enter_new();
        add_interface("veth peer name other0");
        network::ip("link set other0 up");
        // The kernel takes a moment to let sockets use IPv6 addresses.
        let scope = Self::interface_index();
        for address in Self::IPV6_ADDRESSES.into_iter().chain([LINK_LOCAL]) {
            let bind = || UdpSocket::bind(SocketAddrV6::new(address, 0, 0, scope)).ok();
            within_deadline("the use of an address", || bind().map(drop));
        }
    }

    /// The addresses of the interface, for soft0: the value of `RDMA_SOFT_ADDR`.
    pub(crate) fn addresses() -> String {
        let [one, two] = Self::IPV6_ADDRESSES;
        format!("{},{one},{two},{LINK_LOCAL}", Self::ADDRESS)
    }

    /// Starts the removal of the device.
    pub(crate) fn remove(&self) -> Child {
        Command::new("rdma").args(["link", "delete", Self::NAME]).stdin(Stdio::null()).spawn().expect("the tool rdma")
    }

    /// Index of the network interface, which is the scope of link-local addresses.
    pub(crate) fn interface_index() -> u32 {
        let name = std::ffi::CString::new(INTERFACE).expect("no NUL");
        // SAFETY: the name ends with NUL.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        assert_ne!(index, 0, "no interface {INTERFACE}");
        index
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
