//! What the command lines of the ping-pongs over the raw door have in common: those of rdma-core's, and `--timeout`.

use std::time::Duration;

use crate::number::within;

#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    pub(crate) host: Option<String>,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = |text: &str| within(text, 1..=65535_u16))]
    pub(crate) port: u16,

    /// RDMA device, such as mlx5_0 or rxe0 [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    pub(crate) ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = |text: &str| within(text, 1..=255_u8))]
    pub(crate) ib_port: u8,

    /// Receives to keep posted [default: as many as 256 KiB hold, but 4 to 500]
    ///
    /// When no more than one is left, all are posted anew. Each has memory of its own.
    #[arg(short, long, value_name = "COUNT", value_parser = |text: &str| within(text, 1..=MAX_COUNT))]
    pub(crate) rx_depth: Option<u32>,

    /// Messages each way
    #[arg(short = 'n', long, value_name = "COUNT", default_value = "1000", value_parser = |text: &str| within(text, 1..=MAX_COUNT))]
    pub(crate) iters: u32,

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

    /// Check what arrived last, at the server; give it to both ends
    #[arg(short, long)]
    pub(crate) chk: bool,

    /// Seconds to wait for the server to accept, for the peer's address, and for each completion, 1 to 86400
    ///
    /// A server waits for its client without a limit.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(crate) timeout: Duration,
}

impl Common {
    /// Receives to keep posted, for messages of `size` bytes.
    pub(crate) fn rx_depth(&self, size: u32) -> u32 {
        /// What C has; all of its receives share the memory of one message.
        const DEPTH: u32 = 500;
        const MEMORY: u32 = 256 << 10;

        self.rx_depth.unwrap_or_else(|| (MEMORY / size).clamp(4, DEPTH))
    }
}

/// What C has an `int` for.
pub(crate) const MAX_COUNT: u32 = i32::MAX as u32;

fn timeout(text: &str) -> Result<Duration, String> {
    within(text, 1..=86400_u64).map(Duration::from_secs)
}
