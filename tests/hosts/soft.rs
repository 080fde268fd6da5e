//! Programs on soft0, the software RNIC of this workspace, with programs on rxe0, that of Linux.
//!
//! The first host keeps rxe0. The second takes it away, as it has the port of RoCEv2, and has soft0 in its place.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::capture::{Capture, Kind};
use crate::meeting::Meeting;
use crate::network::{Host, run};
use crate::program::Program;
use crate::skip;

/// For a program, and for the other machine to get as far.
const LIMIT: Duration = Duration::from_secs(100);

/// Programs of rdma-core, which look at what arrives.
const PINGPONGS: [&[&str]; 4] = [
    &["ibv_rc_pingpong", "-c", "-n", "100", "-s", "10000"],
    &["ibv_uc_pingpong", "-c", "-n", "50", "-s", "10000"],
    &["ibv_ud_pingpong", "-c", "-n", "50", "-s", "1000"],
    &["ibv_srq_pingpong", "-c", "-n", "200", "-s", "5000"],
];

/// What rdma-perf is to do, reliably.
const RELIABLE: [&[&str]; 6] = [
    &["send", "bw", "--size", "1,3000,64K"],
    &["write", "bw", "--size", "1,3000,64K"],
    &["write", "bw", "--imm", "--size", "10000"],
    &["read", "bw", "--size", "1,3000,64K"],
    &["atomic", "bw", "-A", "fetch-add"],
    &["atomic", "bw", "-A", "compare-swap"],
];

/// And in other ways.
const UNRELIABLE: [&[&str]; 3] = [
    &["send", "bw", "-c", "UC", "--size", "1,10000"],
    &["write", "bw", "-c", "UC", "--imm", "--size", "1,10000"],
    &["send", "bw", "-c", "UD", "--size", "1000"],
];

/// Opcodes of reliable connections, and of the others, that both hosts send.
const OPCODES: [u8; 27] = [
    0x00, 0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x20,
    0x21, 0x22, 0x24, 0x26, 0x27, 0x29, 0x2b, 0x64,
];

/// A program, which is run on both hosts.
struct Exchange<'a> {
    program: Program,
    server: Vec<&'a str>,
    client: Vec<&'a str>,
    /// What says the index of the GID.
    gid: &'a str,
}

