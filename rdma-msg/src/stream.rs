//! Byte streams.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::cm::Address;

use crate::channel::{Flush, Handle, Statistics, Waiting};
use crate::engine::{Engine, Waits};
use crate::error::{Error, Result};
use crate::message::Message;
use crate::payload::Payload;

/// A connection for bytes: `AsyncRead` and `AsyncWrite` of tokio (feature `tokio`) and of futures-io (feature `futures`).
///
/// Each direction copies the bytes once at the writer and once at the reader. [`Stream::chunk`] reads without a copy. Neither
/// direction waits for the program in the other one: the credit of one direction is handled also while the program does not read.
///
/// Short writes that are made while others are on their way share packets. Flushing waits for nothing, as with a TCP socket.
/// End the stream by `shutdown`, which waits until the peer's device has acknowledged all bytes: when a stream is dropped
/// without it, bytes for which the peer has no room yet are lost, and the peer gets
/// [`ConnectionReset`](io::ErrorKind::ConnectionReset).
///
/// ```no_run
/// # #[cfg(feature = "tokio")]
/// # async fn example() -> std::io::Result<()> {
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// let mut stream = rdma_msg::connect_stream("10.0.0.2:7471").await?;
/// stream.write_all(b"a question").await?;
/// stream.shutdown().await?;
/// let mut answer = Vec::new();
/// stream.read_to_end(&mut answer).await?;
/// # Ok(())
/// # }
/// ```
///
/// Codecs of tokio-util divide a stream into frames. A [`Channel`](crate::Channel) keeps messages apart without them.
///
/// ```no_run
/// # #[cfg(feature = "tokio")]
/// # async fn example() -> std::io::Result<()> {
/// use bytes::Bytes;
/// use futures_util::SinkExt;
/// use tokio_stream::StreamExt;
/// use tokio_util::codec::{Framed, LengthDelimitedCodec};
///
/// let stream = rdma_msg::connect_stream("10.0.0.2:7471").await?;
/// let mut frames = Framed::new(stream, LengthDelimitedCodec::new());
/// frames.send(Bytes::from("a question")).await?;
/// while let Some(answer) = frames.next().await.transpose()? {
///     println!("{} bytes", answer.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Stream {
    read: ReadHalf,
    write: WriteHalf,
}

/// The half of a [`Stream`] that reads. Made by [`Stream::into_split`].
pub struct ReadHalf {
    waiting: Waiting<Handle>,
    /// The chunk that is being read.
    chunk: Option<Message>,
    /// Its length in bytes, 0 without a chunk.
    len: usize,
    /// Bytes of it that were read.
    at: usize,
}

/// The half of a [`Stream`] that writes. Dropping it says that this end writes no more. Made by [`Stream::into_split`].
pub struct WriteHalf {
    waiting: Waiting<Handle>,
    /// Set once this end writes no more.
    flush: Option<Flush<Handle>>,
}

impl Stream {
    pub(crate) fn new(handle: Handle) -> Self {
        let read = ReadHalf { waiting: Waiting::new(handle.clone(), Waits::ToReceive), chunk: None, len: 0, at: 0 };
        Stream { read, write: WriteHalf { waiting: Waiting::new(handle, Waits::ToSend), flush: None } }
    }

    /// Both halves, for two tasks.
    #[must_use]
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// Like [`ReadHalf::chunk`].
    ///
    /// # Errors
    /// Like [`ReadHalf::chunk`].
    pub async fn chunk(&mut self) -> Result<Option<Message>> {
        self.read.chunk().await
    }

    /// Ends the stream in order, and waits for the end of the connection, as [`Channel::close`](crate::Channel::close) does.
    ///
    /// # Errors
    /// The reason why the stream has ended before all bytes have reached the peer.
    pub async fn close(mut self) -> Result<()> {
        let handle = self.read.waiting.handle().clone();
        let ended = poll_fn(|context| self.write.poll_end(context)).await;
        handle.close_connection().await;
        ended
    }

