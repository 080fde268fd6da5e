//! Connecting: INIT with an address of one's own, then RTR and RTS with that of the peer. Datagrams have no peer.

use super::QueuePair;
use crate::{
    Access, AddressVector, Context, Error, Gid, GidEntry, GlobalRoute, LinkLayer, Mtu, QueuePairAttributes,
    QueuePairState, QueuePairType, Result,
};

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

/// Where to connect from, and what the peer may do: for [`QueuePair::init`] and [`QueuePair::init_datagrams`]. The defaults fit a
/// device with one port.
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

    /// Index of the GID to connect from; [`Context::recommended_gid`] unless set.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Index of the partition key to connect with, see [`Context::pkey_index`]; 0 unless set, which on RoCE is the only one.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.pkey_index = index;
        self
    }

    /// Which of the rights in [`Access::REMOTE`] and [`Access::FLUSH`] the peer may use; none unless set, so that its reads and
    /// writes fail. Of no meaning for datagrams.
    pub fn peer_access(mut self, access: Access) -> Self {
        self.peer_access = access;
        self
    }

    pub(crate) fn port_number(&self) -> u8 {
        self.port
    }

    /// First packet sequence number to send, 24 bits; a random one unless set.
    pub fn psn(mut self, psn: u32) -> Self {
        self.psn = Some(psn);
        self
    }

    /// What brings a queue pair with a peer to INIT.
    pub(super) fn to_init(self) -> QueuePairAttributes {
        QueuePairAttributes::new()
            .set_state(QueuePairState::INIT)
            .set_port(self.port)
            .set_pkey_index(self.pkey_index)
            .set_access(self.peer_access & (Access::REMOTE | Access::FLUSH))
    }

    /// On InfiniBand a port can do without a GID.
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
    /// slow receiver instead of failing. A peer that is gone is still noticed, by the acknowledgement timeout. On SoftRoCE of
    /// kernel 6.1 that timeout runs meanwhile, too: a peer without receives fails the send after about a second with
    /// [`RETRY_EXC_ERR`](crate::WcStatus::RETRY_EXC_ERR), as if it were gone
    /// ([`Quirks::MISSING_RECEIVES_TIME_OUT`](crate::Quirks::MISSING_RECEIVES_TIME_OUT)).
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

/// Our end of a connection, from [`QueuePair::init`] on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) address: QueuePairAddress,
    /// Longest message of the port, in bytes.
    pub(crate) max_message: u32,
    port: u8,
    gid_index: Option<u8>,
    is_ethernet: bool,
}

