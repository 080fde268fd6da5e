//! A message and its answer over rdma-async: the README's sample.

use rdma_async::{Connection, Listener, Result, connect};

async fn serve(client: Connection) -> Result<()> {
    while let Some(request) = client.receive().await? {
        client.send(client.buffer_of(&request).await?).await?; // the buffer moves in, and comes back with the result
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    let listener = Listener::bind("127.0.0.1:0").await?;
    let server = connect(listener.local_address());
    let (server, client) = tokio::join!(server, listener.accept());
    tokio::spawn(serve(client?));
    let server = server?;
    server.send(server.buffer_of(b"hello").await?).await?;
    println!("{:?}", server.receive().await?.as_deref().map(String::from_utf8_lossy));
    server.close().await;
    Ok(())
}
