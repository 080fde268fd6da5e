//! Lookups of datagram services: the driver answers those of peers, and ends those of a socket along with it.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rdma_safe::cm::DatagramListener;
use rdma_safe::endpoint::DatagramIdentity;
use rdma_safe::{EndpointKey, Result};

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

/// Errors in a row after which the listener counts as broken. Those of single peers are fewer.
const ERRORS: u32 = 256;

impl<S: Sharing> Lookups<S> {
    pub(crate) fn new(listener: DatagramListener, identity: &DatagramIdentity) -> Self {
        Lookups { listener: S::cell(listener), identity: identity.clone() }
    }

    /// Answers all lookups that have arrived.
    fn answer(&self) -> Result<()> {
        let mut errors = 0;
        loop {
            let answered = match S::with(&self.listener, |listener| listener.next(Duration::ZERO)) {
                Ok(None) => return Ok(()),
                // A request for another device or port is rejected. Its peer learns that.
                Ok(Some(request)) => request.accept(&self.identity, &[]),
                Err(error) if errors == ERRORS => return Err(error),
                Err(error) => {
                    errors += 1;
                    Err(error)
                }
            };
            match answered {
                Ok(()) => errors = 0,
                Err(error) => trace::handshake_failed(&error),
            }
        }
    }
}

impl<S: Sharing> Queue<S> {
    /// The endpoint is for datagrams. From now on, the driver answers the lookups of its peers.
    pub(crate) fn set_datagrams(self_: &S::Rc<Self>, key: EndpointKey, lookups: Lookups<S>, source: Source<S>) {
        source.set_connection(self_, key);
        let lookups = S::rc(lookups);
        let unused = S::with(&self_.state, |state| match state.member(key) {
            Some(member) => {
                member.senders.reserve(member.receives as usize);
                (member.lookups, member.source) = (Some(lookups), Some(source));
                None
            }
            None => Some((lookups, source)),
        });
        drop(unused);
        // Some may have arrived before the source reported to the queue.
        self_.answer_lookups(key);
    }

    /// Whether the endpoint is for datagrams. If so, answers lookups, and ends it if that is no longer possible.
    pub(super) fn answer_lookups(&self, key: EndpointKey) -> bool {
        let lookups = S::with(&self.state, |state| {
            let member = state.member(key)?;
            Some((member.lookups.clone()?, member.ended.is_none()))
        });
        let Some((lookups, is_open)) = lookups else { return false };
        // Without the lock of the queue, since this takes system calls.
        if let (true, Err(error)) = (is_open, lookups.answer()) {
            let mut effects = Effects::default();
            let ended = Ended::Failed(Arc::new(error));
            S::with(&self.state, |state| state.end(key, &ended, &mut effects));
            effects.run();
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
