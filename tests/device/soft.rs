//! Features of soft0 only: configurable addresses, injected faults, and refusal after fork.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rdma_safe::Gid;
use rdma_safe::soft::{self, Faults};

use crate::support::device;
use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::program::Program;

/// Runs an example on soft0 with these environment variables. `None` after printing that it is not built.
fn run(example: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    let Some(Program::Rust(file) | Program::C { file, .. }) = Program::example(example) else { return None };
    let mut command = Command::new(file);
    command.args(["-d", "soft0"]).args(arguments).env_remove("RDMA_SOFT_FAULTS").envs(variables.iter().copied());
    Some(command.output().expect("the program starts"))
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Locks the IPv6 loopback address, of which the machine has only one. Another run of these tests waits until the lock is dropped.
fn lock_ipv6_loopback() -> UnixListener {
    let name = SocketAddr::from_abstract_name("rdma-safe tests [::1]:4791").unwrap();
    let start = Instant::now();
    loop {
        match UnixListener::bind_addr(&name) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && start.elapsed() < Duration::from_secs(60) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            lock => return lock.expect("another run releases it within a minute"),
        }
    }
}

#[test]
fn every_configured_address_has_a_gid_and_carries_messages() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        return println!("skipped: {} is not soft0", rdma.device_name());
    }
    let _lock = lock_ipv6_loopback();
    // An IPv4 loopback address derived from the process id, and ::1 if the machine has it.
    let [.., a, b] = std::process::id().to_be_bytes();
    let ipv4 = Ipv4Addr::new(127, 200, a, b);
    let mut addresses = vec![IpAddr::from(ipv4)];
    match UdpSocket::bind((Ipv6Addr::LOCALHOST, 4791)) {
        Ok(_) => addresses.push(Ipv6Addr::LOCALHOST.into()),
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => println!("skipped: this machine has no ::1"),
        Err(error) => panic!("[::1]:4791: {error}"),
    }
    let value = addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    let all = [("RDMA_SOFT_ADDR", value.as_str())];
    let Some(gids) = run("show_gids", &[], &all) else { return };
    let gids = text(&gids);
    assert!(gids.contains(&ipv4.to_string()), "{gids}");
    assert!(gids.contains(&format!("n_gids_found={}", addresses.len())), "{gids}");
    for (index, address) in addresses.iter().enumerate() {
        let arguments = ["--loopback", "-g", &index.to_string(), "-n", "100", "-c"];
        let Some(output) = run("rc_pingpong", &arguments, &all) else { return };
        let printed = text(&output);
        let gid = match address {
            IpAddr::V4(address) => Gid::from(*address),
            IpAddr::V6(address) => Gid::from(*address),
        };
        assert!(output.status.success() && printed.contains(&format!("GID {gid}\n")), "{printed}");
    }
}

#[test]
fn invalid_addresses_and_faults_are_named() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        return println!("skipped: {} is not soft0", rdma.device_name());
    }
    for (variable, value, reason) in [
        ("RDMA_SOFT_ADDR", "elsewhere", "\"elsewhere\" is not an IP address"),
        // A documentation address.
        ("RDMA_SOFT_ADDR", "203.0.113.77", "203.0.113.77 is not an address of this machine"),
        ("RDMA_SOFT_ADDR", "127.3.3.3,::ffff:127.3.3.3", "127.3.3.3 is listed twice"),
        ("RDMA_SOFT_UDP", "yes", "RDMA_SOFT_UDP=yes: use 1"),
        ("RDMA_SOFT_FAULTS", "drop=2", "drop=2: a share of packets is a number from 0 to 1"),
    ] {
        let Some(output) = run("devinfo", &[], &[(variable, value)]) else { return };
        let printed = text(&output);
        // Once on standard error, and once in the error that the program prints.
        assert!(!output.status.success() && printed.matches(reason).count() == 2, "{value}: {printed}");
    }
}

#[test]
fn every_pingpong_runs_both_ends_in_one_process() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        return println!("skipped: {} is not soft0", rdma.device_name());
    }
    let examples = ["rc_pingpong", "uc_pingpong", "ud_pingpong", "srq_pingpong"];
    for (example, by_udp) in examples.into_iter().flat_map(|example| [(example, "0"), (example, "1")]) {
        let arguments = ["--loopback", "-n", "50", "-s", "512", "-c"];
        let Some(output) = run(example, &arguments, &[("RDMA_SOFT_UDP", by_udp)]) else { return };
        let printed = text(&output);
        let sides = ["[server] 50 iters", "[client] 50 iters"];
        assert!(output.status.success() && sides.iter().all(|side| printed.contains(side)), "{example}: {printed}");
    }
}

#[test]
fn faults_can_be_changed_at_run_time() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() || std::env::var_os("RDMA_SOFT_FAULTS").is_some() {
        return println!("skipped: it needs soft0, without RDMA_SOFT_FAULTS");
    }
    crate::support::child::in_own_process("soft::faults_can_be_changed_at_run_time", || {
        let mut lab = Lab::new(&rdma, Mode::EXTENDED);
        let faults: Faults = "seed=3,drop=0.3,dup=0.1,reorder=0.2,corrupt=0.1".parse().unwrap();
        for (round, faults) in [Faults::default(), faults, Faults::default()].into_iter().enumerate() {
            soft::set_faults(faults).unwrap();
            lab.a.memory.put(0, &[round as u8 + 1; 2000]);
            let write = Op::Write(lab.b.memory.remote(100));
            let data = lab.a.memory.sge(0..2000);
            for id in 0..20 {
                lab.a.post(&[Wr::new(id, write, Data::One(data))]).unwrap();
                lab.a.next_ok(id);
            }
            assert_eq!(lab.b.memory.get(100..2100), [round as u8 + 1; 2000]);
        }
        let refused = soft::set_faults(Faults::default().with_drop(7.0)).unwrap_err();
        assert_eq!(refused.to_string(), "drop=7: a share of packets is a number from 0 to 1");
    });
}

#[test]
fn a_forked_child_is_refused_and_the_parent_continues() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        return println!("skipped: {} is not soft0", rdma.device_name());
    }
    crate::support::child::in_own_process("soft::a_forked_child_is_refused_and_the_parent_continues", || {
        let mut lab = Lab::new(&rdma, Mode::EXTENDED);
        let write = Op::Write(lab.b.memory.remote(100));
        let data = lab.a.memory.sge(0..2000);
        // SAFETY: the child only calls the functions under test, which take no lock of another thread, and then exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_refused = lab.a.post(&[Wr::new(0, write, Data::One(data))]).is_err()
                && rdma_safe::Device::first().and_then(|device| device.open()).is_err();
            // SAFETY: it only ends the process.
            unsafe { libc::_exit(i32::from(!is_refused)) };
        }
        let mut status = -1;
        // SAFETY: `status` is valid during the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        lab.a.memory.put(0, &[7; 2000]);
        lab.a.post(&[Wr::new(1, write, Data::One(data))]).unwrap();
        lab.a.next_ok(1);
        assert_eq!(lab.b.memory.get(100..2100), [7; 2000]);
    });
}
