//! rdma-core's `ibv_rc_pingpong` over [`rdma_safe::Endpoint`]: the same options, messages and lines, so that either end
//! may be the C program. See `--help`.

#![forbid(unsafe_code)]

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
#[path = "../common/pingpong/message.rs"]
mod message;
#[path = "../common/number.rs"]
mod number;
mod options;
#[path = "../common/pingpong/pattern.rs"]
mod pattern;
mod pingpong;
#[path = "../common/pingpong/port.rs"]
mod port;
#[path = "../common/pingpong/report.rs"]
mod report;
#[path = "../common/pingpong/rounds.rs"]
mod rounds;
mod ticks;

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use rdma_safe::{
    Access, Buffer, ConnectOptions, Context, Endpoint, Errno, Gid, LinkLayer, Pages, ProtectionDomain,
    QueuePairAddress, sys,
};

use address::Address;
use ends::End;
use options::Options;
use pingpong::{Outcome, PingPong, Rules};
use report::{cannot_print, report};
use ticks::Ticks;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let options = Options::parse();
    ends::play("rc_pingpong", &options.common, &options.ends, |end, out| run(&options, end, out))
}

fn run(options: &Options, end: &End, mut out: &mut dyn Write) -> Result<bool> {
    let device = device::find(options.common.ib_dev.as_deref())?;
    let context = device.open()?;
    check_features(&context, options)?;
    let port = context.query_port(options.common.ib_port)?;
    let (size, mtu) = (options.message.size, options.message.mtu);
    port::check(&context, options.common.ib_port, &port, size, port.max_message_size(), Some(mtu))?;

    let pd = context.alloc_pd()?;
    let buffers = allocate(&pd, options)?;
    let mut endpoint = Endpoint::builder(&pd)
        .port(options.common.ib_port)
        .send_depth(1)
        .recv_depth(options.rx_depth())
        .events(options.common.events)
        .timestamps(options.ts)
        .classic_post(!options.new_send)
        .classic_poll(!options.ts);
    if let Some(index) = options.common.gid_idx {
        endpoint = endpoint.gid_index(index);
    }
    let rules = Rules {
        size: options.message.size as usize,
        iters: options.rounds.iters,
        rx_depth: options.rx_depth(),
        events: options.common.events,
        timeout: options.common.timeout,
    };
    let ticks = options.ts.then(|| Ticks::new(context.attributes().as_raw().completion_timestamp_mask));
    let endpoint = endpoint.build().map_err(|error| match error {
        rdma_safe::Error::CreateCompletionQueue { .. } | rdma_safe::Error::CreateQueuePair { .. } => {
            format!("{error}; --rx-depth receives and one send have to fit").into()
        }
        error => Box::<dyn Error>::from(error),
    })?;
    let mut pingpong = PingPong::new(endpoint, buffers, &rules, ticks)?;

    let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
    let QueuePairAddress { lid, qp_num, psn, gid, .. } = pingpong.endpoint().address();
    // Without -g, C sends none. On InfiniBand that means to connect by LID; on RoCE there is no way without.
    let gid = if is_ethernet || options.common.gid_idx.is_some() { gid } else { Gid::ZERO };
    let local = Address { lid, qp_num, psn, gid };
    writeln!(out, "  local address:  {local}").map_err(cannot_print)?;
    let connect_to = |[remote]: &[Address; 1]| connect(pingpong.endpoint(), remote, is_ethernet, options);
    let [remote] = end.exchange(&[local], options.common.timeout, connect_to)?;
    writeln!(out, "  remote address: {remote}").map_err(cannot_print)?;
    let page = rustix::param::page_size();
    let begin = match end.is_client() {
        true => {
            connect(pingpong.endpoint(), &remote, is_ethernet, options)?;
            Some(|message: &mut [u8]| pattern::fill(message, page, options.rounds.chk))
        }
        false => None,
    };
    let Outcome { elapsed, message, ticks } = pingpong.play(begin)?;
    report(&mut out, size, options.rounds.iters, elapsed).map_err(cannot_print)?;
    if let Some(ticks) = ticks.filter(|ticks| !ticks.is_empty()) {
        writeln!(out, "{ticks}").map_err(cannot_print)?;
    }
    let mut is_right = true;
    if options.rounds.chk && !end.is_client() {
        for page in pattern::invalid_pages(&message, page) {
            writeln!(out, "invalid data in page {page}").map_err(cannot_print)?;
            is_right = false;
        }
    }
    Ok(is_right)
}

