//! rdma-core's `ibv_rc_pingpong` over [`rdma_safe::Endpoint`]: the same options, messages and lines, so that either end
//! may be the C program. See `--help`.

#![forbid(unsafe_code)]

#[path = "../common/pingpong/address.rs"]
mod address;
#[path = "../common/pingpong/exchange.rs"]
mod exchange;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/number.rs"]
mod number;
mod options;
#[path = "../common/pingpong/pattern.rs"]
mod pattern;
mod pingpong;
mod ticks;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_safe::{
    Access, Buffer, ConnectOptions, Context, Device, Endpoint, Errno, Gid, LinkLayer, Pages, PortAttributes, PortState,
    ProtectionDomain, QueuePairAddress, sys,
};

use address::Address;
use options::Options;
use pingpong::{Outcome, PingPong, Rules};
use ticks::Ticks;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("rc_pingpong: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<ExitCode> {
    let device = match &options.ib_dev {
        Some(name) => Device::by_name(name)?,
        None => Device::first()?,
    };
    let context = device.open()?;
    check_features(&context, options)?;
    let port = context.query_port(options.ib_port)?;
    check_port(&context, &port, options)?;

    let pd = context.alloc_pd()?;
    let buffers = allocate(&pd, options)?;
    let mut endpoint = Endpoint::builder(&pd)
        .port(options.ib_port)
        .send_depth(1)
        .recv_depth(options.rx_depth())
        .events(options.events)
        .timestamps(options.ts)
        .classic_post(!options.new_send)
        .classic_poll(!options.ts);
    if let Some(index) = options.gid_idx {
        endpoint = endpoint.gid_index(index);
    }
    let rules = Rules {
        size: options.size as usize,
        iters: options.iters,
        rx_depth: options.rx_depth(),
        events: options.events,
        timeout: options.timeout,
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
    let gid = if is_ethernet || options.gid_idx.is_some() { gid } else { Gid::ZERO };
    let local = Address { lid, qp_num, psn, gid };
    let mut out = io::stdout();
    writeln!(out, "  local address:  {local}").map_err(cannot_print)?;
    let [remote] = match &options.host {
        Some(host) => exchange::client(host, options.port, &[local], options.timeout)?,
        None => {
            let connect = |[remote]: &[Address; 1]| connect(pingpong.endpoint(), remote, is_ethernet, options);
            exchange::server(options.port, &[local], options.timeout, connect)?
        }
    };
    writeln!(out, "  remote address: {remote}").map_err(cannot_print)?;
    let page = rustix::param::page_size();
    let begin = match options.host {
        Some(_) => {
            connect(pingpong.endpoint(), &remote, is_ethernet, options)?;
            Some(|message: &mut [u8]| pattern::fill(message, page, options.chk))
        }
        None => None,
    };
    let Outcome { elapsed, message, ticks } = pingpong.play(begin)?;
    report(&mut out, options, elapsed, ticks.as_ref()).map_err(cannot_print)?;
    let mut status = ExitCode::SUCCESS;
    if options.chk && options.host.is_none() {
        for page in pattern::invalid_pages(&message, page) {
            writeln!(out, "invalid data in page {page}").map_err(cannot_print)?;
            status = ExitCode::FAILURE;
        }
    }
    Ok(status)
}

fn report(out: &mut impl Write, options: &Options, elapsed: Duration, ticks: Option<&Ticks>) -> io::Result<()> {
    let (seconds, micros) = (elapsed.as_secs_f64(), elapsed.as_secs_f64() * 1e6);
    let bytes = u64::from(options.size) * u64::from(options.iters) * 2;
    let iters = options.iters;
    writeln!(out, "{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec", bytes as f64 * 8.0 / micros)?;
    writeln!(out, "{iters} iters in {seconds:.2} seconds = {:.2} usec/iter", micros / f64::from(iters))?;
    match ticks.filter(|ticks| !ticks.is_empty()) {
        Some(ticks) => writeln!(out, "{ticks}"),
        None => Ok(()),
    }
}

fn cannot_print(error: io::Error) -> String {
    format!("cannot print: {error}")
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
            max if max < u64::from(options.size) => {
                format!("{device} has {max} bytes of memory, too little for a message of {} bytes", options.size)
            }
            _ => "rdma-safe cannot allocate device memory yet".into(),
        };
        return Err(format!("{reason}; leave out -j").into());
    }
    Ok(())
}

/// Refuses what would fail later, or only after a timeout.
fn check_port(context: &Context, port: &PortAttributes, options: &Options) -> Result<()> {
    let name = format!("{} port {}", context.device_name(), options.ib_port);
    if !matches!(port.state(), PortState::ACTIVE | PortState::ACTIVE_DEFER) {
        let state = port.state();
        return Err(format!("{name} is not active ({state}): check the cable, `ip link`, or the subnet manager").into());
    }
    if port.link_layer() != LinkLayer::ETHERNET && port.lid() == 0 {
        return Err(format!("{name} has no LID: a subnet manager (opensm) has to assign one").into());
    }
    if options.size > port.max_message_size() {
        let (size, max) = (options.size, port.max_message_size());
        return Err(format!("a message of {size} bytes is too long for {name}: at most {max}; see --size").into());
    }
    if options.mtu > port.active_mtu() {
        let (mtu, active) = (options.mtu, port.active_mtu());
        return Err(format!(
            "a path MTU of {mtu} bytes is too large for {name}, whose active MTU is {active}; see --mtu"
        )
        .into());
    }
    Ok(())
}

/// A buffer for each receive and two more, in one region.
fn allocate(pd: &ProtectionDomain, options: &Options) -> Result<Vec<Buffer>> {
    /// No two messages share a cache line; long ones begin at a page, as the message of C does.
    const CACHE_LINE: usize = 64;

    let (size, page) = (options.size as usize, rustix::param::page_size());
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
    if options.chk {
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
    let remote = QueuePairAddress { qp_num, psn, lid, gid, mtu: options.mtu, rd_atomic: 1 };
    let how = ConnectOptions::default().mtu(options.mtu).service_level(options.sl).rd_atomic(1);
    Ok(endpoint.connect_with(&remote, &how)?)
}
