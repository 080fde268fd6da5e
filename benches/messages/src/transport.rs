//! The transports.

use bytes::Buf;
use clap::ValueEnum;
use rdma_async::Driver;
use rdma_msg::{Channel, Connector, ReadHalf, WriteHalf};
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
    /// A stream of messages that all have the same length, without buffers, as `rstream` uses a socket.
    FixedLength,
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
    /// Also the length of a message in bytes.
    FixedLength(rdma_msg::StreamListener, usize),
    /// The same.
    Tcp(TcpListener, usize),
    /// The same.
    Unix(UnixListener, usize),
}

/// A connection.
pub(crate) enum Link {
    Channel(Channel),
    Many(Channel),
    Owned(Channel),
    Stream(Framed<BufReader<ReadHalf>, BufWriter<WriteHalf>>),
    FixedLength(FixedLength),
    Socket(Framed<SocketReader, SocketWriter>),
}

type SocketReader = BufReader<Box<dyn AsyncRead + Send + Unpin>>;
type SocketWriter = BufWriter<Box<dyn AsyncWrite + Send + Unpin>>;

/// Messages over a stream of bytes.
pub(crate) struct Framed<R, W> {
    reader: R,
    writer: W,
    /// The message that was received last.
    message: Vec<u8>,
}

/// Messages of one length over a stream of bytes.
pub(crate) struct FixedLength {
    reader: ReadHalf,
    writer: WriteHalf,
    /// The message that was received last.
    message: Vec<u8>,
}

impl FixedLength {
    fn new(stream: rdma_msg::Stream, size: usize) -> Self {
        let (reader, writer) = stream.into_split();
        FixedLength { reader, writer, message: vec![0; size.max(2)] }
    }

    /// Sends a message. A message of one byte is filled up.
    async fn send(&mut self, message: &[u8]) -> Result<()> {
        match message {
            [byte] => Ok(self.writer.write_all(&vec![*byte; self.message.len()]).await?),
            message => Ok(self.writer.write_all(message).await?),
        }
    }

    /// The next message; `None` at the end.
    async fn receive(&mut self) -> Result<Option<&[u8]>> {
        match self.reader.read_exact(&mut self.message).await {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        };
        let is_command = self.message[0] != FILLING;
        Ok(Some(if is_command { &self.message[..1] } else { &self.message }))
    }

    /// Sends the next message back. Returns `false` at the end.
    async fn echo(&mut self) -> Result<bool> {
        if self.receive().await?.is_none() {
            return Ok(false);
        }
        self.writer.write_all(&self.message).await?;
        self.writer.flush().await?;
        Ok(true)
    }
}

/// Each byte of a message that is no command.
pub(crate) const FILLING: u8 = 7;

/// Bytes that a writer collects, and that a reader takes from a socket at once.
const BUFFER: usize = 64 << 10;

