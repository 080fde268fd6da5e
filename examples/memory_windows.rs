//! A server opens a part of its memory to each of four clients, and revokes one of them.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Duration;

use rdma_safe::endpoint::BoundWindow;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Device, Endpoint, EndpointKey, EndpointSet, Operation, ProtectionDomain, RemoteMemory, WcStatus,
};

const TIMEOUT: Duration = Duration::from_secs(5);
const CLIENTS: usize = 4;
const SHARE: usize = 1024;
const REVOKED: usize = 1;

/// A client, its endpoint at the server, and its window.
struct Client {
    endpoint: Endpoint,
    key: EndpointKey,
    window: Option<BoundWindow>,
    /// The address and key that the server would send to the client.
    memory: RemoteMemory,
}

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
    // Peers have no access to the region itself.
    let memory = pd.expose(Pages::new(CLIENTS * SHARE)?, Access::MW_BIND)?;
    let mut server = EndpointSet::builder(pd.context(), CLIENTS as u32 * 4).build()?;

    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let mut endpoint = Endpoint::builder(&pd).build()?;
        let builder = Endpoint::builder(&pd).send_depth(2).recv_depth(2).peer_access(Access::REMOTE_WRITE);
        let key = builder.build_in(&mut server)?;
        let mut member = server.endpoint(key).expect("the endpoint was just built");
        member.connect(&endpoint.address())?;
        endpoint.connect(&member.address())?;

        let part = memory.bind_info(number * SHARE, SHARE, Access::REMOTE_WRITE)?;
        let window = member.bind_window(part)?;
        let (_, bound) = server.wait(TIMEOUT)?;
        assert_eq!(bound.ok()?.operation, Operation::BindWindow);
        clients.push(Client { endpoint, key, memory: window.remote(), window: Some(window) });
    }

    for (number, client) in clients.iter_mut().enumerate() {
        println!("client {number}: {}", write(&pd, client, b"before")?);
    }

    let client = &mut clients[REVOKED];
    let window = client.window.take().expect("it was not revoked before");
    server.endpoint(client.key).expect("no endpoint was removed").invalidate_window(window)?;
    let (_, invalidated) = server.wait(TIMEOUT)?;
    assert_eq!(invalidated.ok()?.operation, Operation::InvalidateWindow);
    println!("client {REVOKED} is revoked");

    for (number, client) in clients.iter_mut().enumerate() {
        println!("client {number}: {}", write(&pd, client, b"after!")?);
        let mut text = [0; 6];
        memory.read(number * SHARE, &mut text)?;
        println!("part {number} holds {:?}", String::from_utf8_lossy(&text));
    }
    Ok(())
}

/// Writes to the window of a client, and returns the outcome as text.
fn write(pd: &ProtectionDomain, client: &mut Client, text: &[u8]) -> Result<&'static str, Box<dyn Error>> {
    let mut buffer = pd.allocate(text.len())?;
    buffer.fill_from(text)?;
    client.endpoint.write(buffer, client.memory)?;
    match client.endpoint.wait(TIMEOUT)?.status {
        WcStatus::SUCCESS => Ok("the write succeeded"),
        WcStatus::REM_ACCESS_ERR => Ok("the write was refused"),
        other => Err(format!("the write failed: {other}").into()),
    }
}
