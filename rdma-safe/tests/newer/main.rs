//! Functions of newer libraries, over a provider in this process.
//!
//! rdma-safe detects the release of rdma-core by these functions, so a library has either all of them, as here, or none, as in
//! the tests in `provider`.

#[path = "../provider/fake/mod.rs"]
#[allow(unused_imports)] // The tests in `provider` use the rest.
mod fake;
#[path = "../provider/support.rs"]
#[allow(dead_code, unused_imports, unused_macros)] // As above.
mod support;

mod dma_handles;
mod provider_memory;
mod releases;

/// Whether the library has the functions of rdma-core 59 and 64. rdma-safe detects the release by them.
const NEWER_LIBRARY: bool = true;
