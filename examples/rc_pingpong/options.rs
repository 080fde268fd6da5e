//! The command line: that of rdma-core's `ibv_rc_pingpong`, and `--timeout`.

use std::time::Duration;

use clap::{ArgGroup, Parser};
use rdma_safe::Mtu;

use crate::number::within;

const EXAMPLES: &str = "\
Examples:
  rc_pingpong                        server: waits for one client, on all addresses of this host
  rc_pingpong 10.0.0.1               client of the server at 10.0.0.1
  rc_pingpong -d mlx5_0 -g 3 HOST    over this device, from its GID at index 3: see show_gids
  rc_pingpong -s 65536 -n 100 -c     100 messages of 64 KiB, whose contents are checked

Give both ends the same --size, --iters and --mtu. Either end may be rdma-core's ibv_rc_pingpong, which needs -g on RoCE.";

/// Bounces a message between two hosts over a reliable connection, and prints the time that it takes
///
/// Without HOST it is the server, with HOST the client. The client sends a message, the server sends it back, and so on,
/// until each has sent as many as --iters says. The queue pairs' addresses are exchanged over TCP first.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, Parser)]
#[command(name = "rc_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
#[command(infer_long_args = true, group = ArgGroup::new("on-demand").args(["odp", "iodp"]).multiple(true))]
pub(crate) struct Options {
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

    /// Length of a message in bytes, 1 to what the port carries (`devinfo -v`: max_msg_sz)
    #[arg(short, long, value_name = "BYTES", default_value = "4096", value_parser = |text: &str| within(text, 1..=MAX_SIZE))]
    pub(crate) size: u32,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096, at most the active MTU of both ports
    #[arg(short, long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    pub(crate) mtu: Mtu,

    /// Receives to keep posted [default: as many as 256 KiB hold, but 4 to 500]
    ///
    /// When no more than one is left, all are posted anew. Each has memory of its own: as many buffers of --size bytes,
    /// and two more, are registered, which the limit of locked memory (`ulimit -l`) must allow.
    #[arg(short, long, value_name = "COUNT", value_parser = |text: &str| within(text, 1..=MAX_COUNT))]
    rx_depth: Option<u32>,

    /// Messages each way
    #[arg(short = 'n', long, value_name = "COUNT", default_value = "1000", value_parser = |text: &str| within(text, 1..=MAX_COUNT))]
    pub(crate) iters: u32,

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15
    #[arg(short = 'l', long, value_name = "LEVEL", default_value = "0", value_parser = |text: &str| within(text, 0..=15_u8))]
    pub(crate) sl: u8,

    /// Sleep until there is a completion event, instead of polling all the time
    #[arg(short, long)]
    pub(crate) events: bool,

    /// Index of the GID to connect from, 0 to 255
    ///
    /// Without it, RoCE uses the best one (RoCE v2 before v1, a routable address before a link-local one, IPv4 before
    /// IPv6), and InfiniBand connects by LID alone.
    #[arg(short, long, value_name = "INDEX", value_parser = |text: &str| within(text, 0..=255_u32))]
    pub(crate) gid_idx: Option<u32>,

    /// Register memory for on-demand paging; for devices that have it
    #[arg(short, long)]
    pub(crate) odp: bool,

    /// Use the whole address space by implicit on-demand paging (not possible here: see --odp)
    #[arg(short = 'O', long)]
    pub(crate) iodp: bool,

    /// Have the device page the memory in beforehand; with --odp
    #[arg(short = 'P', long, requires = "on-demand")]
    pub(crate) prefetch: bool,

    /// Print how many ticks of the device's clock lie between messages; for devices that have one
    #[arg(short, long)]
    pub(crate) ts: bool,

    /// Check what arrived last, at the server; give it to both ends
    #[arg(short, long)]
    pub(crate) chk: bool,

    /// Keep the message in memory of the device (not possible here)
    #[arg(short = 'j', long, conflicts_with = "on-demand")]
    pub(crate) dm: bool,

    /// Post by ibv_wr_*, instead of ibv_post_send
    #[arg(short = 'N', long = "new_send", alias = "new-send")]
    pub(crate) new_send: bool,

    /// Seconds to wait for the server to accept, for the peer's address, and for each completion, 1 to 86400
    ///
    /// A server waits for its client without a limit.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(crate) timeout: Duration,
}

impl Options {
    /// Receives to keep posted.
    pub(crate) fn rx_depth(&self) -> u32 {
        /// What C has; all of its receives share the memory of one message.
        const DEPTH: u32 = 500;
        /// Bytes for receives of which nobody said how many. They go round in a cache that way, and no more than one
        /// has a message at a time.
        const MEMORY: u32 = 256 << 10;

        self.rx_depth.unwrap_or_else(|| (MEMORY / self.size).clamp(4, DEPTH))
    }
}

/// What C has an `int` for.
const MAX_SIZE: u32 = i32::MAX as u32;
const MAX_COUNT: u32 = i32::MAX as u32;

fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = within(text, 0..=u32::MAX)?;
    Mtu::try_from(bytes).map_err(|error| error.to_string())
}

fn timeout(text: &str) -> Result<Duration, String> {
    within(text, 1..=86400_u64).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("rc_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c_but_for_the_receives() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        assert_eq!((&options.host, &options.ib_dev, options.gid_idx), (&None, &None, None));
        assert_eq!((options.port, options.ib_port, options.size, options.mtu), (18515, 1, 4096, Mtu::MTU_1024));
        assert_eq!((options.rx_depth(), options.iters, options.sl), (64, 1000, 0));
        assert!(!options.events && !options.odp && !options.iodp && !options.prefetch);
        assert!(!options.ts && !options.chk && !options.dm && !options.new_send);
    }

    #[test]
    fn short_long_joined_and_abbreviated_options_are_those_of_c() {
        let short = parse("-p1 -d rxe0 -i 2 -s0x10 -m 4096 -r 3 -n 4 -l5 -g 6 -ecN -t host").unwrap();
        let long = parse(
            "--port=1 --ib-dev rxe0 --ib-port=2 --size 16 --mtu=4096 --rx-depth 3 --iters=4 --sl 5 --gid-idx=6 \
             --events --chk --new_send --ts host",
        )
        .unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert_eq!((short.size, short.gid_idx, short.host.as_deref()), (16, Some(6), Some("host")));
        assert!(short.events && short.chk && short.new_send && short.ts);
        assert_eq!(parse("--iter 7 --ev --new").unwrap().iters, 7);
        assert_eq!(parse("-n 1 -n 2 -e -e").unwrap().iters, 2, "the last one counts");
        assert!(parse("-oOP").unwrap().prefetch);
        assert!(parse("-j").unwrap().dm);
    }

    #[test]
    fn receives_of_long_messages_do_not_take_much_memory_unasked() {
        let depth = |arguments| parse(arguments).unwrap().rx_depth();
        assert_eq!((depth("-s 1"), depth("-s 512"), depth("-s 4096"), depth("-s 0x7fffffff")), (500, 500, 64, 4));
        assert_eq!((depth("-s 1048576 -r 500"), depth("-s 1 -r 1")), (500, 1));
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
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
            "-P",
            "-jo",
            "-jO",
            "one two",
            "--timeout 0",
            "-x",
        ] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
