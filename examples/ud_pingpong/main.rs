//! rdma-core's `ibv_ud_pingpong`: a message bounces between two hosts in unreliable datagrams. See `--help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use common::Result;
use common::number::{MAX_INT, within};
use common::pingpong::{RawEnd, Receives, Setup, Transport};
use rdma_safe::{Access, QueuePairType};

#[derive(Debug, clap::Args)]
struct Datagrams {
    /// Length of a message in bytes, 1 to the active MTU of the port
    #[arg(short, long, value_name = "BYTES", default_value = "1024", value_parser = within(1..=MAX_INT))]
    size: u32,
}

impl Transport for Datagrams {
    const NAME: &'static str = "ud_pingpong";
    const ABOUT: &'static str =
        "Bounces a message between two hosts in unreliable datagrams, and prints the time that it takes";
    const SAME_AT_BOTH_ENDS: &'static str = "--size and --iters";
    const QP_TYPE: QueuePairType = QueuePairType::UD;
    type End = RawEnd;

    fn size(&self) -> u32 {
        self.size
    }

    fn build(&self, setup: &Setup<'_>) -> Result<RawEnd> {
        RawEnd::build(setup, Self::QP_TYPE, 1, Receives::Own, Access::empty())
    }
}

fn main() -> ExitCode {
    common::pingpong::main::<Datagrams>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::pingpong::CommandLine;

    fn parse(arguments: &str) -> Result<CommandLine<Datagrams>, clap::Error> {
        common::pingpong::parse(format!("ud_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn options_are_those_of_c() {
        assert_eq!(parse("").unwrap().transport.size(), 1024);
        assert_eq!(parse("-s0x10 -c host").unwrap().transport.size(), 16);
        for arguments in ["-s 0", "-m 1024"] {
            let result = parse(arguments);
            assert_eq!(result.map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
