//! Tests of soft0, the software RNIC of this workspace, with rxe0, the software RNIC of Linux.
//!
//! The first host uses rxe0. The second host uses soft0, and removes rxe0 because it occupies the UDP port of RoCEv2.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::capture::Kind;
use crate::lab::{LIMIT, Lab, c_program, program_of_package, wait_for_listener};
use crate::program::Program;

/// Programs of rdma-core, with `-c` to validate received data.
const PINGPONGS: [&[&str]; 4] = [
    &["ibv_rc_pingpong", "-c", "-n", "100", "-s", "10000"],
    &["ibv_uc_pingpong", "-c", "-n", "50", "-s", "10000"],
    &["ibv_ud_pingpong", "-c", "-n", "50", "-s", "1000"],
    &["ibv_srq_pingpong", "-c", "-n", "200", "-s", "5000"],
];

/// Tests of rdma-perf over reliable connections.
const RELIABLE: [&[&str]; 6] = [
    &["send", "bw", "--size", "1,3000,64K"],
    &["write", "bw", "--size", "1,3000,64K"],
    &["write", "bw", "--imm", "--size", "10000"],
    &["read", "bw", "--size", "1,3000,64K"],
    &["atomic", "bw", "-A", "fetch-add"],
    &["atomic", "bw", "-A", "compare-swap"],
];

/// Tests of rdma-perf over unreliable transports.
const UNRELIABLE: [&[&str]; 3] = [
    &["send", "bw", "-c", "UC", "--size", "1,10000"],
    &["write", "bw", "-c", "UC", "--imm", "--size", "1,10000"],
    &["send", "bw", "-c", "UD", "--size", "1000"],
];

/// Opcodes that both hosts have to send, of all transports.
const OPCODES: [u8; 27] = [
    0x00, 0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x20,
    0x21, 0x22, 0x24, 0x26, 0x27, 0x29, 0x2b, 0x64,
];

/// A program that runs on both hosts, as server and as client.
struct Exchange<'a> {
    program: Program,
    server: Vec<&'a str>,
    client: Vec<&'a str>,
    /// Option for the GID index.
    gid_option: &'a str,
}

impl<'a> Exchange<'a> {
    /// One of rdma-core's ping-pongs.
    fn pingpong(command: &[&'a str]) -> Exchange<'a> {
        let program = c_program(command[0], "ibverbs-utils");
        Exchange { program, server: command[1..].to_vec(), client: command[1..].to_vec(), gid_option: "-g" }
    }

    /// A test of rdma-perf, which validates received data.
    fn perf(test: &[&'a str]) -> Exchange<'a> {
        // Emulated machines are slow and sometimes stall, and packet loss slows them down further.
        let qp_timeout: &[&str] = if test.contains(&"-c") { &[] } else { &["--qp-timeout", "16"] };
        let client = [test, &["-n", "50", "--validate", "--timeout", "60s"], qp_timeout].concat();
        Exchange {
            program: program_of_package("rdma-perf"),
            server: vec!["server", "--once"],
            client,
            gid_option: "-x",
        }
    }
}

impl Lab {
    /// Runs the exchange twice, with each host as the server.
    fn both_ways(&mut self, is_ipv6: bool, exchange: &Exchange<'_>) {
        for first_serves in [true, false] {
            let (port, serves) = (self.port, first_serves == self.host.is_first);
            self.port += 1;
            let text = port.to_string();
            let arguments = if serves { &exchange.server } else { &exchange.client };
            let common = ["-d", self.device(), exchange.gid_option, self.gid_index(is_ipv6), "-p", &text];
            let mut arguments = [&arguments[..], &common].concat();
            if !serves {
                arguments.push(&self.host.peer);
                // Wait until the server listens.
                self.barrier.wait();
            }
            let start = Instant::now();
            let mut running = exchange.program.start_in(&self.environment(), &arguments);
            if serves {
                wait_for_listener(port);
                self.barrier.wait();
            }
            let (status, output) = running.finish_within(LIMIT);
            assert!(status.success(), "{}\n{output}", running.command);
            println!("{:.1} s: {}", start.elapsed().as_secs_f64(), running.command);
        }
    }
}

#[test]
fn soft0_and_rxe0_exchange_all_opcodes_in_valid_packets() {
    let Some(mut lab) = Lab::new() else { return };
    let capture = lab.capture("ipv4");
    lab.barrier.wait();
    PINGPONGS.iter().for_each(|command| lab.both_ways(false, &Exchange::pingpong(command)));
    RELIABLE.iter().chain(&UNRELIABLE).for_each(|test| lab.both_ways(false, &Exchange::perf(test)));
    let Some(capture) = capture else { return };
    let kinds = capture.finish();
    for address in [&lab.host.own, &lab.host.peer] {
        let lacks = |opcode: &u8| !kinds.contains::<Kind>(&(address.clone(), *opcode));
        let missing: Vec<_> = OPCODES.into_iter().filter(lacks).collect();
        assert!(missing.is_empty(), "{address} has sent no packets with opcodes {missing:x?}");
    }
}

#[test]
fn soft0_and_rxe0_exchange_packets_over_ipv6() {
    let Some(mut lab) = Lab::new() else { return };
    assert!(lab.link_local.is_some(), "the interface has no IPv6 address");
    let capture = lab.capture("ipv6");
    lab.barrier.wait();
    PINGPONGS[..3].iter().for_each(|command| lab.both_ways(true, &Exchange::pingpong(command)));
    lab.both_ways(true, &Exchange::perf(&["read", "bw", "--size", "64K"]));
    let Some(capture) = capture else { return };
    let kinds = capture.finish();
    let senders: BTreeSet<_> = kinds.iter().map(|(from, _)| from).collect();
    assert!(senders.len() == 2 && senders.iter().all(|from| from.starts_with("fe80:")), "{kinds:?}");
}

#[test]
fn soft0_and_rxe0_retransmit_lost_packets() {
    let Some(mut lab) = Lab::new() else { return };
    lab.barrier.wait();
    let impairment = lab.host.impair(&["loss", "1%"]);
    RELIABLE.iter().for_each(|test| lab.both_ways(false, &Exchange::perf(test)));
    assert!(impairment.dropped() > 0, "no packet was lost");
}
