//! Datagrams with tokio: a server answers each client that it hears from.

use std::time::Duration;

use rdma_async::{Datagrams, Result};
use rdma_safe::cm::Address;

async fn serve(server: Datagrams) -> Result<()> {
    loop {
        let (request, client) = server.receive_from().await?;
        let answer = format!("hello, {}", String::from_utf8_lossy(&request));
        server.send_to(server.buffer_of(answer.as_bytes()).await?, &client).await?;
    }
}

async fn ask(server: Address, name: &str) -> Result<()> {
    let client = Datagrams::bind("127.0.0.1:0").await?;
    let server = client.peer(server).await?;
    loop {
        client.send_to(client.buffer_of(name.as_bytes()).await?, &server).await?;
        // Datagrams can be lost silently, so the client resends an unanswered request.
        if let Ok(received) = tokio::time::timeout(Duration::from_millis(100), client.receive_from()).await {
            println!("{name}: received {:?}", String::from_utf8_lossy(&received?.0));
            return Ok(());
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    let server = Datagrams::bind("127.0.0.1:0").await?;
    let address = server.local_address();
    tokio::spawn(serve(server));
    for name in ["alice", "bob"] {
        ask(address, name).await?;
    }
    Ok(())
}
