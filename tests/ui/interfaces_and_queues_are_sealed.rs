//! Which functions of the provider are called, and on which object, depends on these traits. So they are sealed.

use rdma_safe::flow::FlowTarget;
use rdma_safe::interface::{Any, Interface, Known};
use rdma_safe::mw::WindowType;
use rdma_safe::post::ReceiveQueue;

fn main() {}

struct Mine;

impl Interface for Mine {} //~ E0277 Interface

impl Known for Any {} //~ E0117

impl ReceiveQueue for Mine {} //~ E0277 ReceiveQueue

impl WindowType for Mine {} //~ E0277 WindowType

impl FlowTarget for Mine {} //~ E0277 Target
