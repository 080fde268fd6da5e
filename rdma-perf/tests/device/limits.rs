//! Limits of time, rate and memory.

use crate::support::device;

#[test]
fn a_timed_run_lasts_as_long_as_requested() {
    let Some(rdma) = device() else { return };
    for test in ["send bw", "write lat", "write bw --bidirectional"] {
        let report = rdma.measure(&format!("{test} --duration 300ms --warm-up 50ms --size 256 --validate --yield"));
        let seconds = report.number("/seconds");
        // After the 300 ms the run still waits for the messages in flight.
        assert!((0.29..2.0).contains(&seconds), "{test}: {seconds} s");
        assert!(report.number("/messages") > 10.0 && report.number("/warm_up_messages") > 0.0, "{test}");
    }
}

#[test]
fn the_rate_limit_is_kept() {
    let Some(rdma) = device() else { return };
    for (options, rate) in [("--rate 500msg/s", 500.0), ("--rate 256KB/s --qps 4", 500.0)] {
        let report = rdma.measure(&format!("write bw {options} --size 512 --duration 1500ms --yield"));
        let found = report.number("/bandwidth/message_rate");
        assert!(found < rate * 1.1, "{options}: {found} messages a second");
        assert!(found > rate * 0.4, "{options}: {found} messages a second");
    }
}

/// The first completion of a slow run covers many messages, so it comes late.
#[test]
fn a_slow_rate_causes_no_timeout() {
    let Some(rdma) = device() else { return };
    let report = rdma.measure("write bw --rate 5msg/s --iters 50 --warm-up 0 --size 64 --timeout 8s --yield");
    assert_eq!((report.at("/plan/cq_mod").as_u64(), report.counts("/messages")), (Some(50), vec![50]));
}

#[test]
fn memory_does_not_grow_with_the_number_of_messages() {
    let Some(rdma) = device() else { return };
    const MIB: u64 = 1 << 20;
    for verb in ["write", "send"] {
        // The same size four times, 128 MiB in total.
        let sizes = "64K,64K,64K,64K";
        let report = rdma.measure(&format!("{verb} bw --qps 64 --rx-depth 64 --size {sizes} --iters 8 --warm-up 0"));
        let (messages, peaks) = (report.counts("/messages"), report.counts("/peak_resident"));
        assert_eq!(messages.iter().sum::<u64>() * 64 * 1024, 128 * MIB);
        assert!(peaks[0] < 64 * MIB, "{verb}: {} MiB", peaks[0] / MIB);
        // The peak includes pages of the program's file, which the kernel may load at any time, so one of the three may exceed.
        // The kernel adds counters of several processors without a lock, so a later reading may be smaller.
        let growths = peaks.windows(2).map(|peaks| peaks[1].saturating_sub(peaks[0]));
        assert!(growths.filter(|growth| *growth >= MIB).count() < 2, "{verb}: {peaks:?}");
    }
}

#[test]
fn an_error_of_too_long_queues_names_the_options() {
    let Some(rdma) = device() else { return };
    let output = rdma.run("write bw --loopback --size 64 --qps 16384 --tx-depth 1024 --iters 1024");
    output.failure(1, &["--qps, --tx-depth and --rx-depth ask for 16384 times 1024 completions"]);
}

#[test]
fn broken_limits_set_the_exit_status() {
    let Some(rdma) = device() else { return };
    let output = rdma.run("write bw --loopback --size 64,128 --iters 20 --min-bandwidth 1000Gb/s");
    let errors = output.failure(3, &["at 64 bytes", "at 128 bytes", "less than"]);
    assert_eq!(errors.matches("Gb/s are less than").count(), 2, "{errors}");
    let output = rdma.run("send lat --loopback --iters 20 --max-latency p50=1ns --max-latency max=1h");
    assert_eq!(output.failure(3, &["at p50 is more than"]).matches("is more than").count(), 1);
    rdma.run("send lat --loopback --iters 20 --max-latency p90.5=1h").success();
    rdma.run("write bw --loopback --size 64 --iters 20 --cq-mod 1 --min-bandwidth 1msg/s --max-latency p50=1h")
        .success();
}

#[test]
fn a_server_refuses_tests_that_need_too_much_memory() {
    let Some(rdma) = device() else { return };
    let server = rdma.server("--max-memory 1M");
    let output = rdma.run(&server.client("write bw", "--size 1M --qps 2"));
    output.failure(1, &["the server: the test takes 2", "more than 1 MiB that is allowed", "--max-memory"]);
    rdma.run(&server.client("write bw", "--size 64K --iters 5")).success();
}
