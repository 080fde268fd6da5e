//! rdma-core's `ibv_uc_pingpong` over the raw door, [`rdma_safe::QueuePair`]: the same options, messages and lines, so that
//! either end may be the C program. See `--help`.

#[path = "../common/pingpong/address.rs"]
mod address;
#[path = "../common/pingpong/common.rs"]
mod common;
#[path = "../common/device.rs"]
mod device;
#[path = "../common/pingpong/ends.rs"]
mod ends;
#[path = "../common/pingpong/exchange.rs"]
mod exchange;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/pingpong/game.rs"]
mod game;
#[path = "../common/pingpong/message.rs"]
mod message;
#[path = "../common/number.rs"]
mod number;
#[path = "../common/pingpong/pattern.rs"]
mod pattern;
#[path = "../common/pingpong/port.rs"]
mod port;
#[path = "../common/pingpong/report.rs"]
mod report;
#[path = "../common/pingpong/rounds.rs"]
mod rounds;
#[path = "../common/pingpong/unreliable.rs"]
mod unreliable;

use std::process::ExitCode;

use clap::Parser;
use rdma_safe::QueuePairType;

use common::Common;
use ends::Ends;
use message::Message;
use rounds::Rounds;
use unreliable::Program;

const EXAMPLES: &str = "\
Examples:
  uc_pingpong --loopback             both ends in this process, on any machine: without an RDMA device on soft0
  uc_pingpong                        server: waits for one client, on all addresses of this host
  uc_pingpong 10.0.0.1               client of the server at 10.0.0.1
  uc_pingpong -d mlx5_0 -g 3 HOST    over this device, from its GID at index 3: see show_gids

Give both ends the same --size, --iters and --mtu. Either end may be rdma-core's ibv_uc_pingpong, which needs -g on RoCE.";

/// Bounces a message between two hosts over an unreliable connection, and prints the time that it takes
///
/// Without HOST it is the server, with HOST the client, and with --loopback both. The client sends a message, the server sends
/// it back, and so on, until each has sent as many as --iters says. The queue pairs' addresses are exchanged over TCP first. A
/// message that is lost is not sent again, and ends the game after --timeout.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, Parser)]
#[command(name = "uc_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
#[command(infer_long_args = true)]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    ends: Ends,
    #[command(flatten)]
    message: Message,
    #[command(flatten)]
    rounds: Rounds,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let program = Program {
        name: "uc_pingpong",
        qp_type: QueuePairType::UC,
        size: options.message.size,
        mtu: Some(options.message.mtu),
        options: &options.common,
        ends: &options.ends,
        rounds: &options.rounds,
    };
    program.main()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("uc_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c_but_for_the_receives() {
        Options::command().debug_assert();
        let Options { common, message: Message { size, .. }, rounds, .. } = parse("").unwrap();
        assert_eq!((common.port, common.ib_port, size, rounds.iters, common.sl), (18515, 1, 4096, 1000, 0));
        assert!(!common.events && !rounds.chk && common.gid_idx.is_none() && common.host.is_none());
        assert_eq!(rounds.rx_depth(size), (262_144 / size).min(500));
    }

    #[test]
    fn short_and_long_options_are_those_of_c() {
        let short = parse("-p1 -d rxe0 -i 2 -s0x10 -m 512 -r 3 -n 4 -l5 -g 6 -ec host").unwrap();
        let long = parse(
            "--port=1 --ib-dev rxe0 --ib-port=2 --size 16 --mtu 512 --rx-depth 3 --iters=4 --sl 5 --gid-idx=6 --events --chk host",
        )
        .unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert_eq!((short.message.size, short.common.gid_idx), (16, Some(6)));
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for arguments in
            ["-s 0", "-n 0", "-r 0", "-p 0", "-l 16", "-g 256", "-m 1500", "one two", "--timeout 0", "--loopback host"]
        {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
