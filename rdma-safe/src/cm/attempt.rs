//! Failed steps of connections by address.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::error::failed;
use super::{Address, CmError, EventKind, PrivateData, RejectReason, ServiceStatus};
use crate::error::Verb;
use crate::explain::{advice, runs_on_soft0};
use crate::{Errno, Error};

/// A failed step of a connection by address.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ConnectError {
    /// The step that failed.
    pub step: Step,
    /// The cause of the failure.
    pub cause: Cause,
    /// Address of this end, if it had one.
    pub local: Option<Address>,
    /// Address of the peer, if known.
    pub peer: Option<Address>,
}

/// A step of a connection by address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Finding the device that leads to the peer.
    ResolveAddress,
    /// Finding the route to the peer.
    ResolveRoute,
    /// Requesting the connection from the peer.
    Connect,
    /// Requesting the queue pair of a datagram service.
    FindService,
    /// Joining a multicast group.
    JoinGroup,
    /// Accepting a request, until the peer confirms.
    Accept,
    /// Transferring data over the connection.
    Transfer,
    /// Disconnecting, until the peer confirms.
    Disconnect,
}

/// The cause of a failed step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // Errors hold it in a box.
pub enum Cause {
    /// No event arrived in time.
    Timeout(Duration),
    /// An event or a call reported an error.
    Failed(Errno),
    /// The peer did not reply or is unreachable.
    Unreachable(Errno),
    /// The peer has rejected the request.
    Rejected {
        /// Reason of the rejection.
        reason: RejectReason,
        /// Private data from the peer.
        private_data: PrivateData,
    },
    /// The peer has no such service for datagrams, or has rejected the request.
    Refused {
        /// Status of the lookup.
        status: ServiceStatus,
        /// Private data from the peer.
        private_data: PrivateData,
    },
    /// The peer has ended the connection.
    Disconnected,
    /// The device was removed.
    DeviceRemoved,
    /// An event that does not belong to the step.
    Unexpected,
}

impl Cause {
    /// The cause behind an event other than the expected one.
    pub(super) fn of(event: &EventKind) -> Cause {
        match event {
            EventKind::AddressError(errno)
            | EventKind::RouteError(errno)
            | EventKind::ConnectError(errno)
            | EventKind::MulticastError(errno) => Cause::Failed(*errno),
            EventKind::Unreachable(errno) => Cause::Unreachable(*errno),
            EventKind::Rejected(reason, parameters) => {
                Cause::Rejected { reason: *reason, private_data: parameters.private_data_owned() }
            }
            EventKind::NoService(status, parameters) => {
                Cause::Refused { status: *status, private_data: parameters.private_data_owned() }
            }
            EventKind::Disconnected | EventKind::TimewaitExit => Cause::Disconnected,
            EventKind::DeviceRemoval => Cause::DeviceRemoved,
            _ => Cause::Unexpected,
        }
    }
}

impl Cause {
    /// The cause behind a failed call.
    pub(super) fn from_errno(errno: Errno) -> Cause {
        match errno {
            // The kernel has destroyed its side of the id.
            Errno(libc::ENXIO) => Cause::DeviceRemoved,
            errno => Cause::Failed(errno),
        }
    }

    pub(crate) fn errno(&self) -> Option<&Errno> {
        match self {
            Cause::Failed(errno) | Cause::Unreachable(errno) => Some(errno),
            _ => None,
        }
    }
}

impl Step {
    /// The function that starts the step.
    pub(crate) fn verb(self) -> Verb {
        match self {
            Step::ResolveAddress => Verb::RdmaResolveAddr,
            Step::ResolveRoute => Verb::RdmaResolveRoute,
            Step::Connect | Step::FindService => Verb::RdmaConnect,
            Step::JoinGroup => Verb::RdmaJoinMulticast,
            Step::Accept => Verb::RdmaAccept,
            Step::Transfer => Verb::PollCq,
            Step::Disconnect => Verb::RdmaDisconnect,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Step::ResolveAddress => "resolving the address",
            Step::ResolveRoute => "resolving the route",
            Step::Connect => "connecting",
            Step::FindService => "finding the service",
            Step::JoinGroup => "joining the group",
            Step::Accept => "accepting",
            Step::Transfer => "work",
            Step::Disconnect => "disconnecting",
        })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Timeout(waited) => write!(f, "no reply within {waited:?}"),
            Cause::Failed(errno) => write!(f, "{errno}"),
            Cause::Unreachable(errno) => write!(f, "the peer is unreachable or does not reply ({errno})"),
            Cause::Rejected { reason, .. } => write!(f, "{reason}"),
            Cause::Refused { status, .. } => write!(f, "{status}"),
            Cause::Disconnected => f.write_str("the peer has ended the connection"),
            Cause::DeviceRemoved => f.write_str("the device was removed"),
            Cause::Unexpected => f.write_str("an unexpected event arrived"),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.step)?;
        if let Some(local) = self.local {
            write!(f, " from {local}")?;
        }
        if let Some(peer) = self.peer {
            let towards = match self.step {
                Step::Accept | Step::Transfer | Step::Disconnect => "with",
                Step::JoinGroup => "at",
                _ => "to",
            };
            write!(f, " {towards} {peer}")?;
        }
        write!(f, " failed: {}{}", self.cause, self.advice())
    }
}

impl std::error::Error for ConnectError {}

