//! The example `cm_datagram` against librdmacm's `udaddy`.

use crate::support::program::{Program, Running};
use crate::support::{DEADLINE, Rdma, device_with_cm, within};

fn both() -> Option<(Program, Program)> {
    Some((Program::example("cm_datagram")?, Program::of_rdma_core("udaddy", "rdmacm-utils")?))
}

/// The device's address on the network; `None` after having said that it has none of IP.
fn address(rdma: &Rdma) -> Option<String> {
    let address = rdma.gid.gid.ipv4().map(|address| address.to_string());
    if address.is_none() {
        println!("skipped: the GID of the tests is of no IPv4 address");
    }
    address
}

/// Ours says when it listens; the C program writes nothing before it ends. It has port 7174 unless a service is named.
fn serve(program: &Program, arguments: &[&str]) -> Running {
    let running = program.start_with(arguments);
    if matches!(program, Program::Rust(_)) {
        running.wait_for("listening at");
    }
    running
}

fn play(server: &Program, client: &Program, address: &str, arguments: &[&str]) {
    let mut serving = serve(server, arguments);
    let said = within(DEADLINE, "a server that listens", || {
        let mut running = client.start_with(&[&["-s", address], arguments].concat());
        let (status, text) = running.finish();
        if text.contains("nobody listens") {
            return None;
        }
        assert!(status.success(), "{status}\n{text}");
        Some(text)
    });
    let (status, heard) = serving.finish();
    assert!(status.success(), "{status}\n{heard}");
    for text in [&said, &heard] {
        assert!(text.contains("data transfers complete\n") && text.contains("return status 0\n"), "{text}");
    }
}

/// By default, many at a time, and as long as a datagram can be.
const GAMES: [&[&str]; 3] = [&[], &["-c", "4", "-C", "20"], &["-C", "3", "-S", "4096"]];

#[test]
fn ours_sends_to_the_server_of_c() {
    let Some(rdma) = device_with_cm() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), both()) else { return };
    for arguments in GAMES {
        play(&c, &ours, &address, arguments);
    }
}

#[test]
fn ours_serves_the_client_of_c() {
    let Some(rdma) = device_with_cm() else { return };
    let (Some(address), Some((ours, c))) = (address(&rdma), both()) else { return };
    for arguments in GAMES {
        play(&ours, &c, &address, arguments);
    }
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let Some(rdma) = device_with_cm() else { return };
    let (Some(address), Some(ours)) = (address(&rdma), Program::example("cm_datagram")) else { return };
    let (status, text) = ours.start_with(&["-s", &address]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("nobody listens for datagrams at the peer's port; start the peer first"), "{text}");
    let (status, text) = ours.start_with(&["-s", &address, "-S", "5000"]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("-S 5000 is more than the active MTU, 4096"), "{text}");
}
