//! One connection of a queue.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use rdma_safe::cm::{Handshake, Progress, SetConnection, SetDisconnected};
use rdma_safe::endpoint::{DatagramSender, FailedWork};
use rdma_safe::{Buffer, EndpointKey, EndpointSet, Gid, PostError};

use super::events::Source;
use super::lookups::Lookups;
use super::room::Room;
use super::state::Origin;
use crate::core::Waiters;
use crate::effects::{Attachment, Effects};
use crate::receive::Arrived;
use crate::receives::Receives;
use crate::{Error, Sharing};

/// One connection of a queue.
pub(crate) struct Member<S: Sharing> {
    pub(crate) key: EndpointKey,
    pub(crate) stage: Stage,
    /// Reports that the peer has ended the connection.
    pub(crate) source: Option<Source<S>>,
    /// Answers lookups, if the endpoint is for datagrams.
    pub(crate) lookups: Option<S::Rc<Lookups<S>>>,
    /// Room in the send queue.
    pub(crate) room: Room,
    pub(crate) receives: Receives<S>,
    /// The most messages that the peer may have sent and that are not dropped. No limit if the device enforces it.
    limit: u32,
    /// Messages that nobody has taken yet.
    pub(crate) inbox: VecDeque<Arrived>,
    /// The senders of these messages, if they are datagrams.
    pub(crate) senders: VecDeque<DatagramSender>,
    /// Tasks that wait for a message.
    pub(crate) readers: Waiters,
    /// Tasks that look up a service or join a group, and stop when the socket ends.
    pub(crate) watchers: Waiters,
    /// Multicast groups, each as often as it was joined.
    pub(crate) groups: Vec<(Gid, u16)>,
    /// Messages that readers have taken and not dropped yet.
    pub(crate) kept: u32,
    /// Why the connection takes no more work.
    pub(crate) ended: Option<Ended>,
    /// Whether the peer has sent more than was reserved.
    has_exceeded: bool,
    /// Whether the queue pair was stopped for that.
    pub(crate) is_stopped: bool,
    /// Set when this side closes the connection: the time by which operations in flight have to complete.
    pub(crate) drain_until: Option<Instant>,
    /// Tasks that wait until the connection is gone.
    pub(crate) closers: Vec<Waker>,
    /// Dropped when the connection is gone.
    pub(crate) attachments: Vec<Attachment>,
}

/// How far a connection is.
pub(crate) enum Stage {
    /// Its handshake is in progress, or it is being removed.
    Opening,
    /// It was connected by exchanged addresses, or is for datagrams.
    Exchanged,
    Open(Box<SetConnection>),
    /// This side has disconnected, and waits for the confirmation of the peer.
    Leaving(Box<Handshake<SetDisconnected>>),
}

/// Why a connection takes no more work.
#[derive(Clone, Debug)]
pub(crate) enum Ended {
    Disconnected,
    Closed,
    Failed(Arc<rdma_safe::Error>),
    DriverStopped,
    /// The peer has sent more messages than the connection has reserved receives for.
    Exceeded,
}

impl Ended {
    /// The end that failed work shows.
    pub(crate) fn of(failed: &FailedWork) -> Self {
        if failed.0.is_disconnected() {
            return Ended::Disconnected;
        }
        Ended::Failed(Arc::new(match failed.0.connection_lost() {
            Some(lost) => lost.into(),
            None => failed.error().into(),
        }))
    }

    /// The end of a connection if the provider does not say whether it has taken work. Its endpoint then takes no more.
    pub(crate) fn of_doubt(error: &Error) -> Option<Self> {
        let Error::Rdma(error) = error else { return None };
        let is_in_doubt = matches!(**error, rdma_safe::Error::Post(PostError::MaybePosted { .. }));
        is_in_doubt.then(|| Ended::Failed(error.clone()))
    }

    /// The end of a connection whose endpoint was removed: this side has closed it, unless its queue is broken.
    #[cold]
    pub(crate) fn of_removed(broken: &Option<Ended>) -> Self {
        broken.clone().unwrap_or(Ended::Closed)
    }

    pub(crate) fn error(&self) -> Error {
        match self {
            Ended::Disconnected => Error::Disconnected,
            Ended::Closed => Error::Closed,
            Ended::Failed(error) => Error::Failed(error.clone()),
            Ended::DriverStopped => Error::DriverStopped,
            Ended::Exceeded => Error::ReceivesExceeded,
        }
    }
}

