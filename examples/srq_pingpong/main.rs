//! rdma-core's `ibv_srq_pingpong`: messages bounce between two hosts over reliable connections that share one receive queue. See
//! `--help`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use common::Result;
use common::number::within;
use common::pingpong::{MessageOptions, RawEnd, Receives, RunOptions, Setup, Transport};
use rdma_safe::{Access, Context, Mtu, QueuePairType, sys};

#[derive(Debug, clap::Args)]
struct SharedReceives {
    #[command(flatten)]
    message: MessageOptions,

    /// Queue pairs, 1 to 255 and no more than --rx-depth
    #[arg(
        short = 'q', long, value_name = "COUNT", default_value = "16",
        value_parser = within(1..=SharedReceives::ADDRESSES as u32 - 1)
    )]
    num_qp: u32,

    /// Register memory for on-demand paging, on devices that support it
    #[arg(short, long)]
    odp: bool,
}

impl Transport for SharedReceives {
    const NAME: &'static str = "srq_pingpong";
    const ABOUT: &'static str = "Bounces messages between two hosts over reliable connections whose receives come from one shared \
                                 receive queue, and prints the time that it takes";
    const EXAMPLES: &'static str =
        "  srq_pingpong -q 4 -n 100            100 messages each way, spread over 4 queue pairs\n";
    const SAME_AT_BOTH_ENDS: &'static str = "--num-qp, --size, --iters and --mtu";
    const QP_TYPE: QueuePairType = QueuePairType::RC;
    const ADDRESSES: usize = 256;
    type End = RawEnd;

    fn size(&self) -> u32 {
        self.message.size
    }

    fn mtu(&self) -> Option<Mtu> {
        Some(self.message.mtu)
    }

    fn queue_pairs(&self) -> usize {
        self.num_qp as usize
    }

    /// At least one for each queue pair, and two by default.
    fn rx_depth(&self, run: &RunOptions) -> Result<u32> {
        match run.rx_depth {
            None => Ok(run.rx_depth(self.size()).max(2 * self.num_qp)),
            Some(depth) if depth < self.num_qp => Err(format!(
                "{depth} receives are too few for {} queue pairs, each of which needs one: see --rx-depth and --num-qp",
                self.num_qp
            )
            .into()),
            Some(depth) => Ok(depth),
        }
    }

    fn check(&self, context: &Context) -> Result<()> {
        let caps = &context.attributes().as_raw().odp_caps;
        let needed = sys::IBV_ODP_SUPPORT_SEND.0 | sys::IBV_ODP_SUPPORT_SRQ_RECV.0;
        let is_supported = caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT.0) != 0
            && caps.per_transport_caps.rc_odp_caps & needed == needed;
        if self.odp && !is_supported {
            return Err(format!(
                "{} does not support on-demand paging for sends and shared receives of a reliable connection (odp_caps); leave \
                 out -o",
                context.device_name()
            )
            .into());
        }
        Ok(())
    }

    fn build(&self, setup: &Setup<'_>) -> Result<RawEnd> {
        let access = if self.odp { Access::ON_DEMAND } else { Access::empty() };
        RawEnd::build(setup, Self::QP_TYPE, self.queue_pairs(), Receives::Shared, access)
    }
}

fn main() -> ExitCode {
    common::pingpong::main::<SharedReceives>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::pingpong::CommandLine;

    fn parse(arguments: &str) -> Result<CommandLine<SharedReceives>, clap::Error> {
        common::pingpong::parse(format!("srq_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn options_are_those_of_c() {
        let short = parse("-q 3 -oc -m 512 host").unwrap().transport;
        let long = parse("--num-qp 3 --odp --chk --mtu 512 host").unwrap().transport;
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert_eq!((short.queue_pairs(), short.odp, short.mtu()), (3, true, Some(Mtu::MTU_512)));
        for arguments in ["-q 0", "-q 256"] {
            let result = parse(arguments);
            assert_eq!(result.map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }

    #[test]
    fn each_queue_pair_has_a_receive() {
        let depth = |arguments| {
            let CommandLine { run, transport, .. } = parse(arguments).unwrap();
            transport.rx_depth(&run).map_err(|error| error.to_string())
        };
        assert_eq!(depth("-s 1048576"), Ok(32), "two for each of 16");
        assert_eq!(depth("-q 4 -r 4"), Ok(4));
        let error = depth("-q 5 -r 4").unwrap_err();
        assert!(error.contains("4 receives are too few for 5 queue pairs"), "{error}");
    }
}
