//! Received packets.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::{io, mem, ptr};

use super::Origin;
use super::batch::path;
use super::group::Group;
use super::shm::{Crc, split_prefix};
use super::shm_receivers::ShmReceivers;
use super::sockaddr::SockAddr;
use super::socket::{Socket, receive_messages};
use crate::wire::{Chunks, Data, IcrcSeed, Path, UDP_PORT};

/// Maximum messages per system call.
const MESSAGES: usize = 16;

/// Buffer size, larger than any message.
const BUFFER: usize = 64 << 10;

/// Interval, in polls, of the checks of all sources while packets arrive over UDP. The other polls check only UDP.
const FULL_CHECK_UDP: u32 = 8;
/// The same while packets arrive through shared memory, whose check takes no system call.
const FULL_CHECK_SHM: u32 = 64;

/// Maximum messages to take from one peer before the next peer is served.
const MAX_PER_PEER: usize = 16;

/// Maximum messages to take from all peers before other threads get the device.
const MAX_SHM_MESSAGES: usize = 64;

/// Bytes of control messages: segment size, traffic class and hop limit.
const CONTROL: usize = 96;

/// Bytes of packets with checked CRCs that are passed on together. They are still in the first-level cache.
const CHECKED_BYTES: usize = 8 << 10;

/// Aligned memory for control messages.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// Receive buffers, and the connections of same-host peers.
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    headers: Box<[libc::mmsghdr; MESSAGES]>,
    parts: Box<[libc::iovec; MESSAGES]>,
    names: Box<[SockAddr; MESSAGES]>,
    controls: Box<[Control; MESSAGES]>,
    receivers: ShmReceivers,
    /// Path of the last message, with its CRC seed.
    icrc_seed: Option<(Path, IcrcSeed)>,
    /// Index of the peer that was served last.
    last_receiver: usize,
    request: Request,
    /// Source of the last packets.
    last_source: Source,
    /// Number of polls.
    polls: u32,
    /// Whether the last call has checked all sources and left nothing.
    is_drained: bool,
    damaged: u64,
}

/// How many messages to request by a system call: as many as arrive together.
///
/// A slot of `recvmmsg(2)` that stays empty costs time, and so does a further call.
#[derive(Debug)]
struct Request {
    messages: usize,
    /// Whether the last call, for any socket, has received some.
    has_received: bool,
}

impl Request {
    const FIRST: Request = Request { messages: 1, has_received: false };

    /// Notes how many messages a call has received.
    fn note(&mut self, received: usize) {
        let had_received = mem::replace(&mut self.has_received, received != 0);
        // After an empty call, a full one may have taken all. After another one, more messages are probably waiting.
        if received == self.messages && had_received {
            self.messages = MESSAGES.min(4 * received);
        } else if received != 0 {
            self.messages = received;
        }
    }
}

/// Sources that `poll(2)` has reported as readable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Readable {
    /// The UDP socket.
    pub(crate) udp: bool,
    /// The descriptor of same-host peers.
    pub(crate) shm: bool,
}

/// Source of packets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The UDP socket.
    Udp,
    /// Shared memory of same-host peers.
    Shm,
}

// SAFETY: the pointers refer only to memory that the inbox owns.
unsafe impl Send for Inbox {}

impl Inbox {
    /// Allocates the buffers.
    pub(crate) fn new() -> Inbox {
        // SAFETY: all fields may be zero.
        let header = unsafe { mem::zeroed::<libc::mmsghdr>() };
        Inbox {
            bytes: vec![0; MESSAGES * BUFFER].into_boxed_slice(),
            headers: Box::new([header; MESSAGES]),
            parts: Box::new([libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MESSAGES]),
            names: Box::new([SockAddr::ZERO; MESSAGES]),
            controls: Box::new([Control([0; CONTROL]); MESSAGES]),
            receivers: ShmReceivers::default(),
            icrc_seed: None,
            last_receiver: 0,
            request: Request::FIRST,
            last_source: Source::Udp,
            polls: 0,
            is_drained: false,
            damaged: 0,
        }
    }

    /// Number of packets with a wrong CRC, and of malformed messages.
    #[cfg(test)]
    pub(crate) fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Number of same-host peers that are connected.
    #[cfg(test)]
    pub(super) fn shm_peers(&self) -> usize {
        self.receivers.count()
    }

