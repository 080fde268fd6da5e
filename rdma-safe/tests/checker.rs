//! soft0's checker, through `rdma_safe::soft::check`.

use std::process::{Command, Output};
use std::time::Duration;

use rdma_safe::soft::check::{Kind, Options, Session};
use rdma_safe::{Device, Endpoint, Errno, Error, WcStatus, soft};

/// Only a test that hangs waits for so long.
const DEADLINE: Duration = Duration::from_secs(60);

/// Two connected endpoints of a new domain.
fn connected() -> [Endpoint; 2] {
    let pd = Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    let [mut a, mut b] = [(); 2].map(|()| Endpoint::builder(&pd).build().unwrap());
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    [a, b]
}

/// Sends a message that is longer than its receive.
fn send_too_much([a, b]: &mut [Endpoint; 2]) {
    b.receive(a.pd().allocate(10).unwrap()).unwrap();
    a.send(a.pd().allocate(11).unwrap()).unwrap();
    assert!(b.wait(DEADLINE).unwrap().ok().is_err());
}

#[test]
fn a_report_names_the_wr_id_of_the_work() {
    soft::install().unwrap();
    let session = Session::start(Options::default()).unwrap();
    let [mut a, mut b] = connected();
    let pd = a.pd().clone();
    let receive = b.receive(pd.allocate(10).unwrap()).unwrap();
    let send = a.send(pd.allocate(11).unwrap()).unwrap();
    assert!(!send.is_receive() && send.wr_id() >> 62 == 0, "{send:?}");

    let failed = b.wait(DEADLINE).unwrap().ok().unwrap_err();
    assert_eq!((failed.0.id, failed.0.status), (receive, WcStatus::LOC_LEN_ERR));
    assert_eq!(failed.error().wr_id | 1 << 63, receive.wr_id(), "without the mark of receives");
    let reports = session.take_reports();
    let [report] = &reports[..] else { panic!("{reports:?}") };
    assert_eq!(
        (report.kind, report.qp, report.wr_id),
        (Kind::ReceiveTooSmall, Some(b.address().qp_num), Some(receive.wr_id()))
    );
}

/// Marks a process that [`run`] has started.
const CHILD: &str = "CHECKER_TEST_CHILD";

/// Runs the test `name` in a process of its own, with `options` in `RDMA_SOFT_CHECK`.
fn run(name: &str, options: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env("RDMA_SOFT_CHECK", options).env(CHILD, "1").output().unwrap()
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[test]
fn misuse() {
    if is_child() {
        soft::install().unwrap();
        send_too_much(&mut connected());
    }
}

#[test]
fn reports_go_to_standard_error_if_their_file_cannot_be_written() {
    let output = run("misuse", "text=/no/such/folder/text,json=/no/such/folder/json");
    assert_eq!(output.status.code(), Some(66), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    for file in ["text", "json"] {
        let reason = format!("cannot write to /no/such/folder/{file}: No such file or directory");
        assert_eq!(stderr.matches(&reason).count(), 1, "{stderr}");
    }
    assert!(stderr.contains("rdma-soft check: receive-too-small: "), "{stderr}");
    assert!(stderr.contains("\"kind\":\"receive-too-small\""), "{stderr}");
    assert!(stderr.contains("rdma-soft check: reports: 1 receive-too-small"), "{stderr}");
}

#[test]
fn opening() {
    if is_child() {
        soft::install().unwrap();
        for _ in 0..2 {
            let error = Device::first().unwrap().open().unwrap_err();
            assert!(matches!(error, Error::OpenDevice { errno: Errno(libc::EINVAL), .. }), "{error:?}");
            println!("<{error}>");
        }
    }
}

#[test]
fn options_that_are_not_valid_are_named_once_with_the_valid_ones() {
    for (options, reason) in [
        ("colour=red", "RDMA_SOFT_CHECK: unknown option \"colour=red\": use backtrace, suppress=KIND,KIND, text=FILE"),
        ("suppress=all", "RDMA_SOFT_CHECK: suppress=all: unknown kind, use send-changed, receive-written, "),
        ("exit=many", "RDMA_SOFT_CHECK: exit=\"many\": a whole number is expected"),
    ] {
        let output = run("opening", options);
        let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{stdout}{stderr}");
        assert_eq!(stderr.matches(reason).count(), 1, "once on standard error: {stderr}");
        assert_eq!(stdout.matches(reason).count(), 2, "in each error: {stdout}");
    }
}
