//! Runs a test in a separate process, for resources that are counted or limited per process.

use std::process::{Command, Stdio};

use rdma_safe::soft;

const CHILD: &str = "RDMA_TEST_CHILD";

/// Runs `body` in a separate process, which executes only the calling test. `path` is the test's full name.
///
/// Miri starts no processes: there, `body` runs in the calling process.
pub(crate) fn in_own_process(path: &str, body: impl FnOnce()) {
    if cfg!(miri) || std::env::var_os(CHILD).is_some() {
        return body();
    }
    let program = std::env::current_exe().expect("the test's program has a path");
    let output = Command::new(program)
        .args(["--exact", path, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdin(Stdio::null())
        .output()
        .expect("the test's program runs");
    // The child's lines are indented to set them off from those of this process.
    let lines = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).replace('\n', "\n    "));
    let text = lines.concat();
    assert!(output.status.success(), "{path} in its own process: {}\n    {text}", output.status);
    assert!(text.contains("1 passed"), "{path} names no test:\n    {text}");
    if let Some(reason) = skip_reason(&text) {
        println!("skipped: {reason}");
    }
}

/// Why a test was skipped, by its output. The harness prints the test's name before the first line.
fn skip_reason(output: &str) -> Option<&str> {
    output.lines().find_map(|line| line.split_once("skipped: ")).map(|(_, reason)| reason)
}

#[test]
fn the_reason_of_a_skip_in_another_process_is_found() {
    assert_eq!(skip_reason("\n    test a::b ... skipped: no device\n    ok\n"), Some("no device"));
    assert_eq!(skip_reason("\n    test a::b ... ok\n    test result: ok. 1 passed; 0 failed\n"), None);
}

/// Open file descriptors of this process. Miri does not list them: there are none to compare.
pub(crate) fn open_files() -> usize {
    if cfg!(miri) {
        return 0;
    }
    // Without the descriptor that lists the directory.
    std::fs::read_dir("/proc/self/fd").expect("procfs is mounted").count() - 1
}

/// The part of [`open_files`] that are sets of epoll(7).
#[allow(dead_code, reason = "some tests count all descriptors together")]
pub(crate) fn epoll_sets() -> usize {
    if cfg!(miri) {
        return 0;
    }
    let files = std::fs::read_dir("/proc/self/fd").expect("procfs is mounted").flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter(|target| target.as_os_str() == "anon_inode:[eventpoll]").count()
}

/// Bytes that this process has allocated from the C library, in Rust and in C: mallinfo(3).
pub(crate) fn allocated() -> usize {
    // SAFETY: the function has no arguments.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Number of kernel objects of `kind` (qp, cq, mr, pd) of this process, as `rdma resource show` reports it.
///
/// On soft0, soft0 reports the number. `None` without the tool `rdma`.
pub(crate) fn kernel_objects(kind: &str) -> Option<usize> {
    if soft::is_installed() {
        let objects = soft::objects();
        return Some(match kind {
            "qp" => objects.queue_pairs,
            "cq" => objects.completion_queues,
            "mr" => objects.memory_regions,
            "pd" => objects.protection_domains,
            "srq" => objects.shared_receive_queues,
            _ => panic!("objects of kind {kind}"),
        });
    }
    let output = Command::new("rdma").args(["resource", "show", kind]).stdin(Stdio::null()).output().ok()?;
    assert!(output.status.success(), "rdma resource show {kind}: {}", String::from_utf8_lossy(&output.stderr));
    // The kernel records the thread that created an object.
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs is mounted");
    let threads: Vec<String> =
        threads.map(|thread| format!(" pid {} ", thread.expect("a thread").file_name().to_string_lossy())).collect();
    let is_ours = |line: &&str| threads.iter().any(|thread| format!("{line} ").contains(thread));
    Some(String::from_utf8_lossy(&output.stdout).lines().filter(is_ours).count())
}

/// Checks that this process has `expected` kernel objects of `kind`, if they can be counted.
#[track_caller]
pub(crate) fn expect_kernel_objects(kind: &str, expected: usize) {
    if let Some(found) = kernel_objects(kind) {
        assert_eq!(found, expected, "kernel objects of kind {kind}");
    }
}
