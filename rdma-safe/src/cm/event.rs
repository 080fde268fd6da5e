//! What becomes of ids.

use std::fmt;

use rdma_sys::*;

use super::{Id, Parameters, UdParameters};
use crate::Errno;
use crate::id::CmId;
use crate::named::named;

/// Something happened to an id: `struct rdma_cm_event`, copied and acknowledged.
#[derive(Debug)]
#[non_exhaustive]
pub struct Event {
    /// Whom it concerns: of a request, the id that listens.
    pub id: CmId,
    /// What happened.
    pub kind: EventKind,
}

/// What happened: `enum rdma_cm_event_type`, with what belongs to it.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// [`Id::resolve_address`] has found a device: go on with [`Id::resolve_route`].
    AddressResolved,
    /// It has not, as when nobody answers to the address, or no device leads there.
    AddressError(Errno),
    /// [`Id::resolve_route`] has found a way: go on with [`Id::connect`].
    RouteResolved,
    /// It has not.
    RouteError(Errno),
    /// Somebody wants to connect to an id that listens. The new id is for [`Id::accept`] or [`Id::reject`]; dropping it rejects.
    ConnectRequest(Id, Parameters),
    /// The peer has accepted: bring the queue pair to RTS, and call [`Id::establish`].
    ConnectResponse(Parameters),
    /// A connection could not be made, or the peer gave it up.
    ConnectError(Errno),
    /// The peer did not answer, or there is no way to it.
    Unreachable(Errno),
    /// Of datagrams: the peer has answered that there is no such service, or has refused.
    NoService(ServiceStatus, Parameters),
    /// The peer has refused.
    Rejected(RejectReason, Parameters),
    /// There is a connection; of datagrams, the peer has answered.
    Established(Parameters),
    /// There is none any more: the peer, or this end, has ended it.
    Disconnected,
    /// The device is going away, and the id is of no use any more. Drop all that is made on the device: one that cannot be taken
    /// away from its users waits for that, and SoftRoCE for the end of the process, since librdmacm has it open.
    DeviceRemoval,
    /// A multicast group was joined: its address, with the GID that a queue pair is attached to, the number that datagrams to it go
    /// to, and the queue key that its members have in common.
    MulticastJoined(UdParameters),
    /// A group could not be joined, or was lost.
    MulticastError(Errno),
    /// The network device has another address now, as after a failover of a bond.
    AddressChanged,
    /// A connection that ended is past the time in which its packets could still arrive: the queue pair's number can be used again.
    TimewaitExit,
    /// [`Id::resolve_address_info`] or [`Id::resolve_service`] has found addresses: [`Id::address_info`].
    AddressInfoResolved,
    /// It has not.
    AddressInfoError(Errno),
    /// [`Id::write_event`] has written it.
    User {
        /// As given there.
        status: i32,
        /// As given there.
        argument: u64,
    },
    /// What this release does not know.
    Other {
        /// `enum rdma_cm_event_type`.
        event: u32,
        /// Its status.
        status: i32,
    },
}

/// Why a peer has refused: a code of InfiniBand's connection management (specification, volume 1, chapter 12.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectReason(pub i32);

named! {
    /// What a peer says of a service for datagrams: the status of a service id resolution (InfiniBand specification, volume 1,
    /// chapter 12.11).
    pub struct ServiceStatus(u32) as "service status" {
        /// Nobody listens there.
        UNSUPPORTED = 1 => "nobody listens for datagrams at the peer's port",
        /// The program at the other end has refused: [`Id::reject`], or it dropped the request.
        REJECTED = 2 => "the program at the peer has refused",
        /// There is no queue pair to be had.
        NO_QP = 3 => "the peer has no queue pair for the service",
        /// It is to be had elsewhere.
        REDIRECTED = 4 => "the service is to be had elsewhere",
        /// It speaks another version of the protocol.
        UNSUPPORTED_VERSION = 5 => "the peer speaks another version of the protocol",
    }
}

impl RejectReason {
    /// There is no queue pair to be had.
    pub const NO_QP: RejectReason = RejectReason(1);
    /// What it asked for is not to be had.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// It took too long.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// The request was not supported.
    pub const UNSUPPORTED: RejectReason = RejectReason(5);
    /// Nobody listens at the port.
    pub const INVALID_SERVICE_ID: RejectReason = RejectReason(8);
    /// The connection exists, or did until just now.
    pub const STALE_CONNECTION: RejectReason = RejectReason(10);
    /// The program at the other end has refused: [`Id::reject`], or it dropped the request.
    pub const CONSUMER_DEFINED: RejectReason = RejectReason(28);
    /// It does not support the options of a vendor: [`Id::reject_ece`].
    pub const UNSUPPORTED_OPTIONS: RejectReason = RejectReason(35);

    const fn text(self) -> Option<&'static str> {
        Some(match self {
            RejectReason::NO_QP => "the peer has no queue pair left",
            RejectReason::NO_RESOURCES => "the peer lacks the resources",
            RejectReason::TIMEOUT => "the peer has waited too long",
            RejectReason::UNSUPPORTED => "the peer does not support the request",
            RejectReason::INVALID_SERVICE_ID => "nobody listens at the peer's port",
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
            // iWARP gives an errno.
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
    /// Of all but a request.
    ///
    /// # Safety
    /// `event` must be one that was not acknowledged yet.
    pub(super) unsafe fn of(event: &rdma_cm_event) -> EventKind {
        // A negated errno, mostly.
        let errno = || Errno(event.status.saturating_abs());
        // SAFETY: the id is there until the event is acknowledged, and the field is set at creation.
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
            // The status of the peer's answer is not negated, as those of the kernel are.
            RDMA_CM_EVENT_UNREACHABLE if event.status > 0 && matches!(space, RDMA_PS_UDP | RDMA_PS_IPOIB) => {
                EventKind::NoService(ServiceStatus(event.status as u32), parameters())
            }
            RDMA_CM_EVENT_UNREACHABLE => EventKind::Unreachable(errno()),
            RDMA_CM_EVENT_REJECTED => EventKind::Rejected(RejectReason(event.status), parameters()),
            RDMA_CM_EVENT_ESTABLISHED => EventKind::Established(parameters()),
            RDMA_CM_EVENT_DISCONNECTED => EventKind::Disconnected,
            RDMA_CM_EVENT_DEVICE_REMOVAL => EventKind::DeviceRemoval,
            RDMA_CM_EVENT_MULTICAST_JOIN => {
                // SAFETY: the caller's contract, of an event that is of a group.
                EventKind::MulticastJoined(unsafe { UdParameters::of_group(event) })
            }
            RDMA_CM_EVENT_MULTICAST_ERROR => EventKind::MulticastError(errno()),
            RDMA_CM_EVENT_ADDR_CHANGE => EventKind::AddressChanged,
            RDMA_CM_EVENT_TIMEWAIT_EXIT => EventKind::TimewaitExit,
            RDMA_CM_EVENT_ADDRINFO_RESOLVED => EventKind::AddressInfoResolved,
            RDMA_CM_EVENT_ADDRINFO_ERROR => EventKind::AddressInfoError(errno()),
            RDMA_CM_EVENT_USER => {
                // SAFETY: the argument has the first eight bytes of the union, which are a pointer in its other members: all of it
                // was set to zero at least.
                let argument = unsafe { (&raw const event.param).cast::<u64>().read_unaligned() };
                EventKind::User { status: event.status, argument }
            }
            rdma_cm_event_type(event_type) => EventKind::Other { event: event_type, status: event.status },
        }
    }
}
