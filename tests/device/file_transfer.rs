//! The example `file_transfer`, with both ends on this machine.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rdma_safe::cm::{Cause, CmError, Connection, Connector, Listener};
use rdma_safe::{Endpoint, Error, RemoteMemory, WcStatus, Work};
use serde_json::{Value, json};

use crate::support::program::{Program, Running, TIME_LIMIT, free_port};
use crate::support::{DEADLINE, Rdma, device, pattern, within};

/// More bytes than a receiver buffers at once.
const SIZE: usize = 10_000_001;

/// A temporary directory with a source file and the receiver's directory.
struct Setup {
    program: Program,
    path: PathBuf,
    address: String,
    port: String,
    _rdma: Rdma,
}

impl Setup {
    fn new(name: &str) -> Option<Setup> {
        let rdma = device()?;
        let Some(address) = rdma.gid.gid.ipv4().as_ref().map(Ipv4Addr::to_string) else {
            println!("skipped: the GID of the tests is not an IPv4 address");
            return None;
        };
        let program = Program::example("file_transfer")?;
        let path = std::env::temp_dir().join(format!("file-transfer-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("in")).expect("a directory");
        fs::write(path.join("source"), pattern(1, SIZE)).expect("a file");
        Some(Setup { program, path, address, port: free_port().to_string(), _rdma: rdma })
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

    /// The address at which the receiver listens.
    fn listening(&self) -> SocketAddr {
        format!("{}:{}", self.address, self.port).parse().expect("an IPv4 address")
    }

    fn arrived(&self, name: &str) -> PathBuf {
        self.path.join("in").join(name)
    }

    /// Waits until a part of the file has arrived. Returns its length.
    fn wait_for_part(&self, name: &str) -> u64 {
        let part = self.arrived(&format!(".{name}.incoming"));
        within(TIME_LIMIT, "a part of the file", || {
            let len = part.metadata().map_or(0, |metadata| metadata.len());
            (len > 0).then_some(len)
        })
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn equals_source(path: &Path) -> bool {
    fs::read(path).expect("it has arrived") == pattern(1, SIZE)
}

/// The word after `what` in `text`.
fn word_after<'a>(text: &'a str, what: &str) -> &'a str {
    let (_, rest) = text.split_once(what).unwrap_or_else(|| panic!("no {what:?} in:\n{text}"));
    rest.split_whitespace().next().unwrap_or_default()
}

#[test]
fn a_file_arrives_with_the_same_checksum() {
    let Some(setup) = Setup::new("arrives") else { return };
    let mut receiver = setup.receiver(&["--once"]);
    let (sent, output) = setup.sender(&[]).finish();
    let (received, receiver_output) = receiver.finish();
    assert!(sent.success() && received.success(), "{output}\n{receiver_output}");
    assert_eq!(word_after(&output, "SHA-256 "), word_after(&receiver_output, "SHA-256 "));
    assert!(equals_source(&setup.arrived("source")));
    assert!(output.contains(&format!("sent source: {SIZE} bytes")), "{output}");
}

#[test]
fn empty_files_and_concurrent_transfers_arrive() {
    let Some(setup) = Setup::new("many") else { return };
    let _receiver = setup.receiver(&[]);
    let mut senders: Vec<Running> = ["a", "b", "c"].iter().map(|name| setup.sender(&["--name", name])).collect();
    for sender in &mut senders {
        let (status, output) = sender.finish();
        assert!(status.success(), "{output}");
    }
    fs::write(setup.path.join("source"), b"").expect("a file");
    let (status, output) = setup.sender(&["--name", "empty"]).finish();
    assert!(status.success(), "{output}");
    assert!(["a", "b", "c"].iter().all(|name| equals_source(&setup.arrived(name))));
    assert_eq!(fs::read(setup.arrived("empty")).expect("it has arrived"), b"");
}

#[test]
fn a_transfer_resumes_after_its_sender_was_killed() {
    let Some(setup) = Setup::new("sender") else { return };
    let receiver = setup.receiver(&[]);
    let mut victim = setup.sender(&[]);
    setup.wait_for_part("source");
    victim.kill();
    receiver.wait_for("the peer has closed the connection");
    let stored = setup.wait_for_part("source");
    assert!(stored < SIZE as u64, "the sender was killed too late");
    let (status, output) = setup.sender(&[]).finish();
    assert!(status.success(), "{output}");
    assert!(output.contains(&format!("bytes, resumed at {stored},")), "{output}");
    assert!(equals_source(&setup.arrived("source")));
}

#[test]
fn a_transfer_resumes_after_its_receiver_was_killed() {
    let Some(setup) = Setup::new("receiver") else { return };
    let mut receiver = setup.receiver(&[]);
    let mut sender = setup.sender(&[]);
    setup.wait_for_part("source");
    receiver.kill();
    let (status, output) = sender.finish();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.lines().any(|line| line.starts_with("file_transfer: ")), "{output}");
    drop(receiver);
    let _receiver = setup.receiver(&[]);
    let (status, output) = setup.sender(&[]).finish();
    assert!(status.success() && output.contains(", resumed at "), "{output}");
    assert!(equals_source(&setup.arrived("source")));
}

#[test]
fn a_partial_file_with_other_contents_is_replaced() {
    let Some(setup) = Setup::new("other") else { return };
    fs::write(setup.arrived(".source.incoming"), pattern(2, 5_000_000)).expect("a file");
    let _receiver = setup.receiver(&[]);
    let (status, output) = setup.sender(&[]).finish();
    assert!(status.success() && !output.contains("resumed at"), "{output}");
    assert!(equals_source(&setup.arrived("source")));
}

#[test]
fn a_receiver_refuses_with_a_reason_and_continues() {
    let Some(setup) = Setup::new("refuses") else { return };
    let receiver = setup.receiver(&[]);
    fs::write(setup.arrived("taken"), b"mine").expect("a file");
    for (name, wanted) in
        [("taken", "--overwrite"), ("../out", "is not a valid file name"), ("..", "is not a valid file name")]
    {
        let (status, output) = setup.sender(&["--name", name]).finish();
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains("the receiver rejects the file") && output.contains(wanted), "{output}");
    }
    assert_eq!(fs::read(setup.arrived("taken")).expect("it is there"), b"mine");
    assert!(!setup.path.join("out").exists());
    // A client that is not a sender of files.
    let port: u16 = setup.port.parse().expect("a number");
    let refused = Connector::new().connect((setup.address.as_str(), port)).expect_err("refused");
    assert!(refused.to_string().contains("refused"), "{refused}");
    receiver.wait_for("a peer that is another program was rejected");
    let (status, output) = setup.sender(&[]).finish();
    assert!(status.success(), "{output}");
}

#[test]
fn a_sender_reports_a_missing_receiver_and_unreadable_files() {
    let Some(setup) = Setup::new("wrong") else { return };
    let (status, output) = setup.sender(&[]).finish();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("nobody listens at the peer's port"), "{output}");
    for (file, wanted) in [("/", "not a regular file"), ("/no/such", "No such file")] {
        let (status, output) = setup.program.start_with(&["send", file, &setup.address, "--name", "x"]).finish();
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains(wanted), "{output}");
    }
}

