//! A software RNIC in user space that speaks RoCEv2.
//!
//! [`install`] gives a program the device `soft0` in place of libibverbs; [`set_faults`] gives it a bad network, and
//! [`objects`] counts what the program has open, and [`counters`] what it has sent and received. Below are packets, [`wire`], and what connections do with them, [`transport`],
//! without sockets, clocks or memory. The repository's docs/soft.md says what it can.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
#[doc(hidden)]
pub mod abi;
mod control;
mod counters;
mod device;
pub mod faults;
#[allow(unsafe_code)]
mod net;
pub mod transport;
pub mod wire;

pub use abi::install;
pub use control::{Objects, objects, set_faults, setup_error};
pub use counters::{Counters, counters};
