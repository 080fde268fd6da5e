//! Requests, replies and ends of connections.

use rdma_sys::*;

use super::Cma;
use super::event::ConnectionParameters;
use super::finding::{Found, Goal, TIMEOUT};
use super::id::{Id, IdState};
use crate::check::{self, Object};
use crate::cm::{CallError, ConnectionId, Peer, Phase};
use crate::device::qp::{PKEY, mtu_code};
use crate::device::{Core, gid};
use crate::net::presence::Process;
use crate::net::{Origin, route};
use crate::transport::Time;
use crate::wire::cm::{
    AdditionalInfo, IpHeader, Path, RejectReason, Rep, Req, SidrRep, SidrReq, SidrStatus, service_id,
};

/// ACK timeout of connections, as in `ibv_modify_qp(3)`: 0.27 s. Most peers of soft0 are on the same host or network.
const ACK_TIMEOUT: u8 = 16;

/// LID of ports in requests on RoCE, which has no LIDs: `IB_LID_PERMISSIVE` of Linux.
const PERMISSIVE_LID: u16 = 0xffff;

fn errno(error: CallError) -> i32 {
    match error {
        CallError::State => libc::EINVAL,
        CallError::Full => libc::ENOMEM,
    }
}

/// Copies private data to a field that it may not fill.
///
/// # Errors
/// `EINVAL` if it is too long.
fn padded<const N: usize>(header: &[u8], data: &[u8]) -> Result<[u8; N], i32> {
    let mut padded = [0; N];
    let (start, rest) = padded.split_at_mut(header.len());
    start.copy_from_slice(header);
    rest.get_mut(..data.len()).ok_or(libc::EINVAL)?.copy_from_slice(data);
    Ok(padded)
}

impl Cma {
    /// Returns the connection or lookup of an id if it still belongs to the id. After timewait another id may have the same one.
    fn current(&self, number: u32, connection: Option<ConnectionId>) -> Option<ConnectionId> {
        connection.filter(|connection| self.by_connection.get(connection) == Some(&number))
    }

    /// An id that has a connection or a lookup.
    fn connected(&self, number: u32) -> Result<(&Id, ConnectionId), i32> {
        let id = self.id(number)?;
        self.current(number, id.connection).map(|connection| (id, connection)).ok_or(libc::EINVAL)
    }

    /// Ends the connection or lookup of an id.
    pub(super) fn release_connection(
        &mut self,
        now: Time,
        number: u32,
        connection: Option<ConnectionId>,
        is_datagram: bool,
    ) {
        let Some(connection) = self.current(number, connection) else { return };
        self.by_connection.remove(&connection);
        match is_datagram {
            true => self.manager.release_lookup(now, connection),
            false => self.manager.release(now, connection),
        }
    }
}

impl Core {
    /// Requests a connection, or looks up a datagram service: `rdma_connect(3)`.
    ///
    /// # Errors
    /// `EINVAL` before the route is resolved and for too much private data, `ENOMEM` for too many connections.
    pub(crate) fn cm_connect(&mut self, number: u32, parameters: ConnectionParameters, now: Time) -> Result<(), i32> {
        let id = self.state.cma.id(number)?;
        let (IdState::RouteResolved, Some(destination), Some(link)) = (id.state, id.destination, id.link) else {
            return Err(libc::EINVAL);
        };
        let limit = if id.is_datagram() { SidrReq::PRIVATE_DATA } else { Req::PRIVATE_DATA };
        if parameters.private_data.len() > limit - IpHeader::LEN {
            return Err(libc::EINVAL);
        }
        let (space, id_found) = (id.space, id.found);
        if !route::is_local(destination.ip()) {
            let peer = Peer { link, address: destination.ip(), is_local: false };
            return self.request(number, peer, None, &parameters, now);
        }
        if self.state.cma.ports.has_listener(space, destination) {
            let to = self.link_of(destination.ip()).unwrap_or(link);
            let own = Peer { link, address: self.links[to].socket.address(), is_local: true };
            return self.request(number, own, None, &parameters, now);
        }
        match id_found {
            Some(Found { peer, process }) if self.watch(process).is_ok() => {
                self.request(number, peer, Some(process), &parameters, now)
            }
            _ => self.find_listener(number, Goal::Connect(Box::new(parameters)), TIMEOUT, now),
        }
    }

