//! Signals that end the program.

use std::future::{Future, poll_fn};
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::{Failure, Result};

/// Receives SIGINT, SIGTERM and SIGHUP.
#[derive(Debug)]
pub(crate) struct Signals([(u8, Signal); 3]);

impl Signals {
    pub(crate) fn install() -> io::Result<Self> {
        let receive = |kind: SignalKind| Ok::<_, io::Error>((kind.as_raw_value() as u8, signal(kind)?));
        Ok(Signals([
            receive(SignalKind::interrupt())?,
            receive(SignalKind::terminate())?,
            receive(SignalKind::hangup())?,
        ]))
    }

    /// The output of `future`, or [`Failure::Interrupted`] if a signal arrives first.
    pub(crate) async fn unless<T>(&mut self, future: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            biased;
            number = self.next() => Err(Failure::Interrupted(number)),
            output = future => Ok(output),
        }
    }

    /// The number of the next signal.
    async fn next(&mut self) -> u8 {
        poll_fn(|context| {
            for (number, signal) in &mut self.0 {
                if signal.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }
}
