//! Packets in memory: a network of the devices of one process, without sockets and interfaces.
//!
//! A device uses it where there is no network, such as under Miri. It takes and gives messages as the kernel does, with the same
//! control messages.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::{io, slice};

use super::Origin;
use super::mmsg::put_cmsg;
use super::sockaddr::SockAddr;

/// Bytes of packets that wait at one address. Packets beyond that are lost.
pub(super) const LIMIT: usize = 4 << 20;

/// Longest payload of a packet.
pub(super) const MTU: u32 = 4096;

/// An address in memory.
pub(super) struct Memory {
    address: IpAddr,
    queue: Arc<Queue>,
}

/// Messages that wait at an address.
struct Queue {
    messages: Mutex<Messages>,
    /// Holds a byte while there are messages. The server polls the other end, `ready`. Both are sockets, kept as files: Miri has
    /// no `send(2)` and `recv(2)`, which a `UnixStream` calls.
    notify: File,
    ready: File,
}

#[derive(Default)]
struct Messages {
    waiting: VecDeque<Message>,
    bytes: usize,
}

/// Packets of `segment` bytes, the last perhaps shorter.
struct Message {
    from: IpAddr,
    bytes: Vec<u8>,
    segment: usize,
    class: u8,
}

/// The addresses of this process.
static ADDRESSES: Mutex<BTreeMap<IpAddr, Weak<Queue>>> = Mutex::new(BTreeMap::new());

fn addresses() -> MutexGuard<'static, BTreeMap<IpAddr, Weak<Queue>>> {
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first free address of the range for documentation (RFC 5737), which no interface has.
fn free(taken: &BTreeMap<IpAddr, Weak<Queue>>) -> Option<IpAddr> {
    let is_free = |address: &IpAddr| taken.get(address).is_none_or(|queue| queue.strong_count() == 0);
    (1..=254).map(|last| Ipv4Addr::new(192, 0, 2, last).into()).find(is_free)
}

impl Memory {
    /// Takes an address, or a free one if it is `None`.
    ///
    /// # Errors
    /// `AddrInUse` if the address is taken or none is free; an error if no descriptors are left.
    pub(super) fn open(address: Option<IpAddr>) -> io::Result<Memory> {
        let (notify, ready) = UnixStream::pair()?;
        let [notify, ready] = [notify, ready].map(|end| File::from(OwnedFd::from(end)));
        let queue = Arc::new(Queue { messages: Mutex::default(), notify, ready });
        let mut taken = addresses();
        let address = address.or_else(|| free(&taken)).ok_or(io::ErrorKind::AddrInUse)?;
        if taken.get(&address).is_some_and(|other| other.strong_count() > 0) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        taken.insert(address, Arc::downgrade(&queue));
        Ok(Memory { address, queue })
    }

    pub(super) fn address(&self) -> IpAddr {
        self.address
    }

    /// Readable while there are messages.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.queue.ready.as_fd()
    }

    /// Sends all messages. Messages to an address that no device has are lost.
    ///
    /// # Safety
    /// All pointers of the messages are valid for reads.
    pub(super) unsafe fn send(&self, messages: &[libc::mmsghdr]) -> usize {
        for message in messages {
            // SAFETY: the caller's promise.
            let (to, message) = unsafe { self.read(&message.msg_hdr) };
            let queue = to.and_then(|to| addresses().get(&to)?.upgrade());
            if let Some(queue) = queue {
                queue.push(message);
            }
        }
        messages.len()
    }

    /// The destination of a message, and a copy of it.
    ///
    /// # Safety
    /// All pointers of the message are valid for reads.
    unsafe fn read(&self, header: &libc::msghdr) -> (Option<IpAddr>, Message) {
        let mut bytes = Vec::new();
        // SAFETY: the caller's promise.
        let to = unsafe {
            for part in slice::from_raw_parts(header.msg_iov, header.msg_iovlen as usize) {
                bytes.extend_from_slice(slice::from_raw_parts(part.iov_base.cast(), part.iov_len));
            }
            (*header.msg_name.cast::<SockAddr>()).get()
        };
        let (mut segment, mut class) = (bytes.len(), 0);
        // SAFETY: the caller's promise. The sender writes two bytes as the length of segments, and an `int` as the class.
        unsafe {
            let mut next = libc::CMSG_FIRSTHDR(header);
            while !next.is_null() {
                let libc::cmsghdr { cmsg_level, cmsg_type, .. } = *next;
                let data = libc::CMSG_DATA(next);
                match (cmsg_level, cmsg_type) {
                    (libc::SOL_UDP, libc::UDP_SEGMENT) => segment = data.cast::<u16>().read_unaligned().into(),
                    _ => class = data.cast::<libc::c_int>().read_unaligned() as u8,
                }
                next = libc::CMSG_NXTHDR(header, next);
            }
        }
        (to.map(|(address, _)| address), Message { from: self.address, bytes, segment, class })
    }

    /// Fills messages with the ones that have arrived. Returns how many were filled.
    ///
    /// # Safety
    /// All pointers of the messages are valid for writes.
    ///
    /// # Errors
    /// `WouldBlock` if no message has arrived.
    pub(super) unsafe fn receive(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
        let mut count = 0;
        for to in messages {
            let Some(message) = self.queue.pop() else { break };
            // SAFETY: the caller's promise.
            unsafe { write(to, &message) };
            count += 1;
        }
        if count > 0 { Ok(count) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

/// Writes a message as the kernel does.
///
/// # Safety
/// All pointers of the header are valid for writes.
unsafe fn write(to: &mut libc::mmsghdr, message: &Message) {
    let header = &mut to.msg_hdr;
    let (level, class, hops) = match message.from {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    let mut controls = vec![(level, class, i32::from(message.class)), (level, hops, Origin::HOPS.into())];
    if message.segment < message.bytes.len() {
        controls.push((libc::SOL_UDP, libc::UDP_GRO, message.segment as i32));
    }
    // SAFETY: the caller's promise. The message has one part, and no more is copied than fits.
    unsafe {
        let control = slice::from_raw_parts_mut(header.msg_control.cast::<u8>(), header.msg_controllen as usize);
        let mut len = 0;
        for (level, kind, value) in controls {
            len += put_cmsg(&mut control[len..], (level, kind), &value.to_ne_bytes());
        }
        header.msg_controllen = len as _;
        let part = *header.msg_iov;
        let len = message.bytes.len().min(part.iov_len);
        part.iov_base.cast::<u8>().copy_from_nonoverlapping(message.bytes.as_ptr(), len);
        header.msg_flags = if len < message.bytes.len() { libc::MSG_TRUNC } else { 0 };
        header.msg_name.cast::<SockAddr>().write(SockAddr::new(message.from, 0));
        to.msg_len = len as _;
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, message: Message) {
        let mut messages = self.lock();
        if messages.bytes + message.bytes.len() > LIMIT {
            return;
        }
        messages.bytes += message.bytes.len();
        messages.waiting.push_back(message);
        if messages.waiting.len() == 1 {
            // A stream takes one byte.
            _ = (&self.notify).write(&[0]);
        }
    }

    fn pop(&self) -> Option<Message> {
        let mut messages = self.lock();
        let message = messages.waiting.pop_front()?;
        messages.bytes -= message.bytes.len();
        if messages.waiting.is_empty() {
            // The byte is there.
            _ = (&self.ready).read(&mut [0]);
        }
        Some(message)
    }
}
