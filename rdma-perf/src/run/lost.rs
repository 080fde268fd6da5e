//! Messages lost by an unreliable transport.

use anyhow::{Error, Result};

use super::pingpong::Arrivals;
use super::wait::PeerTimeout;
use crate::endpoint::memory::LaneMemory;
use crate::plan::Plan;

#[derive(Debug, thiserror::Error)]
#[error(
    "{} messages were sent over {over}, and {received} of them have arrived: an unreliable transport does not retransmit",
    if *.sent == u64::MAX { "an unknown number of".into() } else { .sent.to_string() }
)]
struct Lost {
    over: &'static str,
    /// [`u64::MAX`] if unknown.
    sent: u64,
    received: u64,
}

/// Adds the numbers of sent and arrived messages to the error of a wait that timed out.
#[cold]
pub(super) fn loss_error(error: Error, plan: &Plan, sent: u64, received: u64) -> Error {
    if !error.is::<PeerTimeout>() {
        return error;
    }
    error.context(Lost { over: plan.transport.name(), sent, received })
}

/// Counts messages, to report how many were lost.
pub(super) struct CountLosses<'p, A> {
    pub(super) plan: &'p Plan,
    pub(super) arrivals: A,
    /// Whether this end sends a message before it waits for one.
    pub(super) sends_first: bool,
}

impl<A: Arrivals> Arrivals for CountLosses<'_, A> {
    #[inline]
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64) {
        self.arrivals.mark(memory, size, message);
    }

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let waited = self.arrivals.wait(memory, size, message, over);
        // One message is in flight at a time. The answering end does not know how many the other end has sent.
        let sent = if self.sends_first { message + 1 } else { u64::MAX };
        waited.map_err(|error| loss_error(error, self.plan, sent, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::Interrupted;
    use crate::testing::sample;

    #[test]
    fn lost_messages_are_counted() {
        let plan = sample::plan("send bw h -c UC");
        let timed_out = || Error::from(PeerTimeout::new("message from the peer", 10.0));
        let text = format!("{:#}", loss_error(timed_out(), &plan, 1000, 993));
        assert!(text.starts_with("1000 messages were sent over UC, and 993 of them have arrived"), "{text}");
        assert!(text.contains("unreliable") && text.contains("no message from the peer for 10 s"), "{text}");
        assert!(
            loss_error(timed_out(), &plan, u64::MAX, 5)
                .to_string()
                .starts_with("an unknown number of messages were sent")
        );
        let ended = loss_error(Interrupted.into(), &plan, 2, 1);
        assert!(ended.is::<Interrupted>() && ended.to_string() == "interrupted");
    }
}
