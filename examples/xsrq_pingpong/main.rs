//! rdma-core's `ibv_xsrq_pingpong`: messages bounce between shared receive queues over extended reliable connections (XRC). See
//! `--help`.

mod address;
mod end;
mod options;

use std::fs::OpenOptions;
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::Duration;

use common::pingpong::tcp::{Peer, connect, listen};
use common::{Result, device};
use rdma_safe::xrc::{XrcDomain, XrcOpen};
use rdma_safe::{Context, LinkLayer};

use address::Address;
use end::{End, Settings};
use options::Options;

/// With the NUL that the C program sends.
const END: &[u8; 4] = b"END\0";

/// File whose inode identifies an XRC domain. All clients of one host share this domain, including C programs.
const DOMAIN: &str = "/tmp/xrc_domain";

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<()> {
    let device = device::find(options.peer.ib_dev.as_deref())?;
    let context = device.open()?;
    let port = context.query_port(options.peer.ib_port)?;
    let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
    if !is_ethernet && port.lid() == 0 {
        return Err("the port has no LID: a subnet manager (opensm) has to assign one".into());
    }
    let clients = if options.peer.host.is_some() { 1 } else { options.clients };
    let settings = Settings {
        clients,
        tests: options.num_tests,
        size: options.message.size,
        mtu: options.message.mtu,
        sl: options.peer.sl,
        port: options.peer.ib_port,
        gid_index: options.peer.gid_idx,
        events: options.peer.events,
        timeout: options.peer.timeout,
    };
    let mut end = End::new(&context, &domain(&context)?, settings)?;
    // Without -g, the C program sends no GID. InfiniBand then connects by LID; RoCE needs the GID.
    let sends_gid = is_ethernet || options.peer.gid_idx.is_some();
    let mut streams = Vec::new();
    match &options.peer.host {
        Some(host) => {
            let stream = connect(host, options.peer.port, options.peer.timeout)?;
            let mut peer = Peer::new(stream.try_clone()?, options.peer.timeout)?;
            send_address(&mut peer, &end, 0, sends_gid)?;
            let remote = receive_address(&mut peer)?;
            end.connect(0, remote, is_ethernet)?;
            streams.push(stream);
        }
        None => {
            let listener = listen(options.peer.port)?;
            for index in 0..clients as usize {
                let (stream, _) = listener.accept()?;
                let mut peer = Peer::new(stream.try_clone()?, options.peer.timeout)?;
                let remote = receive_address(&mut peer)?;
                // The client sends nothing before the first message of this end.
                send_address(&mut peer, &end, index, sends_gid)?;
                end.connect(index, remote, is_ethernet)?;
                streams.push(stream);
            }
            end.start()?;
        }
    }
    end.run()?;
    synchronize_end(&streams, options.peer.host.is_some(), options.peer.timeout)?;
    println!("success");
    Ok(())
}

/// Opens the shared domain of this host, or a private one if the file cannot be opened.
fn domain(context: &Context) -> Result<XrcDomain> {
    Ok(match OpenOptions::new().read(true).custom_flags(libc::O_CREAT).mode(0o440).open(DOMAIN) {
        Ok(file) => context.open_shared_xrcd(&file, XrcOpen::OpenOrCreate)?,
        Err(_) => context.open_xrcd()?,
    })
}

fn send_address(peer: &mut Peer, end: &End, index: usize, sends_gid: bool) -> Result<()> {
    let local = end.local(index)?;
    let gid = if sends_gid { local.gid } else { rdma_safe::Gid::ZERO };
    let local = Address { gid, ..local };
    println!("   local: {local}");
    peer.write(&local.encode(), "the local address")
}

fn receive_address(peer: &mut Peer) -> Result<Address> {
    let remote = Address::decode(&peer.read("its address")?)?;
    println!("  remote: {remote}");
    Ok(remote)
}

/// Waits until all ends have received everything: the answer to one client may use the connection of another.
fn synchronize_end(streams: &[TcpStream], is_client: bool, timeout: Duration) -> Result<()> {
    let mut peers = Vec::new();
    for stream in streams {
        peers.push(Peer::new(stream.try_clone()?, timeout)?);
    }
    let send_end = |peers: &mut [Peer]| peers.iter_mut().try_for_each(|peer| peer.write(END, "the end"));
    if is_client {
        send_end(&mut peers)?;
    }
    for peer in &mut peers {
        let received: [u8; END.len()] = peer.read("the end")?;
        if &received != END {
            return Err(format!("{} sent \"{}\" instead of the end", peer.name, received.escape_ascii()).into());
        }
    }
    if !is_client {
        send_end(&mut peers)?;
    }
    Ok(())
}
