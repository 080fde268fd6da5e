//! Sends messages of several sizes to `echo_server`, and prints how long their echoes take: `echo_client [SERVER]`.

use std::time::Instant;

use clap::Parser;
use rdma_msg::{Error, Result, connect};

/// Sends messages to `echo_server`, and times their echoes.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address of the server.
    #[arg(default_value = "127.0.0.1:7471")]
    server: String,
}

async fn run(options: Options) -> Result<()> {
    let server = connect(options.server).await?;
    for len in [10, 10_000, 1_000_000] {
        let message: Vec<u8> = (0..len).map(|index| index as u8).collect();
        let start = Instant::now();
        server.send(&message).await?;
        let echo = server.receive().await?.ok_or(Error::Disconnected)?;
        assert!(*echo == *message, "the echo differs");
        println!("{len} bytes: {:?}", start.elapsed());
    }
    server.close().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    if let Err(error) = run(Options::parse()).await {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
