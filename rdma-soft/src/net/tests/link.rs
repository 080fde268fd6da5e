//! Batching of packets into messages, and errors of the kernel when it sends them.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::slice;
use std::sync::Mutex;

use super::*;
use crate::faults::Faults;
use crate::net::shm::ShmSender;
use crate::net::socket::Link;
use crate::wire::{IcrcSeed, Path, UDP_PORT};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Bytes of a message, and its segment size.
type Sent = (Vec<u8>, usize);

/// A link that records messages instead of sending them.
#[derive(Default)]
pub(super) struct Recorder {
    sent: Mutex<Vec<Sent>>,
    /// Results of the next calls: a number of messages, or an error. Then all messages are sent.
    results: Mutex<VecDeque<Result<usize, i32>>>,
}

impl Recorder {
    pub(super) const PEER: IpAddr = IpAddr::V4(PEER);

    fn refusing(results: &[Result<usize, i32>]) -> Recorder {
        Recorder { results: Mutex::new(results.iter().copied().collect()), ..Recorder::default() }
    }

    pub(super) fn packets(&self) -> Vec<Vec<u8>> {
        let sent = self.sent.lock().unwrap();
        sent.iter().flat_map(|(bytes, segment)| bytes.chunks(*segment).map(<[u8]>::to_vec)).collect()
    }

    pub(super) fn messages(&self) -> usize {
        self.sent.lock().unwrap().len()
    }

    /// Number of packets in each message.
    pub(super) fn segments(&self) -> Vec<usize> {
        self.sent.lock().unwrap().iter().map(|(bytes, segment)| bytes.chunks(*segment).len()).collect()
    }

    /// Whether the CRC matches with any identification.
    pub(super) fn has_valid_icrc(&self, packet: &[u8]) -> bool {
        self.identification(packet).is_some()
    }

    pub(super) fn identification(&self, packet: &[u8]) -> Option<u16> {
        IcrcSeed::new(&Path::V4 { source: ADDRESS, dest: PEER, source_port: UDP_PORT })
            .identify(0, &mut packet.to_vec())
    }
}

impl Link for Recorder {
    fn address(&self) -> IpAddr {
        ADDRESS.into()
    }

    fn interface(&self) -> u32 {
        0
    }

    fn supports_gso(&self) -> bool {
        true
    }

    fn is_local(&self, _: &IpAddr) -> bool {
        false
    }

    fn connect(&self, _: IpAddr, _: usize, _: Time) -> io::Result<ShmSender> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn disconnect(&self, _: ShmSender) {
        unreachable!("there is no connection");
    }

    unsafe fn send(&self, messages: &mut [libc::mmsghdr]) -> io::Result<usize> {
        assert!((1..=32).contains(&messages.len()));
        let limit = match self.results.lock().unwrap().pop_front() {
            Some(Err(error)) => return Err(io::Error::from_raw_os_error(error)),
            Some(Ok(limit)) => limit.min(messages.len()),
            None => messages.len(),
        };
        for message in &messages[..limit] {
            let header = message.msg_hdr;
            let mut bytes = Vec::new();
            // SAFETY: the caller's promise.
            unsafe {
                for part in slice::from_raw_parts(header.msg_iov, header.msg_iovlen) {
                    bytes.extend_from_slice(slice::from_raw_parts(part.iov_base.cast(), part.iov_len));
                }
            }
            assert!(bytes.len() <= 65_507);
            let mut segment = bytes.len();
            // SAFETY: the caller's promise.
            let control = unsafe { libc::CMSG_FIRSTHDR(&header) };
            if !control.is_null() {
                // SAFETY: `cmsg_len` says that two bytes follow the header. A reference would cover only the header, so use raw
                // pointers.
                unsafe {
                    let libc::cmsghdr { cmsg_len, cmsg_level, cmsg_type, .. } = *control;
                    assert_eq!((cmsg_level, cmsg_type), (libc::SOL_UDP, libc::UDP_SEGMENT));
                    assert_eq!(cmsg_len, libc::CMSG_LEN(2) as usize);
                    segment = libc::CMSG_DATA(control).cast::<u16>().read_unaligned().into();
                }
                assert!(segment < bytes.len() && bytes.len().div_ceil(segment) <= 64);
            }
            self.sent.lock().unwrap().push((bytes, segment));
        }
        Ok(limit)
    }
}

/// Sends packets of these lengths through `link`. Flushes once before `between` and once after it.
fn sent_by(link: &Recorder, lens: &[usize], between: impl FnOnce(&mut Outbox)) {
    let mut outbox = Outbox::new(Faults::default());
    for (psn, len) in (0..).zip(lens) {
        push(&mut outbox, link, Recorder::PEER, psn, *len, Time(0));
    }
    outbox.flush(link, Time(0));
    between(&mut outbox);
    outbox.flush(link, Time(0));
    assert!(!outbox.is_blocked());
}

