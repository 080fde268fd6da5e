//! rdma-core's `ibv_xsrq_pingpong` over the raw door: extended reliable connections (XRC), whose messages go to shared receive
//! queues by number. The same options, messages and lines, so that either end may be the C program. See `--help`.

mod address;
#[path = "../common/pingpong/common.rs"]
mod common;
#[path = "../common/device.rs"]
mod device;
#[path = "../common/failure.rs"]
mod failure;
mod game;
#[path = "../common/pingpong/message.rs"]
mod message;
#[path = "../common/number.rs"]
mod number;
mod options;
#[path = "../common/pingpong/tcp.rs"]
mod tcp;

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_safe::{Context, LinkLayer, XrcDomain, XrcOpen};

use address::Address;
use game::{End, Rules};
use options::Options;
use tcp::{Peer, connect, listen};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// With its NUL, as C sends it.
const END: &[u8; 4] = b"END\0";

/// By its inode, C's and ours on one host share a domain.
const DOMAIN: &str = "/tmp/xrc_domain";

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => {
            println!("success");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xsrq_pingpong: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let device = device::find(options.common.ib_dev.as_deref())?;
    let context = device.open()?;
    let port = context.query_port(options.common.ib_port)?;
    let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
    if !is_ethernet && port.lid() == 0 {
        return Err("the port has no LID: a subnet manager (opensm) has to assign one".into());
    }
    let clients = if options.common.host.is_some() { 1 } else { options.clients };
    let rules = Rules {
        clients,
        tests: options.num_tests,
        size: options.message.size,
        mtu: options.message.mtu,
        sl: options.common.sl,
        port: options.common.ib_port,
        gid_index: options.common.gid_idx,
        events: options.common.events,
        timeout: options.common.timeout,
    };
    let mut end = End::new(&context, &domain(&context)?, rules)?;
    // Without -g, C sends no GID. On InfiniBand the LID is enough; on RoCE there is no way without.
    let with_gid = is_ethernet || options.common.gid_idx.is_some();
    let mut streams = Vec::new();
    match &options.common.host {
        Some(host) => {
            let stream = connect(host, options.common.port, options.common.timeout)?;
            let mut peer = Peer::new(stream.try_clone()?, options.common.timeout)?;
            tell(&mut peer, &end, 0, with_gid)?;
            let remote = ask(&mut peer)?;
            end.connect(0, remote, is_ethernet)?;
            streams.push(stream);
        }
        None => {
            let listener = listen(options.common.port)?;
            for index in 0..clients as usize {
                let (stream, _) = listener.accept()?;
                let mut peer = Peer::new(stream.try_clone()?, options.common.timeout)?;
                let remote = ask(&mut peer)?;
                // A client does not send before this end does.
                tell(&mut peer, &end, index, with_gid)?;
                end.connect(index, remote, is_ethernet)?;
                streams.push(stream);
            }
            end.begin()?;
        }
    }
    end.play()?;
    part(&streams, options.common.host.is_some(), options.common.timeout)
}

/// The domain of this host, or one of our own where its file cannot be opened.
fn domain(context: &Context) -> Result<XrcDomain> {
    let open = || OpenOptions::new().read(true).custom_flags(libc::O_CREAT).mode(0o440).open(DOMAIN);
    let file: std::io::Result<File> = open();
    Ok(match file {
        Ok(file) => context.open_shared_xrcd(&file, XrcOpen::OrCreate)?,
        Err(_) => context.open_xrcd()?,
    })
}

fn tell(peer: &mut Peer, end: &End, index: usize, with_gid: bool) -> Result<()> {
    let local = end.local(index)?;
    let gid = if with_gid { local.gid } else { rdma_safe::Gid::ZERO };
    let local = Address { gid, ..local };
    println!("   local: {local}");
    peer.write(&local.encode(), "the local address")
}

fn ask(peer: &mut Peer) -> Result<Address> {
    let remote = Address::decode(&peer.read("its address")?)?;
    println!("  remote: {remote}");
    Ok(remote)
}

/// Nobody goes before all have what was sent to them: the answer to one client may come by the connection of another.
fn part(streams: &[TcpStream], is_client: bool, timeout: Duration) -> Result<()> {
    let mut peers = Vec::new();
    for stream in streams {
        peers.push(Peer::new(stream.try_clone()?, timeout)?);
    }
    let say = |peers: &mut [Peer]| peers.iter_mut().try_for_each(|peer| peer.write(END, "the end"));
    if is_client {
        say(&mut peers)?;
    }
    for peer in &mut peers {
        let said: [u8; END.len()] = peer.read("the end")?;
        if &said != END {
            return Err(format!("{} sent \"{}\" instead of the end", peer.name, said.escape_ascii()).into());
        }
    }
    if !is_client {
        say(&mut peers)?;
    }
    Ok(())
}
