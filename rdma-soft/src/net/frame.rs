//! Messages as `sendmmsg(2)` has them.

use std::net::IpAddr;
use std::{io, mem, ptr};

use super::To;
use super::name::Name;
use super::socket::Link;

/// The most messages of one system call.
pub(super) const MESSAGES: usize = 32;

/// Bytes of control messages: the length of segments, and the class of traffic.
const CONTROL: usize = 64;

/// Memory for control messages, aligned as they have to be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// The memory that a system call is given.
pub(super) struct Frame {
    headers: Box<[libc::mmsghdr; MESSAGES]>,
    names: Box<[Name; MESSAGES]>,
    parts: Box<[libc::iovec; MESSAGES]>,
    controls: Box<[Control; MESSAGES]>,
}

// SAFETY: its pointers are only followed in `Frame::send`, whose caller answers for them; they belong to no thread.
unsafe impl Send for Frame {}

impl Frame {
    pub(super) fn new() -> Frame {
        // SAFETY: zero is a value of each field.
        let header = unsafe { mem::zeroed::<libc::mmsghdr>() };
        Frame {
            headers: Box::new([header; MESSAGES]),
            names: Box::new([Name::NONE; MESSAGES]),
            parts: Box::new([libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES]),
            controls: Box::new([Control([0; CONTROL]); MESSAGES]),
        }
    }

    /// Makes one message of these bytes, and several packets of it where it is longer than a segment.
    pub(super) fn set(&mut self, at: usize, to: (To, u32), bytes: &[u8], segment: usize) {
        let (To { address, class }, interface) = to;
        self.names[at] = Name::new(address, interface);
        self.parts[at] = part(bytes);
        let header = &mut self.headers[at].msg_hdr;
        header.msg_name = (&raw mut self.names[at]).cast();
        header.msg_namelen = Name::len(&address);
        header.msg_iov = &raw mut self.parts[at];
        header.msg_iovlen = 1;
        header.msg_control = ptr::null_mut();
        header.msg_controllen = 0;
        let Control(control) = &mut self.controls[at];
        let mut len = 0;
        if bytes.len() > segment {
            len += put(&mut control[len..], (libc::SOL_UDP, libc::UDP_SEGMENT), &(segment as u16).to_ne_bytes());
        }
        if class != 0 {
            let kind = match address {
                IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            len += put(&mut control[len..], kind, &libc::c_int::from(class).to_ne_bytes());
        }
        if len > 0 {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = len as _;
        }
    }

    /// Sends the first so many: how many have gone.
    ///
    /// # Safety
    /// The bytes with which they were set are still there.
    pub(super) unsafe fn send(&mut self, count: usize, link: &impl Link) -> io::Result<usize> {
        // SAFETY: all but the bytes is the frame's own, and stays where it is; these are the caller's promise.
        unsafe { link.send(&mut self.headers[..count]) }
    }
}

fn part(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Writes a control message of that level and type to the beginning of the memory, as `CMSG_NXTHDR(3)` finds it and the next:
/// returns how many bytes it takes.
pub(super) fn put(to: &mut [u8], (level, kind): (libc::c_int, libc::c_int), value: &[u8]) -> usize {
    // SAFETY: they only compute.
    let (len, space) = unsafe { (libc::CMSG_LEN(value.len() as u32), libc::CMSG_SPACE(value.len() as u32)) };
    let at = len as usize - value.len();
    assert!(space as usize <= to.len());
    // SAFETY: zero is a value of each field.
    let mut header: libc::cmsghdr = unsafe { mem::zeroed() };
    header.cmsg_level = level;
    header.cmsg_type = kind;
    header.cmsg_len = len as _;
    // SAFETY: there is room for it, as just checked.
    unsafe { to.as_mut_ptr().cast::<libc::cmsghdr>().write_unaligned(header) };
    to[at..][..value.len()].copy_from_slice(value);
    space as usize
}

/// Bytes of a control message with so many bytes in it.
pub(super) const fn control_space(len: usize) -> usize {
    // SAFETY: it only computes.
    unsafe { libc::CMSG_SPACE(len as u32) as usize }
}
