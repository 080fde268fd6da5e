//! Link-layer addresses of Ethernet.

use crate::address::{AddressError, AddressVector};
use crate::errno::check_negated;
use crate::{Context, Error, Result};

/// Link-layer destination of packets on Ethernet, for device-specific and raw interfaces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct EthernetAddress {
    /// MAC address of the next hop.
    pub mac: [u8; 6],
    /// VLAN ID, 0 to 4095, if the interface of the port's GID is a VLAN.
    pub vlan_id: Option<u16>,
}

impl Context {
    /// Resolves the GID of `address` to an Ethernet address: `ibv_resolve_eth_l2_from_gid`.
    ///
    /// If the host does not know the peer yet, this waits for the network, a few seconds at most. Multicast groups are
    /// not looked up.
    ///
    /// # Errors
    /// [`Error::NoSuchPort`]; [`Error::Address`] if there is no global route, or the peer cannot be resolved.
    #[doc(alias = "ibv_resolve_eth_l2_from_gid")]
    pub fn ethernet_address(&self, address: &AddressVector) -> Result<EthernetAddress> {
        self.query_port(address.port)?;
        let Some(route) = &address.route else {
            return Err(Box::new(AddressError::MissingGlobalRoute { port: address.port }).into());
        };
        let (mut raw, mut mac, mut vlan) = (address.to_raw(), [0; 6], u16::MAX);
        let resolve = self.verbs().ibv_resolve_eth_l2_from_gid;
        // SAFETY: the context is valid, and so are the attributes and the out pointers, for 6 bytes and for a number.
        match check_negated(|| unsafe { resolve(self.as_raw(), &mut raw, mac.as_mut_ptr(), &mut vlan) }) {
            Ok(()) => Ok(EthernetAddress { mac, vlan_id: (vlan <= 0xfff).then_some(vlan) }),
            Err(errno) if errno.is_unsupported() => Err(self.unsupported("resolving Ethernet addresses")),
            Err(errno) => {
                let (port, index, dgid) = (address.port, route.sgid_index, route.dgid);
                let source = self.gid(port, index.into()).map_err(|_| AddressError::NoSourceGid { port, index });
                let error = match source {
                    Ok(source) => AddressError::Unreachable { port, index, source_gid: source.gid, dgid, errno },
                    Err(error) => error,
                };
                Err(Error::Address(Box::new(error)))
            }
        }
    }
}
