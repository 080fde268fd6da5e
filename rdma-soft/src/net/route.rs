//! Routes and addresses of this host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use super::interface::for_each_address;
use super::sockaddr::is_link_local;
use crate::wire::UDP_PORT;

/// Returns the source address that the kernel's routes select for packets to an address.
///
/// `scope` is the interface index of a link-local destination. Other destinations do not use it.
///
/// # Errors
/// The error of `connect(2)`: `ENETUNREACH` or `EHOSTUNREACH` without a route, `EADDRNOTAVAIL` without an address of the family,
/// `EINVAL` for a link-local destination without a scope, `EACCES` for a broadcast address or a prohibited route.
pub(crate) fn source_for(destination: IpAddr, scope: u32) -> io::Result<IpAddr> {
    let (any, to): (IpAddr, SocketAddr) = match destination.to_canonical() {
        IpAddr::V4(v4) => (Ipv4Addr::UNSPECIFIED.into(), (v4, UDP_PORT).into()),
        IpAddr::V6(v6) => {
            let scope = if is_link_local(&v6) { scope } else { 0 };
            (Ipv6Addr::UNSPECIFIED.into(), SocketAddrV6::new(v6, UDP_PORT, 0, scope).into())
        }
    };
    // Connecting a UDP socket selects the route and sends nothing.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether an address belongs to this host: an address of an interface, any of `127.0.0.0/8`, or `::1`.
///
/// A link-local address belongs to this host if it is that of any interface.
pub(crate) fn is_local(address: IpAddr) -> bool {
    let address = address.to_canonical();
    address.is_loopback() || LocalAddresses::now().contains(&address)
}

/// Addresses of this host at one time.
pub(crate) struct LocalAddresses {
    /// Addresses of all interfaces, except loopback addresses.
    addresses: Vec<IpAddr>,
}

impl LocalAddresses {
    /// Asks the kernel, which takes about ten system calls.
    pub(crate) fn now() -> LocalAddresses {
        let mut addresses = Vec::new();
        for_each_address(|address, _, _| addresses.extend(address.filter(|address| !address.is_loopback())));
        LocalAddresses { addresses }
    }

    /// Linux owns all of `127.0.0.0/8`, but lists only some of these addresses.
    pub(crate) fn contains(&self, address: &IpAddr) -> bool {
        address.is_loopback() || self.addresses.contains(address)
    }

    /// Takes the listed addresses.
    #[cfg(test)]
    pub(super) fn take(&mut self) -> Vec<IpAddr> {
        std::mem::take(&mut self.addresses)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_source_for_an_own_address_is_local() {
        for to in ["127.0.0.1", "127.9.8.7", "::ffff:127.1.1.1", "0.0.0.0"] {
            assert_eq!(source_for(address(to), 0).unwrap(), address("127.0.0.1"), "{to}");
        }
        let all = LocalAddresses::now().take();
        for to in all.iter().filter(|to| !matches!(to, IpAddr::V6(v6) if is_link_local(v6))) {
            let source = source_for(*to, 7).unwrap();
            assert!(source == *to || source.is_loopback(), "{source} for {to}");
            assert!(is_local(source) && is_local(*to));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_link_local_destination_needs_a_scope() {
        let error = source_for(address("fe80::1"), 0).unwrap_err();
        assert!(
            matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT)),
            "{error}"
        );
        let mut link_local = Vec::new();
        for_each_address(|found, _, name| {
            if let Some(IpAddr::V6(v6)) = found.filter(|found| matches!(found, IpAddr::V6(v6) if is_link_local(v6))) {
                // SAFETY: the name is a C string.
                link_local.push((v6.into(), unsafe { libc::if_nametoindex(name.as_ptr()) }));
            }
        });
        for (own, index) in link_local {
            assert!(is_local(own));
            assert_eq!(source_for(own, index).unwrap(), own);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it lists the interfaces")]
    fn only_own_addresses_are_local() {
        for own in ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.3.2.1"] {
            assert!(is_local(address(own)), "{own}");
        }
        // Documentation addresses, unspecified addresses and multicast groups.
        for other in ["203.0.113.5", "2001:db8::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "128.0.0.1"] {
            assert!(!is_local(address(other)), "{other}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it starts a process")]
    fn an_error_without_a_route_is_passed_on() {
        const ISOLATED: &str = "RDMA_SOFT_TEST_WITHOUT_ROUTES";
        if std::env::var_os(ISOLATED).is_some() {
            for to in ["192.0.2.1", "127.0.0.1"] {
                assert_eq!(source_for(address(to), 0).unwrap_err().raw_os_error(), Some(libc::ENETUNREACH), "{to}");
            }
            let error = source_for(address("2001:db8::1"), 0).unwrap_err();
            let expected = [libc::ENETUNREACH, libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT];
            assert!(expected.contains(&error.raw_os_error().unwrap()), "{error}");
            assert!(is_local(address("127.0.0.1")), "the address belongs to the host while its interface is down");
            return;
        }
        let mut isolated = Command::new(std::env::current_exe().unwrap());
        isolated.arg("an_error_without_a_route_is_passed_on").env(ISOLATED, "1");
        // SAFETY: the function only makes a system call. A new network namespace has no routes.
        unsafe {
            isolated.pre_exec(|| match libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        match crate::net::tests::output(&mut isolated) {
            Ok(output) => {
                assert!(output.status.success(), "{output:?}");
                assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSPC | libc::EINVAL)) => {
                println!("skipped: the system permits no network namespaces: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
