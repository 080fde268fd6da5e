//! A test's own process, for what is counted or limited by process.

use std::process::{Command, Stdio};

use rdma_safe::soft;

const CHILD: &str = "RDMA_TEST_CHILD";

/// Runs `body` in a process of its own: the calling test, which `path` names, executed once more.
pub(crate) fn in_own_process(path: &str, body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let program = std::env::current_exe().expect("the test's program has a path");
    let output = Command::new(program)
        .args(["--exact", path, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdin(Stdio::null())
        .output()
        .expect("the test's program runs");
    // Indented, so that nobody takes its lines for those of this process.
    let lines = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).replace('\n', "\n    "));
    let text = lines.concat();
    assert!(output.status.success(), "{path} in its own process: {}\n    {text}", output.status);
    assert!(text.contains("1 passed"), "{path} names no test:\n    {text}");
}

/// Open file descriptors of this process.
pub(crate) fn open_files() -> usize {
    // Less the one that the listing itself has open.
    std::fs::read_dir("/proc/self/fd").expect("procfs is mounted").count() - 1
}

/// Bytes that this process has from the C library's allocator, here and in C: mallinfo(3).
pub(crate) fn allocated() -> usize {
    // SAFETY: it has no arguments.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Lines of `rdma resource show KIND` (qp, cq, mr, pd) that belong to this process, or what soft0 says; `None` without the tool.
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
    // The kernel notes the thread that made an object.
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs is mounted");
    let threads: Vec<String> =
        threads.map(|thread| format!(" pid {} ", thread.expect("a thread").file_name().to_string_lossy())).collect();
    let is_ours = |line: &&str| threads.iter().any(|thread| format!("{line} ").contains(thread));
    Some(String::from_utf8_lossy(&output.stdout).lines().filter(is_ours).count())
}

/// Checks that this process has `expected` kernel objects of `kind`, where the tool is there to tell.
#[track_caller]
pub(crate) fn expect_kernel_objects(kind: &str, expected: usize) {
    if let Some(found) = kernel_objects(kind) {
        assert_eq!(found, expected, "kernel objects of kind {kind}");
    }
}