impl EventKind {
    /// The failure that the event reports, as an error with an explanation.
    ///
    /// The error lacks the addresses, which the id has.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        let step = match self {
            EventKind::AddressError(_) => Step::ResolveAddress,
            EventKind::RouteError(_) => Step::ResolveRoute,
            EventKind::ConnectError(_) | EventKind::Unreachable(_) | EventKind::Rejected(..) => Step::Connect,
            EventKind::NoService(..) => Step::FindService,
            EventKind::MulticastError(_) => Step::JoinGroup,
            EventKind::DeviceRemoval => Step::Transfer,
            EventKind::AddressInfoError(errno) => return Some(failed(Verb::RdmaResolveAddrinfo, *errno)),
            _ => return None,
        };
        let failed = ConnectError { step, cause: Cause::of(self), local: None, peer: None };
        Some(CmError::Connect(Box::new(failed)).into())
    }
}

impl ConnectError {
    fn advice(&self) -> Cow<'static, str> {
        Cow::Borrowed(match (self.step, self.cause) {
            (Step::ResolveAddress, _) if matches!(self.peer, Some(Address::Ib(_))) => {
                "; native InfiniBand addresses work only over InfiniBand: on Ethernet, connect to an IP address"
            }
            (Step::ResolveAddress, _) if !runs_on_soft0() => {
                "; an RDMA device must be on the network of the address (see `rdma link` and `ip route get`), and on Ethernet the \
                 peer must answer there"
            }
            (_, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. })
            | (_, Cause::Refused { status: ServiceStatus::UNSUPPORTED, .. }) => {
                "; start the peer first, or look at the port"
            }
            (Step::ResolveRoute, Cause::Failed(Errno(libc::ETIMEDOUT))) => {
                "; on soft0 the process that listens there may be stopped, on InfiniBand the subnet manager may not answer"
            }
            // soft0 reports these two for listeners on its own host.
            (Step::Connect | Step::FindService, Cause::Unreachable(Errno(libc::EACCES))) => {
                "; soft0 connects to listeners of its own user and of root: run both programs as one user, or the server as root"
            }
            (Step::Connect | Step::FindService, Cause::Unreachable(Errno(libc::EPROTONOSUPPORT))) => {
                "; the peer runs another version of soft0: build both programs from one version of this library"
            }
            (Step::Connect | Step::FindService, Cause::Timeout(_) | Cause::Unreachable(_)) => {
                "; the peer's program may accept no requests (its backlog is full, or it is stopped), its host may be down, a \
                 firewall may drop UDP port 4791, the MTUs may differ, or soft0 at the peer has no RDMA_SOFT_ADDR"
            }
            (Step::Connect, Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, .. }) => {
                "; the peer's program has rejected or dropped the request, or has ended: see its output, and the private data of \
                 the rejection"
            }
            (Step::Accept, Cause::Timeout(_) | Cause::Rejected { .. } | Cause::Disconnected) => {
                "; the peer has given up, or is gone: wait for the next request"
            }
            (Step::Transfer, Cause::Disconnected) => "; connect again to continue",
            (Step::Disconnect, Cause::Timeout(_)) => {
                "; the connection has ended nevertheless. The peer's program ends it, too, when it calls is_connected, wait or \
                 disconnect"
            }
            // Requests get no events until they are answered.
            (Step::Connect | Step::Accept, Cause::Failed(Errno(libc::EINVAL))) => "; the peer is most likely gone",
            (step, Cause::Failed(errno)) => return Cow::Owned(advice(step.verb(), errno)),
            _ => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::{Parameters, PeerParameters, PrivateData};

    #[test]
    fn failure_events_explain_the_failure() {
        let unreachable = EventKind::AddressError(Errno(libc::ENODEV)).error().unwrap();
        assert_eq!((unreachable.verb(), unreachable.errno()), (Some(Verb::RdmaResolveAddr), Some(Errno(libc::ENODEV))));
        assert!(
            unreachable.to_string().starts_with("resolving the address failed: ") && unreachable.explain().is_some()
        );
        let said = Parameters::Connected(PeerParameters {
            private_data: PrivateData::EMPTY,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: false,
            retry_count: 0,
            rnr_retry_count: 0,
            srq: false,
            qp_num: 0,
        });
        for (event, text) in [
            (EventKind::Rejected(RejectReason::INVALID_SERVICE_ID, said), "start the peer first"),
            (EventKind::NoService(ServiceStatus::UNSUPPORTED, said), "start the peer first"),
            (EventKind::Rejected(RejectReason::CONSUMER_DEFINED, said), "or has ended"),
            (EventKind::Unreachable(Errno(libc::ETIMEDOUT)), "firewall"),
            (EventKind::Unreachable(Errno(libc::EACCES)), "or the server as root"),
            (EventKind::Unreachable(Errno(libc::EPROTONOSUPPORT)), "another version of soft0"),
            (EventKind::RouteError(Errno(libc::ETIMEDOUT)), "may be stopped"),
            (EventKind::MulticastError(Errno(libc::ENOMEM)), "joining the group failed"),
            (EventKind::DeviceRemoval, "the device was removed"),
            (EventKind::AddressInfoError(Errno(libc::ENOENT)), "rdma_resolve_addrinfo failed"),
        ] {
            let error = event.error().unwrap().to_string();
            assert!(error.contains(text), "{error}");
        }
        for event in [EventKind::AddressResolved, EventKind::Established(said), EventKind::Disconnected] {
            assert!(event.error().is_none(), "{event:?}");
        }
    }
}
