//! Choosing the device that an example runs on.

use std::sync::Once;

use rdma_safe::{Device, Error, Result, devices};

/// Finds the device `name`, or the first one; soft0 if there is no other.
pub fn find(name: Option<&str>) -> Result<Device> {
    install_soft(name);
    match name {
        Some(name) => Device::by_name(name),
        None => Device::first(),
    }
}

/// Finds the device `name`, or all devices; soft0 if there is no other.
pub fn find_all(name: Option<&str>) -> Result<Vec<Device>> {
    install_soft(name);
    let found = match name {
        Some(name) => vec![Device::by_name(name)?],
        None => devices()?,
    };
    if found.is_empty() { Err(Error::NoDevice) } else { Ok(found) }
}

/// Installs soft0 if there is no other device, or if `name` or `RDMA_DEVICE` asks for it. Call it before the first verb.
///
/// Prints a line if soft0 runs in place of a device that was not asked for.
pub fn install_soft(name: Option<&str>) {
    let requested = name.map(str::to_owned).or_else(|| std::env::var("RDMA_DEVICE").ok());
    let is_soft_requested = requested.is_some_and(|name| name.starts_with("soft"));
    if rdma_safe::soft::install_for(name) && !is_soft_requested {
        static PRINTED: Once = Once::new();
        PRINTED.call_once(|| eprintln!("no RDMA device here: running on soft0, the software RNIC of this library"));
    }
}
