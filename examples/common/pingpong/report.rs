//! What a game came to, in the lines of rdma-core's.

use std::io::{self, Write};
use std::time::Duration;

/// Of `iters` messages of `size` bytes each way.
pub(crate) fn report(out: &mut impl Write, size: u32, iters: u32, elapsed: Duration) -> io::Result<()> {
    let (seconds, micros) = (elapsed.as_secs_f64(), elapsed.as_secs_f64() * 1e6);
    let bytes = u64::from(size) * u64::from(iters) * 2;
    writeln!(out, "{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec", bytes as f64 * 8.0 / micros)?;
    writeln!(out, "{iters} iters in {seconds:.2} seconds = {:.2} usec/iter", micros / f64::from(iters))
}

pub(crate) fn cannot_print(error: io::Error) -> String {
    format!("cannot print: {error}")
}
