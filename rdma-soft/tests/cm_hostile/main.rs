//! Hostile peers of the connection manager: mutated messages, and floods of requests.
//!
//! `RDMA_TEST_SCALE=full` sends 10 million mutated messages. `RDMA_TEST_SCALE=soak` sends more, and floods for longer.

#[path = "../cm_support/mod.rs"]
#[allow(dead_code)]
mod support;

mod flood;
mod heap;
mod mutate;
