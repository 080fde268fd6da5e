//! Members of multicast groups.

use std::time::Duration;

use super::attempt::{Cause, Step};
use super::handshake::{Arrival, Handshake, Outcome, Progress};
use super::resolve::{Resolve, Resolved};
use super::side::Side;
use super::{Address, CmError, Connector, EventChannel, EventKind, PortSpace};
use crate::endpoint::DatagramIdentity;
use crate::{DatagramEndpoint, EndpointBuilder, Error, Gid, Peer, ProtectionDomain, Result};

impl Connector {
    /// Finds the device for a multicast group of IP.
    ///
    /// This is the device of [`Connector::source`], or by default the one that the host's routes select for the group.
    ///
    /// # Errors
    /// [`CmError::Connect`]; [`CmError::Call`].
    pub fn resolve_group(&self, group: impl Into<Address>) -> Result<GroupRoute> {
        self.start_resolve_group(group)?.wait()
    }

    /// Like [`Connector::resolve_group`], without blocking.
    ///
    /// With [`Connector::source`] nothing has to be resolved, so the first [`Handshake::advance`] returns the device.
    ///
    /// # Errors
    /// Errors of the first step of [`Connector::resolve_group`].
    pub fn start_resolve_group(&self, group: impl Into<Address>) -> Result<Handshake<GroupRoute>> {
        match self.source {
            Some(source) => Resolve::bind(self, PortSpace::UDP, group.into(), source),
            None => Resolve::start(self, PortSpace::UDP, group.into()),
        }
    }
}

/// The device for a multicast group. Made by [`Connector::resolve_group`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use rdma_safe::Endpoint;
/// use rdma_safe::cm::Connector;
///
/// let route = Connector::new().source(([10, 0, 0, 1], 0)).resolve_group(([239, 1, 2, 3], 0))?;
/// let pd = route.pd().clone();
/// let mut member = route.join(Endpoint::builder(&pd).inline_data(64))?;
/// member.endpoint.receive(pd.allocate(1024)?)?;
/// member.endpoint.send_inline(b"to all", &member.peer)?;
/// let done = member.endpoint.wait(Duration::from_secs(5))?.ok()?;
/// println!("{:?}", done.work.buffer.as_deref());
/// member.leave()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is joined by `join`"]
pub struct GroupRoute {
    side: Side,
    pd: ProtectionDomain,
    group: Address,
    timeout: Duration,
    is_sender: bool,
}

impl Resolved for GroupRoute {
    const HAS_ROUTE: bool = false;

    fn new(side: Side, pd: ProtectionDomain, connector: &Connector, group: Address) -> Self {
        GroupRoute { side, pd, group, timeout: connector.timeout, is_sender: false }
    }
}

impl GroupRoute {
    /// The connector's domain of the device.
    ///
    /// Build the endpoint and its buffers in this domain, or in another domain of the device.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The local address.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// Joins only to send: no datagrams of the group are received.
    ///
    /// On InfiniBand the subnet manager must support send-only members.
    pub fn send_only(mut self) -> Self {
        self.is_sender = true;
        self
    }

    /// Builds an endpoint, joins the group, and attaches the endpoint to it.
    ///
    /// # Errors
    /// [`CmError::Connect`] when the group cannot be joined within [`Connector::timeout`], or is an IPv6 group over
    /// RoCE v2, which the kernel does not support; [`CmError::OtherDevice`] for a builder of another device;
    /// [`CmError::OtherQueueKey`] when the members use another key than programs of librdmacm; the errors of
    /// [`EndpointBuilder::build_datagrams`], [`DatagramEndpoint::attach_mcast`] and [`DatagramEndpoint::peer_at`].
    pub fn join(self, builder: EndpointBuilder<'_>) -> Result<GroupMember> {
        self.start_join(builder)?.wait()
    }

