//! The future of a message that is sent.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::{Gather, ReadableRegion};

use crate::channel::{Handle, Owner, Waiting};
use crate::engine::{Engine, Progress, Space, Waits};
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
    way: Way,
}

/// How a message is sent.
enum Way {
    /// The future was not polled yet.
    Undecided,
    /// It is copied into packets.
    Packets(Progress),
    /// This end writes it to memory of the peer. Both are `None` once it is posted.
    Write(Option<Space>, Option<Gather>),
    /// The peer is to read this memory. `None` once it is offered.
    Offer(Option<Parts<ReadableRegion>>),
    /// The peer has read it after this many answers.
    Offered(u64),
}

impl<'c> Send<'c> {
    pub(crate) fn new(waiting: Waiting<&'c Handle>, message: Payload<'c>) -> Self {
        Send { waiting, message, way: Way::Undecided }
    }

    fn choose_way(&mut self) {
        let Owner { pd, rendezvous_threshold, shared, write_parts, .. } = &*self.waiting.handle().0;
        let Send { message, way, .. } = self;
        *way = Way::Packets(Progress::default());
        if message.len() < (*rendezvous_threshold).max(1) || !message.is_owned() {
            return;
        }
        if let Some(space) = shared.with(|engine| engine.claim_space(message.len())) {
            *way = Way::Write(Some(space), message.register(pd, *write_parts));
            if matches!(way, Way::Write(_, Some(_))) {
                return;
            }
            shared.with(|engine| engine.return_space(space));
            *way = Way::Packets(Progress::default());
        }
        if let Some(parts) = message.expose(pd) {
            *way = Way::Offer(Some(parts));
        }
    }
}

impl Future for Send<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if let Way::Undecided = self.way {
            self.choose_way();
        }
        let Send { waiting, message, way } = &mut *self;
        match way {
            Way::Packets(progress) => {
                let sent = ready!(waiting.poll(context, |engine| engine.try_send(message, progress)));
                *progress = Progress::default();
                return Poll::Ready(sent);
            }
            Way::Write(space, list) => {
                return waiting.poll(context, |engine| engine.try_write_message(space, list));
            }
            Way::Offer(parts) => {
                let answers = ready!(waiting.poll(context, |engine| engine.try_offer(parts)))?;
                *way = Way::Offered(answers);
                waiting.wait_for(Waits::ForAcknowledgements);
            }
            Way::Offered(_) | Way::Undecided => {}
        }
        let Way::Offered(answers) = *way else { return Poll::Pending };
        waiting.poll(context, |engine| engine.try_answered(answers))
    }
}

impl Drop for Send<'_> {
    fn drop(&mut self) {
        let shared = &self.waiting.handle().0.shared;
        match &mut self.way {
            Way::Packets(Progress { has_begun: true, .. }) => shared.with_own(Engine::cancel),
            Way::Write(Some(space), _) => shared.with_own(|engine| engine.return_space(*space)),
            _ => {}
        }
    }
}

impl fmt::Debug for Send<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Send").field("message", &self.message).finish_non_exhaustive()
    }
}
