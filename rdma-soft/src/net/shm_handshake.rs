//! The first message to a same-host peer. It passes the memory of the ring, and an eventfd that wakes the receiver.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | `ring` |
//! | 4 | version of the sender's protocol |
//! | 5 | oldest version whose receivers understand the sender |
//! | 6, 7 | zero, reserved |
//! | 8 to 23 | IP address of the sender; an IPv4 address is mapped into IPv6 |
//!
//! A receiver ignores the bytes after these, so a later version can add fields. A change that old receivers do not understand
//! raises the oldest version. Old receivers then refuse the connection without mapping the ring, and the sender uses UDP.

use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::mmsg::{cmsg_space, put_cmsg};
use super::sockaddr::{from_bytes, to_bytes};
use super::socket::check_neg;

/// Version of the protocol: handshake, layout of the ring, and messages in it.
pub(super) const VERSION: u8 = 3;

/// Oldest version whose receivers understand this side.
const OLDEST: u8 = 3;

const MAGIC: [u8; 4] = *b"ring";

/// Offsets of fields.
const AT_VERSION: usize = 4;
const AT_OLDEST: usize = 5;
const AT_ADDRESS: usize = 8;

/// Bytes of a handshake of this version.
pub(super) const BYTES: usize = AT_ADDRESS + 16;

/// Maximum bytes of a handshake of a later version. The kernel cuts off the rest.
const MAX_BYTES: usize = 256;

/// Why a handshake was not received.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// It has not arrived yet.
    #[error("it has not arrived yet")]
    Pending,
    /// The peer's protocol has a later version that this side does not understand.
    #[error("the peer has version {0} of the protocol")]
    OtherVersion(u8),
    /// The message is not a handshake, or lacks its descriptors.
    #[error("it is not a handshake, or lacks its descriptors")]
    Invalid,
    /// The connection has failed.
    #[error(transparent)]
    Failed(#[from] std::io::Error),
}

/// Encodes the handshake of the process at this address.
pub(super) fn encode(address: IpAddr) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    (bytes[AT_VERSION], bytes[AT_OLDEST]) = (VERSION, OLDEST);
    bytes[AT_ADDRESS..].copy_from_slice(&to_bytes(address));
    bytes
}

/// Turns a handshake into one of a later version, which only receivers of that version understand.
#[cfg(test)]
pub(super) fn require_later_version(handshake: &mut [u8; BYTES]) {
    (handshake[AT_VERSION], handshake[AT_OLDEST]) = (VERSION + 1, VERSION + 1);
}

fn decode(bytes: &[u8]) -> Result<IpAddr, HandshakeError> {
    let fields =
        bytes.first_chunk::<BYTES>().filter(|fields| fields.starts_with(&MAGIC)).ok_or(HandshakeError::Invalid)?;
    if fields[AT_OLDEST] > VERSION {
        return Err(HandshakeError::OtherVersion(fields[AT_VERSION]));
    }
    let address = fields.last_chunk::<16>().ok_or(HandshakeError::Invalid)?;
    Ok(from_bytes(address))
}

/// The descriptors of a handshake.
pub(super) struct Descriptors<F> {
    /// The memory of the ring.
    pub(super) memory: F,
    /// An eventfd that wakes the receiver.
    pub(super) wakeup: F,
}

/// Sends a handshake and its descriptors (`SCM_RIGHTS`).
pub(super) fn send(
    connection: BorrowedFd<'_>,
    bytes: &[u8],
    passed: &Descriptors<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = DescriptorControl::default();
    let descriptors = [passed.memory, passed.wakeup].map(|fd| fd.as_raw_fd().to_ne_bytes()).concat();
    put_cmsg(&mut control.0, (libc::SOL_SOCKET, libc::SCM_RIGHTS), &descriptors);
    // SAFETY: all fields may be zero. The message points to the bytes and to the control message, which are valid.
    unsafe {
        let mut header = mem::zeroed::<libc::msghdr>();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), DESCRIPTOR_CONTROL as _);
        check_neg(libc::sendmsg(connection.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) as libc::c_int).map(drop)
    }
}

