//! Adapters of streams for HTTP libraries.

pub mod hyper;
mod incoming;
#[cfg(feature = "tonic")]
pub mod tonic;

pub use incoming::Incoming;
