//! Queue pair types and the tests that each supports.

use rustix::process::Signal;
use serde_json::json;

use crate::connection::send_plan;
use crate::support::{DEADLINE, device};

#[test]
fn unreliable_connections_support_sends_and_writes() {
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
fn datagrams_support_sends_of_one_packet() {
    let Some(rdma) = device() else { return };
    for options in ["", "--imm", "--events", "--inline 64", "--post classic --poll classic", "--threads 2"] {
        let report = rdma
            .measure(&format!("send lat -c UD --size 1,64,200 --iters 10 --warm-up 1 --validate --yield {options}"));
        let threads = if options.contains("threads") { 2 } else { 1 };
        assert_eq!(report.counts("/messages"), [threads * 10; 3], "{options}");
        assert_eq!(report.counts("/validated"), [threads * 22; 3], "{options}");
        assert_eq!(report.at("/plan/transport"), "ud");
    }
    let table = rdma.run("send lat -c ud --loopback --size 64 --iters 10 --sl 3 --tclass 0x68 --yield");
    assert!(table.success().contains(" connection: UD\n"), "{}", table.stdout);
    let csv = rdma.run("send bw -c UD --loopback --size 64 --iters 10 --yield --format csv");
    assert!(csv.success().contains(",send,bw,ud,"), "{}", csv.stdout);
    // The same between two processes.
    let server = rdma.server("");
    let report = rdma.run(&server.client("send bw", "-c UD --size 64 --iters 500 --validate --yield --format json"));
    assert_eq!(report.report().counts("/validated"), [550]);
}

#[test]
fn datagrams_are_limited_by_the_path_mtu() {
    let Some(rdma) = device() else { return };
    let report = rdma.measure("send bw -c UD --all --iters 20 --validate --yield");
    let mtu = report.at("/client/mtu").as_u64().unwrap();
    let sizes: Vec<u64> = (1..).map(|shift| 1 << shift).take_while(|size| *size <= mtu).collect();
    assert_eq!((report.counts("/size"), report.counts("/validated")), (sizes.clone(), vec![22; sizes.len()]));
    let report = rdma.measure("send bw -c UD --iters 20 --validate --yield");
    assert_eq!(report.counts("/size"), [mtu], "one packet is the default");
    let report = rdma.measure("send lat -c UD --all --mtu 256 --iters 5 --yield");
    assert_eq!(report.counts("/size").last(), Some(&256));
    let beyond = format!("of {} bytes does not fit into a datagram, which is one packet of {mtu} bytes", mtu + 1);
    let (longer, status) = (format!("--size 64,{}", mtu + 1), if mtu < 4096 { 1 } else { 2 });
    for (options, status, reason) in
        [(longer.as_str(), status, beyond.as_str()), ("--size 512 --mtu 256", 2, "of 256 bytes at most")]
    {
        rdma.run(&format!("send lat -c UD --loopback {options} --iters 5")).failure(status, &[reason]);
    }
    if mtu < 4096 {
        let output = rdma.run("send lat -c UD --loopback --size 64 --mtu 4096 --iters 5");
        output.failure(1, &["--mtu 4096 is more than", &format!("the {mtu} bytes")]);
    }
}

#[test]
fn credits_prevent_messages_without_a_receive() {
    let Some(rdma) = device() else { return };
    // There are many more messages than receives, in whole lists of eight. None is lost.
    let iters = rdma.count_of(400, 80);
    for (index, (options, qps)) in [
        ("--rx-depth 64", 1),
        ("--rx-depth 2", 1),
        ("--rx-depth 16 --post-list 8", 1),
        ("--qps 3 --threads 1 --rx-depth 32", 3),
        ("--qps 4 --threads 2 --rx-depth 16", 4),
        ("--events --rx-depth 64", 1),
        ("--imm --rx-depth 64", 1),
        ("--bidirectional --rx-depth 8", 1),
        ("--rate 20000msg/s --rx-depth 64", 1),
        ("--use-srq --qps 4 --rx-depth 64", 4),
        ("--use-srq --qps 4 --threads 2 --rx-depth 2 --events", 4),
        ("--use-srq --qps 2 --rx-depth 32 --post-list 8", 2),
    ]
    .into_iter()
    .enumerate()
    {
        let transports = ["UC --size 64,1500", "UD --size 64,200"];
        // A device that may be emulated has half of the combinations.
        let transports = if rdma.is_soft() { &transports[..] } else { &transports[index % 2..][..1] };
        for transport in transports {
            let options = format!("send bw -c {transport} --iters {iters} --warm-up 40 --validate --yield {options}");
            let report = rdma.measure(&options);
            assert_eq!(report.counts("/messages"), [qps * iters; 2], "{options}");
            let both = if options.contains("bidirectional") { 2 } else { 1 };
            assert_eq!(report.counts("/validated"), [both * qps * (iters + 40); 2], "{options}");
        }
    }
    let report = rdma.measure("write bw -c UC --imm --size 1K --iters 2000 --rx-depth 32 --validate --yield");
    assert_eq!(report.counts("/messages"), [2000]);
    for transport in ["UC", "UD"] {
        let options = "--size 64 --duration 300ms --rx-depth 32 --validate --yield";
        let report = rdma.measure(&format!("send bw -c {transport} {options}"));
        assert!(report.counts("/messages")[0] > 32, "{transport}");
    }
}

#[test]
fn a_lost_message_ends_the_run_and_is_counted() {
    let Some(rdma) = device() else { return };
    for (test, over) in [
        ("send lat", "UC"),
        ("write lat", "UC"),
        ("send bw --rx-depth 16", "UC"),
        ("send lat", "UD"),
        ("send bw --use-srq --qps 2 --rx-depth 16", "UD"),
    ] {
        let server = rdma.server("");
        let options = format!("-c {over} --size 64 --duration 600s --timeout 1s --yield");
        let client = rdma.start(&server.client(test, &options));
        client.wait_for_thread("worker-0");
        // The stopped server still receives packets, but sends no more messages.
        server.running.signal(Signal::STOP);
        let output = client.output_within(DEADLINE);
        server.running.signal(Signal::CONT);
        let sent = format!("messages were sent over {over}, and");
        output.failure(1, &[&sent, "have arrived", "unreliable", "for 1 s"]);
    }
}

#[test]
fn unsupported_tests_are_refused_at_both_ends() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("");
    let report = rdma.run(&server.client("read bw", "--size 64 --iters 5 --format json")).report();
    let mut plan = report.at("/plan").clone();
    for (transport, reason) in [("uc", "UC has no reads"), ("ud", "UD has no reads")] {
        plan["transport"] = json!(transport);
        let answer = send_plan(&server, &plan, report.at("/client"));
        assert!(answer.contains("Failed") && answer.contains(reason), "{answer}");
    }
    let report = rdma.run(&server.client("send bw", "-c UD --size 64 --iters 5 --format json")).report();
    let mut plan = report.at("/plan").clone();
    plan["sizes"] = json!([64, 5000]);
    let answer = send_plan(&server, &plan, report.at("/client"));
    assert!(answer.contains("Failed") && answer.contains("of 4096 bytes at most"), "{answer}");
    drop(server);
    // Refused before connecting: no server is listening.
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
    for (test, reason) in [
        ("write lat", "UD has no writes: give -c RC or UC"),
        ("read bw", "UD has no reads: give -c RC"),
        ("atomic bw", "send bw and send lat"),
        ("send bw --size 8K", "of 4096 bytes at most"),
        ("send bw --rnr-retry 2", "--rnr-retry"),
        ("send lat --compat perftest", "--compat"),
        ("send bw --use-srq --qps 9 --rx-depth 8", "--rx-depth"),
    ] {
        rdma.run(&format!("{test} 127.0.0.1 --port 1 -c UD")).failure(2, &[reason]);
    }
}

#[test]
fn queue_pairs_share_their_receives() {
    let Some(rdma) = device() else { return };
    let iters = rdma.count_of(1000, 60);
    for (options, qps) in [
        ("bw --size 64,3000 --qps 4", 4),
        ("bw --size 64,3000 --qps 4 --rx-depth 16 --events", 4),
        ("bw --size 64,3000 --qps 4 --threads 2 --rx-depth 2 --imm", 4),
        ("lat --size 64,3000", 1),
        ("lat --size 64,3000 --events --rx-depth 2", 1),
        ("lat --size 64,3000 -c UC", 1),
        ("lat --size 64,200 -c UD --rx-depth 2", 1),
    ] {
        let options = format!("send {options} --use-srq --iters {iters} --warm-up {} --validate --yield", iters / 10);
        let messages = qps * iters;
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
    for test in ["write bw", "read lat", "send bw -b", "send bw -b -c UD", "send bw --compat perftest"] {
        rdma.run(&format!("{test} 127.0.0.1 --port 1 --use-srq")).failure(2, &["--use-srq"]);
    }
}
