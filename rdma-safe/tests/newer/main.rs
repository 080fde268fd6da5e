//! What newer libraries have, over a provider that runs inside this process: rdma-safe tells releases of rdma-core apart by these
//! functions, so that a program has either all of them or, as the tests of `provider` have, none.

#[path = "../provider/fake/mod.rs"]
#[allow(unused_imports)] // Shared with the tests of behaviour, which use more of it.
mod fake;
#[path = "../provider/support.rs"]
#[allow(dead_code, unused_imports, unused_macros)] // As above.
mod support;

mod dma_handles;
mod provider_memory;
mod releases;

/// Whether the library has what came with rdma-core 59 and 64, by which rdma-safe tells releases apart.
const NEWER_LIBRARY: bool = true;
