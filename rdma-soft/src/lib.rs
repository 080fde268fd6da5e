//! A software RNIC in user space that speaks RoCEv2.
//!
//! So far its packets: [`wire`].

#![forbid(unsafe_code)]

pub mod wire;
