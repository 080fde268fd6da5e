//! Whether a port can play.

use std::error::Error;

use rdma_safe::{Context, LinkLayer, Mtu, PortAttributes, PortState};

/// Refuses what would fail later, or only after a timeout: messages of more than `max` bytes, and a path of this MTU, by port
/// `number`.
pub(crate) fn check(
    context: &Context,
    number: u8,
    port: &PortAttributes,
    size: u32,
    max: u32,
    mtu: Option<Mtu>,
) -> Result<(), Box<dyn Error>> {
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