    /// Why the stream has ended, if it has. Bytes that have arrived can still be read.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        self.read.waiting.handle().with(|engine| engine.ended().cloned())
    }

    /// Waits until the stream has ended, and returns the reason: [`Stream::error`]. For programs that write nothing meanwhile.
    ///
    /// The future counts as a handle of the stream. While it exists, dropping the stream does not end the connection.
    pub fn ended(&self) -> impl Future<Output = Error> + Send + use<> {
        let mut waiting = Waiting::new(self.read.waiting.handle().clone(), Waits::ForAcknowledgements);
        poll_fn(move |context| {
            let ended = ready!(waiting.poll(context, |engine| Ok(engine.ended().cloned())));
            Poll::Ready(ended.unwrap_or_else(|error| error))
        })
    }

    /// Counts since the stream was connected. Each part of a write in a packet counts as a message.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.read.waiting.handle().statistics()
    }

    /// Ends the stream at once, and tells the peer why: [`Error::Aborted`]. Bytes on their way may be lost.
    pub fn abort(&self, code: u32, reason: &str) {
        self.read.abort(code, reason);
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.read.waiting.handle().local_address()
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.read.waiting.handle().peer_address()
    }
}

impl ReadHalf {
    /// The next bytes that have arrived, in place; `None` at the end of the stream.
    ///
    /// Their memory goes back to the stream when the chunk is dropped. The first chunk after a read that left bytes of one is a
    /// copy of the rest.
    ///
    /// # Errors
    /// The reason why the stream has ended.
    pub async fn chunk(&mut self) -> Result<Option<Message>> {
        let at = self.at;
        match self.take_chunk() {
            Some(rest) if at == 0 => Ok(Some(rest)),
            Some(rest) => Ok(Some(Message::assembled(rest[at..].to_vec().into()))),
            None => poll_fn(|context| self.waiting.poll_message(context)).await,
        }
    }

    /// Ends the stream at once: [`Stream::abort`].
    pub fn abort(&self, code: u32, reason: &str) {
        self.waiting.handle().abort(code, reason);
    }

    fn take_chunk(&mut self) -> Option<Message> {
        (self.len, self.at) = (0, 0);
        self.chunk.take()
    }

    /// The bytes to read next. Empty at the end of the stream.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<&[u8]>> {
        while self.at == self.len {
            drop(self.take_chunk());
            match ready!(self.waiting.poll_message(context))? {
                Some(chunk) => (self.len, self.chunk) = (chunk.len(), Some(chunk)),
                None => return Poll::Ready(Ok(&[])),
            }
        }
        Poll::Ready(Ok(self.chunk.as_ref().map_or(&[], |chunk| &chunk[self.at..])))
    }

    /// Passes at most `room` bytes to `put`. Returns their number; 0 at the end of the stream.
    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        room: usize,
        put: impl FnOnce(&[u8]),
    ) -> Poll<io::Result<usize>> {
        if room == 0 {
            return Poll::Ready(Ok(0));
        }
        let bytes = ready!(self.poll_fill(context))?;
        let len = bytes.len().min(room);
        put(&bytes[..len]);
        self.consume(len);
        Poll::Ready(Ok(len))
    }

    fn consume(&mut self, bytes: usize) {
        self.at = (self.at + bytes).min(self.len);
        if self.at == self.len {
            drop(self.take_chunk());
        }
    }
}

