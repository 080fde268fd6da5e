//! Criterion benchmarks of rdma-safe: posting and polling through both APIs, registration, connection setup and teardown.
//!
//! `cargo xtask bench criterion` runs them, saves baselines, and compares with them.
//!
//! By default the provider is the stub in this process. Its operations cost almost nothing, so the times are those of
//! rdma-safe. `RDMA_DEVICE` selects a device instead, for example soft0, which is always available. Both ends use this
//! device. `RDMA_PORT` and `RDMA_GID_INDEX` work as for the device tests. Benchmark names begin with the name of the device.
//!
//! Times vary by ten per cent and more with the load of the machine. For exact instruction counts, see `benches/overhead`.

mod control;
mod data;
mod provider;

use std::time::Duration;

use criterion::Criterion;

use provider::{Provider, Result};

fn main() -> Result<()> {
    let provider = Provider::new()?;
    // With criterion's defaults, the statistics take a minute on an emulated machine.
    let criterion = Criterion::default().sample_size(50).nresamples(10_000);
    let criterion = criterion.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut criterion = criterion.configure_from_args();
    data::benchmarks(&mut criterion, &provider)?;
    control::benchmarks(&mut criterion, &provider)?;
    criterion.final_summary();
    Ok(())
}
