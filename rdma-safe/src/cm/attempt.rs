//! Why there is no connection.

use std::fmt;
use std::time::Duration;

use super::{Address, EventKind, PrivateData, RejectReason};
use crate::Errno;

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
    /// The peer has ended the connection meanwhile.
    Disconnected,
    /// The device went away.
    DeviceRemoved,
    /// What does not belong to the step.
    Unexpected,
}

impl Cause {
    /// Of an event that is not what the step has waited for.
    pub(super) fn of(event: EventKind) -> Cause {
        match event {
            EventKind::AddressError(errno) | EventKind::RouteError(errno) | EventKind::ConnectError(errno) => {
                Cause::Failed(errno)
            }
            EventKind::Unreachable(errno) => Cause::Unreachable(errno),
            EventKind::Rejected(reason, parameters) => {
                Cause::Rejected { reason, private_data: parameters.into_private_data() }
            }
            EventKind::Disconnected | EventKind::TimewaitExit => Cause::Disconnected,
            EventKind::DeviceRemoval => Cause::DeviceRemoved,
            _ => Cause::Unexpected,
        }
    }
}

impl Cause {
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
            Step::Connect => "rdma_connect",
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
            write!(f, " with {peer}")?;
        }
        write!(f, " failed: {}{}", self.cause, self.advice())
    }
}

impl std::error::Error for ConnectError {}

impl ConnectError {
    fn advice(&self) -> &'static str {
        match (self.step, self.cause) {
            (Step::ResolveAddress, _) => {
                "; an RDMA device must be on the network of the address (see `rdma link` and `ip route get`), and on Ethernet the \
                 peer answer there"
            }
            (Step::Connect, Cause::Rejected { reason: RejectReason::INVALID_SERVICE_ID, .. }) => {
                "; start the peer first, or look at the port"
            }
            (Step::Connect, Cause::Timeout(_) | Cause::Unreachable(_)) => {
                "; the peer may be gone, or a firewall drop UDP port 4791, or its MTU differ"
            }
            // Before they are answered, requests get no events.
            (Step::Connect | Step::Accept, Cause::Failed(Errno(libc::EINVAL))) => {
                "; the peer has most likely gone meanwhile"
            }
            _ => "",
        }
    }
}
