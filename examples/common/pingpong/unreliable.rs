//! Ping-pongs without acknowledgements, in the messages and lines of rdma-core's.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use rdma_safe::{
    Buffer, ConnectOptions, Gid, InitOptions, LinkLayer, Mtu, ProtectionDomain, QueuePairAddress, QueuePairType,
};

use crate::address::Address;
use crate::common::Common;
use crate::ends::{End, Ends};
use crate::game::{Game, QKEY, Rules, header};
use crate::report::{cannot_print, report};
use crate::rounds::Rounds;
use crate::{device, ends, pattern, port};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// One of the two programs.
pub(crate) struct Program<'a> {
    pub(crate) name: &'static str,
    pub(crate) qp_type: QueuePairType,
    pub(crate) size: u32,
    /// Of the path; that of the port unless it can be chosen.
    pub(crate) mtu: Option<Mtu>,
    pub(crate) options: &'a Common,
    pub(crate) ends: &'a Ends,
    pub(crate) rounds: &'a Rounds,
}

impl Program<'_> {
    pub(crate) fn main(&self) -> ExitCode {
        ends::play(self.name, self.options, self.ends, |end, out| self.run(end, out))
    }

    fn run(&self, end: &End, mut out: &mut dyn Write) -> Result<bool> {
        let options = self.options;
        let device = device::find(options.ib_dev.as_deref())?;
        let context = device.open()?;
        let port = context.query_port(options.ib_port)?;
        let max = match self.qp_type {
            // A datagram is one packet.
            QueuePairType::UD => u32::from(port.active_mtu()),
            _ => port.max_message_size(),
        };
        port::check(&context, options.ib_port, &port, self.size, max, self.mtu)?;
        let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
        let rx_depth = self.rounds.rx_depth(self.size);

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
        let rules = Rules { size: self.size as usize, iters: self.rounds.iters, rx_depth, timeout: options.timeout };
        let mut game = Game::new(vec![qp], None, cq, channel, buffers, rules)?;

        // Without -g, C sends none. On InfiniBand the LID is enough; on RoCE there is no way without.
        let gid = if is_ethernet || options.gid_idx.is_some() { gid } else { Gid::ZERO };
        let local = Address { lid, qp_num, psn, gid };
        writeln!(out, "  local address:  {local}").map_err(cannot_print)?;
        let connect = |[remote]: &[Address; 1]| self.connect(&mut game, remote, is_ethernet);
        let [remote] = end.exchange(&[local], options.timeout, connect)?;
        writeln!(out, "  remote address: {remote}").map_err(cannot_print)?;
        let page = rustix::param::page_size();
        let begin = match end.is_client() {
            true => {
                self.connect(&mut game, &remote, is_ethernet)?;
                Some(|message: &mut [u8]| pattern::fill(message, page, self.rounds.chk))
            }
            false => None,
        };
        let elapsed = game.play(begin)?;
        report(&mut out, self.size, self.rounds.iters, elapsed).map_err(cannot_print)?;
        let mut is_right = true;
        if self.rounds.chk && !end.is_client() {
            let message = game.messages().next().ok_or("no buffer holds the message")?;
            for page in pattern::invalid_pages(message, page) {
                writeln!(out, "invalid data in page {page}").map_err(cannot_print)?;
                is_right = false;
            }
        }
        Ok(is_right)
    }

    fn connect(&self, game: &mut Game, remote: &Address, is_ethernet: bool) -> Result<()> {
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
        if let Some(mtu) = self.mtu {
            how = how.mtu(mtu);
        }
        game.connect(0, &remote, &how)
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
        if self.rounds.chk {
            // A page that nothing arrived in must not pass for one that a mark arrived in.
            pattern::fill(&mut region, rustix::param::page_size(), false);
        }
        Ok(region.into_chunks(stride)?)
    }
}
