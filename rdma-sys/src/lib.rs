//! The C ABI of RDMA verbs: the types and constants of rdma-core's headers, the functions of libibverbs and librdmacm,
//! and the `static inline` functions that neither library exports.
//!
//! The crate needs neither rdma-core nor libclang to build, and links neither library. [`verbs`] and [`rdmacm`] load
//! them at run time. If one is missing, a [`LoadError`] says what to install.
//!
//! - Types and constants have their C names. An enum is a newtype of an integer, because libraries may return values
//!   that older headers do not know; `ibv_qp_state(9)` is a valid value.
//! - Exported functions are fields of [`Verbs`] and [`RdmaCm`]. Functions newer than rdma-core 44 are optional.
//! - Inline functions, and function-like macros of C, are functions of this crate: [`ibv_post_send`], [`ibv_wr_start`],
//!   [`ibv_query_port`]. They dispatch through the objects, as in C. They use the tables only where the C original
//!   calls an exported function.
//! - [`Zeroed`] creates zeroed structures without `unsafe`.
//! - [`dma`] copies memory that a device may access at the same time.
//!
//! ```no_run
//! use std::ffi::CStr;
//!
//! use rdma_sys::{IBV_PORT_ACTIVE, Zeroed, ibv_port_attr, ibv_query_port, verbs};
//!
//! let verbs = verbs()?;
//! // SAFETY: the list ends with null, and its devices exist until it is freed. The context exists until it is closed.
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
//! `RDMA_SYS_LIBIBVERBS` and `RDMA_SYS_LIBRDMACM` name libraries to load instead. (LD_PRELOAD has no effect on a
//! library that is opened by name, unless the preloaded one has that SONAME.) A provider that is part of the program
//! calls [`install_verbs`] and [`install_rdmacm`] before the first verb. [`Verbs::load_from`] loads another library
//! into a separate table.
//!
//! # Platforms
//!
//! 64-bit Linux. Layouts are asserted at compile time.

#![deny(missing_docs)]
// Types have their C names.
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
