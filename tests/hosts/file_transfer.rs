//! The example `file_transfer`, from the second host to the first.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::network::Host;
use crate::program::{Program, Running};

/// For a transfer, and for the other machine to be ready.
const LIMIT: Duration = Duration::from_secs(150);

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("hosts-{name}"));
        fs::create_dir_all(&path).expect("a directory");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes that both hosts know, none like the next few.
fn contents(size: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of that size goes from one host to the other; what this end's program has said.
fn transfer(host: &Host, name: &str, size: usize) -> Option<String> {
    let program = Program::example("file_transfer")?;
    let scratch = Scratch::new(name);
    let contents = contents(size);
    let said = if host.is_first {
        let said = receive(&program, &scratch.0);
        let mut arrived = Vec::new();
        File::open(scratch.0.join(name)).and_then(|mut file| file.read_to_end(&mut arrived)).expect("it has arrived");
        assert!(arrived == contents, "{} bytes have arrived, and not as they were sent", arrived.len());
        said
    } else {
        let file = scratch.0.join(name);
        fs::write(&file, &contents).expect("a file");
        send(&program, &file, &host.peer)
    };
    let expected = format!("SHA-256 {}", checksum(&contents));
    assert!(said.contains(&expected), "not {expected}:\n{said}");
    println!("{}", said.lines().last().unwrap_or_default());
    Some(said)
}

fn receive(program: &Program, into: &Path) -> String {
    let mut receiver = program.start_with(&["receive", "--once", "-d", into.to_str().expect("text")]);
    finish(&mut receiver).expect("a file was received")
}

/// Once the other host listens.
fn send(program: &Program, file: &Path, peer: &str) -> String {
    let start = Instant::now();
    loop {
        let mut sender = program.start_with(&["send", file.to_str().expect("text"), peer]);
        match finish(&mut sender) {
            Ok(said) => return said,
            Err(said) if said.contains("nobody listens") && start.elapsed() < LIMIT => {}
            Err(said) => panic!("{said}"),
        }
    }
}

/// What it has said, and whether it succeeded.
fn finish(running: &mut Running) -> Result<String, String> {
    let (status, said) = running.finish_within(LIMIT);
    if status.success() { Ok(said) } else { Err(said) }
}

#[test]
fn a_file_of_64_mib_arrives_with_its_checksum() {
    let Some(host) = Host::this() else { return };
    transfer(&host, "large", 64 << 20);
}

#[test]
fn a_file_arrives_over_a_wire_that_delays_and_loses() {
    let Some(host) = Host::this() else { return };
    let wire = host.spoil(&["loss", "1%", "delay", "10ms"]);
    transfer(&host, "spoilt", 4 << 20);
    // A thousand packets go there, acknowledgements for some back.
    assert!(host.is_first || wire.dropped() > 0, "nothing was lost");
}