const HELLO: &[u8] = b"file_transfer 1";

/// Posts a message, whose completion the caller takes.
fn send_message(connection: &mut Connection, message: &Value) {
    let mut outbox = connection.pd().allocate(1024).unwrap();
    outbox.fill_from(message.to_string().as_bytes()).unwrap();
    connection.send(outbox).unwrap();
}

/// A sender that can receive only the first two answers, after the start of its transfer, and the memory to write to.
fn manual_sender(at: SocketAddr, name: &str) -> (Connection, RemoteMemory) {
    let route = Connector::new().resolve(at).unwrap();
    let pd = route.pd().clone();
    let mut prepared = route.prepare(Endpoint::builder(&pd).recv_depth(2)).unwrap();
    for _ in 0..2 {
        prepared.receive(pd.allocate(1024).unwrap()).unwrap();
    }
    let mut connection = prepared.connect(HELLO).unwrap();
    send_message(&mut connection, &json!({"Offer": {"name": name, "size": 1 << 30}}));
    // If the ACK of the offer is lost, the answer comes before the completion of the offer.
    let completions = [(); 2].map(|()| connection.wait(DEADLINE).unwrap().ok().unwrap());
    let ready = completions.into_iter().find(|done| done.id.is_receive()).unwrap().buffer.unwrap();
    let ready: Value = serde_json::from_slice(&ready).unwrap();
    send_message(&mut connection, &json!({"Start": {"at": 0}}));
    (connection, serde_json::from_value(ready["Ready"]["memory"].clone()).unwrap())
}

/// Writes the piece `target` up to `max` times. Returns how many writes completed before the receiver disconnected.
fn write_pieces(connection: &mut Connection, target: RemoteMemory, max: u32) -> u32 {
    let mut piece = connection.pd().allocate(1).unwrap();
    piece.set_len(target.len as usize).unwrap();
    for number in 0..max {
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
    max
}

#[test]
fn a_receiver_aborts_endless_transfers() {
    let Some(setup) = Setup::new("endless") else { return };
    let receiver = setup.receiver(&[]);
    let (mut connection, memory) = manual_sender(setup.listening(), "nothing");
    assert!(write_pieces(&mut connection, memory.slice(0, 0).unwrap(), 2000) < 2000);
    receiver.wait_for("a chunk is empty");
    // The receiver answers each piece, and the sender receives no answers.
    let (mut connection, memory) = manual_sender(setup.listening(), "deaf");
    assert!(write_pieces(&mut connection, memory.slice(0, 1).unwrap(), 2000) < 2000);
    receiver.wait_for("sends too many messages without receiving");
    let (status, output) = setup.sender(&[]).finish();
    assert!(status.success(), "{output}");
}

#[test]
fn a_receiver_limits_concurrent_transfers() {
    let Some(setup) = Setup::new("room") else { return };
    let receiver = setup.receiver(&[]);
    let connector = Connector::new();
    let connect = || {
        let route = connector.resolve(setup.listening()).unwrap();
        let pd = route.pd().clone();
        route.prepare(Endpoint::builder(&pd)).unwrap().connect(HELLO)
    };
    let idle: Vec<_> = (0..32).map(|_| connect().unwrap()).collect();
    let (status, output) = setup.sender(&[]).finish();
    assert!(!status.success() && output.contains("too many transfers are in progress"), "{output}");
    receiver.wait_for("a sender was rejected: too many transfers are in progress");
    drop(idle);
    within(TIME_LIMIT, "a place", || setup.sender(&[]).finish().0.success().then_some(()));
    assert!(equals_source(&setup.arrived("source")));
}

#[test]
fn control_characters_from_a_receiver_are_escaped() {
    let Some(setup) = Setup::new("words") else { return };
    let mut listener = Listener::bind(setup.listening()).unwrap();
    let mut sender = setup.sender(&[]);
    let request = listener.next(TIME_LIMIT).unwrap().expect("a sender");
    request.reject(b"\x1b]0;all is well\x07").unwrap();
    let (status, output) = sender.finish();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains(r"\u{1b}]0;all is well\u{7}"), "{output}");
}
