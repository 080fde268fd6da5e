//! Benchmarks of registration, connection setup and teardown.

use criterion::{BatchSize, Criterion};
use rdma_safe::Access;
use rdma_safe::mr::{Backing, Pages};

use crate::provider::{Provider, Result};

pub(crate) fn benchmarks(criterion: &mut Criterion, provider: &Provider) -> Result<()> {
    let mut group = provider.group(criterion, "register and deregister");
    for (name, len) in [("4 KiB", 4 << 10), ("1 MiB", 1 << 20)] {
        let memory = Pages::new(len)?;
        let address = memory.address().as_ptr();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                // SAFETY: the memory outlives the region, and no work or peer uses its keys.
                let region = unsafe { provider.pd.register_raw(address, len, Access::LOCAL_WRITE) };
                region.expect("registration succeeds").deregister().expect("deregistration succeeds");
            });
        });
    }
    group.finish();

    let pair = || provider.pair(false).expect("two endpoints connect");
    let mut group = provider.group(criterion, "two connected endpoints");
    // One pair per iteration, because the number of queue pairs of a device is limited.
    group.bench_function("set-up", |bencher| bencher.iter_batched(|| (), |()| pair(), BatchSize::PerIteration));
    group.bench_function("teardown", |bencher| bencher.iter_batched(pair, drop, BatchSize::PerIteration));
    group.finish();
    Ok(())
}