    /// Like [`GroupRoute::join`], without blocking.
    ///
    /// # Errors
    /// [`CmError::Connect`] for an IPv6 group over RoCE v2; [`CmError::OtherDevice`] for a builder of another device; the
    /// errors of [`EndpointBuilder::build_datagrams`].
    pub fn start_join(self, builder: EndpointBuilder<'_>) -> Result<Handshake<GroupMember>> {
        let endpoint = self.side.datagrams(Step::JoinGroup, builder)?;
        let (side, joining, timeout) = self.start(endpoint.identity())?;
        Ok(Handshake::waiting(JoinWith { endpoint, joining }, side, Step::JoinGroup, timeout))
    }

    /// Joins the group for an endpoint that exists already, and may be a member of several groups.
    ///
    /// Then attach the endpoint to [`GroupMembership::gid`] and [`GroupMembership::lid`]. Before the membership is dropped, detach
    /// it.
    ///
    /// # Errors
    /// Errors of [`GroupRoute::join`]; [`CmError::OtherDevice`] and [`CmError::OtherQueueKey`] for an endpoint that does not match
    /// the route.
    pub fn start_membership(self, endpoint: impl Into<DatagramIdentity>) -> Result<Handshake<GroupMembership>> {
        let endpoint = endpoint.into();
        self.side.require_datagrams(Step::JoinGroup, &endpoint)?;
        let (side, joining, timeout) = self.start(endpoint)?;
        Ok(Handshake::waiting(joining, side, Step::JoinGroup, timeout))
    }

    fn start(self, endpoint: DatagramIdentity) -> Result<(Side, Join, Duration)> {
        let GroupRoute { mut side, group, timeout, is_sender, .. } = self;
        let started = match is_sender {
            true => side.id.join_multicast_send_only(group),
            false => side.id.join_multicast(group),
        };
        started.map_err(|error| side.call_failed(Step::JoinGroup, error))?;
        Ok((side, Join { endpoint, group, is_sender }, timeout))
    }
}

/// The state of a handshake that joins a group.
#[derive(Debug)]
pub struct Join {
    endpoint: DatagramIdentity,
    group: Address,
    is_sender: bool,
}

impl Join {
    fn joined(&self, side: &Side, arrival: Arrival) -> Result<(Peer, Place)> {
        let joined = match arrival.event(side, Step::JoinGroup)? {
            EventKind::MulticastJoined(joined) => joined,
            other => return Err(side.error(Step::JoinGroup, Cause::of(&other))),
        };
        if joined.qkey != self.endpoint.qkey() {
            return Err(CmError::OtherQueueKey { qkey: joined.qkey, endpoint: self.endpoint.qkey() }.into());
        }
        let peer = self.endpoint.peer_at(&joined.address, joined.qp_num)?;
        let gid = joined.address.route.map(|route| route.dgid).unwrap_or_default();
        Ok((peer, Place { gid, lid: joined.address.dlid }))
    }
}

/// The address of a group.
#[derive(Clone, Copy, Debug)]
struct Place {
    gid: Gid,
    lid: u16,
}

/// The state of a handshake that joins a group with a new endpoint.
#[derive(Debug)]
pub struct JoinWith {
    endpoint: DatagramEndpoint,
    joining: Join,
}

impl Outcome for GroupMember {
    type Error = Error;
    type Context = ();
    type State = JoinWith;

    fn handle(mut handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>> {
        let Handshake { state: JoinWith { endpoint, joining }, side, .. } = &mut handshake;
        let (peer, place) = joining.joined(side, arrival)?;
        if !joining.is_sender {
            endpoint.attach_mcast(place.gid, place.lid)?;
        }
        let Handshake { state: JoinWith { endpoint, joining: Join { group, is_sender, .. } }, side, .. } = handshake;
        let membership = Membership { side, group, place, is_sender, is_lost: false };
        Ok(Progress::Ready(GroupMember { endpoint, peer, membership }))
    }
}

impl Outcome for GroupMembership {
    type Error = Error;
    type Context = ();
    type State = Join;

