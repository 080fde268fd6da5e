//! Counts in device memory: a peer adds to a number there, and the CPU reads it.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::number::within;
use common::{Result, device};
use rdma_safe::{Access, Endpoint, Work};

const EXAMPLES: &str = "\
Both ends of the connection are in this process. If the device has no device memory, the exit status is 1.

Examples:
  device_memory                   count to 10 on the first device
  device_memory -d mlx5_0 -n 100  count to 100 on mlx5_0";

/// Longest wait for one completion.
const DEADLINE: Duration = Duration::from_secs(10);

/// Lets a peer count in the memory of an RDMA device
#[derive(Debug, Parser)]
#[command(name = "device_memory", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Device, such as mlx5_0 or rxe0, or soft0, which every machine has [default: the first]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Number to count to
    #[arg(short = 'n', long, value_name = "NUMBER", default_value = "10",
          value_parser = within(1..=1_000_000_u64))]
    count: u64,
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<()> {
    let device = device::find(options.ib_dev.as_deref())?;
    let context = device.open()?;
    let mut memory = context.alloc_dm(8, 8)?;
    memory.write(0, &0_u64.to_ne_bytes())?;
    let pd = context.alloc_pd()?;
    let counter = pd.register_dm(&memory, 0, 8, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)?;
    let mut owner = Endpoint::builder(&pd).peer_access(Access::REMOTE_ATOMIC).build()?;
    let mut peer = Endpoint::builder(&pd).build()?;
    owner.connect(&peer.address())?;
    peer.connect(&owner.address())?;
    let mut result = pd.allocate(8)?;
    for _ in 0..options.count {
        peer.post(Work::fetch_add(result, counter.remote(), 1))?;
        result = peer.wait(DEADLINE)?.ok()?.buffer.ok_or("the atomic operation returned no buffer")?;
    }
    let mut bytes = [0; 8];
    memory.read(0, &mut bytes)?;
    let (name, counted) = (device.name(), u64::from_ne_bytes(bytes));
    if counted != options.count {
        return Err(format!("{name}: the number is {counted} instead of {}", options.count).into());
    }
    println!("{name}: a peer counted to {counted} in device memory");
    Ok(())
}
