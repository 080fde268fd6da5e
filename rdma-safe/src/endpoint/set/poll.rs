//! Taking work that is done, of whichever endpoint.

use std::time::Duration;

use super::builder::SET_FIELDS;
use super::{EndpointKey, EndpointSet};
use crate::cq::Standing;
use crate::endpoint::Armed;
use crate::endpoint::completion::Completion;
use crate::endpoint::poll::Shown;
use crate::endpoint::wait::{self, Polled};
use crate::{CompletionQueue, PollError, Result, WorkCompletion};

impl EndpointSet {
    /// Takes one piece of work that is done, of any endpoint, if there is any. It never waits.
    ///
    /// # Errors
    /// [`PollError::Unexpected`] when the provider names work that is not in flight: its endpoint takes no more work then, and the
    /// others are as before. [`PollError::Provider`] when it failed: the set is of no more use, and the buffers come back from
    /// [`EndpointSet::remove`].
    #[inline]
    pub fn poll(&mut self) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        self.settle();
        if self.notes_all || !self.members.is_idle() {
            return self.poll_slowly();
        }
        if self.cq.is_extended() {
            // SAFETY: the queue is an extended one, which is polled here and in `look` only, where each poll is ended. Only queue
            // pairs of this set complete to it, and nothing happens to them here.
            let Some(standing) = (unsafe { self.cq.stand() })? else { return Ok(None) };
            return match self.members.take_usual(InSet(standing)) {
                Ok(taken) => Ok(Some(taken)),
                Err(shown) => self.poll_noting(shown.0),
            };
        }
        // SAFETY: a classic queue.
        let Some(row) = (unsafe { self.cq.next_row() })? else { return Ok(None) };
        match self.members.take_usual(row) {
            Ok(taken) => Ok(Some(taken)),
            Err(row) => {
                self.members.note(row)?;
                self.poll_slowly()
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn poll_noting(&mut self, standing: Standing) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        let noted = self.members.note(standing.completion(self.fields));
        drop(standing);
        noted?;
        self.poll_slowly()
    }

    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self) -> Result<Option<(EndpointKey, Completion)>, PollError> {
        if self.members.is_in_turn() {
            // Turns depend on all completions in the queue. The queue holds no more than its capacity, and no receive is posted
            // meanwhile.
            for _ in 0..=self.cq.capacity() {
                if !self.look()? {
                    break;
                }
            }
        }
        loop {
            if let Some(taken) = self.members.pop() {
                return Ok(Some(taken));
            }
            if !self.look()? {
                return Ok(None);
            }
        }
    }

    /// Takes one completion out of the queue, if there is any, and notes it at its endpoint.
    #[inline(never)]
    pub(super) fn look(&mut self) -> Result<bool, PollError> {
        if self.cq.is_extended() {
            // SAFETY: as in `poll`.
            let Some(standing) = (unsafe { self.cq.stand() })? else { return Ok(false) };
            self.members.note(standing.completion(self.fields))?;
        } else {
            // SAFETY: a classic queue.
            let Some(found) = (unsafe { self.cq.next_row() })? else { return Ok(false) };
            self.members.note(found)?;
        }
        self.members.end_exceeding();
        Ok(true)
    }

    /// Waits for a piece of work to be done, of any endpoint, at most for `timeout`.
    ///
    /// It spins, or, when the set was built with [`EndpointSetBuilder::events`](crate::EndpointSetBuilder::events), sleeps until
    /// there is an event.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); [`Error::Poll`](crate::Error::Poll); [`Error::Channel`](crate::Error::Channel).
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<(EndpointKey, Completion)> {
        match self.poll() {
            Ok(Some(taken)) => Ok(taken),
            Ok(None) => wait::wait(self, timeout),
            Err(error) => Err(error.into()),
        }
    }

    /// Asks for an event at the next completion of any endpoint, unless completions are there already.
    ///
    /// Takes all pending events from the channel first, so no other code has to read them. [`Armed`] says whether to wait for the
    /// channel or to poll again. In this way one thread can wait for the set and for other descriptors, such as new clients:
    ///
    /// ```no_run
    /// # use rdma_safe::{Armed, EndpointKey, EndpointSet};
    /// # fn serve(_: EndpointKey, _: rdma_safe::Completion) {}
    /// # fn readable(_: std::os::fd::BorrowedFd<'_>, _: &std::net::TcpListener) {}
    /// # fn example(clients: &mut EndpointSet, listener: std::net::TcpListener) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::os::fd::AsFd;
    ///
    /// listener.set_nonblocking(true)?;
    /// loop {
    ///     while let Some((key, done)) = clients.poll()? {
    ///         serve(key, done);
    ///     }
    ///     while let Ok((stream, _)) = listener.accept() {
    ///         // … build an endpoint in the set, and exchange addresses over the stream
    /// #       drop(stream);
    ///     }
    ///     match clients.arm()? {
    ///         Armed::Poll => continue,
    ///         // Sleep until one of both can be read: poll(2), epoll(7), the reactor of a runtime.
    ///         Armed::Wait => readable(clients.channel().unwrap().as_fd(), &listener),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoChannel`](crate::Error::NoChannel) without [`EndpointSetBuilder::events`](crate::EndpointSetBuilder::events);
    /// [`Error::Verb`](crate::Error::Verb); [`Error::Poll`](crate::Error::Poll).
    pub fn arm(&mut self) -> Result<Armed> {
        if let Some(channel) = self.cq.channel() {
            while channel.take_event()?.is_some() {}
        }
        self.settle();
        self.cq.arm(false)?;
        // What completed before arming causes no event. Of endpoints that were removed there may be some that is not handed out.
        while self.members.is_idle() && self.look()? {}
        Ok(Armed::with(!self.members.is_idle()))
    }
}

impl Polled for EndpointSet {
    type Done = (EndpointKey, Completion);

    fn poll_once(&mut self) -> Result<Option<Self::Done>, PollError> {
        self.poll()
    }

    fn queue(&mut self) -> &mut CompletionQueue {
        &mut self.cq
    }
}

/// On a completion of an extended queue of a set.
struct InSet(Standing);

impl Shown for InSet {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        self.0.completion(SET_FIELDS)
    }
}