    /// Sends the request of an id to the device of its peer. `process` is the peer's process on this host.
    pub(super) fn request(
        &mut self,
        number: u32,
        to: Peer,
        process: Option<Process>,
        parameters: &ConnectionParameters,
        now: Time,
    ) -> Result<(), i32> {
        let mtu = mtu_code(self.links[to.link].socket.mtu()).0 as u8;
        let local_gid = gid(self.links[to.link].socket.address());
        let cma = &mut self.state.cma;
        let id = cma.id(number)?;
        let destination = id.destination.ok_or(libc::EINVAL)?;
        let header = IpHeader { source: id.source, destination: destination.ip() }.encode();
        let service = service_id(id.space, destination.port());
        let connection = if id.is_datagram() {
            let private_data = padded(&header, &parameters.private_data)?;
            cma.manager.look_up(now, to, SidrReq { id: 0, pkey: PKEY, service, private_data })
        } else {
            let path = Path {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid,
                remote_gid: gid(to.address),
                flow_label: 0,
                traffic_class: id.options.tos,
                hop_limit: Origin::HOPS,
                rate: IBV_RATE_25_GBPS.0 as u8,
                service_level: 0,
                subnet_local: false,
                ack_timeout: id.options.ack_timeout.unwrap_or(ACK_TIMEOUT),
            };
            let request = Req {
                local_id: 0,
                vendor_id: id.options.local_ece.0,
                ece_options: id.options.local_ece.1,
                service,
                guid: 0,
                qkey: 0,
                qpn: parameters.qp_num,
                responder_resources: parameters.responder_resources,
                initiator_depth: parameters.initiator_depth,
                remote_timeout: 0,
                transport: 0,
                flow_control: parameters.flow_control,
                psn: id.psn,
                local_timeout: 0,
                retry_count: parameters.retry_count.min(7),
                pkey: PKEY,
                mtu,
                rdc_exists: false,
                rnr_retry_count: parameters.rnr_retry_count.min(7),
                max_cm_retries: 0,
                srq: parameters.srq,
                extended_transport: 0,
                path,
                alternate: None,
                private_data: padded(&header, &parameters.private_data)?,
            };
            cma.manager.connect(now, to, request)
        };
        let connection = connection.map_err(errno)?;
        cma.by_connection.insert(connection, number);
        let id = cma.id_mut(number)?;
        (id.connection, id.state, id.link) = (Some(connection), IdState::Connect, Some(to.link));
        id.remote_gid = Some(gid(to.address));
        if let Some(process) = process {
            self.watch_or_end(now, connection, process);
        }
        self.update_cm(now);
        Ok(())
    }

    /// Accepts a request: `rdma_accept(3)`.
    ///
    /// # Errors
    /// `EINVAL` if the id has no request or its peer has withdrawn it, and for too much private data.
    pub(crate) fn cm_accept(&mut self, number: u32, parameters: &ConnectionParameters, now: Time) -> Result<(), i32> {
        let (id, connection) = self.state.cma.connected(number)?;
        let answered = if id.is_datagram() {
            let reply = SidrRep {
                id: 0,
                status: SidrStatus::SUCCESS,
                qpn: parameters.qp_num,
                service: 0,
                qkey: id.qkey(),
                info: AdditionalInfo::NONE,
                // librdmacm replies with the vendor of the request.
                vendor_id: id.options.remote_ece.0,
                ece_options: id.options.local_ece.1,
                private_data: padded(&[], &parameters.private_data)?,
            };
            self.state.cma.manager.reply_lookup(now, connection, reply)
        } else {
            let reply = Rep {
                local_id: 0,
                remote_id: 0,
                qkey: 0,
                qpn: parameters.qp_num,
                psn: id.psn,
                responder_resources: parameters.responder_resources,
                initiator_depth: parameters.initiator_depth,
                ack_delay: 0,
                failover: 0,
                flow_control: parameters.flow_control,
                rnr_retry_count: parameters.rnr_retry_count.min(7),
                srq: parameters.srq,
                guid: 0,
                // librdmacm replies with the vendor of the request.
                vendor_id: id.options.remote_ece.0,
                ece_options: id.options.local_ece.1,
                private_data: padded(&[], &parameters.private_data)?,
            };
            self.state.cma.manager.accept(now, connection, reply)
        };
        answered.map_err(errno)?;
        if let Some(id) = self.state.cma.ids.get_mut(number) {
            id.is_reported = true;
        }
        // The first packet of the peer stands for an RTU that is lost.
        if let Some(qp) = self.state.qps.get_mut(&parameters.qp_num) {
            qp.awaits_establishment = true;
        }
        self.update_cm(now);
        Ok(())
    }

