//! The data path is inlined into its callers: without `#[inline]` a call across crates costs a multiple of what C costs.

/// Sources whose public functions are on the data path, all of them.
const DATA_PATH: &[(&str, &str)] = &[
    ("post/send/batch.rs", include_str!("../src/post/send/batch.rs")),
    ("post/send/verbs.rs", include_str!("../src/post/send/verbs.rs")),
    ("post/work_request.rs", include_str!("../src/post/work_request.rs")),
    ("post/recv.rs", include_str!("../src/post/recv.rs")),
    ("cq/poll.rs", include_str!("../src/cq/poll.rs")),
    ("cq/poller.rs", include_str!("../src/cq/poller.rs")),
    ("cq/standard.rs", include_str!("../src/cq/standard.rs")),
    ("endpoint/batch.rs", include_str!("../src/endpoint/batch.rs")),
    ("endpoint/face.rs", include_str!("../src/endpoint/face.rs")),
    ("endpoint/work.rs", include_str!("../src/endpoint/work.rs")),
];

/// Functions of the data path in sources that have others as well.
const NAMED: &[(&str, &str, &[&str])] = &[
    (
        "endpoint/post.rs",
        include_str!("../src/endpoint/post.rs"),
        &[
            "receive",
            "post",
            "send",
            "send_inline",
            "write",
            "read",
            "batch",
            "post_buffer",
            "post_at_once",
            "posted_rarely",
        ],
    ),
    (
        "endpoint/poll.rs",
        include_str!("../src/endpoint/poll.rs"),
        &["poll", "take", "polled_rarely", "wait", "arm", "take_usual"],
    ),
    ("endpoint/set/mod.rs", include_str!("../src/endpoint/set/mod.rs"), &["endpoint", "settle", "index"]),
    ("endpoint/set/poll.rs", include_str!("../src/endpoint/set/poll.rs"), &["poll", "wait"]),
    (
        "endpoint/set/members.rs",
        include_str!("../src/endpoint/set/members.rs"),
        &["find", "settle", "is_idle", "take_usual", "write_u32", "finish"],
    ),
    ("endpoint/gates.rs", include_str!("../src/endpoint/gates.rs"), &["receive"]),
    (
        "endpoint/ring.rs",
        include_str!("../src/endpoint/ring.rs"),
        &["next_sequence", "is_full", "oldest", "push", "push_alike", "stage", "commit", "take_oldest"],
    ),
    ("srq/slab.rs", include_str!("../src/srq/slab.rs"), &["is_ticket", "insert", "take"]),
    ("cq/owned.rs", include_str!("../src/cq/owned.rs"), &["stand", "next_row"]),
    ("post/chain.rs", include_str!("../src/post/chain.rs"), &["slot", "inline", "post", "position"]),
    (
        "post/send/batch.rs",
        include_str!("../src/post/send/batch.rs"),
        &["new", "add", "check_atomic", "set_none", "set_rdma", "set_atomic"],
    ),
    ("post/send/mod.rs", include_str!("../src/post/send/mod.rs"), &["target", "batch", "abort", "complete"]),
    (
        "post/send/queue.rs",
        include_str!("../src/post/send/queue.rs"),
        &["batch", "extended", "classic", "post_to", "complete"],
    ),
    (
        "endpoint/completion.rs",
        include_str!("../src/endpoint/completion.rs"),
        &["ok", "is_receive", "imm", "invalidated_rkey"],
    ),
    (
        "cq/mod.rs",
        include_str!("../src/cq/mod.rs"),
        &[
            "arm",
            "end_poll",
            "end_open_poll",
            "refill",
            "has_next",
            "take",
            "take_first",
            "show",
            "id",
            "as_raw",
            "poll_started",
            "poll_ended",
            "this_thread",
        ],
    ),
    (
        "cq/poller.rs",
        include_str!("../src/cq/poller.rs"),
        &["raw", "start", "begin", "take_classic", "drain_classic", "as_extended", "ended"],
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
    ("mr/mod.rs", include_str!("../src/mr/mod.rs"), &["pd", "lkey"]),
    ("pd.rs", include_str!("../src/pd.rs"), &["is_same", "id"]),
    (
        "qp/mod.rs",
        include_str!("../src/qp/mod.rs"),
        &["send_batch", "recv_batch", "receive", "split", "send_state", "recv_state", "is_extended"],
    ),
];

/// Names of the functions in `source` that lack `#[inline]`, and how many were looked at.
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
