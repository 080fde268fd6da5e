//! rdma-core's `ibv_uc_pingpong`: a message bounces between two hosts over an unreliable connection. See `--help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use common::Result;
use common::pingpong::{MessageOptions, RawEnd, Receives, Setup, Transport};
use rdma_safe::{Access, Mtu, QueuePairType};

#[derive(Debug, clap::Args)]
struct UnreliableConnection {
    #[command(flatten)]
    message: MessageOptions,
}

impl Transport for UnreliableConnection {
    const NAME: &'static str = "uc_pingpong";
    const ABOUT: &'static str =
        "Bounces a message between two hosts over an unreliable connection, and prints the time that it takes";
    const QP_TYPE: QueuePairType = QueuePairType::UC;
    type End = RawEnd;

    fn size(&self) -> u32 {
        self.message.size
    }

    fn mtu(&self) -> Option<Mtu> {
        Some(self.message.mtu)
    }

    fn build(&self, setup: &Setup<'_>) -> Result<RawEnd> {
        RawEnd::build(setup, Self::QP_TYPE, 1, Receives::Own, Access::empty())
    }
}

fn main() -> ExitCode {
    common::pingpong::main::<UnreliableConnection>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::pingpong::CommandLine;

    fn parse(arguments: &str) -> Result<CommandLine<UnreliableConnection>, clap::Error> {
        common::pingpong::parse(format!("uc_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn options_are_those_of_c() {
        let options = parse("-s 0x10 -m 512 -c host").unwrap().transport;
        assert_eq!((options.size(), options.mtu()), (16, Some(Mtu::MTU_512)));
    }
}
