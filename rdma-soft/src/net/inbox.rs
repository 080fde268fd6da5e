//! Packets that have come.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::{mem, ptr};

use super::Origin;
use super::batch::path;
use super::callers::Callers;
use super::group::Group;
use super::name::Name;
use super::near::split;
use super::socket::{Socket, receive_messages};
use crate::wire::{IcrcSeed, Path, UDP_PORT};

/// The most messages of one system call.
const MESSAGES: usize = 16;

/// Bytes of the longest message, and more.
const BUFFER: usize = 64 << 10;

/// Of how many looks by somebody who looks all the time one is at the ways by which nothing came of late: where it takes a system
/// call to look, and where it does not.
const SELDOM: u32 = 8;
const SELDOM_OF_MEMORY: u32 = 64;

/// The most messages to take from one caller before it is another one's turn.
const TURN: usize = 16;

/// The most to take from all of them before others get at the device.
const MOST_OF_CALLERS: usize = 64;

/// Bytes of control messages: the length of segments, the class of traffic, and hops.
const CONTROL: usize = 96;

/// Memory for control messages, aligned as they are.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Memory for packets to come to, and who they come from by the shorter way.
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    headers: Box<[libc::mmsghdr; MESSAGES]>,
    parts: Box<[libc::iovec; MESSAGES]>,
    names: Box<[Name; MESSAGES]>,
    controls: Box<[Control; MESSAGES]>,
    callers: Callers,
    /// By which path the last message came, and what the CRCs of its packets begin with.
    seed: Option<(Path, IcrcSeed)>,
    /// Whose turn it was last.
    turn: usize,
    /// How many messages to ask for: to look for one more than there is costs time.
    wanted: usize,
    /// Where something came last.
    last: Source,
    /// How often it was looked at alone.
    looks: u32,
    /// The last look was at all, and nothing was left.
    has_all: bool,
    damaged: u64,
}

/// Where `poll(2)` has found packets to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Readable {
    /// The UDP socket has some.
    pub(crate) wire: bool,
    /// Peers on this host have sent some.
    pub(crate) near: bool,
}

/// Where packets come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// At the UDP socket.
    Wire,
    /// From peers on this host.
    Callers,
}

// SAFETY: its pointers are to its own memory.
unsafe impl Send for Inbox {}

impl Inbox {
    /// Empty.
    pub(crate) fn new() -> Inbox {
        // SAFETY: zero is a value of each field.
        let header = unsafe { mem::zeroed::<libc::mmsghdr>() };
        Inbox {
            bytes: vec![0; MESSAGES * BUFFER].into_boxed_slice(),
            headers: Box::new([header; MESSAGES]),
            parts: Box::new([libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES]),
            names: Box::new([Name::NONE; MESSAGES]),
            controls: Box::new([Control([0; CONTROL]); MESSAGES]),
            callers: Callers::default(),
            seed: None,
            turn: 0,
            wanted: 1,
            last: Source::Wire,
            looks: 0,
            has_all: false,
            damaged: 0,
        }
    }

    /// How many packets have come damaged.
    #[cfg(test)]
    pub(crate) fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Whether nothing was left when it was looked at last.
    pub(crate) fn has_all(&self) -> bool {
        self.has_all
    }

    /// Takes what has come: gives each packet that is right, whole, to `each`, with where it is from. Returns whether
    /// anything came, and so whether there may be more.
    pub(crate) fn receive(&mut self, socket: &Socket, mut each: impl FnMut(Origin, &[u8])) -> bool {
        self.has_all = true;
        self.look(socket, &mut each)
    }

    /// As [`receive`](Inbox::receive), of somebody who calls it all the time: where nothing came of late, it looks only now and
    /// then.
    pub(crate) fn glance(&mut self, socket: &Socket, mut each: impl FnMut(Origin, &[u8])) -> bool {
        self.looks = self.looks.wrapping_add(1);
        let seldom = if self.last == Source::Wire { SELDOM } else { SELDOM_OF_MEMORY };
        self.has_all = self.looks % seldom == 0;
        if self.has_all {
            return self.look(socket, &mut each);
        }
        match self.last {
            Source::Wire => self.take_wire(socket, &mut each),
            Source::Callers => self.take_near(socket, &mut each),
        }
    }

