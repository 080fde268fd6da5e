//! Static rate limits of address vectors.

use rdma_sys::*;

use crate::named::named;

named! {
    /// Rate limit towards a destination: `enum ibv_rate`, for
    /// [`AddressVector::static_rate`](crate::address::AddressVector::static_rate).
    pub struct Rate(u8) as "rate" {
        /// No limit below that of the port.
        MAX = IBV_RATE_MAX.0 as u8 => "unlimited",
        /// 2.5 Gbit/s.
        GBPS_2_5 = IBV_RATE_2_5_GBPS.0 as u8 => "2.5 Gbit/s",
        /// 5 Gbit/s.
        GBPS_5 = IBV_RATE_5_GBPS.0 as u8 => "5 Gbit/s",
        /// 10 Gbit/s.
        GBPS_10 = IBV_RATE_10_GBPS.0 as u8 => "10 Gbit/s",
        /// 14 Gbit/s.
        GBPS_14 = IBV_RATE_14_GBPS.0 as u8 => "14 Gbit/s",
        /// 20 Gbit/s.
        GBPS_20 = IBV_RATE_20_GBPS.0 as u8 => "20 Gbit/s",
        /// 25 Gbit/s.
        GBPS_25 = IBV_RATE_25_GBPS.0 as u8 => "25 Gbit/s",
        /// 28 Gbit/s.
        GBPS_28 = IBV_RATE_28_GBPS.0 as u8 => "28 Gbit/s",
        /// 30 Gbit/s.
        GBPS_30 = IBV_RATE_30_GBPS.0 as u8 => "30 Gbit/s",
        /// 40 Gbit/s.
        GBPS_40 = IBV_RATE_40_GBPS.0 as u8 => "40 Gbit/s",
        /// 50 Gbit/s.
        GBPS_50 = IBV_RATE_50_GBPS.0 as u8 => "50 Gbit/s",
        /// 56 Gbit/s.
        GBPS_56 = IBV_RATE_56_GBPS.0 as u8 => "56 Gbit/s",
        /// 60 Gbit/s.
        GBPS_60 = IBV_RATE_60_GBPS.0 as u8 => "60 Gbit/s",
        /// 80 Gbit/s.
        GBPS_80 = IBV_RATE_80_GBPS.0 as u8 => "80 Gbit/s",
        /// 100 Gbit/s.
        GBPS_100 = IBV_RATE_100_GBPS.0 as u8 => "100 Gbit/s",
        /// 112 Gbit/s.
        GBPS_112 = IBV_RATE_112_GBPS.0 as u8 => "112 Gbit/s",
        /// 120 Gbit/s.
        GBPS_120 = IBV_RATE_120_GBPS.0 as u8 => "120 Gbit/s",
        /// 168 Gbit/s.
        GBPS_168 = IBV_RATE_168_GBPS.0 as u8 => "168 Gbit/s",
        /// 200 Gbit/s.
        GBPS_200 = IBV_RATE_200_GBPS.0 as u8 => "200 Gbit/s",
        /// 300 Gbit/s.
        GBPS_300 = IBV_RATE_300_GBPS.0 as u8 => "300 Gbit/s",
        /// 400 Gbit/s.
        GBPS_400 = IBV_RATE_400_GBPS.0 as u8 => "400 Gbit/s",
        /// 600 Gbit/s.
        GBPS_600 = IBV_RATE_600_GBPS.0 as u8 => "600 Gbit/s",
        /// 800 Gbit/s.
        GBPS_800 = IBV_RATE_800_GBPS.0 as u8 => "800 Gbit/s",
        /// 1200 Gbit/s.
        GBPS_1200 = IBV_RATE_1200_GBPS.0 as u8 => "1200 Gbit/s",
    }
}

/// Rates in Mbit/s, and as multiples of 2.5 Gbit/s if verbs lists them as such.
const TABLE: &[(Rate, u32, Option<u32>)] = &[
    (Rate::GBPS_2_5, 2_500, Some(1)),
    (Rate::GBPS_5, 5_000, Some(2)),
    (Rate::GBPS_10, 10_000, Some(4)),
    (Rate::GBPS_14, 14_062, None),
    (Rate::GBPS_20, 20_000, Some(8)),
    (Rate::GBPS_25, 25_781, None),
    (Rate::GBPS_28, 28_125, Some(11)),
    (Rate::GBPS_30, 30_000, Some(12)),
    (Rate::GBPS_40, 40_000, Some(16)),
    (Rate::GBPS_50, 53_125, Some(20)),
    (Rate::GBPS_56, 56_250, None),
    (Rate::GBPS_60, 60_000, Some(24)),
    (Rate::GBPS_80, 80_000, Some(32)),
    (Rate::GBPS_100, 103_125, None),
    (Rate::GBPS_112, 112_500, None),
    (Rate::GBPS_120, 120_000, Some(48)),
    (Rate::GBPS_168, 168_750, None),
    (Rate::GBPS_200, 206_250, None),
    (Rate::GBPS_300, 309_375, None),
    (Rate::GBPS_400, 425_000, Some(160)),
    (Rate::GBPS_600, 637_500, Some(240)),
    (Rate::GBPS_800, 850_000, Some(320)),
    (Rate::GBPS_1200, 1_275_000, Some(480)),
];

impl Rate {
    /// The rate in Mbit/s without coding overhead: `ibv_rate_to_mbps(3)`. `None` for [`Rate::MAX`] and undefined codes.
    #[must_use]
    #[doc(alias = "ibv_rate_to_mbps")]
    pub fn mbps(self) -> Option<u32> {
        TABLE.iter().find(|row| row.0 == self).map(|row| row.1)
    }

    /// The rate of exactly `mbps` Mbit/s: `mbps_to_ibv_rate(3)`. `None` for unknown rates, for which C returns "no
    /// limit".
    #[must_use]
    #[doc(alias = "mbps_to_ibv_rate")]
    pub fn from_mbps(mbps: u32) -> Option<Rate> {
        TABLE.iter().find(|row| row.1 == mbps).map(|row| row.0)
    }

    /// The rate as a multiple of 2.5 Gbit/s, the base of InfiniBand: `ibv_rate_to_mult(3)`. `None` if it is not listed
    /// as one.
    #[must_use]
    #[doc(alias = "ibv_rate_to_mult")]
    pub fn multiplier(self) -> Option<u32> {
        TABLE.iter().find(|row| row.0 == self).and_then(|row| row.2)
    }

    /// The rate of this multiple of 2.5 Gbit/s: `mult_to_ibv_rate(3)`. `None` for unknown rates, for which C returns
    /// "no limit".
    #[must_use]
    #[doc(alias = "mult_to_ibv_rate")]
    pub fn from_multiplier(multiplier: u32) -> Option<Rate> {
        TABLE.iter().find(|row| row.2 == Some(multiplier)).map(|row| row.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rate_round_trips_through_its_numbers() {
        assert_eq!(TABLE.len() + 1, Rate::KNOWN.len());
        for rate in Rate::KNOWN.iter().filter(|rate| **rate != Rate::MAX) {
            assert_eq!(Rate::from_mbps(rate.mbps().unwrap()), Some(*rate));
            assert!(rate.multiplier().is_none_or(|multiplier| Rate::from_multiplier(multiplier) == Some(*rate)));
        }
        for rate in [Rate::MAX, Rate(1), Rate(255)] {
            assert_eq!((rate.mbps(), rate.multiplier()), (None, None), "{rate}");
        }
        assert_eq!((Rate::from_mbps(1), Rate::from_multiplier(0)), (None, None));
        assert_eq!(Rate(200).to_string(), "rate 200");
    }
}
