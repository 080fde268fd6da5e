//! Bridges TCP connections to RDMA streams, or back: any TCP client reaches a server over RDMA, and the other way round.
//!
//! `tcp_bridge --listen-tcp 127.0.0.1:8080 --connect-rdma 10.0.0.2:7471` beside the client, and, if the server has only TCP,
//! `tcp_bridge --listen-rdma 10.0.0.2:7471 --connect-tcp 127.0.0.1:80` beside the server.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::time::Duration;

use clap::Parser;
use rdma_msg::{Incoming, Stream, StreamListener, connect_stream};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

const USAGE: &str = "tcp_bridge --listen-tcp ADDRESS --connect-rdma ADDRESS
       tcp_bridge --listen-rdma ADDRESS --connect-tcp ADDRESS";

/// Bridges TCP connections to RDMA streams, or back, until Ctrl-C.
#[derive(Parser)]
#[command(version, override_usage = USAGE)]
struct Options {
    /// Accepts TCP connections at this address.
    #[arg(long, value_name = "ADDRESS", requires = "connect_rdma", required_unless_present = "listen_rdma")]
    listen_tcp: Option<String>,
    /// Connects an RDMA stream to this address for each of them.
    #[arg(long, value_name = "ADDRESS", requires = "listen_tcp")]
    connect_rdma: Option<String>,
    /// Accepts RDMA streams at this address.
    #[arg(long, value_name = "ADDRESS", requires = "connect_tcp", conflicts_with = "listen_tcp")]
    listen_rdma: Option<String>,
    /// Connects to this TCP address for each of them.
    #[arg(long, value_name = "ADDRESS", requires = "listen_rdma")]
    connect_tcp: Option<String>,
}

enum Listener {
    Tcp(TcpListener),
    Rdma(Incoming),
}

enum Client {
    Tcp(TcpStream),
    Rdma(Stream),
}

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

fn report(error: &dyn Error) {
    eprintln!("a connection was not accepted: {error}");
}

impl Listener {
    async fn bind(options: &Options) -> Result<Listener> {
        if let Some(address) = &options.listen_tcp {
            let listener = TcpListener::bind(address).await?;
            println!("listening at {}", listener.local_addr()?);
            return Ok(Listener::Tcp(listener));
        }
        let listener = StreamListener::bind(options.listen_rdma.as_deref().ok_or("no address to listen at")?).await?;
        println!("listening at {}", listener.local_address());
        Ok(Listener::Rdma(listener.incoming().on_error(|error| report(error))))
    }

    /// The next client. No client is lost when the future is dropped.
    async fn accept(&mut self) -> Result<Client> {
        match self {
            Listener::Rdma(incoming) => Ok(Client::Rdma(incoming.next().await.ok_or("the listener has ended")??)),
            Listener::Tcp(listener) => loop {
                match listener.accept().await {
                    Ok((stream, _)) => return Ok(Client::Tcp(stream)),
                    // Without a free descriptor, for example, the next call fails at once.
                    Err(error) => report(&error),
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            },
        }
    }
}

async fn connect(client: Client, server: &str) -> Result<(TcpStream, Stream)> {
    Ok(match client {
        Client::Tcp(stream) => (stream, connect_stream(server).await?),
        Client::Rdma(stream) => (TcpStream::connect(server).await?, stream),
    })
}

/// Copies both directions until both have ended, each on its own.
async fn bridge(client: Client, server: String, mut stop: watch::Receiver<()>) -> Result<()> {
    let (mut tcp, mut rdma) = tokio::select! {
        ends = connect(client, &server) => ends?,
        _ = stop.changed() => return Ok(()),
    };
    tcp.set_nodelay(true)?;
    let copied = tokio::select! {
        copied = copy_bidirectional(&mut tcp, &mut rdma) => copied,
        _ = stop.changed() => Err(io::Error::other("the bridge was stopped")),
    };
    if let Err(error) = copied {
        // Resets both ends, because bytes may be missing.
        rdma.abort(1, &error.to_string());
        tcp.set_zero_linger()?;
        return Err(error.into());
    }
    Ok(rdma.close().await?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let options = Options::parse();
    rdma_safe::soft::install_by_default();
    let mut listener = Listener::bind(&options).await?;
    let server = options.connect_rdma.or(options.connect_tcp).ok_or("no address to connect to")?;
    let (mut connections, (stop, stopped)) = (JoinSet::new(), watch::channel(()));
    let mut ctrl_c = pin!(tokio::signal::ctrl_c()); // a signal while another branch runs is not lost
    loop {
        tokio::select! {
            client = listener.accept() => {
                connections.spawn(bridge(client?, server.clone(), stopped.clone()));
            }
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended? {
                    eprintln!("a connection has failed: {error}");
                }
            }
            interrupted = &mut ctrl_c => break interrupted?,
        }
    }
    stop.send_replace(());
    while connections.join_next().await.is_some() {}
    Ok(())
}
