//! The sender writes blocks into memory of the receiver, without a copy, with tokio, over rdma-msg.

use rdma_msg::{Channel, Listener, Result, connect};

const BLOCK: usize = 1 << 20;

async fn send(channel: Channel) -> Result<()> {
    for number in 0..8 {
        channel.send(vec![number; BLOCK]).await?; // the vector moves in
    }
    channel.close().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    let listener = Listener::bind("127.0.0.1:0").await?;
    let (sender, receiver) = tokio::join!(connect(listener.local_address()), listener.accept());
    let (sender, receiver) = (sender?, receiver?);
    for _ in 0..2 {
        receiver.offer(vec![0; BLOCK]).await?;
    }
    tokio::spawn(send(sender));
    while let Some(block) = receiver.receive().await? {
        println!("a block of {} bytes, each {}", block.len(), block[0]);
        // A block that was sent before the offer had arrived is in other memory.
        if let Ok(memory) = block.into_offered() {
            receiver.offer(memory).await?; // for a later block
        }
    }
    receiver.close().await
}
