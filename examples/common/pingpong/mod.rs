//! The ping-pong programs: rdma-core's, with the same options, messages and output, so that either end may be the C program.
//!
//! A program implements [`Transport`] for the options that only it has, and calls [`main`]. [`End`] is what runs at each end:
//! [`RawEnd`] for all transports on queue pairs.

mod address;
mod exchange;
mod options;
mod pattern;
mod port;
mod raw;
mod report;
mod role;
mod setup;
pub mod tcp;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches};
use rdma_safe::{ConnectOptions, Context, Gid, LinkLayer, Mtu, QueuePairAddress, QueuePairType};

use crate::{Result, exit_code};
use address::Address;
use role::{Output, Role};

pub use options::{MessageOptions, PeerOptions, RunOptions};
pub use raw::{RawEnd, Receives};
pub use setup::Setup;

/// Differences between the ping-pong programs. The fields of an implementor are the options that only its program has.
pub trait Transport: Args + Sync {
    /// Name of the program. The C program of rdma-core is called `ibv_NAME`.
    const NAME: &'static str;
    /// First line of `--help`.
    const ABOUT: &'static str;
    /// Examples in `--help`, one per line. They follow the examples that all programs have.
    const EXAMPLES: &'static str = "";
    /// The options that both ends have to agree on.
    const SAME_AT_BOTH_ENDS: &'static str = "--size, --iters and --mtu";
    const QP_TYPE: QueuePairType;
    /// Number of addresses that the C program exchanges, for any number of queue pairs. Unused addresses are zero.
    const ADDRESSES: usize = 1;

    type End: End;

    /// Length of a message in bytes.
    fn size(&self) -> u32;

    /// The path MTU, if the program can choose it.
    fn mtu(&self) -> Option<Mtu> {
        None
    }

    /// Number of queue pairs, at most [`Transport::ADDRESSES`].
    fn queue_pairs(&self) -> usize {
        1
    }

    /// Number of receives to keep posted.
    fn rx_depth(&self, run: &RunOptions) -> Result<u32> {
        Ok(run.rx_depth(self.size()))
    }

    /// Rejects options that the device does not support.
    fn check(&self, _context: &Context) -> Result<()> {
        Ok(())
    }

    /// Creates this end with its queue pairs in INIT, and posts the receives.
    fn build(&self, setup: &Setup<'_>) -> Result<Self::End>;
}

/// Writes the bytes of a message.
pub type Fill<'a> = &'a dyn Fn(&mut [u8]);

/// One end of a ping-pong.
pub trait End {
    /// Addresses of the queue pairs, for the peer.
    fn addresses(&self) -> Vec<QueuePairAddress>;

