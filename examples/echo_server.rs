//! Sends each message back, for many clients: `echo_server [ADDRESS]`. `echo_client` is its client. Ctrl-C stops it gracefully.

use std::pin::pin;
use std::time::Duration;

use clap::Parser;
use rdma_msg::{Channel, Listener, Result};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Sends each message back over RDMA.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address to listen at.
    #[arg(default_value = "0.0.0.0:7471")]
    address: String,
}

/// Time for a client to take its last echoes when the service stops.
const FAREWELL: Duration = Duration::from_secs(2);

async fn echo(client: &Channel) -> Result<()> {
    while let Some(message) = client.receive().await? {
        client.send(message).await?; // waits while the client does not receive
    }
    Ok(())
}

/// Serves one client until it sends no more, or until the service stops.
async fn serve(client: Channel, mut stop: watch::Receiver<()>) -> Result<()> {
    tokio::select! {
        result = echo(&client) => result?,
        _ = stop.changed() => {}
    }
    match timeout(FAREWELL, client.close()).await {
        Ok(closed) => closed,
        Err(_) => {
            client.abort(1, "the service stops");
            Ok(())
        }
    }
}

async fn run(options: Options) -> Result<()> {
    let listener = Listener::bind(options.address).await?;
    println!("listening at {}", listener.local_address());
    let (stop, stopped) = watch::channel(());
    let (mut clients, mut ctrl_c) = (JoinSet::new(), pin!(tokio::signal::ctrl_c()));
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(client) => {
                    let served = serve(client, stopped.clone());
                    clients.spawn(async move {
                        if let Err(error) = served.await {
                            eprintln!("a client is gone: {error}"); // killed, for example
                        }
                    });
                    while clients.try_join_next().is_some() {} // those that have ended
                }
                Err(error) => {
                    eprintln!("a client cannot be accepted: {error}"); // no file descriptor is left, for example
                    sleep(Duration::from_millis(10)).await;
                }
            },
            _ = &mut ctrl_c => break,
        }
    }
    while clients.try_join_next().is_some() {}
    println!("stopping: {} clients", clients.len());
    drop(stop);
    while clients.join_next().await.is_some() {}
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    rdma_safe::soft::install_by_default(); // without a device, runs on soft0
    if let Err(error) = run(Options::parse()).await {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
