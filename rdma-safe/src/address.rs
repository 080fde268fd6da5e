//! Where a queue pair sends to.

use rdma_sys::{ibv_ah_attr, ibv_flow_label_to_udp_sport, ibv_global_route};

use crate::{Context, Errno, Error, Gid, LinkLayer};

/// An address vector: `struct ibv_ah_attr`.
///
/// On InfiniBand the LID is what counts, on RoCE the global route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressVector {
    /// Local port to send from, counted from 1.
    pub port: u8,
    /// LID of the destination; 0 on RoCE.
    pub dlid: u16,
    /// Service level, 0 to 15.
    pub sl: u8,
    /// Which of the port's LIDs to send from.
    pub src_path_bits: u8,
    /// Limit of the rate: a [`Rate`](crate::Rate) by its code; 0 for none.
    pub static_rate: u8,
    /// Global route; needed on RoCE and between InfiniBand subnets.
    pub route: Option<GlobalRoute>,
}

/// A global route: `struct ibv_global_route`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GlobalRoute {
    /// GID of the destination.
    pub dgid: Gid,
    /// Index of the local GID to send from, in the table of the port.
    pub sgid_index: u8,
    /// Hop limit (time to live).
    pub hop_limit: u8,
    /// Traffic class; on RoCE v2 the IP type of service.
    pub traffic_class: u8,
    /// Flow label, 20 bits; on RoCE v2 it varies the UDP source port.
    pub flow_label: u32,
}

impl GlobalRoute {
    /// The UDP port that RoCE v2 sends from because of the flow label: `ibv_flow_label_to_udp_sport` of verbs.h.
    ///
    /// Devices that follow it take this one; what others take is their own affair.
    #[must_use]
    #[doc(alias = "ibv_flow_label_to_udp_sport")]
    pub fn udp_source_port(&self) -> u16 {
        ibv_flow_label_to_udp_sport(self.flow_label)
    }
}

/// Why an address vector was refused, or would have been.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The service level has four bits.
    #[error("the service level is {sl}, but must be 0 to 15")]
    ServiceLevel {
        /// The value.
        sl: u8,
    },

    /// On Ethernet an address vector needs a global route.
    #[error("port {port} is Ethernet (RoCE), where a peer is addressed by GID: give the address vector a global route")]
    MissingGlobalRoute {
        /// The port.
        port: u8,
    },

    /// The GID to send from does not exist.
    #[error(
        "port {port} has no GID at index {index} to send from; list them with the show_gids example, or take \
         Context::recommended_gid"
    )]
    NoSourceGid {
        /// The port.
        port: u8,
        /// The index asked for.
        index: u8,
    },

    /// The peer's GID cannot be resolved to a link address.
    #[error(
        "no route from GID {source_gid} (index {index} of port {port}) to GID {dgid}: {errno}; check that both are of the \
         same kind and network, that `ip route get` and `ip neigh` know the peer, and that its interface is up"
    )]
    Unreachable {
        /// The port.
        port: u8,
        /// Index of the local GID.
        index: u8,
        /// The local GID.
        source_gid: Gid,
        /// The peer's GID.
        dgid: Gid,
        /// As reported.
        errno: Errno,
    },

    /// Refused for a reason that could not be found out.
    #[error("ibv_create_ah failed: {errno}; address: {address:?}")]
    Refused {
        /// The address vector.
        address: Box<AddressVector>,
        /// As reported.
        errno: Errno,
    },
}

impl AddressVector {
    /// To a LID of the same InfiniBand subnet.
    #[must_use]
    pub fn from_lid(port: u8, dlid: u16) -> Self {
        AddressVector { port, dlid, sl: 0, src_path_bits: 0, static_rate: 0, route: None }
    }

    /// To a GID, from the local GID at `sgid_index`, with a hop limit of 64.
    #[must_use]
    pub fn from_gid(port: u8, dgid: Gid, sgid_index: u8) -> Self {
        let route = GlobalRoute { dgid, sgid_index, hop_limit: 64, traffic_class: 0, flow_label: 0 };
        AddressVector { route: Some(route), ..AddressVector::from_lid(port, 0) }
    }

    /// What can be told without the device.
    pub(crate) fn check_route(&self, context: &Context) -> Result<(), AddressError> {
        let is_ethernet = || context.query_port(self.port).is_ok_and(|port| port.link_layer() == LinkLayer::ETHERNET);
        if self.route.is_none() && is_ethernet() {
            return Err(AddressError::MissingGlobalRoute { port: self.port });
        }
        Ok(())
    }

    /// What is wrong with the route, once the kernel has answered `errno`; and whether that is certain, or only what is left when
    /// everything else fits.
    pub(crate) fn diagnose_route(&self, context: &Context, errno: Errno) -> Option<(AddressError, bool)> {
        let route = self.route?;
        let (port, index, dgid) = (self.port, route.sgid_index, route.dgid);
        match context.gid(port, u32::from(index)) {
            Err(Error::NoSuchGid { .. }) => Some((AddressError::NoSourceGid { port, index }, true)),
            Ok(source) => {
                let error = AddressError::Unreachable { port, index, source_gid: source.gid, dgid, errno };
                // An address that cannot be resolved is reported with other numbers, too.
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
    fn a_flow_label_gives_a_port_from_49152_on() {
        let port = |flow_label| {
            let route = AddressVector::from_gid(1, Gid::ZERO, 0).route.unwrap();
            GlobalRoute { flow_label, ..route }.udp_source_port()
        };
        assert_eq!([port(0), port(1), port(0x3fff)], [0xc000, 0xc001, 0xffff]);
        assert_eq!(port(0x1_4000), 0xc005, "the upper six bits are folded in");
    }

    #[test]
    fn an_address_survives_the_way_through_c() {
        let mut address = AddressVector::from_gid(2, "::ffff:10.9.9.1".parse().unwrap(), 1);
        address.sl = 3;
        assert_eq!(AddressVector::from_raw(&address.to_raw()), address);
        let address = AddressVector::from_lid(1, 77);
        assert_eq!(AddressVector::from_raw(&address.to_raw()), address);
        assert_eq!(address.to_raw().is_global, 0);
    }
}
