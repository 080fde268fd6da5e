//! PCI Express: whether a card uses all its lanes at full speed.

use super::finding::{Finding, Topic};
use crate::host::files::HostFiles;

pub(crate) fn check(host: &HostFiles, devices: &[String]) -> Vec<Finding> {
    devices.iter().filter(|device| !host.is_software(device)).filter_map(|device| link(host, device)).collect()
}

/// `None` for a device on another bus, or below a hypervisor that hides the link.
fn link(host: &HostFiles, device: &str) -> Option<Finding> {
    let read = |name: &str| host.text(&format!("/sys/class/infiniband/{device}/device/{name}")).ok();
    let (width, max_width) = (read("current_link_width")?, read("max_link_width")?);
    let (speed, max_speed) = (read("current_link_speed")?, read("max_link_speed")?);
    let lanes = |text: &str| text.parse::<u32>().ok().filter(|lanes| *lanes > 0);
    // The format is `16.0 GT/s PCIe`.
    let transfers = |text: &str| text.split(' ').next()?.parse::<f64>().ok();
    let (now, could) = (lanes(&width)?, lanes(&max_width)?);
    let (rate, max_rate) = (transfers(&speed)?, transfers(&max_speed)?);
    if now >= could && rate >= max_rate {
        return Some(Topic::Pcie.ok(format!("{device}: x{now} at {rate} GT/s, the card's maximum")));
    }
    let finding = Topic::Pcie.warning(format!("{device}: x{now} at {rate} GT/s, of x{could} at {max_rate} GT/s"));
    // The encoding is 128b/130b from generation 3 on, and 8b/10b before.
    let code = if rate > 5.0 { 128.0 / 130.0 } else { 0.8 };
    let why = format!(
        "This limits each direction to {:.0} Gb/s, PCI Express headers included.",
        rate * code * f64::from(now)
    );
    Some(
        finding
            .why(why)
            .fix("another slot, or a slot's speed and bifurcation in the firmware set-up; lspci -vv shows LnkSta"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    #[test]
    fn half_the_lanes_or_speed_is_a_warning() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        let set = |width: &str, speed: &str| {
            let device = "/sys/class/infiniband/mlx5_0/device";
            scratch.write(&format!("{device}/current_link_width"), width);
            scratch.write(&format!("{device}/max_link_width"), "16\n");
            scratch.write(&format!("{device}/current_link_speed"), speed);
            scratch.write(&format!("{device}/max_link_speed"), "16.0 GT/s PCIe\n");
            check(&host, &["mlx5_0".into(), "rxe0".into()])
        };
        let findings = set("8\n", "16.0 GT/s PCIe\n");
        assert_eq!(findings[0].what, "mlx5_0: x8 at 16 GT/s, of x16 at 16 GT/s");
        assert!(findings[0].why.as_ref().unwrap().contains("126 Gb/s"), "{findings:?}");
        assert_eq!(set("16\n", "8.0 GT/s PCIe\n")[0].level, Level::Warning);
        assert_eq!(set("16\n", "16.0 GT/s PCIe\n")[0].level, Level::Ok);
        assert!(set("0\n", "Unknown\n").is_empty(), "a hypervisor hides the link");
    }
}
