//! A software RNIC in user space that speaks RoCEv2.
//!
//! So far its packets, [`wire`], and what connections do with them, [`transport`], and a bad network, [`faults`].

#![forbid(unsafe_code)]

pub mod faults;
pub mod transport;
pub mod wire;
