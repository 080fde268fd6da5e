//! Shared helpers: the device under test, time limits, child processes, connected queue pairs.

pub(crate) mod child;
pub(crate) mod interposer;
pub(crate) mod lab;
pub(crate) mod link;
pub(crate) mod miri;
#[cfg(not(miri))]
pub(crate) mod network;
#[cfg(not(miri))]
pub(crate) mod own_device;
pub(crate) mod peer;
pub(crate) mod program;
pub(crate) mod random;
pub(crate) mod watchdog;

use std::fmt::Debug;
use std::ops::Deref;
use std::time::{Duration, Instant};

use rdma_safe::address::GidEntry;
use rdma_safe::{Buffer, Context, Device, Endpoint, EndpointBuilder, PortState, ProtectionDomain, soft};

use watchdog::Watchdog;

/// Longest wait for an event that must happen. Only a test that hangs reaches it.
///
/// It is longer under Miri, whose clock advances with each step of the program.
pub(crate) const DEADLINE: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 60 });

/// Returns `natively`, or the smaller number `under_miri` when Miri runs the test.
pub(crate) const fn rounds(natively: u64, under_miri: u64) -> u64 {
    if cfg!(miri) { under_miri } else { natively }
}

/// The device under test, with a watchdog that aborts the process if the test hangs.
pub(crate) struct Rdma {
    context: Context,
    pub(crate) port: u8,
    pub(crate) gid: GidEntry,
    _watchdog: Watchdog,
}

/// The device under test, or `None` after printing why the test is skipped. Without another device it is soft0.
pub(crate) fn device() -> Option<Rdma> {
    let name = variable("RDMA_DEVICE");
    interposer::install();
    if soft::install_by_default() && name.is_none() {
        eprintln!("no RDMA device here: running on soft0, the software RNIC of this library");
    }
    let port = variable("RDMA_PORT").map_or(1, |port| port.parse().expect("RDMA_PORT is a number"));
    let device = match &name {
        Some(name) => Device::by_name(name),
        None => Device::first(),
    };
    let context = match device.and_then(|device| device.open()) {
        Ok(context) => context,
        // If a device is named, a skip is unexpected.
        Err(error) if name.is_some() => panic!("RDMA_DEVICE: {error}"),
        Err(error) => return skip(&error.to_string()),
    };
    let state = context.query_port(port).expect("RDMA_PORT names a port of the device").state();
    if state != PortState::ACTIVE {
        return skip(&format!("{} port {port} is in {state}, not active", context.device_name()));
    }
    let gid = match variable("RDMA_GID_INDEX") {
        Some(index) => context.gid(port, index.parse().expect("RDMA_GID_INDEX is a number")),
        None => context.recommended_gid(port),
    };
    match gid {
        Ok(gid) => Some(Rdma { context, port, gid, _watchdog: Watchdog::start() }),
        Err(error) => skip(&error.to_string()),
    }
}

/// Like [`device`], for tests of features that soft0 never supports.
pub(crate) fn device_unless_soft(reason: &str) -> Option<Rdma> {
    let rdma = device()?;
    if rdma.is_soft() {
        println!("skipped: {} {reason}", rdma.device_name());
        return None;
    }
    Some(rdma)
}

/// Like [`device`], for tests of transports that do not retransmit lost packets.
pub(crate) fn lossless_device() -> Option<Rdma> {
    device_without_faults("the network loses packets, which UC and UD do not retransmit")
}

/// Like [`device`], for tests that cannot run while `RDMA_SOFT_FAULTS` injects faults. Skipping them is never a failure.
pub(crate) fn device_without_faults(reason: &str) -> Option<Rdma> {
    let rdma = device()?;
    if rdma.loses_packets() {
        println!("skipped: {reason}");
        return None;
    }
    Some(rdma)
}

/// Like [`device_without_faults`], for tests that cannot run while `RDMA_SOFT_CHECK` checks them either.
pub(crate) fn device_without_checker(reason: &str) -> Option<Rdma> {
    let rdma = device_without_faults(reason)?;
    (!skips_when_checked("the checker allocates memory for each work request")).then_some(rdma)
}

/// Whether `RDMA_SOFT_CHECK` checks this process. Prints why the test is skipped then, which is never a failure.
pub(crate) fn skips_when_checked(reason: &str) -> bool {
    let is_checked = variable("RDMA_SOFT_CHECK").is_some_and(|value| !matches!(value.as_str(), "" | "0"));
    if is_checked {
        println!("skipped: {reason}");
    }
    is_checked
}

