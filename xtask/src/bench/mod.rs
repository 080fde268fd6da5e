//! `cargo xtask bench`: reproducible benchmarks.

mod awaited;
pub(crate) mod connections;
mod criterion;
mod environment;
mod guest;
pub(crate) mod messages;
pub(crate) mod overhead;
pub(crate) mod pingpong;
pub(crate) mod pool;
mod report;
mod result;
mod series;
mod soft;
pub(crate) mod softroce;

use anyhow::Result;

/// Run a benchmark of this workspace
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Debug, clap::Subcommand)]
enum Benchmark {
    Awaited(awaited::Args),
    Connections(connections::Args),
    Criterion(criterion::Args),
    Messages(messages::Args),
    Overhead(overhead::Args),
    Pingpong(pingpong::Args),
    Pool(pool::Args),
    Report(report::Args),
    Soft(soft::Args),
    Softroce(softroce::Args),
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    match &args.benchmark {
        Benchmark::Awaited(args) => awaited::main(args),
        Benchmark::Connections(args) => connections::main(args),
        Benchmark::Criterion(args) => criterion::main(args),
        Benchmark::Messages(args) => messages::main(args),
        Benchmark::Overhead(args) => overhead::main(args),
        Benchmark::Pingpong(args) => pingpong::main(args),
        Benchmark::Pool(args) => pool::main(args),
        Benchmark::Report(args) => report::main(args),
        Benchmark::Soft(args) => soft::main(args),
        Benchmark::Softroce(args) => softroce::main(args),
    }
}
