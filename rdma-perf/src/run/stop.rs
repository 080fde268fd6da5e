//! When a run ends.

use crate::clock::Clock;
use crate::plan::{Length, Plan, WarmUp};

/// When to stop posting.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    /// After this many messages per queue pair.
    Messages(u64),
    /// At this time in ticks, or shortly after, since the last message must be signaled.
    At(u64),
}

/// Functions that compute when the warm-up, if there is one, and the measured run end. Times count from the call of the
/// function.
pub(super) fn stops(plan: &Plan) -> (Option<impl Fn(Clock) -> Stop>, impl Fn(Clock) -> Stop) {
    let at = |clock: Clock, time| Stop::At(clock.now() + clock.ticks(time));
    let (warm_up, length) = (plan.warm_up, plan.length);
    let has_warm_up = !matches!(warm_up, WarmUp::Iterations(0) | WarmUp::Time(std::time::Duration::ZERO));
    let warm_up = has_warm_up.then_some(move |clock| match warm_up {
        WarmUp::Iterations(messages) => Stop::Messages(messages),
        WarmUp::Time(time) => at(clock, time),
    });
    let length = move |clock| match length {
        Length::Iterations(messages) => Stop::Messages(messages),
        Length::Time(time) => at(clock, time),
    };
    (warm_up, length)
}
