//! Connecting queue pairs: INIT with the local port, then RTR and RTS with the peer's address. Datagrams have no peer.

use super::QueuePair;
use crate::address::{AddressVector, GidEntry, GlobalRoute};
use crate::qp::QueuePairAttributes;
use crate::{Access, Context, Error, Gid, LinkLayer, Mtu, QueuePairState, QueuePairType, Result};

/// Address of one end of a connection, which both ends exchange out of band.
///
/// With the feature `serde` it can be serialised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct QueuePairAddress {
    /// Number of the queue pair, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number that this end sends, 24 bits.
    pub psn: u32,
    /// LID of the port; 0 on RoCE.
    pub lid: u16,
    /// GID of the port.
    pub gid: Gid,
    /// MTU of the port.
    pub mtu: Mtu,
    /// Reads and atomics that this end serves at a time.
    pub rd_atomic: u8,
    /// Whether the queue pair permits RDMA writes of its peer, which a keepalive of the peer needs.
    #[cfg_attr(feature = "serde", serde(default))]
    pub remote_write: bool,
}

impl QueuePairAddress {
    /// The address of a peer, from values that were exchanged in another format.
    ///
    /// The LID is 0, as on RoCE, the peer serves one read or atomic at a time, and does not permit RDMA writes.
    #[must_use]
    pub const fn new(qp_num: u32, psn: u32, gid: Gid, mtu: Mtu) -> Self {
        QueuePairAddress { qp_num, psn, lid: 0, gid, mtu, rd_atomic: 1, remote_write: false }
    }

    /// Sets the LID of the port, which InfiniBand requires.
    #[must_use]
    pub const fn with_lid(mut self, lid: u16) -> Self {
        self.lid = lid;
        self
    }

    /// Sets the number of reads and atomics that the peer serves at a time.
    #[must_use]
    pub const fn with_rd_atomic(mut self, rd_atomic: u8) -> Self {
        self.rd_atomic = rd_atomic;
        self
    }

    /// States that the peer's queue pair permits RDMA writes (`IBV_ACCESS_REMOTE_WRITE` of ibv_modify_qp(3)).
    ///
    /// [`EndpointBuilder::keepalive`](crate::EndpointBuilder::keepalive) needs this right. If the statement is false, the
    /// first keepalive ends the connection.
    #[must_use]
    pub const fn with_remote_write(mut self) -> Self {
        self.remote_write = true;
        self
    }
}

/// Local port and access rights of the peer, for [`QueuePair::init`] and [`QueuePair::init_datagrams`].
///
/// The defaults fit a device with one port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct InitOptions {
    port: u8,
    gid_index: Option<u32>,
    pkey_index: u16,
    peer_access: Access,
    psn: Option<u32>,
}

impl Default for InitOptions {
    fn default() -> Self {
        InitOptions { port: 1, gid_index: None, pkey_index: 0, peer_access: Access::empty(), psn: None }
    }
}

impl InitOptions {
    /// Port of the device, counted from 1; 1 unless set.
    pub fn port(mut self, port: u8) -> Self {
        self.port = port;
        self
    }

    /// Index of the local GID; [`Context::recommended_gid`] unless set.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Index of the partition key, see [`Context::pkey_index`]; 0 unless set, which is the only one on RoCE.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.pkey_index = index;
        self
    }

    /// Rights in [`Access::REMOTE`] and [`Access::FLUSH`] that the peer has. Without any, the default, its reads and
    /// writes fail. Ignored for datagrams.
    pub fn peer_access(mut self, access: Access) -> Self {
        self.peer_access = access;
        self
    }

    pub(crate) fn port_number(&self) -> u8 {
        self.port
    }

    /// Adds rights of the peer.
    pub(crate) fn grant(mut self, access: Access) -> Self {
        self.peer_access |= access;
        self
    }

    /// First packet sequence number to send, 24 bits; random unless set.
    pub fn psn(mut self, psn: u32) -> Self {
        self.psn = Some(psn);
        self
    }

    /// Attributes that bring a queue pair with a peer to INIT.
    pub(super) fn to_init(self) -> QueuePairAttributes {
        QueuePairAttributes::new()
            .set_state(QueuePairState::INIT)
            .set_port(self.port)
            .set_pkey_index(self.pkey_index)
            .set_access(self.peer_access & (Access::REMOTE | Access::FLUSH))
    }

    /// The local GID. An InfiniBand port can do without.
    fn source_gid(&self, context: &Context, is_ethernet: bool) -> Result<Option<GidEntry>> {
        match self.gid_index {
            // `sgid_index` of an address vector has eight bits.
            Some(index) if index > 255 => Err(Error::NoSuchGid {
                device: context.device_name().into(),
                port: self.port,
                index,
                table_len: context.query_port(self.port)?.gid_table_len().min(256),
            }),
            Some(index) => context.gid(self.port, index).map(Some),
            None => match context.recommended_gid(self.port) {
                Ok(entry) => Ok(Some(entry)),
                Err(Error::NoGid { .. }) if !is_ethernet => Ok(None),
                Err(error) => Err(error),
            },
        }
    }
}

