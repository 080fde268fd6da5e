//! A key-value service over RDMA for many clients: `kv_server [ADDRESS]`. `kv_client` is its client. Ctrl-C stops it gracefully.

use std::collections::HashMap;
use std::error::Error;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use clap::Parser;
use rdma_async::{Connection, Listener};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A key-value service over RDMA.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Address to listen at.
    #[arg(default_value = "0.0.0.0:7471")]
    address: String,
}

type Store = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

/// A request is `g KEY` or `s LENGTH-OF-KEY KEY VALUE`. The reply is empty without a value, and otherwise `=` and the value.
fn answer(store: &Store, request: &[u8]) -> Vec<u8> {
    let mut store = store.lock().unwrap();
    let value = match request {
        [b'g', key @ ..] => store.get(key).cloned(),
        [b's', len, rest @ ..] if rest.len() >= usize::from(*len) => {
            let (key, value) = rest.split_at((*len).into());
            store.insert(key.to_vec(), value.to_vec());
            Some(value.to_vec())
        }
        _ => None,
    };
    value.map_or(Vec::new(), |value| [b"=", &*value].concat())
}

/// Answers the requests of one client until it leaves, or until the service stops.
async fn serve(client: Connection, store: Store, mut stop: watch::Receiver<()>) -> rdma_async::Result<()> {
    loop {
        let request = tokio::select! {
            request = client.receive() => request?,
            _ = stop.changed() => None,
        };
        let Some(request) = request else { break };
        let reply = client.buffer_of(&answer(&store, &request)).await?;
        client.send(reply).posted().await?;
    }
    client.close().await; // after the replies in flight
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    rdma_safe::soft::install_by_default();
    let listener = Listener::bind(options.address).await?;
    println!("listening at {}", listener.local_address());
    let (store, mut clients) = (Store::default(), JoinSet::new());
    let (stop, stopped) = watch::channel(());
    let mut ctrl_c = pin!(tokio::signal::ctrl_c()); // a signal while another branch runs is not lost
    loop {
        tokio::select! {
            client = listener.accept() => {
                clients.spawn(serve(client?, store.clone(), stopped.clone()));
            }
            Some(left) = clients.join_next() => {
                if let Err(error) = left? {
                    eprintln!("a client is gone: {error}"); // killed, for example
                }
            }
            _ = &mut ctrl_c => break,
        }
    }
    stop.send(())?;
    println!("stopping: {} clients, {} keys", clients.len(), store.lock().unwrap().len());
    while clients.join_next().await.is_some() {}
    Ok(())
}
