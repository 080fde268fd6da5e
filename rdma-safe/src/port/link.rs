//! The link of a port: width, speed, physical state.

use std::fmt;

use crate::named::named;

named! {
    /// Physical state of a port, by its code in `PortInfo` of the InfiniBand specification.
    pub struct PhysicalState(u8) as "physical state" {
        /// Asleep.
        SLEEP = 1 => "Sleep",
        /// Polling: looking for the other end.
        POLLING = 2 => "Polling",
        /// Disabled.
        DISABLED = 3 => "Disabled",
        /// Training: negotiating parameters with the other end.
        TRAINING = 4 => "PortConfigurationTraining",
        /// Up.
        LINK_UP = 5 => "LinkUp",
        /// Recovering from errors.
        ERROR_RECOVERY = 6 => "LinkErrorRecovery",
        /// In a test of the physical layer.
        PHY_TEST = 7 => "PhyTest",
    }
}

/// Width of a link, as its code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct LinkWidth(pub u8);

impl LinkWidth {
    /// Number of lanes; `None` for an undefined code.
    #[must_use]
    pub fn lanes(self) -> Option<u32> {
        match self.0 {
            1 => Some(1),
            2 => Some(4),
            4 => Some(8),
            8 => Some(12),
            16 => Some(2),
            _ => None,
        }
    }
}

impl fmt::Display for LinkWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lanes() {
            Some(lanes) => write!(f, "{lanes}X"),
            None => write!(f, "link width {}", self.0),
        }
    }
}

impl fmt::Debug for LinkWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LinkWidth({}: {self})", self.0)
    }
}

named! {
    /// Speed per lane of a link, as its code.
    pub struct LinkSpeed(u32) as "link speed" {
        /// 2.5 Gbit/s.
        SDR = 1 => "SDR",
        /// 5 Gbit/s.
        DDR = 2 => "DDR",
        /// 10 Gbit/s.
        QDR = 4 => "QDR",
        /// 10 Gbit/s with more efficient coding.
        FDR10 = 8 => "FDR10",
        /// 14 Gbit/s.
        FDR = 16 => "FDR",
        /// 25 Gbit/s.
        EDR = 32 => "EDR",
        /// 50 Gbit/s.
        HDR = 64 => "HDR",
        /// 100 Gbit/s.
        NDR = 128 => "NDR",
        /// 200 Gbit/s.
        XDR = 256 => "XDR",
    }
}

impl LinkSpeed {
    /// Nominal rate of a lane in Mbit/s; `None` for an undefined code.
    #[must_use]
    pub fn lane_mbps(self) -> Option<u32> {
        match self {
            Self::SDR => Some(2_500),
            Self::DDR => Some(5_000),
            Self::QDR | Self::FDR10 => Some(10_000),
            Self::FDR => Some(14_000),
            Self::EDR => Some(25_000),
            Self::HDR => Some(50_000),
            Self::NDR => Some(100_000),
            Self::XDR => Some(200_000),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_speed_has_a_higher_rate_than_the_one_before() {
        let rates: Vec<_> = LinkSpeed::KNOWN.iter().map(|speed| speed.lane_mbps().unwrap()).collect();
        assert!(rates.is_sorted() && rates.len() == 9, "{rates:?}");
        assert_eq!(LinkSpeed(512).lane_mbps(), None);
        assert_eq!(LinkSpeed(512).to_string(), "link speed 512");
    }

    #[test]
    fn the_code_of_a_width_is_not_its_number_of_lanes() {
        let lanes = [1, 2, 4, 8, 16, 0, 3, 255].map(|code| LinkWidth(code).lanes());
        assert_eq!(lanes, [Some(1), Some(4), Some(8), Some(12), Some(2), None, None, None]);
        assert_eq!(format!("{:?} {}", LinkWidth(2), LinkWidth(3)), "LinkWidth(2: 4X) link width 3");
    }
}