/// Parameters of a connection. The defaults fit most networks.
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
    /// Path MTU, which must be the same at both ends; unless set, the smaller one of both ports.
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Acknowledgement timeout: 4.096 µs · 2^`exponent`; 14, that is 67 ms, unless set. 0 waits forever.
    ///
    /// An endpoint with a [keepalive](crate::EndpointBuilder::keepalive) lowers it if its retries would exceed the time limit.
    pub fn timeout(mut self, exponent: u8) -> Self {
        self.timeout = exponent;
        self
    }

    /// Changes the exponent of the acknowledgement timeout, given the number of retries.
    pub(crate) fn map_timeout(mut self, change: impl FnOnce(u8, u8) -> u8) -> Self {
        self.timeout = change(self.timeout, self.retry_count);
        self
    }

    /// Retries after an acknowledgement timeout, 0 to 7; 6 unless set, because of
    /// [`Quirks::RETRY_COUNT_7_IS_INFINITE`](crate::device::Quirks). With the default timeout, a lost peer is reported after about
    /// half a second; devices may take up to four times as long.
    pub fn retry_count(mut self, retries: u8) -> Self {
        self.retry_count = retries;
        self
    }

    /// Retries after an RNR NAK, 0 to 6; 7, the default, retries forever.
    ///
    /// With 7 the sender waits for a slow receiver instead of failing. The acknowledgement timeout still reports a peer
    /// that is gone. On SoftRoCE of kernel 6.1 this timeout also runs during RNR retries. A peer without receives then
    /// fails the send after about a second with [`RETRY_EXC_ERR`](crate::WcStatus::RETRY_EXC_ERR), as if it were gone
    /// ([`Quirks::MISSING_RECEIVES_TIME_OUT`](crate::device::Quirks::MISSING_RECEIVES_TIME_OUT)).
    pub fn rnr_retry(mut self, retries: u8) -> Self {
        self.rnr_retry = retries;
        self
    }

    /// RNR timer, which the peer waits after an RNR NAK before it retries: a code of ibv_modify_qp(3), 0 to 31; 12,
    /// that is 0.64 ms, unless set.
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.min_rnr_timer = code;
        self
    }

    /// Service level (InfiniBand) or priority (RoCE), 0 to 15; 0 unless set.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level;
        self
    }

    /// Traffic class, on RoCE v2 the IP type of service; 0 unless set.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Hop limit (time to live); 64 unless set.
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// Flow label, 20 bits; 0 unless set. On RoCE v2, connections with different labels may take different paths.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.flow_label = label;
        self
    }

    /// Outstanding reads and atomics as requester; unless set, as many as both ends support, at most 16.
    pub fn rd_atomic(mut self, outstanding: u8) -> Self {
        self.rd_atomic = Some(outstanding);
        self
    }
}

/// The local end of a connection, known since [`QueuePair::init`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) address: QueuePairAddress,
    /// Largest message of the port, in bytes.
    pub(crate) max_message: u32,
    port: u8,
    gid_index: Option<u8>,
    is_ethernet: bool,
}

