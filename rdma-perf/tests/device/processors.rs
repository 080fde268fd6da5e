//! Pinning and processor time.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::{DEADLINE, Running, device};

/// The processors that the thread `name` may run on.
fn allowed(process: &Running, name: &str) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.pid())).unwrap();
    let named = |path: &std::path::PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name);
    let task = tasks.map(|task| task.unwrap().path()).find(named)?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(list.trim().to_owned())
}

#[test]
fn threads_run_on_the_processors_they_are_pinned_to() {
    let Some(rdma) = device() else { return };
    for (serving, options) in [("", "--cpu 0 --server-cpu 0"), ("--cpu 0", "--cpu 0")] {
        let server = rdma.server(serving);
        let test = format!("--size 64 --duration 300s --yield --threads 2 {options}");
        let client = rdma.start(&server.client("send bw", &test));
        for (end, process) in [("client", &client), ("server", &server.running)] {
            for thread in ["worker-0", "worker-1"] {
                let begun = Instant::now();
                let mut found = allowed(process, thread);
                while found.as_deref() != Some("0") {
                    assert!(begun.elapsed() < DEADLINE, "{options}: {end}, {thread}: {found:?}");
                    std::thread::sleep(Duration::from_millis(5));
                    found = allowed(process, thread);
                }
            }
        }
        client.signal(Signal::INT);
        client.output().failure(130, &["interrupted"]);
    }
}

#[test]
fn a_missing_processor_is_an_error() {
    let Some(rdma) = device() else { return };
    let missing = "processor 1000 does not exist";
    rdma.run("write bw --loopback --cpu 1000").failure(1, &["--cpu: ", missing]);
    rdma.run("server --port 0 --cpu 1000").failure(1, &["--cpu: ", missing]);
    let server = rdma.server("--cpu 0");
    rdma.run(&server.client("write bw", "--server-cpu 1")).failure(1, &["the server: ", "server --cpu"]);
    let server = rdma.server("");
    rdma.run(&server.client("write bw", "--server-cpu 1000")).failure(1, &["the server: ", missing]);
    rdma.run(&server.client("write bw", "--size 64 --iters 20 --cpu 0 --server-cpu 0")).success();
}

#[test]
fn each_end_reports_its_own_processor_time() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    for (test, busy) in [("send bw", true), ("write bw", false)] {
        let options = "--size 64 --duration 1s --format json";
        let report = rdma.run(&server.client(test, options)).report();
        for end in ["client", "server"] {
            let number = |name: &str| report.number(&format!("/{end}_cpu/{name}"));
            let share = (number("user") + number("system")) / number("seconds");
            assert!((number("percent") / 100.0 - share).abs() < 1e-6, "{test}: {end}");
            assert!(number("seconds") > 0.9, "{test}: {end}");
            let is_idle = end == "server" && !busy;
            if is_idle && rdma.is_soft() {
                // On soft0 the library of the server's process performs the writes, on an RNIC the device does.
                continue;
            }
            // Two polling processes share the processors of the machine.
            assert!(if is_idle { share < 0.2 } else { share > 0.1 && share < 1.2 }, "{test}: {end} {share}");
        }
    }
    let report = rdma.measure("write bw --size 64 --iters 100");
    assert!(report.row()["server_cpu"].is_null() && report.number("/client_cpu/seconds") > 0.0);
    let report = rdma.measure("write bw --size 64 --iters 100 --compat perftest");
    assert!(report.row()["client_cpu"].is_null());
    let output = rdma.run("write bw --loopback --size 64 --iters 100");
    assert!(output.success().lines().next().is_some_and(|line| line.ends_with("server CPU[%]")), "{}", output.stdout);
}