impl<'a> Exchange<'a> {
    /// Of rdma-core's ping-pongs.
    fn pingpong(of: &[&'a str]) -> Exchange<'a> {
        let program = Program::of_rdma_core(of[0], "ibverbs-utils").expect("it is there");
        Exchange { program, server: of[1..].to_vec(), client: of[1..].to_vec(), gid: "-g" }
    }

    /// Of rdma-perf, which compares what arrives.
    fn perf(of: &[&'a str]) -> Exchange<'a> {
        // Emulated machines are slow, stand still at times, and are slower still when packets get lost.
        let patience: &[&str] = if of.contains(&"-c") { &[] } else { &["--qp-timeout", "16"] };
        let client = [of, &["-n", "50", "--validate", "--timeout", "60s"], patience].concat();
        Exchange { program: perf(), server: vec!["server", "--once"], client, gid: "-x" }
    }
}

/// This host, with the device that it is to have.
struct Lab {
    host: Host,
    meeting: Meeting,
    library: String,
    /// Of the interface, but for links.
    link_local: Option<String>,
    port: u16,
}

impl Lab {
    fn this() -> Option<Lab> {
        let host = Host::this()?;
        let Ok(library) = std::env::var("RDMA_SOFT_LIBRARY") else {
            return skip("RDMA_SOFT_LIBRARY names no librdma_soft.so");
        };
        let shown = run("ip", &["-oneline", "-6", "address", "show", "dev", &host.interface, "scope", "link"]);
        let of_link = |line: &str| Some(line.split_once("inet6 ")?.1.split_once('/')?.0.to_owned());
        let link_local = shown.lines().find_map(of_link);
        if !host.is_first {
            run("rdma", &["link", "delete", "rxe0"]);
            run("modprobe", &["--remove", "rdma_rxe"]);
        }
        let meeting = Meeting::of(&host);
        Some(Lab { host, meeting, library, link_local, port: 19_000 })
    }

    fn has_soft(&self) -> bool {
        !self.host.is_first
    }

    fn device(&self) -> &'static str {
        if self.has_soft() { "soft0" } else { "rxe0" }
    }

    /// The index of the GID that is an address of IPv4 or of IPv6.
    fn gid(&self, is_six: bool) -> &'static str {
        // rxe has the address of the link first.
        if self.has_soft() == is_six { "1" } else { "0" }
    }

    /// What a program's environment says of the device.
    fn environment(&self) -> Vec<(&'static str, String)> {
        if !self.has_soft() {
            return Vec::new();
        }
        let mut addresses = self.host.own.clone();
        if let Some(six) = &self.link_local {
            addresses = format!("{addresses},{six}");
        }
        let library = || self.library.clone();
        vec![
            ("RDMA_SOFT_ADDR", addresses),
            ("LD_PRELOAD", library()),
            ("RDMA_SYS_LIBIBVERBS", library()),
            ("RDMA_DEVICE", "soft0".to_owned()),
        ]
    }

    /// Records what goes over the wire; one host sees it all.
    fn capture(&self, name: &str) -> Option<Capture> {
        if self.has_soft() { Capture::start(&self.host, name) } else { None }
    }

    /// Runs it with each host as the server once.
    fn both_ways(&mut self, is_six: bool, exchange: &Exchange<'_>) {
        for first_serves in [true, false] {
            let (port, serves) = (self.port, first_serves == self.host.is_first);
            self.port += 1;
            let text = port.to_string();
            let arguments = if serves { &exchange.server } else { &exchange.client };
            let common = ["-d", self.device(), exchange.gid, self.gid(is_six), "-p", &text];
            let mut arguments = [&arguments[..], &common].concat();
            if !serves {
                arguments.push(&self.host.peer);
                // The server listens.
                self.meeting.together();
            }
            let begun = Instant::now();
            let mut running = exchange.program.start_in(&self.environment(), &arguments);
            if serves {
                wait_for_listener(port);
                self.meeting.together();
            }
            let (status, said) = running.finish_within(LIMIT);
            assert!(status.success(), "{}\n{said}", running.command);
            println!("{:.1} s: {}", begun.elapsed().as_secs_f64(), running.command);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.has_soft() {
            // For the tests that come after this.
            run("modprobe", &["rdma_rxe"]);
            run("rdma", &["link", "add", "rxe0", "type", "rxe", "netdev", &self.host.interface]);
        }
    }
}

/// rdma-perf, which lies beside the tests.
fn perf() -> Program {
    let tests = std::env::current_exe().expect("the test's program has a path");
    let file: PathBuf = tests.parent().and_then(|deps| deps.parent()).expect("target/…/deps").join("rdma-perf");
    assert!(file.is_file(), "{} is not there; build it with `cargo build --package rdma-perf`", file.display());
    Program::Rust(file)
}

/// Waits until a program of this machine listens at a TCP port.
fn wait_for_listener(port: u16) {
    let begun = Instant::now();
    let listens = |line: &str| line.contains(&format!(":{port:04X} ")) && line.contains(" 0A ");
    let table = |name: &str| fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default();
    while !["tcp", "tcp6"].iter().any(|name| table(name).lines().any(listens)) {
        assert!(begun.elapsed() < LIMIT, "nobody listens at port {port}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn soft0_and_rxe0_exchange_all_that_both_know_and_tshark_reads_it() {
    let Some(mut lab) = Lab::this() else { return };
    let capture = lab.capture("four");
    lab.meeting.together();
    PINGPONGS.iter().for_each(|of| lab.both_ways(false, &Exchange::pingpong(of)));
    RELIABLE.iter().chain(&UNRELIABLE).for_each(|of| lab.both_ways(false, &Exchange::perf(of)));
    let Some(capture) = capture else { return };
    let kinds = capture.finish();
    for address in [&lab.host.own, &lab.host.peer] {
        let lacks = |opcode: &u8| !kinds.contains::<Kind>(&(address.clone(), *opcode));
        let missing: Vec<_> = OPCODES.into_iter().filter(lacks).collect();
        assert!(missing.is_empty(), "{address} has sent no packets of opcodes {missing:x?}");
    }
}

#[test]
fn soft0_and_rxe0_exchange_packets_of_ipv6() {
    let Some(mut lab) = Lab::this() else { return };
    assert!(lab.link_local.is_some(), "the interface has no address of IPv6");
    let capture = lab.capture("six");
    lab.meeting.together();
    PINGPONGS[..3].iter().for_each(|of| lab.both_ways(true, &Exchange::pingpong(of)));
    lab.both_ways(true, &Exchange::perf(&["read", "bw", "--size", "64K"]));
    let Some(capture) = capture else { return };
    let kinds = capture.finish();
    let senders: BTreeSet<_> = kinds.iter().map(|(from, _)| from).collect();
    assert!(senders.len() == 2 && senders.iter().all(|from| from.starts_with("fe80:")), "{kinds:?}");
}

#[test]
fn what_is_lost_between_soft0_and_rxe0_is_sent_again() {
    let Some(mut lab) = Lab::this() else { return };
    lab.meeting.together();
    let wire = lab.host.spoil(&["loss", "1%"]);
    RELIABLE.iter().for_each(|of| lab.both_ways(false, &Exchange::perf(of)));
    assert!(wire.dropped() > 0, "nothing was lost");
}
