//! The transports.

use clap::ValueEnum;
use rdma_async::Driver;
use rdma_msg::{Channel, Connector};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::Result;

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Channel,
    /// A channel that sends and receives several messages at once.
    Many,
    /// A channel to which memory moves in.
    Owned,
    Stream,
    Tcp,
    Unix,
}

impl Transport {
    pub(crate) fn has_grpc(self) -> bool {
        matches!(self, Transport::Stream | Transport::Tcp)
    }
}

pub(crate) enum Listener {
    Channel(rdma_msg::Listener),
    Many(rdma_msg::Listener),
    Owned(rdma_msg::Listener),
    Stream(rdma_msg::StreamListener),
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A connection.
pub(crate) enum Link {
    Channel(Channel),
    Many(Channel),
    Owned(Channel),
    Bytes(Bytes),
}

/// Messages over a stream of bytes.
pub(crate) struct Bytes {
    reader: BufReader<Box<dyn AsyncRead + Send + Unpin>>,
    writer: BufWriter<Box<dyn AsyncWrite + Send + Unpin>>,
    message: Vec<u8>,
}

const BUFFER: usize = 64 << 10;

impl Bytes {
    fn link(reader: impl AsyncRead + Send + Unpin + 'static, writer: impl AsyncWrite + Send + Unpin + 'static) -> Link {
        Link::Bytes(Bytes {
            reader: BufReader::with_capacity(BUFFER, Box::new(reader)),
            writer: BufWriter::with_capacity(BUFFER, Box::new(writer)),
            message: Vec::new(),
        })
    }

    fn tcp(stream: TcpStream) -> Result<Link> {
        stream.set_nodelay(true)?;
        let (reader, writer) = stream.into_split();
        Ok(Bytes::link(reader, writer))
    }

    fn unix(stream: UnixStream) -> Link {
        let (reader, writer) = stream.into_split();
        Bytes::link(reader, writer)
    }

    fn rdma(stream: rdma_msg::Stream) -> Link {
        let (reader, writer) = stream.into_split();
        Bytes::link(reader, writer)
    }
}

impl Listener {
    /// Listens with this driver, or with the runtime's if it is `None`. A Unix socket ignores the address.
    pub(crate) async fn bind(transport: Transport, address: &str, driver: Option<&Driver>) -> Result<Self> {
        let builder = || {
            let builder = rdma_msg::Listener::builder();
            if let Some(driver) = driver { builder.driver(driver) } else { builder }
        };
        Ok(match transport {
            Transport::Channel => Listener::Channel(builder().bind(address).await?),
            Transport::Many => Listener::Many(builder().bind(address).await?),
            Transport::Owned => Listener::Owned(builder().bind(address).await?),
            Transport::Stream => Listener::Stream(builder().bind_streams(address).await?),
            Transport::Tcp => Listener::Tcp(TcpListener::bind(address).await?),
            Transport::Unix => {
                let path = std::env::temp_dir().join(format!("rdma-message-bench-{}", std::process::id()));
                let _ = std::fs::remove_file(&path);
                Listener::Unix(UnixListener::bind(path)?)
            }
        })
    }

    pub(crate) fn address(&self) -> Result<String> {
        Ok(match self {
            Listener::Channel(listener) | Listener::Many(listener) | Listener::Owned(listener) => {
                listener.local_address().to_string()
            }
            Listener::Stream(listener) => listener.local_address().to_string(),
            Listener::Tcp(listener) => listener.local_addr()?.to_string(),
            Listener::Unix(listener) => {
                let address = listener.local_addr()?;
                address.as_pathname().ok_or("the socket has no path")?.display().to_string()
            }
        })
    }

    pub(crate) async fn accept(&self) -> Result<Link> {
        Ok(match self {
            Listener::Channel(listener) => Link::Channel(listener.accept().await?),
            Listener::Many(listener) => Link::Many(listener.accept().await?),
            Listener::Owned(listener) => Link::Owned(listener.accept().await?),
            Listener::Stream(listener) => Bytes::rdma(listener.accept().await?),
            Listener::Tcp(listener) => Bytes::tcp(listener.accept().await?.0)?,
            Listener::Unix(listener) => Bytes::unix(listener.accept().await?.0),
        })
    }
}

impl Link {
    /// Connects with this driver or with the one of the runtime.
    pub(crate) async fn connect(transport: Transport, address: &str, driver: Option<&Driver>) -> Result<Self> {
        let connector = || driver.map_or_else(Connector::new, |driver| Ok(Connector::with_driver(driver)));
        Ok(match transport {
            Transport::Channel => Link::Channel(connector()?.connect(address).await?),
            Transport::Many => Link::Many(connector()?.connect(address).await?),
            Transport::Owned => Link::Owned(connector()?.connect(address).await?),
            Transport::Stream => Bytes::rdma(connector()?.connect_stream(address).await?),
            Transport::Tcp => Bytes::tcp(TcpStream::connect(address).await?)?,
            Transport::Unix => Bytes::unix(UnixStream::connect(address).await?),
        })
    }

    pub(crate) async fn send(&mut self, message: &bytes::Bytes) -> Result<()> {
        match self {
            Link::Channel(channel) | Link::Many(channel) => channel.send(&message[..]).await?,
            Link::Owned(channel) => channel.send(message.clone()).await?,
            Link::Bytes(Bytes { writer, .. }) => {
                writer.write_all(&(message.len() as u32).to_be_bytes()).await?;
                writer.write_all(message).await?;
            }
        }
        Ok(())
    }

    /// Sends a message several times.
    pub(crate) async fn send_repeated(&mut self, message: &bytes::Bytes, times: u64) -> Result<()> {
        if let Link::Many(channel) = self {
            return Ok(channel.send_many((0..times).map(|_| &message[..])).await?);
        }
        for _ in 0..times {
            self.send(message).await?;
        }
        Ok(())
    }

    /// Flushes the write buffer.
    pub(crate) async fn flush(&mut self) -> Result<()> {
        if let Link::Bytes(Bytes { writer, .. }) = self {
            writer.flush().await?;
        }
        Ok(())
    }

    /// The result of `f` for the next message; `None` at the end.
    pub(crate) async fn receive<R>(&mut self, f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        match self {
            Link::Channel(channel) | Link::Many(channel) | Link::Owned(channel) => {
                Ok(channel.receive().await?.map(|message| f(&message)))
            }
            Link::Bytes(Bytes { reader, message, .. }) => {
                let mut len = [0; 4];
                match reader.read_exact(&mut len).await {
                    Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
                    read => read?,
                };
                message.resize(u32::from_be_bytes(len) as usize, 0);
                reader.read_exact(message).await?;
                Ok(Some(f(message)))
            }
        }
    }
}
