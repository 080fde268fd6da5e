//! Messages that do not arrive, where nothing is sent again.

use anyhow::{Error, Result};

use super::latency::Arrivals;
use super::wait::Silence;
use crate::plan::Plan;
use crate::worker::LaneMemory;

#[derive(Debug, thiserror::Error)]
#[error(
    "{} messages were sent over {over}, and {received} of them have arrived: what an unreliable transport loses is not sent again",
    if *.sent == u64::MAX { "more".into() } else { .sent.to_string() }
)]
struct Lost {
    over: &'static str,
    /// [`u64::MAX`] when nobody has said.
    sent: u64,
    received: u64,
}

/// Says of an end that has waited in vain what was sent to it, or by it, and what has arrived.
#[cold]
pub(super) fn lost(error: Error, plan: &Plan, sent: u64, received: u64) -> Error {
    if !error.is::<Silence>() {
        return error;
    }
    error.context(Lost { over: plan.transport.name(), sent, received })
}

/// Counts what comes and goes, to be able to say.
pub(super) struct Counted<'p, A> {
    pub(super) plan: &'p Plan,
    pub(super) arrivals: A,
    /// This end sends a message before it waits for one, and not after.
    pub(super) begins: bool,
}

impl<A: Arrivals> Arrivals for Counted<'_, A> {
    #[inline]
    fn mark(&mut self, memory: &LaneMemory, size: u64, message: u64) {
        self.arrivals.mark(memory, size, message);
    }

    #[inline]
    fn wait(&mut self, memory: &LaneMemory, size: u64, message: u64, over: impl Fn() -> bool) -> Result<bool> {
        let waited = self.arrivals.wait(memory, size, message, over);
        // One message is on its way at a time. Who answers does not know how many the other end has sent.
        let sent = if self.begins { message + 1 } else { u64::MAX };
        waited.map_err(|error| lost(error, self.plan, sent, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;
    use crate::run::Interrupted;

    #[test]
    fn what_is_lost_is_counted() {
        let plan = sample::plan("send bw h -c UC");
        let silence = || Error::from(Silence::new("message of the peer", 10.0));
        let text = format!("{:#}", lost(silence(), &plan, 1000, 993));
        assert!(text.starts_with("1000 messages were sent over UC, and 993 of them have arrived"), "{text}");
        assert!(text.contains("unreliable") && text.contains("no message of the peer for 10 s"), "{text}");
        assert!(lost(silence(), &plan, u64::MAX, 5).to_string().starts_with("more messages were sent"));
        let ended = lost(Interrupted.into(), &plan, 2, 1);
        assert!(ended.is::<Interrupted>() && ended.to_string() == "interrupted");
    }
}
