//! Tests between two machines joined by a wire, which `cargo xtask softroce --hosts 2` makes: the same test runs on both at a time,
//! and is one end or the other.
//!
//! | variable | meaning |
//! |---|---|
//! | `RDMA_HOST` | which of the two this is: 0 or 1 |
//! | `RDMA_SELF`, `RDMA_PEER` | its address, and that of the other |
//! | `RDMA_SOFT_LIBRARY` | librdma_soft.so, for programs in C |
//!
//! Without them they are skipped.

mod capture;
mod file_transfer;
mod meeting;
mod network;
#[path = "../device/support/program.rs"]
#[allow(dead_code, reason = "the tests on a device use more of it")]
mod program;
mod soft;

/// Says why a test is skipped; fails it where there are two hosts and nothing may be missing.
fn skip<T>(reason: &str) -> Option<T> {
    assert!(std::env::var_os("RDMA_HOST").is_none(), "{reason}");
    println!("skipped: {reason}");
    None
}
