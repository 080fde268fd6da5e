//! Connecting.

use super::Endpoint;
use super::builder::rd_atomic;
use crate::{AddressVector, Gid, GlobalRoute, Mtu, QueuePairAttributes, QueuePairState, Result};

/// What one end has to know of the other to connect: exchanged out of band, both ways.
///
/// With the feature `serde` it can be serialised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct QueuePairAddress {
    /// Number of the queue pair, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number that it sends, 24 bits.
    pub psn: u32,
    /// LID of the port; 0 on RoCE.
    pub lid: u16,
    /// GID of the port.
    pub gid: Gid,
    /// MTU of the port.
    pub mtu: Mtu,
    /// RDMA reads and atomics that this end serves at a time.
    pub rd_atomic: u8,
}

/// How to connect. The defaults fit most networks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct ConnectOptions {
    mtu: Option<Mtu>,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    min_rnr_timer: u8,
    service_level: u8,
    traffic_class: u8,
    hop_limit: u8,
    flow_label: u32,
    rd_atomic: Option<u8>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            mtu: None,
            timeout: 14,
            retry_count: 6,
            rnr_retry: 7,
            min_rnr_timer: 12,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            rd_atomic: None,
        }
    }
}

impl ConnectOptions {
    /// Path MTU; the smaller one of the two ports unless set. It must be the same at both ends.
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Acknowledgement timeout, 4.096 µs times 2 to this power; 14, that is 67 ms, unless set. 0 waits for ever.
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.timeout = exponent;
        self
    }

    /// Retries after a timeout, 0 to 7; 6 unless set, because of [`Quirks::SEVEN_RETRIES_ENDLESS`](crate::Quirks). With the
    /// default timeout a lost peer is reported after about half a second; devices may take up to four times as long.
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.retry_count = retries;
        self
    }

    /// Retries when the peer has no receive posted, 0 to 6; 7, the default, goes on for ever: the sender then waits for a
    /// slow receiver instead of failing. A peer that is gone is still noticed, by the acknowledgement timeout.
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.rnr_retry = retries;
        self
    }

    /// How long the peer shall wait before it retries when there is no receive here: code of ibv_modify_qp(3), 0 to 31;
    /// 12, that is 0.64 ms, unless set.
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.min_rnr_timer = code;
        self
    }

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15; 0 unless set.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// Traffic class; on RoCE v2 the IP type of service; 0 unless set.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Hop limit (time to live); 64 unless set.
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// Flow label, 20 bits; on RoCE v2 connections with different labels may take different paths; 0 unless set.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.flow_label = label;
        self
    }

    /// Reads and atomics that may be outstanding from here; as many as both ends can, at most 16, unless set.
    pub fn rd_atomic(mut self, outstanding: u8) -> Self {
        self.rd_atomic = Some(outstanding);
        self
    }
}

impl Endpoint {
    /// Connects to the peer at `remote`: RTR and RTS of ibv_modify_qp(3).
    ///
    /// Both ends have to do this. It exchanges nothing with the peer and does not wait for it: a send to a peer that is not
    /// connected yet is retried, and fails in the end with `RETRY_EXC_ERR`. Once both ends have returned, and only then,
    /// sending is safe.
    ///
    /// # Errors
    /// [`Error::Modify`](crate::Error::Modify) names what does not fit: a route that cannot be resolved, an MTU that is too large.
    /// If it was the second step that failed, the queue pair stays in RTR, and the endpoint has to be made anew.
    pub fn connect(&mut self, remote: &QueuePairAddress) -> Result<()> {
        self.connect_with(remote, &ConnectOptions::default())
    }

    /// As [`Endpoint::connect`], with options.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let device = self.pd.context().attributes();
        let (serves, asks) = (rd_atomic(device.max_qp_rd_atom()), rd_atomic(device.max_qp_init_rd_atom()));
        let address = self.route(remote, options);
        self.qp.modify(
            &QueuePairAttributes::new()
                .set_state(QueuePairState::RTR)
                .set_address(address)
                .set_path_mtu(options.mtu.unwrap_or(self.local.mtu.min(remote.mtu)))
                .set_dest_qp_num(remote.qp_num)
                .set_rq_psn(remote.psn)
                .set_max_dest_rd_atomic(serves)
                .set_min_rnr_timer(options.min_rnr_timer),
        )?;
        self.qp.modify(
            &QueuePairAttributes::new()
                .set_state(QueuePairState::RTS)
                .set_sq_psn(self.local.psn)
                .set_timeout(options.timeout)
                .set_retry_count(options.retry_count)
                .set_rnr_retry(options.rnr_retry)
                .set_max_rd_atomic(options.rd_atomic.unwrap_or(asks.min(remote.rd_atomic))),
        )
    }

    fn route(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> AddressVector {
        let mut address = AddressVector::from_lid(self.settings.port, remote.lid);
        address.sl = options.service_level;
        // On InfiniBand a peer of the same subnet is reached by its LID; across subnets, and always on RoCE, by its GID.
        let same_subnet = !self.settings.is_ethernet && remote.gid.0[..8] == self.local.gid.0[..8];
        if let Some(sgid_index) = self.settings.gid_index.filter(|_| !remote.gid.is_zero() && !same_subnet) {
            address.route = Some(GlobalRoute {
                dgid: remote.gid,
                sgid_index,
                hop_limit: options.hop_limit,
                traffic_class: options.traffic_class,
                flow_label: options.flow_label,
            });
        }
        address
    }
}
