//! The provider follows the pointers of a payload, so `Payload` and `Scatter` are sealed.

use rdma_safe::post::{Payload, Scatter};

fn main() {}

struct Mine;

impl Payload for Mine {} //~ E0277 Payload

impl Scatter for Mine {} //~ E0277 Payload
