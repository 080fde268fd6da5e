//! The network interface that has an address.

use std::ffi::CStr;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::{mem, ptr};

use super::name::{Name, is_link_local};

/// A network interface.
pub(super) struct Interface {
    name: [u8; libc::IFNAMSIZ],
    /// Its index.
    pub(super) index: u32,
}

impl Interface {
    /// The one with that address; of `127.0.0.0/8`, of which Linux has all without listing them, the one for loopback.
    pub(super) fn of(address: IpAddr) -> Option<Interface> {
        let (mut exact, mut loopback) = (None, None);
        each(|has, is_loopback, name| {
            if has == Some(address) && exact.is_none() {
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
        // An alias of old, `eth0:1`, is longer than a name and has the number of its interface.
        name.get_mut(..bytes.len())?.copy_from_slice(bytes);
        // SAFETY: a string.
        let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
        (index != 0).then_some(Interface { name, index })
    }

    /// The longest IP packet that it takes.
    pub(super) fn mtu(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        // SAFETY: zero is a value of each of its fields.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.name) {
            *to = from as libc::c_char;
        }
        // SAFETY: the request names the interface, and is what this one reads and writes.
        let failed = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &mut request) };
        if failed != 0 {
            return None;
        }
        // SAFETY: it is what the request is answered by.
        u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
    }
}

/// All addresses of this host but those of loopback and of links.
pub(super) fn addresses() -> Vec<IpAddr> {
    let mut all = Vec::new();
    each(|has, _, _| all.extend(has));
    all.retain(|address| !matches!(address, IpAddr::V6(v6) if is_link_local(v6)) && !address.is_loopback());
    all
}

/// Gives to `take` each address of this host, or none where an entry has none, whether it is of a loopback interface, and the name
/// of that.
fn each(mut take: impl FnMut(Option<IpAddr>, bool, &CStr)) {
    let mut list = ptr::null_mut();
    // SAFETY: it writes a list to `list`, or fails.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return;
    }
    let mut next = list.cast_const();
    // SAFETY: the list is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null or whole.
        let has = unsafe { Name::read(entry.ifa_addr) }.and_then(|name| name.get()).map(|(address, _)| address);
        let is_loopback = entry.ifa_flags & libc::IFF_LOOPBACK as libc::c_uint != 0;
        // SAFETY: an entry's name is a string as long as the list is there.
        take(has, is_loopback, unsafe { CStr::from_ptr(entry.ifa_name) });
    }
    // SAFETY: it is from `getifaddrs`, and nothing of it is kept.
    unsafe { libc::freeifaddrs(list) };
}
