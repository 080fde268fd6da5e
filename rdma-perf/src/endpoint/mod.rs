//! The verbs objects of one thread: queue pairs, completion queues and registered memory.

pub(crate) mod cm;
pub(crate) mod credits;
mod datagram;
pub(crate) mod memory;
mod queue;
pub(crate) mod worker;
