//! A software RNIC in user space that speaks RoCEv2.
//!
//! [`install`] gives a program the device `soft0` in place of libibverbs. [`set_faults`] injects packet loss, reordering and other
//! faults. [`objects`] counts open objects, and [`counters`] counts traffic. The repository's docs/soft.md describes the device.
//!
//! The hidden modules are for the tests of this crate. They change in any release.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
#[doc(hidden)]
pub mod abi;
#[allow(unsafe_code)]
pub mod check;
#[doc(hidden)]
pub mod cm;
mod control;
mod counters;
mod device;
pub mod faults;
#[cfg(miri)]
mod miri;
#[allow(unsafe_code)]
mod net;
mod random;
#[doc(hidden)]
pub mod transport;
#[doc(hidden)]
pub mod wire;

pub use abi::install;
pub use control::{Objects, objects, remove, set_faults, setup_error};
pub use counters::{PortCounters, counters};
pub use device::packets_of_thread;

/// Runs the example of the README as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
