//! The command line: that of rdma-core's `ibv_rc_pingpong`, and `--timeout`.

use clap::{ArgGroup, Parser};

use crate::common::Common;
use crate::ends::Ends;
use crate::message::Message;
use crate::rounds::Rounds;

const EXAMPLES: &str = "\
Examples:
  rc_pingpong --loopback             both ends in this process, on any machine: without an RDMA device on soft0
  rc_pingpong                        server: waits for one client, on all addresses of this host
  rc_pingpong 10.0.0.1               client of the server at 10.0.0.1
  rc_pingpong -d mlx5_0 -g 3 HOST    over this device, from its GID at index 3: see show_gids
  rc_pingpong -s 65536 -n 100 -c     100 messages of 64 KiB, whose contents are checked

Give both ends the same --size, --iters and --mtu. Either end may be rdma-core's ibv_rc_pingpong, which needs -g on RoCE.";

/// Bounces a message between two hosts over a reliable connection, and prints the time that it takes
///
/// Without HOST it is the server, with HOST the client, and with --loopback both. The client sends a message, the server sends
/// it back, and so on, until each has sent as many as --iters says. The queue pairs' addresses are exchanged over TCP first.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, Parser)]
#[command(name = "rc_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
#[command(infer_long_args = true, group = ArgGroup::new("on-demand").args(["odp", "iodp"]).multiple(true))]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) ends: Ends,
    #[command(flatten)]
    pub(crate) message: Message,
    #[command(flatten)]
    pub(crate) rounds: Rounds,

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

    /// Keep the message in memory of the device (not possible here)
    #[arg(short = 'j', long, conflicts_with = "on-demand")]
    pub(crate) dm: bool,

    /// Post by ibv_wr_*, instead of ibv_post_send
    #[arg(short = 'N', long = "new_send", alias = "new-send")]
    pub(crate) new_send: bool,
}

impl Options {
    /// Receives to keep posted.
    pub(crate) fn rx_depth(&self) -> u32 {
        self.rounds.rx_depth(self.message.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rdma_safe::Mtu;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("rc_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c_but_for_the_receives() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        let Options { common, message, rounds, .. } = &options;
        assert_eq!((&common.host, &common.ib_dev, common.gid_idx), (&None, &None, None));
        assert_eq!((common.port, common.ib_port, message.size, message.mtu), (18515, 1, 4096, Mtu::MTU_1024));
        assert_eq!((options.rx_depth(), rounds.iters, common.sl), (64, 1000, 0));
        assert!(!common.events && !options.odp && !options.iodp && !options.prefetch);
        assert!(!options.ts && !rounds.chk && !options.dm && !options.new_send);
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
        let Options { common, message, rounds, .. } = &short;
        assert_eq!((message.size, common.gid_idx, common.host.as_deref()), (16, Some(6), Some("host")));
        assert!(common.events && rounds.chk && short.new_send && short.ts);
        assert_eq!(parse("--iter 7 --ev --new").unwrap().rounds.iters, 7);
        assert_eq!(parse("-n 1 -n 2 -e -e").unwrap().rounds.iters, 2, "the last one counts");
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
            "--loopback host",
            "-x",
        ] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
