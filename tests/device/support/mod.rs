//! What the tests have in common: the device, time limits, child processes, connected ends.

pub(crate) mod child;
pub(crate) mod lab;
pub(crate) mod link;
pub(crate) mod own_device;
pub(crate) mod peer;
pub(crate) mod program;
pub(crate) mod watchdog;

use std::fmt::Debug;
use std::ops::Deref;
use std::time::{Duration, Instant};

use rdma_safe::{Context, Device, Endpoint, EndpointBuilder, GidEntry, PortState, ProtectionDomain, soft};

use watchdog::Watchdog;

/// Longest wait for an event that must happen. It only ends a test that hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The device under test. It ends the process when the test that holds it does not end.
pub(crate) struct Rdma {
    context: Context,
    pub(crate) port: u8,
    pub(crate) gid: GidEntry,
    _watchdog: Watchdog,
}

/// The device under test, or `None` after having said why the test is skipped. It is soft0 where there is no other.
pub(crate) fn device() -> Option<Rdma> {
    let name = variable("RDMA_DEVICE");
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
        // Who names a device does not want its tests skipped.
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

/// As [`device`], for tests of connections by address. That soft0 has none is no failure anywhere: `cm_refused` sees to it.
pub(crate) fn device_with_cm() -> Option<Rdma> {
    device_unless_soft("has no connection manager")
}

/// As [`device`], for tests of what soft0 cannot have, wherever it runs.
pub(crate) fn device_unless_soft(reason: &str) -> Option<Rdma> {
    let rdma = device()?;
    if rdma.is_soft() {
        println!("skipped: {} {reason}", rdma.device_name());
        return None;
    }
    Some(rdma)
}

/// As [`device`], for tests of services that do not send again what gets lost, where that is to arrive.
pub(crate) fn lossless_device() -> Option<Rdma> {
    device_without_faults("the network loses packets, which UC and UD do not send again")
}

/// As [`device`], for tests that cannot be had while `RDMA_SOFT_FAULTS` makes trouble, which is what was asked for: no failure.
pub(crate) fn device_without_faults(reason: &str) -> Option<Rdma> {
    let rdma = device()?;
    if rdma.loses_packets() {
        println!("skipped: {reason}");
        return None;
    }
    Some(rdma)
}

/// Says why a test is skipped; fails it where skipping is not allowed.
pub(crate) fn skip<T>(reason: &str) -> Option<T> {
    assert!(variable("RDMA_REQUIRE_DEVICE").as_deref() != Some("1"), "RDMA_REQUIRE_DEVICE is set, but {reason}");
    println!("skipped: {reason}");
    None
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Deref for Rdma {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Rdma {
    /// Whether it is kernel SoftRoCE, whose deviations are known.
    pub(crate) fn is_rxe(&self) -> bool {
        self.attributes().vendor_id() == 0xff_ffff
    }

    /// Whether it is SoftRoCE as of kernel 6.12, and not as of 6.1. Between the two the deviations changed one by one.
    pub(crate) fn is_newer_rxe(&self) -> bool {
        self.is_rxe() && kernel() >= (6, 5)
    }

    /// Whether it is the software RNIC of this workspace.
    pub(crate) fn is_soft(&self) -> bool {
        self.device_name().starts_with("soft")
    }

    /// Whether packets get lost, or change their order, on purpose.
    pub(crate) fn loses_packets(&self) -> bool {
        let faults = variable("RDMA_SOFT_FAULTS").filter(|_| self.is_soft());
        let faults: soft::Faults = faults.unwrap_or_default().parse().expect("RDMA_SOFT_FAULTS can be read");
        [faults.drop, faults.dup, faults.reorder, faults.corrupt].iter().any(|share| *share > 0.0)
    }

    pub(crate) fn pd(&self) -> ProtectionDomain {
        self.alloc_pd().expect("a protection domain")
    }

    /// An endpoint's builder with the port and GID of the tests.
    pub(crate) fn endpoint<'a>(&self, pd: &'a ProtectionDomain) -> EndpointBuilder<'a> {
        Endpoint::builder(pd).port(self.port).gid_index(self.gid.index)
    }
}

/// The version of the kernel.
pub(crate) fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release of the kernel");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().expect("a number"));
    (numbers.next().expect("a version"), numbers.next().expect("a patch level"))
}

/// Calls `poll` until it returns something.
#[track_caller]
pub(crate) fn within_deadline<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    within(DEADLINE, what, poll)
}

/// Calls `poll` until it returns something, at most for `limit`.
#[track_caller]
pub(crate) fn within<T>(limit: Duration, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    /// Before others that wait get the processor.
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

/// The error of `result`, which must be one.
#[track_caller]
pub(crate) fn error_of<T: Debug, E>(result: Result<T, E>) -> E {
    match result {
        Ok(value) => panic!("succeeded with {value:?}"),
        Err(error) => error,
    }
}

/// Bytes that differ from one position, and from one `seed`, to the next.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(step).collect()
}

/// Sends and receives of an endpoint that are posted and not done.
pub(crate) fn in_flight(endpoint: &Endpoint) -> (u64, u64) {
    (endpoint.sends_in_flight(), endpoint.receives_in_flight())
}
