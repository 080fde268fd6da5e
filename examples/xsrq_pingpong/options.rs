//! The command line: the options of rdma-core's `ibv_xsrq_pingpong`, and `--timeout`.

use common::number::{MAX_INT, within};
use common::pingpong::{MessageOptions, PeerOptions};

const EXAMPLES: &str = "\
Examples:
  xsrq_pingpong -c 2               server: waits for two clients, on all addresses of this host
  xsrq_pingpong 10.0.0.1           client of the server at 10.0.0.1

Give all ends the same --size, --num_tests and --mtu. Any of them may be rdma-core's ibv_xsrq_pingpong, which needs -g on RoCE. With
several clients, all of them run on one host.";

/// Bounces messages between shared receive queues over extended reliable connections (XRC)
///
/// Without HOST this is the server, with HOST a client. The device must support XRC, which `devinfo -v` shows; SoftRoCE and soft0
/// do not.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, clap::Parser)]
#[command(name = "xsrq_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
#[command(infer_long_args = true)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) peer: PeerOptions,
    #[command(flatten)]
    pub(crate) message: MessageOptions,

    /// Clients that the server waits for
    #[arg(short, long, value_name = "COUNT", default_value = "1", value_parser = within(1..=10_000_u32))]
    pub(crate) clients: u32,

    /// Messages each way for each client
    #[arg(
        short = 'n', long = "num_tests", value_name = "COUNT", default_value = "5",
        value_parser = within(1..=MAX_INT)
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
        assert_eq!((options.clients, options.num_tests), (1, 5));
    }

    #[test]
    fn short_and_long_options_are_those_of_c() {
        let (short, long) =
            (parse("-m 512 -c 3 -n 4 host").unwrap(), parse("--mtu 512 --clients 3 --num_tests=4 host").unwrap());
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert_eq!((short.message.mtu, short.clients, short.num_tests), (Mtu::MTU_512, 3, 4));
        for arguments in ["-n 0", "-c 0", "one two"] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
