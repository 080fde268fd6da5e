//! The answer to a lookup.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | `rdma` |
//! | 4 | version of the listener's protocol |
//! | 5 | oldest version whose clients understand the listener |
//! | 6 | number of addresses |
//! | 7 | zero, reserved |
//! | 8 to 15 | GUID of the device, in network byte order |
//! | from 16 | addresses of the device, 16 bytes each; IPv4 addresses are mapped into IPv6 |
//!
//! A client ignores the bytes after these, so a later version can add fields. A change that old clients do not understand raises
//! the oldest version.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::lookup::LookupError;
use crate::net::sockaddr::{from_bytes, to_bytes};
use crate::net::unix;

/// Version of the protocol: the answer, and the messages of the connection manager that follow.
pub(super) const VERSION: u8 = 2;

/// Oldest version whose clients understand this side.
const OLDEST: u8 = 2;

const MAGIC: [u8; 4] = *b"rdma";

/// Bytes before the addresses.
const HEADER: usize = 16;

/// Maximum addresses. A device with more passes only the first ones.
const MAX_ADDRESSES: usize = 16;

/// Maximum bytes of an answer of a later version. The kernel cuts off the rest.
pub(super) const MAX_BYTES: usize = 1024;

/// Encoded answer of this process. Empty if the device has no address, so no lookup is answered.
pub(super) struct Answer(Vec<u8>);

impl Answer {
    pub(super) fn new(guid: u64, own: &[IpAddr]) -> Answer {
        let own = &own[..own.len().min(MAX_ADDRESSES)];
        if own.is_empty() {
            return Answer(Vec::new());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend([VERSION, OLDEST, own.len() as u8, 0]);
        bytes.extend(guid.to_be_bytes());
        own.iter().for_each(|address| bytes.extend(to_bytes(*address)));
        Answer(bytes)
    }

    /// Answers a lookup, unless the client belongs to a user that does not accept the answer.
    pub(super) fn send(&self, connection: BorrowedFd<'_>) {
        if self.0.is_empty() || !unix::peer_user(connection).is_ok_and(|client| is_accepted(unix::own_user(), client)) {
            return unix::shut_down(connection);
        }
        // The first message on a connection always has room.
        // SAFETY: the pointer and the length describe the bytes.
        unsafe { libc::send(connection.as_raw_fd(), self.0.as_ptr().cast(), self.0.len(), libc::MSG_NOSIGNAL) };
    }
}

/// Whether a client accepts the answers of a listener, by their users.
pub(super) fn is_accepted(listener: libc::uid_t, client: libc::uid_t) -> bool {
    listener == client || listener == 0
}

/// Decodes an answer. Returns the GUID and the addresses of the device, at least one.
pub(super) fn decode(bytes: &[u8]) -> Result<(u64, Vec<IpAddr>), LookupError> {
    let (header, addresses) = bytes.split_first_chunk::<HEADER>().ok_or(LookupError::NobodyListens)?;
    let [a, b, c, d, version, oldest, count, _, guid @ ..] = *header;
    if [a, b, c, d] != MAGIC {
        return Err(LookupError::NobodyListens);
    }
    // Version 1 had no GUID.
    if oldest > VERSION || version < OLDEST {
        return Err(LookupError::OtherVersion { version });
    }
    let addresses: Vec<IpAddr> = addresses
        .chunks_exact(16)
        .take(count.into())
        .filter_map(|bytes| Some(from_bytes(bytes.first_chunk()?)))
        .collect();
    let is_valid = |address: &IpAddr| !address.is_unspecified() && !address.is_multicast();
    if addresses.is_empty() || addresses.len() != usize::from(count) || !addresses.iter().all(is_valid) {
        return Err(LookupError::NobodyListens);
    }
    Ok((u64::from_be_bytes(guid), addresses))
}

/// Selects the address of a device that a client with the addresses `own` reaches, for a lookup of `wanted`.
pub(super) fn select(addresses: &[IpAddr], wanted: IpAddr, own: &[IpAddr]) -> Option<IpAddr> {
    let rank = |address: &&IpAddr| {
        let is_unreachable = own.iter().all(|own| own.is_ipv4() != address.is_ipv4());
        (is_unreachable, **address != wanted, address.is_ipv4() != wanted.is_ipv4())
    };
    addresses.iter().min_by_key(rank).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUID: u64 = 0x0102_0304_0506_0708;

    fn all(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn an_answer_round_trips_and_may_have_later_fields() {
        for own in [&["127.1.2.3"][..], &["::1", "10.0.0.1"], &["127.0.0.9"; 16]] {
            let mut bytes = Answer::new(GUID, &all(own)).0;
            assert_eq!(decode(&bytes).unwrap(), (GUID, all(own)));
            bytes[4] = 200;
            bytes.extend([9; 33]);
            assert_eq!(decode(&bytes).unwrap(), (GUID, all(own)), "the version is later, but understood");
        }
        assert_eq!(decode(&Answer::new(GUID, &all(&["127.0.0.9"; 17])).0).unwrap().1.len(), 16);
    }

    #[test]
    fn an_answer_of_another_version_or_garbage_is_refused() {
        let valid = Answer::new(GUID, &all(&["127.1.2.3"])).0;
        let with = |at: usize, value| {
            let mut bytes = valid.clone();
            bytes[at] = value;
            bytes
        };
        let other = decode(&[&with(5, VERSION + 1)[..4], &[7, VERSION + 1]].concat());
        assert!(matches!(other, Err(LookupError::NobodyListens)), "it is too short");
        let mut later = with(5, VERSION + 1);
        later[4] = 7;
        assert!(matches!(decode(&later), Err(LookupError::OtherVersion { version: 7 })));
        let unspecified = Answer::new(GUID, &all(&["127.0.0.1", "0.0.0.0"])).0;
        let multicast = Answer::new(GUID, &all(&["ff02::1"])).0;
        let short = &valid[..valid.len() - 1];
        for garbage in [&b""[..], b"rdma", &with(0, b'x'), &with(6, 0), &with(6, 2), short, &unspecified, &multicast] {
            assert!(matches!(decode(garbage), Err(LookupError::NobodyListens)), "{garbage:?}");
        }
    }

    #[test]
    fn the_selected_address_is_reachable() {
        let device = all(&["127.1.1.1", "fd00::1", "127.2.2.2", "fd00::2"]);
        for (wanted, own, expected) in [
            ("127.2.2.2", &["127.9.9.9"][..], "127.2.2.2"),
            ("127.3.3.3", &["127.9.9.9"], "127.1.1.1"),
            ("::1", &["127.9.9.9"], "127.1.1.1"),
            ("::1", &["127.9.9.9", "fd00::9"], "fd00::1"),
            ("fd00::2", &["fd00::9"], "fd00::2"),
            ("fd00::2", &[], "fd00::2"),
        ] {
            let selected = select(&device, wanted.parse().unwrap(), &all(own));
            assert_eq!(selected, Some(expected.parse().unwrap()), "{wanted} from {own:?}");
        }
    }
}
