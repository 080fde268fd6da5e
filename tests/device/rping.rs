//! The example `rping` with the C program of the same name.

use std::net::Ipv4Addr;

use crate::support::program::{Program, Running, free_port};
use crate::support::{DEADLINE, Rdma, device, within};

/// The device's IPv4 address, or `None` after printing why the test is skipped.
fn address(rdma: &Rdma) -> Option<String> {
    let address = rdma.gid.gid.ipv4().as_ref().map(Ipv4Addr::to_string);
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

fn programs() -> Option<(Program, Program)> {
    Some((Program::example("rping")?, Program::of_rdma_core("rping", "rdmacm-utils")?))
}

/// Starts a server. Our program reports when it listens, the C program writes nothing before it ends.
fn serve(program: &Program, arguments: &[&str]) -> Running {
    let running = program.start_with(&[&["-s", "-d"], arguments].concat());
    if matches!(program, Program::Rust(_)) {
        running.wait_for("listening at");
    }
    running
}

/// Starts a client.
///
/// The C program writes its next message to the buffer of the last one as soon as the server has answered. Where packets get lost,
/// the answer may arrive before the acknowledgement of that last message, and the checker reports that the program has changed the
/// data of a send. Its data arrives all the same, since the server has it already, so the checker does not look for that.
fn start_client(program: &Program, arguments: &[&str]) -> Running {
    let checks = std::env::var("RDMA_SOFT_CHECK").ok().filter(|kinds| kinds.starts_with("suppress="));
    let environment = match (program, checks) {
        (Program::C { .. }, Some(kinds)) => vec![("RDMA_SOFT_CHECK", format!("{kinds},send-changed"))],
        _ => Vec::new(),
    };
    program.start_in(&environment, &[&["-c"], arguments].concat())
}

/// Runs a client, repeatedly until the server listens. Returns its output.
fn client(program: &Program, arguments: &[&str]) -> String {
    within(DEADLINE, "a server that listens", || {
        let mut running = start_client(program, arguments);
        let (status, text) = running.finish();
        if text.contains("nobody listens") {
            return None;
        }
        assert!(status.success(), "{status}\n{text}");
        Some(text)
    })
}

/// Runs five pings between a server and a client, and checks the output of both.
fn run_pair(server: &Program, from: &Program, address: &str, size: &str) {
    let port = free_port().to_string();
    let mut serving = serve(server, &["-v", "-a", address, "-p", &port, "-S", size]);
    let client_output = client(from, &["-v", "-V", "-C", "5", "-a", address, "-p", &port, "-S", size]);
    let (status, server_output) = serving.finish();
    for number in 0..5 {
        let ping = format!("ping data: rdma-ping-{number}: ");
        assert!(client_output.contains(&ping), "{ping}\n{client_output}");
        assert!(server_output.contains(&format!("server {ping}")), "{ping}\n{server_output}");
    }
    // The C server may report the disconnect of its client as a failure, depending on which of two events it sees first.
    assert!(status.success() || matches!(server, Program::C { .. }), "{status}\n{server_output}");
}

#[test]
fn our_rping_pings_the_c_server() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    for size in ["64", "4096", "65535"] {
        run_pair(&c, &ours, &address, size);
    }
}

#[test]
fn our_rping_serves_the_c_client() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    for size in ["64", "4096", "65535"] {
        run_pair(&ours, &c, &address, size);
    }
}

#[test]
fn a_persistent_rping_serves_concurrent_clients_of_both_kinds() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    let port = free_port().to_string();
    let serving = serve(&ours, &["-P", "-v", "-p", &port]);
    let arguments = ["-v", "-V", "-C", "20", "-a", &address, "-p", &port];
    let mut clients = [&ours, &c, &ours].map(|program| start_client(program, &arguments));
    for running in &mut clients {
        let (status, text) = running.finish();
        assert!(status.success() && text.contains("ping data: rdma-ping-19: "), "{status}\n{text}");
    }
    drop(serving);
}

#[test]
fn a_killed_or_missing_server_is_an_error() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("rping")) else { return };
    let port = free_port().to_string();
    let serving = serve(&ours, &["-v", "-p", &port]);
    let mut pinging = ours.start_with(&["-c", "-v", "-a", &address, "-p", &port]);
    pinging.wait_for("rdma-ping-3: ");
    drop(serving);
    let (status, text) = pinging.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.lines().any(|line| line.starts_with("rping: ")), "{text}");
    let mut nobody = ours.start_with(&["-c", "-a", &address, "-p", &port]);
    let (status, text) = nobody.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("nobody listens at the peer's port"), "{text}");
}
