//! Accepted streams, for the accept loop of a server.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rdma_async::Error as Connection;
use rdma_safe::cm::{Cause, CmError};

use crate::error::{Error, Result};
use crate::listener::StreamListener;
use crate::stream::Stream;

/// Pause after a request that cannot be used, for example until a file descriptor is free.
const PAUSE: Duration = Duration::from_millis(10);

/// Consecutive [`Cause::DeviceRemoved`] failures that end the listener. A single one may concern another device.
const REMOVALS: u32 = 2;

/// Accepted streams, as a [`futures_core::Stream`]. Made by [`StreamListener::incoming`].
///
/// An error that concerns one connection does not end it: it is passed to [`Incoming::on_error`], and the next connection is
/// accepted after a pause of 10 ms. An error that ends the listener is the last item.
///
/// ```no_run
/// # async fn serve(_: rdma_msg::Stream) {}
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = rdma_msg::StreamListener::bind("0.0.0.0:7471").await?;
/// let mut incoming = listener.incoming().on_error(|error| eprintln!("a connection was not accepted: {error}"));
/// while let Some(stream) = incoming.next().await.transpose()? {
///     tokio::spawn(serve(stream));
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "connections are accepted only while it is polled"]
pub struct Incoming {
    /// The future of the next stream. `None` after the end.
    accept: Option<Accept>,
    /// Failures in a row with [`Cause::DeviceRemoved`].
    removals: u32,
    on_error: Option<Report>,
}

type Report = Box<dyn FnMut(&Error) + Send>;

/// A call of `StreamListener::accept`, which owns the listener. It is kept between polls, since dropping it may lose a stream.
type Accept = Pin<Box<dyn Future<Output = (StreamListener, Result<Stream>)> + Send>>;

fn accept(listener: StreamListener, pause: Option<Duration>) -> Accept {
    Box::pin(async move {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        let accepted = listener.accept().await;
        (listener, accepted)
    })
}

impl StreamListener {
    /// Accepted streams, for `serve_with_incoming` of tonic and for accept loops. Needs the timer of a tokio runtime.
    pub fn incoming(self) -> Incoming {
        Incoming { accept: Some(accept(self, None)), removals: 0, on_error: None }
    }
}

impl Incoming {
    /// Calls `report` with each error that concerns one connection. By default these errors are ignored.
    pub fn on_error(mut self, report: impl FnMut(&Error) + Send + 'static) -> Self {
        self.on_error = Some(Box::new(report));
        self
    }

    /// The next stream; `None` after an error that has ended the listener. Dropping the future loses no stream.
    pub async fn next(&mut self) -> Option<io::Result<Stream>> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Stream>>> {
        while let Some(next) = &mut self.accept {
            let (listener, accepted) = ready!(next.as_mut().poll(context));
            match accepted {
                Ok(stream) => {
                    (self.accept, self.removals) = (Some(accept(listener, None)), 0);
                    return Poll::Ready(Some(Ok(stream)));
                }
                Err(error) if self.ends(&error) => {
                    self.accept = None;
                    return Poll::Ready(Some(Err(error.into())));
                }
                Err(error) => {
                    self.accept = Some(accept(listener, Some(PAUSE)));
                    if let Some(report) = &mut self.on_error {
                        report(&error);
                    }
                }
            }
        }
        Poll::Ready(None)
    }

    /// Whether further calls of `accept` would fail as well.
    fn ends(&mut self, error: &Error) -> bool {
        self.removals = if is_removal(error) { self.removals + 1 } else { 0 };
        self.removals == REMOVALS
            || matches!(error, Error::Connection(Connection::DriverStopped | Connection::Driver(_)))
    }
}

fn is_removal(error: &Error) -> bool {
    let Error::Connection(Connection::Rdma(error)) = error else { return false };
    matches!(&**error, rdma_safe::Error::Cm(CmError::Connect(error)) if error.cause == Cause::DeviceRemoved)
}

impl futures_core::Stream for Incoming {
    type Item = io::Result<Stream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Stream>>> {
        self.poll(context)
    }
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming").field("has_ended", &self.accept.is_none()).finish_non_exhaustive()
    }
}
