//! What the command lines of all ping-pongs have in common: those of rdma-core's, and `--timeout`.

use std::time::Duration;

use crate::number::within;

#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    pub(crate) host: Option<String>,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = |text: &str| within(text, 1..=65535_u16))]
    pub(crate) port: u16,

    /// RDMA device, such as mlx5_0, or soft0, which is everywhere [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    pub(crate) ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = |text: &str| within(text, 1..=255_u8))]
    pub(crate) ib_port: u8,

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15
    #[arg(short = 'l', long, value_name = "LEVEL", default_value = "0", value_parser = |text: &str| within(text, 0..=15_u8))]
    pub(crate) sl: u8,

    /// Sleep until there is a completion event, instead of polling all the time
    #[arg(short, long)]
    pub(crate) events: bool,

    /// Index of the GID to send from, 0 to 255
    ///
    /// Without it, RoCE uses the best one (RoCE v2 before v1, a routable address before a link-local one, IPv4 before
    /// IPv6), and InfiniBand finds the peer by its LID alone.
    #[arg(short, long, value_name = "INDEX", value_parser = |text: &str| within(text, 0..=255_u32))]
    pub(crate) gid_idx: Option<u32>,

    /// Seconds to wait for the server to accept, for the peer's address, and for each completion, 1 to 86400
    ///
    /// A server waits for its client without a limit.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(crate) timeout: Duration,
}

/// What C has an `int` for.
pub(crate) const MAX_INT: u32 = i32::MAX as u32;

fn timeout(text: &str) -> Result<Duration, String> {
    within(text, 1..=86400_u64).map(Duration::from_secs)
}
