//! The library follows the pointers that a payload hands out: a payload of safe code could hand out any.

use rdma_safe::{Scatter, Payload};

fn main() {}

struct Mine;

impl Payload for Mine {}

impl Scatter for Mine {}
