//! What rdma-core's `ibv_devinfo` prints, line by line.

#![forbid(unsafe_code)]

mod device;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/gid_text.rs"]
mod gid_text;
mod names;
#[path = "../common/number.rs"]
mod number;
mod port;
#[path = "../common/soft.rs"]
mod soft;

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use rdma_safe::{Device, devices};

use number::within;

const EXAMPLES: &str = "\
Examples:
  devinfo                  the main attributes of all devices and ports
  devinfo -v -d mlx5_0     all attributes, limits and GIDs of one device
  devinfo -l               names of the devices";

/// Prints the attributes of RDMA devices and their ports, as ibv_devinfo does
#[derive(Debug, Parser)]
#[command(name = "devinfo", after_help = EXAMPLES, max_term_width = 100, args_override_self = true, infer_long_args = true)]
struct Options {
    /// Device, such as mlx5_0 or rxe0, or soft0, which is everywhere [default: all]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Port of the device, counted from 1 [default: all]
    #[arg(short = 'i', long, value_name = "PORT", value_parser = |text: &str| within(text, 1..=255_u8))]
    ib_port: Option<u8>,

    /// Print the names of the devices only
    #[arg(short, long)]
    list: bool,

    /// Print all attributes
    #[arg(short, long)]
    verbose: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(status) => status,
        Err(error) => {
            report(&*error);
            ExitCode::FAILURE
        }
    }
}

fn report(error: &(dyn Error + 'static)) {
    eprintln!("devinfo: {}", failure::one_line(error));
}

fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    soft::or_soft(options.ib_dev.as_deref());
    if options.list {
        return list();
    }
    let selected = match &options.ib_dev {
        Some(name) => vec![Device::by_name(name)?],
        None => devices()?,
    };
    if selected.is_empty() {
        return Err(rdma_safe::Error::NoDevice.into());
    }
    let mut status = ExitCode::SUCCESS;
    for device in &selected {
        let mut text = String::new();
        let described = device::describe(&mut text, device, options.ib_port, options.verbose);
        // What is known of a device is printed even if a part cannot be read, and the next one can be fine.
        print(&text)?;
        if let Err(error) = described {
            report(&*error);
            status = ExitCode::FAILURE;
        }
    }
    Ok(status)
}

fn list() -> Result<ExitCode, Box<dyn Error>> {
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

/// `print!` would panic when nobody reads any more.
fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| format!("cannot print: {error}"))
}
