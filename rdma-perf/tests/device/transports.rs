//! Types of queue pairs, and what each can carry.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::connection::answer;
use crate::support::device;

#[test]
fn an_unreliable_connection_carries_sends_and_writes() {
    let Some(rdma) = device() else { return };
    for (test, compared) in
        [("send lat", 22), ("write lat", 2), ("send lat --imm --events", 22), ("write lat --imm", 2)]
    {
        let report = rdma.measure(&format!("{test} -c UC --size 2000 --iters 10 --warm-up 1 --validate --yield"));
        assert_eq!(report.counts("/messages"), [10], "{test}");
        assert_eq!(report.counts("/validated"), [compared], "{test}");
        assert_eq!(report.at("/plan/transport"), "uc");
    }
    let report = rdma.measure("write bw -c UC --size 64,4K --iters 200 --yield");
    assert_eq!(report.counts("/messages"), [200, 200]);
    let table = rdma.run("send lat -c uc --loopback --size 64 --iters 10 --yield");
    assert!(table.success().contains(" connection: UC\n"), "{}", table.stdout);
    let csv = rdma.run("send bw -c UC --loopback --size 64 --iters 10 --yield --format csv");
    assert!(csv.success().contains(",send,bw,uc,"), "{}", csv.stdout);
}

#[test]
fn no_message_is_sent_that_finds_no_receive() {
    let Some(rdma) = device() else { return };
    // Hundreds of times as many messages as there are receives for, none of which is sent again.
    for (options, messages) in [
        ("", 1000),
        ("--rx-depth 2", 1000),
        ("--rx-depth 16 --post-list 8", 1000),
        ("--qps 3 --threads 1 --rx-depth 32", 3000),
        ("--qps 4 --threads 2 --rx-depth 16", 4000),
        ("--events --rx-depth 64", 1000),
        ("--imm --rx-depth 64", 1000),
        ("--bidirectional --rx-depth 8", 1000),
        ("--rate 20000msg/s --rx-depth 64", 1000),
    ] {
        let report = rdma
            .measure(&format!("send bw -c UC --size 64,1500 --iters 1000 --warm-up 100 --validate --yield {options}"));
        assert_eq!(report.counts("/messages"), [messages; 2], "{options}");
        let both = if options.contains("bidirectional") { 2 } else { 1 };
        assert_eq!(report.counts("/validated"), [both * messages / 10 * 11; 2], "{options}");
    }
    let report = rdma.measure("write bw -c UC --imm --size 1K --iters 2000 --rx-depth 32 --validate --yield");
    assert_eq!(report.counts("/messages"), [2000]);
    let report = rdma.measure("send bw -c UC --size 64 --duration 300ms --rx-depth 32 --validate --yield");
    assert!(report.counts("/messages")[0] > 32);
}

#[test]
fn a_message_that_does_not_arrive_ends_the_run_and_is_counted() {
    let Some(rdma) = device() else { return };
    for test in ["send lat", "write lat", "send bw --rx-depth 16"] {
        let server = rdma.server("");
        let options = "-c UC --size 64 --duration 60s --timeout 1s --yield";
        let client = rdma.start(&server.client(test, options));
        client.wait_for_thread("worker-0");
        // It receives what comes for a while, but says nothing any more.
        server.running.signal(Signal::STOP);
        let output = client.output_within(Duration::from_secs(30));
        server.running.signal(Signal::CONT);
        output.failure(1, &["messages were sent over UC, and", "have arrived", "unreliable", "for 1 s"]);
    }
}

#[test]
fn what_a_transport_cannot_carry_is_refused_at_both_ends() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let report = rdma.run(&server.client("read bw", "--size 64 --iters 5 --format json")).report();
    let mut plan = report.at("/plan").clone();
    plan["transport"] = json!("uc");
    let answer = answer(&server, &plan, report.at("/client"));
    assert!(answer.contains("Failed") && answer.contains("UC has no reads"), "{answer}");
    drop(server);
    // Nobody listens: it is refused before.
    for (test, reason) in [
        ("read bw", "UC has no reads: give -c RC"),
        ("atomic lat", "UC has no atomics"),
        ("write lat --ack", "--ack"),
        ("send bw --retry-count 2", "--retry-count"),
        ("write bw --validate", "--imm"),
        ("send lat --compat perftest", "--compat"),
    ] {
        rdma.run(&format!("{test} 127.0.0.1 --port 1 -c UC")).failure(2, &[reason]);
    }
}

#[test]
fn queue_pairs_share_their_receives() {
    let Some(rdma) = device() else { return };
    for (options, messages) in [
        ("bw --size 64,3000 --qps 4", 4000),
        ("bw --size 64,3000 --qps 4 --rx-depth 16 --events", 4000),
        ("bw --size 64,3000 --qps 4 --threads 2 --rx-depth 2 --imm", 4000),
        ("lat --size 64,3000", 1000),
        ("lat --size 64,3000 --events --rx-depth 2", 1000),
    ] {
        let options = format!("send {options} --use-srq --iters 1000 --warm-up 100 --validate --yield");
        let report = rdma.measure(&options);
        assert_eq!(report.counts("/messages"), [messages; 2], "{options}");
        let both = if options.contains("lat") { 2 } else { 1 };
        assert_eq!(report.counts("/validated"), [both * messages / 10 * 11; 2], "{options}");
        assert_eq!(report.at("/plan/shared_receives"), true);
    }
    let table = rdma.run("send bw --loopback --use-srq --qps 4 --size 64 --iters 100 --yield");
    assert!(table.success().contains(" connection: RC, with a shared receive queue\n"), "{}", table.stdout);
    let csv = rdma.run("send bw --loopback --use-srq --size 64 --iters 100 --yield --format csv").success().to_owned();
    assert!(csv.trim_end().ends_with(",true") && csv.lines().next().unwrap().ends_with(",use_srq"), "{csv}");
    for test in ["write bw", "read lat", "send bw -b", "send lat -c UC", "send bw --compat perftest"] {
        rdma.run(&format!("{test} 127.0.0.1 --port 1 --use-srq")).failure(2, &["--use-srq"]);
    }
}
