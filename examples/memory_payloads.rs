//! Sends one `Bytes` to sixteen peers at once, each time after a header, and hands received messages on as `Bytes`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use rdma_safe::mr::{Gather, Piece};
use rdma_safe::{Buffer, Device, Endpoint};

const TIMEOUT: Duration = Duration::from_secs(10);
const PEERS: usize = 16;
const HEADER: usize = 16;
const PAYLOAD: usize = 100_000;

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

    let mut connections = Vec::new();
    let mut peers = Vec::new();
    let inboxes = pd.allocate(PEERS * (HEADER + PAYLOAD))?.into_chunks(HEADER + PAYLOAD)?;
    for inbox in inboxes {
        let mut connection = Endpoint::builder(&pd).send_sges(2).build()?;
        let mut peer = Endpoint::builder(&pd).build()?;
        peer.receive(inbox)?;
        connection.connect(&peer.address())?;
        peer.connect(&connection.address())?;
        connections.push(connection);
        peers.push(peer);
    }

    // Registered once, where it is. The clones are sent at the same time.
    let bytes = Bytes::from((0..PAYLOAD).map(|index| index as u8).collect::<Vec<_>>());
    let payload = pd.share(bytes.clone())?;
    let headers = pd.allocate(PEERS * HEADER)?.into_chunks(HEADER)?;
    for (number, (connection, mut header)) in connections.iter_mut().zip(headers).enumerate() {
        header.fill_from(format!("to peer {number}").as_bytes())?;
        connection.send_list((header, payload.clone()))?;
    }

    // The messages go to another thread without a copy. Their buffers are freed there.
    let (messages, received) = mpsc::channel::<(usize, Bytes)>();
    let reader = thread::spawn(move || {
        for (number, message) in received {
            let header_len = message.len() - PAYLOAD;
            let (header, payload) = (message.slice(..header_len), message.slice(header_len..));
            let is_equal = if payload == bytes { "the payload" } else { "something else" };
            println!("peer {number}: {:?} and {is_equal}", String::from_utf8_lossy(&header));
        }
    });
    for (number, peer) in peers.iter_mut().enumerate() {
        let message: Buffer = peer.wait(TIMEOUT)?.ok()?.buffer.expect("a receive has a buffer");
        messages.send((number, message.into()))?;
    }
    drop(messages);
    reader.join().map_err(|_| "the reader has panicked")?;

    let mut headers = 0;
    for connection in &mut connections {
        let list: Gather = connection.wait(TIMEOUT)?.ok()?.list.expect("it was sent as a list");
        headers += list.into_iter().filter_map(Piece::into_buffer).count();
    }
    let bytes: Bytes = payload.into_memory()?;
    println!("{headers} headers and the payload of {} bytes are back", bytes.len());
    Ok(())
}
