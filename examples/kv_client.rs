//! The client of `kv_server`: `kv_client get KEY`, `kv_client set KEY VALUE`, or `kv_client load` with many requests.

use std::error::Error;
use std::time::Instant;

use clap::{Parser, Subcommand};
use rdma_async::{Connection, connect};

/// Client of the key-value service.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address of the server.
    #[arg(short, long, default_value = "127.0.0.1:7471")]
    server: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print a value.
    Get { key: String },
    /// Store a value.
    Set { key: String, value: String },
    /// Store values, and print the rate.
    Load { requests: u32 },
}

async fn ask(server: &Connection, request: &[&[u8]]) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
    server.send(server.buffer_of(&request.concat()).await?).posted().await?;
    let reply = server.receive().await?.ok_or("the server has left")?;
    Ok(reply.strip_prefix(b"=").map(<[u8]>::to_vec))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let Options { server, command } = Options::parse();
    rdma_safe::soft::install_by_default();
    let server = connect(server).await?;
    let set = async |key: &str, value: &str| {
        ask(&server, &[b"s", &[u8::try_from(key.len())?], key.as_bytes(), value.as_bytes()]).await
    };
    match command {
        Command::Get { key } => {
            let value = ask(&server, &[b"g", key.as_bytes()]).await?.ok_or("no such key")?;
            println!("{}", String::from_utf8_lossy(&value));
        }
        Command::Set { key, value } => drop(set(&key, &value).await?),
        Command::Load { requests } => {
            let start = Instant::now();
            for number in 0..requests {
                set(&format!("key{}", number % 100), "value").await?;
            }
            println!("{:.0} requests/s", f64::from(requests) / start.elapsed().as_secs_f64());
        }
    }
    server.close().await;
    Ok(())
}
