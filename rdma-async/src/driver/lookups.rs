//! Lookups of datagram services. The driver answers the lookups of peers. When a socket ends, its own lookups end.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rdma_safe::EndpointKey;
use rdma_safe::cm::DatagramListener;
use rdma_safe::endpoint::DatagramIdentity;

use super::events::Source;
use super::member::Ended;
use super::queue::Queue;
use crate::core::Ticket;
use crate::effects::Effects;
use crate::{Error, Sharing, trace};

/// Answers peers that look up a datagram service.
pub(crate) struct Lookups<S: Sharing> {
    listener: S::Cell<DatagramListener>,
    identity: DatagramIdentity,
}

/// Most lookups to answer in a row. A driver has other work, too.
const BATCH: u32 = 64;

/// The result of answering lookups.
enum Answered {
    /// All lookups that had arrived.
    All,
    /// There may be more.
    Some,
    /// No more lookups arrive, since the device was removed.
    Removed(rdma_safe::Error),
}

impl<S: Sharing> Lookups<S> {
    pub(crate) fn new(listener: DatagramListener, identity: &DatagramIdentity) -> Self {
        Lookups { listener: S::cell(listener), identity: identity.clone() }
    }

    /// Answers lookups that have arrived, at most [`BATCH`].
    fn answer(&self) -> Answered {
        let mut has_answered = false;
        for _ in 0..BATCH {
            let (next, is_removed) =
                S::with(&self.listener, |listener| (listener.next(Duration::ZERO), listener.is_removed()));
            let answered = match next {
                Ok(None) => return Answered::All,
                // A request for another device or port is rejected. Its peer learns that.
                Ok(Some(request)) => {
                    has_answered = true;
                    request.accept(&self.identity, &[])
                }
                Err(error) if is_removed => return Answered::Removed(error),
                // For example, the process has no descriptor left. The request is rejected.
                Err(error) => Err(error),
            };
            if let Err(error) = answered {
                trace::handshake_failed(&error);
            }
        }
        // If none could be answered, the rest waits for the next event, instead of keeping the driver busy.
        if has_answered { Answered::Some } else { Answered::All }
    }
}

impl<S: Sharing> Queue<S> {
    /// The endpoint is for datagrams. From now on, the driver answers the lookups of its peers.
    pub(crate) fn set_datagrams(self_: &S::Rc<Self>, key: EndpointKey, lookups: Lookups<S>, source: Source<S>) {
        source.set_connection(self_, key);
        let lookups = S::rc(lookups);
        let unused = S::with(&self_.state, |state| match state.member(key) {
            Some(member) => {
                member.senders.reserve(member.receives.count() as usize);
                (member.lookups, member.source) = (Some(lookups), Some(source));
                None
            }
            None => Some((lookups, source)),
        });
        drop(unused);
        // Some may have arrived before the source reported to the queue.
        self_.look_again(key);
    }

    fn look_again(&self, key: EndpointKey) {
        S::with(&self.state, |state| {
            if let Some(source) = state.member(key).and_then(|member| member.source.as_ref()) {
                source.report_again();
            }
        });
    }

    /// Whether the endpoint is for datagrams. If so, answers lookups, and ends it if that is no longer possible.
    pub(super) fn answer_lookups(&self, key: EndpointKey) -> bool {
        let lookups = S::with(&self.state, |state| {
            let member = state.member(key)?;
            Some((member.lookups.clone()?, member.ended.is_none()))
        });
        let Some((lookups, is_open)) = lookups else { return false };
        // Without the lock of the queue, since this takes system calls.
        match if is_open { lookups.answer() } else { Answered::All } {
            Answered::All => {}
            Answered::Some => self.look_again(key),
            Answered::Removed(error) => {
                let mut effects = Effects::default();
                let ended = Ended::Failed(Arc::new(error));
                S::with(&self.state, |state| state.end(key, &ended, &mut effects));
                effects.run();
            }
        }
        true
    }
}

impl<S: Sharing> super::state::State<S> {
    fn end(&mut self, key: EndpointKey, ended: &Ended, effects: &mut Effects) {
        if let Some(member) = self.member(key) {
            member.end(ended, effects);
        }
    }
}

/// A task that ends when its endpoint does.
pub(crate) struct Watcher<'q, S: Sharing> {
    queue: &'q Queue<S>,
    key: EndpointKey,
    ticket: Option<Ticket>,
}

impl<'q, S: Sharing> Watcher<'q, S> {
    pub(crate) fn new(queue: &'q Queue<S>, key: EndpointKey) -> Self {
        Watcher { queue, key, ticket: None }
    }

    /// Why the endpoint takes no more work. While it does, wakes the task when it ends.
    pub(crate) fn poll(&mut self, context: &Context<'_>) -> Poll<Error> {
        let waker = context.waker().clone();
        let (polled, unused) = S::with(&self.queue.state, |state| {
            let Some(member) = state.member(self.key) else {
                return (Poll::Ready(Ended::of_removed(&state.broken).error()), Some(waker));
            };
            match (&member.ended, &self.ticket) {
                (Some(ended), _) => (Poll::Ready(ended.error()), Some(waker)),
                (None, Some(ticket)) => (Poll::Pending, Some(member.watchers.set_waker(ticket, waker))),
                (None, None) => {
                    self.ticket = Some(member.watchers.join(waker));
                    (Poll::Pending, None)
                }
            }
        });
        drop(unused);
        polled
    }
}

impl<S: Sharing> Drop for Watcher<'_, S> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take().filter(|_| !self.queue.events.is_inherited()) else { return };
        drop(S::with(&self.queue.state, |state| state.member(self.key)?.watchers.leave(ticket).1));
    }
}