impl Local {
    /// Finds out what of the address is not the queue pair's own.
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
        };
        Ok(Local {
            address,
            max_message: port.max_message_size(),
            port: options.port,
            gid_index: gid.and_then(|entry| u8::try_from(entry.index).ok()),
            is_ethernet,
        })
    }

    fn route(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> AddressVector {
        let mut address = AddressVector::from_lid(self.port, remote.lid);
        address.sl = options.service_level;
        // On InfiniBand a peer of the same subnet is reached by its LID; across subnets, and always on RoCE, by its GID.
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
    /// What brings a queue pair of the type from INIT to RTR, and from there to RTS.
    pub(super) fn to_peer(
        self,
        context: &Context,
        qp_type: QueuePairType,
        remote: &QueuePairAddress,
        options: &ConnectOptions,
    ) -> [QueuePairAttributes; 2] {
        use QueuePairType as T;
        let device = context.attributes();
        let (serves, asks) = (rd_atomic(device.max_qp_rd_atom()), rd_atomic(device.max_qp_init_rd_atom()));
        let mut rtr = QueuePairAttributes::new()
            .set_state(QueuePairState::RTR)
            .set_address(self.route(remote, options))
            .set_path_mtu(options.mtu.unwrap_or(self.address.mtu.min(remote.mtu)))
            .set_dest_qp_num(remote.qp_num)
            .set_rq_psn(remote.psn);
        if matches!(qp_type, T::RC | T::XRC_RECV) {
            rtr = rtr.set_max_dest_rd_atomic(serves).set_min_rnr_timer(options.min_rnr_timer);
        }
        let mut rts = QueuePairAttributes::new().set_state(QueuePairState::RTS).set_sq_psn(self.address.psn);
        if matches!(qp_type, T::RC | T::XRC_SEND | T::XRC_RECV) {
            rts = rts.set_timeout(options.timeout);
        }
        if matches!(qp_type, T::RC | T::XRC_SEND) {
            rts = rts
                .set_retry_count(options.retry_count)
                .set_rnr_retry(options.rnr_retry)
                .set_max_rd_atomic(options.rd_atomic.unwrap_or(asks.min(remote.rd_atomic)));
        }
        [rtr, rts]
    }
}

impl QueuePair {
    /// Brings it from RESET to INIT, so that receives can be posted, and returns what the peer needs to connect.
    ///
    /// # Errors
    /// Those of [`Context::query_port`], [`Context::gid`] and [`Context::recommended_gid`]; [`Error::Modify`]; [`Error::WrongType`]
    /// on UD and RAW_PACKET queue pairs.
    pub fn init(&mut self, options: &InitOptions) -> Result<QueuePairAddress> {
        self.require("QueuePair::init", self.has_peer(), "use QueuePair::init_datagrams or init_packets")?;
        let local = Local::resolve(self.context(), options)?;
        self.init_as(local, options)
    }

    pub(crate) fn init_as(&mut self, mut local: Local, options: &InitOptions) -> Result<QueuePairAddress> {
        local.address.qp_num = self.number();
        self.modify(&options.to_init())?;
        self.local = Some(local);
        Ok(local.address)
    }

    /// Brings a UD queue pair from RESET to RTS, and returns what a peer needs to send to it, beside `qkey`. A datagram with
    /// another queue key is dropped; keys with the highest bit set are for privileged users.
    ///
    /// What arrives before receives are posted is dropped, too. Each receive needs [`Grh::LEN`](crate::Grh::LEN) bytes before the
    /// payload.
    ///
    /// # Errors
    /// Those of [`QueuePair::init`]; [`Error::WrongType`] on queue pairs of other types. If a step failed after the first one, the
    /// queue pair has to be made anew.
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
        self.local = Some(local);
        Ok(local.address)
    }

    /// The way to the peer at `remote`, for [`ProtectionDomain::address_handle`](crate::ProtectionDomain::address_handle). Of
    /// `options`, those that an address has are taken: service level, traffic class, hop limit and flow label.
    ///
    /// # Errors
    /// [`Error::NotInitialised`] before [`QueuePair::init`] or [`QueuePair::init_datagrams`].
    pub fn address_of(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<AddressVector> {
        let Some(local) = self.local else { return Err(Error::NotInitialised) };
        Ok(local.route(remote, options))
    }

    fn has_peer(&self) -> bool {
        ![QueuePairType::UD, QueuePairType::RAW_PACKET].contains(&self.qp_type())
    }

    pub(super) fn require(&self, what: &'static str, fits: bool, instead: &'static str) -> Result<()> {
        if fits { Ok(()) } else { Err(Error::WrongType { what, qp_type: self.qp_type(), instead }) }
    }

    /// Connects to the peer at `remote`: RTR and RTS of ibv_modify_qp(3).
    ///
    /// Both ends have to do this. It exchanges nothing with the peer and does not wait for it: a send to a peer that is not
    /// connected yet is retried, and fails in the end with `RETRY_EXC_ERR`. Once both ends have returned, and only then,
    /// sending is safe. On an unreliable connection nothing is retried: what is lost is lost. Of `options`, those about
    /// retries, acknowledgements and reads do not matter there.
    ///
    /// # Errors
    /// [`Error::WrongType`] on UD queue pairs, which have no peer; [`Error::NotInitialised`] before [`QueuePair::init`];
    /// [`Error::Modify`] names what does not fit: a route that cannot be resolved, an MTU that is too large. If it was the second
    /// step that failed, the queue pair stays in RTR, and has to be made anew.
    pub fn connect(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let instead = "use QueuePair::address_of and ProtectionDomain::address_handle";
        self.require("QueuePair::connect", self.has_peer(), instead)?;
        let Some(local) = self.local else { return Err(Error::NotInitialised) };
        let [rtr, rts] = local.to_peer(self.context(), self.qp_type(), remote, options);
        self.modify(&rtr)?;
        self.modify(&rts)
    }
}

/// Reads and atomics that an end serves at a time, of what its device can.
fn rd_atomic(device: u32) -> u8 {
    device.min(16) as u8
}

/// 24 bits that a peer of an earlier connection cannot guess, so that its late packets are not taken for ours.
fn random_psn() -> u32 {
    let mut bytes = [0; 4];
    // SAFETY: four writable bytes. A short read, which for so few bytes does not happen, leaves zeros, a valid number.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_ne_bytes(bytes) & 0xff_ffff
}
