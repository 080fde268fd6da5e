//! The end that has the number.

use std::io;
use std::net::{TcpListener, TcpStream};

use rdma_safe::{Access, Context, Pages, ProtectionDomain, RemoteMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::wire::Peer;
use crate::{Options, Result, Stop, TICK, endpoint, failure};

/// Serves as many clients as the options say, at once, and compares the number with what they have counted.
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
                    // Errors are turned into text, which may move between threads.
                    clients.push(scope.spawn(move || serve().map_err(|error| failure::one_line(&*error))));
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
                eprintln!("atomics: {error}");
                failed += 1;
            }
            Err(_) => return Err("a thread panicked".into()),
        }
    }
    let total = region.load_u64(0)?;
    println!("total {total}, counted by {} clients: {counted}", reports.len() - failed);
    Ok(total == counted && failed == 0 && reports.len() == options.clients)
}

/// Waits until a client is there, or until it is time to look for Ctrl-C.
fn wait_for_client(listener: &TcpListener) -> Result<()> {
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&Timespec::try_from(TICK)?)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(format!("cannot wait for clients: {errno}").into()),
    }
}

/// Lets one client at the number; how far it says it has counted.
fn serve(
    pd: &ProtectionDomain,
    counter: RemoteMemory,
    stream: TcpStream,
    options: &Options,
    stop: &Stop,
) -> Result<u64> {
    let mut peer = Peer::new(stream, options.timeout, stop)?;
    let mut endpoint = endpoint(pd, options).peer_access(Access::REMOTE_ATOMIC).build()?;
    let address = peer.hear_hello(options.timeout)?;
    endpoint.connect(&address)?;
    peer.welcome(&endpoint.address(), &counter)?;
    println!("client connected: {}", peer.name());
    peer.hear_report().map_err(|error| format!("client {}: {error}", peer.name()).into())
}
