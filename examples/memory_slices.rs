//! Sends a vector as many slices in any order, into another vector, and takes both back.
//!
//! `cargo run --release --example memory_slices -- --mib 1024 --slices 100003` sends 1 GiB.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Duration;

use clap::Parser;
use rdma_safe::{Buffer, Device, Endpoint};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Number of slices in flight.
const DEPTH: usize = 64;

/// Sends a vector as many slices in any order, and takes it back.
#[derive(Parser)]
struct Options {
    /// Size of the vector in MiB.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65536))]
    mib: u64,
    /// Number of slices, which differ in length.
    #[arg(long, default_value_t = 1003, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    slices: u64,
}

fn main() {
    if let Err(error) = run(&Options::parse()) {
        // A `main` that returned the error would print `{error:?}`, without the advice in its text.
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    // Without an RDMA device, run on soft0, a software device in this process.
    rdma_safe::soft::install_by_default();
    let pd = Device::first()?.open()?.alloc_pd()?;

    // Each end has one registration. In reality they would be on two hosts.
    let (len, slices) = (usize::try_from(options.mib << 20)?, usize::try_from(options.slices)?);
    let source: Vec<u8> = (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect();
    let source = pd.share(source)?;
    let mut rest = pd.register(vec![0; len])?;

    // A slice of the source needs no allocation, and a part of the target is one buffer.
    let start = |slice: usize| (len as u128 * slice as u128 / slices as u128) as usize;
    let mut parts: Vec<Option<Buffer>> = Vec::with_capacity(slices);
    for slice in 1..slices {
        parts.push(Some(rest.split_to(start(slice) - start(slice - 1))?));
    }
    parts.push(Some(rest));

    let mut sender = Endpoint::builder(&pd).send_depth(DEPTH as u32).build()?;
    let mut receiver = Endpoint::builder(&pd).recv_depth(DEPTH as u32).build()?;
    sender.connect(&receiver.address())?;
    receiver.connect(&sender.address())?;

    let order = shuffled(slices);
    let mut arrived = Vec::with_capacity(slices);
    for batch in order.chunks(DEPTH) {
        for &slice in batch {
            receiver.receive(parts[slice].take().expect("each slice is sent once"))?;
        }
        for &slice in batch {
            sender.send_list(source.slice(start(slice)..start(slice + 1))?)?;
        }
        for _ in batch {
            arrived.push(receiver.wait(TIMEOUT)?.ok()?.buffer.expect("a receive has a buffer"));
            let _ = sender.wait(TIMEOUT)?.ok()?;
        }
    }
    println!("sent {len} bytes as {slices} slices");

    let target: Vec<u8> = Buffer::join_all(arrived)?.into_memory()?;
    let source: Vec<u8> = source.into_memory()?;
    println!("both vectors are back, and they are {}", if source == target { "equal" } else { "different" });
    Ok(())
}

/// The numbers below `count` in an order that depends only on it.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..count).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, (random % (last as u64 + 1)) as usize);
    }
    order
}
