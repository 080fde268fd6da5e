//! How often a message goes to and fro, on the command line.

use crate::common::MAX_INT;
use crate::number::within;

#[derive(Debug, clap::Args)]
pub(crate) struct Rounds {
    /// Receives to keep posted [default: as many as 256 KiB hold, but 4 to 500]
    ///
    /// When no more than one is left, all are posted anew. Each has memory of its own: as many buffers of --size bytes,
    /// and two more, are registered, which the limit of locked memory (`ulimit -l`) must allow.
    #[arg(short, long, value_name = "COUNT", value_parser = |text: &str| within(text, 1..=MAX_INT))]
    pub(crate) rx_depth: Option<u32>,

    /// Messages each way
    #[arg(short = 'n', long, value_name = "COUNT", default_value = "1000", value_parser = |text: &str| within(text, 1..=MAX_INT))]
    pub(crate) iters: u32,

    /// Check what arrived last, at the server; give it to both ends
    #[arg(short, long)]
    pub(crate) chk: bool,
}

impl Rounds {
    /// Receives to keep posted, for messages of `size` bytes.
    pub(crate) fn rx_depth(&self, size: u32) -> u32 {
        /// What C has; all of its receives share the memory of one message.
        const DEPTH: u32 = 500;
        /// Bytes for receives of which nobody said how many. They go round in a cache that way, and no more than one
        /// has a message at a time.
        const MEMORY: u32 = 256 << 10;

        self.rx_depth.unwrap_or_else(|| (MEMORY / size).clamp(4, DEPTH))
    }
}
