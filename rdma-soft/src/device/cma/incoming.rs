//! Events of connections, as events of their ids.

use std::net::SocketAddr;

use rdma_sys::*;

use super::attributes::address_vector;
use super::event::{CmEvent, ConnectionParameters, Datagram, Parameters};
use super::id::{Id, IdState, Options};
use crate::cm::{ConnectionId, Event, Failure, ListenerId, Peer};
use crate::device::{Core, gid};
use crate::net::presence::Process;
use crate::transport::Time;
use crate::wire::cm::{IpHeader, SidrRep, SidrStatus, service_port};

impl Core {
    pub(super) fn handle_cm_event(&mut self, now: Time, event: Event) {
        match event {
            Event::Request { listener, id, header, request, peer } => {
                let parameters = Parameters::Connected(ConnectionParameters {
                    private_data: request.private_data[IpHeader::LEN..].to_vec(),
                    // The responder resources of one side are the initiator depth of the other.
                    responder_resources: request.initiator_depth,
                    initiator_depth: request.responder_resources,
                    flow_control: request.flow_control,
                    retry_count: request.retry_count,
                    rnr_retry_count: request.rnr_retry_count,
                    srq: request.srq,
                    qp_num: request.qpn,
                });
                let ece = (request.vendor_id, request.ece_options);
                self.add_request(now, listener, id, &header, request.service, peer, ece, parameters);
                if peer.is_local {
                    self.watch_or_end(now, id, Process { address: peer.address, guid: request.guid });
                }
            }
            Event::Lookup { listener, id, header, request, peer } => {
                let parameters = Parameters::Datagram(Box::new(Datagram {
                    private_data: request.private_data[IpHeader::LEN..].to_vec(),
                    ah_attr: ibv_ah_attr::zeroed(),
                    qp_num: 0,
                    qkey: 0,
                    membership: None,
                }));
                self.add_request(now, listener, id, &header, request.service, peer, (0, 0), parameters);
            }
            Event::Withdrawn { id } => self.withdraw_request(id),
            Event::Reply { id, reply } => {
                if let Some(id) = self.cm_id_of(id) {
                    id.options.remote_ece = (reply.vendor_id, reply.ece_options);
                }
                let parameters = ConnectionParameters {
                    private_data: reply.private_data.to_vec(),
                    responder_resources: reply.initiator_depth,
                    initiator_depth: reply.responder_resources,
                    flow_control: reply.flow_control,
                    retry_count: 0,
                    rnr_retry_count: reply.rnr_retry_count,
                    srq: reply.srq,
                    qp_num: reply.qpn,
                };
                self.report(id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, Parameters::Connected(parameters));
            }
            Event::Established { id } => {
                let none = Parameters::Connected(ConnectionParameters::default());
                self.report(id, RDMA_CM_EVENT_ESTABLISHED, 0, none);
            }
            Event::Failed { id, failure: Failure::Unreachable } | Event::LookupUnreachable { id } => {
                self.report(id, RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT, Parameters::None);
            }
            Event::Failed { id, failure: Failure::Rejected { reason, private_data } } => {
                let parameters =
                    ConnectionParameters { private_data: private_data.to_vec(), ..ConnectionParameters::default() };
                self.report(id, RDMA_CM_EVENT_REJECTED, reason.0.into(), Parameters::Connected(parameters));
            }
            Event::Disconnected { id, is_confirmed } => {
                let status = if is_confirmed { 0 } else { -libc::ETIMEDOUT };
                let none = Parameters::Connected(ConnectionParameters::default());
                self.report(id, RDMA_CM_EVENT_DISCONNECTED, status, none);
            }
            Event::TimewaitExit { id } => self.report(id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, Parameters::None),
            Event::LookupReply { id, reply } => self.report_service(id, &reply),
        }
    }

    fn cm_id_of(&mut self, connection: ConnectionId) -> Option<&mut Id> {
        let number = self.state.cma.by_connection.get(&connection)?;
        self.state.cma.ids.get_mut(*number)
    }

    /// Reports an event of a connection to its id, unless the id is a request that is not answered yet.
    fn report(&mut self, connection: ConnectionId, kind: rdma_cm_event_type, status: i32, parameters: Parameters) {
        let Some(id) = self.state.cma.by_connection.get(&connection).copied() else { return };
        if self.state.cma.ids.get(id).is_some_and(|id| id.is_reported) {
            self.state.cma.push(CmEvent { id, listener: None, kind, status, parameters });
        }
    }

    fn report_service(&mut self, connection: ConnectionId, reply: &SidrRep) {
        let Some(id) = self.cm_id_of(connection) else { return };
        let service = Datagram {
            private_data: reply.private_data.to_vec(),
            ah_attr: address_vector(id.remote_gid.unwrap_or_default(), id.link.unwrap_or(0), id.options.tos),
            qp_num: reply.qpn,
            qkey: reply.qkey,
            membership: None,
        };
        let (kind, status) = match reply.status {
            SidrStatus::SUCCESS => (RDMA_CM_EVENT_ESTABLISHED, 0),
            SidrStatus(status) => (RDMA_CM_EVENT_UNREACHABLE, status.into()),
        };
        self.report(connection, kind, status, Parameters::Datagram(Box::new(service)));
    }

    /// Makes an id for a request, and reports it to the listener.
    #[expect(clippy::too_many_arguments, reason = "the fields of two events")]
    fn add_request(
        &mut self,
        now: Time,
        listener: ListenerId,
        connection: ConnectionId,
        header: &IpHeader,
        service: u64,
        peer: Peer,
        remote_ece: (u32, u32),
        parameters: Parameters,
    ) {
        let cma = &mut self.state.cma;
        let listening = cma.by_listener.get(&listener).copied();
        let Some((number, listening)) = listening.and_then(|number| Some((number, cma.ids.get(number)?))) else {
            return cma.manager.release(now, connection);
        };
        let (_, port) = service_port(service).unwrap_or((0, 0));
        let mut id = Id::new(listening.space, listening.channel, 0);
        id.options = Options { local_ece: (0, 0), remote_ece, ..listening.options };
        (id.state, id.link, id.connection) = (IdState::Connect, Some(peer.link), Some(connection));
        id.source = SocketAddr::new(header.destination, port);
        id.destination = Some(header.source);
        id.remote_gid = Some(gid(peer.address));
        id.listener_of = Some(number);
        id.is_reported = false;
        let id = cma.add_id(id);
        cma.by_connection.insert(connection, id);
        let kind = RDMA_CM_EVENT_CONNECT_REQUEST;
        cma.push(CmEvent { id, listener: Some(number), kind, status: 0, parameters });
    }

    /// Removes a request that the program has not read.
    fn withdraw_request(&mut self, connection: ConnectionId) {
        let cma = &mut self.state.cma;
        let Some(id) = cma.by_connection.remove(&connection) else { return };
        if let Some(listener) = cma.ids.remove(id).and_then(|id| id.listener_of) {
            cma.remove_events(listener, |event| event.id == id);
        }
    }
}
