//! Waiting until there is something to poll.

use std::time::{Duration, Instant};

use crate::{CompletionQueue, Error, PollError, Result};

/// What has a completion queue of its own.
pub(super) trait Polled {
    type Done;

    fn poll_once(&mut self) -> Result<Option<Self::Done>, PollError>;

    fn queue(&mut self) -> &mut CompletionQueue;
}

/// Polls until there is something, at most for `timeout`: it spins or, if the queue has a channel, sleeps.
#[inline(never)]
pub(super) fn wait<P: Polled>(on: &mut P, timeout: Duration) -> Result<P::Done> {
    let start = Instant::now();
    let mut armed = false;
    loop {
        if let Some(done) = on.poll_once()? {
            return Ok(done);
        }
        let cq = on.queue();
        if cq.channel().is_some() && !armed {
            // What completed before arming causes no event, so the queue has to be looked at once more.
            cq.arm(false)?;
            armed = true;
            continue;
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(Error::Timeout { waited: timeout });
        }
        match cq.channel() {
            // Events of other queues do not count, should the channel be shared with any.
            Some(channel) => armed = channel.wait(left)? != Some(cq.id()),
            None => std::hint::spin_loop(),
        }
    }
}