    /// Like [`receive`](Inbox::receive), but looks only where `poll(2)` has found packets.
    pub(crate) fn receive_from(
        &mut self,
        socket: &Socket,
        readable: Readable,
        mut each: impl FnMut(Origin, &[u8]),
    ) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.has_all = false;
        let by_wire = readable.wire && self.take_wire(socket, &mut each);
        if !readable.near {
            return by_wire;
        }
        let mut by_near = self.take_near(socket, &mut each);
        // Without packets, a peer has connected or disconnected. While packets arrive, check for that now and then.
        if !by_near || self.looks % SELDOM == 0 {
            if let Some(near) = socket.near() {
                self.callers.attend(near);
                by_near |= self.take_near(socket, &mut each);
            }
        }
        by_near | by_wire
    }

    /// Looks everywhere.
    fn look(&mut self, socket: &Socket, each: &mut impl FnMut(Origin, &[u8])) -> bool {
        if let Some(near) = socket.near() {
            self.callers.attend(near);
        }
        // In the order in which a peer that has come to be near has sent.
        let by_wire = self.take_wire(socket, each);
        self.take_near(socket, each) | by_wire
    }

    /// Takes what has come by UDP.
    fn take_wire(&mut self, socket: &Socket, each: &mut impl FnMut(Origin, &[u8])) -> bool {
        let came = self.take_from(socket.raw(), socket.address(), each);
        if came {
            self.last = Source::Wire;
        }
        came
    }

    /// Takes what has come by the shorter way.
    fn take_near(&mut self, socket: &Socket, each: &mut impl FnMut(Origin, &[u8])) -> bool {
        let Some(near) = socket.near() else { return false };
        let mut left = MOST_OF_CALLERS;
        for _ in 0..self.callers.count() {
            if left == 0 {
                self.has_all = false;
                break;
            }
            // Downwards, as those behind one that is dismissed move up.
            let count = self.callers.count();
            self.turn = self.turn.min(count).checked_sub(1).unwrap_or(count.saturating_sub(1));
            let end = left.saturating_sub(TURN);
            let Inbox { callers, bytes, damaged, turn, seed, .. } = self;
            while let Some((address, len)) = callers.take(*turn, near, &mut bytes[..BUFFER]) {
                match by_near(address, &bytes[..len]) {
                    Some(taken) => *damaged += taken.give(socket.address(), seed, each),
                    None => *damaged += 1,
                }
                left -= 1;
                if left == end {
                    self.has_all = false;
                    break;
                }
            }
        }
        let came = left < MOST_OF_CALLERS;
        if came {
            self.last = Source::Callers;
        }
        came
    }

    /// Whether connections to peers on this host have ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.callers.has_ended()
    }

    /// Ways to peers on this host that were seen to have ended: for [`Outbox::end`](super::Outbox::end).
    pub(crate) fn ended(&mut self) -> impl Iterator<Item = usize> + '_ {
        self.callers.ended()
    }

    /// Has peers on this host wake who waits at [`Socket::near_fd`]: `false` where something has come already. It is called by
    /// nobody else.
    pub(crate) fn sleep(&mut self) -> bool {
        self.callers.sleep()
    }

    /// Asks peers on this host not to wake this end any more; undoes [`sleep`](Inbox::sleep).
    pub(crate) fn wake_up(&mut self) {
        self.callers.wake_up();
    }

    /// As [`receive`](Inbox::receive), of what was sent to a group.
    pub(crate) fn receive_group(&mut self, group: &Group, mut each: impl FnMut(Origin, &[u8])) -> bool {
        self.take_from(group.fd().as_raw_fd(), group.address(), &mut each)
    }

    /// Takes what has come at that descriptor, and is for that address.
    fn take_from(&mut self, fd: libc::c_int, to: IpAddr, each: &mut impl FnMut(Origin, &[u8])) -> bool {
        self.point();
        // SAFETY: the messages point to the names, parts and control messages, and these to the bytes, of lengths as they are; all
        // of it stays where it is.
        let count = unsafe { receive_messages(fd, &mut self.headers[..self.wanted]) }.unwrap_or(0);
        self.has_all &= count < self.wanted;
        // SAFETY: the kernel has written so many.
        unsafe { self.give(count, to, each) };
        self.wanted = if count == self.wanted { MESSAGES.min(4 * count) } else { count.max(1) };
        count > 0
    }

    /// Has as many messages as are wanted point to memory for each.
    fn point(&mut self) {
        // No buffer is found by way of all of them, as that would end what the pointers before may be used for.
        for (at, buffer) in self.bytes.chunks_exact_mut(BUFFER).enumerate().take(self.wanted) {
            self.parts[at] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: BUFFER };
            let header = &mut self.headers[at].msg_hdr;
            header.msg_iov = &raw mut self.parts[at];
            header.msg_iovlen = 1;
            header.msg_name = (&raw mut self.names[at]).cast();
            header.msg_namelen = mem::size_of::<Name>() as _;
            header.msg_control = (&raw mut self.controls[at]).cast();
            header.msg_controllen = CONTROL as _;
        }
    }

    /// Gives the packets of the first messages, which are for that address.
    ///
    /// # Safety
    /// The kernel has written so many messages.
    unsafe fn give(&mut self, count: usize, to: IpAddr, each: &mut impl FnMut(Origin, &[u8])) {
        for at in 0..count {
            let header = &self.headers[at];
            let message = &self.bytes[at * BUFFER..][..header.msg_len as usize];
            let is_whole = header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            // SAFETY: the caller's promise; their control messages are among this inbox's own memory.
            match unsafe { by_wire(&header.msg_hdr, &self.names[at], message) }.filter(|_| is_whole) {
                Some(taken) => self.damaged += taken.give(to, &mut self.seed, each),
                None => self.damaged += 1,
            }
        }
    }
}

