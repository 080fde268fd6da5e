//! The example `file_transfer`, whose ends are both on this machine.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rdma_safe::cm::{Cause, CmError, Connection, Connector, Listener};
use rdma_safe::{Endpoint, Error, RemoteMemory, WcStatus, Work};
use serde_json::{Value, json};

use crate::support::program::{PATIENCE, Program, Running, free_port};
use crate::support::{DEADLINE, Rdma, device_with_cm, pattern, within};

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
        let rdma = device_with_cm()?;
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

    /// Where the receiver listens.
    fn listening(&self) -> SocketAddr {
        format!("{}:{}", self.address, self.port).parse().expect("an address of IPv4")
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

const HELLO: &[u8] = b"file_transfer 1";

fn say(connection: &mut Connection, message: &Value) {
    let mut outbox = connection.pd().allocate(1024).unwrap();
    outbox.fill_from(message.to_string().as_bytes()).unwrap();
    connection.send(outbox).unwrap();
    assert_eq!(connection.wait(DEADLINE).unwrap().status, WcStatus::SUCCESS);
}

/// A sender with no more room than for the first answers, whose file the receiver waits for; and where it is written to.
fn sender_by_hand(at: SocketAddr, name: &str) -> (Connection, RemoteMemory) {
    let route = Connector::new().resolve(at).unwrap();
    let pd = route.pd().clone();
    let mut prepared = route.prepare(Endpoint::builder(&pd).recv_depth(2)).unwrap();
    for _ in 0..2 {
        prepared.receive(pd.allocate(1024).unwrap()).unwrap();
    }
    let mut connection = prepared.connect(HELLO).unwrap();
    say(&mut connection, &json!({"Offer": {"name": name, "size": 1 << 30}}));
    let ready = connection.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    let ready: Value = serde_json::from_slice(&ready).unwrap();
    say(&mut connection, &json!({"Start": {"at": 0}}));
    (connection, serde_json::from_value(ready["Ready"]["memory"].clone()).unwrap())
}

/// Writes that piece as often as it may; how often.
fn pieces(connection: &mut Connection, target: RemoteMemory, most: u32) -> u32 {
    let mut piece = connection.pd().allocate(1).unwrap();
    piece.set_len(target.len as usize).unwrap();
    for number in 0..most {
        connection.post(Work::write(piece, target).imm(number % 16)).unwrap();
        piece = loop {
            match connection.wait(DEADLINE) {
                Ok(done) if done.status == WcStatus::SUCCESS && done.imm().is_none() => match done.buffer {
                    Some(buffer) if buffer.capacity() == 1 => break buffer,
                    _ => {}
                },
                Ok(done) => assert_eq!(done.status, WcStatus::WR_FLUSH_ERR),
                Err(Error::Cm(CmError::Connect(ended))) if ended.cause == Cause::Disconnected => return number,
                Err(error) => panic!("{error}"),
            }
        };
    }
    most
}

#[test]
fn a_receiver_ends_transfers_that_would_never_end() {
    let Some(desk) = Desk::new("endless") else { return };
    let receiver = desk.receiver(&[]);
    let (mut connection, memory) = sender_by_hand(desk.listening(), "nothing");
    assert!(pieces(&mut connection, memory.slice(0, 0).unwrap(), 2000) < 2000);
    receiver.wait_for("a piece of nothing");
    // It answers each piece, and nobody takes the answers.
    let (mut connection, memory) = sender_by_hand(desk.listening(), "deaf");
    assert!(pieces(&mut connection, memory.slice(0, 1).unwrap(), 2000) < 2000);
    receiver.wait_for("more than it may");
    let (status, said) = desk.sender(&[]).finish();
    assert!(status.success(), "{said}");
}

#[test]
fn a_receiver_has_room_for_so_many_and_for_others_when_they_are_gone() {
    let Some(desk) = Desk::new("room") else { return };
    let receiver = desk.receiver(&[]);
    let connector = Connector::new();
    let connect = || {
        let route = connector.resolve(desk.listening()).unwrap();
        let pd = route.pd().clone();
        route.prepare(Endpoint::builder(&pd)).unwrap().connect(HELLO)
    };
    let idle: Vec<_> = (0..32).map(|_| connect().unwrap()).collect();
    let (status, said) = desk.sender(&[]).finish();
    assert!(!status.success() && said.contains("too many transfers are going on"), "{said}");
    receiver.wait_for("as many transfers are going on as may");
    drop(idle);
    within(PATIENCE, "a place", || desk.sender(&[]).finish().0.success().then_some(()));
    assert!(is_the_source(&desk.arrived("source")));
}

#[test]
fn the_words_of_a_receiver_do_nothing_to_the_terminal_of_the_sender() {
    let Some(desk) = Desk::new("words") else { return };
    let mut listener = Listener::bind(desk.listening()).unwrap();
    let mut sender = desk.sender(&[]);
    let request = listener.next(PATIENCE).unwrap().expect("a sender");
    request.reject(b"\x1b]0;all is well\x07").unwrap();
    let (status, said) = sender.finish();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(r"\u{1b}]0;all is well\u{7}"), "{said}");
}
