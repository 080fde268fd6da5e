//! Checks of the port.

use rdma_safe::port::PortAttributes;
use rdma_safe::{Context, LinkLayer, Mtu, PortState};

use crate::Result;

/// Rejects what would fail later or only by a timeout: an inactive port, messages longer than `max`, and a path MTU that the port
/// does not have.
pub(super) fn check(
    context: &Context,
    number: u8,
    port: &PortAttributes,
    size: u32,
    max: u32,
    mtu: Option<Mtu>,
) -> Result<()> {
    let name = format!("{} port {number}", context.device_name());
    if !matches!(port.state(), PortState::ACTIVE | PortState::ACTIVE_DEFER) {
        let state = port.state();
        return Err(format!("{name} is not active ({state}): check the cable, `ip link`, or the subnet manager").into());
    }
    if port.link_layer() != LinkLayer::ETHERNET && port.lid() == 0 {
        return Err(format!("{name} has no LID: a subnet manager (opensm) has to assign one").into());
    }
    if size > max {
        return Err(format!("a message of {size} bytes is too long for {name}: at most {max}; see --size").into());
    }
    let active = port.active_mtu();
    if let Some(mtu) = mtu.filter(|mtu| *mtu > active) {
        return Err(format!(
            "a path MTU of {mtu} bytes is too large for {name}, whose active MTU is {active}; see --mtu"
        )
        .into());
    }
    Ok(())
}
