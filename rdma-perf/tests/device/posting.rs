//! Options for posting, polling and waiting.

use crate::support::device;

#[test]
fn no_completion_event_is_missed() {
    let Some(rdma) = device() else { return };
    for test in [
        "send bw",
        "send lat",
        "send bw --bidirectional",
        "write bw",
        "write bw --imm",
        "write lat --imm",
        "write lat --ack",
        "read bw",
        "read lat",
        "atomic bw",
        "atomic lat",
    ] {
        let size = if test.starts_with("atomic") { "" } else { "--size 512" };
        let report = rdma.measure(&format!("{test} {size} --events --iters 60 --validate"));
        assert_eq!(report.counts("/messages"), [60], "{test}");
        assert_eq!(report.at("/plan/events"), true);
    }
    rdma.run("write lat --loopback --events").failure(2, &["--imm or --ack"]);
}

#[test]
fn post_lists_and_moderation_signal_the_expected_sends() {
    let Some(rdma) = device() else { return };
    for (verb, options, cq_mod) in [
        ("send", "--post-list 4 --cq-mod 8", 8),
        ("write", "--post-list 16 --cq-mod 4", 4),
        ("read", "--post-list 8", 8),
        ("send", "--cq-mod 16", 16),
    ] {
        let report =
            rdma.measure(&format!("{verb} bw {options} --iters 64 --warm-up 16 --size 256 --validate --yield"));
        assert_eq!(report.counts("/messages"), [64]);
        assert_eq!(report.at("/plan/cq_mod"), cq_mod, "{options}");
        assert_eq!(report.number("/latency/samples") as u64, 64 / cq_mod, "{verb} {options}: one for each signaled");
    }
}

#[test]
fn small_messages_are_sent_inline_if_the_device_supports_it() {
    let Some(rdma) = device() else { return };
    for test in ["send bw", "send lat", "write bw", "write lat"] {
        let options = "--inline 64 --size 64,128 --iters 50 --validate --yield --format json --loopback";
        let output = rdma.run(&format!("{test} {options}"));
        if rdma.is_rxe() || rdma.is_soft() || output.stderr.is_empty() {
            let report = output.report();
            assert_eq!(report.at("/plan/inline"), 64);
            assert_eq!(report.counts("/messages"), [50, 50]);
        } else {
            output.failure(1, &["inline"]);
        }
    }
    rdma.run("write bw --loopback --inline 64K --size 64").failure(1, &["inline"]);
}

#[test]
fn immediate_data_arrives() {
    let Some(rdma) = device() else { return };
    for test in ["send bw", "send lat", "write bw", "write lat"] {
        let report = rdma.measure(&format!("{test} --imm --iters 50 --size 256 --validate --yield"));
        assert_eq!(report.counts("/messages"), [50]);
        assert!(report.counts("/validated")[0] > 0, "{test}");
    }
    rdma.run("read bw --loopback --imm").failure(2, &["leave out --imm"]);
}

#[test]
fn compare_swap_swaps_each_word_in_turn() {
    let Some(rdma) = device() else { return };
    // More operations than the 64 words, so that each word is swapped again.
    let report = rdma.measure("atomic bw --atomic compare-swap --iters 150 --warm-up 0 --validate");
    assert_eq!((report.counts("/messages"), report.counts("/validated")), (vec![150], vec![64]));
    let report = rdma.measure("atomic lat --atomic compare-swap --iters 50 --validate");
    assert_eq!((report.counts("/messages"), report.counts("/validated")), (vec![50], vec![1]));
}

#[test]
fn both_interfaces_post_and_poll() {
    let Some(rdma) = device() else { return };
    for (test, post, poll) in [
        ("send bw --imm", "classic", "classic"),
        ("write lat", "classic", "classic"),
        ("atomic bw", "classic", "classic"),
        ("send bw --imm", "classic", "extended"),
        ("send bw --imm", "extended", "classic"),
        ("send bw --imm", "extended", "extended"),
    ] {
        let options = format!("--post {post} --poll {poll} --iters 50 --validate --yield");
        let size = if test.starts_with("atomic") { "" } else { "--size 256" };
        let output = rdma.run(&format!("{test} {size} --loopback --format json {options}"));
        if !rdma.is_rxe() && output.stdout.is_empty() {
            // Providers may lack the extended interfaces.
            output.failure(1, &["leave out"]);
            continue;
        }
        let report = output.report();
        assert_eq!(report.counts("/messages"), [50], "{test} {options}");
        for end in ["client", "server"] {
            for (what, interface) in [("post", post), ("poll", poll)] {
                assert_eq!(report.at(&format!("/{end}/extended_{what}")), interface == "extended", "{options}");
            }
        }
    }
}

#[test]
fn huge_pages_are_used_or_the_error_says_why_not() {
    let Some(rdma) = device() else { return };
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = memory.lines().find(|line| line.starts_with("HugePages_Free:"));
    let free: u64 = line.map_or(0, |line| line.split_whitespace().nth(1).unwrap().parse().unwrap());
    let output = rdma.run("write bw --loopback --huge-pages --iters 10 --size 64 --format json");
    if free >= 4 {
        assert_eq!(output.report().at("/plan/huge_pages"), true);
    } else {
        output.failure(1, &["huge pages"]);
    }
}
