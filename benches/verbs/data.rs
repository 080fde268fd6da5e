//! Benchmarks of the data path.

use criterion::{Criterion, Throughput};

use crate::provider::{BATCH, Provider, Result};

/// Names of the two interfaces, and whether each is the classic one.
const INTERFACES: [(&str, bool); 2] = [("extended", false), ("classic", true)];

pub(crate) fn benchmarks(criterion: &mut Criterion, provider: &Provider) -> Result<()> {
    let mut group = provider.group(criterion, "write and poll");
    for count in [1, BATCH] {
        group.throughput(Throughput::Elements(count.into()));
        for (name, classic) in INTERFACES {
            let mut raw = provider.raw(classic)?;
            group.bench_function(format!("raw {name} x{count}"), |bencher| {
                bencher.iter(|| raw.write(count).expect("writes complete"));
            });
        }
    }
    group.finish();

    let mut group = provider.group(criterion, "send and poll");
    group.throughput(Throughput::Elements(1));
    for (name, classic) in INTERFACES {
        let mut owned = provider.owned(classic)?;
        group.bench_function(format!("owned {name}"), |bencher| {
            bencher.iter(|| owned.send().expect("the send completes"));
        });
    }
    group.finish();

    let mut group = provider.group(criterion, "empty poll");
    for (name, classic) in INTERFACES {
        let mut raw = provider.raw(classic)?;
        group.bench_function(format!("raw {name}"), |bencher| {
            bencher.iter(|| raw.cq.poll().next().expect("the queue can be polled").is_none());
        });
        let mut owned = provider.owned(classic)?;
        group.bench_function(format!("owned {name}"), |bencher| {
            bencher.iter(|| owned.a.poll().expect("the queue can be polled").is_none());
        });
    }
    group.finish();
    Ok(())
}
