//! Prints the attributes of RDMA devices, in the lines of rdma-core's `ibv_devinfo`.

#![forbid(unsafe_code)]

mod device;
mod names;
mod port;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use common::number::within;
use common::{Result, failure};
use rdma_safe::devices;

const EXAMPLES: &str = "\
Examples:
  devinfo                  the main attributes of all devices and ports
  devinfo -v -d mlx5_0     all attributes, limits and GIDs of one device
  devinfo -l               names of the devices";

/// Prints the attributes of RDMA devices and their ports, as ibv_devinfo does
#[derive(Debug, Parser)]
#[command(name = "devinfo", after_help = EXAMPLES, max_term_width = 100, args_override_self = true, infer_long_args = true)]
struct Options {
    /// Device, such as mlx5_0 or rxe0, or soft0, which every machine has [default: all]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Port of the device, counted from 1 [default: all]
    #[arg(short = 'i', long, value_name = "PORT", value_parser = within(1..=255_u8))]
    ib_port: Option<u8>,

    /// Print only the names of the devices
    #[arg(short, long)]
    list: bool,

    /// Print all attributes
    #[arg(short, long)]
    verbose: bool,
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<ExitCode> {
    if options.list {
        return list(options.ib_dev.as_deref());
    }
    let mut status = ExitCode::SUCCESS;
    for device in &common::device::find_all(options.ib_dev.as_deref())? {
        let mut text = String::new();
        let described = device::describe(&mut text, device, options.ib_port, options.verbose);
        // After an error, still print the text so far, and continue with the next device.
        print(&text)?;
        if let Err(error) = described {
            failure::print("devinfo", &*error);
            status = ExitCode::FAILURE;
        }
    }
    Ok(status)
}

fn list(name: Option<&str>) -> Result<ExitCode> {
    common::device::install_soft(name);
    let devices = devices()?;
    let plural = if devices.len() == 1 { "" } else { "s" };
    let mut text = format!("{} HCA{plural} found:\n", devices.len());
    for device in &devices {
        writeln!(text, "\t{}", device.name())?;
    }
    text.push('\n');
    print(&text)?;
    if devices.is_empty() {
        return Err(rdma_safe::Error::NoDevice.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the text. `print!` would panic when the reader has closed the pipe.
fn print(text: &str) -> Result<()> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| format!("cannot print: {error}").into())
}