impl Local {
    /// Looks up the local address, except for the queue pair number.
    pub(crate) fn resolve(context: &Context, options: &InitOptions) -> Result<Self> {
        let port = context.query_port(options.port)?;
        let is_ethernet = port.link_layer() == LinkLayer::ETHERNET;
        let gid = options.source_gid(context, is_ethernet)?;
        let address = QueuePairAddress {
            qp_num: 0,
            psn: options.psn.unwrap_or_else(random_psn),
            lid: port.lid(),
            gid: gid.map_or(Gid::ZERO, |entry| entry.gid),
            mtu: port.active_mtu(),
            rd_atomic: rd_atomic(context.attributes().max_qp_rd_atom()),
            remote_write: options.peer_access.contains(Access::REMOTE_WRITE),
        };
        Ok(Local {
            address,
            max_message: port.max_message_size(),
            port: options.port,
            gid_index: gid.and_then(|entry| u8::try_from(entry.index).ok()),
            is_ethernet,
        })
    }

    /// The path from this address to `remote`.
    pub(crate) fn route(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> AddressVector {
        let mut address = AddressVector::from_lid(self.port, remote.lid);
        address.sl = options.service_level;
        // On InfiniBand, a peer in the same subnet is reached by its LID. A peer in another subnet, and any peer on
        // RoCE, is reached by its GID.
        let same_subnet = !self.is_ethernet && remote.gid.0[..8] == self.address.gid.0[..8];
        if let Some(sgid_index) = self.gid_index.filter(|_| !remote.gid.is_zero() && !same_subnet) {
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

impl Local {
    /// Attributes that bring a queue pair from INIT to RTR, and from RTR to RTS.
    pub(super) fn to_peer(
        self,
        context: &Context,
        qp_type: QueuePairType,
        remote: &QueuePairAddress,
        options: &ConnectOptions,
    ) -> [QueuePairAttributes; 2] {
        use QueuePairType as T;
        let device = context.attributes();
        let (responder_depth, requester_depth) =
            (rd_atomic(device.max_qp_rd_atom()), rd_atomic(device.max_qp_init_rd_atom()));
        let mut rtr = QueuePairAttributes::new()
            .set_state(QueuePairState::RTR)
            .set_address(self.route(remote, options))
            .set_path_mtu(options.mtu.unwrap_or(self.address.mtu.min(remote.mtu)))
            .set_dest_qp_num(remote.qp_num)
            .set_rq_psn(remote.psn);
        if matches!(qp_type, T::RC | T::XRC_RECV) {
            rtr = rtr.set_max_dest_rd_atomic(responder_depth).set_min_rnr_timer(options.min_rnr_timer);
        }
        let mut rts = QueuePairAttributes::new().set_state(QueuePairState::RTS).set_sq_psn(self.address.psn);
        if matches!(qp_type, T::RC | T::XRC_SEND | T::XRC_RECV) {
            rts = rts.set_timeout(options.timeout);
        }
        if matches!(qp_type, T::RC | T::XRC_SEND) {
            rts = rts
                .set_retry_count(options.retry_count)
                .set_rnr_retry(options.rnr_retry)
                .set_max_rd_atomic(options.rd_atomic.unwrap_or(requester_depth.min(remote.rd_atomic)));
        }
        [rtr, rts]
    }
}

impl QueuePair {
    /// Brings the queue pair from RESET to INIT, so that receives can be posted.
    ///
    /// Returns the address that the peer needs to connect.
    ///
    /// # Errors
    /// Those of [`Context::query_port`], [`Context::gid`] and [`Context::recommended_gid`]; [`Error::Modify`];
    /// [`Error::WrongType`] on UD and RAW_PACKET queue pairs.
    pub fn init(&mut self, options: &InitOptions) -> Result<QueuePairAddress> {
        self.require("QueuePair::init", self.has_peer(), "use QueuePair::init_datagrams or init_packets")?;
        let local = Local::resolve(self.context(), options)?;
        self.init_as(local, options)
    }

    pub(crate) fn init_as(&mut self, mut local: Local, options: &InitOptions) -> Result<QueuePairAddress> {
        local.address.qp_num = self.number();
        self.modify(&options.to_init())?;
        self.local = Some(Box::new(local));
        Ok(local.address)
    }

    /// Brings a UD queue pair from RESET to RTS.
    ///
    /// Returns the address that a peer needs to send to it, in addition to `qkey`. Datagrams with another queue key are
    /// dropped. Queue keys with the highest bit set are for privileged users.
    ///
    /// Datagrams that arrive before receives are posted are dropped, too. Each receive needs
    /// [`Grh::LEN`](crate::address::Grh::LEN) bytes before the payload.
    ///
    /// # Errors
    /// Those of [`QueuePair::init`]; [`Error::WrongType`] on queue pairs of other types. If a step after the first one
    /// fails, the queue pair is unusable: create another.
    pub fn init_datagrams(&mut self, qkey: u32, options: &InitOptions) -> Result<QueuePairAddress> {
        self.require("QueuePair::init_datagrams", self.qp_type() == QueuePairType::UD, "use QueuePair::init")?;
        let mut local = Local::resolve(self.context(), options)?;
        local.address.qp_num = self.number();
        self.modify(
            &QueuePairAttributes::new()
                .set_state(QueuePairState::INIT)
                .set_port(options.port)
                .set_pkey_index(options.pkey_index)
                .set_qkey(qkey),
        )?;
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::RTR))?;
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::RTS).set_sq_psn(local.address.psn))?;
        self.local = Some(Box::new(local));
        Ok(local.address)
    }