/// A message that has come: packets of `segment` bytes, the last perhaps shorter.
struct Taken<'a> {
    origin: Origin,
    port: u16,
    segment: usize,
    packets: &'a [u8],
}

impl Taken<'_> {
    /// Gives each packet, to that address, that is right: how many are not. `last` is the seed of the last message.
    fn give(&self, to: IpAddr, last: &mut Option<(Path, IcrcSeed)>, each: &mut impl FnMut(Origin, &[u8])) -> u64 {
        let Some(path) = path(self.origin.address, self.port, to) else { return 0 };
        let seed = match last {
            Some((of, seed)) if *of == path => *seed,
            _ => last.insert((path, IcrcSeed::new(&path))).1,
        };
        // Packets of one message are numbered one after the other, as a rule from zero.
        let (mut identification, mut damaged) = (0, 0);
        for packet in self.packets.chunks(self.segment) {
            match seed.identify(identification, packet) {
                Some(found) => {
                    identification = found.wrapping_add(1);
                    each(self.origin, packet);
                }
                None => damaged += 1,
            }
        }
        damaged
    }
}

/// # Safety
/// The control messages are there, and as the kernel has written them.
unsafe fn by_wire<'a>(header: &libc::msghdr, name: &Name, message: &'a [u8]) -> Option<Taken<'a>> {
    let (address, port) = name.get()?;
    // SAFETY: the caller's promise.
    let Said { segment, class, hops } = unsafe { said(header) };
    let segment = segment.unwrap_or(message.len()).max(1);
    Some(Taken { origin: Origin { address, class, hops }, port, segment, packets: message })
}

fn by_near(address: IpAddr, message: &[u8]) -> Option<Taken<'_>> {
    let (segment, class, packets) = split(message)?;
    Some(Taken { origin: Origin { address, class, hops: Origin::HOPS }, port: UDP_PORT, segment, packets })
}

