//! Names of datagram endpoints.

use super::peer::HostPort;
use super::{DatagramEndpoint, DatagramSender, Peer};
use crate::address::{AddressError, AddressVector};
use crate::endpoint::EndpointMut;
use crate::qp::Local;
use crate::{ConnectOptions, ProtectionDomain, QueuePairAddress, Result};

/// The queue pair, port and domain of a datagram endpoint.
///
/// The connection manager needs them to look up services and to answer lookups. So it can do this while the endpoint belongs to a
/// set that another thread uses.
#[derive(Clone, Debug)]
pub struct DatagramIdentity {
    pd: ProtectionDomain,
    port: u8,
    qp_num: u32,
    qkey: u32,
    local: Option<Local>,
}

impl DatagramIdentity {
    pub(in crate::endpoint) fn new(
        pd: &ProtectionDomain,
        port: u8,
        qp_num: u32,
        qkey: u32,
        local: Option<Local>,
    ) -> Self {
        DatagramIdentity { pd: pd.clone(), port, qp_num, qkey, local }
    }

    /// The domain that buffers and peers must belong to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Port of the device, counted from 1.
    #[must_use]
    pub fn port(&self) -> u8 {
        self.port
    }

    /// Number of the queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Queue key. Received datagrams with another key are dropped.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    pub(super) fn host_port(&self) -> HostPort {
        HostPort { device: self.pd.context().device_address(), port: self.port }
    }

    /// The queue pair `qp_num` behind the port at `address`: [`DatagramEndpoint::peer_at`].
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::peer_at`].
    pub fn peer_at(&self, address: &AddressVector, qp_num: u32) -> Result<Peer> {
        Peer::new(&self.pd, address, qp_num, self.qkey)
    }

    /// The sender of a datagram as a peer: [`DatagramEndpoint::peer_of`].
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::peer_of`].
    pub fn peer_of(&self, sender: &DatagramSender) -> Result<Peer> {
        if sender.heard_at != self.host_port() {
            let device = self.pd.context().device_name().into();
            return Err(Box::new(AddressError::OtherPort { device, port: self.port }).into());
        }
        let multicast = sender.grh().filter(|grh| grh.dgid().is_multicast());
        let address = match (multicast, &self.local) {
            // `ibv_init_ah_from_wc` looks for the destination, the group, among the GIDs of the port.
            (Some(grh), Some(local)) => {
                let remote = QueuePairAddress { gid: grh.sgid(), lid: sender.lid(), ..local.address };
                local.route(&remote, &ConnectOptions::default())
            }
            _ => self.pd.context().address_of_arrival(self.port, &sender.route, sender.grh())?,
        };
        self.peer_at(&address, sender.qp_num())
    }
}

impl From<&DatagramEndpoint> for DatagramIdentity {
    fn from(endpoint: &DatagramEndpoint) -> Self {
        endpoint.identity()
    }
}

impl From<&mut DatagramEndpoint> for DatagramIdentity {
    fn from(endpoint: &mut DatagramEndpoint) -> Self {
        endpoint.identity()
    }
}

impl From<&DatagramIdentity> for DatagramIdentity {
    fn from(identity: &DatagramIdentity) -> Self {
        identity.clone()
    }
}

impl EndpointMut<'_> {
    /// What the connection manager needs to know of a datagram endpoint. `None` for a connection.
    #[must_use]
    pub fn datagram_identity(&self) -> Option<DatagramIdentity> {
        self.poster.live.datagrams.as_deref().map(|slots| slots.identity.clone())
    }
}
