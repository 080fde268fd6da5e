//! One connection: both directions at once.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};

use rdma_msg::{Message, Stream};
use tokio::io::AsyncWrite;

use crate::failure::{Failure, Result};
use crate::options::Options;
use crate::progress::{Direction, Progress};
use crate::signals::Signals;
use crate::sink::{Partial, Sink};
use crate::source::{self, Piece, Source};

/// Codes that the peer gets when this end aborts the stream.
const FAILED: u32 = 1;
const INTERRUPTED: u32 = 130;

/// Copies input to a peer and from it to the output. Serves one connection after another.
#[derive(Debug)]
pub(crate) struct Session<'o> {
    options: &'o Options,
    progress: Progress,
    /// Standard input. A later connection gets what an earlier one has not read.
    stdin: Option<Source>,
}

impl<'o> Session<'o> {
    /// Checks that the files can be opened.
    pub(crate) fn new(options: &'o Options) -> Result<Self> {
        if let Some(path) = &options.send {
            source::check(path)?;
        }
        if let Some(path) = &options.receive {
            Partial::create(path)?;
        }
        Ok(Session { options, progress: crate::progress(options), stdin: None })
    }

    /// Copies both directions to their ends. Aborts the stream if this end fails or a signal arrives.
    pub(crate) async fn run(&mut self, stream: Stream, signals: &mut Signals) -> Result<()> {
        let stream = Shared(RefCell::new(stream));
        let copied = signals.unless(self.copy(&stream)).await.and_then(|copied| copied);
        match &copied {
            Err(Failure::Local(_)) => stream.abort(FAILED, "the peer cannot read its input or write its output"),
            Err(Failure::Interrupted(_)) => stream.abort(INTERRUPTED, "interrupted"),
            Err(Failure::Connection(_)) => {}
            // Both directions have ended, so it makes no difference if the peer has left first.
            Ok(()) => drop(stream.0.into_inner().close().await),
        }
        copied
    }

    async fn copy(&mut self, stream: &Shared) -> Result<()> {
        let mut file;
        let source = match (&self.options.send, &mut self.stdin) {
            (Some(_), _) => {
                file = Source::open(self.options)?;
                &mut file
            }
            (None, Some(stdin)) => stdin,
            (None, stdin) => stdin.insert(Source::open(self.options)?),
        };
        let sink = Sink::open(self.options.receive.as_deref())?;
        let progress = [self.progress.direction("sent", source.len), self.progress.direction("received", None)];
        let [sent, received] = progress;
        let (mut sending, mut receiving) = (pin!(send(stream, source, sent)), pin!(receive(stream, sink, received)));
        tokio::select! {
            received = &mut receiving => {
                received?;
                sending.await?;
            }
            sent = &mut sending => match sent {
                Err(Failure::Connection(reason)) => {
                    // Bytes that have arrived before are written. The reader also learns why the stream has ended, unless the
                    // peer had nothing more to send.
                    receiving.await?;
                    return Err(Failure::Connection(reason));
                }
                Err(failure) => return Err(failure),
                Ok(()) => receiving.await?,
            },
        }
        Ok(())
    }
}

/// Sends the source to its end, and ends this direction.
async fn send(stream: &Shared, source: &mut Source, progress: Direction) -> Result<()> {
    let lost = |error| Failure::Connection(format!("the connection is lost: {error}"));
    loop {
        let piece = tokio::select! {
            biased;
            piece = source.next() => piece?,
            error = stream.ended() => return Err(lost(error)),
        };
        let Some(piece) = piece else { break };
        stream.write(&piece, &progress).await.map_err(lost)?;
        source.recycle(piece);
    }
    stream.shutdown().await.map_err(lost)?;
    progress.finish();
    Ok(())
}

/// Writes received chunks to the sink until the peer ends its direction.
async fn receive(stream: &Shared, sink: Sink, progress: Direction) -> Result<()> {
    let ended = loop {
        match stream.chunk().await {
            Ok(Some(chunk)) => {
                let len = chunk.len();
                if !sink.push(chunk).await {
                    break Ok(());
                }
                progress.add(len);
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(Failure::Connection(format!("the connection is lost: {error}"))),
        }
    };
    let partial = sink.finish().await?;
    ended?;
    partial.map_or(Ok(()), Partial::keep)?;
    progress.finish();
    Ok(())
}

/// A stream that both directions use from one task.
///
/// The halves of a stream have neither `error` nor `close`. Between two polls nothing borrows it: the place of a waiting reader
/// or writer is in the stream, and not in a future.
struct Shared(RefCell<Stream>);

impl Shared {
    async fn chunk(&self) -> rdma_msg::Result<Option<Message>> {
        poll_fn(|context| {
            let mut stream = self.0.borrow_mut();
            pin!(stream.chunk()).poll(context)
        })
        .await
    }

    /// Writes the piece.
    async fn write(&self, piece: &Piece, progress: &Direction) -> io::Result<()> {
        let mut rest = &piece[..];
        while !rest.is_empty() {
            let written = poll_fn(|context| Pin::new(&mut *self.0.borrow_mut()).poll_write(context, rest)).await?;
            progress.add(written);
            rest = &rest[written..];
        }
        Ok(())
    }

    async fn shutdown(&self) -> io::Result<()> {
        poll_fn(|context| Pin::new(&mut *self.0.borrow_mut()).poll_shutdown(context)).await
    }

    /// Waits until the stream has ended.
    async fn ended(&self) -> io::Error {
        let ended = self.0.borrow().ended();
        ended.await.into()
    }

    fn abort(&self, code: u32, reason: &str) {
        self.0.borrow().abort(code, reason);
    }
}
