//! The example `cm_datagram` against librdmacm's `udaddy`.

use std::sync::{Mutex, PoisonError};

use crate::support::program::{Program, Running};
use crate::support::{DEADLINE, Rdma, device, lossless_device, within};

fn programs() -> Option<(Program, Program)> {
    Some((Program::example("cm_datagram")?, Program::of_rdma_core("udaddy", "rdmacm-utils")?))
}

/// The device's IPv4 address, or `None` after printing why the test is skipped.
fn address(rdma: &Rdma) -> Option<String> {
    let address = rdma.gid.gid.ipv4().map(|address| address.to_string());
    if address.is_none() {
        println!("skipped: the GID of the tests is not an IPv4 address");
    }
    address
}

/// Held while a test uses the port, which these programs cannot change.
static PORT: Mutex<()> = Mutex::new(());

/// Starts a server. Our program reports when it listens, the C program writes nothing before it ends. The default port is 7174.
fn serve(program: &Program, arguments: &[&str]) -> Running {
    let running = program.start_with(arguments);
    if matches!(program, Program::Rust(_)) {
        running.wait_for("listening at");
    }
    running
}

fn run_pair(server: &Program, client: &Program, address: &str, arguments: &[&str]) {
    let _port = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    // On soft0 other processes have other addresses, and may use the same port.
    let mut serving = serve(server, &[&["-b", address], arguments].concat());
    let client_output = within(DEADLINE, "a server that listens", || {
        let mut running = client.start_with(&[&["-s", address], arguments].concat());
        let (status, text) = running.finish();
        if text.contains("nobody listens") {
            return None;
        }
        assert!(status.success(), "{status}\n{text}");
        Some(text)
    });
    let (status, server_output) = serving.finish();
    assert!(status.success(), "{status}\n{server_output}");
    for text in [&client_output, &server_output] {
        assert!(text.contains("data transfers complete\n") && text.contains("return status 0\n"), "{text}");
    }
}

/// Default options, many connections and messages, and messages of maximum length.
const OPTIONS: [&[&str]; 3] = [&[], &["-c", "4", "-C", "20"], &["-C", "3", "-S", "4096"]];

#[test]
fn our_client_sends_to_the_c_server() {
    let Some(rdma) = lossless_device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    for arguments in OPTIONS {
        run_pair(&c, &ours, &address, arguments);
    }
}

#[test]
fn our_server_serves_the_c_client() {
    let Some(rdma) = lossless_device() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), programs()) else { return };
    for arguments in OPTIONS {
        run_pair(&ours, &c, &address, arguments);
    }
}

#[test]
fn a_missing_server_is_an_error() {
    let Some(rdma) = device() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("cm_datagram")) else { return };
    let _port = PORT.lock().unwrap_or_else(PoisonError::into_inner);
    let (status, text) = ours.start_with(&["-s", &address]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("nobody listens for datagrams at the peer's port; start the peer first"), "{text}");
    let (status, text) = ours.start_with(&["-s", &address, "-S", "5000"]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("-S 5000 is more than the active MTU, 4096"), "{text}");
}
