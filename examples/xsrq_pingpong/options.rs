//! The command line: that of rdma-core's, and `--timeout`.

use crate::common::{Common, MAX_INT};
use crate::message::Message;
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
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) message: Message,

    /// Clients to wait for; of the server only
    #[arg(short, long, value_name = "COUNT", default_value = "1", value_parser = |text: &str| within(text, 1..=10_000_u32))]
    pub(crate) clients: u32,

    /// Messages each way for each client
    #[arg(
        short = 'n', long = "num_tests", value_name = "COUNT", default_value = "5",
        value_parser = |text: &str| within(text, 1..=MAX_INT)
    )]
    pub(crate) num_tests: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};
    use rdma_safe::Mtu;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("xsrq_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        let Options { common, message, clients, num_tests } = &options;
        assert_eq!((common.port, common.ib_port, message.size, message.mtu), (18515, 1, 4096, Mtu::MTU_1024));
        assert_eq!((*clients, *num_tests, common.sl, common.gid_idx), (1, 5, 0, None));
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
