//! A test from its first word to its last, at each end.

pub(crate) mod client;
mod crew;
mod device;
pub(crate) mod server;

pub(crate) use device::Opened;
