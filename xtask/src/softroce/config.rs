//! Configuration of a guest.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Configuration that the guest's init reads from its initramfs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    /// Stop after [`Frame::Hello`](super::frame::Frame::Hello): this boot only tests whether a guest boots.
    pub(crate) probe: bool,
    /// Directories of the `overlays` share, topmost first.
    pub(crate) overlays: Vec<String>,
    /// Mount point of the host's writable share.
    pub(crate) writable: PathBuf,
    /// The network under the RDMA device.
    pub(crate) network: Network,
    /// The program and its arguments.
    pub(crate) command: Vec<String>,
    /// Working directory of the program.
    pub(crate) directory: PathBuf,
    /// Complete environment of the program.
    pub(crate) environment: Vec<(String, String)>,
}

/// The network under the RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Network {
    /// A dummy interface: both ends of a connection are in this guest.
    Dummy,
    /// An Ethernet link to another guest.
    Wire {
        /// Address of the other guest.
        peer: Ipv4Addr,
        /// Address of this guest.
        own: Ipv4Addr,
    },
}

impl Network {
    /// Address of this guest, which is also its GID at index 1.
    pub(crate) fn own(&self) -> Ipv4Addr {
        match self {
            Network::Dummy => ADDRESSES[0],
            Network::Wire { own, .. } => *own,
        }
    }
}

/// Addresses of the first and the second host.
pub(crate) const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 9, 9, 1), Ipv4Addr::new(10, 9, 9, 2)];
/// Name of the RDMA device.
pub(crate) const DEVICE: &str = "rxe0";
/// Ethernet MTU, large enough for 4096 bytes of payload with all RoCEv2 headers.
pub(crate) const ETHERNET_MTU: u32 = 4200;
/// Mount tags of the shares between host and guest.
pub(crate) mod tag {
    pub(crate) const BASE: &str = "base";
    pub(crate) const OVERLAYS: &str = "overlays";
    pub(crate) const WRITABLE: &str = "writable";
}
