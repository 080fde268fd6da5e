//! Helpers of the unit tests.

mod modules;
pub(crate) mod sample;
pub(crate) mod scratch;