/// Refuses options that this device, or this crate, cannot follow.
fn check_features(context: &Context, options: &Options) -> Result<()> {
    let (device, attributes) = (context.device_name(), context.attributes().as_raw());
    if options.odp || options.iodp {
        let rc = sys::IBV_ODP_SUPPORT_SEND.0 | sys::IBV_ODP_SUPPORT_RECV.0;
        let caps = &attributes.odp_caps;
        if caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT.0) == 0 || caps.per_transport_caps.rc_odp_caps & rc != rc
        {
            return Err(format!(
                "{device} cannot page on demand for sends and receives of a reliable connection (odp_caps); leave out -o, \
                 -O and -P"
            )
            .into());
        }
    }
    if options.iodp {
        let reason = match attributes.odp_caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT_IMPLICIT.0) {
            0 => format!("{device} has no implicit on-demand paging (odp_caps)"),
            _ => "implicit on-demand paging would open the whole address space to the device, which rdma-safe, where each \
                  buffer has one owner, does not do"
                .into(),
        };
        return Err(format!("{reason}; use -o instead of -O").into());
    }
    if options.ts && attributes.completion_timestamp_mask == 0 {
        return Err(format!(
            "{device} does not note when work completed (completion_timestamp_mask is 0); leave out -t"
        )
        .into());
    }
    if options.dm {
        let reason = match attributes.max_dm_size {
            0 => format!("{device} has no memory to allocate (max_dm_size is 0)"),
            max if max < u64::from(options.message.size) => {
                format!(
                    "{device} has {max} bytes of memory, too little for a message of {} bytes",
                    options.message.size
                )
            }
            _ => "rdma-safe cannot allocate device memory yet".into(),
        };
        return Err(format!("{reason}; leave out -j").into());
    }
    Ok(())
}

/// A buffer for each receive and two more, in one region.
fn allocate(pd: &ProtectionDomain, options: &Options) -> Result<Vec<Buffer>> {
    /// No two messages share a cache line; long ones begin at a page, as the message of C does.
    const CACHE_LINE: usize = 64;

    let (size, page) = (options.message.size as usize, rustix::param::page_size());
    let stride = size.next_multiple_of(if size < page { CACHE_LINE } else { page });
    let count = options.rx_depth() as usize + 2;
    let too_large = |problem: String| {
        format!("{problem}; {count} buffers for messages of {size} bytes are needed: give a smaller --rx-depth")
    };
    let len = stride.checked_mul(count).ok_or_else(|| too_large("memory is not that large".into()))?;
    let access = if options.odp { Access::ON_DEMAND } else { Access::empty() };
    let mut region =
        Pages::new(len).and_then(|pages| pd.register_with(pages, access)).map_err(|error| match error {
            rdma_safe::Error::Allocate { .. } | rdma_safe::Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. } => {
                too_large(error.to_string()).into()
            }
            error => Box::<dyn Error>::from(error),
        })?;
    if options.rounds.chk {
        // A page that nothing arrived in must not pass for one that a mark arrived in.
        pattern::fill(&mut region, page, false);
    }
    if options.prefetch {
        // C goes on, too.
        if let Err(error) = region.prefetch() {
            eprintln!("rc_pingpong: warning: {}; going on without", failure::one_line(&error));
        }
    }
    Ok(region.into_chunks(stride)?)
}

fn connect(endpoint: &mut Endpoint, remote: &Address, is_ethernet: bool, options: &Options) -> Result<()> {
    if is_ethernet && remote.gid.is_zero() {
        return Err("the peer sent no GID, which RoCE cannot do without: give the peer one with -g, which \
                    ibv_rc_pingpong does not choose itself"
            .into());
    }
    let Address { lid, qp_num, psn, gid } = *remote;
    // Not part of the message: C uses one read or atomic at a time, and the MTU that each end is given.
    let remote = QueuePairAddress { qp_num, psn, lid, gid, mtu: options.message.mtu, rd_atomic: 1 };
    let how = ConnectOptions::default().mtu(options.message.mtu).service_level(options.common.sl).rd_atomic(1);
    Ok(endpoint.connect_with(&remote, &how)?)
}
