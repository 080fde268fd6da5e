//! The command line: that of rdma-core's, and `--timeout`.

use std::time::Duration;

use rdma_safe::Mtu;

use crate::number::within;

const EXAMPLES: &str = "\
Examples:
  xsrq_pingpong -c 2               server: waits for two clients, on all addresses of this host
  xsrq_pingpong 10.0.0.1           client of the server at 10.0.0.1

Give all ends the same --size, --num_tests and --mtu. Any of them may be rdma-core's ibv_xsrq_pingpong, which needs -g on RoCE. With
several clients, all of them run on one host.";

/// Bounces messages between shared receive queues over extended reliable connections (XRC)
///
/// Without HOST it is the server, with HOST a client. The device has to have XRC, which `devinfo -v` shows; SoftRoCE has not.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, clap::Parser)]
#[command(name = "xsrq_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
#[command(infer_long_args = true)]
pub(crate) struct Options {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    pub(crate) host: Option<String>,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = |text: &str| within(text, 1..=65535_u16))]
    pub(crate) port: u16,

    /// RDMA device, such as mlx5_0 [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    pub(crate) ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = |text: &str| within(text, 1..=255_u8))]
    pub(crate) ib_port: u8,

    /// Length of a message in bytes
    #[arg(short, long, value_name = "BYTES", default_value = "4096", value_parser = |text: &str| within(text, 1..=MAX))]
    pub(crate) size: u32,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096, at most the active MTU of both ports
    #[arg(short, long, value_name = "BYTES", default_value = "1024", value_parser = mtu)]
    pub(crate) mtu: Mtu,

    /// Clients to wait for; of the server only
    #[arg(short, long, value_name = "COUNT", default_value = "1", value_parser = |text: &str| within(text, 1..=10_000_u32))]
    pub(crate) clients: u32,

    /// Messages each way for each client
    #[arg(
        short = 'n', long = "num_tests", value_name = "COUNT", default_value = "5",
        value_parser = |text: &str| within(text, 1..=MAX)
    )]
    pub(crate) num_tests: u32,

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15
    #[arg(short = 'l', long, value_name = "LEVEL", default_value = "0", value_parser = |text: &str| within(text, 0..=15_u8))]
    pub(crate) sl: u8,

    /// Sleep until there is a completion event, instead of polling all the time
    #[arg(short, long)]
    pub(crate) events: bool,

    /// Index of the GID to send from, 0 to 255; on RoCE the best one unless given
    #[arg(short, long, value_name = "INDEX", value_parser = |text: &str| within(text, 0..=255_u32))]
    pub(crate) gid_idx: Option<u32>,

    /// Seconds to wait for the server to accept, for an address, and for each message, 1 to 86400
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(crate) timeout: Duration,
}

/// What C has an `int` for.
const MAX: u32 = i32::MAX as u32;

fn timeout(text: &str) -> Result<Duration, String> {
    within(text, 1..=86400_u64).map(Duration::from_secs)
}

fn mtu(text: &str) -> Result<Mtu, String> {
    let bytes = within(text, 0..=u32::MAX)?;
    Mtu::try_from(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("xsrq_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        assert_eq!((options.port, options.ib_port, options.size, options.mtu), (18515, 1, 4096, Mtu::MTU_1024));
        assert_eq!((options.clients, options.num_tests, options.sl, options.gid_idx), (1, 5, 0, None));
    }

    #[test]
    fn short_and_long_options_are_those_of_c() {
        let short = parse("-p1 -d mlx5_0 -i 2 -s0x10 -m 512 -c 3 -n 4 -l5 -g 6 -e host").unwrap();
        let long = parse(
            "--port=1 --ib-dev mlx5_0 --ib-port=2 --size 16 --mtu 512 --clients 3 --num_tests=4 --sl 5 --gid-idx=6 --events host",
        )
        .unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for arguments in ["-s 0", "-n 0", "-c 0", "-p 0", "-l 16", "-g 256", "-m 1500", "one two", "--timeout 0"] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
