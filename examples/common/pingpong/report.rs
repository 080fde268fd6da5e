//! The result of a run, in the lines of rdma-core's programs.

use std::time::Duration;

/// The lines for `iters` messages of `size` bytes each way.
pub(super) fn lines(size: u32, iters: u32, elapsed: Duration) -> String {
    let (seconds, micros) = (elapsed.as_secs_f64(), elapsed.as_secs_f64() * 1e6);
    let bytes = u64::from(size) * u64::from(iters) * 2;
    format!(
        "{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec\n{iters} iters in {seconds:.2} seconds = {:.2} usec/iter",
        bytes as f64 * 8.0 / micros,
        micros / f64::from(iters)
    )
}
