//! Binding ids to addresses, and resolving the addresses of peers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rdma_sys::*;

use super::Cma;
use super::finding::Goal;
use super::id::{IdState, unspecified};
use super::ports::Binding;
use crate::device::{Core, is_removed};
use crate::net::route;
use crate::transport::Time;
use crate::wire::cm::service_id;

/// Longest backlog, `rdma_ucm.max_backlog` of Linux.
const MAX_BACKLOG: usize = 1024;

impl Core {
    /// Binds an id to a local address: `rdma_bind_addr(3)`.
    ///
    /// # Errors
    /// `ENODEV` for an address if the device was removed, `EINVAL` if the id is bound already, and for a link-local address without
    /// the scope that names its interface, `EADDRNOTAVAIL` for an address of another host, and the errors of a port in use.
    pub(crate) fn cm_bind(&mut self, number: u32, address: SocketAddr) -> Result<(), i32> {
        let id = self.state.cma.id(number)?;
        if id.state != IdState::Idle {
            return Err(libc::EINVAL);
        }
        let (space, options) = (id.space, id.options);
        if matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0) {
            return Err(libc::EINVAL);
        }
        let link = match address.ip() {
            ip if ip.is_unspecified() => None,
            _ if is_removed() => return Err(libc::ENODEV),
            ip if route::is_local(ip) => Some(self.link_of(ip).unwrap_or(0)),
            _ => return Err(libc::EADDRNOTAVAIL),
        };
        let Cma { ports, directory, .. } = &mut self.state.cma;
        let directory = directory.as_ref().ok_or(libc::EOPNOTSUPP)?;
        let claimed = ports.claim(directory, space, address, options.reuses_address, options.is_ipv6_only);
        let binding = claimed.map_err(|error| error.errno())?;
        let id = self.state.cma.id_mut(number)?;
        id.source = address;
        id.source.set_port(binding.port());
        (id.link, id.binding, id.state) = (link, Some(binding), IdState::Bound);
        Ok(())
    }

    /// Binds the local end of a connection to a free port.
    fn bind_source(&mut self, number: u32, address: IpAddr) -> Result<(), i32> {
        let space = self.state.cma.id(number)?.space;
        let directory = self.state.cma.directory.as_ref().ok_or(libc::EOPNOTSUPP)?;
        let port = directory.source_port(space, address).map_err(|error| error.errno())?;
        let id = self.state.cma.id_mut(number)?;
        id.source = SocketAddr::new(address, port.get());
        (id.binding, id.state) = (Some(Binding::Source(port)), IdState::Bound);
        Ok(())
    }

    /// The link with an address of this host. Without one, any link will do, since peers on this host reach all of them.
    pub(super) fn link_of(&self, address: IpAddr) -> Option<usize> {
        self.links.iter().position(|link| link.socket.address() == address)
    }

    /// Listens for requests: `rdma_listen(3)`.
    ///
    /// # Errors
    /// `EINVAL` in a wrong state, and the errors of an address that others share.
    pub(crate) fn cm_listen(&mut self, number: u32, backlog: i32) -> Result<(), i32> {
        if self.state.cma.id(number)?.state == IdState::Idle {
            self.cm_bind(number, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
        }
        let Cma { ids, ports, manager, by_listener, .. } = &mut self.state.cma;
        let id = ids.get_mut(number).ok_or(libc::EINVAL)?;
        let (IdState::Bound, Some(binding)) = (id.state, &id.binding) else { return Err(libc::EINVAL) };
        let addresses = ports.listen(binding)?;
        let backlog = usize::try_from(backlog).ok().filter(|backlog| (1..=MAX_BACKLOG).contains(backlog));
        let service = service_id(id.space, binding.port());
        let listener = manager.listen(service, addresses, backlog.unwrap_or(MAX_BACKLOG));
        by_listener.insert(listener, number);
        (id.state, id.listener) = (IdState::Listening, Some(listener));
        Ok(())
    }

    /// Resolves the address of a peer: `rdma_resolve_addr(3)`. The event follows at once, as the kernel resolves IP addresses.
    ///
    /// # Errors
    /// `EINVAL` in a wrong state or for addresses of different families, `ENETUNREACH` and `EHOSTUNREACH` of the kernel's routing,
    /// `ENODEV` if the route does not begin at an address of the device, or if the device was removed.
    pub(crate) fn cm_resolve_address(
        &mut self,
        number: u32,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<(), i32> {
        if is_removed() {
            return Err(libc::ENODEV);
        }
        if self.state.cma.id(number)?.state == IdState::Idle {
            match source {
                Some(source) => self.cm_bind(number, source)?,
                None => self.bind_source(number, unspecified(destination.ip()))?,
            }
        }
        let id = self.state.cma.id(number)?;
        if id.state != IdState::Bound {
            return Err(libc::EINVAL);
        }
        let bound = id.source;
        if bound.is_ipv4() != destination.is_ipv4() {
            return Err(libc::EINVAL);
        }
        let mut destination = destination;
        // The unspecified address stands for this host.
        match destination.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => destination.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => destination.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        let (source, link) = self.route_to(bound.ip(), destination)?;
        let id = self.state.cma.id_mut(number)?;
        // Linux gives a source that the route selects the scope of the destination.
        id.source = if bound.ip().is_unspecified() { destination } else { bound };
        id.source.set_ip(source);
        id.source.set_port(bound.port());
        id.destination = Some(destination);
        (id.link, id.state) = (Some(link), IdState::AddressResolved);
        self.state.cma.push_plain(number, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        Ok(())
    }

    /// Finds the source address and the link for a destination.
    fn route_to(&self, bound: IpAddr, destination: SocketAddr) -> Result<(IpAddr, usize), i32> {
        let (destination, scope) = match destination {
            SocketAddr::V4(v4) => (IpAddr::V4(*v4.ip()), 0),
            SocketAddr::V6(v6) => (IpAddr::V6(*v6.ip()), v6.scope_id()),
        };
        let source = match bound.is_unspecified() {
            true if destination.is_multicast() => self.multicast_source(destination)?,
            // The kernel does the same for addresses of interfaces.
            true if destination.is_loopback() => destination,
            true => route::source_for(destination, scope)
                .map_err(|error| error.raw_os_error().unwrap_or(libc::ENETUNREACH))?,
            false => bound,
        };
        if route::is_local(destination) || source.is_loopback() {
            return Ok((source, self.link_of(source).unwrap_or(0)));
        }
        self.link_of(source).map(|link| (source, link)).ok_or(libc::ENODEV)
    }

    /// The device's address from which multicast packets of a group's family are sent.
    fn multicast_source(&self, group: IpAddr) -> Result<IpAddr, i32> {
        let mut addresses = self.links.iter().map(|link| link.socket.address());
        addresses.find(|address| address.is_ipv4() == group.is_ipv4()).ok_or(libc::ENODEV)
    }

    /// Resolves the route to a peer: `rdma_resolve_route(3)`.
    ///
    /// RoCE needs no query, but the device of a listener on this host has to be found.
    ///
    /// # Errors
    /// `EINVAL` before the address is resolved, and the errno of a failed system call.
    pub(crate) fn cm_resolve_route(&mut self, number: u32, timeout: Duration, now: Time) -> Result<(), i32> {
        let id = self.state.cma.id(number)?;
        let (IdState::AddressResolved, Some(destination)) = (id.state, id.destination) else {
            return Err(libc::EINVAL);
        };
        let space = id.space;
        let is_local = route::is_local(destination.ip());
        if is_local && !self.state.cma.ports.has_listener(space, destination) {
            return self.find_listener(number, Goal::Route, timeout, now);
        }
        self.finish_route(number);
        Ok(())
    }
}