/// Receives a peer's IP address and the descriptors that it passes.
pub(super) fn receive(connection: BorrowedFd<'_>) -> Result<(IpAddr, Descriptors<OwnedFd>), HandshakeError> {
    let mut bytes = [0_u8; MAX_BYTES];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = DescriptorControl::default();
    let mut descriptors = [None, None];
    // SAFETY: all fields may be zero. The message points to room for the bytes and for two descriptors. The kernel writes complete
    // control messages, and received descriptors are new and owned by nobody else. Only those within `cmsg_len` are read. The
    // kernel closes descriptors without room, and there is no padding that has room for another one.
    let len = unsafe {
        let mut header = mem::zeroed::<libc::msghdr>();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), DESCRIPTOR_CONTROL as _);
        let len =
            check_neg(libc::recvmsg(connection.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) as libc::c_int)
                .map_err(|error| match error.kind() {
                    std::io::ErrorKind::WouldBlock => HandshakeError::Pending,
                    _ => HandshakeError::Failed(error),
                })?;
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        let has_descriptors =
            !first.is_null() && ((*first).cmsg_level, (*first).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        if has_descriptors {
            let data = libc::CMSG_DATA(first).cast::<libc::c_int>();
            let count = ((*first).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / DESCRIPTOR;
            for (at, descriptor) in descriptors.iter_mut().enumerate().take(count) {
                *descriptor = Some(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
            }
        }
        len
    };
    let address = decode(&bytes[..len])?;
    match descriptors {
        [Some(memory), Some(wakeup)] => Ok((address, Descriptors { memory, wakeup })),
        _ => Err(HandshakeError::Invalid),
    }
}

/// Bytes of a descriptor.
const DESCRIPTOR: usize = mem::size_of::<libc::c_int>();

/// Bytes of a control message with two descriptors. They need no padding, which would have room for another one.
const DESCRIPTOR_CONTROL: usize = cmsg_space(2 * DESCRIPTOR);

// SAFETY: the function only computes a length.
const _: () = assert!(DESCRIPTOR_CONTROL == unsafe { libc::CMSG_LEN(2 * DESCRIPTOR as u32) } as usize);

/// Aligned memory for this control message.
#[derive(Default)]
#[repr(C, align(8))]
struct DescriptorControl([u8; DESCRIPTOR_CONTROL]);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const ADDRESSES: [&str; 3] = ["127.1.2.3", "::1", "2001:db8::7"];

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_handshake_with_other_descriptors_keeps_none_open() {
        let _lock = crate::net::tests::without_new_processes();
        let (mut ends, mut pipe) = ([0; 2], [0; 2]);
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: each array has room for two descriptors.
        unsafe {
            check_neg(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr())).unwrap();
            check_neg(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK)).unwrap();
        }
        // SAFETY: the descriptors are new and owned by nobody else.
        let [from, to, read, write] =
            [ends[0], ends[1], pipe[0], pipe[1]].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let bytes = encode(ADDRESSES[0].parse().unwrap());
        for count in [1, 2, 3, 4] {
            send_descriptors(&from, &bytes, &vec![write.as_raw_fd(); count]);
            // Of more descriptors, it takes the first two.
            assert_eq!(receive(to.as_fd()).is_ok(), count >= 2, "{count}");
        }
        drop(write);
        // SAFETY: there is room for one byte.
        let end = unsafe { libc::read(read.as_raw_fd(), [0_u8].as_mut_ptr().cast(), 1) };
        assert_eq!(end, 0, "a descriptor of the write end is still open");
    }

    fn send_descriptors(from: &OwnedFd, bytes: &[u8], descriptors: &[libc::c_int]) {
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = [0_u64; 8];
        // SAFETY: all fields may be zero. The message points to valid memory.
        unsafe {
            let value: Vec<_> = descriptors.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
            let to = std::slice::from_raw_parts_mut(control.as_mut_ptr().cast::<u8>(), mem::size_of_val(&control));
            let len = put_cmsg(to, (libc::SOL_SOCKET, libc::SCM_RIGHTS), &value);
            let mut header = mem::zeroed::<libc::msghdr>();
            (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
            (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), len as _);
            check_neg(libc::sendmsg(from.as_raw_fd(), &raw const header, 0) as libc::c_int).unwrap();
        }
    }

    #[test]
    fn a_handshake_round_trips_and_may_have_later_fields() {
        for address in ADDRESSES.map(|text| text.parse::<IpAddr>().unwrap()) {
            let mut bytes = encode(address).to_vec();
            assert_eq!(decode(&bytes).unwrap(), address);
            bytes[AT_VERSION] = VERSION + 1;
            bytes.extend([7; 40]);
            assert_eq!(decode(&bytes).unwrap(), address, "the version is later, but understood");
        }
    }

    #[test]
    fn an_unknown_version_is_refused_and_garbage_is_invalid() {
        let valid = encode(ADDRESSES[0].parse().unwrap());
        let mut later = valid;
        require_later_version(&mut later);
        assert!(matches!(decode(&later), Err(HandshakeError::OtherVersion(version)) if version == VERSION + 1));
        // Before there was a version, the message was the address as text.
        for garbage in
            [&b""[..], b"127.0.0.1", b"fe80:1234:1234:1234:1234:1234:1234:1234", &valid[..BYTES - 1], &[0; 64]]
        {
            assert!(matches!(decode(garbage), Err(HandshakeError::Invalid)), "{garbage:?}");
        }
    }
}
