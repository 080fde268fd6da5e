//! The network interface of an address.

use std::ffi::CStr;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::{mem, ptr};

use super::sockaddr::SockAddr;

/// A network interface.
pub(super) struct Interface {
    name: [u8; libc::IFNAMSIZ],
    /// Interface index.
    pub(super) index: u32,
}

impl Interface {
    /// Finds the interface of an address.
    ///
    /// Linux owns all of `127.0.0.0/8`, but lists only some of these addresses. An unlisted one belongs to the loopback interface.
    pub(super) fn of(address: IpAddr) -> Option<Interface> {
        let (mut exact, mut loopback) = (None, None);
        for_each_address(|found, is_loopback, name| {
            if found == Some(address) && exact.is_none() {
                exact = Interface::named(name);
            } else if address.is_loopback() && is_loopback && loopback.is_none() {
                loopback = Interface::named(name);
            }
        });
        exact.or(loopback)
    }

    fn named(text: &CStr) -> Option<Interface> {
        let bytes = text.to_bytes_with_nul();
        let mut name = [0; libc::IFNAMSIZ];
        // A legacy alias such as `eth0:1` may be longer than a name. The alias has the index of its interface.
        name.get_mut(..bytes.len())?.copy_from_slice(bytes);
        // SAFETY: the pointer is to a C string.
        let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
        (index != 0).then_some(Interface { name, index })
    }

    /// Maximum length of an IP packet on this interface.
    pub(super) fn mtu(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        // SAFETY: all fields may be zero.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.name) {
            *to = from as libc::c_char;
        }
        // SAFETY: the request names the interface and has the type that this operation reads and writes.
        let failed = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &mut request) };
        if failed != 0 {
            return None;
        }
        // SAFETY: this operation has written this field.
        u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
    }
}

/// Calls `take` with each entry of `getifaddrs(3)`: address (`None` if it has none), whether the interface is loopback, and its
/// name.
pub(super) fn for_each_address(mut take: impl FnMut(Option<IpAddr>, bool, &CStr)) {
    let mut list = ptr::null_mut();
    // SAFETY: the call writes a list to `list`, or fails.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return;
    }
    let mut next = list.cast_const();
    // SAFETY: the list is valid until it is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the address of an entry is null or complete.
        let address = unsafe { SockAddr::read(entry.ifa_addr) }.and_then(|name| name.get()).map(|(address, _)| address);
        let is_loopback = entry.ifa_flags & libc::IFF_LOOPBACK as libc::c_uint != 0;
        // SAFETY: the name of an entry is a C string that lives as long as the list.
        take(address, is_loopback, unsafe { CStr::from_ptr(entry.ifa_name) });
    }
    // SAFETY: `getifaddrs` allocated the list, and no reference into it remains.
    unsafe { libc::freeifaddrs(list) };
}
