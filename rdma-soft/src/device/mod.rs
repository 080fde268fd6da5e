//! The device: one per process, behind one lock.
//!
//! A thread that posts or polls makes the device progress itself, without handing over to another thread. Some posts
//! [wait](deferral) for the next poll. The [`server`] thread serves peers and timers while no thread polls.
//!
//! The device uses the constants of rdma-sys's bindings and the structures `ibv_wc`, `ibv_sge`, `ibv_qp_cap` and `ibv_qp_attr`. So
//! it copies a completion to the program's array without a conversion. The device calls no C function of libibverbs. It knows the
//! C objects of the program only by address, to name them in events. Only [`abi`](crate::abi) accesses them.

mod ack_delay;
mod acknowledged;
mod blocking_wait;
mod cancel;
mod channel;
pub(crate) mod cma;
mod core;
mod cq;
mod deferral;
mod direct;
#[cfg_attr(miri, path = "epoll_of_miri.rs")]
mod epoll;
mod events;
mod host;
#[cfg(test)]
mod hostile;
mod keys;
mod leaks;
mod link;
mod lock;
mod mapped;
mod memory;
mod modify;
mod net_address;
pub(crate) mod observe;
mod outgoing;
mod poll_detector;
mod polling;
pub(crate) mod qp;
mod queues;
mod removal;
mod schedule;
mod server;
#[cfg(miri)]
pub(crate) mod server_of_miri;
mod setup;
mod signal;
mod slab;
pub(crate) mod state;
#[cfg(test)]
mod target;
pub(crate) mod traffic;
mod wakeups;

pub(crate) use self::core::Core;
pub(crate) use cancel::Cancel;
pub(crate) use channel::{Channel, ChannelFds};
pub(crate) use cq::{Armed, Completions, Cq, Overrun};
pub(crate) use events::Context;
pub(crate) use host::{Identity, Shared};
pub(crate) use keys::{Binding, Registration};
pub(crate) use leaks::{report_leaks_at_exit, report_leaks_of};
pub(crate) use lock::{Device, Locked, device, existing, open_errno, setup_error};
pub(crate) use net_address::{Destination, address, gid, group_gid};
pub use polling::packets_of_thread;
pub(crate) use qp::{PKEY, Qp};
pub(crate) use queues::{Job, ReceiveQueue, Srq, Task};
pub(crate) use removal::is_removed;
pub(crate) use server::{is_child, was_forked};
pub(crate) use signal::{Signal, wait};
