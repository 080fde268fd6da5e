//! The device that a program runs on.

#[path = "soft.rs"]
mod soft;

use rdma_safe::{Device, Result};

/// That of this name, or the first one; soft0 where there is no other.
pub(crate) fn find(name: Option<&str>) -> Result<Device> {
    soft::or_soft(name);
    match name {
        Some(name) => Device::by_name(name),
        None => Device::first(),
    }
}
