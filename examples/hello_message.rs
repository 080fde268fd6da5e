//! A message to a peer, and its answer.

use std::error::Error;
use std::time::Duration;

use rdma_safe::{Device, Endpoint};

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
    let mut client = Endpoint::builder(&pd).build()?;
    let mut server = Endpoint::builder(&pd).build()?;

    // Each end needs the address of the other. Between two hosts, exchange them over TCP, for example.
    client.connect(&server.address())?;
    server.connect(&client.address())?;

    // Post a receive for each message before the peer sends it.
    server.receive(pd.allocate(64)?)?;
    client.receive(pd.allocate(64)?)?;

    let mut request = pd.allocate(64)?;
    request.fill_from(b"hello")?;
    client.send(request)?; // `request` moves into the queue and comes back with the completion of the send

    let received = server.wait(TIMEOUT)?.ok()?;
    let mut buffer = received.buffer.expect("a completed receive returns its buffer");
    println!("server: received {:?}", String::from_utf8_lossy(&buffer));
    buffer.fill_from(b"hello to you too")?;
    server.send(buffer)?;

    // Two completions: the send of the request and the receive of the answer.
    for _ in 0..2 {
        let done = client.wait(TIMEOUT)?.ok()?;
        let buffer = done.buffer.expect("the buffer of the request or of the answer");
        println!("client: {:?} of {:?} completed", done.operation, String::from_utf8_lossy(&buffer));
    }
    Ok(())
}
