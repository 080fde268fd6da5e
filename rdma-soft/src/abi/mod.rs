//! The device as libibverbs: its functions, by their C names.
//!
//! They get raw pointers and trust their caller with what the manual page of the verb asks for, as a C library does. A
//! program reaches them through the table that [`install`] gives to `rdma_sys`, or through a shared object that exports
//! them under the same names.
//!
//! Where a SAFETY names what is *the caller's*, it rests on that: an object is one that was given out here and is not destroyed
//! before the call returns, with what it was made from; a structure, an array or a string is there, as long as is said, set where
//! it is read, and nobody else's while it is written.

// The contract of each function is that of the verb.
#![allow(clippy::missing_safety_doc)]

mod absent;
mod ah;
mod builder;
mod cm;
mod context;
mod cq;
mod device;
mod events;
mod fill;
mod fork;
mod gids;
mod limits;
mod list;
mod lock;
mod memory;
mod names;
mod post;
mod qp;
mod qp_object;
mod query;
mod rates;
pub(crate) mod refuse;
mod srq;
mod sysfs;
mod table;

pub use absent::*;
pub use ah::*;
pub use cq::*;
pub use device::*;
pub use events::*;
pub use fork::*;
pub use memory::*;
pub use names::*;
pub use qp::*;
pub use query::*;
pub use rates::*;
pub use srq::*;
pub use sysfs::*;
pub use table::install;