impl WriteHalf {
    fn poll_write(&mut self, context: &mut Context<'_>, bytes: &Payload<'_>) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        if let Some(()) = ready!(self.waiting.poll_add(context, bytes)) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = ready!(self.waiting.poll(context, |engine| engine.try_write(bytes)));
        Poll::Ready(Ok(written?))
    }

    fn poll_shutdown(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(ready!(self.poll_end(context))?))
    }

    /// Says that this end writes no more, and waits until the peer has all bytes.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        if self.flush.is_none() {
            ready!(self.waiting.poll(context, Engine::try_finish))?;
        }
        let flush = self.flush.get_or_insert_with(|| Flush::new(self.waiting.handle().clone()));
        flush.poll(context)
    }

    /// Ends the stream at once: [`Stream::abort`].
    pub fn abort(&self, code: u32, reason: &str) {
        self.waiting.handle().abort(code, reason);
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        self.waiting.handle().0.shared.with_own(Engine::finish_later);
    }
}

impl fmt::Debug for ReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadHalf").field("handle", self.waiting.handle()).finish_non_exhaustive()
    }
}

impl fmt::Debug for WriteHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteHalf").field("handle", self.waiting.handle()).finish_non_exhaustive()
    }
}

/// The methods of `AsyncBufRead`, which tokio and futures-io have in common.
macro_rules! buf_read_methods {
    () => {
        fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
            Poll::Ready(Ok(ready!(self.get_mut().reader().poll_fill(context))?))
        }

        fn consume(mut self: Pin<&mut Self>, bytes: usize) {
            self.reader().consume(bytes);
        }
    };
}

/// The methods of `AsyncWrite` that tokio and futures-io have in common.
macro_rules! write_methods {
    () => {
        fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.writer().poll_write(context, &bytes.into())
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            list: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            self.writer().poll_write(context, &list.into())
        }

        // Succeeds also after the end, as for a TCP socket: libraries such as hyper flush before they read, and an error would
        // hide the last bytes of the peer.
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    };
}

/// Implements the traits for types that have `reader` and for types that have `writer`.
macro_rules! implement {
    ($($reader:ident)*; $($writer:ident)*) => {
        #[cfg(feature = "tokio")]
        mod for_tokio {
            use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};

            use super::*;

            $(
                impl AsyncRead for $reader {
                    fn poll_read(
                        mut self: Pin<&mut Self>,
                        context: &mut Context<'_>,
                        target: &mut ReadBuf<'_>,
                    ) -> Poll<io::Result<()>> {
                        let room = target.remaining();
                        self.reader().poll_read(context, room, |bytes| target.put_slice(bytes)).map_ok(drop)
                    }
                }

                impl AsyncBufRead for $reader {
                    buf_read_methods!();
                }
            )*

            $(
                impl AsyncWrite for $writer {
                    write_methods!();

                    fn is_write_vectored(&self) -> bool {
                        true
                    }

                    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
                        self.writer().poll_shutdown(context)
                    }
                }
            )*
        }

        #[cfg(feature = "futures")]
        mod for_futures {
            use futures_io::{AsyncBufRead, AsyncRead, AsyncWrite};

            use super::*;

            $(
                impl AsyncRead for $reader {
                    fn poll_read(
                        mut self: Pin<&mut Self>,
                        context: &mut Context<'_>,
                        target: &mut [u8],
                    ) -> Poll<io::Result<usize>> {
                        let room = target.len();
                        self.reader().poll_read(context, room, |bytes| target[..bytes.len()].copy_from_slice(bytes))
                    }
                }

                impl AsyncBufRead for $reader {
                    buf_read_methods!();
                }
            )*

            $(
                impl AsyncWrite for $writer {
                    write_methods!();

                    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
                        self.writer().poll_shutdown(context)
                    }
                }
            )*
        }
    };
}

impl Stream {
    fn reader(&mut self) -> &mut ReadHalf {
        &mut self.read
    }

    fn writer(&mut self) -> &mut WriteHalf {
        &mut self.write
    }
}

impl ReadHalf {
    fn reader(&mut self) -> &mut Self {
        self
    }
}

impl WriteHalf {
    fn writer(&mut self) -> &mut Self {
        self
    }
}

implement!(Stream ReadHalf; Stream WriteHalf);
