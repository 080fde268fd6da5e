//! The C ABI of RDMA verbs.
#![deny(missing_docs)]
// Names are those of C.
#![allow(non_camel_case_types)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("rdma-sys has the layouts of 64-bit Linux only");

#[allow(missing_docs, missing_debug_implementations, non_snake_case)]
mod bindings;
mod inline;
mod load;
mod macros;
mod newer;
mod symbols;

pub use bindings::*;
pub use inline::*;
pub use load::{AlreadyLoaded, LoadError, install_rdmacm, install_verbs, rdmacm, verbs};
pub use macros::Zeroed;
pub use newer::*;
pub use symbols::{RdmaCm, Verbs};
