//! The functions of libibverbs, under their C names.
//!
//! They take raw pointers and trust the caller to keep the contract of the verb's manual page, as a C library does. A program calls
//! them through the table that [`install`] gives to `rdma_sys`, or through a shared object that exports them under the same names.
//!
//! `SAFETY` comments call an argument *valid* if that contract says so. A valid object was created by a function of this module.
//! Neither it nor any object that it was created from is destroyed before the call returns. A valid structure, array or string
//! exists in its whole length, is initialized where it is read, and nobody else accesses it while it is written.

// Each function has the safety contract of its verb.
#![allow(clippy::missing_safety_doc)]

mod ah;
mod cm;
mod context;
mod cq;
mod device;
pub(crate) mod errors;
mod events;
mod fill;
mod fork;
mod functions;
mod gids;
mod limits;
mod lock;
mod memory;
mod names;
mod post;
mod qp;
mod qp_object;
mod query;
mod rates;
mod srq;
mod sysfs;
mod table;
mod unsupported;
mod wr;

pub use ah::*;
pub use cm::*;
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
pub use table::{install, interpose};
pub use unsupported::*;
