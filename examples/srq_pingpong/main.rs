//! rdma-core's `ibv_srq_pingpong` over the raw door, [`rdma_safe::SharedReceiveQueue`]: the same options, messages and lines, so
//! that either end may be the C program. See `--help`.

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

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use rdma_safe::{
    Access, Buffer, ConnectOptions, Context, Gid, InitOptions, LinkLayer, Pages, ProtectionDomain, QueuePairAddress,
    sys,
};

use address::Address;
use common::Common;
use ends::{End, Ends};
use game::{Game, Rules};
use message::Message;
use number::within;
use report::{cannot_print, report};
use rounds::Rounds;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const EXAMPLES: &str = "\
Examples:
  srq_pingpong --loopback             both ends in this process, on any machine: without an RDMA device on soft0
  srq_pingpong                        server: waits for one client, on all addresses of this host
  srq_pingpong 10.0.0.1               client of the server at 10.0.0.1
  srq_pingpong -q 4 -d mlx5_0 -g 3 HOST
                                      by 4 queue pairs of this device, from its GID at index 3: see show_gids

Give both ends the same --num-qp, --size, --iters and --mtu. Either end may be rdma-core's ibv_srq_pingpong, which needs -g on
RoCE.";

/// Addresses that C exchanges, however many queue pairs there are; the rest are zeros.
const ADDRESSES: usize = 256;

/// Bounces messages between two hosts over reliable connections whose receives come from one shared receive queue, and prints
/// the time that it takes
///
/// Without HOST it is the server, with HOST the client, and with --loopback both. The client sends a message by each of its
/// queue pairs, the server sends it back by the same, and so on, until each has sent as many as --iters says, over all queue
/// pairs together. The queue pairs' addresses are exchanged over TCP first.
///
/// Numbers are decimal, hexadecimal after 0x, or octal after 0.
#[derive(Debug, Parser)]
#[command(name = "srq_pingpong", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
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

    /// Queue pairs, 1 to 255 and no more than --rx-depth
    #[arg(
        short = 'q', long, value_name = "COUNT", default_value = "16",
        value_parser = |text: &str| within(text, 1..=ADDRESSES as u32 - 1)
    )]
    num_qp: u32,

    /// Register memory for on-demand paging; for devices that have it
    #[arg(short, long)]
    odp: bool,
}

impl Options {
    /// Receives to keep posted: at least one for each queue pair, and twice as many unless told otherwise.
    fn rx_depth(&self) -> Result<u32> {
        let depth = self.rounds.rx_depth(self.message.size);
        match self.rounds.rx_depth {
            None => Ok(depth.max(2 * self.num_qp)),
            Some(given) if given < self.num_qp => Err(format!(
                "{given} receives are too few for {} queue pairs, each of which needs one: see --rx-depth and --num-qp",
                self.num_qp
            )
            .into()),
            Some(given) => Ok(given),
        }
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    ends::play("srq_pingpong", &options.common, &options.ends, |end, out| run(&options, end, out))
}

fn run(options: &Options, end: &End, mut out: &mut dyn Write) -> Result<bool> {
    let common = &options.common;
    let rx_depth = options.rx_depth()?;
    let device = device::find(common.ib_dev.as_deref())?;
    let context = device.open()?;
    let port = context.query_port(common.ib_port)?;
    let (size, mtu) = (options.message.size, options.message.mtu);
    port::check(&context, common.ib_port, &port, size, port.max_message_size(), Some(mtu))?;
    check_features(&context, options)?;
    let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;

    let pd = context.alloc_pd()?;
    let buffers = allocate(&pd, rx_depth, options)?;
    let channel = if common.events { Some(context.create_channel()?) } else { None };
    // The classic interface, as C.
    let mut cq = context.completion_queue(rx_depth.saturating_add(options.num_qp)).classic(true);
    if let Some(channel) = &channel {
        cq = cq.channel(channel);
    }
    let advise = |error| format!("{error}; --rx-depth receives and a send for each of --num-qp have to fit");
    let cq = cq.build().map_err(advise)?;
    let srq = pd.shared_receive_queue(rx_depth).build().map_err(advise)?;
    let mut init = InitOptions::default().port(common.ib_port);
    if let Some(index) = common.gid_idx {
        init = init.gid_index(index);
    }
    let mut qps = Vec::new();
    let mut local = [Address { lid: 0, qp_num: 0, psn: 0, gid: Gid::ZERO }; ADDRESSES];
    for address in local.iter_mut().take(options.num_qp as usize) {
        let builder = pd.queue_pair(&cq, &cq).shared_receive_queue(&srq).classic(true);
        let mut qp = builder.send_depth(1).max_batch(1).build().map_err(advise)?;
        let QueuePairAddress { lid, qp_num, psn, gid, .. } = qp.init(&init)?;
        // Without -g, C sends none. On InfiniBand that means to connect by LID; on RoCE there is no way without.
        let gid = if is_ethernet || common.gid_idx.is_some() { gid } else { Gid::ZERO };
        *address = Address { lid, qp_num, psn, gid };
        qps.push(qp);
    }
    let rules =
        Rules { size: options.message.size as usize, iters: options.rounds.iters, rx_depth, timeout: common.timeout };
    let mut game = Game::new(qps, Some(srq), cq, channel, buffers, rules)?;

    for address in local.iter().take(options.num_qp as usize) {
        writeln!(out, "  local address:  {address}").map_err(cannot_print)?;
    }
    let connect = |game: &mut Game, remote: &[Address]| connect(game, remote, is_ethernet, options);
    let remote = end.exchange(&local, common.timeout, |remote| connect(&mut game, remote))?;
    for address in remote.iter().take(options.num_qp as usize) {
        writeln!(out, "  remote address: {address}").map_err(cannot_print)?;
    }
    let page = rustix::param::page_size();
    let begin = match end.is_client() {
        true => {
            connect(&mut game, &remote)?;
            Some(|message: &mut [u8]| pattern::fill(message, page, options.rounds.chk))
        }
        false => None,
    };
    let elapsed = game.play(begin)?;
    report(&mut out, size, options.rounds.iters, elapsed).map_err(cannot_print)?;
    let mut is_right = true;
    if options.rounds.chk && !end.is_client() {
        for message in game.messages() {
            for page in pattern::invalid_pages(message, page) {
                writeln!(out, "invalid data in page {page}").map_err(cannot_print)?;
                is_right = false;
            }
        }
    }
    Ok(is_right)
}

fn connect(game: &mut Game, remote: &[Address], is_ethernet: bool, options: &Options) -> Result<()> {
    let (ours, theirs) = (options.num_qp as usize, remote.iter().take_while(|address| address.qp_num != 0).count());
    if ours != theirs {
        return Err(
            format!("the peer has {theirs} queue pairs, and this end {ours}: give both the same --num-qp").into()
        );
    }
    let how = ConnectOptions::default().mtu(options.message.mtu).service_level(options.common.sl).rd_atomic(1);
    for (index, address) in remote.iter().take(ours).enumerate() {
        let Address { lid, qp_num, psn, gid } = *address;
        if is_ethernet && gid.is_zero() {
            return Err("the peer sent no GID, which RoCE cannot do without: give the peer one with -g, which \
                        ibv_srq_pingpong does not choose itself"
                .into());
        }
        // Not part of the message: C uses one read or atomic at a time, and the MTU that each end is given.
        game.connect(index, &QueuePairAddress { qp_num, psn, lid, gid, mtu: options.message.mtu, rd_atomic: 1 }, &how)?;
    }
    Ok(())
}

/// Refuses options that this device cannot follow.
fn check_features(context: &Context, options: &Options) -> Result<()> {
    let caps = &context.attributes().as_raw().odp_caps;
    let needed = sys::IBV_ODP_SUPPORT_SEND.0 | sys::IBV_ODP_SUPPORT_SRQ_RECV.0;
    let has = caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT.0) != 0
        && caps.per_transport_caps.rc_odp_caps & needed == needed;
    if options.odp && !has {
        return Err(format!(
            "{} cannot page on demand for sends and shared receives of a reliable connection (odp_caps); leave out -o",
            context.device_name()
        )
        .into());
    }
    Ok(())
}