    fn handle(handshake: Handshake<Self>, arrival: Arrival, (): &mut ()) -> Result<Progress<Self>> {
        let (peer, place) = handshake.state.joined(&handshake.side, arrival)?;
        let Handshake { state: Join { group, is_sender, .. }, side, .. } = handshake;
        let membership = Membership { side, group, place, is_sender, is_lost: false };
        Ok(Progress::Ready(GroupMembership { peer, membership }))
    }
}

/// A member of a multicast group. Made by [`GroupRoute::join`].
///
/// Dropping it leaves the group. To join several groups with one endpoint, use [`GroupRoute::start_membership`].
#[derive(Debug)]
#[non_exhaustive]
pub struct GroupMember {
    // Dropped first, so that nothing arrives after the membership has ended.
    /// The endpoint. It receives datagrams of the group as well as those sent directly to it.
    pub endpoint: DatagramEndpoint,
    /// The peer that stands for all members.
    pub peer: Peer,
    membership: Membership,
}

#[derive(Debug)]
struct Membership {
    side: Side,
    group: Address,
    place: Place,
    is_sender: bool,
    is_lost: bool,
}

impl Membership {
    fn is_member(&mut self) -> Result<bool> {
        while let Some(event) = self.side.id.channel().try_event()? {
            self.is_lost |= matches!(event.kind, EventKind::MulticastError(_) | EventKind::DeviceRemoval);
        }
        Ok(!self.is_lost)
    }
}

/// The membership in a multicast group of an endpoint that is used elsewhere. Made by [`GroupRoute::start_membership`].
///
/// Dropping it leaves the group.
#[derive(Debug)]
#[non_exhaustive]
pub struct GroupMembership {
    /// The peer that stands for all members.
    pub peer: Peer,
    membership: Membership,
}

impl GroupMembership {
    /// The address of the group.
    #[must_use]
    pub fn group(&self) -> Address {
        self.membership.group
    }

    /// The GID of the group: [`GroupMember::gid`].
    #[must_use]
    pub fn gid(&self) -> Gid {
        self.membership.place.gid
    }

    /// The LID of the group on InfiniBand.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.membership.place.lid
    }

    /// The channel that becomes readable when the membership is lost: [`GroupMember::channel`].
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.membership.side.id.channel()
    }

    /// Whether the membership still exists: [`GroupMember::is_member`].
    ///
    /// # Errors
    /// Like [`GroupMember::is_member`].
    pub fn is_member(&mut self) -> Result<bool> {
        self.membership.is_member()
    }
}

impl GroupMember {
    /// The address of the group.
    #[must_use]
    pub fn group(&self) -> Address {
        self.membership.group
    }

    /// The GID of the group, which equals [`Grh::dgid`](crate::address::Grh::dgid) in the header of its datagrams.
    #[must_use]
    pub fn gid(&self) -> Gid {
        self.membership.place.gid
    }

    /// The local address.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.membership.side.id.local_address()
    }

    /// The channel that becomes readable when the membership is lost. Then call [`GroupMember::is_member`].
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.membership.side.id.channel()
    }

    /// Whether the membership still exists.
    ///
    /// It is lost if the subnet manager drops it or the device is removed. Then join again.
    ///
    /// # Errors
    /// [`CmError::Call`].
    pub fn is_member(&mut self) -> Result<bool> {
        self.membership.is_member()
    }

    /// Leaves the group and returns the endpoint, which then receives only datagrams sent directly to it.
    ///
    /// # Errors
    /// The errors of [`DatagramEndpoint::detach_mcast`] and [`Id::leave_multicast`](super::Id::leave_multicast). The
    /// endpoint is then dropped, and the group is left nevertheless.
    pub fn leave(self) -> Result<DatagramEndpoint> {
        let GroupMember { mut endpoint, membership: mut own, .. } = self;
        if !own.is_sender {
            endpoint.detach_mcast(own.place.gid, own.place.lid)?;
        }
        own.side.id.leave_multicast(own.group)?;
        Ok(endpoint)
    }
}
