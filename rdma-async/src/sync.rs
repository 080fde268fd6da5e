//! The primitives of synchronisation of the driver. The model checker replaces this module.

pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
