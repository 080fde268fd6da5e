//! What a guest is told to do.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Read by the guest's init from its initramfs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    /// Stop after saying hello: this boot only shows that booting works.
    pub(crate) probe: bool,
    /// Directories of the `overlays` share, the topmost first.
    pub(crate) overlays: Vec<String>,
    /// Where the writable share of the host appears.
    pub(crate) writable: PathBuf,
    /// The network under the RDMA device.
    pub(crate) network: Network,
    /// The program and its arguments.
    pub(crate) command: Vec<String>,
    /// Its working directory.
    pub(crate) directory: PathBuf,
    /// Its whole environment.
    pub(crate) environment: Vec<(String, String)>,
}

/// The network under the RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Network {
    /// A dummy interface: both ends of a connection are in this guest.
    Alone,
    /// A wire to another guest.
    Wire {
        /// The address of the other guest.
        peer: Ipv4Addr,
        /// The address of this one.
        own: Ipv4Addr,
    },
}

impl Network {
    /// The address of this guest, which is also its GID 1.
    pub(crate) fn own(&self) -> Ipv4Addr {
        match self {
            Network::Alone => ADDRESSES[0],
            Network::Wire { own, .. } => *own,
        }
    }
}

/// The addresses of the first and the second host.
pub(crate) const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 9, 9, 1), Ipv4Addr::new(10, 9, 9, 2)];
/// The RDMA device.
pub(crate) const DEVICE: &str = "rxe0";
/// The Ethernet MTU: 4096 bytes of payload and every header of RoCE v2 fit in.
pub(crate) const ETHERNET_MTU: u32 = 4200;
/// Shares between host and guest.
pub(crate) mod tag {
    pub(crate) const BASE: &str = "base";
    pub(crate) const OVERLAYS: &str = "overlays";
    pub(crate) const WRITABLE: &str = "writable";
}
