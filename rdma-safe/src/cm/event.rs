//! Events of ids.

use std::fmt;

use rdma_sys::*;

use super::{Id, Parameters, UdParameters};
use crate::Errno;
use crate::id::CmId;
use crate::named::named;

/// An event of an id: `struct rdma_cm_event`, copied and acknowledged.
#[derive(Debug)]
#[non_exhaustive]
pub struct Event {
    /// The id that the event belongs to. For a request, this is the listening id.
    pub id: CmId,
    /// The event.
    pub kind: EventKind,
}

/// An event with its data: `enum rdma_cm_event_type`.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// [`Id::resolve_address`] has found a device. Continue with [`Id::resolve_route`].
    AddressResolved,
    /// [`Id::resolve_address`] failed: no reply from the address, or no device leads there.
    AddressError(Errno),
    /// [`Id::resolve_route`] has found a route. Continue with [`Id::connect`].
    RouteResolved,
    /// [`Id::resolve_route`] failed.
    RouteError(Errno),
    /// A peer requests a connection to a listening id. Pass the new id to [`Id::accept`] or [`Id::reject`]; dropping it
    /// rejects.
    ConnectRequest(Id, Parameters),
    /// The peer has accepted. Bring the queue pair to RTS, and call [`Id::establish`].
    ConnectResponse(Parameters),
    /// The connection could not be established, or the peer gave it up.
    ConnectError(Errno),
    /// The peer did not reply or is unreachable.
    Unreachable(Errno),
    /// For datagrams: the peer has no such service, or has rejected the request.
    NoService(ServiceStatus, Parameters),
    /// The peer has rejected the request.
    Rejected(RejectReason, Parameters),
    /// The connection is established. For datagrams: the peer has replied.
    Established(Parameters),
    /// The peer or this end has ended the connection.
    Disconnected,
    /// The device is being removed, and the id is unusable: calls on it fail with `ENXIO`.
    ///
    /// Drop all objects of the device. Drivers that cannot revoke them from their users wait for that. SoftRoCE waits
    /// until the process ends, because librdmacm keeps the device open.
    DeviceRemoval,
    /// A multicast group was joined.
    ///
    /// The parameters contain the group's address with the GID to attach a queue pair to, the destination queue pair
    /// number of its datagrams, and the queue key of its members.
    MulticastJoined(UdParameters),
    /// Joining a group failed, or the membership was lost.
    MulticastError(Errno),
    /// The address of the network device has changed, for example after a failover of a bond.
    AddressChanged,
    /// An ended connection has left the time-wait state. The queue pair number can be reused.
    TimewaitExit,
    /// [`Id::resolve_address_info`] or [`Id::resolve_service`] has found addresses; see [`Id::address_info`].
    AddressInfoResolved,
    /// [`Id::resolve_address_info`] or [`Id::resolve_service`] failed.
    AddressInfoError(Errno),
    /// An event that [`Id::write_event`] has written.
    User {
        /// The status passed to `write_event`.
        status: i32,
        /// The argument passed to `write_event`.
        argument: u64,
    },
    /// An event that this release does not know.
    Other {
        /// `enum rdma_cm_event_type`.
        event: u32,
        /// Its status.
        status: i32,
    },
}

/// Reason of a rejection: a REJ reason code of the InfiniBand specification, volume 1, chapter 12.6.7.2.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectReason(pub i32);

named! {
    /// Status of a service lookup for datagrams: a service ID resolution status of the InfiniBand specification, volume
    /// 1, chapter 12.11.
    pub struct ServiceStatus(u32) as "service status" {
        /// No service listens at the port.
        UNSUPPORTED = 1 => "nobody listens for datagrams at the peer's port",
        /// The peer's program has rejected the request: [`Id::reject`], or a dropped request.
        REJECTED = 2 => "the program at the peer has refused",
        /// No queue pair is available.
        NO_QP = 3 => "the peer has no queue pair for the service",
        /// The service is available elsewhere.
        REDIRECTED = 4 => "the service is available elsewhere",
        /// The peer uses another version of the protocol.
        UNSUPPORTED_VERSION = 5 => "the peer speaks another version of the protocol",
    }
}

impl RejectReason {
    /// No queue pair is available.
    pub const NO_QP: RejectReason = RejectReason(1);
    /// The requested resources are not available.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// The connection manager of the peer timed out.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// The request is not supported.
    pub const UNSUPPORTED: RejectReason = RejectReason(5);
    /// No service listens at the port.
    pub const INVALID_SERVICE_ID: RejectReason = RejectReason(8);
    /// The connection exists, or ended a moment ago.
    pub const STALE_CONNECTION: RejectReason = RejectReason(10);
    /// The peer's program has rejected the request: [`Id::reject`], or a dropped request.
    pub const CONSUMER_DEFINED: RejectReason = RejectReason(28);
    /// The peer does not support the vendor's options: [`Id::reject_ece`].
    pub const UNSUPPORTED_OPTIONS: RejectReason = RejectReason(35);

