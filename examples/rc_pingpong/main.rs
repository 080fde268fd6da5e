//! rdma-core's `ibv_rc_pingpong`, with [`rdma_safe::Endpoint`]: a message bounces between two hosts over a reliable connection. See
//! `--help`.

#![forbid(unsafe_code)]

mod end;
mod ticks;

use std::process::ExitCode;

use clap::Args;
use common::Result;
use common::failure;
use common::pingpong::{MessageOptions, Setup, Transport};
use rdma_safe::{Access, Context, Endpoint, Error, Mtu, QueuePairType, sys};

use end::EndpointEnd;
use ticks::Ticks;

#[derive(Debug, Args)]
struct ReliableConnection {
    #[command(flatten)]
    message: MessageOptions,

    #[command(flatten)]
    paging: OnDemandPaging,

    /// Have the device page the memory in beforehand; with --odp
    #[arg(short = 'P', long, requires = "on-demand")]
    prefetch: bool,

    /// Print the ticks of the device's clock between messages, on devices that have one
    #[arg(short, long)]
    ts: bool,

    /// Keep the message in device memory (not supported)
    #[arg(short = 'j', long, conflicts_with = "on-demand")]
    dm: bool,

    /// Post with ibv_wr_* instead of ibv_post_send
    #[arg(short = 'N', long = "new_send", alias = "new-send")]
    new_send: bool,
}

#[derive(Debug, Args)]
#[group(id = "on-demand", multiple = true)]
struct OnDemandPaging {
    /// Register memory for on-demand paging, on devices that support it
    #[arg(short, long)]
    odp: bool,

    /// Use the whole address space by implicit on-demand paging (not supported: see --odp)
    #[arg(short = 'O', long)]
    iodp: bool,
}

impl Transport for ReliableConnection {
    const NAME: &'static str = "rc_pingpong";
    const ABOUT: &'static str =
        "Bounces a message between two hosts over a reliable connection, and prints the time that it takes";
    const EXAMPLES: &'static str =
        "  rc_pingpong -s 65536 -n 100 -c     100 messages of 64 KiB, and a check of the last one\n";
    const QP_TYPE: QueuePairType = QueuePairType::RC;
    type End = EndpointEnd;

    fn size(&self) -> u32 {
        self.message.size
    }

    fn mtu(&self) -> Option<Mtu> {
        Some(self.message.mtu)
    }

    fn check(&self, context: &Context) -> Result<()> {
        self.check_paging(context)?;
        let (device, attributes) = (context.device_name(), context.attributes().as_raw());
        if self.ts && attributes.completion_timestamp_mask == 0 {
            return Err(format!(
                "{device} has no completion timestamps (completion_timestamp_mask is 0); leave out -t"
            )
            .into());
        }
        if self.dm {
            let reason = match attributes.max_dm_size {
                0 => format!("{device} does not support device memory (max_dm_size is 0)"),
                _ => "this program does not use device memory".into(),
            };
            return Err(format!("{reason}; leave out -j").into());
        }
        Ok(())
    }

    fn build(&self, setup: &Setup<'_>) -> Result<EndpointEnd> {
        let Setup { pd, peer, rx_depth, .. } = *setup;
        let access = if self.paging.odp { Access::ON_DEMAND } else { Access::empty() };
        // Two buffers more than receives: one for the message, and one because a message can arrive before the last send completes.
        let (region, stride) = setup.allocate(rx_depth as usize + 2, 0, access)?;
        if self.prefetch {
            // A failure is no reason to stop, as in C.
            if let Err(error) = region.prefetch() {
                eprintln!("rc_pingpong: warning: no prefetch: {}", failure::one_line(&error));
            }
        }
        let mut endpoint = Endpoint::builder(pd)
            .port(peer.ib_port)
            .send_depth(1)
            .recv_depth(rx_depth)
            .events(peer.events)
            .timestamps(self.ts)
            .classic_post(!self.new_send)
            .classic_poll(!self.ts);
        if let Some(index) = peer.gid_idx {
            endpoint = endpoint.gid_index(index);
        }
        let endpoint = endpoint.build().map_err(|error| match error {
            Error::CreateCompletionQueue { .. } | Error::CreateQueuePair { .. } => {
                format!("{error}; the device needs room for --rx-depth receives and one send")
            }
            error => failure::one_line(&error),
        })?;
        let ticks = self.ts.then(|| Ticks::new(pd.context().attributes().as_raw().completion_timestamp_mask));
        EndpointEnd::new(endpoint, region.into_chunks(stride)?, setup, ticks)
    }
}

impl ReliableConnection {
    fn check_paging(&self, context: &Context) -> Result<()> {
        let OnDemandPaging { odp, iodp } = self.paging;
        if !odp && !iodp {
            return Ok(());
        }
        let (device, caps) = (context.device_name(), &context.attributes().as_raw().odp_caps);
        let needed = sys::IBV_ODP_SUPPORT_SEND.0 | sys::IBV_ODP_SUPPORT_RECV.0;
        let is_supported = caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT.0) != 0
            && caps.per_transport_caps.rc_odp_caps & needed == needed;
        if !is_supported {
            return Err(format!(
                "{device} does not support on-demand paging for sends and receives of a reliable connection (odp_caps); leave \
                 out -o, -O and -P"
            )
            .into());
        }
        if iodp {
            let reason = match caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT_IMPLICIT.0) {
                0 => format!("{device} does not support implicit on-demand paging (odp_caps)"),
                _ => "rdma-safe does not support implicit on-demand paging, which would let the device access the whole address \
                      space"
                    .into(),
            };
            return Err(format!("{reason}; use -o instead of -O").into());
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    common::pingpong::main::<ReliableConnection>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::pingpong::CommandLine;

    fn parse(arguments: &str) -> Result<CommandLine<ReliableConnection>, clap::Error> {
        common::pingpong::parse(format!("rc_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn options_are_those_of_c() {
        let short = parse("-m 512 -oOP -tN host").unwrap().transport;
        let long = parse("--mtu 512 --odp --iodp --prefetch --ts --new_send host").unwrap().transport;
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert!(short.paging.odp && short.paging.iodp && short.prefetch && short.ts && short.new_send);
        assert!(parse("--new").unwrap().transport.new_send);
        assert!(parse("-j").unwrap().transport.dm);
    }

    #[test]
    fn conflicts_are_usage_errors() {
        for arguments in ["-P", "-jo", "-jO", "--loopback host"] {
            let result = parse(arguments);
            assert_eq!(result.map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
