//! MADs between queue pairs 1 of the device and its peers.

use std::net::IpAddr;
use std::time::Duration;

use crate::cm::{MAD_QKEY, MAD_QP, Peer, Transmit};
use crate::device::Core;
use crate::device::link::Link;
use crate::device::qp::PKEY;
use crate::net::route::LocalAddresses;
use crate::net::{Origin, To};
use crate::transport::Time;
use crate::wire::cm::{MAD_LEN, local_id};
use crate::wire::{Header, Operation, Packet, Psn, Trailer, Transport};

/// MADs that may arrive before they are handled. Further ones are dropped, and retransmitted by the peers.
const MAX_ARRIVED: usize = 4096;

/// MADs for which memory is kept.
const USUAL_ARRIVED: usize = 64;

/// How long the list of this host's addresses is used for MADs that arrive.
const ADDRESSES_LIFETIME: Duration = Duration::from_secs(1);

/// This host's addresses, and when the list was made.
#[derive(Default)]
pub(super) struct HostAddresses(Option<(Time, LocalAddresses)>);

impl HostAddresses {
    /// Whether a peer is on this host. Makes the list again if it is old.
    fn contains(&mut self, address: IpAddr, now: Time) -> bool {
        if address.is_loopback() {
            return true;
        }
        let (_, addresses) = match self.0.take().filter(|(made, _)| now < *made + ADDRESSES_LIFETIME) {
            Some(list) => self.0.insert(list),
            None => self.0.insert((now, LocalAddresses::now())),
        };
        addresses.contains(&address)
    }
}

impl super::Cma {
    /// Keeps a MAD that has arrived for queue pair 1, unless it has another Q_Key.
    pub(in crate::device) fn receive_mad(&mut self, link: usize, from: Origin, packet: &Packet<'_>) {
        let Transport::Ud { qkey: MAD_QKEY, .. } = packet.header.transport else { return };
        let Some(mad) = packet.payload.to_array::<MAD_LEN>() else { return };
        if self.arrived.len() < MAX_ARRIVED {
            // `handle_mads` finds out whether the peer is on this host, without the sockets being borrowed.
            self.has_work = true;
            self.arrived.push((Peer { link, address: from.address, is_local: false }, mad));
        }
    }

    /// Traffic class of a MAD of this device: that of its connection, or the type of service of the id of a lookup.
    fn traffic_class(&self, mad: &[u8; MAD_LEN]) -> u8 {
        let local_id = local_id(mad);
        match self.manager.negotiated(local_id) {
            Some(connection) => connection.traffic_class,
            None => {
                let id = self.by_connection.get(&local_id).and_then(|number| self.ids.get(*number));
                id.map_or(0, |id| id.options.tos)
            }
        }
    }

    /// Whether MADs have arrived or timers have expired.
    pub(in crate::device) fn is_due(&self, now: Time) -> bool {
        self.has_work || self.wake_at().is_some_and(|at| at <= now)
    }

    /// The earliest timer.
    pub(in crate::device) fn wake_at(&self) -> Option<Time> {
        self.manager.wake_at().into_iter().chain(self.findings.wake_at()).min()
    }
}

impl Core {
    /// Handles MADs that have arrived and timers of connections that have expired.
    pub(in crate::device) fn handle_mads(&mut self, now: Time) {
        self.state.cma.has_work = false;
        let mut arrived = std::mem::take(&mut self.state.cma.arrived);
        let cma = &mut self.state.cma;
        for (peer, mad) in arrived.drain(..) {
            let peer = Peer { is_local: cma.host_addresses.contains(peer.address, now), ..peer };
            cma.manager.handle(now, peer, &mad);
        }
        // A burst leaves no memory behind.
        arrived.shrink_to(USUAL_ARRIVED);
        self.state.cma.arrived = arrived;
        self.state.cma.manager.expire(now);
        self.expire_findings(now);
        self.unwatch_unused();
        self.update_cm(now);
    }

    /// Reports the events of connections to their ids, and sends MADs.
    pub(crate) fn update_cm(&mut self, now: Time) {
        while let Some(event) = self.state.cma.manager.poll_event() {
            self.handle_cm_event(now, event);
        }
        while let Some(Transmit { to, mad }) = self.state.cma.manager.poll_transmit() {
            self.send_mad(to, &mad, now);
        }
    }

    fn send_mad(&mut self, to: Peer, mad: &[u8; MAD_LEN], now: Time) {
        let class = self.state.cma.traffic_class(mad);
        let Core { state, links, parts, has_sent_to_self, .. } = self;
        let Some(link) = links.get_mut(to.link) else { return };
        *has_sent_to_self |= link.socket.address() == to.address;
        state.cma.psn = state.cma.psn.wrapping_add(1);
        let header = Header {
            transport: Transport::Ud { qkey: MAD_QKEY, source_qp: MAD_QP },
            operation: Operation::SendOnly(Trailer::None),
            pkey: PKEY,
            dest_qp: MAD_QP,
            psn: Psn::new(state.cma.psn),
            solicited: false,
            ack_request: false,
            migrated: true,
            congestion: (false, false),
        };
        parts.send_bytes(link, To { address: to.address, class }, &header.encode(mad.len()), mad, now);
        let Link { socket, outbox, .. } = link;
        outbox.flush(socket, now);
    }
}
