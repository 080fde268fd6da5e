//! Queue pairs connected by librdmacm.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_safe::Error;
use rdma_safe::cm::{Cause, CmError, Connector, RejectReason};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::connection::{send_hello, send_message};
use crate::support::{DEADLINE, device};

#[test]
fn each_test_runs_over_rdmacm_connections() {
    let Some(rdma) = device() else { return };
    let count = "--rdma-cm --iters 60 --yield";
    for test in [
        "send bw --size 64,64K --validate",
        "send bw --size 1K --validate --use-srq -q 4",
        "send lat --size 2 --validate",
        "write bw --size 64K --validate -q 4 -T 2",
        "write bw --size 4K --validate --bidirectional",
        "write lat --size 64 --validate --imm --events",
        "read bw --size 64K --validate --outstanding 4",
        "atomic lat --validate",
        "send lat --compat perftest --size 64",
    ] {
        let report = rdma.measure(&format!("{test} {count}"));
        assert_eq!(report.at("/plan/rdma_cm"), &json!(true), "{test}");
        let queue_pairs = report.at("/plan/qps").as_u64().unwrap() * report.at("/plan/threads").as_u64().unwrap();
        assert!(report.counts("/messages").iter().all(|messages| *messages == 60 * queue_pairs), "{test}");
    }
    rdma.run("write bw --loopback -R -c UC").failure(2, &["leave out --rdma-cm, or give -c RC"]);
    rdma.run("send lat --loopback -R -c UD").failure(2, &["connects nothing"]);
}

#[test]
fn a_server_accepts_several_clients_concurrently() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let options = "-R --size 64 --iters 50 --yield --sl 3 --tclass 0x68 --qp-timeout 100ms --retry-count 3 --mtu 512";
    let client = |test: &str| rdma.start(&server.client(test, &format!("{options} --validate --format json")));
    let clients = ["write bw", "read lat", "send bw"].map(client);
    // A client without --rdma-cm is not affected.
    let other = rdma.start(&server.client("write bw", "--size 64 --iters 50 --yield"));
    for client in clients {
        let report = client.output().report();
        assert_eq!(report.counts("/messages"), [50]);
        let connection =
            json!({"service_level": 3, "traffic_class": 104, "timeout": 15, "retries": 3, "rnr_retries": 7});
        assert_eq!(report.at("/plan/connection"), &connection);
    }
    other.output().success();
    let log = server.running.errors();
    assert!(log.contains("write bw, by rdmacm") && log.contains("#4 "), "{log}");
}

#[test]
fn ctrl_c_or_a_killed_peer_ends_a_set_up_by_rdmacm() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let many = "-R --qps 400 --tx-depth 16 --size 64 --duration 20s --quiet";
    for delay in [0, 300, 900] {
        let client = rdma.start(&server.client("write bw", many));
        client.wait_for_handler();
        std::thread::sleep(Duration::from_millis(delay));
        client.signal(Signal::INT);
        client.output_within(DEADLINE).failure(130, &["interrupted"]);
    }
    let client = rdma.start(&server.client("write bw", many));
    client.wait_for_handler();
    std::thread::sleep(Duration::from_millis(600));
    drop(client);
    let report = rdma.run(&server.client("write bw", "-R --size 64 --iters 20 --format json")).report();
    assert_eq!(report.counts("/messages"), [20]);
}

#[test]
fn requests_without_the_token_are_rejected() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let report = rdma.run(&server.client("write bw", "-R --size 64 --iters 5 --format json")).report();
    let (mut stream, answer) = send_hello(&server, report.at("/plan"), report.at("/client"));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let accepted = &answer["Accepted"];
    let address: SocketAddr = accepted["meeting"]["address"].as_str().unwrap().parse().unwrap();
    // A client sends a request and is gone before the server handles it.
    let hasty = Connector::new().timeout(Duration::from_millis(50)).connect(address).unwrap_err();
    assert!(
        matches!(&hasty, Error::Cm(CmError::Connect(error)) if matches!(error.cause, Cause::Timeout(_))),
        "{hasty}"
    );
    // The client's addresses do not matter here. The server now waits for its connections.
    send_message(&mut stream, &json!({"Connect": {"workers": accepted["workers"]}}));
    for _ in 0..2 {
        match Connector::new().connect(address) {
            Err(Error::Cm(CmError::Connect(error))) => {
                let Cause::Rejected { reason, .. } = error.cause else { panic!("{error}") };
                assert_eq!(reason, RejectReason::CONSUMER_DEFINED);
            }
            other => panic!("{other:?}"),
        }
    }
    drop(stream);
    rdma.run(&server.client("write bw", "-R --size 64 --iters 5")).success();
    // The listener is gone.
    assert!(Connector::new().connect(address).is_err());
    server.running.wait_for_error("closed the control connection");
    assert!(server.running.errors().contains("#2 "));
}
