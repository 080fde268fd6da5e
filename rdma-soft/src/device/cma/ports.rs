//! Ports that ids are bound to.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use crate::cm::ListenAddress;
use crate::net::directory::{Addresses, Claim, ClaimError, Directory, SourcePort};

/// The ports that ids of this process have claimed.
#[derive(Default)]
pub(super) struct Ports {
    claimed: HashMap<(u16, u16), Vec<Claimed>>,
}

/// A claimed port. Several ids share it if all of them allow that.
struct Claimed {
    addresses: Addresses,
    claim: Claim,
    users: usize,
    is_shared: bool,
    is_listening: bool,
}

/// A port in use by an id.
pub(crate) enum Binding {
    /// The port was claimed, so that the id can listen.
    Claimed { space: u16, port: u16, addresses: Addresses },
    /// The port is the local end of a connection.
    Source(SourcePort),
}

impl Binding {
    pub(super) fn port(&self) -> u16 {
        match self {
            Binding::Claimed { port, .. } => *port,
            Binding::Source(port) => port.get(),
        }
    }
}

/// The addresses that a listener accepts requests for.
pub(super) fn listen_address(addresses: Addresses) -> ListenAddress {
    match addresses {
        Addresses::One(address) => ListenAddress::One(address),
        Addresses::AllIpv4 => ListenAddress::AnyV4,
        Addresses::AllIpv6 => ListenAddress::AnyV6,
        Addresses::All => ListenAddress::Any,
    }
}

fn includes(addresses: Addresses, address: IpAddr) -> bool {
    match addresses {
        Addresses::One(one) => one == address.to_canonical(),
        Addresses::AllIpv4 => address.to_canonical().is_ipv4(),
        Addresses::AllIpv6 => address.to_canonical().is_ipv6(),
        Addresses::All => true,
    }
}

impl Ports {
    /// Claims a port at an address or at all addresses, or a free port if it is 0.
    ///
    /// # Errors
    /// The errno of Linux for a port in use: [`ClaimError::errno`].
    pub(super) fn claim(
        &mut self,
        directory: &Directory,
        space: u16,
        address: SocketAddr,
        is_shared: bool,
        is_ipv6_only: bool,
    ) -> Result<Binding, ClaimError> {
        let addresses = Addresses::new(address.ip(), is_ipv6_only);
        let sharers = self.claimed.get_mut(&(space, address.port())).into_iter().flatten();
        let mut sharers = sharers.filter(|claimed| is_shared && claimed.is_shared && !claimed.is_listening);
        if let Some(claimed) = sharers.find(|claimed| claimed.addresses == addresses) {
            claimed.users += 1;
            return Ok(Binding::Claimed { space, port: address.port(), addresses });
        }
        let claim = directory.claim(space, addresses, address.port())?;
        let port = claim.port();
        let claimed = Claimed { addresses, claim, users: 1, is_shared, is_listening: false };
        self.claimed.entry((space, port)).or_default().push(claimed);
        Ok(Binding::Claimed { space, port, addresses })
    }

    /// Lets lookups find a claimed port. Returns its addresses.
    ///
    /// # Errors
    /// `EADDRINUSE` if other ids share the port, `EINVAL` for the local end of a connection.
    pub(super) fn listen(&mut self, binding: &Binding) -> Result<ListenAddress, i32> {
        let Binding::Claimed { space, port, addresses } = binding else { return Err(libc::EINVAL) };
        let mut claims = self.claimed.get_mut(&(*space, *port)).into_iter().flatten();
        let claimed = claims.find(|claimed| claimed.addresses == *addresses).ok_or(libc::EINVAL)?;
        if claimed.users > 1 {
            return Err(libc::EADDRINUSE);
        }
        claimed.claim.listen().map_err(|error| error.raw_os_error().unwrap_or(libc::ENOMEM))?;
        claimed.is_listening = true;
        Ok(listen_address(*addresses))
    }

    /// Releases a port.
    pub(super) fn release(&mut self, binding: Binding) {
        let Binding::Claimed { space, port, addresses } = binding else { return };
        let Some(all) = self.claimed.get_mut(&(space, port)) else { return };
        if let Some(claimed) = all.iter_mut().find(|claimed| claimed.addresses == addresses) {
            claimed.users -= 1;
        }
        all.retain(|claimed| claimed.users > 0);
        if all.is_empty() {
            self.claimed.remove(&(space, port));
        }
    }

    /// Whether an id of this process listens at an address and port.
    pub(super) fn has_listener(&self, space: u16, address: SocketAddr) -> bool {
        let claims = self.claimed.get(&(space, address.port())).into_iter().flatten();
        claims.into_iter().any(|claimed| claimed.is_listening && includes(claimed.addresses, address.ip()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_shared_address_is_bound_twice_but_only_its_single_user_listens() {
        let (directory, mut ports) = (Directory::new(1).unwrap(), Ports::default());
        let at = SocketAddr::from(([127, 83, 9, 1], 7471));
        let mut bind = |is_shared| ports.claim(&directory, 0x106, at, is_shared, false);
        let (a, b) = (bind(true).unwrap(), bind(true).unwrap());
        assert_eq!(bind(false).err().map(|error| error.errno()), Some(libc::EADDRINUSE));
        assert_eq!(ports.listen(&a).err(), Some(libc::EADDRINUSE));
        ports.release(b);
        assert_eq!(ports.listen(&a), Ok(ListenAddress::One(at.ip())));
        assert!(ports.claim(&directory, 0x106, at, true, false).is_err(), "it listens");
        assert!(ports.has_listener(0x106, at) && !ports.has_listener(0x111, at));
        ports.release(a);
        assert!(!ports.has_listener(0x106, at));
        assert!(ports.claim(&directory, 0x106, at, false, false).is_ok());
    }
}