/// Bytes of a buffered reader if messages have `size` bytes.
fn read_buffer(size: usize) -> usize {
    // Long messages go past a short buffer, without a copy.
    if size < BUFFER { BUFFER } else { 8 << 10 }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Framed<R, W> {
    fn new(reader: R, writer: W) -> Self {
        Framed { reader, writer, message: Vec::new() }
    }

    async fn flush(&mut self) -> Result<()> {
        Ok(self.writer.flush().await?)
    }

    /// The next message; `None` at the end.
    async fn receive(&mut self) -> Result<Option<&[u8]>> {
        let mut len = [0; 4];
        match self.reader.read_exact(&mut len).await {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        };
        self.message.resize(u32::from_be_bytes(len) as usize, 0);
        self.reader.read_exact(&mut self.message).await?;
        Ok(Some(&self.message))
    }

    /// Sends the next message back. Returns `false` at the end.
    async fn echo(&mut self) -> Result<bool> {
        if self.receive().await?.is_none() {
            return Ok(false);
        }
        send(&mut self.writer, &self.message).await?;
        self.flush().await?;
        Ok(true)
    }
}

async fn send(writer: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> Result<()> {
    let len = (message.len() as u32).to_be_bytes();
    if message.len() >= BUFFER {
        // One system call writes both parts.
        writer.write_all_buf(&mut Buf::chain(&len[..], message)).await?;
    } else {
        writer.write_all(&len).await?;
        writer.write_all(message).await?;
    }
    Ok(())
}

impl Link {
    fn socket(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        size: usize,
    ) -> Link {
        Link::Socket(Framed::new(
            BufReader::with_capacity(read_buffer(size), Box::new(reader)),
            BufWriter::with_capacity(BUFFER, Box::new(writer)),
        ))
    }

    fn tcp(stream: TcpStream, size: usize) -> Result<Link> {
        stream.set_nodelay(true)?;
        let (reader, writer) = stream.into_split();
        Ok(Link::socket(reader, writer, size))
    }

    fn unix(stream: UnixStream, size: usize) -> Link {
        let (reader, writer) = stream.into_split();
        Link::socket(reader, writer, size)
    }

    fn stream(stream: rdma_msg::Stream) -> Link {
        let (reader, writer) = stream.into_split();
        // A stream buffers packets itself. This buffer saves calls for short messages.
        Link::Stream(Framed::new(BufReader::new(reader), BufWriter::with_capacity(BUFFER, writer)))
    }
}

impl Listener {
    /// Listens for messages of `size` bytes with this driver, or with the runtime's if it is `None`. A Unix socket ignores the
    /// address.
    pub(crate) async fn bind(
        transport: Transport,
        address: &str,
        driver: Option<&Driver>,
        size: usize,
    ) -> Result<Self> {
        let builder = || {
            let builder = rdma_msg::Listener::builder();
            if let Some(driver) = driver { builder.driver(driver) } else { builder }
        };
        Ok(match transport {
            Transport::Channel => Listener::Channel(builder().bind(address).await?),
            Transport::Many => Listener::Many(builder().bind(address).await?),
            Transport::Owned => Listener::Owned(builder().bind(address).await?),
            Transport::Stream => Listener::Stream(builder().bind_streams(address).await?),
            Transport::FixedLength => Listener::FixedLength(builder().bind_streams(address).await?, size),
            Transport::Tcp => Listener::Tcp(TcpListener::bind(address).await?, size),
            Transport::Unix => {
                let path = std::env::temp_dir().join(format!("rdma-message-bench-{}", std::process::id()));
                let _ = std::fs::remove_file(&path);
                Listener::Unix(UnixListener::bind(path)?, size)
            }
        })
    }

    pub(crate) fn address(&self) -> Result<String> {
        Ok(match self {
            Listener::Channel(listener) | Listener::Many(listener) | Listener::Owned(listener) => {
                listener.local_address().to_string()
            }
            Listener::Stream(listener) | Listener::FixedLength(listener, _) => listener.local_address().to_string(),
            Listener::Tcp(listener, _) => listener.local_addr()?.to_string(),
            Listener::Unix(listener, _) => {
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
            Listener::Stream(listener) => Link::stream(listener.accept().await?),
            Listener::FixedLength(listener, size) => {
                Link::FixedLength(FixedLength::new(listener.accept().await?, *size))
            }
            Listener::Tcp(listener, size) => Link::tcp(listener.accept().await?.0, *size)?,
            Listener::Unix(listener, size) => Link::unix(listener.accept().await?.0, *size),
        })
    }
}

impl Link {
    /// Connects with this driver or with the one of the runtime, for messages of `size` bytes.
    pub(crate) async fn connect(
        transport: Transport,
        address: &str,
        driver: Option<&Driver>,
        size: usize,
    ) -> Result<Self> {
        let connector = || driver.map_or_else(Connector::new, |driver| Ok(Connector::with_driver(driver)));
        Ok(match transport {
            Transport::Channel => Link::Channel(connector()?.connect(address).await?),
            Transport::Many => Link::Many(connector()?.connect(address).await?),
            Transport::Owned => Link::Owned(connector()?.connect(address).await?),
            Transport::Stream => Link::stream(connector()?.connect_stream(address).await?),
            Transport::FixedLength => {
                Link::FixedLength(FixedLength::new(connector()?.connect_stream(address).await?, size))
            }
            Transport::Tcp => Link::tcp(TcpStream::connect(address).await?, size)?,
            Transport::Unix => Link::unix(UnixStream::connect(address).await?, size),
        })
    }

    pub(crate) async fn send(&mut self, message: &bytes::Bytes) -> Result<()> {
        match self {
            Link::Channel(channel) | Link::Many(channel) => channel.send(&message[..]).await?,
            Link::Owned(channel) => channel.send(message.clone()).await?,
            Link::Stream(framed) => send(&mut framed.writer, message).await?,
            Link::FixedLength(fixed) => fixed.send(message).await?,
            Link::Socket(framed) => send(&mut framed.writer, message).await?,
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
        match self {
            Link::Channel(_) | Link::Many(_) | Link::Owned(_) => Ok(()),
            Link::Stream(framed) => framed.flush().await,
            Link::FixedLength(fixed) => Ok(fixed.writer.flush().await?),
            Link::Socket(framed) => framed.flush().await,
        }
    }

    /// The result of `f` for the next message; `None` at the end.
    pub(crate) async fn receive<R>(&mut self, f: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        match self {
            Link::Channel(channel) | Link::Many(channel) | Link::Owned(channel) => {
                Ok(channel.receive().await?.map(|message| f(&message)))
            }
            Link::Stream(framed) => Ok(framed.receive().await?.map(f)),
            Link::FixedLength(fixed) => Ok(fixed.receive().await?.map(f)),
            Link::Socket(framed) => Ok(framed.receive().await?.map(f)),
        }
    }

    /// Sends the next message back. Returns `false` at the end.
    pub(crate) async fn echo(&mut self) -> Result<bool> {
        match self {
            Link::Channel(channel) | Link::Many(channel) | Link::Owned(channel) => {
                let Some(message) = channel.receive().await? else { return Ok(false) };
                channel.send(&message[..]).await?;
                Ok(true)
            }
            Link::Stream(framed) => framed.echo().await,
            Link::FixedLength(fixed) => fixed.echo().await,
            Link::Socket(framed) => framed.echo().await,
        }
    }
}
