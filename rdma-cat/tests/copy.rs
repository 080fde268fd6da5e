//! Pipes and files are copied between two programs.

mod support;

use std::fs;

use rustix::process::Signal;
use support::{Cat, Scratch, assert_same, random};

const NONE: [&str; 0] = [];

#[test]
fn pipes_are_copied_both_ways_at_once() {
    let (mut server, address) = Cat::listen(NONE);
    let mut client = Cat::start([&address]);
    let (up, down) = (random(1, 9_000_001), random(2, 5_000_003));
    client.feed(up.clone());
    server.feed(down.clone());
    assert_same(&client.succeed(), &down);
    assert_same(&server.succeed(), &up);
}

#[test]
fn files_are_copied_both_ways_at_once() {
    let scratch = Scratch::new();
    let (up, down) = (random(3, 7_000_001), random(4, 1_000_000));
    fs::write(scratch.file("up"), &up).unwrap();
    fs::write(scratch.file("down"), &down).unwrap();
    let words = |send, receive| ["--send".into(), scratch.file(send), "--receive".into(), scratch.file(receive)];
    let (server, address) = Cat::listen(words("down", "from client"));
    let (host, port) = address.split_once(':').unwrap();
    let client = Cat::start([host.into(), port.into()].into_iter().chain(words("up", "from server")));
    assert!(client.succeed().is_empty() && server.succeed().is_empty());
    assert_same(&fs::read(scratch.file("from client")).unwrap(), &up);
    assert_same(&fs::read(scratch.file("from server")).unwrap(), &down);
    assert_eq!(scratch.names(), ["down", "from client", "from server", "up"]);
}

#[test]
fn an_empty_file_is_copied() {
    let scratch = Scratch::new();
    fs::write(scratch.file("empty"), "").unwrap();
    let (mut server, address) = Cat::listen(["--receive".into(), scratch.file("copy")]);
    server.end_input();
    Cat::start([address.into(), "--send".into(), scratch.file("empty")]).succeed();
    server.succeed();
    assert_eq!(fs::read(scratch.file("copy")).unwrap(), b"");
}

#[test]
fn the_other_direction_goes_on_after_the_end_of_input() {
    let scratch = Scratch::new();
    let copy = scratch.file("copy");
    let (mut server, address) = Cat::listen(["--receive".into(), copy.clone()]);
    let mut client = Cat::start([&address]);
    client.feed(b"question".to_vec());
    // The file has its name once the direction has ended, and the server is still running.
    scratch.wait_until(|_| copy.exists());
    assert_eq!(fs::read(&copy).unwrap(), b"question");
    server.write(b"ans");
    assert_eq!(client.wait_for_output(3), b"ans");
    server.write(b"wer");
    server.end_input();
    assert_eq!(client.succeed(), b"answer");
    server.succeed();
}

#[test]
fn short_input_arrives_at_once() {
    let (mut server, address) = Cat::listen(NONE);
    let mut client = Cat::start([&address]);
    for turn in 1..=20 {
        client.write(b"ping\n");
        assert_eq!(server.wait_for_output(5 * turn), b"ping\n".repeat(turn));
        server.write(b"pong\n");
        assert_eq!(client.wait_for_output(5 * turn), b"pong\n".repeat(turn));
    }
    client.end_input();
    server.end_input();
    client.succeed();
    server.succeed();
}

#[test]
fn a_received_file_replaces_the_target_of_a_link() {
    let scratch = Scratch::new();
    fs::write(scratch.file("old"), "old").unwrap();
    std::os::unix::fs::symlink("old", scratch.file("link")).unwrap();
    let (mut server, address) = Cat::listen(["--receive".into(), scratch.file("link")]);
    server.end_input();
    let mut client = Cat::start([&address]);
    client.feed(b"new".to_vec());
    client.succeed();
    server.succeed();
    assert_eq!(fs::read(scratch.file("old")).unwrap(), b"new");
    assert_eq!(scratch.names(), ["link", "old"]);
}

#[test]
fn kept_listeners_serve_one_peer_after_another() {
    let scratch = Scratch::new();
    let bytes = random(5, 2_000_000);
    fs::write(scratch.file("served"), &bytes).unwrap();
    let (server, address) = Cat::listen(["--keep".into(), "--send".into(), scratch.file("served")]);
    for _ in 0..3 {
        let mut client = Cat::start([&address]);
        client.end_input();
        assert_same(&client.succeed(), &bytes);
    }
    // A peer that fails does not end the server.
    let mut client = Cat::start([&address]);
    client.wait_for_output(bytes.len());
    client.signal(Signal::KILL);
    let mut client = Cat::start([&address]);
    client.end_input();
    assert_same(&client.succeed(), &bytes);
    server.signal(Signal::INT);
    let exit = server.exit();
    assert_eq!(exit.code, Some(130));
    assert!(exit.stderr.contains("the connection is lost"), "{}", exit.stderr);
}

#[test]
fn progress_ends_with_a_summary() {
    let (mut server, address) = Cat::listen(["--progress"]);
    server.end_input();
    let mut client = Cat::start([&address]);
    client.feed(vec![1; 3_000_000]);
    client.succeed();
    let exit = server.exit();
    assert!(exit.stderr.contains("received 3000000 bytes in "), "{}", exit.stderr);
}

#[test]
fn a_quiet_transfer_prints_nothing() {
    let scratch = Scratch::new();
    fs::write(scratch.file("sent"), "text").unwrap();
    let (mut server, address) = Cat::listen(NONE);
    server.end_input();
    let exit = Cat::start([address.into(), "-q".into(), "--send".into(), scratch.file("sent")]).exit();
    assert!(exit.code == Some(0) && exit.stderr.is_empty(), "{exit:?}");
    assert_eq!(server.succeed(), b"text");
}