/// Prints why a test is skipped. Panics if `RDMA_REQUIRE_DEVICE` forbids skipping.
pub(crate) fn skip<T>(reason: &str) -> Option<T> {
    assert!(variable("RDMA_REQUIRE_DEVICE").as_deref() != Some("1"), "RDMA_REQUIRE_DEVICE is set, but {reason}");
    println!("skipped: {reason}");
    None
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Vendor of SoftRoCE.
pub(crate) const RXE: u32 = 0xff_ffff;

impl Deref for Rdma {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Rdma {
    /// Whether the device is kernel SoftRoCE, whose deviations are known.
    pub(crate) fn is_rxe(&self) -> bool {
        self.attributes().vendor_id() == RXE
    }

    /// Whether the device is SoftRoCE of kernel 6.5 or later.
    ///
    /// The tests run on kernels 6.1 and 6.12. Between the two the deviations changed one by one.
    pub(crate) fn is_newer_rxe(&self) -> bool {
        self.is_rxe() && kernel() >= (6, 5)
    }

    /// Whether the device is soft0, the software RNIC of this workspace.
    pub(crate) fn is_soft(&self) -> bool {
        self.device_name().starts_with("soft")
    }

    /// Whether the device drops, duplicates, reorders or corrupts packets on purpose.
    pub(crate) fn loses_packets(&self) -> bool {
        !self.faults().only_cm && self.loses_cm_messages()
    }

    fn faults(&self) -> soft::Faults {
        let faults = variable("RDMA_SOFT_FAULTS").filter(|_| self.is_soft());
        faults.unwrap_or_default().parse().expect("RDMA_SOFT_FAULTS can be read")
    }

    /// Whether the device reaches processes of this host by UDP, as it reaches other hosts.
    pub(crate) fn uses_udp(&self) -> bool {
        self.is_soft() && variable("RDMA_SOFT_UDP").is_some_and(|value| value == "1")
    }

    /// Whether the device treats messages of the connection manager so on purpose.
    pub(crate) fn loses_cm_messages(&self) -> bool {
        let faults = self.faults();
        [faults.drop, faults.dup, faults.reorder, faults.corrupt].iter().any(|share| *share > 0.0)
    }

    pub(crate) fn pd(&self) -> ProtectionDomain {
        self.alloc_pd().expect("a protection domain")
    }

    /// A builder for an endpoint on the port and GID of the tests.
    pub(crate) fn endpoint<'a>(&self, pd: &'a ProtectionDomain) -> EndpointBuilder<'a> {
        let builder = Endpoint::builder(pd).port(self.port).gid_index(self.gid.index);
        // Short queues take less time under Miri.
        if cfg!(miri) { builder.send_depth(16).recv_depth(16) } else { builder }
    }
}

/// Major and minor version of the running kernel.
pub(crate) fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release of the kernel");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().expect("a number"));
    (numbers.next().expect("a version"), numbers.next().expect("a patch level"))
}

/// Calls `poll` until it returns a value, for at most [`DEADLINE`].
#[track_caller]
pub(crate) fn within_deadline<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    within(DEADLINE, what, poll)
}

/// Calls `poll` until it returns a value, for at most `limit`.
#[track_caller]
pub(crate) fn within<T>(limit: Duration, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    /// Polls before each `yield_now`.
    const SPINS: u32 = 100;
    let start = Instant::now();
    loop {
        for _ in 0..SPINS {
            if let Some(value) = poll() {
                return value;
            }
            std::hint::spin_loop();
        }
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::yield_now();
    }
}

/// A buffer with these bytes.
pub(crate) fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).expect("a buffer");
    buffer.copy_from_slice(bytes);
    buffer
}

/// The error of `result`. Panics if it is `Ok`.
#[track_caller]
pub(crate) fn error_of<T: Debug, E>(result: Result<T, E>) -> E {
    match result {
        Ok(value) => panic!("succeeded with {value:?}"),
        Err(error) => error,
    }
}

/// Pseudo-random bytes that depend on `seed`.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_ne_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Numbers of sends and of receives in flight on an endpoint.
pub(crate) fn in_flight(endpoint: &Endpoint) -> (u64, u64) {
    (endpoint.sends_in_flight(), endpoint.receives_in_flight())
}
