//! Memory that the program and its peer access concurrently.

use std::time::Instant;

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Endpoint, EndpointBuilder, ProtectionDomain, Work};

use crate::{HANG, connected, domain, wait};

/// Number of messages of each test. A message is filled with its number, which must fit into a byte.
const ROUNDS: u64 = 250;

/// Length of a message in bytes. It is not a multiple of a word, so that partial words are copied too.
const LEN: usize = 1003;

/// Offset of the word after the message, which holds the number of the latest message.
const FLAG: usize = 1008;

#[test]
fn a_program_that_polls_a_flag_reads_the_message_a_peer_wrote_before_it() {
    let pd = domain();
    let (mut a, _b) = connected(&builder(&pd).inline_data(8));
    let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE_WRITE).unwrap();
    let remote = region.remote();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; LEN];
            let (mut seen, start) = (0, Instant::now());
            while seen < ROUNDS {
                assert!(start.elapsed() < HANG, "{seen} messages arrived");
                let found = region.load_u64(FLAG).unwrap();
                assert!(found >= seen, "{found} after {seen}");
                seen = found;
                region.read(5, &mut bytes).unwrap();
                // Later messages may have arrived meanwhile, but no earlier one.
                assert!(bytes.iter().all(|byte| *byte >= seen as u8), "older than {seen}: {bytes:?}");
                std::thread::yield_now();
            }
        });
        let mut buffer = pd.allocate(LEN).unwrap();
        for round in 1..=ROUNDS {
            buffer.fill(round as u8);
            a.post(Work::write(buffer, remote.slice(5, LEN as u64).unwrap())).unwrap();
            a.post(Work::write_inline(&round.to_ne_bytes(), remote.slice(FLAG as u64, 8).unwrap()).unsignaled())
                .unwrap();
            buffer = wait(&mut a).buffer.unwrap();
        }
    });
}

#[test]
fn a_peer_that_reads_a_flag_reads_the_message_written_before_it() {
    let pd = domain();
    let (mut a, _b) = connected(&builder(&pd));
    let mut region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE_READ).unwrap();
    let remote = region.remote();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                region.write(5, &[round as u8; LEN]).unwrap();
                region.store_u64(FLAG, round).unwrap();
                std::thread::yield_now();
            }
        });
        let (mut flag, mut data) = (pd.allocate(8).unwrap(), pd.allocate(LEN).unwrap());
        for _ in 0..ROUNDS {
            a.read(flag, remote.slice(FLAG as u64, 8).unwrap()).unwrap();
            flag = wait(&mut a).buffer.unwrap();
            let seen = u64::from_ne_bytes(flag[..].try_into().unwrap());
            a.read(data, remote.slice(5, LEN as u64).unwrap()).unwrap();
            data = wait(&mut a).buffer.unwrap();
            assert!(data.iter().all(|byte| *byte >= seen as u8), "older than {seen}");
        }
    });
}

#[test]
fn atomics_of_peers_and_of_the_program_do_not_race() {
    let pd = domain();
    let (mut a, mut b) = connected(&builder(&pd));
    let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE_ATOMIC).unwrap();
    let word = region.remote().slice(0, 8).unwrap();
    std::thread::scope(|scope| {
        for endpoint in [&mut a, &mut b] {
            let mut buffer = pd.allocate(8).unwrap();
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    endpoint.post(Work::fetch_add(buffer, word, 1)).unwrap();
                    buffer = wait(endpoint).buffer.unwrap();
                }
            });
        }
        let (mut last, start) = (0, Instant::now());
        while last < 2 * ROUNDS {
            assert!(start.elapsed() < HANG, "{last} of {}", 2 * ROUNDS);
            let now = region.load_u64(0).unwrap();
            assert!(now >= last);
            last = now;
            std::thread::yield_now();
        }
    });
}

fn builder(pd: &ProtectionDomain) -> EndpointBuilder<'_> {
    Endpoint::builder(pd).peer_access(Access::REMOTE)
}