/// What the kernel says of a message.
struct Said {
    /// Bytes of its packets, where it is of several.
    segment: Option<usize>,
    class: u8,
    hops: u8,
}

/// # Safety
/// The control messages are there, and as the kernel has written them.
unsafe fn said(header: &libc::msghdr) -> Said {
    let mut said = Said { segment: None, class: 0, hops: Origin::HOPS };
    // SAFETY: the caller's promise.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: as above; the kernel writes an `int`, but one byte as the type of service.
        unsafe {
            let libc::cmsghdr { cmsg_level, cmsg_type, .. } = *next;
            let data = libc::CMSG_DATA(next);
            let number = || data.cast::<libc::c_int>().read_unaligned();
            match (cmsg_level, cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    said.segment = usize::try_from(number()).ok().filter(|size| *size > 0)
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => said.class = *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => said.class = number() as u8,
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    said.hops = number() as u8;
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(header, next);
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::net::batch::append;
    use crate::net::frame::put;

    const HERE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    /// Packets of that length, one after the other.
    fn packets(count: u16, len: usize) -> Vec<u8> {
        let seed = IcrcSeed::new(&path(PEER.into(), UDP_PORT, HERE.into()).unwrap());
        let mut bytes = Vec::new();
        for number in 0..count {
            // SAFETY: there is no payload.
            unsafe { append(&mut bytes, &seed, number, &vec![number as u8; len], &[]) };
        }
        bytes
    }

    /// Writes a message as the kernel does: by pointers alone.
    ///
    /// # Safety
    /// All that the message points to is there.
    unsafe fn write(message: &mut libc::mmsghdr, bytes: &[u8], controls: &[((libc::c_int, libc::c_int), &[u8])]) {
        let header = &mut message.msg_hdr;
        let mut control = [0; CONTROL];
        let len = controls.iter().fold(0, |len, (kind, value)| len + put(&mut control[len..], *kind, value));
        // SAFETY: the caller's promise; there is room for the bytes, as is asserted.
        unsafe {
            let part = *header.msg_iov;
            assert!(bytes.len() <= part.iov_len && len <= header.msg_controllen as usize);
            part.iov_base.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            header.msg_name.cast::<Name>().write(Name::new(PEER.into(), 0));
            header.msg_control.cast::<u8>().copy_from_nonoverlapping(control.as_ptr(), len);
        }
        header.msg_controllen = len as _;
        message.msg_len = bytes.len() as _;
    }

    #[test]
    fn messages_come_apart_with_what_the_kernel_says_of_each() {
        let mut inbox = Inbox::new();
        inbox.wanted = 2;
        inbox.point();
        let (segmented, single) = (packets(3, 20), packets(1, 40));
        let [segment, hops] = [24, 7].map(libc::c_int::to_ne_bytes);
        let [first, second, ..] = &mut *inbox.headers;
        // SAFETY: `point` has just had them point to the inbox's own memory.
        unsafe {
            let ttl = (libc::IPPROTO_IP, libc::IP_TTL);
            write(first, &segmented, &[((libc::SOL_UDP, libc::UDP_GRO), &segment), (ttl, &hops)]);
            write(second, &single, &[((libc::IPPROTO_IP, libc::IP_TOS), &[0xb8])]);
        }
        let mut given = Vec::new();
        // SAFETY: both were written.
        unsafe { inbox.give(2, HERE.into(), &mut |origin, packet| given.push((origin, packet.to_vec()))) };
        let origin = |class, hops| Origin { address: PEER.into(), class, hops };
        let mut expected: Vec<_> = segmented.chunks(24).map(|packet| (origin(0, 7), packet.to_vec())).collect();
        expected.push((origin(0xb8, Origin::HOPS), single));
        assert_eq!(given, expected);
        assert_eq!(inbox.damaged(), 0);
    }
}
