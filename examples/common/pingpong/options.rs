//! Options that several ping-pong programs share: the options of rdma-core's programs, `--timeout` and `--loopback`.

use std::time::Duration;

use clap::Args;
use rdma_safe::Mtu;

use crate::number::{MAX_INT, parse, seconds, within};

// No doc comments on these structs: clap would use them for the help of the program.

#[derive(Debug, Args)]
pub struct PeerOptions {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    pub host: Option<String>,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = within(1..=65535_u16))]
    pub port: u16,

    /// RDMA device, such as mlx5_0, or soft0, which every machine has [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    pub ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = within(1..=255_u8))]
    pub ib_port: u8,

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15
    #[arg(short = 'l', long, value_name = "LEVEL", default_value = "0", value_parser = within(0..=15_u8))]
    pub sl: u8,

    /// Sleep until a completion event instead of polling
    #[arg(short, long)]
    pub events: bool,

    /// Index of the GID to send from, 0 to 255
    ///
    /// By default, RoCE uses the best one (RoCE v2 before v1, a routable address before a link-local one, IPv4 before IPv6), and
    /// InfiniBand uses the LID alone.
    #[arg(short, long, value_name = "INDEX", value_parser = within(0..=255_u32))]
    pub gid_idx: Option<u32>,

    /// Seconds to wait for the server to accept, for the peer's address, and for each completion, 1 to 86400
    ///
    /// A server waits for its client without a limit.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds(1..=86400))]
    pub timeout: Duration,
}

#[derive(Debug, Args)]
pub struct MessageOptions {
    /// Length of a message in bytes, 1 to the limit of the port (`devinfo -v`: max_msg_sz)
    #[arg(short, long, value_name = "BYTES", default_value = "4096", value_parser = within(1..=MAX_INT))]
    pub size: u32,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096, at most the active MTU of both ports
    #[arg(short, long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    pub mtu: Mtu,
}

#[derive(Debug, Args)]
pub struct RunOptions {
    /// Run both ends, each in a thread of this process
    #[arg(long, conflicts_with = "host")]
    pub loopback: bool,

    /// Receives to keep posted [default: as many as fit into 256 KiB, but 4 to 500]
    ///
    /// When no more than one is left, all are posted again. Each has its own memory: this many buffers of --size bytes, and two
    /// more, are registered. The limit of locked memory (`ulimit -l`) must allow that.
    #[arg(short, long, value_name = "COUNT", value_parser = within(1..=MAX_INT))]
    pub rx_depth: Option<u32>,

    /// Messages each way
    #[arg(short = 'n', long, value_name = "COUNT", default_value = "1000", value_parser = within(1..=MAX_INT))]
    pub iters: u32,

    /// Check the last message at the server; give it to both ends
    #[arg(short, long)]
    pub chk: bool,
}

impl RunOptions {
    /// Receives to keep posted, for messages of `size` bytes.
    pub fn rx_depth(&self, size: u32) -> u32 {
        /// Default of the C programs, whose receives all share the memory of one message.
        const DEPTH: u32 = 500;
        /// Bytes of all receives by default. That much stays in a CPU cache, and one message at a time is in flight.
        const MEMORY: u32 = 256 << 10;

        self.rx_depth.unwrap_or_else(|| (MEMORY / size).clamp(4, DEPTH))
    }
}

fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = parse(text, &(0..=u32::MAX))?;
    Mtu::try_from(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Debug, Parser)]
    #[command(args_override_self = true, infer_long_args = true)]
    struct All {
        #[command(flatten)]
        peer: PeerOptions,
        #[command(flatten)]
        message: MessageOptions,
        #[command(flatten)]
        run: RunOptions,
    }

    fn parse(arguments: &str) -> Result<All, clap::Error> {
        All::try_parse_from(format!("pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c_but_for_the_receives() {
        All::command().debug_assert();
        let All { peer, message, run } = parse("").unwrap();
        assert_eq!((peer.host, peer.ib_dev, peer.gid_idx), (None, None, None));
        assert_eq!((peer.port, peer.ib_port, peer.sl, peer.events), (18515, 1, 0, false));
        assert_eq!((message.size, message.mtu, run.iters, run.chk), (4096, Mtu::MTU_1024, 1000, false));
        assert_eq!(run.rx_depth(message.size), 64);
    }

    #[test]
    fn short_long_joined_and_abbreviated_options_are_those_of_c() {
        let short = parse("-p1 -d rxe0 -i 2 -s0x10 -m 4096 -r 3 -n 4 -l5 -g 6 -ec host").unwrap();
        let long = parse(
            "--port=1 --ib-dev rxe0 --ib-port=2 --size 16 --mtu=4096 --rx-depth 3 --iters=4 --sl 5 --gid-idx=6 --events --chk \
             host",
        )
        .unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        let All { peer, message, .. } = &short;
        assert_eq!((message.size, peer.gid_idx, peer.host.as_deref()), (16, Some(6), Some("host")));
        assert_eq!(parse("--iter 7 --ev").unwrap().run.iters, 7);
        assert_eq!(parse("-n 1 -n 2 -e -e").unwrap().run.iters, 2, "the last one counts");
    }

    #[test]
    fn the_default_receives_of_long_messages_take_little_memory() {
        let depth = |arguments: &str| {
            let All { message, run, .. } = parse(arguments).unwrap();
            run.rx_depth(message.size)
        };
        assert_eq!(["-s 1", "-s 512", "-s 4096", "-s 0x7fffffff"].map(depth), [500, 500, 64, 4]);
        assert_eq!(["-s 1048576 -r 500", "-s 1 -r 1"].map(depth), [500, 1]);
    }

    #[test]
    fn values_out_of_range_and_conflicts_are_usage_errors() {
        for arguments in [
            "-m 1500",
            "-s 0",
            "-n 0",
            "-r 0",
            "-p 0",
            "-p 65536",
            "-i 0",
            "-l 16",
            "-g 256",
            "one two",
            "--timeout 0",
            "--loopback host",
            "-x",
        ] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
