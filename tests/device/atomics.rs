//! The example `atomics`: no increment of a shared counter is lost.

use crate::support::device;
use crate::support::program::{Program, free_port};

#[test]
fn concurrent_clients_of_one_process_lose_no_increment() {
    let Some(rdma) = device() else { return };
    let Some(program) = Program::example("atomics") else { return };
    let (status, text) = program.start(&rdma, &["--loopback", "-c", "4", "-a", "200", "-s", "20"]).finish();
    assert!(status.success(), "{status}\n{text}");
    assert!(text.contains("total 880, counted by 4 clients: 880"), "{text}");
    assert_eq!(text.matches("counted 200 by fetch-and-add and 20 by compare-and-swap").count(), 4, "{text}");
}

#[test]
fn clients_of_several_processes_lose_no_increment() {
    let Some(rdma) = device() else { return };
    let Some(program) = Program::example("atomics") else { return };
    let port = free_port().to_string();
    let mut server = program.start(&rdma, &["-p", &port, "-c", "3"]);
    server.wait_for("serving 3 clients");
    let shares = [("100", "0"), ("0", "30"), ("57", "11")];
    let clients =
        shares.map(|(adds, swaps)| program.start(&rdma, &["-p", &port, "-a", adds, "-s", swaps, "127.0.0.1"]));
    for mut client in clients {
        let (status, text) = client.finish();
        assert!(status.success(), "{status}\n{text}");
    }
    let (status, text) = server.finish();
    assert!(status.success() && text.contains("total 198, counted by 3 clients: 198"), "{status}\n{text}");
}

#[test]
fn the_server_fails_if_a_client_is_killed() {
    let Some(rdma) = device() else { return };
    let Some(program) = Program::example("atomics") else { return };
    let port = free_port().to_string();
    let mut server = program.start(&rdma, &["-p", &port]);
    server.wait_for("serving 1 clients");
    // Dropping the client kills it.
    let client = program.start(&rdma, &["-p", &port, "-a", "100000000", "127.0.0.1"]);
    server.wait_for("client connected");
    drop(client);
    let (status, text) = server.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    // The reason depends on whether the client had read all data sent to it.
    let reasons = ["closed the connection", "cannot receive from"];
    assert!(reasons.iter().any(|reason| text.contains(reason)), "{text}");
    assert!(text.contains("counted by 0 clients: 0") && !text.contains("panicked"), "{text}");
}
