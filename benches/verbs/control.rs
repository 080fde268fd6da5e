//! Registration, set-up and teardown.

use criterion::{BatchSize, Criterion};
use rdma_safe::{Access, Backing, Pages};

use crate::provider::{Provider, Result};

pub(crate) fn benchmarks(criterion: &mut Criterion, provider: &Provider) -> Result<()> {
    let mut group = provider.group(criterion, "register and deregister");
    for (name, len) in [("4 KiB", 4 << 10), ("1 MiB", 1 << 20)] {
        let memory = Pages::new(len)?;
        let address = memory.address().as_ptr();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                // SAFETY: the memory stays longer than the region, whose keys nobody learns.
                let region = unsafe { provider.pd.register_raw(address, len, Access::LOCAL_WRITE) };
                region.expect("the memory can be registered").deregister().expect("and given back");
            });
        });
    }
    group.finish();

    let pair = || provider.pair(false).expect("two ends connect");
    let mut group = provider.group(criterion, "two connected endpoints");
    // One at a time: devices have only so many queue pairs.
    group.bench_function("set-up", |bencher| bencher.iter_batched(|| (), |()| pair(), BatchSize::PerIteration));
    group.bench_function("teardown", |bencher| bencher.iter_batched(pair, drop, BatchSize::PerIteration));
    group.finish();
    Ok(())
}
