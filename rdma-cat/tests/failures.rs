//! Peers that die, signals, broken pipes and wrong command lines.

mod support;

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use support::{Cat, Scratch, random};

const NONE: [&str; 0] = [];

/// Whether a temporary file has bytes.
fn has_partial(directory: &Path) -> bool {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.path().extension().is_some_and(|end| end == "partial"))
        .any(|entry| entry.metadata().is_ok_and(|metadata| metadata.len() > 0))
}

/// A listener that has received a part of a file, whose old contents are `old`, and the peer that sends it.
fn transfer(scratch: &Scratch) -> (Cat, Cat) {
    fs::write(scratch.file("target"), "old").unwrap();
    let (server, address) = Cat::listen(["--receive".into(), scratch.file("target")]);
    let mut client = Cat::start([&address]);
    client.write(&random(1, 1_000_000));
    scratch.wait_until(has_partial);
    (server, client)
}

fn assert_untouched(scratch: &Scratch) {
    assert_eq!(scratch.names(), ["target"]);
    assert_eq!(fs::read(scratch.file("target")).unwrap(), b"old");
}

#[test]
fn a_file_of_a_killed_peer_is_removed() {
    let scratch = Scratch::new();
    let (server, client) = transfer(&scratch);
    client.signal(Signal::KILL);
    server.fail("the connection is lost");
    assert_untouched(&scratch);
}

#[test]
fn a_killed_peer_is_noticed_after_the_end_of_its_input() {
    let scratch = Scratch::new();
    let copy = scratch.file("copy");
    let (server, address) = Cat::listen(["--receive".into(), copy.clone()]);
    let mut client = Cat::start([&address]);
    client.end_input();
    scratch.wait_until(|_| copy.exists());
    // The input of the server stays open.
    client.signal(Signal::KILL);
    server.fail("the connection is lost");
}

#[test]
fn an_interrupted_sender_is_no_end_of_the_file() {
    let scratch = Scratch::new();
    let (server, client) = transfer(&scratch);
    client.signal(Signal::INT);
    assert_eq!(client.exit().code, Some(130));
    server.fail("the connection is lost");
    assert_untouched(&scratch);
}

#[test]
fn an_interrupted_receiver_removes_its_file() {
    let scratch = Scratch::new();
    let (server, client) = transfer(&scratch);
    server.signal(Signal::INT);
    assert_eq!(server.exit().code, Some(130));
    client.fail("the connection is lost");
    assert_untouched(&scratch);
}

#[test]
fn a_signal_ends_a_listener() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (server, _) = Cat::listen(["--keep"]);
        server.signal(signal);
        assert_eq!(server.exit().code, Some(code));
    }
}

#[test]
fn a_signal_ends_a_sender_whose_peer_is_stopped() {
    let (mut server, address) = Cat::listen(NONE);
    let mut client = Cat::start([&address]);
    client.write(b"connected");
    server.wait_for_output(9);
    server.signal(Signal::STOP);
    client.feed(random(2, 40_000_000));
    client.signal(Signal::INT);
    assert_eq!(client.exit().code, Some(130));
    server.signal(Signal::CONT);
    server.fail("the connection is lost");
}

#[test]
fn a_broken_pipe_ends_both_programs() {
    let (mut server, address) = Cat::listen(NONE);
    server.break_output();
    let mut client = Cat::start([&address]);
    client.feed(random(3, 40_000_000));
    server.fail("cannot write to standard output");
    client.fail("the connection is lost");
}

#[test]
fn an_address_without_listener_is_named() {
    for address in ["127.0.0.1:1", "localhost:1"] {
        Cat::start([address]).fail(&format!("cannot connect to {address}"));
    }
    Cat::start(["host.invalid:7471"]).fail("cannot resolve the name");
    // An address for documentation, which no host has.
    Cat::start(["--timeout", "0.2", "192.0.2.1:7471"]).fail("cannot connect to 192.0.2.1:7471");
    Cat::start(["-l", "192.0.2.1:7471"]).fail("cannot listen at 192.0.2.1:7471");
}

#[test]
fn wrong_files_are_named_before_connecting() {
    let scratch = Scratch::new();
    let missing = scratch.file("missing");
    Cat::start(["127.0.0.1:1".into(), "--send".into(), missing.clone()]).fail("cannot read");
    Cat::start(["127.0.0.1:1".into(), "--send".into(), scratch.file(".")]).fail("directory");
    Cat::start(["-l".into(), "0".into(), "--receive".into(), missing.join("file")]).fail("cannot create");
    Cat::start(["-l", "0", "--receive", "/dev/null"]).fail("not a regular file");
    assert!(scratch.names().is_empty());
}

#[test]
fn help_and_wrong_usage_have_their_exit_status() {
    let help = Cat::start(["--help"]).exit();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.code == Some(0) && text.contains("Usage: rdma-cat") && text.contains("--receive"), "{text}");
    for wrong in [vec![], vec!["host"], vec!["host:0"], vec!["host:1", "--keep"], vec!["-l", "::1:7471"]] {
        let exit = Cat::start(&wrong).exit();
        assert!(exit.code == Some(2) && exit.stderr.contains("Usage: rdma-cat"), "{wrong:?}: {}", exit.stderr);
    }
}
