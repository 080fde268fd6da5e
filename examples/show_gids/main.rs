//! Prints a table of the GIDs of all devices and ports, like the script `show_gids` of vendors.

#![forbid(unsafe_code)]

mod table;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use common::number::within;
use common::{Result, device, failure, gid};
use rdma_safe::address::GidEntry;
use rdma_safe::{Context, Device, GidType};

use table::Table;

const EXAMPLES: &str = "\
Columns: device, port, index in the port's table (-g of rc_pingpong), GID, its IPv4 address, version of RoCE (IB for InfiniBand),
network interface.

Examples:
  show_gids                   all devices and ports
  show_gids -d mlx5_0 -i 1    one port";

/// Prints the GIDs of RDMA devices: the addresses to connect from
#[derive(Debug, Parser)]
#[command(name = "show_gids", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Device, such as mlx5_0 or rxe0, or soft0, which every machine has [default: all]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Port of the device, counted from 1 [default: all]
    #[arg(short = 'i', long, value_name = "PORT", value_parser = within(1..=255_u8))]
    ib_port: Option<u8>,
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut table = Table::new(["DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "DEV"]);
    for device in &device::find_all(options.ib_dev.as_deref())? {
        if let Err(error) = add(&mut table, device, options.ib_port) {
            failure::print("show_gids", &*error);
            status = ExitCode::FAILURE;
        }
    }
    let mut out = io::stdout();
    writeln!(out, "{table}n_gids_found={}", table.len()).map_err(|error| format!("cannot print: {error}"))?;
    Ok(status)
}

fn add(table: &mut Table<7>, device: &Device, only: Option<u8>) -> Result<()> {
    let context = device.open()?;
    if let Some(port) = only {
        return add_port(table, &context, port);
    }
    (1..=context.attributes().ports()).try_for_each(|port| add_port(table, &context, port))
}

fn add_port(table: &mut Table<7>, context: &Context, port: u8) -> Result<()> {
    for entry in context.gids(port)? {
        let GidEntry { gid, index, gid_type, interface_index, .. } = entry;
        let version = match gid_type {
            GidType::INFINIBAND => "IB".into(),
            GidType::ROCE_V1 => "v1".into(),
            GidType::ROCE_V2 => "v2".into(),
            other => other.to_string(),
        };
        table.push([
            context.device_name().into(),
            port.to_string(),
            index.to_string(),
            gid::in_full(gid),
            gid.ipv4().map(|address| address.to_string()).unwrap_or_default(),
            version,
            interface(interface_index).unwrap_or_default(),
        ]);
    }
    Ok(())
}

/// Name of the network interface with this index. `None` if it is in another network namespace.
fn interface(index: u32) -> Option<String> {
    let interfaces = std::fs::read_dir("/sys/class/net").ok()?.flatten();
    let mut with_index = interfaces.filter(|interface| {
        std::fs::read_to_string(interface.path().join("ifindex")).is_ok_and(|text| text.trim() == index.to_string())
    });
    with_index.next().map(|interface| interface.file_name().to_string_lossy().into_owned())
}