fn numbers(link: &Recorder) -> Vec<u32> {
    link.packets().iter().map(|packet| parse_checked(packet.into()).0).collect()
}

#[test]
fn packets_of_one_size_and_a_last_shorter_one_share_a_message() {
    let link = Recorder::default();
    sent_by(&link, &[300, 300, 200, 400, 0, 100], |_| {});
    assert_eq!(link.segments(), [3, 2, 1]);
    assert_eq!(numbers(&link), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_message_has_at_most_64_packets_and_fits_a_datagram() {
    const COUNT: usize = if cfg!(miri) { 66 } else { 130 };
    for (len, most) in [(LONG, 65_507 / (12 + 1024 + 4)), (0, 64)] {
        let link = Recorder::default();
        sent_by(&link, &[len; COUNT], |_| {});
        let expected: Vec<usize> = (0..COUNT).step_by(most).map(|first| most.min(COUNT - first)).collect();
        assert_eq!(link.segments(), expected, "{len}");
    }
}

#[test]
fn an_identification_is_the_index_in_the_message() {
    let link = Recorder::default();
    sent_by(&link, &[LONG, LONG, LONG, 10, 20], |_| {});
    let found: Vec<_> = link.packets().iter().map(|packet| link.identification(packet)).collect();
    assert_eq!(found, [Some(0), Some(1), Some(2), Some(3), Some(0)]);
}

#[test]
fn a_full_batch_is_flushed_automatically() {
    let link = Recorder::default();
    let lens: Vec<usize> = (0..if cfg!(miri) { 70 } else { 3000 }).map(|at| (at * 37) % 500).collect();
    sent_by(&link, &lens, |_| {});
    assert_eq!(numbers(&link), (0..lens.len() as u32).collect::<Vec<_>>());
}

#[test]
fn packets_that_the_socket_refuses_are_sent_later_in_order() {
    for busy in [libc::EAGAIN, libc::ENOBUFS] {
        let link = Recorder::refusing(&[Ok(1), Err(busy), Err(busy)]);
        sent_by(&link, &[300, 400, 500, 500, 0], |outbox| {
            assert!(outbox.is_blocked());
            assert_eq!(numbers(&link), [0]);
            outbox.flush(&link, Time(0));
            assert!(outbox.is_blocked());
            // Later packets wait as well.
            push(outbox, &link, Recorder::PEER, 5, LONG, Time(0));
            outbox.flush(&link, Time(0));
            assert!(!outbox.is_blocked());
        });
        assert_eq!(numbers(&link), [0, 1, 2, 3, 4, 5]);
        assert_eq!(link.segments(), [1, 1, 3, 1]);
    }
}

#[test]
fn an_unreachable_destination_loses_only_its_own_packets() {
    for error in [libc::EMSGSIZE, libc::ENETUNREACH, libc::EPERM, libc::ECONNREFUSED, libc::EINVAL] {
        let link = Recorder::refusing(&[Ok(1), Err(error)]);
        sent_by(&link, &[300, 400, 500], |outbox| assert!(!outbox.is_blocked()));
        assert_eq!(numbers(&link), [0, 2], "{error}");
    }
}

#[test]
fn packets_are_dropped_if_the_kernel_stays_out_of_memory() {
    let link = Recorder::refusing(&[Err(libc::ENOBUFS); 101]);
    sent_by(&link, &[300], |outbox| {
        let mut flushes = 0;
        while outbox.is_blocked() {
            outbox.flush(&link, Time(0));
            flushes += 1;
        }
        assert!(flushes > 50, "{flushes}");
    });
    assert_eq!(link.messages(), 0);
}

#[test]
fn without_gso_packets_are_sent_one_by_one() {
    for (error, later) in [(libc::EIO, vec![1, 1]), (libc::EINVAL, vec![2])] {
        let link = Recorder::refusing(&[Err(error), Err(error)]);
        sent_by(&link, &[LONG, LONG, 9], |outbox| {
            assert_eq!(link.segments(), [1, 1, 1]);
            let identifications: Vec<_> = link.packets().iter().map(|packet| link.identification(packet)).collect();
            assert_eq!(identifications, [Some(0); 3]);
            (3..5).for_each(|psn| push(outbox, &link, Recorder::PEER, psn, LONG, Time(0)));
            outbox.flush(&link, Time(0));
            assert_eq!(link.segments()[3..], later);
        });
        assert_eq!(numbers(&link), [0, 1, 2, 3, 4]);
    }
}
