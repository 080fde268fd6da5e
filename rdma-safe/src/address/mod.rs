//! Addresses: address vectors and handles, GIDs, and headers that name the sender.
//!
//! Start with [`Context::recommended_gid`](crate::Context::recommended_gid), which finds the local GID for a
//! connection. Datagrams need an [`AddressHandle`], made from an [`AddressVector`] by
//! [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).

mod ah;
mod ethernet;
mod gid;
mod grh;
mod rate;

use rdma_sys::{ibv_ah_attr, ibv_flow_label_to_udp_sport, ibv_global_route};

use crate::{Context, Errno, Error, LinkLayer};

pub use ah::AddressHandle;
pub(crate) use ah::Arrival;
pub use ethernet::EthernetAddress;
pub(crate) use gid::recommended;
pub use gid::{Gid, GidEntry, GidType, Guid, InvalidGuid};
pub use grh::Grh;
pub use rate::Rate;

/// An address vector: `struct ibv_ah_attr`.
///
/// InfiniBand uses the LID, and RoCE the global route. The vector has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressVector {
    /// Local port to send from, counted from 1.
    pub port: u8,
    /// LID of the destination; 0 on RoCE.
    pub dlid: u16,
    /// Service level, 0 to 15.
    pub sl: u8,
    /// Path bits, which select one of the port's LIDs as the source.
    pub src_path_bits: u8,
    /// Rate limit: the code of a [`Rate`]; 0 for none.
    pub static_rate: u8,
    /// Global route; needed on RoCE and between InfiniBand subnets.
    pub route: Option<GlobalRoute>,
}

/// A global route: `struct ibv_global_route`.
///
/// It has the same fields as the C structure, which never changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GlobalRoute {
    /// GID of the destination.
    pub dgid: Gid,
    /// Index of the local GID in the GID table of the port.
    pub sgid_index: u8,
    /// Hop limit (time to live).
    pub hop_limit: u8,
    /// Traffic class, on RoCE v2 the IP type of service.
    pub traffic_class: u8,
    /// Flow label, 20 bits. On RoCE v2 it selects the UDP source port.
    pub flow_label: u32,
}

impl GlobalRoute {
    /// UDP source port that RoCE v2 derives from the flow label: `ibv_flow_label_to_udp_sport` of verbs.h.
    ///
    /// Devices may use another port.
    #[must_use]
    #[doc(alias = "ibv_flow_label_to_udp_sport")]
    pub fn udp_source_port(&self) -> u16 {
        ibv_flow_label_to_udp_sport(self.flow_label)
    }
}

/// Why an address vector was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The service level exceeds four bits.
    #[error("the service level is {sl}, but must be 0 to 15")]
    ServiceLevel {
        /// Service level of the address vector.
        sl: u8,
    },

    /// An address vector on Ethernet has no global route.
    #[error("port {port} is Ethernet (RoCE), where a peer is addressed by GID: give the address vector a global route")]
    MissingGlobalRoute {
        /// Local port.
        port: u8,
    },

    /// The datagram to answer has arrived at another port.
    #[error(
        "the datagram has not arrived at port {port} of {device}: answer it from an endpoint of the port where it has arrived"
    )]
    OtherPort {
        /// Device of the endpoint.
        device: String,
        /// Port of the endpoint.
        port: u8,
    },

    /// The local GID does not exist.
    #[error(
        "port {port} has no GID at index {index} to send from; list the GIDs with the show_gids example, or use \
         Context::recommended_gid"
    )]
    NoSourceGid {
        /// Local port.
        port: u8,
        /// Requested index.
        index: u8,
    },

    /// The peer's GID cannot be resolved to a link address.
    #[error(
        "no route from GID {source_gid} (index {index} of port {port}) to GID {dgid}: {errno}; check that both GIDs are of \
         the same type and network, that `ip route get` and `ip neigh` know the peer, and that its interface is up"
    )]
    Unreachable {
        /// Local port.
        port: u8,
        /// Index of the local GID.
        index: u8,
        /// Local GID.
        source_gid: Gid,
        /// GID of the peer.
        dgid: Gid,
        /// The errno that the verb returned.
        errno: Errno,
    },

    /// The kernel refused for an unknown reason.
    #[error("ibv_create_ah failed: {errno}; address: {address:?}")]
    Refused {
        /// The refused address vector.
        address: Box<AddressVector>,
        /// The errno that the verb returned.
        errno: Errno,
    },
}

