//! The messages of a connection, on the command line.

use rdma_safe::Mtu;

use crate::common::MAX_INT;
use crate::number::within;

#[derive(Debug, clap::Args)]
pub(crate) struct Message {
    /// Length of a message in bytes, 1 to what the port carries (`devinfo -v`: max_msg_sz)
    #[arg(short, long, value_name = "BYTES", default_value = "4096", value_parser = |text: &str| within(text, 1..=MAX_INT))]
    pub(crate) size: u32,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096, at most the active MTU of both ports
    #[arg(short, long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    pub(crate) mtu: Mtu,
}

fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = within(text, 0..=u32::MAX)?;
    Mtu::try_from(bytes).map_err(|error| error.to_string())
}
