//! Messages of any size and their echoes with tokio, over rdma-msg. The README has this program.

use rdma_msg::{Channel, Listener, Result, connect};

async fn serve(client: Channel) -> Result<()> {
    while let Some(message) = client.receive().await? {
        client.send(message).await?;
    }
    client.close().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    let listener = Listener::bind("127.0.0.1:0").await?;
    let (server, client) = tokio::join!(connect(listener.local_address()), listener.accept());
    tokio::spawn(serve(client?));
    let server = server?;
    server.send("hello").await?;
    server.send(vec![0; 1_000_000]).await?;
    while let Some(echo) = server.receive().await? {
        println!("{} bytes", echo.len());
        if echo.len() > 5 {
            server.finish().await?; // the other end then sends no more, either
        }
    }
    server.close().await
}
