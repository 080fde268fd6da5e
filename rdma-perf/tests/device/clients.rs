//! A server in its own process, and its clients.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::{DEADLINE, Report, Scratch, device};

#[test]
fn a_server_ends_after_its_only_client() {
    let Some(rdma) = device() else { return };
    for (test, options) in [
        ("send bw", "--size 512 --yield"),
        ("write lat", "--size 64 --yield"),
        ("read bw", "--size 4K"),
        ("send bw", "--size 64 --bidirectional --qps 2 --threads 2 --yield"),
    ] {
        let server = rdma.server("--once");
        let report = rdma.run(&server.client(test, &format!("{options} --iters 50 --validate --format json"))).report();
        assert_eq!(report.row()["messages"].as_u64().unwrap() % 50, 0);
        assert!(report.counts("/validated")[0] > 0, "{test}");
        server.running.output().failure(0, &[test, "done"]);
    }
}

#[test]
fn a_server_serves_two_clients_concurrently() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let long = rdma.start(&server.client("write bw", "--size 1K --duration 15s --validate --format json --events"));
    server.running.wait_for_error("write bw");
    let short =
        rdma.run(&server.client("send lat", "--size 64 --iters 100 --validate --format json --events")).report();
    assert_eq!(short.counts("/messages"), [100]);
    let log = server.running.errors();
    let long = long.output().report();
    assert!(long.counts("/messages")[0] > 0 && long.number("/seconds") > 14.9);
    assert_eq!(long.counts("/validated"), [4]);
    assert!(log.contains("send lat"), "{log}");
    assert!(log.matches("done").count() <= 1, "the first test was still running: {log}");
    server.running.wait_for_error("done");
}

#[test]
fn ctrl_c_keeps_the_results_so_far() {
    let Some(rdma) = device() else { return };
    let scratch = Scratch::new();
    let file = scratch.path("results.json");
    let server = rdma.server("");
    const SIZES: usize = 100;
    for test in ["write bw", "send lat"] {
        // More sizes than the test needs to deliver the signal.
        let sizes = (64..64 + SIZES).map(|size| size.to_string()).collect::<Vec<_>>().join(",");
        let options = format!("--size {sizes} --duration 700ms --yield --format csv --output {}", file.display());
        let client = rdma.start(&server.client(test, &options));
        // Waits for the row of the first size.
        client.wait_for_output(",64,");
        client.signal(Signal::INT);
        let output = client.output_within(DEADLINE);
        output.failure(130, &[]);
        let report = Report::load(&file);
        let sizes = report.counts("/size");
        assert!(!sizes.is_empty() && sizes.len() < SIZES && sizes[0] == 64, "{test}: {sizes:?}");
        assert!(report.rows()[0]["seconds"].as_f64().unwrap() > 0.69, "{test}: the first size is complete");
        assert_eq!(output.stdout.lines().count(), 1 + sizes.len(), "{test}: {}", output.stdout);
        std::fs::remove_file(&file).unwrap();
    }
    rdma.run(&server.client("send lat", "--iters 20 --yield")).success();
}

#[test]
fn a_server_survives_killed_clients() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    for test in ["write bw", "send bw", "write lat"] {
        let client = rdma.start(&server.client(test, "--size 64 --duration 60s --yield"));
        client.wait_for_error("MTU");
        std::thread::sleep(Duration::from_millis(100));
        client.signal(Signal::KILL);
        drop(client);
    }
    // One reason for each client: a closed connection or failed work, whichever comes first.
    let start = Instant::now();
    loop {
        let errors = server.running.errors();
        let reasons = errors.lines().filter(|line| line.starts_with('#') && line.contains(": the ")).count();
        if reasons == 3 {
            break;
        }
        assert!(start.elapsed() < DEADLINE, "{errors}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!server.running.errors().contains("panicked"));
    rdma.run(&server.client("write bw", "--size 64 --iters 20")).success();
}