    /// The path to the peer at `remote`, for
    /// [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle).
    ///
    /// Uses the service level, traffic class, hop limit and flow label of `options`.
    ///
    /// # Errors
    /// [`Error::NotInitialised`] before [`QueuePair::init`] or [`QueuePair::init_datagrams`].
    pub fn address_of(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<AddressVector> {
        let Some(local) = self.local.as_deref() else { return Err(Error::NotInitialised) };
        Ok(local.route(remote, options))
    }

    /// The local address, after `init`.
    pub(crate) fn local(&self) -> Option<Local> {
        self.local.as_deref().copied()
    }

    fn has_peer(&self) -> bool {
        ![QueuePairType::UD, QueuePairType::RAW_PACKET].contains(&self.qp_type())
    }

    pub(super) fn require(&self, operation: &'static str, fits: bool, advice: &'static str) -> Result<()> {
        if fits { Ok(()) } else { Err(Error::WrongType { operation, qp_type: self.qp_type(), advice }) }
    }

    /// Connects to the peer at `remote`: RTR and RTS of ibv_modify_qp(3).
    ///
    /// Both ends must do this. It exchanges nothing with the peer and does not wait for it. A send to a peer that is not yet
    /// connected is retried, and finally fails with `RETRY_EXC_ERR`. It is safe to send once both ends have returned, not
    /// before. An unreliable connection does not retransmit lost packets, and ignores the `options` about retries,
    /// acknowledgements and reads.
    ///
    /// # Errors
    /// [`Error::WrongType`] on UD queue pairs, which have no peer; [`Error::NotInitialised`] before [`QueuePair::init`];
    /// [`Error::Modify`], which names the reason, such as a route that cannot be resolved or an MTU that is too large. If the
    /// second step fails, the queue pair stays in RTR and is unusable: create another.
    pub fn connect(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let advice = "use QueuePair::address_of and ProtectionDomain::address_handle";
        self.require("QueuePair::connect", self.has_peer(), advice)?;
        let Some(local) = self.local.as_deref() else { return Err(Error::NotInitialised) };
        let [rtr, rts] = local.to_peer(self.context(), self.qp_type(), remote, options);
        self.modify(&rtr)?;
        self.modify(&rts)
    }
}

/// Reads and atomics to serve at a time, given the limit of the device.
fn rd_atomic(device: u32) -> u8 {
    device.min(16) as u8
}

/// A random 24-bit number, so that late packets of an earlier connection are not accepted.
fn random_psn() -> u32 {
    let mut bytes = [0; 4];
    // SAFETY: `bytes` has four writable bytes. A short read, which does not happen for so few bytes, leaves zeros, a
    // valid number.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_ne_bytes(bytes) & 0xff_ffff
}
