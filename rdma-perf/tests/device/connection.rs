//! Set-up of connections.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{DEADLINE, Server, device};

#[test]
fn connection_options_are_applied() {
    let Some(rdma) = device() else { return };
    let options = "--sl 3 --tclass 0x68 --qp-timeout 100ms --retry-count 3 --rnr-retry 6 --mtu 512";
    for test in ["write bw", "send lat", "read bw"] {
        let report = rdma.measure(&format!("{test} {options} --size 64 --iters 20 --validate --yield"));
        assert_eq!(report.counts("/messages"), [20], "{test}");
        let connection =
            json!({"service_level": 3, "traffic_class": 104, "timeout": 15, "retries": 3, "rnr_retries": 6});
        assert_eq!(report.at("/plan/connection"), &connection);
    }
    rdma.run("write bw --loopback --sl 16").failure(2, &["--sl"]);
}

#[test]
fn exhausted_rnr_retries_are_an_error() {
    let Some(rdma) = device() else { return };
    // With this many sends, some arrive without a receive.
    let load = "send bw --loopback --size 64 --rx-depth 2 --tx-depth 128 --iters 20000 --timeout 60s";
    rdma.run(&format!("{load} --rnr-retry 0")).failure(1, &["RNR"]);
}

/// Sends a plan as another client would, and returns the server's reply.
pub(crate) fn send_plan(server: &Server, plan: &Value, host: &Value) -> String {
    send_hello(server, plan, host).1
}

/// Like [`send_plan`], and returns the connection as well.
pub(crate) fn send_hello(server: &Server, plan: &Value, host: &Value) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    send_message(&mut stream, &json!({"Hello": {"protocol": 4, "version": "0", "plan": plan, "host": host}}));
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut text = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut text).unwrap();
    (stream, String::from_utf8(text).unwrap())
}

pub(crate) fn send_message(stream: &mut TcpStream, message: &Value) {
    let message = message.to_string();
    stream.write_all(&(message.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(message.as_bytes()).unwrap();
}

#[test]
fn a_server_refuses_values_out_of_range() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let report = rdma.run(&server.client("write bw", "--size 64 --iters 5 --format json")).report();
    let (plan, host) = (report.at("/plan"), report.at("/client"));
    assert!(send_plan(&server, plan, host).contains("Accepted"));
    for (field, value, reason) in [
        ("/connection/service_level", json!(16), "service level"),
        ("/connection/timeout", json!(32), "timeout"),
        ("/connection/retries", json!(8), "retries"),
        ("/pinning/server", json!([5000]), "processors"),
        ("/pinning/server", json!([1023]), "does not exist"),
    ] {
        let mut plan = plan.clone();
        *plan.pointer_mut(field).unwrap() = value;
        let answer = send_plan(&server, &plan, host);
        assert!(answer.contains("Failed") && answer.contains(reason), "{field}: {answer}");
    }
    rdma.run(&server.client("write bw", "--size 64 --iters 5")).success();
    let log = server.running.errors();
    assert!(log.contains("#1 127.0.0.1:") && log.contains("#8 127.0.0.1:"), "{log}");
}

#[test]
fn ctrl_c_ends_a_client_whose_server_does_not_reply() {
    let Some(rdma) = device() else { return };
    for test in ["write bw", "send lat --compat perftest"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = rdma.start(&format!("{test} 127.0.0.1 --port {port}"));
        let mut stream = listener.accept().unwrap().0;
        // The client now waits for a reply.
        stream.read_exact(&mut [0; 4]).unwrap();
        client.signal(Signal::INT);
        let output = client.output_within(DEADLINE);
        output.failure(130, &["interrupted before anything was measured"]);
    }
}

#[test]
fn ctrl_c_ends_a_set_up_and_frees_it() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    for (options, delay) in [
        ("--qps 2000 --tx-depth 16", 0),
        ("--qps 2000 --tx-depth 16", 200),
        ("--qps 400 --threads 4", 100),
        ("--qps 400 --threads 4", 600),
    ] {
        let client = rdma.start(&server.client("write bw", &format!("--size 64 --duration 20s --quiet {options}")));
        client.wait_for_handler();
        std::thread::sleep(Duration::from_millis(delay));
        client.signal(Signal::INT);
        client.output_within(DEADLINE).failure(130, &["interrupted"]);
    }
    rdma.run(&server.client("write bw", "--size 64 --iters 20")).success();
}
