//! Tests of the example `file_transfer`, from the second host to the first.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::files::{Scratch, contents};
use crate::network::Host;
use crate::program::{Program, Running};

/// Time limit for a transfer, including the wait until the other machine is ready.
const LIMIT: Duration = Duration::from_secs(150);

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Transfers a file of `size` bytes between the hosts and returns the output of this end's program.
fn transfer(host: &Host, name: &str, size: usize) -> Option<String> {
    let program = Program::example("file_transfer")?;
    let scratch = Scratch::new(name);
    let contents = contents(size, 1);
    let output = if host.is_first {
        let output = receive(&program, scratch.path());
        let mut arrived = Vec::new();
        File::open(scratch.path().join(name))
            .and_then(|mut file| file.read_to_end(&mut arrived))
            .expect("the file has arrived");
        assert!(arrived == contents, "{} bytes have arrived, and they differ from the file", arrived.len());
        output
    } else {
        let file = scratch.path().join(name);
        fs::write(&file, &contents).expect("the file can be written");
        send(&program, &file, &host.peer)
    };
    let expected = format!("SHA-256 {}", checksum(&contents));
    assert!(output.contains(&expected), "expected {expected} in:\n{output}");
    println!("{}", output.lines().last().unwrap_or_default());
    Some(output)
}

fn receive(program: &Program, into: &Path) -> String {
    let mut receiver = program.start_with(&["receive", "--once", "-d", into.to_str().expect("the path is UTF-8")]);
    finish(&mut receiver).expect("the receiver succeeds")
}

/// Sends a file. Retries until the other host listens.
fn send(program: &Program, file: &Path, peer: &str) -> String {
    let start = Instant::now();
    loop {
        let mut sender = program.start_with(&["send", file.to_str().expect("the path is UTF-8"), peer]);
        match finish(&mut sender) {
            Ok(output) => return output,
            Err(output) if output.contains("nobody listens") && start.elapsed() < LIMIT => {}
            Err(output) => panic!("{output}"),
        }
    }
}

/// Waits for the program and returns its output, as an error if it failed.
fn finish(running: &mut Running) -> Result<String, String> {
    let (status, output) = running.finish_within(LIMIT);
    if status.success() { Ok(output) } else { Err(output) }
}

#[test]
fn a_file_of_64_mib_arrives_with_its_checksum() {
    let Some(host) = Host::from_env() else { return };
    transfer(&host, "large", 64 << 20);
}

#[test]
fn a_file_arrives_despite_packet_loss_and_delay() {
    let Some(host) = Host::from_env() else { return };
    let impairment = host.impair(&["loss", "1%", "delay", "10ms"]);
    transfer(&host, "impaired", 4 << 20);
    // Only the sender transmits enough packets, about a thousand, for some to get lost for sure.
    assert!(host.is_first || impairment.dropped() > 0, "no packet was lost");
}
