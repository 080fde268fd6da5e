mod batch;
mod directory;
mod directory_hostile;
mod directory_peers;
mod faults;
mod group;
mod idle;
mod link;
mod loopback;
mod memory;
mod shm;
mod shm_hostile;

use std::io;
use std::net::IpAddr;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use super::socket::Link;
use super::{Origin, Outbox, Part, Run, Socket, To};
use crate::transport::Time;
use crate::wire::{Ack, Chunks, Data, Header, Operation, Packet, Psn, Syndrome, Transport};

/// Lock of the address `::1`, of which there is only one.
static IPV6_LOOPBACK: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Payload length that needs padding.
const LONG: usize = 1021;

fn header(psn: u32, payload: usize) -> Header {
    let ack = Ack { syndrome: Syndrome::ACK, msn: Psn::new(0) };
    Header {
        transport: Transport::Rc,
        operation: if payload == 0 { Operation::Acknowledge(ack) } else { Operation::ReadMiddle },
        pkey: 0xffff,
        dest_qp: 17,
        psn: Psn::new(psn),
        solicited: false,
        ack_request: false,
        migrated: true,
        congestion: (false, false),
    }
}

fn to(address: IpAddr) -> To {
    To { address, class: 0 }
}

/// Payload of packet `psn`. Copied in pieces, because Miri is slow with single bytes.
fn payload(psn: u32, len: usize) -> Vec<u8> {
    static BYTES: [u8; 512] = {
        let (mut bytes, mut at) = ([0; 512], 0);
        while at < bytes.len() {
            bytes[at] = (at * 7) as u8;
            at += 1;
        }
        bytes
    };
    let mut payload = BYTES[psn as usize * 13 % 256..][..256].repeat(len.div_ceil(256));
    payload.truncate(len);
    payload
}

fn part(bytes: &[u8]) -> Part {
    Part { address: bytes.as_ptr(), len: bytes.len(), is_exposed: false }
}

/// Checks header and payload of a packet. Returns its number and its payload length.
fn parse_checked(datagram: Data<'_>) -> (u32, usize) {
    let packet = Packet::parse(datagram).unwrap();
    let psn = packet.header.psn.get();
    assert_eq!(packet.header, header(psn, packet.payload.len()));
    assert_eq!(packet.payload.to_vec(), payload(psn, packet.payload.len()), "{psn}");
    (psn, packet.payload.len())
}

/// Passes on packets one by one.
fn each_packet(mut each: impl FnMut(Origin, Data<'_>)) -> impl FnMut(Origin, Chunks<'_>) {
    move |origin, packets| packets.for_each(|packet| each(origin, packet))
}

/// Sends packets of these lengths, numbered from zero.
fn send(outbox: &mut Outbox, socket: &Socket, to: IpAddr, lens: &[usize], now: Time) {
    for (psn, len) in (0..).zip(lens) {
        push(outbox, socket, to, psn, *len, now);
    }
    outbox.flush(socket, now);
}

/// Adds a packet without flushing.
fn push(outbox: &mut Outbox, link: &impl Link, to: IpAddr, psn: u32, len: usize, now: Time) {
    let payload = payload(psn, len);
    let (mut headers, parts) = (header(psn, len).encode(len), [part(&payload)]);
    // SAFETY: the payload is valid during the call, which copies it.
    unsafe { outbox.push(link, self::to(to), Run::new(&mut headers, &parts, len, 1), now) };
}

/// Locked for writing while a process is started.
static PROCESSES: RwLock<()> = RwLock::new(());

/// Prevents that this process starts another one, until the result is dropped.
///
/// A new process holds all descriptors of this one until it executes its program. A socket that is closed meanwhile stays open.
pub(super) fn without_new_processes() -> RwLockReadGuard<'static, ()> {
    PROCESSES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process, when no test needs [`without_new_processes`].
fn spawn(command: &mut Command) -> io::Result<Child> {
    let _lock = PROCESSES.write().unwrap_or_else(PoisonError::into_inner);
    command.spawn()
}

/// Runs a command and returns its output.
pub(super) fn output(command: &mut Command) -> io::Result<Output> {
    spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?.wait_with_output()
}

/// Set in a process that [`in_own_process`] has started.
const OWN_PROCESS: &str = "RDMA_SOFT_TEST_IN_OWN_PROCESS";

/// Runs a test in a new process, which runs only this test. `name` is its path after `net::tests::`.
fn in_own_process(name: &str, test: impl FnOnce()) {
    if std::env::var_os(OWN_PROCESS).is_some() {
        return test();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&*format!("net::tests::{name}"), "--exact", "--test-threads=1"]).env(OWN_PROCESS, "1");
    let output = output(&mut command).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

/// Number of open descriptors of this process.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Whether a descriptor is readable.
fn is_readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the array has one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Limits the number of descriptors of this process (`RLIMIT_NOFILE`), at most to the hard limit. Returns the limit before.
fn limit_descriptors(most: libc::rlim_t) -> libc::rlim_t {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for writes, and then for reads.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let new = libc::rlimit { rlim_cur: most.min(limit.rlim_max), ..limit };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new), 0);
    }
    limit.rlim_cur
}

/// Makes all further descriptors of this process fail. Returns the limit before.
fn exhaust_descriptors() -> libc::rlim_t {
    use std::os::fd::AsRawFd;
    // The lowest free number becomes the limit.
    let lowest_free = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    limit_descriptors(lowest_free as libc::rlim_t)
}
