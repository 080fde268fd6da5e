//! The two hosts with their devices: rxe0 at the first one, soft0 at the second one.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::barrier::Barrier;
use crate::capture::Capture;
use crate::network::{Host, run};
use crate::program::{Program, Running};
use crate::skip;

/// Time limit for a program, including waits for the other machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(100);

/// Environment variable with the role of a process that executes a single test on the device.
const ROLE: &str = "RDMA_HOSTS_ROLE";

/// This host with its device.
pub(crate) struct Lab {
    pub(crate) host: Host,
    /// Dropped before the barrier, so the peer finds rxe0 again after that.
    _without_rxe: Option<WithoutRxe>,
    pub(crate) barrier: Barrier,
    library: String,
    /// Link-local IPv6 address of the interface.
    pub(crate) link_local: Option<String>,
    /// Port of the next exchange.
    pub(crate) port: u16,
    /// Faults of soft0: `RDMA_SOFT_FAULTS`.
    pub(crate) faults: &'static str,
}

impl Lab {
    /// Sets up the device. Prints the reason and returns `None` if there are no two hosts.
    pub(crate) fn new() -> Option<Lab> {
        let host = Host::from_env()?;
        let Ok(library) = std::env::var("RDMA_SOFT_LIBRARY") else {
            return skip("RDMA_SOFT_LIBRARY does not name librdma_soft.so");
        };
        let link_local = host.link_local();
        let without_rxe = (!host.is_first).then(|| WithoutRxe::new(&host));
        let barrier = Barrier::new(&host);
        Some(Lab { host, _without_rxe: without_rxe, barrier, library, link_local, port: 19_000, faults: "" })
    }

    pub(crate) fn has_soft(&self) -> bool {
        !self.host.is_first
    }

    pub(crate) fn device(&self) -> &'static str {
        if self.has_soft() { "soft0" } else { "rxe0" }
    }

    /// Index of the GID of the IPv4 or the IPv6 address.
    pub(crate) fn gid_index(&self, is_ipv6: bool) -> &'static str {
        // On rxe, the link-local IPv6 address comes first.
        if self.has_soft() == is_ipv6 { "1" } else { "0" }
    }

    /// Environment variables that select the device for a program.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        if !self.has_soft() {
            return Vec::new();
        }
        let mut addresses = self.host.own.clone();
        if let Some(ipv6) = &self.link_local {
            addresses = format!("{addresses},{ipv6}");
        }
        let library = || self.library.clone();
        vec![
            ("RDMA_SOFT_ADDR", addresses),
            ("LD_PRELOAD", library()),
            ("RDMA_SYS_LIBIBVERBS", library()),
            ("RDMA_SYS_LIBRDMACM", library()),
            ("RDMA_DEVICE", "soft0".to_owned()),
            ("RDMA_SOFT_FAULTS", self.faults.to_owned()),
        ]
    }

    /// Captures the packets of both hosts, on the host with soft0.
    pub(crate) fn capture(&self, name: &str) -> Option<Capture> {
        if self.has_soft() { Capture::start(&self.host, name) } else { None }
    }

    /// Starts the calling test, whose full name is `test`, in a process with the device, in another [`role`].
    ///
    /// soft0 occupies its UDP port until its process ends.
    pub(crate) fn start_in_role(&self, test: &str, role: &str) -> Running {
        let own = Program::Rust(std::env::current_exe().expect("the test's program has a path"));
        let mut environment = self.environment();
        environment.push((ROLE, role.to_owned()));
        own.start_in(&environment, &["--exact", test, "--nocapture", "--test-threads=1"])
    }

    /// Runs the calling test in a process with the device. It must pass.
    pub(crate) fn run_in_role(&self, test: &str, role: &str) {
        let mut running = self.start_in_role(test, role);
        let (status, output) = running.finish_within(2 * LIMIT);
        let output = output.replace('\n', "\n    ");
        assert!(status.success() && output.contains("1 passed"), "{test} as {role}: {status}\n    {output}");
        println!("    {output}");
    }
}

/// The role of this process if [`Lab::start_in_role`] has started it.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A host whose rxe0 and its kernel module are removed until this is dropped.
struct WithoutRxe {
    interface: String,
}

impl WithoutRxe {
    fn new(host: &Host) -> WithoutRxe {
        run("rdma", &["link", "delete", "rxe0"]);
        let without = WithoutRxe { interface: host.interface.clone() };
        run("modprobe", &["--remove", "rdma_rxe"]);
        without
    }
}

impl Drop for WithoutRxe {
    fn drop(&mut self) {
        run("modprobe", &["rdma_rxe"]);
        run("rdma", &["link", "add", "rxe0", "type", "rxe", "netdev", &self.interface]);
    }
}

/// Waits until `found` returns a value. Fails after the time limit.
#[track_caller]
pub(crate) fn wait_until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = found() {
            return value;
        }
        assert!(start.elapsed() < LIMIT, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a program on this machine listens on a TCP port.
pub(crate) fn wait_for_listener(port: u16) {
    let listens = |line: &str| line.contains(&format!(":{port:04X} ")) && line.contains(" 0A ");
    let table = |name: &str| fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default();
    let is_listed = || ["tcp", "tcp6"].iter().any(|name| table(name).lines().any(listens));
    wait_until(&format!("a program that listens on port {port}"), || is_listed().then_some(()));
}

/// A program of rdma-core in `PATH`. Its package is part of the guests.
pub(crate) fn c_program(name: &str, package: &str) -> Program {
    Program::of_rdma_core(name, package).expect("the program is installed")
}

/// A program in the directory of the test programs.
pub(crate) fn program_of_package(package: &str) -> Program {
    let tests = std::env::current_exe().expect("the test's program has a path");
    let file: PathBuf = tests.parent().and_then(|deps| deps.parent()).expect("target/…/deps").join(package);
    assert!(file.is_file(), "{} does not exist; build it with `cargo build --package {package}`", file.display());
    Program::Rust(file)
}
