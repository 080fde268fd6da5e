//! Results of operations, which the model does not have.

pub(crate) const BATCH: usize = 32;

pub(crate) enum Done {}
