//! Message buffers for `sendmmsg(2)`.

use std::net::IpAddr;
use std::{io, mem, ptr};

use super::To;
use super::sockaddr::SockAddr;
use super::socket::Link;

/// Maximum messages per system call.
pub(super) const MESSAGES: usize = 32;

/// Bytes of control messages: segment size and traffic class.
const CONTROL_BYTES: usize = 64;

/// Aligned memory for control messages.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Memory for the arguments of one `sendmmsg(2)` call.
pub(super) struct SendMessages {
    headers: Box<[libc::mmsghdr; MESSAGES]>,
    names: Box<[SockAddr; MESSAGES]>,
    parts: Box<[libc::iovec; MESSAGES]>,
    controls: Box<[Control; MESSAGES]>,
}

// SAFETY: the pointers are dereferenced only in `SendMessages::send`, whose caller keeps them valid. They belong to no thread.
unsafe impl Send for SendMessages {}

impl SendMessages {
    pub(super) fn new() -> SendMessages {
        // SAFETY: all fields may be zero.
        let header = unsafe { mem::zeroed::<libc::mmsghdr>() };
        SendMessages {
            headers: Box::new([header; MESSAGES]),
            names: Box::new([SockAddr::ZERO; MESSAGES]),
            parts: Box::new([libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES]),
            controls: Box::new([Control([0; CONTROL_BYTES]); MESSAGES]),
        }
    }

    /// Fills message `at`. It becomes several packets if it is longer than a segment.
    pub(super) fn set(&mut self, at: usize, to: (To, u32), bytes: &[u8], segment: usize) {
        let (To { address, class }, interface) = to;
        self.names[at] = SockAddr::new(address, interface);
        self.parts[at] = iovec(bytes);
        let header = &mut self.headers[at].msg_hdr;
        header.msg_name = (&raw mut self.names[at]).cast();
        header.msg_namelen = SockAddr::len(&address);
        header.msg_iov = &raw mut self.parts[at];
        header.msg_iovlen = 1;
        header.msg_control = ptr::null_mut();
        header.msg_controllen = 0;
        let Control(control) = &mut self.controls[at];
        let mut len = 0;
        if bytes.len() > segment {
            len += put_cmsg(&mut control[len..], (libc::SOL_UDP, libc::UDP_SEGMENT), &(segment as u16).to_ne_bytes());
        }
        if class != 0 {
            let kind = match address {
                IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            len += put_cmsg(&mut control[len..], kind, &libc::c_int::from(class).to_ne_bytes());
        }
        if len > 0 {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = len as _;
        }
    }

    /// Sends the first `count` messages. Returns how many were sent.
    ///
    /// # Safety
    /// The bytes passed to [`set`](SendMessages::set) are still valid.
    pub(super) unsafe fn send(&mut self, count: usize, link: &impl Link) -> io::Result<usize> {
        // SAFETY: the caller keeps the bytes valid. All other memory is owned by this object and does not move.
        unsafe { link.send(&mut self.headers[..count]) }
    }
}

fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Writes a control message to the start of `to`, with the layout of `CMSG_NXTHDR(3)`. Returns its length with padding.
pub(super) fn put_cmsg(to: &mut [u8], (level, kind): (libc::c_int, libc::c_int), value: &[u8]) -> usize {
    // SAFETY: these functions only compute lengths.
    let (len, space) = unsafe { (libc::CMSG_LEN(value.len() as u32), libc::CMSG_SPACE(value.len() as u32)) };
    let at = len as usize - value.len();
    assert!(space as usize <= to.len());
    // SAFETY: all fields may be zero.
    let mut header: libc::cmsghdr = unsafe { mem::zeroed() };
    header.cmsg_level = level;
    header.cmsg_type = kind;
    header.cmsg_len = len as _;
    // SAFETY: the assertion above has checked that there is room.
    unsafe { to.as_mut_ptr().cast::<libc::cmsghdr>().write_unaligned(header) };
    to[at..][..value.len()].copy_from_slice(value);
    space as usize
}

/// Bytes of a control message with `len` bytes of data.
pub(super) const fn cmsg_space(len: usize) -> usize {
    // SAFETY: the function only computes a length.
    unsafe { libc::CMSG_SPACE(len as u32) as usize }
}
