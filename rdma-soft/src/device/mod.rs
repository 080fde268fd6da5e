//! The device: one to a process, behind one lock.
//!
//! Whoever posts or polls moves it on in its own thread: there is no hand-over on the fast path. A thread of its own ([`server`])
//! serves peers, and timers, while nobody polls.

mod ack_delay;
mod acknowledged;
mod blocking_wait;
mod cancel;
mod channel;
mod core;
mod cq;
mod direct;
mod epoll;
mod events;
mod host;
#[cfg(test)]
mod hostile;
mod keys;
mod memory;
mod modify;
mod net_address;
mod outgoing;
mod polling;
mod qp;
mod queues;
mod schedule;
mod server;
mod setup;
mod signal;
mod slab;
mod state;
pub(crate) mod traffic;
mod wakeups;

pub(crate) use self::core::{Core, Device, Locked, device, setup_error};
pub(crate) use cancel::Cancel;
pub(crate) use channel::{Channel, ChannelFds};
pub(crate) use cq::{Armed, Completions, Cq, Overrun};
pub(crate) use events::Context;
pub(crate) use host::Identity;
pub(crate) use keys::{Binding, Registration};
pub(crate) use net_address::{Destination, address, gid, group_gid};
pub(crate) use qp::{PKEY, Qp};
pub(crate) use queues::{Job, ReceiveQueue, Srq, Task};
pub(crate) use signal::{Signal, wait};
