//! Limits to the rate of a queue pair.

use rdma_sys::*;

use super::{ModifyError, QueuePair};
use crate::errno::check;
use crate::{Error, Result};

const FEATURE: &str = "rate limits of queue pairs of this type";

/// How fast a queue pair may send: `struct ibv_qp_rate_limit_attr`.
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

    /// At most `kbps` kbit/s, within [`PacketPacing`](crate::PacketPacing) of the device.
    pub const fn new(kbps: u32) -> Self {
        RateLimit { kbps, max_burst: 0, typical_packet: 0 }
    }

    /// At most this many bytes at once; the device's default unless set. Not every device with rate limits takes it.
    pub const fn max_burst(mut self, bytes: u32) -> Self {
        self.max_burst = bytes;
        self
    }

    /// Bytes of a typical packet, which the device computes gaps by; the port's MTU unless set. As for
    /// [`RateLimit::max_burst`].
    pub const fn typical_packet(mut self, bytes: u16) -> Self {
        self.typical_packet = bytes;
        self
    }
}

impl QueuePair {
    /// Limits how fast it sends: `ibv_modify_qp_rate_limit(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless [`DeviceAttributes::packet_pacing`](crate::DeviceAttributes::packet_pacing) has the type of
    /// the queue pair; [`Error::Modify`] when the rate is beyond its limits; [`Error::Verb`] with `EINVAL` in a state that does not
    /// allow it, or for a burst that the device does not take.
    #[doc(alias = "ibv_modify_qp_rate_limit")]
    pub fn limit_rate(&mut self, limit: RateLimit) -> Result<()> {
        let pacing = self.context().attributes().packet_pacing();
        let Some(pacing) = pacing.filter(|pacing| pacing.qp_types.contains(self.qp_type())) else {
            return Err(self.context().unsupported(FEATURE));
        };
        if limit.kbps != 0 && !(pacing.min_kbps..=pacing.max_kbps).contains(&limit.kbps) {
            let allowed = format!("0 for none, or {} to {} kbit/s", pacing.min_kbps, pacing.max_kbps);
            let value = limit.kbps.into();
            return Err(Error::Modify(Box::new(ModifyError::OutOfRange { attribute: "RATE_LIMIT", value, allowed })));
        }
        let mut attr = ibv_qp_rate_limit_attr {
            rate_limit: limit.kbps,
            max_burst_sz: limit.max_burst,
            typical_pkt_sz: limit.typical_packet,
            comp_mask: 0,
        };
        // SAFETY: the queue pair is valid and borrowed mutably, and `attr` is for the duration of the call.
        check(unsafe { ibv_modify_qp_rate_limit(self.as_raw(), &mut attr) })
            .map_err(|errno| self.context().feature_error("ibv_modify_qp_rate_limit", FEATURE, errno))
    }
}
