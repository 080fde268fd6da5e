//! What the crate is without input and output: operations in flight, and tasks that wait in order.

mod slots;
mod waiters;

pub(crate) use slots::{Finished, Slot, Slots};
pub(crate) use waiters::{Ticket, Waiters};
