//! Both ends of a test: set-up, runs, and the connection over which they agree.

pub(crate) mod client;
pub(crate) mod connect;
mod control;
pub(crate) mod device;
pub(crate) mod server;
mod summary;
mod threads;