    /// Connects the queue pair `index` to `remote`.
    fn connect(&mut self, index: usize, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()>;

    /// Runs all iterations and returns how long they took. With `fill`, this end sends first, and `fill` writes its messages.
    fn run(&mut self, fill: Option<Fill<'_>>) -> Result<Duration>;

    /// The last message that each queue pair received, after [`End::run`].
    fn messages(&self) -> Vec<&[u8]>;

    /// More lines to print after the result.
    fn statistics(&self) -> Option<String> {
        None
    }
}

#[derive(Debug, clap::Parser)]
#[command(max_term_width = 100, args_override_self = true, infer_long_args = true)]
pub struct CommandLine<T: Args> {
    #[command(flatten)]
    pub peer: PeerOptions,
    #[command(flatten)]
    pub run: RunOptions,
    #[command(flatten)]
    pub transport: T,
}

/// Parses the command line of a ping-pong program, which begins with its name.
pub fn parse<T: Transport, A>(arguments: impl IntoIterator<Item = A>) -> Result<CommandLine<T>, clap::Error>
where
    A: Into<OsString> + Clone,
{
    CommandLine::from_arg_matches(&command::<T>().try_get_matches_from(arguments)?)
}

fn command<T: Transport>() -> clap::Command {
    const ROLES: &str = "\
Without HOST this is the server, with HOST the client, and with --loopback both. The client sends a message on each queue \
pair, the server sends it back, and so on, until each end has sent --iters messages. The ends exchange the addresses of \
their queue pairs over TCP first.";
    const LOSS: &str = " A lost message is not retransmitted: the run then ends after --timeout.";
    const NUMBERS: &str = "Numbers are decimal, hexadecimal after 0x, or octal after 0.";

    let loss = if T::QP_TYPE == QueuePairType::RC { "" } else { LOSS };
    let about = format!("{}\n\n{ROLES}{loss}\n\n{NUMBERS}", T::ABOUT);
    let (name, more, same) = (T::NAME, T::EXAMPLES, T::SAME_AT_BOTH_ENDS);
    let examples = format!(
        "\
Examples:
  {name} --loopback             both ends in this process; needs no RDMA device
  {name}                        server: waits for one client, on all addresses of this host
  {name} 10.0.0.1               client of the server at 10.0.0.1
  {name} -d mlx5_0 -g 3 HOST    over this device, from its GID at index 3: see show_gids
{more}
Give both ends the same {same}. Either end may be rdma-core's ibv_{name}, which needs -g on RoCE."
    );
    CommandLine::<T>::command().name(name).about(T::ABOUT).long_about(about).after_help(examples)
}

/// Runs a ping-pong program.
pub fn main<T: Transport>() -> ExitCode {
    let options = parse::<T, _>(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let run = |role: &Role, output: &Output| run(&options, role, output);
    let is_valid = match options.run.loopback {
        true => role::both(T::NAME, run),
        false => run(&Role::new(&options.peer), &Output::default()),
    };
    exit_code(T::NAME, is_valid.map(|is_valid| if is_valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// Runs one end. Returns whether the data that it received is valid.
fn run<T: Transport>(options: &CommandLine<T>, role: &Role, output: &Output) -> Result<bool> {
    let CommandLine { peer, run, transport } = options;
    let device = crate::device::find(peer.ib_dev.as_deref())?;
    let context = device.open()?;
    transport.check(&context)?;
    let port = context.query_port(peer.ib_port)?;
    let max = match T::QP_TYPE {
        // A datagram is one packet.
        QueuePairType::UD => u32::from(port.active_mtu()),
        _ => port.max_message_size(),
    };
    port::check(&context, peer.ib_port, &port, transport.size(), max, transport.mtu())?;

    let setup = Setup {
        pd: &context.alloc_pd()?,
        peer,
        size: transport.size() as usize,
        iters: run.iters,
        rx_depth: transport.rx_depth(run)?,
        check: run.chk,
    };
    let mut end = transport.build(&setup)?;

    // Without -g, the C program sends no GID. InfiniBand then connects by LID; RoCE needs the GID.
    let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
    let sends_gid = is_ethernet || peer.gid_idx.is_some();
    let local = end.addresses().into_iter().map(|QueuePairAddress { lid, qp_num, psn, gid, .. }| {
        let gid = if sends_gid { gid } else { Gid::ZERO };
        Address { lid, qp_num, psn, gid }
    });
    let mut local: Vec<_> = local.collect();
    for address in &local {
        output.line(format_args!("  local address:  {address}"))?;
    }
    local.resize(T::ADDRESSES, Address::NONE);
    let mut connect = |remote: &[Address]| connect(&mut end, remote, is_ethernet, options);
    let remote = role.exchange(&local, peer.timeout, &mut connect)?;
    for address in remote.iter().take(transport.queue_pairs()) {
        output.line(format_args!("  remote address: {address}"))?;
    }
    if role.is_client() {
        connect(&remote)?;
    }

    let fill = |message: &mut [u8]| pattern::fill(message, run.chk);
    let elapsed = end.run(role.is_client().then_some(&fill))?;
    output.line(report::lines(transport.size(), run.iters, elapsed))?;
    if let Some(statistics) = end.statistics() {
        output.line(statistics)?;
    }
    let mut is_valid = true;
    if run.chk && !role.is_client() {
        for page in end.messages().into_iter().flat_map(pattern::invalid_pages) {
            output.line(format_args!("invalid data in page {page}"))?;
            is_valid = false;
        }
    }
    Ok(is_valid)
}

fn connect<T: Transport>(
    end: &mut impl End,
    remote: &[Address],
    is_ethernet: bool,
    options: &CommandLine<T>,
) -> Result<()> {
    let CommandLine { peer, transport, .. } = options;
    let ours = transport.queue_pairs();
    let theirs = remote.iter().take_while(|address| address.qp_num != 0).count();
    if ours != theirs {
        return Err(
            format!("the peer has {theirs} queue pairs, and this end {ours}: give both the same --num-qp").into()
        );
    }
    // The message has no MTU and no number of reads. Each end of the C program uses its own --mtu option and one read or
    // atomic at a time.
    let mtu = transport.mtu().unwrap_or(Mtu::MTU_4096);
    let rd_atomic = u8::from(T::QP_TYPE == QueuePairType::RC);
    let mut connection = ConnectOptions::default().service_level(peer.sl);
    if rd_atomic > 0 {
        connection = connection.rd_atomic(rd_atomic);
    }
    if let Some(mtu) = transport.mtu() {
        connection = connection.mtu(mtu);
    }
    for (index, address) in remote.iter().take(ours).enumerate() {
        let Address { lid, qp_num, psn, gid } = *address;
        if is_ethernet && gid.is_zero() {
            return Err(format!(
                "the peer sent no GID, which RoCE needs: start the peer with -g, for which ibv_{} has no default",
                T::NAME
            )
            .into());
        }
        let address = QueuePairAddress::new(qp_num, psn, gid, mtu).with_lid(lid).with_rd_atomic(rd_atomic);
        end.connect(index, &address, &connection)?;
    }
    Ok(())
}
