//! The future of a message that is sent.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::ReadableRegion;

use crate::channel::{Handle, Owner, Waiting};
use crate::engine::{Engine, Progress, Writing};
use crate::error::Result;
use crate::parts::Parts;
use crate::payload::Payload;

/// The future of [`Channel::send`](crate::Channel::send).
///
/// # Errors
/// [`Error::TooLong`](crate::Error::TooLong) when the peer does not accept a message of this length; the reason why the channel
/// has ended.
#[must_use = "a future does nothing unless it is polled"]
pub struct Send<'c> {
    waiting: Waiting<&'c Handle>,
    message: Payload<'c>,
    /// `None` until the first poll.
    way: Option<Way>,
}

/// How a message is sent.
enum Way {
    /// It is copied into packets.
    Packets(Progress),
    /// This end writes it to memory of the peer. `None` once it is announced.
    Write(Option<Writing>),
    /// The peer is to read this memory. `None` once it is offered.
    Offer(Option<Parts<ReadableRegion>>),
}

impl Way {
    fn choose(owner: &Owner, message: &mut Payload<'_>) -> Self {
        let Owner { pd, rendezvous_threshold, shared, write_parts, .. } = owner;
        let in_packets = Way::Packets(Progress::default());
        if message.len() < (*rendezvous_threshold).max(1) || !message.is_owned() {
            return in_packets;
        }
        if let Some(space) = shared.with(|engine| engine.claim_space(message.len())) {
            if let Some(parts) = message.register(pd) {
                return Way::Write(Some(Writing::new(space, parts, *write_parts)));
            }
            shared.with(|engine| engine.return_space(space));
        }
        message.expose(pd).map_or(in_packets, |parts| Way::Offer(Some(parts)))
    }
}

impl<'c> Send<'c> {
    pub(crate) fn new(waiting: Waiting<&'c Handle>, message: Payload<'c>) -> Self {
        Send { waiting, message, way: None }
    }
}

impl Future for Send<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Send { waiting, message, way } = &mut *self;
        let owner = &*waiting.handle().0;
        let way = way.get_or_insert_with(|| Way::choose(owner, message));
        match way {
            Way::Packets(progress) => {
                if let Some(()) = ready!(waiting.poll_add(context, message)) {
                    return Poll::Ready(Ok(()));
                }
                let sent = ready!(waiting.poll(context, |engine| engine.try_send(message, progress)));
                *progress = Progress::default();
                Poll::Ready(sent)
            }
            Way::Write(writing) => waiting.poll(context, |engine| engine.try_write_message(writing)),
            Way::Offer(parts) => waiting.poll(context, |engine| engine.try_offer(parts)),
        }
    }
}

impl Drop for Send<'_> {
    fn drop(&mut self) {
        let shared = &self.waiting.handle().0.shared;
        match &self.way {
            Some(Way::Packets(Progress { has_begun: true, .. })) => shared.with_own(Engine::cancel),
            Some(Way::Write(Some(writing))) => shared.with_own(|engine| engine.return_space(writing.space)),
            _ => {}
        }
    }
}

impl fmt::Debug for Send<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Send").field("message", &self.message).finish_non_exhaustive()
    }
}
