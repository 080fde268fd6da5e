//! The example `file_transfer`, whose ends are both on this machine.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use rdma_safe::cm::Connector;

use crate::support::program::{PATIENCE, Program, Running, free_port};
use crate::support::{Rdma, device, pattern, within};

/// More than the places of a receiver hold at once.
const SIZE: usize = 10_000_001;

/// A directory for what is sent and what arrives, and a receiver.
struct Desk {
    program: Program,
    path: PathBuf,
    address: String,
    port: String,
    _rdma: Rdma,
}

impl Desk {
    fn new(name: &str) -> Option<Desk> {
        let rdma = device()?;
        let Some(address) = rdma.gid.gid.ipv4().as_ref().map(Ipv4Addr::to_string) else {
            println!("skipped: the GID of the tests is of no IPv4 address");
            return None;
        };
        let program = Program::example("file_transfer")?;
        let path = std::env::temp_dir().join(format!("file-transfer-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("in")).expect("a directory");
        fs::write(path.join("source"), pattern(1, SIZE)).expect("a file");
        Some(Desk { program, path, address, port: free_port().to_string(), _rdma: rdma })
    }

    fn receiver(&self, arguments: &[&str]) -> Running {
        let into = self.path.join("in");
        let into = into.to_str().expect("text");
        let running = self.program.start_with(&[&["receive", "-d", into, "-p", &self.port], arguments].concat());
        running.wait_for("listening at");
        running
    }

    fn sender(&self, arguments: &[&str]) -> Running {
        let source = self.path.join("source");
        let source = source.to_str().expect("text");
        self.program.start_with(&[&["send", source, &self.address, "-p", &self.port], arguments].concat())
    }

    fn arrived(&self, name: &str) -> PathBuf {
        self.path.join("in").join(name)
    }

    /// Waits until some of the file is there, and not all.
    fn wait_for_a_part(&self, name: &str) -> u64 {
        let part = self.arrived(&format!(".{name}.incoming"));
        within(PATIENCE, "a part of the file", || {
            let len = part.metadata().map_or(0, |metadata| metadata.len());
            (len > 0).then_some(len)
        })
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn is_the_source(path: &Path) -> bool {
    fs::read(path).expect("it has arrived") == pattern(1, SIZE)
}

/// What comes after `what` in a line, up to a space.
fn word_after<'a>(text: &'a str, what: &str) -> &'a str {
    let (_, rest) = text.split_once(what).unwrap_or_else(|| panic!("no {what:?} in:\n{text}"));
    rest.split_whitespace().next().unwrap_or_default()
}

#[test]
fn a_file_arrives_with_the_checksum_that_it_left_with() {
    let Some(desk) = Desk::new("arrives") else { return };
    let mut receiver = desk.receiver(&["--once"]);
    let (sent, said) = desk.sender(&[]).finish();
    let (received, heard) = receiver.finish();
    assert!(sent.success() && received.success(), "{said}\n{heard}");
    assert_eq!(word_after(&said, "SHA-256 "), word_after(&heard, "SHA-256 "));
    assert!(is_the_source(&desk.arrived("source")));
    assert!(said.contains(&format!("sent source: {SIZE} bytes")), "{said}");
}

#[test]
fn empty_files_and_many_at_a_time_arrive() {
    let Some(desk) = Desk::new("many") else { return };
    let _receiver = desk.receiver(&[]);
    let mut senders: Vec<Running> = ["a", "b", "c"].iter().map(|name| desk.sender(&["--name", name])).collect();
    for sender in &mut senders {
        let (status, said) = sender.finish();
        assert!(status.success(), "{said}");
    }
    fs::write(desk.path.join("source"), b"").expect("a file");
    let (status, said) = desk.sender(&["--name", "empty"]).finish();
    assert!(status.success(), "{said}");
    assert!(["a", "b", "c"].iter().all(|name| is_the_source(&desk.arrived(name))));
    assert_eq!(fs::read(desk.arrived("empty")).expect("it has arrived"), b"");
}

#[test]
fn a_transfer_whose_sender_was_killed_is_gone_on_with() {
    let Some(desk) = Desk::new("sender") else { return };
    let receiver = desk.receiver(&[]);
    let mut victim = desk.sender(&[]);
    desk.wait_for_a_part("source");
    victim.kill();
    receiver.wait_for("the peer has ended the connection");
    let stored = desk.wait_for_a_part("source");
    assert!(stored < SIZE as u64, "it was killed too late for this test to mean anything");
    let (status, said) = desk.sender(&[]).finish();
    assert!(status.success(), "{said}");
    assert!(said.contains(&format!("bytes, {stored} of which were there,")), "{said}");
    assert!(is_the_source(&desk.arrived("source")));
}

#[test]
fn a_transfer_whose_receiver_was_killed_is_gone_on_with() {
    let Some(desk) = Desk::new("receiver") else { return };
    let mut receiver = desk.receiver(&[]);
    let mut sender = desk.sender(&[]);
    desk.wait_for_a_part("source");
    receiver.kill();
    let (status, said) = sender.finish();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.lines().any(|line| line.starts_with("file_transfer: ")), "{said}");
    drop(receiver);
    let _receiver = desk.receiver(&[]);
    let (status, said) = desk.sender(&[]).finish();
    assert!(status.success() && said.contains("of which were there,"), "{said}");
    assert!(is_the_source(&desk.arrived("source")));
}

#[test]
fn what_is_there_of_another_file_is_replaced() {
    let Some(desk) = Desk::new("other") else { return };
    fs::write(desk.arrived(".source.incoming"), pattern(2, 5_000_000)).expect("a file");
    let _receiver = desk.receiver(&[]);
    let (status, said) = desk.sender(&[]).finish();
    assert!(status.success() && !said.contains("of which were there"), "{said}");
    assert!(is_the_source(&desk.arrived("source")));
}

#[test]
fn a_receiver_says_why_it_refuses_and_goes_on() {
    let Some(desk) = Desk::new("refuses") else { return };
    let receiver = desk.receiver(&[]);
    fs::write(desk.arrived("taken"), b"mine").expect("a file");
    for (name, wanted) in
        [("taken", "--overwrite"), ("../out", "is no name for a file"), ("..", "is no name for a file")]
    {
        let (status, said) = desk.sender(&["--name", name]).finish();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("the receiver refuses") && said.contains(wanted), "{said}");
    }
    assert_eq!(fs::read(desk.arrived("taken")).expect("it is there"), b"mine");
    assert!(!desk.path.join("out").exists());
    // A program of another kind.
    let port: u16 = desk.port.parse().expect("a number");
    let stranger = Connector::new().connect((desk.address.as_str(), port)).expect_err("refused");
    assert!(stranger.to_string().contains("refused"), "{stranger}");
    receiver.wait_for("does not speak this language");
    let (status, said) = desk.sender(&[]).finish();
    assert!(status.success(), "{said}");
}

#[test]
fn a_sender_says_what_is_wrong_at_its_own_end() {
    let Some(desk) = Desk::new("wrong") else { return };
    let (status, said) = desk.sender(&[]).finish();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("nobody listens at the peer's port"), "{said}");
    for (file, wanted) in [("/", "not a regular file"), ("/no/such", "No such file")] {
        let (status, said) = desk.program.start_with(&["send", file, &desk.address, "--name", "x"]).finish();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
}
