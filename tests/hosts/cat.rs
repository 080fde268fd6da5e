//! Tests of `rdma-cat`, in both directions at once.

use std::fs;
use std::time::Instant;

use crate::barrier::Barrier;
use crate::files::{Scratch, contents};
use crate::lab::LIMIT;
use crate::network::Host;
use crate::program::Program;

/// Bytes in each direction.
const SIZE: usize = 16 << 20;

#[test]
fn files_of_both_hosts_arrive_despite_packet_loss() {
    let Some(host) = Host::from_env() else { return };
    let Some(program) = Program::of_package("rdma-cat") else { return };
    let mut barrier = Barrier::new(&host);
    let scratch = Scratch::new("cat");
    let path = |name: &str| scratch.path().join(name).to_str().expect("the path is UTF-8").to_owned();
    let (own, peers) = (contents(SIZE, host.is_first.into()), contents(SIZE, (!host.is_first).into()));
    fs::write(path("send"), &own).expect("the file can be written");
    let impairment = host.impair(&["loss", "1%"]);
    let start = Instant::now();
    let files = ["--send", &path("send"), "--receive", &path("receive")];
    let mut running = if host.is_first {
        let listening = program.start_with(&[&["-l", "7471"], &files[..]].concat());
        listening.wait_for("listening");
        barrier.wait();
        listening
    } else {
        barrier.wait();
        program.start_with(&[&[host.peer.as_str(), "7471"], &files[..]].concat())
    };
    let (status, output) = running.finish_within(LIMIT);
    assert!(status.success(), "{output}");
    let arrived = fs::read(path("receive")).expect("the file has arrived");
    assert!(arrived == peers, "{} bytes have arrived, and they differ from the file", arrived.len());
    println!("{} MiB in each direction in {:.1?}", SIZE >> 20, start.elapsed());
    assert!(impairment.dropped() > 0, "no packet was lost");
    // The peer may still need this host's answers.
    barrier.wait();
}
