//! Rate limits of queue pairs.

use rdma_sys::*;

use super::{ModifyError, QueuePair};
use crate::errno::check;
use crate::error::Verb;
use crate::{Error, Result};

const FEATURE: &str = "rate limits of queue pairs of this type";

/// Rate limit of a queue pair: `struct ibv_qp_rate_limit_attr`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use = "a limit does nothing until `QueuePair::limit_rate`"]
pub struct RateLimit {
    kbps: u32,
    max_burst: u32,
    typical_packet: u16,
}

impl RateLimit {
    /// No limit.
    pub const NONE: RateLimit = RateLimit { kbps: 0, max_burst: 0, typical_packet: 0 };

    /// Limits the rate to `kbps` kbit/s, which must be within the device's [`PacketPacing`](crate::device::PacketPacing).
    pub const fn new(kbps: u32) -> Self {
        RateLimit { kbps, max_burst: 0, typical_packet: 0 }
    }

    /// Largest burst in bytes; the device's default unless set. Not every device with rate limits supports it.
    pub const fn max_burst(mut self, bytes: u32) -> Self {
        self.max_burst = bytes;
        self
    }

    /// Typical packet size in bytes, from which the device computes gaps; the port's MTU unless set. Not every device
    /// with rate limits supports it.
    pub const fn typical_packet(mut self, bytes: u16) -> Self {
        self.typical_packet = bytes;
        self
    }
}

impl QueuePair {
    /// Limits the send rate: `ibv_modify_qp_rate_limit(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless [`DeviceAttributes::packet_pacing`](crate::device::DeviceAttributes::packet_pacing) has
    /// the type of the queue pair; [`Error::Modify`] if the rate is out of range; [`Error::Verb`] with `EINVAL` if the
    /// state does not allow it, or the device does not support the burst.
    #[doc(alias = "ibv_modify_qp_rate_limit")]
    pub fn limit_rate(&mut self, limit: RateLimit) -> Result<()> {
        let pacing = self.context().attributes().packet_pacing();
        let Some(pacing) = pacing.filter(|pacing| pacing.qp_types.contains(self.qp_type())) else {
            return Err(self.context().unsupported(FEATURE));
        };
        if limit.kbps != 0 && !(pacing.min_kbps..=pacing.max_kbps).contains(&limit.kbps) {
            let limits = format!("0 for none, or {} to {} kbit/s", pacing.min_kbps, pacing.max_kbps);
            let value = limit.kbps.into();
            return Err(Error::Modify(Box::new(ModifyError::OutOfRange { attribute: "RATE_LIMIT", value, limits })));
        }
        let mut attr = ibv_qp_rate_limit_attr {
            rate_limit: limit.kbps,
            max_burst_sz: limit.max_burst,
            typical_pkt_sz: limit.typical_packet,
            comp_mask: 0,
        };
        // SAFETY: the queue pair is valid and borrowed mutably, and `attr` is valid during the call.
        check(unsafe { ibv_modify_qp_rate_limit(self.as_raw(), &mut attr) })
            .map_err(|errno| self.context().feature_error(Verb::ModifyQpRateLimit, FEATURE, errno))
    }
}
