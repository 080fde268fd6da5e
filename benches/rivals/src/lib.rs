//! Common code of the programs that run the loops of `benches/overhead` over other crates. Each crate has its own program.
//!
//! Their library path contains the stub of `benches/stub` as `libibverbs.so.1`. Like `rdma-overhead`, they print a line for
//! each run, with the variant, the loop, the number of operations, the checksum, and the number of allocator calls.

#[path = "../../overhead/src/callgrind.rs"]
mod callgrind;
#[path = "../../overhead/src/counting.rs"]
mod counting;

use std::error::Error;
use std::ffi::{CString, c_void};
use std::process::ExitCode;

use libloading::os::unix::Library;

pub type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Same values as in `benches/overhead/src/rig.rs`.
pub const BATCH: usize = 16;
pub const INLINE: usize = 32;
pub const LEN: u32 = 64;
/// Entries of each queue.
pub const DEPTH: u32 = 64;
/// Value that a loop returns if a verb fails.
pub const FAILED: u64 = u64::MAX;

/// Same values as in `benches/overhead/src/main.rs`.
const COUNTS: [u64; 2] = [1600, 17600];

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Runs a loop with each of the two numbers of operations, and profiles each run.
///
/// # Errors
/// If a verb fails.
pub fn measure(variant: &str, name: &str, mut function: impl FnMut(u64) -> u64) -> Result<()> {
    for count in COUNTS {
        let profile = CString::new(format!("{variant} {name} {count}"))?;
        let before = counting::calls();
        let checksum = callgrind::profile(&profile, || function(count));
        let allocations = counting::calls() - before;
        if checksum == FAILED {
            return Err(format!("{name} over {variant} failed").into());
        }
        println!("{variant}\t{name}\t{count}\t{checksum}\t{allocations}");
    }
    Ok(())
}

/// Makes the stub generate completions, a batch at a time, in the completion queue that was created last.
///
/// The queue is found this way because not every crate exposes its pointer.
///
/// # Errors
/// If libibverbs is not the stub.
pub fn endless() -> Result<()> {
    // SAFETY: the stub has no initialisers, its functions have these signatures, and it has created the queue.
    unsafe {
        let stub = Library::new("libibverbs.so.1")?;
        let latest: unsafe extern "C" fn() -> *mut c_void = *stub.get(b"rdma_stub_latest_cq\0")?;
        let endless: unsafe extern "C" fn(*mut c_void, u32) = *stub.get(b"rdma_stub_endless\0")?;
        endless(latest(), BATCH as u32);
        std::mem::forget(stub);
    }
    Ok(())
}

/// Prints the error of a failed program and returns its exit code.
#[must_use]
pub fn finish(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
