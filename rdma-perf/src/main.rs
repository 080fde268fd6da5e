//! `rdma-perf`: bandwidth, message rate and latency of RDMA verbs, and a check of a host's set-up.

mod cli;
mod plan;
mod report;
mod units;

use clap::Parser;

fn main() {
    let cli = cli::Cli::parse();
    println!("{cli:?}");
}
