//! Receiving datagrams.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::endpoint::DatagramSender;

use super::Peer;
use crate::receive::Reader;
use crate::{Message, Result, Sharing};

/// The future of [`Datagrams::receive_from`](crate::Datagrams::receive_from).
///
/// # Errors
/// After the datagrams that have arrived: [`Error::Closed`](crate::Error::Closed), [`Error::Failed`](crate::Error::Failed) and
/// [`Error::DriverStopped`](crate::Error::DriverStopped).
#[must_use = "a future does nothing unless it is polled"]
pub struct ReceiveFrom<'d, S: Sharing>(pub(super) Reader<'d, S>);

impl<S: Sharing> Future for ReceiveFrom<'_, S> {
    type Output = Result<(Message<S>, Peer)>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match ready!(self.0.poll::<DatagramSender>(context)) {
            Ok((message, sender)) => Poll::Ready(Ok((message, sender.into()))),
            Err(ended) => Poll::Ready(Err(ended.error())),
        }
    }
}

impl<S: Sharing> fmt::Debug for ReceiveFrom<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveFrom").field("waits", &self.0.waits()).finish_non_exhaustive()
    }
}
