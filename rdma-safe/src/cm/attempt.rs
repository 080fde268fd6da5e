//! Why there is no connection.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::error::failed;
use super::{Address, CmError, EventKind, PrivateData, RejectReason, ServiceStatus};
use crate::explain::advice;
use crate::{Errno, Error};

/// A connection that did not come about.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ConnectError {
    /// What was being done.
    pub step: Step,
    /// Why it failed.
    pub cause: Cause,
    /// The address of this end, if it had one.
    pub local: Option<Address>,
    /// The address of the peer, if it is known.
    pub peer: Option<Address>,
}

/// What it takes to connect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Step {
    /// To find the device that leads to the peer.
    ResolveAddress,
    /// To find a way there.
    ResolveRoute,
    /// To be accepted by the peer.
    Connect,
    /// To be told by the peer where its datagrams go.
    FindService,
    /// To become a member of a multicast group.
    JoinGroup,
    /// To be told by the peer that it knows it was accepted.
    Accept,
    /// To have work done, by way of the connection.
    Transfer,
    /// To be told by the peer that the connection has ended.
    Disconnect,
}

/// Why a step failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // Errors have it in a box.
pub enum Cause {
    /// No event came.
    Timeout(Duration),
    /// The event said so.
    Failed(Errno),
    /// There is no way to the peer, or it did not answer.
    Unreachable(Errno),
    /// The peer has refused.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What it has to say.
        private_data: PrivateData,
    },
    /// The peer has no such service for datagrams, or has refused.
    Refused {
        /// Why.
        status: ServiceStatus,
        /// What it has to say.
        private_data: PrivateData,
    },
    /// The peer has ended the connection meanwhile.
    Disconnected,
    /// The device went away.
    DeviceRemoved,
    /// What does not belong to the step.
    Unexpected,
}

impl Cause {
    /// Of an event that is not what the step has waited for.
    pub(super) fn of(event: &EventKind) -> Cause {
        match event {
            EventKind::AddressError(errno)
            | EventKind::RouteError(errno)
            | EventKind::ConnectError(errno)
            | EventKind::MulticastError(errno) => Cause::Failed(*errno),
            EventKind::Unreachable(errno) => Cause::Unreachable(*errno),
            EventKind::Rejected(reason, parameters) => {
                Cause::Rejected { reason: *reason, private_data: parameters.said() }
            }
            EventKind::NoService(status, parameters) => {
                Cause::Refused { status: *status, private_data: parameters.said() }
            }
            EventKind::Disconnected | EventKind::TimewaitExit => Cause::Disconnected,
            EventKind::DeviceRemoval => Cause::DeviceRemoved,
            _ => Cause::Unexpected,
        }
    }
}

impl Cause {
    /// Of a call that failed.
    pub(super) fn of_errno(errno: Errno) -> Cause {
        match errno {
            // The kernel has taken the id from under librdmacm.
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
    /// What it begins with.
    pub(crate) fn call(self) -> &'static str {
        match self {
            Step::ResolveAddress => "rdma_resolve_addr",
            Step::ResolveRoute => "rdma_resolve_route",
            Step::Connect | Step::FindService => "rdma_connect",
            Step::JoinGroup => "rdma_join_multicast",
            Step::Accept => "rdma_accept",
            Step::Transfer => "ibv_poll_cq",
            Step::Disconnect => "rdma_disconnect",
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
            Cause::Timeout(waited) => write!(f, "nothing came back within {waited:?}"),
            Cause::Failed(errno) => write!(f, "{errno}"),
            Cause::Unreachable(errno) => write!(f, "the peer is not to be reached or does not answer ({errno})"),
            Cause::Rejected { reason, .. } => write!(f, "{reason}"),
            Cause::Refused { status, .. } => write!(f, "{status}"),
            Cause::Disconnected => f.write_str("the peer has ended the connection"),
            Cause::DeviceRemoved => f.write_str("the device went away"),
            Cause::Unexpected => f.write_str("an event came that does not belong there"),
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
    /// What has failed, if the event says so: as an error that explains it, without the addresses, which the id has.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        let step = match self {
            EventKind::AddressError(_) => Step::ResolveAddress,
            EventKind::RouteError(_) => Step::ResolveRoute,
            EventKind::ConnectError(_) | EventKind::Unreachable(_) | EventKind::Rejected(..) => Step::Connect,
            EventKind::NoService(..) => Step::FindService,
            EventKind::MulticastError(_) => Step::JoinGroup,
            EventKind::DeviceRemoval => Step::Transfer,
            EventKind::AddressInfoError(errno) => return Some(failed("rdma_resolve_addrinfo", *errno)),
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
                "; addresses of InfiniBand itself lead over InfiniBand only: on Ethernet, connect to an IP address"
            }
            (Step::ResolveAddress, _) => {
                "; an RDMA device must be on the network of the address (see `rdma link` and `ip route get`), and on Ethernet the \
                 peer answer there"
            }
            (_, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. })
            | (_, Cause::Refused { status: ServiceStatus::UNSUPPORTED, .. }) => {
                "; start the peer first, or look at the port"
            }
            (Step::Connect | Step::FindService, Cause::Timeout(_) | Cause::Unreachable(_)) => {
                "; the peer may be gone, or a firewall drop UDP port 4791, or its MTU differ"
            }
            // Before they are answered, requests get no events.
            (Step::Connect | Step::Accept, Cause::Failed(Errno(libc::EINVAL))) => {
                "; the peer has most likely gone meanwhile"
            }
            (step, Cause::Failed(errno)) => return Cow::Owned(advice(step.call(), errno)),
            _ => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::{Parameters, PeerParameters, PrivateData};

    #[test]
    fn events_that_tell_of_a_failure_explain_it() {
        let nobody = EventKind::AddressError(Errno(libc::ENODEV)).error().unwrap();
        assert_eq!((nobody.verb(), nobody.errno()), (Some("rdma_resolve_addr"), Some(Errno(libc::ENODEV))));
        assert!(nobody.to_string().starts_with("resolving the address failed: ") && nobody.explain().is_some());
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
            (EventKind::Unreachable(Errno(libc::ETIMEDOUT)), "firewall"),
            (EventKind::MulticastError(Errno(libc::ENOMEM)), "joining the group failed"),
            (EventKind::DeviceRemoval, "the device went away"),
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