impl AddressVector {
    /// The path to a LID in the same InfiniBand subnet.
    #[must_use]
    pub fn from_lid(port: u8, dlid: u16) -> Self {
        AddressVector { port, dlid, sl: 0, src_path_bits: 0, static_rate: 0, route: None }
    }

    /// The path to a GID from the local GID at `sgid_index`, with a hop limit of 64.
    #[must_use]
    pub fn from_gid(port: u8, dgid: Gid, sgid_index: u8) -> Self {
        let route = GlobalRoute { dgid, sgid_index, hop_limit: 64, traffic_class: 0, flow_label: 0 };
        AddressVector { route: Some(route), ..AddressVector::from_lid(port, 0) }
    }

    /// Checks that the vector has a global route on Ethernet.
    pub(crate) fn check_route(&self, context: &Context) -> Result<(), AddressError> {
        let is_ethernet = || context.query_port(self.port).is_ok_and(|port| port.link_layer() == LinkLayer::ETHERNET);
        if self.route.is_none() && is_ethernet() {
            return Err(AddressError::MissingGlobalRoute { port: self.port });
        }
        Ok(())
    }

    /// Looks for a problem of the route, after the kernel has returned `errno`.
    ///
    /// The flag says whether the reason is certain. If it is false, the route is the reason only if everything else is
    /// right.
    pub(crate) fn diagnose_route(&self, context: &Context, errno: Errno) -> Option<(AddressError, bool)> {
        let route = self.route?;
        let (port, index, dgid) = (self.port, route.sgid_index, route.dgid);
        match context.gid(port, u32::from(index)) {
            Err(Error::NoSuchGid { .. }) => Some((AddressError::NoSourceGid { port, index }, true)),
            Ok(source) => {
                let error = AddressError::Unreachable { port, index, source_gid: source.gid, dgid, errno };
                // The kernel reports an address that it cannot resolve with several errnos.
                Some((error, is_unresolved(errno) || errno.0 == libc::EINVAL && dgid.is_zero()))
            }
            Err(_) => None,
        }
    }

    pub(crate) fn to_raw(self) -> ibv_ah_attr {
        let route = self.route.unwrap_or(GlobalRoute {
            dgid: Gid::ZERO,
            sgid_index: 0,
            hop_limit: 0,
            traffic_class: 0,
            flow_label: 0,
        });
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: route.dgid.to_raw(),
                flow_label: route.flow_label,
                sgid_index: route.sgid_index,
                hop_limit: route.hop_limit,
                traffic_class: route.traffic_class,
            },
            dlid: self.dlid,
            sl: self.sl,
            src_path_bits: self.src_path_bits,
            static_rate: self.static_rate,
            is_global: u8::from(self.route.is_some()),
            port_num: self.port,
        }
    }

    pub(crate) fn from_raw(raw: &ibv_ah_attr) -> Self {
        let route = (raw.is_global != 0).then(|| GlobalRoute {
            dgid: Gid::from_raw(raw.grh.dgid),
            sgid_index: raw.grh.sgid_index,
            hop_limit: raw.grh.hop_limit,
            traffic_class: raw.grh.traffic_class,
            flow_label: raw.grh.flow_label,
        });
        AddressVector {
            port: raw.port_num,
            dlid: raw.dlid,
            sl: raw.sl,
            src_path_bits: raw.src_path_bits,
            static_rate: raw.static_rate,
            route,
        }
    }
}

fn is_unresolved(errno: Errno) -> bool {
    matches!(
        errno.0,
        libc::ENODATA | libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT | libc::EADDRNOTAVAIL | libc::ENODEV
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_label_maps_to_a_port_from_49152_on() {
        let port = |flow_label| {
            let route = AddressVector::from_gid(1, Gid::ZERO, 0).route.unwrap();
            GlobalRoute { flow_label, ..route }.udp_source_port()
        };
        assert_eq!([port(0), port(1), port(0x3fff)], [0xc000, 0xc001, 0xffff]);
        assert_eq!(port(0x1_4000), 0xc005, "the upper six bits are folded in");
    }

    #[test]
    fn an_address_vector_round_trips_through_c() {
        let mut address = AddressVector::from_gid(2, "::ffff:10.9.9.1".parse().unwrap(), 1);
        address.sl = 3;
        assert_eq!(AddressVector::from_raw(&address.to_raw()), address);
        let address = AddressVector::from_lid(1, 77);
        assert_eq!(AddressVector::from_raw(&address.to_raw()), address);
        assert_eq!(address.to_raw().is_global, 0);
    }
}
