//! All functions of the data path have `#[inline]`. Without it, a call across crates costs several times as much as in C.

/// Sources whose public functions are all on the data path.
const DATA_PATH: &[(&str, &str)] = &[
    ("post/send/batch.rs", include_str!("../src/post/send/batch.rs")),
    ("post/send/verbs.rs", include_str!("../src/post/send/verbs.rs")),
    ("post/send/xrc.rs", include_str!("../src/post/send/xrc.rs")),
    ("post/work_request.rs", include_str!("../src/post/work_request.rs")),
    ("post/recv.rs", include_str!("../src/post/recv.rs")),
    ("cq/completion.rs", include_str!("../src/cq/completion.rs")),
    ("cq/poll.rs", include_str!("../src/cq/poll.rs")),
    ("cq/poller.rs", include_str!("../src/cq/poller.rs")),
    ("cq/standard.rs", include_str!("../src/cq/standard.rs")),
    ("endpoint/batch.rs", include_str!("../src/endpoint/batch.rs")),
    ("endpoint/methods.rs", include_str!("../src/endpoint/methods.rs")),
    ("endpoint/set/lent.rs", include_str!("../src/endpoint/set/lent.rs")),
    ("endpoint/work.rs", include_str!("../src/endpoint/work.rs")),
];

/// Functions of the data path in sources that also contain other functions.
const NAMED: &[(&str, &str, &[&str])] = &[
    (
        "endpoint/post.rs",
        include_str!("../src/endpoint/post.rs"),
        &[
            "receive",
            "post",
            "send_inline",
            "transfer",
            "slow_post_result",
            "abort_batch",
            "batch",
            "gate",
            "room",
            "operation",
            "verb",
        ],
    ),
    (
        "endpoint/poll.rs",
        include_str!("../src/endpoint/poll.rs"),
        &["poll", "poll_with", "slow_poll_result", "wait", "arm", "take_fast"],
    ),
    ("endpoint/set/mod.rs", include_str!("../src/endpoint/set/mod.rs"), &["endpoint", "end_forgotten_batch", "index"]),
    ("endpoint/set/sink.rs", include_str!("../src/endpoint/set/sink.rs"), &["sent", "sent", "received", "received"]),
    ("endpoint/set/poll.rs", include_str!("../src/endpoint/set/poll.rs"), &["poll", "poll_each", "poll_into", "wait"]),
    (
        "endpoint/set/members.rs",
        include_str!("../src/endpoint/set/members.rs"),
        &["find", "is_idle", "take_fast", "take_plain"],
    ),
    ("endpoint/set/qp_numbers.rs", include_str!("../src/endpoint/set/qp_numbers.rs"), &["slot", "index"]),
    (
        "endpoint/poll_each.rs",
        include_str!("../src/endpoint/poll_each.rs"),
        &["poll_each", "poll_extended", "poll_classic", "take_plain", "take_run", "take_sent", "take_received"],
    ),
    ("endpoint/gates.rs", include_str!("../src/endpoint/gates.rs"), &["receive"]),
    (
        "endpoint/ring.rs",
        include_str!("../src/endpoint/ring.rs"),
        &[
            "next_sequence",
            "is_full",
            "oldest",
            "push",
            "push_same_kind",
            "stage",
            "commit",
            "oldest_kind",
            "take_oldest",
        ],
    ),
    ("endpoint/ring/runs.rs", include_str!("../src/endpoint/ring/runs.rs"), &["store", "drop", "drop"]),
    ("endpoint/many.rs", include_str!("../src/endpoint/many.rs"), &["send_many"]),
    ("srq/slab.rs", include_str!("../src/srq/slab.rs"), &["is_ticket", "insert", "take"]),
    (
        "cq/owned.rs",
        include_str!("../src/cq/owned.rs"),
        &["start_poll", "next", "takes_several", "is_one_per_poll", "next_row"],
    ),
    ("post/chain.rs", include_str!("../src/post/chain.rs"), &["slot", "inline", "post", "position"]),
    (
        "post/send/batch.rs",
        include_str!("../src/post/send/batch.rs"),
        &[
            "new",
            "complete",
            "complete_nonempty",
            "drop",
            "begin",
            "finish",
            "check_atomic",
            "set_none",
            "set_rdma",
            "set_atomic",
        ],
    ),
    ("post/send/destination.rs", include_str!("../src/post/send/destination.rs"), &["encode", "set", "fill"]),
    (
        "post/send/mod.rs",
        include_str!("../src/post/send/mod.rs"),
        &["is_extended", "batch", "start", "open", "target", "info", "abort"],
    ),
    ("post/send/queue.rs", include_str!("../src/post/send/queue.rs"), &["batch", "with_interface", "post"]),
    (
        "post/send/verbs.rs",
        include_str!("../src/post/send/verbs.rs"),
        &[
            "add_send",
            "add_send_imm",
            "add_send_invalidate",
            "add_write",
            "add_write_imm",
            "add_read",
            "add_compare_swap",
            "add_fetch_add",
            "add_flush",
        ],
    ),
    (
        "endpoint/completion.rs",
        include_str!("../src/endpoint/completion.rs"),
        &["ok", "is_receive", "imm", "invalidated_rkey"],
    ),
    ("cq/classic.rs", include_str!("../src/cq/classic.rs"), &["refill", "has_next", "take", "take_first", "visit"]),
    (
        "cq/mod.rs",
        include_str!("../src/cq/mod.rs"),
        &["arm", "end_poll", "end_open_poll", "id", "as_raw", "poll_started", "poll_ended", "this_thread"],
    ),
    (
        "cq/poller.rs",
        include_str!("../src/cq/poller.rs"),
        &["raw", "start", "begin", "poll_one_classic", "poll_all_classic", "as_extended", "end_of_poll"],
    ),
    (
        "mr/buffer.rs",
        include_str!("../src/mr/buffer.rs"),
        &["pd", "lkey", "address", "sge", "short_sge", "short_whole_sge", "deref", "set_len"],
    ),
    (
        "mr/exposed.rs",
        include_str!("../src/mr/exposed.rs"),
        &["load_u64", "store_u64", "range", "word", "remote", "len"],
    ),
    ("mr/region.rs", include_str!("../src/mr/region.rs"), &["lkey"]),
    ("mr/registration.rs", include_str!("../src/mr/registration.rs"), &["pd"]),
    ("pd/mod.rs", include_str!("../src/pd/mod.rs"), &["is_same", "id"]),
    (
        "qp/mod.rs",
        include_str!("../src/qp/mod.rs"),
        &["send_batch", "recv_batch", "receive", "split", "send_state", "recv_state", "is_extended"],
    ),
];

