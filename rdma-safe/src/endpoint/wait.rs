//! Waiting for completed work.

use std::time::{Duration, Instant};

use crate::{CompletionQueue, Error, PollError, Result};

/// An object with a completion queue that it polls.
pub(super) trait Waitable {
    type Done;

    fn poll_once(&mut self) -> Result<Option<Self::Done>, PollError>;

    fn queue(&mut self) -> &mut CompletionQueue;

    /// Checks peers if it is time, after a poll that found nothing. Returns the time of the next check.
    ///
    /// That time is past if the next poll returns a result.
    fn check_peers(&mut self, now: Instant) -> Option<Instant>;

    /// Why no completion can arrive any more.
    fn ended(&self) -> Option<Error>;
}

/// Polls until there is a result, for `timeout` at most. Spins, or sleeps if the queue has a channel.
#[inline(never)]
pub(super) fn wait<P: Waitable>(waitable: &mut P, timeout: Duration) -> Result<P::Done> {
    let start = Instant::now();
    let mut armed = false;
    loop {
        if let Some(done) = waitable.poll_once()? {
            return Ok(done);
        }
        if let Some(error) = waitable.ended() {
            return Err(error);
        }
        let now = Instant::now();
        let next_check = waitable.check_peers(now);
        let cq = waitable.queue();
        if cq.channel().is_some() && !armed {
            // Completions from before arming raise no event, so poll once more.
            cq.arm(false)?;
            armed = true;
            continue;
        }
        let left = timeout.saturating_sub(now.saturating_duration_since(start));
        if left.is_zero() {
            return Err(Error::Timeout { waited: timeout });
        }
        let before_check = next_check.map_or(left, |check| left.min(check.saturating_duration_since(now)));
        match cq.channel() {
            // Ignores events of other queues that share the channel.
            Some(channel) => armed = channel.wait(before_check)? != Some(cq.id()),
            None => std::hint::spin_loop(),
        }
    }
}