    /// Whether the last call has checked all sources and left nothing.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained
    }

    /// Receives from all sources. Passes valid packets of one origin together to `handle`.
    ///
    /// Returns whether anything arrived. More may then be waiting.
    pub(crate) fn receive(&mut self, socket: &Socket, mut handle: impl FnMut(Origin, Chunks<'_>)) -> bool {
        self.is_drained = true;
        self.receive_all(socket, &mut handle)
    }

    /// Like [`receive`](Inbox::receive), for a caller that polls continuously. Checks idle sources only from time to time.
    pub(crate) fn poll(&mut self, socket: &Socket, mut handle: impl FnMut(Origin, Chunks<'_>)) -> bool {
        self.polls = self.polls.wrapping_add(1);
        let interval = if self.last_source == Source::Udp { FULL_CHECK_UDP } else { FULL_CHECK_SHM };
        self.is_drained = self.polls % interval == 0;
        if self.is_drained {
            return self.receive_all(socket, &mut handle);
        }
        match self.last_source {
            Source::Udp => self.receive_udp(socket, &mut handle),
            Source::Shm => self.receive_shm(socket, &mut handle),
        }
    }

    /// Whether each call of [`poll`](Inbox::poll) reads the UDP socket, since the last packets came from there.
    pub(crate) fn polls_udp(&self) -> bool {
        self.last_source == Source::Udp
    }

    /// Like [`receive`](Inbox::receive), but only for sources that `poll(2)` has reported as readable.
    pub(crate) fn receive_readable(
        &mut self,
        socket: &Socket,
        readable: Readable,
        mut handle: impl FnMut(Origin, Chunks<'_>),
    ) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.is_drained = false;
        let has_udp = readable.udp && self.receive_udp(socket, &mut handle);
        if !readable.shm {
            return has_udp;
        }
        let mut has_shm = self.receive_shm(socket, &mut handle);
        // Without packets, a peer has connected, closed a connection, or made room, unless a peer has woken this thread for packets
        // that another one took. While packets arrive, check for that now and then. An edge-triggered program may then miss a new
        // connection, which the server accepts at its next scan.
        if !has_shm && !self.was_woken() || self.polls % FULL_CHECK_UDP == 0 {
            if let Some(shm) = socket.shm() {
                self.receivers.handle_events(shm);
                has_shm |= self.receive_shm(socket, &mut handle);
            }
        }
        has_shm | has_udp
    }

    /// Receives from all sources.
    fn receive_all(&mut self, socket: &Socket, handle: &mut impl FnMut(Origin, Chunks<'_>)) -> bool {
        if let Some(shm) = socket.shm() {
            self.receivers.handle_events(shm);
        }
        // UDP first: a peer that has just switched to shared memory sent its UDP packets earlier.
        let has_udp = self.receive_udp(socket, handle);
        self.receive_shm(socket, handle) | has_udp
    }

    /// Receives from the UDP socket.
    fn receive_udp(&mut self, socket: &Socket, handle: &mut impl FnMut(Origin, Chunks<'_>)) -> bool {
        let has_received = self.receive_by(socket.address(), handle, |messages| {
            // SAFETY: `receive_by` points them to memory of this inbox.
            unsafe { socket.receive(messages) }
        });
        if has_received {
            self.last_source = Source::Udp;
        }
        has_received
    }

    /// Receives from the shared memory of same-host peers.
    fn receive_shm(&mut self, socket: &Socket, handle: &mut impl FnMut(Origin, Chunks<'_>)) -> bool {
        let Some(shm) = socket.shm() else { return false };
        let mut left = MAX_SHM_MESSAGES;
        for _ in 0..self.receivers.count() {
            if left == 0 {
                self.is_drained = false;
                break;
            }
            // Count down, because removing a peer moves those after it.
            let count = self.receivers.count();
            self.last_receiver = self.last_receiver.min(count).checked_sub(1).unwrap_or(count.saturating_sub(1));
            let end = left.saturating_sub(MAX_PER_PEER);
            let Inbox { receivers, bytes, damaged, last_receiver, icrc_seed, .. } = self;
            let mut handle = |address, message: Data<'_>| match shm_message(address, message, bytes) {
                Some(message) => *damaged += message.deliver(socket.address(), icrc_seed, handle),
                None => *damaged += 1,
            };
            while receivers.take(*last_receiver, shm, &mut handle).is_some() {
                left -= 1;
                if left == end {
                    self.is_drained = false;
                    break;
                }
            }
        }
        let has_received = left < MAX_SHM_MESSAGES;
        if has_received {
            self.last_source = Source::Shm;
        }
        has_received
    }

    /// Whether a same-host peer has made room for packets to it, or has closed their connection.
    #[inline]
    pub(crate) fn has_ready_senders(&self) -> bool {
        self.receivers.has_ready_senders()
    }

    /// Takes the numbers of these connections, for [`Outbox::handle_ready_sender`](super::Outbox::handle_ready_sender).
    pub(crate) fn take_ready_senders(&mut self) -> impl Iterator<Item = usize> + '_ {
        self.receivers.take_ready_senders()
    }

    /// Whether a same-host peer has woken the thread that waits at [`Socket::shm_fd`], because of a message.
    pub(crate) fn was_woken(&self) -> bool {
        self.receivers.was_woken()
    }

    /// Asks same-host peers to wake the thread that waits at [`Socket::shm_fd`] for messages. Returns `false` if there is one
    /// already.
    ///
    /// Only that thread may call this.
    pub(crate) fn arm_wakeup(&mut self) -> bool {
        self.receivers.arm()
    }

    /// Asks same-host peers to stop waking this process. Undoes [`arm_wakeup`](Inbox::arm_wakeup).
    pub(crate) fn disarm_wakeup(&mut self) {
        self.receivers.disarm();
    }

    /// Like [`receive`](Inbox::receive), for a multicast group.
    pub(crate) fn receive_group(&mut self, group: &Group, mut handle: impl FnMut(Origin, Chunks<'_>)) -> bool {
        self.receive_by(group.address(), &mut handle, |messages| {
            // SAFETY: `receive_by` points them to memory of this inbox.
            unsafe { receive_messages(group.fd().as_raw_fd(), messages) }
        })
    }

    /// Receives datagrams for the address `to` by `receive`, which returns how many messages it has filled.
    ///
    /// The messages point to the names, parts and control messages, and the parts point to the buffers, all with their actual
    /// lengths. The inbox owns all of them and does not move them.
    fn receive_by(
        &mut self,
        to: IpAddr,
        handle: &mut impl FnMut(Origin, Chunks<'_>),
        receive: impl FnOnce(&mut [libc::mmsghdr]) -> io::Result<usize>,
    ) -> bool {
        self.set_up_headers();
        let count = receive(&mut self.headers[..self.request.messages]).unwrap_or(0);
        self.is_drained &= count < self.request.messages;
        // SAFETY: `receive` has filled that many messages.
        unsafe { self.deliver(count, to, handle) };
        self.request.note(count);
        count > 0
    }

    /// Points the next messages to their buffers.
    fn set_up_headers(&mut self) {
        // Split the buffers once. Indexing `bytes` for each message would invalidate the pointers taken before.
        for (at, buffer) in self.bytes.chunks_exact_mut(BUFFER).enumerate().take(self.request.messages) {
            self.parts[at] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: BUFFER };
            let header = &mut self.headers[at].msg_hdr;
            header.msg_iov = &raw mut self.parts[at];
            header.msg_iovlen = 1;
            header.msg_name = (&raw mut self.names[at]).cast();
            header.msg_namelen = mem::size_of::<SockAddr>() as _;
            header.msg_control = (&raw mut self.controls[at]).cast();
            header.msg_controllen = CONTROL as _;
        }
    }

    /// Delivers the packets of the first `count` messages, which were sent to the address `to`.
    ///
    /// # Safety
    /// The kernel has filled that many messages.
    unsafe fn deliver(&mut self, count: usize, to: IpAddr, handle: &mut impl FnMut(Origin, Chunks<'_>)) {
        for at in 0..count {
            let header = &self.headers[at];
            let message = &mut self.bytes[at * BUFFER..][..header.msg_len as usize];
            let is_whole = header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            // SAFETY: the caller's promise. The control messages are in memory of this inbox.
            match unsafe { udp_message(&header.msg_hdr, &self.names[at], message) }.filter(|_| is_whole) {
                Some(message) => self.damaged += message.deliver(to, &mut self.icrc_seed, handle),
                None => self.damaged += 1,
            }
        }
    }
}

/// A received message: packets of `segment` bytes each. The last may be shorter.
struct Message<'a> {
    origin: Origin,
    port: u16,
    segment: usize,
    packets: Packets<'a>,
}

/// Packets one after the other.
enum Packets<'a> {
    /// They are in private memory, so that they still match their CRCs when they are handled.
    WithCrc(&'a mut [u8]),
    /// The four bytes in place of each CRC are ignored.
    WithoutCrc(Data<'a>),
}

impl Message<'_> {
    /// Passes the packets with valid CRCs to `handle`. Returns the number of other packets. `last` caches a CRC seed.
    fn deliver(
        self,
        to: IpAddr,
        last: &mut Option<(Path, IcrcSeed)>,
        handle: &mut impl FnMut(Origin, Chunks<'_>),
    ) -> u64 {
        let Some(path) = path(self.origin.address, self.port, to) else { return 0 };
        let (packets, segment) = match self.packets {
            Packets::WithCrc(packets) => (packets, self.segment),
            Packets::WithoutCrc(packets) => {
                handle(self.origin, packets.chunks(self.segment));
                return 0;
            }
        };
        let icrc_seed = match last {
            Some((of, icrc_seed)) if *of == path => *icrc_seed,
            _ => last.insert((path, IcrcSeed::new(&path))).1,
        };
        let origin = self.origin;
        let mut pass = |packets: &[u8]| {
            if !packets.is_empty() {
                handle(origin, Data::from(packets).chunks(segment));
            }
        };
        // The identifications of a message's packets count up, usually from zero.
        let (mut identification, mut damaged) = (0, 0);
        let (mut start, mut at) = (0, 0);
        while at < packets.len() {
            let end = packets.len().min(at + segment);
            match icrc_seed.identify(identification, &mut packets[at..end]) {
                Some(found) => identification = found.wrapping_add(1),
                None => {
                    pass(&packets[start..at]);
                    damaged += 1;
                    start = end;
                }
            }
            if end - start >= CHECKED_BYTES {
                pass(&packets[start..end]);
                start = end;
            }
            at = end;
        }
        pass(&packets[start..]);
        damaged
    }
}

/// # Safety
/// The control messages are valid, as the kernel has written them.
unsafe fn udp_message<'a>(header: &libc::msghdr, name: &SockAddr, message: &'a mut [u8]) -> Option<Message<'a>> {
    let (address, port) = name.get()?;
    // SAFETY: the caller's promise.
    let ControlData { segment, class, hops } = unsafe { parse_control(header) };
    let segment = segment.unwrap_or(message.len()).max(1);
    Some(Message { origin: Origin { address, class, hops }, port, segment, packets: Packets::WithCrc(message) })
}

/// A message of a peer on this host. Packets with CRCs are copied to `private`.
fn shm_message<'a>(address: IpAddr, message: Data<'a>, private: &'a mut [u8]) -> Option<Message<'a>> {
    let (segment, class, crc, packets) = split_prefix(message)?;
    let packets = match crc {
        Crc::Omitted => Packets::WithoutCrc(packets),
        Crc::Invariant => {
            let copy = private.get_mut(..packets.len())?;
            packets.copy_to(copy);
            Packets::WithCrc(copy)
        }
    };
    Some(Message { origin: Origin { address, class, hops: Origin::HOPS }, port: UDP_PORT, segment, packets })
}

/// Control data of a message.
struct ControlData {
    /// Segment size (GRO), if the message has several packets.
    segment: Option<usize>,
    class: u8,
    hops: u8,
}

/// # Safety
/// The control messages are valid, as the kernel has written them.
unsafe fn parse_control(header: &libc::msghdr) -> ControlData {
    let mut control = ControlData { segment: None, class: 0, hops: Origin::HOPS };
    // SAFETY: the caller's promise.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: the caller's promise. The kernel writes a byte for `IP_TOS` and an `int` for the others.
        unsafe {
            let libc::cmsghdr { cmsg_level, cmsg_type, .. } = *next;
            let value = libc::CMSG_DATA(next);
            let number = || value.cast::<libc::c_int>().read_unaligned();
            match (cmsg_level, cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    control.segment = usize::try_from(number()).ok().filter(|size| *size > 0)
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => control.class = *value,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => control.class = number() as u8,
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    control.hops = number() as u8;
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(header, next);
        }
    }
    control
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::net::Run;
    use crate::net::batch::append;
    use crate::net::mmsg::put_cmsg;
    use crate::wire::ICRC;

    const HERE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    /// Consecutive packets with `len` bytes of headers each.
    fn packets(count: u16, len: usize) -> Vec<u8> {
        let icrc_seed = IcrcSeed::new(&path(PEER.into(), UDP_PORT, HERE.into()).unwrap());
        let mut bytes = Vec::new();
        for number in 0..count {
            // SAFETY: there is no payload.
            unsafe { append(&mut bytes, &icrc_seed, number, &mut Run::new(&mut vec![number as u8; len], &[], 0, 1)) };
        }
        bytes
    }

    /// Writes a message through its raw pointers, as the kernel does.
    ///
    /// # Safety
    /// All pointers of the message are valid.
    unsafe fn write(message: &mut libc::mmsghdr, bytes: &[u8], controls: &[((libc::c_int, libc::c_int), &[u8])]) {
        let header = &mut message.msg_hdr;
        let mut control = [0; CONTROL];
        let len = controls.iter().fold(0, |len, (kind, value)| len + put_cmsg(&mut control[len..], *kind, value));
        // SAFETY: the caller's promise. The assertion checks that there is room.
        unsafe {
            let part = *header.msg_iov;
            assert!(bytes.len() <= part.iov_len && len <= header.msg_controllen as usize);
            part.iov_base.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            header.msg_name.cast::<SockAddr>().write(SockAddr::new(PEER.into(), 0));
            header.msg_control.cast::<u8>().copy_from_nonoverlapping(control.as_ptr(), len);
        }
        header.msg_controllen = len as _;
        message.msg_len = bytes.len() as _;
    }

    #[test]
    fn a_call_requests_as_many_messages_as_arrive_together() {
        let mut request = Request::FIRST;
        // One at a time, then two at a time, then many.
        for (received, next) in
            [(0, 1), (1, 1), (0, 1), (1, 1), (1, 4), (0, 4), (2, 2), (0, 2), (2, 2), (2, 8), (8, 16), (3, 3)]
        {
            request.note(received);
            assert_eq!(request.messages, next, "after {received}");
        }
    }

    #[test]
    fn damaged_packets_are_left_out_of_their_message() {
        const PACKETS: usize = 24;
        const GROUP: usize = 16;
        const LEN: usize = CHECKED_BYTES / GROUP;
        for damaged in [&[][..], &[0], &[7], &[15], &[16], &[17, 18, 23], &[0, 1, 2, 16]] {
            let mut bytes = packets(PACKETS as u16, LEN - ICRC);
            damaged.iter().for_each(|at| bytes[LEN * at + 20] ^= 1);
            let message = Message {
                origin: Origin { address: PEER.into(), class: 0, hops: Origin::HOPS },
                port: UDP_PORT,
                segment: LEN,
                packets: Packets::WithCrc(&mut bytes),
            };
            let mut groups: Vec<Vec<usize>> = Vec::new();
            let handle = &mut |_, packets: Chunks<'_>| {
                groups.push(packets.map(|packet| packet.to_vec()[0].into()).collect());
            };
            assert_eq!(message.deliver(HERE.into(), &mut None, handle), damaged.len() as u64);
            assert!(groups.iter().all(|group| (1..=GROUP).contains(&group.len())), "{groups:?}");
            assert_eq!(groups.concat(), (0..PACKETS).filter(|at| !damaged.contains(at)).collect::<Vec<_>>());
            assert!(!damaged.is_empty() || groups.len() == 2, "{groups:?}");
        }
    }

    #[test]
    fn messages_are_split_into_packets_with_their_control_data() {
        let mut inbox = Inbox::new();
        inbox.request.messages = 2;
        inbox.set_up_headers();
        let (segmented, single) = (packets(3, 20), packets(1, 40));
        let [segment, hops] = [24, 7].map(libc::c_int::to_ne_bytes);
        let [first, second, ..] = &mut *inbox.headers;
        // SAFETY: `set_up_headers` has pointed both messages to memory of the inbox.
        unsafe {
            let ttl = (libc::IPPROTO_IP, libc::IP_TTL);
            write(first, &segmented, &[((libc::SOL_UDP, libc::UDP_GRO), &segment), (ttl, &hops)]);
            write(second, &single, &[((libc::IPPROTO_IP, libc::IP_TOS), &[0xb8])]);
        }
        let mut delivered = Vec::new();
        // SAFETY: both messages were written above.
        unsafe {
            inbox.deliver(2, HERE.into(), &mut |origin, packets| {
                delivered.extend(packets.map(|packet| (origin, packet.to_vec())))
            })
        };
        let origin = |class, hops| Origin { address: PEER.into(), class, hops };
        let mut expected: Vec<_> = segmented.chunks(24).map(|packet| (origin(0, 7), packet.to_vec())).collect();
        expected.push((origin(0xb8, Origin::HOPS), single));
        assert_eq!(delivered, expected);
        assert_eq!(inbox.damaged(), 0);
    }
}
