//! A software RNIC in user space that speaks RoCEv2.
//!
//! So far its packets, [`wire`], and what connections do with them, [`transport`], and a bad network, [`faults`].

#![deny(unsafe_code)]

#[allow(unsafe_code)]
#[doc(hidden)]
pub mod abi;
mod control;
mod device;
pub mod faults;
#[allow(unsafe_code)]
mod net;
pub mod transport;
pub mod wire;

pub use abi::install;
pub use control::{Objects, objects, set_faults};
