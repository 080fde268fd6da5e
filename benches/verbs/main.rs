//! What rdma-safe takes of a provider's time, in nanoseconds: posting and polling by both doors, registration, set-up of
//! connections and their end. `cargo xtask bench criterion` runs it, keeps baselines and compares with them.
//!
//! By default the provider is the stub within this process, whose operations cost next to nothing, so that what is timed is
//! rdma-safe. `RDMA_DEVICE` names a device instead, soft0 for one, which is everywhere; both ends are on it. `RDMA_PORT` and
//! `RDMA_GID_INDEX` are as for the device tests. Identifiers begin with the name of the device. Times vary by a tenth and more with
//! a machine's load; what has to be known to the instruction is in `benches/overhead`.

mod control;
mod data;
mod provider;

use std::time::Duration;

use criterion::Criterion;

use provider::{Provider, Result};

fn main() -> Result<()> {
    let provider = Provider::new()?;
    // The statistics of criterion's defaults take a minute on an emulated machine.
    let criterion = Criterion::default().sample_size(50).nresamples(10_000);
    let criterion = criterion.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut criterion = criterion.configure_from_args();
    data::benchmarks(&mut criterion, &provider)?;
    control::benchmarks(&mut criterion, &provider)?;
    criterion.final_summary();
    Ok(())
}
