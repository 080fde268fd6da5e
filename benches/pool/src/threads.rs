//! One thread gets blocks and another one drops them.

use std::hint::black_box;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::allocators::{Allocator, Glibc, Registered};

/// Blocks that pass from one thread to the other in one run.
const BLOCKS: usize = 2_000_000;

/// Blocks of one message between the threads.
const MESSAGE: usize = 32;

/// Messages between the threads at most.
const IN_FLIGHT: usize = 4;

/// Runs of each allocator, in turns.
const RUNS: usize = 7;

/// Length of a block in bytes.
const LEN: usize = 1024;

/// Prints the median time for each block, in nanoseconds, for each allocator.
pub(crate) fn run() -> Result<()> {
    let pool = Registered::new()?;
    let mut times: Vec<(&str, Vec<Duration>)> = Vec::new();
    for _ in 0..RUNS {
        measure(&mut times, "glibc", &Glibc)?;
        #[cfg(feature = "jemalloc")]
        measure(&mut times, "jemalloc", &crate::allocators::Jemalloc)?;
        measure(&mut times, "rdma-pool", &pool)?;
    }
    for (name, mut times) in times {
        times.sort();
        println!("{name}\t{:.1}", times[RUNS / 2].as_nanos() as f64 / BLOCKS as f64);
    }
    Ok(())
}

fn measure<'a, A: Allocator>(times: &mut Vec<(&'a str, Vec<Duration>)>, name: &'a str, allocator: &A) -> Result<()> {
    let time = pass(allocator);
    match times.iter_mut().find(|(other, _)| *other == name) {
        Some((_, times)) => times.push(time),
        None => times.push((name, vec![time])),
    }
    Ok(())
}

fn pass<A: Allocator>(allocator: &A) -> Duration {
    let (sender, receiver) = mpsc::sync_channel::<[A::Block; MESSAGE]>(IN_FLIGHT);
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..BLOCKS / MESSAGE {
                let blocks = std::array::from_fn(|_| allocator.get(black_box(LEN)));
                if sender.send(blocks).is_err() {
                    break;
                }
            }
        });
        for blocks in receiver {
            drop(black_box(blocks));
        }
    });
    start.elapsed()
}