/// A buffer for each receive and two more for each queue pair, in one region.
fn allocate(pd: &ProtectionDomain, rx_depth: u32, options: &Options) -> Result<Vec<Buffer>> {
    /// No two messages share a cache line.
    const CACHE_LINE: usize = 64;

    let stride = (options.message.size as usize).next_multiple_of(CACHE_LINE);
    let count = rx_depth as usize + 2 * options.num_qp as usize;
    let too_large =
        || format!("{count} buffers of {stride} bytes are needed: give a smaller --rx-depth or fewer queue pairs");
    let len = stride.checked_mul(count).ok_or_else(too_large)?;
    let access = if options.odp { Access::ON_DEMAND } else { Access::empty() };
    let region = Pages::new(len).and_then(|pages| pd.register_with(pages, access));
    let mut region = region.map_err(|error| format!("{error}; {}", too_large()))?;
    if options.rounds.chk {
        // A page that nothing arrived in must not pass for one that a mark arrived in.
        pattern::fill(&mut region, rustix::param::page_size(), false);
    }
    Ok(region.into_chunks(stride)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use rdma_safe::Mtu;

    fn parse(arguments: &str) -> std::result::Result<Options, clap::Error> {
        Options::try_parse_from(format!("srq_pingpong {arguments}").split_whitespace())
    }

    #[test]
    fn the_defaults_are_those_of_c_but_for_the_receives() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        let common = &options.common;
        assert_eq!(
            (common.port, common.ib_port, options.message.size, options.message.mtu),
            (18515, 1, 4096, Mtu::MTU_1024)
        );
        assert_eq!((options.num_qp, options.rounds.iters, common.sl, options.rx_depth().unwrap()), (16, 1000, 0, 64));
        assert!(
            !common.events && !options.rounds.chk && !options.odp && common.gid_idx.is_none() && common.host.is_none()
        );
    }

    #[test]
    fn short_and_long_options_are_those_of_c() {
        let short = parse("-p1 -d rxe0 -i 2 -s0x10 -m 512 -q 3 -r 3 -n 4 -l5 -g 6 -eoc host").unwrap();
        let long = parse(
            "--port=1 --ib-dev rxe0 --ib-port=2 --size 16 --mtu 512 --num-qp 3 --rx-depth 3 --iters=4 --sl 5 --gid-idx=6 \
             --events --odp --chk host",
        )
        .unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"));
        assert_eq!((short.message.size, short.num_qp, short.common.gid_idx), (16, 3, Some(6)));
    }

    #[test]
    fn each_queue_pair_has_a_receive() {
        let depth = |arguments| parse(arguments).unwrap().rx_depth().map_err(|error| error.to_string());
        assert_eq!(depth("-s 1048576"), Ok(32), "two for each of 16");
        assert_eq!(depth("-q 4 -r 4"), Ok(4));
        let error = depth("-q 5 -r 4").unwrap_err();
        assert!(error.contains("4 receives are too few for 5 queue pairs"), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for arguments in ["-s 0", "-n 0", "-r 0", "-q 0", "-q 256", "-l 16", "-g 256", "-m 1500", "--loopback host"] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