/// Names of the data path functions in `source` that lack `#[inline]`, and the number of functions that were checked.
fn without_inline(source: &str, is_data_path: impl Fn(&str, bool) -> bool) -> (Vec<String>, usize) {
    let (mut missing, mut found, mut inline) = (Vec::new(), 0, false);
    for line in source.lines().map(str::trim) {
        match line.split_once("fn ") {
            Some((declaration, rest))
                if [
                    "",
                    "pub ",
                    "pub unsafe ",
                    "pub(crate) ",
                    "pub(super) ",
                    "pub(crate) unsafe ",
                    "pub(super) unsafe ",
                    "unsafe ",
                ]
                .contains(&declaration) =>
            {
                let name = rest.split(['(', '<']).next().unwrap_or_default();
                if is_data_path(name, declaration.starts_with("pub ")) {
                    found += 1;
                    if !inline {
                        missing.push(name.to_owned());
                    }
                }
                inline = false;
            }
            _ if line.starts_with("#[inline") => inline = !line.contains("never"),
            _ if line.ends_with('}') => inline = false,
            _ => {}
        }
    }
    (missing, found)
}

#[test]
fn every_function_of_the_data_path_is_inline() {
    for (file, source) in DATA_PATH {
        let (missing, found) = without_inline(source, |_, public| public);
        assert!(found > 0, "{file}: no functions found");
        assert_eq!(missing, [""; 0], "{file}");
    }
    for (file, source, names) in NAMED {
        let (missing, found) = without_inline(source, |name, _| names.contains(&name));
        assert_eq!(found, names.len(), "{file}: a function was renamed");
        assert_eq!(missing, [""; 0], "{file}");
    }
}