impl<S: Sharing> Member<S> {
    pub(crate) fn new(key: EndpointKey, sends: u32, receives: Receives<S>) -> Self {
        Member {
            key,
            stage: Stage::Opening,
            source: None,
            lookups: None,
            room: Room::new(sends),
            inbox: VecDeque::with_capacity(receives.count() as usize),
            limit: receives.limit(),
            receives,
            senders: VecDeque::new(),
            readers: Waiters::default(),
            watchers: Waiters::default(),
            groups: Vec::new(),
            kept: 0,
            ended: None,
            has_exceeded: false,
            is_stopped: false,
            drain_until: None,
            closers: Vec::new(),
            attachments: Vec::new(),
        }
    }

    /// Hands out the oldest message.
    #[inline(always)]
    pub(crate) fn take_message<O: Origin>(&mut self) -> Option<(Arrived, O)> {
        let message = self.inbox.pop_front()?;
        let origin = O::take(&mut self.senders)?;
        self.kept += 1;
        Some((message, origin))
    }

    /// Number of messages that have arrived and were not dropped.
    #[inline(always)]
    pub(crate) fn messages(&self) -> u32 {
        self.inbox.len() as u32 + self.kept
    }

    /// Whether the peer may not send a further message. No limit is reached if the device enforces it.
    #[inline(always)]
    pub(crate) fn is_at_limit(&self) -> bool {
        self.messages() >= self.limit
    }

    /// The number of reserved receives has changed.
    pub(crate) fn set_limit(&mut self) {
        if !self.has_exceeded {
            self.limit = self.receives.limit();
        }
    }

    /// Ends the connection, since the peer has sent more messages than were reserved. The receive of this one is posted again, and
    /// so are those of later ones that arrive before the queue pair is stopped.
    #[cold]
    #[inline(never)]
    pub(crate) fn exceed(&mut self, buffer: Option<Buffer>, effects: &mut Effects) {
        effects.drop_buffers(buffer.and_then(|buffer| self.receives.post_shared(buffer)));
        self.limit = 0;
        self.has_exceeded = true;
        self.end(&Ended::Exceeded, effects);
    }

    /// Whether to stop the queue pair.
    pub(crate) fn is_to_stop(&self) -> bool {
        self.has_exceeded && !self.is_stopped
    }

    /// Takes no more work, and tells all tasks that wait for room, messages or the end. The first reason counts.
    pub(crate) fn end(&mut self, ended: &Ended, effects: &mut Effects) {
        if self.ended.is_none() {
            if let Ended::Failed(error) = ended {
                effects.note_failure(error.clone());
            }
            self.ended = Some(ended.clone());
            self.room.close();
        }
        while let Some(waker) = self.room.notify() {
            effects.wake(waker);
        }
        for waiters in [&mut self.readers, &mut self.watchers] {
            while let Some(waker) = waiters.notify() {
                effects.wake(waker);
            }
        }
    }

    /// Advances the end of the connection. Returns the buffers of its endpoint once it is gone.
    pub(crate) fn advance_leaving(&mut self, set: &mut EndpointSet, now: Instant) -> Option<Vec<Buffer>> {
        if !self.is_drained(now) {
            return None;
        }
        match mem::replace(&mut self.stage, Stage::Opening) {
            // An endpoint that cannot be destroyed is leaked with its buffers.
            Stage::Opening | Stage::Exchanged => return Some(set.remove(self.key).unwrap_or_default()),
            // The drop disconnects. The peer may never confirm that, and there is no work left to protect.
            Stage::Open(connection) if self.has_failed() => {
                drop(connection);
                return Some(set.remove(self.key).unwrap_or_default());
            }
            Stage::Open(connection) => match connection.start_disconnect(set) {
                Ok(handshake) => self.stage = Stage::Leaving(Box::new(handshake)),
                Err(error) => return Some(error.buffers),
            },
            leaving @ Stage::Leaving(_) => self.stage = leaving,
        }
        let Stage::Leaving(handshake) = mem::replace(&mut self.stage, Stage::Opening) else { return None };
        match handshake.advance_in(set) {
            Ok(Progress::Ready(gone)) => Some(gone.buffers),
            Ok(Progress::Pending(handshake)) => {
                self.stage = Stage::Leaving(Box::new(handshake));
                None
            }
            // The peer has not confirmed. The connection is gone nevertheless.
            Err(error) => Some(error.buffers),
        }
    }

    /// Whether the end need not wait for operations in flight.
    fn is_drained(&self, now: Instant) -> bool {
        self.room.is_idle()
            || matches!(self.stage, Stage::Leaving(_))
            || self.has_failed()
            || self.drain_until.is_none_or(|until| now >= until)
    }

    fn has_failed(&self) -> bool {
        matches!(self.ended, Some(Ended::Failed(_) | Ended::DriverStopped | Ended::Exceeded))
    }

    /// The next time to call [`Member::advance_leaving`].
    pub(crate) fn leaving_deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Leaving(handshake) => Some(handshake.deadline()),
            _ => self.drain_until,
        }
    }
}
