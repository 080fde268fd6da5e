//! Loops over allocators for `cargo xtask bench pool`.
//!
//! `instructions` runs each loop under callgrind with each of [`COUNTS`], and prints a line for each run: allocator, loop, number
//! of operations, and two zeros. `threads` measures time.

mod allocators;
#[path = "../../overhead/src/callgrind.rs"]
mod callgrind;
mod threads;

use std::ffi::CString;
use std::hint::black_box;
use std::process::ExitCode;

use allocators::{Allocator, Glibc, Registered};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Numbers of operations of the two runs. Their difference cancels the fixed cost of a loop.
const COUNTS: [usize; 2] = [1600, 17600];

/// Lengths in bytes.
const LENGTHS: [usize; 4] = [64, 256, 1024, 4096];

/// Number of blocks that the loop `hold` has at the same time.
const HELD: usize = 16;

fn main() -> ExitCode {
    let run = match std::env::args().nth(1).as_deref() {
        Some("instructions") => instructions(),
        Some("threads") => threads::run(),
        _ => Err("expected the argument `instructions` or `threads`".into()),
    };
    match run {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn instructions() -> Result<()> {
    let pool = Registered::new()?;
    for len in LENGTHS {
        for held in [1, HELD] {
            count("glibc", &Glibc, len, held)?;
            #[cfg(feature = "jemalloc")]
            count("jemalloc", &allocators::Jemalloc, len, held)?;
            count("rdma-pool", &pool, len, held)?;
        }
    }
    Ok(())
}

/// Runs the loop that holds `held` blocks.
fn count(name: &str, allocator: &impl Allocator, len: usize, held: usize) -> Result<()> {
    match held {
        1 => profile(name, &format!("one_{len}"), |count| one(allocator, len, count)),
        _ => profile(name, &format!("hold_{len}"), |count| hold(allocator, len, count)),
    }
}

/// Gets a block and drops it.
#[inline(never)]
fn one(allocator: &impl Allocator, len: usize, count: usize) {
    for _ in 0..count {
        drop(black_box(allocator.get(black_box(len))));
    }
}

/// Gets [`HELD`] blocks and drops them, the first one first.
#[inline(never)]
fn hold<A: Allocator>(allocator: &A, len: usize, count: usize) {
    for _ in 0..count / HELD {
        let blocks: [A::Block; HELD] = std::array::from_fn(|_| allocator.get(black_box(len)));
        drop(black_box(blocks));
    }
}

fn profile(allocator: &str, name: &str, run: impl Fn(usize)) -> Result<()> {
    // Caches of the thread are filled first.
    run(COUNTS[0]);
    for count in COUNTS {
        let profile = CString::new(format!("{allocator} {name} {count}"))?;
        callgrind::profile(&profile, || run(count));
        println!("{allocator}\t{name}\t{count}\t0\t0");
    }
    Ok(())
}
