//! A peer writes to memory and reads from it, without any code of the owner.

use std::error::Error;
use std::time::Duration;

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Device, Endpoint};

const TIMEOUT: Duration = Duration::from_secs(5);

fn main() {
    if let Err(error) = run() {
        // A `main` that returned the error would print `{error:?}`, without the advice in its text.
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    // Without an RDMA device, run on soft0, a software device in this process.
    rdma_safe::soft::install_by_default();

    let pd = Device::first()?.open()?.alloc_pd()?;
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;

    // The owner exposes a page of memory, and allows the peer of this endpoint to access it.
    let mut memory = pd.expose(Pages::new(4096)?, access)?;
    let mut owner = Endpoint::builder(&pd).peer_access(access).build()?;
    let mut peer = Endpoint::builder(&pd).build()?;
    owner.connect(&peer.address())?;
    peer.connect(&owner.address())?;

    // The address, length and key of the memory. Between two hosts, send them to the peer.
    let remote = memory.remote();

    let mut buffer = pd.allocate(64)?;
    buffer.fill_from(b"written by the peer")?;
    peer.write(buffer, remote)?;
    let written = peer.wait(TIMEOUT)?.ok()?; // completes when the bytes are in the owner's memory

    let mut bytes = [0; 19];
    memory.read(0, &mut bytes)?;
    println!("owner: the memory holds {:?}", String::from_utf8_lossy(&bytes));

    memory.write(1024, b"written by the owner")?;
    let mut buffer = written.buffer.expect("a completed write returns its buffer");
    buffer.set_len(20)?; // the number of bytes to read
    peer.read(buffer, remote.slice(1024, 20)?)?;
    let done = peer.wait(TIMEOUT)?.ok()?;
    let buffer = done.buffer.expect("a completed read returns its buffer");
    println!("peer: read {:?}", String::from_utf8_lossy(&buffer));
    Ok(())
}
