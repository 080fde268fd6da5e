//! Running where there is no RDMA device.

use std::sync::Once;

/// Takes soft0 where there is no other device, and says so, or where it is asked for: by `device`, or by `RDMA_DEVICE`. This has to
/// come before the first verb.
pub(crate) fn or_soft(device: Option<&str>) {
    let wish = device.map(str::to_owned).or_else(|| std::env::var("RDMA_DEVICE").ok());
    let is_asked_for = wish.is_some_and(|name| name.starts_with("soft"));
    if rdma_safe::soft::install_for(device) && !is_asked_for {
        static SAID: Once = Once::new();
        SAID.call_once(|| eprintln!("no RDMA device here: running on soft0, the software RNIC of this library"));
    }
}