    /// Rejects a request or a reply: `rdma_reject(3)`.
    ///
    /// # Errors
    /// `EINVAL` if there is nothing to reject, and for too much private data.
    pub(crate) fn cm_reject(
        &mut self,
        number: u32,
        reason: RejectReason,
        private_data: &[u8],
        now: Time,
    ) -> Result<(), i32> {
        let (id, connection) = self.state.cma.connected(number)?;
        let rejected = if id.is_datagram() {
            let reply = SidrRep {
                id: 0,
                status: SidrStatus::REJECT,
                qpn: 0,
                service: 0,
                qkey: 0,
                info: AdditionalInfo::NONE,
                vendor_id: 0,
                ece_options: 0,
                private_data: padded(&[], private_data)?,
            };
            self.state.cma.manager.reply_lookup(now, connection, reply)
        } else {
            self.state.cma.manager.reject(now, connection, reason, padded(&[], private_data)?)
        };
        rejected.map_err(errno)?;
        self.update_cm(now);
        Ok(())
    }

    /// Confirms the reply of a peer: `rdma_establish(3)`.
    ///
    /// # Errors
    /// `EINVAL` in a wrong state.
    pub(crate) fn cm_establish(&mut self, number: u32, now: Time) -> Result<(), i32> {
        let (_, connection) = self.state.cma.connected(number)?;
        self.state.cma.manager.establish(connection).map_err(errno)?;
        self.update_cm(now);
        Ok(())
    }

    /// Takes note that data has arrived before the RTU: `rdma_notify(3)`.
    ///
    /// # Errors
    /// `EINVAL` unless the connection waits for the confirmation of its peer.
    pub(crate) fn cm_notify(&mut self, number: u32, now: Time) -> Result<(), i32> {
        let (_, connection) = self.state.cma.connected(number)?;
        let manager = &mut self.state.cma.manager;
        if manager.phase(connection) != Some(Phase::RepSent) {
            return Err(libc::EINVAL);
        }
        let qpn = manager.negotiated(connection).map(|negotiated| negotiated.local_qpn).ok_or(libc::EINVAL)?;
        manager.establish_by_data(qpn);
        self.update_cm(now);
        Ok(())
    }

    /// Ends a connection, or confirms its end: `rdma_disconnect(3)`.
    ///
    /// # Errors
    /// `EINVAL` without a connection.
    pub(crate) fn cm_disconnect(&mut self, number: u32, now: Time) -> Result<(), i32> {
        let (_, connection) = self.state.cma.connected(number)?;
        // Posts that wait precede the end of their connection.
        self.send_windows(now);
        // Disconnecting an ended connection is no error, as in Linux.
        _ = self.state.cma.manager.disconnect(now, connection);
        self.update_cm(now);
        Ok(())
    }

    /// Destroys an id: `rdma_destroy_id(3)`. Rejects requests that the program has not read.
    pub(crate) fn cm_destroy(&mut self, number: u32, now: Time) {
        // Posts that wait precede the end of their connection.
        self.send_windows(now);
        let cma = &mut self.state.cma;
        let mut ended = vec![number];
        ended.extend(cma.remove_events(number, |_| true).iter().map(|event| event.id).filter(|id| *id != number));
        for number in ended {
            cma.findings.remove(number);
            let Some(mut id) = cma.ids.remove(number) else { continue };
            check::destroyed(Object::Id(number));
            if let Some(listener) = id.listener {
                cma.by_listener.remove(&listener);
                let unread = cma.manager.close_listener(listener);
                debug_assert!(unread.iter().all(|connection| cma.by_connection.contains_key(connection)));
            }
            if let Some(binding) = id.binding.take() {
                cma.ports.release(binding);
            }
            cma.release_connection(now, number, id.connection, id.is_datagram());
        }
        self.update_cm(now);
    }
}
