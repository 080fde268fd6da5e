//! The server, which has the number.

use std::io;
use std::net::{TcpListener, TcpStream};

use common::{Result, failure};
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Context, ProtectionDomain, RemoteMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::wire::Peer;
use crate::{Options, Stop, TICK, endpoint};

/// Serves the clients, all at the same time. Returns whether the number is the sum of their reports.
pub(crate) fn run(context: &Context, listener: &TcpListener, options: &Options, stop: &Stop) -> Result<bool> {
    let pd = context.alloc_pd()?;
    let region = pd.expose(Pages::new(size_of::<u64>())?, Access::REMOTE_ATOMIC)?;
    let counter = region.remote().slice(0, size_of::<u64>() as u64)?;
    listener.set_nonblocking(true)?;
    let reports = std::thread::scope(|scope| -> Result<Vec<_>> {
        let mut clients = Vec::new();
        while clients.len() < options.clients && !stop.is_set() {
            match listener.accept() {
                Ok((stream, _)) => {
                    let pd = &pd;
                    let serve = move || serve(pd, counter, stream, options, stop);
                    clients.push(scope.spawn(serve));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for_client(listener)?,
                Err(error) => return Err(format!("cannot accept: {error}").into()),
            }
        }
        Ok(clients.into_iter().map(|client| client.join()).collect())
    })?;
    let (mut counted, mut failed) = (0, 0);
    for report in &reports {
        match report {
            Ok(Ok(by_client)) => counted += by_client,
            Ok(Err(error)) => {
                failure::print("atomics", &**error);
                failed += 1;
            }
            Err(_) => return Err("a thread panicked".into()),
        }
    }
    let total = region.load_u64(0)?;
    println!("total {total}, counted by {} clients: {counted}", reports.len() - failed);
    Ok(total == counted && failed == 0 && reports.len() == options.clients)
}

/// Waits until a client connects, at most one tick.
fn wait_for_client(listener: &TcpListener) -> Result<()> {
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&Timespec::try_from(TICK)?)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(format!("cannot wait for clients: {errno}").into()),
    }
}

/// Gives one client access to the number. Returns its report.
fn serve(
    pd: &ProtectionDomain,
    counter: RemoteMemory,
    stream: TcpStream,
    options: &Options,
    stop: &Stop,
) -> Result<u64> {
    let mut peer = Peer::new(stream, options.timeout, stop)?;
    let mut endpoint = endpoint(pd, options).peer_access(Access::REMOTE_ATOMIC).build()?;
    let address = peer.receive_hello(options.timeout)?;
    endpoint.connect(&address)?;
    peer.send_welcome(&endpoint.address(), &counter)?;
    println!("client connected: {}", peer.name());
    peer.receive_report().map_err(|error| format!("client {}: {error}", peer.name()).into())
}
