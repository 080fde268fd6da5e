//! The steps of a random run, its final fault and its device.

use proptest::prelude::*;

use crate::support::lab::Mode;

#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    Send,
    SendImm,
    SendInvalidate,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    Inline,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Post,
    Drop,
    Forget,
    Panic,
}

/// A step of the random run. `peer` selects the endpoint.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Posts with `send`, `write` or `read` if there is a function for it.
    Post {
        verb: Verb,
        signaled: bool,
    },
    Batch {
        work: Vec<(Verb, bool)>,
        end: End,
    },
    Receive {
        peer: bool,
    },
    Foreign {
        peer: bool,
    },
    Take {
        peer: bool,
        panic: bool,
    },
    Arm {
        peer: bool,
    },
    Refuse,
    PollFails {
        peer: bool,
    },
    /// Waits for messages, and releases the completions that are held back.
    Release,
}

fn verb() -> impl Strategy<Value = Verb> {
    use Verb::*;
    prop::sample::select(
        &[Send, Send, Send, SendImm, SendInvalidate, Write, WriteImm, Read, FetchAdd, Inline, Inline][..],
    )
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let end = prop::sample::select(&[End::Post, End::Post, End::Drop, End::Forget, End::Panic][..]);
    prop_oneof![
        6 => (verb(), any::<bool>()).prop_map(|(verb, signaled)| Step::Post { verb, signaled }),
        3 => (prop::collection::vec((verb(), any::<bool>()), 0..5), end).prop_map(|(work, end)| Step::Batch { work, end }),
        4 => prop::bool::weighted(0.7).prop_map(|peer| Step::Receive { peer }),
        1 => any::<bool>().prop_map(|peer| Step::Foreign { peer }),
        8 => (any::<bool>(), prop::bool::weighted(0.2)).prop_map(|(peer, panic)| Step::Take { peer, panic }),
        2 => any::<bool>().prop_map(|peer| Step::Arm { peer }),
        1 => Just(Step::Refuse),
        1 => any::<bool>().prop_map(|peer| Step::PollFails { peer }),
        2 => Just(Step::Release),
    ]
}

/// The final fault of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum FinalFault {
    None,
    Break,
    /// A failed posting whose result the provider does not report.
    Doubt {
        taken: bool,
    },
}

pub(super) const FAULTS: [FinalFault; 4] =
    [FinalFault::None, FinalFault::Break, FinalFault::Doubt { taken: false }, FinalFault::Doubt { taken: true }];

/// The device and the endpoints of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) mode: Mode,
    /// Whether the interfaces of the endpoints are fixed at compile time.
    pub(super) fixed: bool,
    pub(super) depth: u32,
    pub(super) most_pending: u32,
    pub(super) late: bool,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Plain,
    /// The device reports the vendor of SoftRoCE, so the library works around its faults.
    Rxe,
    ShortMessages,
    Timestamps,
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Rxe, Kind::ShortMessages, Kind::Timestamps];

pub(super) fn setup() -> impl Strategy<Value = Setup> {
    let mode = (any::<bool>(), any::<bool>()).prop_map(|(classic_qp, classic_cq)| Mode { classic_qp, classic_cq });
    let depths = (1_u32..9, prop_oneof![Just(0), 1_u32..6]);
    let kind = prop::sample::select(&KINDS[..]);
    (mode, any::<bool>(), depths, any::<bool>(), kind).prop_map(|(mode, fixed, (depth, most_pending), late, kind)| {
        Setup { mode, fixed, depth, most_pending, late, kind }
    })
}
