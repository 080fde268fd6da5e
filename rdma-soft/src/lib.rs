//! A software RNIC in user space that speaks RoCEv2.
//!
//! [`install`] gives a program the device `soft0` in place of libibverbs, and [`set_faults`] gives it a bad network. [`objects`]
//! counts the program's open objects, and [`counters`] its traffic. [`wire`] has the packets and [`transport`] the protocols, both
//! without sockets, clocks or memory. The repository's docs/soft.md describes the device.

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
pub use counters::{PortCounters, counters};
