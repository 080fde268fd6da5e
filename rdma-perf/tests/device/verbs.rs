//! Each verb and metric transfers the expected bytes.

use crate::support::{Report, device};

const VERBS: [&str; 4] = ["send", "write", "read", "atomic"];

/// Numbers of compared messages in a run of 55 messages, five of them for warm-up.
///
/// Every received send is compared. For writes and reads, each slot of memory is compared once. Messages of up to 2 KiB cycle
/// through slots of 4 KiB in total; longer messages have one slot.
const COMPARED: [(&str, [u64; 2], [u64; 2]); 3] =
    [("send", [55, 55], [110, 110]), ("write", [4, 1], [2, 2]), ("read", [4, 1], [1, 1])];

#[track_caller]
fn check(report: &Report, messages: u64, validated: &[u64]) {
    let rows = validated.len();
    assert_eq!(report.counts("/messages"), vec![messages; rows], "`{}`", report.what);
    assert_eq!(report.counts("/validated"), validated, "`{}`", report.what);
}

#[test]
fn bandwidth_tests_validate_data() {
    let Some(rdma) = device() else { return };
    for (verb, compared, _) in COMPARED {
        let report = rdma.measure(&format!("{verb} bw --validate --iters 50 --warm-up 5 --size 1000,4096"));
        check(&report, 50, &compared);
        assert_eq!(report.counts("/size"), [1000, 4096]);
        assert_eq!(report.counts("/warm_up_messages"), [5, 5]);
        for row in report.rows() {
            let number = |pointer: &str| row.pointer(pointer).unwrap().as_f64().unwrap();
            let (rate, seconds) = (number("/bandwidth/message_rate"), number("/seconds"));
            assert!((rate * seconds / 50.0 - 1.0).abs() < 1e-6, "{verb}: {row}");
            assert!((number("/bandwidth/average") / (rate * number("/size")) - 1.0).abs() < 1e-6, "{verb}: {row}");
        }
    }
    check(&rdma.measure("atomic bw --validate --iters 50 --warm-up 5"), 50, &[55]);
}

#[test]
fn latency_tests_validate_data() {
    let Some(rdma) = device() else { return };
    for (verb, _, compared) in COMPARED {
        let report = rdma.measure(&format!("{verb} lat --validate --iters 50 --warm-up 5 --size 2,4096 --yield"));
        check(&report, 50, &compared);
        for row in report.rows() {
            let number = |name: &str| row.pointer(&format!("/latency/{name}")).unwrap().as_f64().unwrap();
            assert_eq!(number("samples"), 50.0, "{verb}: {row}");
            assert!(0.0 < number("min") && number("min") <= number("mean") && number("mean") <= number("max"), "{row}");
            assert!(row["bandwidth"].is_null(), "{verb}: {row}");
        }
    }
    check(&rdma.measure("atomic lat --validate --iters 50 --warm-up 5"), 50, &[1]);
}

#[test]
fn reports_contain_the_latency_definition() {
    let Some(rdma) = device() else { return };
    for (test, definition) in [
        ("send lat", "half of a round trip"),
        ("write lat", "half of a round trip"),
        ("write lat --ack", "acknowledgement"),
        ("read lat", "whole round trip"),
    ] {
        let report = rdma.measure(&format!("{test} --iters 10"));
        let found = report.row()["latency"]["definition"].as_str().unwrap();
        assert!(found.contains(definition), "{test}: {found}");
    }
}

#[test]
fn both_ends_send_concurrently() {
    let Some(rdma) = device() else { return };
    for (verb, compared) in [("send", 110), ("write", 8), ("read", 8)] {
        let report =
            rdma.measure(&format!("{verb} bw --bidirectional --validate --iters 50 --warm-up 5 --size 1000 --yield"));
        check(&report, 50, &[compared]);
        assert!(report.number("/reverse/message_rate") > 0.0);
    }
}

#[test]
fn sweeps_measure_each_size() {
    let Some(rdma) = device() else { return };
    let sizes: Vec<u64> = (0..=16).map(|shift| 1 << shift).chain([1 << 20]).collect();
    for verb in ["send", "write", "read"] {
        let report = rdma.measure(&format!("{verb} bw --iters 5 --size 1..64K,1M --yield"));
        assert_eq!(report.counts("/size"), sizes, "{verb}");
        assert_eq!(report.counts("/messages"), vec![5; sizes.len()], "{verb}");
    }
    let report = rdma.measure("write lat --validate --iters 5 --size 1..8K --yield");
    assert_eq!(report.counts("/size"), sizes[..14]);
    assert_eq!(report.counts("/validated"), [2; 14]);
}

#[test]
fn queue_pairs_are_spread_over_threads() {
    let Some(rdma) = device() else { return };
    for verb in VERBS {
        let size = if verb == "atomic" { "" } else { "--size 2560" };
        let options = "--qps 8 --threads 2 --iters 20 --warm-up 2 --validate --yield";
        let report = rdma.measure(&format!("{verb} bw {size} {options}"));
        assert_eq!((report.at("/plan/qps").as_u64(), report.at("/plan/threads").as_u64()), (Some(4), Some(2)));
        let compared = match verb {
            // Each queue pair sends 22 messages, two of them for warm-up. The peer compares 22 messages, or 22 words that
            // atomics changed.
            "send" | "atomic" => 8 * 22,
            _ => 8,
        };
        check(&report, 8 * 20, &[compared]);
    }
    let report = rdma.measure("send lat --threads 2 --iters 20 --yield");
    assert_eq!(report.counts("/messages"), [40]);
    assert_eq!(report.number("/latency/samples"), 40.0);
}
