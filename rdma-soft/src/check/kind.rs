//! Kinds of reports.

use std::fmt;
use std::str::FromStr;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)+) => {
        /// What a [`Report`](super::Report) is about. docs/soft.md says what to change for each kind.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Kind {
            $($(#[$doc])* $kind,)+
        }

        impl Kind {
            /// All kinds.
            pub const ALL: &'static [Kind] = &[$(Kind::$kind),+];

            /// Name in reports and in `suppress=`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Kind::$kind => $name,)+
                }
            }
        }
    };
}

kinds! {
    /// The data of a send, a write or a datagram changed before its completion.
    SendChanged = "send-changed",
    /// The program wrote to memory that the device fills: a receive, or the target of a read or an atomic operation.
    ReceiveWritten = "receive-written",
    /// Two work requests in flight use the same memory, and at least one of them writes to it.
    Overlap = "overlap",
    /// A region was deregistered or changed while work in flight used it.
    Deregistered = "deregistered",
    /// Registered memory was unmapped or remapped before the device accessed it.
    Unmapped = "unmapped",
    /// A key belongs to no region any more.
    StaleKey = "stale-key",
    /// A key never belonged to a region of this process, or to a window that does not allow the access.
    UnknownKey = "unknown-key",
    /// The range is not inside the region of its key.
    KeyRange = "key-range",
    /// The region of a key is in another protection domain than the queue pair.
    KeyDomain = "key-domain",
    /// The region of a key does not allow the access.
    KeyAccess = "key-access",
    /// A completion queue has fewer entries than the work in flight can complete.
    CqCanOverrun = "cq-can-overrun",
    /// A completion queue has overrun.
    CqOverrun = "cq-overrun",
    /// A send queue is full of unsignaled work, so no completion will say that it has room.
    UnsignaledFull = "unsignaled-full",
    /// A thread sleeps on a completion channel while completions wait, and no queue of the channel is armed.
    LostWakeup = "lost-wakeup",
    /// Events were not acknowledged when their object was destroyed, or more were acknowledged than taken.
    UnackedEvents = "unacked-events",
    /// A message found no receive.
    ReceiverNotReady = "receiver-not-ready",
    /// A message was longer than its receive.
    ReceiveTooSmall = "receive-too-small",
    /// Objects were never destroyed.
    Leaked = "leaked",
    /// A child process used the device of its parent.
    UsedAfterFork = "used-after-fork",
    /// More memory is registered than `ulimit -l` allows an unprivileged process with an RNIC.
    Memlock = "memlock",
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Kind::ALL.iter().copied().find(|kind| kind.name() == name).ok_or(())
    }
}
