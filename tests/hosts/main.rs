//! Tests between two connected machines. Each test runs on both machines at the same time.
//!
//! `cargo xtask softroce --hosts 2` provides the machines and sets these variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `RDMA_HOST` | number of this machine: 0 or 1 |
//! | `RDMA_SELF`, `RDMA_PEER` | address of this machine, and of the other one |
//!
//! `cargo xtask test --only hosts` also sets `RDMA_SOFT_LIBRARY`, the path of librdma_soft.so, for C programs. Without the
//! variables, the tests are skipped.

mod barrier;
mod capture;
mod cat;
mod cm;
mod file_transfer;
mod files;
mod lab;
mod network;
#[path = "../device/support/program.rs"]
#[allow(dead_code, reason = "the device tests use the rest")]
mod program;
mod soft;

/// Prints why a test is skipped. Fails the test if there are two hosts, where no test may be skipped.
fn skip<T>(reason: &str) -> Option<T> {
    assert!(std::env::var_os("RDMA_HOST").is_none(), "{reason}");
    println!("skipped: {reason}");
    None
}
