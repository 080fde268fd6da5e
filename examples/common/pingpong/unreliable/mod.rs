//! Ping-pongs without acknowledgements, in the messages and lines of rdma-core's.

pub(crate) mod game;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use rdma_safe::{
    Buffer, ConnectOptions, Device, Gid, InitOptions, LinkLayer, Mtu, PortAttributes, PortState, ProtectionDomain,
    QueuePairAddress, QueuePairType,
};

use crate::address::Address;
use crate::options::Common;
use crate::{exchange, failure, pattern};
use game::{Game, Rules, header};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Of both ends, as in C.
const QKEY: u32 = 0x1111_1111;

/// One of the two programs.
pub(crate) struct Program<'a> {
    pub(crate) name: &'static str,
    pub(crate) qp_type: QueuePairType,
    pub(crate) size: u32,
    /// Of the path; that of the port unless it can be chosen.
    pub(crate) mtu: Option<Mtu>,
    pub(crate) options: &'a Common,
}

impl Program<'_> {
    pub(crate) fn main(&self) -> ExitCode {
        match self.run() {
            Ok(status) => status,
            Err(error) => {
                eprintln!("{}: {}", self.name, failure::one_line(&*error));
                ExitCode::FAILURE
            }
        }
    }

    fn run(&self) -> Result<ExitCode> {
        let options = self.options;
        let device = match &options.ib_dev {
            Some(name) => Device::by_name(name)?,
            None => Device::first()?,
        };
        let context = device.open()?;
        let port = context.query_port(options.ib_port)?;
        self.check_port(context.device_name(), &port)?;
        let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
        let rx_depth = options.rx_depth(self.size);

        let pd = context.alloc_pd()?;
        let channel = if options.events { Some(context.create_channel()?) } else { None };
        // The classic interface, as C.
        let mut cq = context.completion_queue(rx_depth.saturating_add(1)).classic(true);
        if let Some(channel) = &channel {
            cq = cq.channel(channel);
        }
        let advise = |error| format!("{error}; --rx-depth receives and one send have to fit");
        let cq = cq.build().map_err(advise)?;
        let builder = pd.queue_pair(&cq, &cq).qp_type(self.qp_type).classic(true);
        let mut qp = builder.send_depth(1).recv_depth(rx_depth).max_batch(1).build().map_err(advise)?;
        let mut init = InitOptions::default().port(options.ib_port);
        if let Some(index) = options.gid_idx {
            init = init.gid_index(index);
        }
        let QueuePairAddress { lid, qp_num, psn, gid, .. } = match self.qp_type {
            QueuePairType::UD => qp.init_datagrams(QKEY, &init)?,
            _ => qp.init(&init)?,
        };
        let buffers = self.buffers(&pd, rx_depth)?;
        let rules = Rules { size: self.size as usize, iters: options.iters, rx_depth, timeout: options.timeout };
        let mut game = Game::new(qp, cq, channel, buffers, rules)?;

        // Without -g, C sends none. On InfiniBand the LID is enough; on RoCE there is no way without.
        let gid = if is_ethernet || options.gid_idx.is_some() { gid } else { Gid::ZERO };
        let local = Address { lid, qp_num, psn, gid };
        let mut out = io::stdout();
        writeln!(out, "  local address:  {local}").map_err(cannot_print)?;
        let [remote] = match &options.host {
            Some(host) => exchange::client(host, options.port, &[local], options.timeout)?,
            None => {
                let connect = |[remote]: &[Address; 1]| self.connect(&pd, &mut game, remote, is_ethernet);
                exchange::server(options.port, &[local], options.timeout, connect)?
            }
        };
        writeln!(out, "  remote address: {remote}").map_err(cannot_print)?;
        let page = rustix::param::page_size();
        let begin = match options.host {
            Some(_) => {
                self.connect(&pd, &mut game, &remote, is_ethernet)?;
                Some(|message: &mut [u8]| pattern::fill(message, page, options.chk))
            }
            None => None,
        };
        let elapsed = game.play(begin)?;
        self.report(&mut out, elapsed).map_err(cannot_print)?;
        let mut status = ExitCode::SUCCESS;
        if options.chk && options.host.is_none() {
            let message = game.message().ok_or("no buffer holds the message")?;
            for page in pattern::invalid_pages(message, page) {
                writeln!(out, "invalid data in page {page}").map_err(cannot_print)?;
                status = ExitCode::FAILURE;
            }
        }
        Ok(status)
    }

    fn connect(&self, pd: &ProtectionDomain, game: &mut Game, remote: &Address, is_ethernet: bool) -> Result<()> {
        if is_ethernet && remote.gid.is_zero() {
            let name = self.name;
            return Err(format!(
                "the peer sent no GID, which RoCE cannot do without: give the peer one with -g, which ibv_{name} does not \
                 choose itself"
            )
            .into());
        }
        let Address { lid, qp_num, psn, gid } = *remote;
        let mtu = self.mtu.unwrap_or(Mtu::MTU_4096);
        let remote = QueuePairAddress { qp_num, psn, lid, gid, mtu, rd_atomic: 0 };
        let mut how = ConnectOptions::default().service_level(self.options.sl);
        if self.qp_type == QueuePairType::UD {
            let handle = pd.address_handle(&game.queue_pair().address_of(&remote, &how)?)?;
            game.aim(handle, qp_num, QKEY);
            return Ok(());
        }
        if let Some(mtu) = self.mtu {
            how = how.mtu(mtu);
        }
        Ok(game.queue_pair().connect(&remote, &how)?)
    }

    /// Refuses what would fail later, or only after a timeout.
    fn check_port(&self, device: &str, port: &PortAttributes) -> Result<()> {
        let name = format!("{device} port {}", self.options.ib_port);
        let (size, active) = (self.size, port.active_mtu());
        if !matches!(port.state(), PortState::ACTIVE | PortState::ACTIVE_DEFER) {
            let state = port.state();
            return Err(
                format!("{name} is not active ({state}): check the cable, `ip link`, or the subnet manager").into()
            );
        }
        if port.link_layer() != LinkLayer::ETHERNET && port.lid() == 0 {
            return Err(format!("{name} has no LID: a subnet manager (opensm) has to assign one").into());
        }
        let max = match self.qp_type {
            // A datagram is one packet.
            QueuePairType::UD => u32::from(active),
            _ => port.max_message_size(),
        };
        if size > max {
            return Err(format!("a message of {size} bytes is too long for {name}: at most {max}; see --size").into());
        }
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu > active) {
            return Err(format!(
                "a path MTU of {mtu} bytes is too large for {name}, whose active MTU is {active}; see --mtu"
            )
            .into());
        }
        Ok(())
    }

    /// One for each receive and two more.
    fn buffers(&self, pd: &ProtectionDomain, rx_depth: u32) -> Result<Vec<Buffer>> {
        /// No two messages share a cache line.
        const CACHE_LINE: usize = 64;

        let stride = (header(self.qp_type) + self.size as usize).next_multiple_of(CACHE_LINE);
        let count = rx_depth as usize + 2;
        let too_large = || format!("{count} buffers of {stride} bytes are needed: give a smaller --rx-depth");
        let len = stride.checked_mul(count).ok_or_else(too_large)?;
        let mut region = pd.allocate(len).map_err(|error| format!("{error}; {}", too_large()))?;
        if self.options.chk {
            // A page that nothing arrived in must not pass for one that a mark arrived in.
            pattern::fill(&mut region, rustix::param::page_size(), false);
        }
        Ok(region.into_chunks(stride)?)
    }

    fn report(&self, out: &mut impl Write, elapsed: Duration) -> io::Result<()> {
        let (seconds, micros, iters) = (elapsed.as_secs_f64(), elapsed.as_secs_f64() * 1e6, self.options.iters);
        let bytes = u64::from(self.size) * u64::from(iters) * 2;
        writeln!(out, "{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec", bytes as f64 * 8.0 / micros)?;
        writeln!(out, "{iters} iters in {seconds:.2} seconds = {:.2} usec/iter", micros / f64::from(iters))
    }
}

fn cannot_print(error: io::Error) -> String {
    format!("cannot print: {error}")
}
