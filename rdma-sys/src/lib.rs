//! The C ABI of RDMA verbs: the types and constants of rdma-core's headers, the functions of libibverbs and librdmacm,
//! and the `static inline` functions that are in neither library.
//!
//! The crate needs neither rdma-core nor libclang to build, and links neither library. [`verbs`] and [`rdmacm`] find
//! them while the program runs; where they are missing, a [`LoadError`] says what to install.
//!
//! - Types and constants have their C names. An enum is a newtype of an integer, because libraries return values that
//!   older headers do not know; `ibv_qp_state(9)` is a value like any other.
//! - Exported functions are fields of [`Verbs`] and [`RdmaCm`]. Those of rdma-core 44 and before are always there,
//!   newer ones are optional.
//! - Inlines, and the macros that C code calls like functions, are functions of this crate: [`ibv_post_send`],
//!   [`ibv_wr_start`], [`ibv_query_port`]. They dispatch through the objects, as in C, and never touch the tables, unless
//!   the C original calls an exported function.
//! - [`Zeroed`] clears a structure without `unsafe`.
//! - [`dma`] copies memory that a device may access at the same time.
//!
//! ```no_run
//! use std::ffi::CStr;
//!
//! use rdma_sys::{IBV_PORT_ACTIVE, Zeroed, ibv_port_attr, ibv_query_port, verbs};
//!
//! let verbs = verbs()?;
//! // SAFETY: the list ends with null, and its devices exist until it is freed; the context exists until it is closed.
//! unsafe {
//!     let list = (verbs.ibv_get_device_list)(std::ptr::null_mut());
//!     if list.is_null() || (*list).is_null() {
//!         return Err("no RDMA device".into());
//!     }
//!     let name = CStr::from_ptr((verbs.ibv_get_device_name)(*list)).to_owned();
//!     let context = (verbs.ibv_open_device)(*list);
//!     (verbs.ibv_free_device_list)(list);
//!     if context.is_null() {
//!         return Err(std::io::Error::last_os_error().into());
//!     }
//!
//!     let mut port = ibv_port_attr::zeroed();
//!     let errno = ibv_query_port(context, 1, &mut port);
//!     println!("{name:?}: errno {errno}, active: {}", port.state == IBV_PORT_ACTIVE);
//!     (verbs.ibv_close_device)(context);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Another library
//!
//! `RDMA_SYS_LIBIBVERBS` and `RDMA_SYS_LIBRDMACM` name libraries to load instead. (LD_PRELOAD does not reach a library
//! that is opened by name, unless the preloaded one has that SONAME.) A provider that is part of the program registers
//! itself with [`install_verbs`] and [`install_rdmacm`] before the first verb. [`Verbs::load_from`] loads a library of
//! the caller's choice into a table of its own.
//!
//! # Platforms
//!
//! 64-bit Linux. The layouts are asserted at compile time.

#![deny(missing_docs)]
// Names are those of C.
#![allow(non_camel_case_types)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("rdma-sys has the layouts of 64-bit Linux only");

#[allow(missing_docs, missing_debug_implementations, non_snake_case)]
mod bindings;
pub mod dma;
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

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
pub struct ReadmeExamples;