    const fn text(self) -> Option<&'static str> {
        Some(match self {
            RejectReason::NO_QP => "the peer has no queue pair left",
            RejectReason::NO_RESOURCES => "the peer lacks the resources",
            RejectReason::TIMEOUT => "the connection manager of the peer timed out",
            RejectReason::UNSUPPORTED => "the peer does not support the request",
            RejectReason::INVALID_SERVICE_ID => {
                "nobody listens at the peer's port (a TCP service there does not count)"
            }
            RejectReason::STALE_CONNECTION => "the peer still has such a connection",
            RejectReason::CONSUMER_DEFINED => "the program at the peer has refused",
            RejectReason::UNSUPPORTED_OPTIONS => "the peer does not support the options of the vendor",
            _ => return None,
        })
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.pad(text),
            // iWARP reports a negated errno.
            None if self.0 < 0 => Errno(self.0.saturating_neg()).fmt(f),
            None => write!(f, "reason {}", self.0),
        }
    }
}

impl fmt::Debug for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RejectReason({}: {self})", self.0)
    }
}

impl EventKind {
    /// Converts all events except connection requests.
    ///
    /// # Safety
    /// `event` must be an event that was not acknowledged yet.
    pub(super) unsafe fn of(event: &rdma_cm_event) -> EventKind {
        // The status is a negated errno in most events.
        let errno = || Errno(event.status.saturating_abs());
        // SAFETY: the id exists until the event is acknowledged, and the field is set at creation.
        let space = unsafe { (*event.id).ps };
        // SAFETY: the caller's contract.
        let parameters = || unsafe { Parameters::of(event, space) };
        match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => EventKind::AddressResolved,
            RDMA_CM_EVENT_ADDR_ERROR => EventKind::AddressError(errno()),
            RDMA_CM_EVENT_ROUTE_RESOLVED => EventKind::RouteResolved,
            RDMA_CM_EVENT_ROUTE_ERROR => EventKind::RouteError(errno()),
            RDMA_CM_EVENT_CONNECT_RESPONSE => EventKind::ConnectResponse(parameters()),
            RDMA_CM_EVENT_CONNECT_ERROR => EventKind::ConnectError(errno()),
            // The status from the peer's reply is positive, while errors of the kernel are negated.
            RDMA_CM_EVENT_UNREACHABLE if event.status > 0 && matches!(space, RDMA_PS_UDP | RDMA_PS_IPOIB) => {
                EventKind::NoService(ServiceStatus(event.status as u32), parameters())
            }
            RDMA_CM_EVENT_UNREACHABLE => EventKind::Unreachable(errno()),
            RDMA_CM_EVENT_REJECTED => EventKind::Rejected(RejectReason(event.status), parameters()),
            RDMA_CM_EVENT_ESTABLISHED => EventKind::Established(parameters()),
            RDMA_CM_EVENT_DISCONNECTED => EventKind::Disconnected,
            RDMA_CM_EVENT_DEVICE_REMOVAL => EventKind::DeviceRemoval,
            RDMA_CM_EVENT_MULTICAST_JOIN => {
                // SAFETY: the caller's contract, for an event of a group.
                EventKind::MulticastJoined(unsafe { UdParameters::of_group(event) })
            }
            RDMA_CM_EVENT_MULTICAST_ERROR => EventKind::MulticastError(errno()),
            RDMA_CM_EVENT_ADDR_CHANGE => EventKind::AddressChanged,
            RDMA_CM_EVENT_TIMEWAIT_EXIT => EventKind::TimewaitExit,
            RDMA_CM_EVENT_ADDRINFO_RESOLVED => EventKind::AddressInfoResolved,
            RDMA_CM_EVENT_ADDRINFO_ERROR => EventKind::AddressInfoError(errno()),
            RDMA_CM_EVENT_USER => {
                // SAFETY: the argument is the first eight bytes of the union, which are a pointer in its other members.
                // All bytes were at least zeroed.
                let argument = unsafe { (&raw const event.param).cast::<u64>().read_unaligned() };
                EventKind::User { status: event.status, argument }
            }
            rdma_cm_event_type(event_type) => EventKind::Other { event: event_type, status: event.status },
        }
    }
}
