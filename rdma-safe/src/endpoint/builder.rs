//! Building endpoints.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use super::datagram::{DatagramEndpoint, DatagramIdentity, DatagramSlots};
use super::keepalive::{CM_DEFAULT, Countdown, Keepalive, KeepaliveError, LIMITS};
use super::pending::Pending;
use super::ring::{Kind, Ring};
use super::{
    Endpoint, EndpointKey, EndpointSet, Gates, Live, Operation, Poster, RECEIVE, ReceivePool, Settings, SlowResults,
    UnsignaledRun,
};
use crate::device::{Quirks, TransportType};
use crate::qp::Local;
use crate::{
    Access, CompletionQueue, Context, Error, InitOptions, ProtectionDomain, QueuePairType, Result, WcFields, srq,
};

/// Fields of completions that all endpoints need.
pub(super) const FIELDS: WcFields = WcFields::BYTE_LEN.union(WcFields::IMM);

/// Fields of completions that identify the sender of a datagram.
pub(super) const SENDER_FIELDS: WcFields =
    WcFields::SRC_QP.union(WcFields::SLID).union(WcFields::SL).union(WcFields::DLID_PATH_BITS);

/// Builds an endpoint. Made by [`Endpoint::builder`].
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // As many sends in flight as there can be replies, and room for a burst of requests.
/// let mut server = Endpoint::builder(&pd).send_depth(64).recv_depth(256).build()?;
/// // Small messages are copied into the work request, and `wait` sleeps instead of polling.
/// let mut client = Endpoint::builder(&pd).inline_data(32).events(true).build()?;
/// server.receive(pd.allocate(4096)?)?;
/// server.connect(&client.address())?;
/// client.connect(&server.address())?;
///
/// client.send_inline(b"hello")?;
/// let _ = client.wait(Duration::from_secs(60))?.ok()?;
/// let request = server.wait(Duration::from_secs(60))?.ok()?;
/// assert_eq!(request.buffer.as_deref(), Some(&b"hello"[..]));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct EndpointBuilder<'a> {
    pd: &'a ProtectionDomain,
    qp_type: QueuePairType,
    pool: Option<Arc<srq::Shared>>,
    receive_share: Option<u32>,
    /// As set by the user.
    keepalive: Option<Option<Duration>>,
    /// Whether the connection is made by address.
    by_address: bool,
    init: InitOptions,
    send_depth: u32,
    recv_depth: u32,
    send_sges: u32,
    recv_sges: u32,
    pending_sends: u32,
    inline_data: u32,
    events: bool,
    timestamps: bool,
    classic_post: bool,
    classic_poll: bool,
}

impl<'a> EndpointBuilder<'a> {
    pub(super) fn new(pd: &'a ProtectionDomain) -> Self {
        EndpointBuilder {
            pd,
            qp_type: QueuePairType::RC,
            pool: None,
            receive_share: None,
            keepalive: None,
            by_address: false,
            init: InitOptions::default(),
            send_depth: 128,
            recv_depth: 128,
            send_sges: 1,
            recv_sges: 1,
            pending_sends: 0,
            inline_data: 0,
            events: false,
            timestamps: false,
            classic_post: false,
            classic_poll: false,
        }
    }

    /// Type of the connection: [`QueuePairType::RC`] (the default) or [`QueuePairType::UC`].
    ///
    /// Over an unreliable connection messages may be lost, whole or in part, without an error: the completion of a send
    /// says only that the message was sent. Reads and atomics are not supported. For datagrams, see
    /// [`EndpointBuilder::build_datagrams`].
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Port of the device, counted from 1; 1 by default.
    pub fn port(mut self, port: u8) -> Self {
        self.init = self.init.port(port);
        self
    }

    /// Index of the local GID; [`Context::recommended_gid`](crate::Context::recommended_gid) by default.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.init = self.init.gid_index(index);
        self
    }

    /// Index of the partition key, see [`Context::pkey_index`](crate::Context::pkey_index); 0 by default, the only
    /// index on RoCE.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.init = self.init.pkey_index(index);
        self
    }

    /// Maximum number of sends, writes, reads and atomics that are posted and not yet polled; 128 by default.
    pub fn send_depth(mut self, work: u32) -> Self {
        self.send_depth = work;
        self
    }

    /// Maximum number of sends, writes, reads and atomics that wait for room in the send queue; 0 by default.
    ///
    /// Work beyond [`EndpointBuilder::send_depth`] then waits in the endpoint instead of being refused.
    /// [`Endpoint::poll`] and [`Endpoint::wait`], or those of its [`EndpointSet`], post it in order when completions
    /// make room. When `work` pieces are pending, further work is refused with
    /// [`PostError::EndpointFull`](crate::PostError::EndpointFull), which returns the buffer. Work of a
    /// [`Batch`](crate::endpoint::Batch) never waits, and is refused while other work is pending.
    ///
    /// Pending sends absorb a burst, but guarantee nothing. A client may send its next request as soon as it has a
    /// reply, before the server gets the ACK of that reply, and verbs do not bound the delay of the ACK. When packets
    /// are lost, a client that keeps n requests unanswered can leave more than n replies unacknowledged. A server
    /// handles `EndpointFull` by closing the connection to that client, or uses [`EndpointBuilder::receive_share`],
    /// which holds a request back until there is room for its reply.
    ///
    /// When the connection fails, pending work completes as flushed, after the posted work. [`Endpoint::close`] and
    /// [`EndpointSet::remove`] return its buffers with the others.
    pub fn pending_sends(mut self, work: u32) -> Self {
        self.pending_sends = work;
        self
    }

    /// Maximum number of receives that are posted and not yet polled; 128 by default.
    pub fn recv_depth(mut self, receives: u32) -> Self {
        self.recv_depth = receives;
        self
    }

    /// Maximum number of elements of a [`Gather`](crate::Gather) that is sent, written or read into; 1 by default.
    ///
    /// The limit of the device is [`DeviceAttributes::max_sge`](crate::device::DeviceAttributes::max_sge).
    pub fn send_sges(mut self, elements: u32) -> Self {
        self.send_sges = elements.max(1);
        self
    }

    /// Maximum number of elements of a [`Gather`](crate::Gather) that is received into; 1 by default.
    pub fn recv_sges(mut self, elements: u32) -> Self {
        self.recv_sges = elements.max(1);
        self
    }

    /// Uses the receives of `pool`.
    ///
    /// [`Endpoint::receive`] is then refused, and [`EndpointBuilder::recv_depth`] has no effect. Any receive of the
    /// pool may complete to this endpoint, so its completion queue has room for its sends and for the whole pool. If
    /// many endpoints share a large pool, an [`EndpointSet`](crate::EndpointSet) needs less memory, because it has one
    /// queue.
    pub fn receive_pool(mut self, pool: &ReceivePool) -> Self {
        self.pool = Some(pool.shared().clone());
        self
    }

    /// Maximum number of the peer's messages that wait in an [`EndpointSet`]; unlimited by default.
    ///
    /// Each of these messages occupies a receive of the pool.
    ///
    /// This has no effect without [`EndpointBuilder::receive_pool`] and [`EndpointBuilder::build_in`].
    ///
    /// With a share, the set serves its endpoints in turn. [`EndpointSet::poll`] first moves all completions of the
    /// device into a backlog for each endpoint, and then hands out one completion of each endpoint per round. A peer
    /// that floods therefore delays another by one completion, however many messages it has sent. A message stays in
    /// the backlog while [`EndpointBuilder::send_depth`] and [`EndpointBuilder::pending_sends`] are used up, so that
    /// there is room for its reply when it is handed out.
    ///
    /// A message that finds `messages` others in the backlog ends the connection. The queue pair goes into error, and
    /// the set hands the message out next, as a failed receive whose
    /// [`Completion::exceeded_share`](crate::Completion::exceeded_share) is `messages`. [`EndpointSet::remove`] then
    /// returns the buffers of the backlog. Choose at least as many messages as the protocol allows a peer to have
    /// unanswered. The peer is not notified: its next send fails, but a peer that only waits for replies keeps waiting.
    /// Notify it over the connection that was used to exchange addresses.
    ///
    /// One peer thus holds a bounded number of the pool's receives: `messages` in the backlog, those whose replies have
    /// not completed (`send_depth` and `pending_sends`), and those that the caller keeps. The device does not enforce
    /// this: it gives a receive to whichever message arrives first. Between two polls one peer can therefore use all
    /// posted receives. Other peers then get RNR NAKs, and retry until the set is polled and receives are posted again.
    /// Peers that must not affect each other at all need separate receives ([`EndpointBuilder::recv_depth`]) or
    /// separate pools.
    pub fn receive_share(mut self, messages: u32) -> Self {
        self.receive_share = Some(messages);
        self
    }

    /// Time within which a peer that is gone is reported, from 10 ms to 24 hours; `None` for no limit.
    ///
    /// By default it is 10 seconds for connections by address ([`cm`](crate::cm)), and `None` for connections by exchanged
    /// addresses.
    ///
    /// A reliable connection does not notice that its peer is gone while no work is in flight, or only receives. With a
    /// keepalive, the endpoint posts an RDMA write of zero bytes when nothing has completed for about a fifth of `within`.
    /// The peer's device acknowledges it. The peer's program need not do anything, and gets no completion. If there is no
    /// ACK, the connection ends: a completion with [`Operation::Keepalive`] and
    /// [`Completion::connection_lost`](crate::Completion::connection_lost) is handed out, and work in flight completes as
    /// flushed. The write occupies an additional entry of the send queue and of the completion queue, so
    /// [`EndpointBuilder::send_depth`] and [`EndpointSet::builder`] need not count it. The device must support one more send
    /// than `send_depth`.
    ///
    /// # When it works
    ///
    /// The keepalive works while the program polls or waits: [`Endpoint::poll`], [`Endpoint::wait`], [`Endpoint::arm`], and
    /// those of [`EndpointSet`]. A pause of the program counts as no time. A program that sleeps until
    /// [`Endpoint::channel`] is readable also has to wake at [`Endpoint::keepalive_due`].
    ///
    /// # Which peers are detected
    ///
    /// - A peer is gone if its device does not answer: its process, its kernel or its host has ended, its queue pair has
    ///   failed, or the network is down. On a software RNIC in the peer's process, soft0, this includes a stopped process.
    /// - A program that hangs is not detected, because its device still answers.
    /// - While signaled sends, writes, reads or atomics are in flight, no keepalive is posted. Their ACK timeout detects the
    ///   peer, and they fail with [`RETRY_EXC_ERR`](crate::WcStatus::RETRY_EXC_ERR) after
    ///   [`ConnectOptions::retry_count`](crate::ConnectOptions::retry_count) + 1 timeouts. The endpoint lowers the timeout so
    ///   that this takes at most `within`, even on devices that wait four times as long, as the specification allows. The
    ///   same holds for a keepalive behind unsignaled sends.
    /// - A peer that posts no receives is not gone, however long a send waits for it: RNR NAKs are signs of life. (SoftRoCE
    ///   may confuse the two: [`Quirks::MISSING_RECEIVES_TIME_OUT`](crate::device::Quirks::MISSING_RECEIVES_TIME_OUT).)
    ///
    /// Packets that are lost are retransmitted. The connection survives an outage that is shorter than a third of `within`
    /// and than these retries, which take at least an eighth of `within` or, if that is less, the time that
    /// [`ConnectOptions`](crate::ConnectOptions) give them.
    ///
    /// # What it needs
    ///
    /// The peer's queue pair must permit RDMA writes (`IBV_ACCESS_REMOTE_WRITE`), or it refuses the write and the
    /// connection ends. This right gives access to nothing without the key of memory with
    /// [`Access::REMOTE_WRITE`] in the same domain.
    ///
    /// - An endpoint with a keepalive grants its peer this right, and so does every connection by address, even with
    ///   `None`. Programs in C that use `rdma_create_qp(3)` do the same. If the peer connects by address and uses a queue
    ///   pair without this right, set `None`.
    /// - With exchanged addresses, [`QueuePairAddress::remote_write`](crate::QueuePairAddress::remote_write) says whether the
    ///   peer has granted it. [`Endpoint::connect`] refuses an address that does not. Connect both ends within a third
    ///   of `within`: a keepalive to a peer that is not connected yet fails like a send.
    /// - The provider must transmit writes of zero bytes. [`EndpointBuilder::build`] refuses devices that are known not to
    ///   ([`Quirks::EMPTY_WRITES_FAIL`](crate::device::Quirks::EMPTY_WRITES_FAIL)).
    pub fn keepalive(mut self, within: impl Into<Option<Duration>>) -> Self {
        self.keepalive = Some(within.into());
        self
    }

    /// Prepares the endpoint for a connection by address, whose peer expects the right to write.
    pub(crate) fn by_address(mut self) -> Self {
        self.by_address = true;
        self
    }

    /// Maximum number of bytes that can be sent inline; 0 by default.
    ///
    /// On most devices this is faster for small messages, and limited to some hundred bytes. A device may allow more than
    /// requested: soft0 allows 16 bytes even without this setting, and others may allow none.
    pub fn inline_data(mut self, bytes: u32) -> Self {
        self.inline_data = bytes;
        self
    }

    /// Lets [`Endpoint::wait`] sleep until there is an event, instead of spinning.
    pub fn events(mut self, events: bool) -> Self {
        self.events = events;
        self
    }

    /// Records when work completed: [`Completion::timestamp`](crate::Completion::timestamp).
    ///
    /// Without support by the device, [`EndpointBuilder::build`] returns [`Error::CompletionFields`].
    pub fn timestamps(mut self, timestamps: bool) -> Self {
        self.timestamps = timestamps;
        self
    }

    /// Access that the peer has to [`ExposedRegion`](crate::ExposedRegion)s of this domain, from [`Access::REMOTE`].
    ///
    /// None by default, so that reads and writes of the peer fail. With [`EndpointBuilder::keepalive`], and on connections
    /// by address, the peer always has [`Access::REMOTE_WRITE`].
    pub fn peer_access(mut self, access: Access) -> Self {
        self.init = self.init.peer_access(access);
        self
    }

    /// First packet sequence number (PSN) to send, 24 bits; random by default.
    pub fn psn(mut self, psn: u32) -> Self {
        self.init = self.init.psn(psn);
        self
    }

    /// Posts by `ibv_post_send` even if `ibv_wr_*` is available.
    pub fn classic_post(mut self, classic: bool) -> Self {
        self.classic_post = classic;
        self
    }

    /// Polls by `ibv_poll_cq` even if `ibv_start_poll` is available.
    pub fn classic_poll(mut self, classic: bool) -> Self {
        self.classic_poll = classic;
        self
    }

    /// Creates a completion queue and a queue pair, and brings the queue pair to INIT.
    ///
    /// Receives can then be posted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on iWARP, EFA and usNIC; [`Error::WrongType`]; [`Error::Keepalive`]; the errors of
    /// [`QueuePair::init`], [`CompletionQueueBuilder::build`] and [`QueuePairBuilder::build`].
    ///
    /// [`QueuePair::init`]: crate::QueuePair::init
    /// [`CompletionQueueBuilder::build`]: crate::cq::CompletionQueueBuilder::build
    /// [`QueuePairBuilder::build`]: crate::QueuePairBuilder::build
    pub fn build(self) -> Result<Endpoint> {
        self.require_connection("EndpointBuilder::build")?;
        self.create(None)
    }

    /// Creates a queue pair in `set`, and brings it to INIT.
    ///
    /// It completes to the queue of the set. Receives can then be posted. The set determines how it is polled, so
    /// [`EndpointBuilder::events`], [`EndpointBuilder::timestamps`] and [`EndpointBuilder::classic_poll`] have no
    /// effect.
    ///
    /// # Errors
    /// [`Error::EndpointSetFull`] when the endpoint may need more completions than the set has room for;
    /// [`Error::ForeignContext`] when the set belongs to another context; the errors of [`EndpointBuilder::build`].
    pub fn build_in(self, set: &mut EndpointSet) -> Result<EndpointKey> {
        self.require_connection("EndpointBuilder::build_in")?;
        set.insert(self, None)
    }

    fn require_connection(&self, operation: &'static str) -> Result<()> {
        if [QueuePairType::RC, QueuePairType::UC].contains(&self.qp_type) {
            return Ok(());
        }
        let advice = "an Endpoint is an RC or UC connection; see EndpointBuilder::build_datagrams for UD, and \
                       ProtectionDomain::queue_pair for other types";
        Err(Error::WrongType { operation, qp_type: self.qp_type, advice })
    }

    /// Creates a completion queue and a queue pair for datagrams, ready to send and receive.
    ///
    /// Datagrams with another queue key than `qkey` are dropped. Keys with the highest bit set are for privileged
    /// users. [`EndpointBuilder::qp_type`] and [`EndpointBuilder::peer_access`] have no effect.
    ///
    /// # Errors
    /// [`Error::WrongType`] with a receive pool, pending sends or a keepalive, which are for connections; the errors of
    /// [`EndpointBuilder::build`], and of [`QueuePair::init_datagrams`](crate::QueuePair::init_datagrams).
    pub fn build_datagrams(self, qkey: u32) -> Result<DatagramEndpoint> {
        let builder = self.for_datagrams()?;
        let port = builder.init.port_number();
        Ok(DatagramEndpoint::new(builder.create(Some(qkey))?, port, qkey))
    }

    /// Creates a queue pair for datagrams in `set`, ready to send and receive.
    ///
    /// The set lends it: [`EndpointMut::send_to`](crate::endpoint::EndpointMut::send_to) posts datagrams, and
    /// [`EndpointSet::poll_each_from`] returns their senders.
    ///
    /// # Errors
    /// Like [`EndpointBuilder::build_datagrams`] and [`EndpointBuilder::build_in`].
    pub fn build_datagrams_in(self, set: &mut EndpointSet, qkey: u32) -> Result<EndpointKey> {
        set.insert(self.for_datagrams()?, Some(qkey))
    }

    /// Sets the type, and checks that there are no options for connections.
    fn for_datagrams(mut self) -> Result<Self> {
        self.qp_type = QueuePairType::UD;
        if self.pool.is_some() {
            let advice = "a datagram endpoint posts its own receives; leave EndpointBuilder::receive_pool unset";
            return Err(Error::WrongType { operation: "EndpointBuilder::receive_pool", qp_type: self.qp_type, advice });
        }
        if let Some(Some(_)) = self.keepalive {
            let advice = "datagrams have no connection; leave EndpointBuilder::keepalive unset";
            return Err(Error::WrongType { operation: "EndpointBuilder::keepalive", qp_type: self.qp_type, advice });
        }
        if self.pending_sends != 0 {
            let advice = "datagram sends complete without an ACK; leave EndpointBuilder::pending_sends unset";
            return Err(Error::WrongType {
                operation: "EndpointBuilder::pending_sends",
                qp_type: self.qp_type,
                advice,
            });
        }
        Ok(self)
    }

    pub(super) fn context(&self) -> &Context {
        self.pd.context()
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        self.pd
    }

    pub(super) fn pool(&self) -> Option<&Arc<srq::Shared>> {
        self.pool.as_ref()
    }

    /// Number of completion queue entries for its sends, and for receives outside of a pool.
    pub(super) fn depths(&self) -> (u32, u32) {
        (self.send_depth, if self.pool.is_some() { 0 } else { self.recv_depth })
    }

    /// The time limit of the keepalive, checked.
    pub(super) fn keepalive_limit(&self) -> Result<Option<Duration>> {
        let default = if self.by_address { Some(CM_DEFAULT) } else { None };
        if self.qp_type != QueuePairType::RC {
            return match self.keepalive {
                Some(Some(_)) => {
                    let advice = "a peer acknowledges nothing; leave EndpointBuilder::keepalive unset";
                    let operation = "EndpointBuilder::keepalive";
                    Err(Error::WrongType { operation, qp_type: self.qp_type, advice })
                }
                _ => Ok(None),
            };
        }
        let Some(within) = self.keepalive.unwrap_or(default) else { return Ok(None) };
        if !(LIMITS[0]..=LIMITS[1]).contains(&within) {
            return Err(KeepaliveError::OutOfRange { within }.into());
        }
        let context = self.pd.context();
        match Quirks::driver_without_empty_writes(context.attributes()) {
            None => Ok(Some(within)),
            Some(driver) => {
                let device = context.device_name().into();
                Err(KeepaliveError::Unsupported { device, driver, within }.into())
            }
        }
    }

    /// Rights of the peer.
    fn granted(&self, keepalive: Option<Duration>) -> InitOptions {
        match self.qp_type == QueuePairType::RC && (self.by_address || keepalive.is_some()) {
            true => self.init.grant(Access::REMOTE_WRITE),
            false => self.init,
        }
    }

    /// Number of entries of the endpoint's completion queue. All receives of a pool may complete to it.
    fn completions(&self, keepalive: Option<Duration>) -> u32 {
        let (sends, receives) = self.depths();
        let shared = self.pool.as_ref().map_or(0, |pool| pool.receives());
        let probe = u32::from(keepalive.is_some());
        sends.saturating_add(receives).saturating_add(shared).saturating_add(probe).max(1)
    }

    /// Resolves the local port and GID and the keepalive, and checks that the device is supported.
    fn resolve(&self) -> Result<(Local, Option<Duration>)> {
        let context = self.pd.context();
        match context.transport_type() {
            TransportType::IB => {}
            // iWARP connects only by rdma_cm, and its sends do not all complete in order.
            TransportType::IWARP => return Err(context.unsupported("an Endpoint (it is an iWARP device)")),
            // EFA completes datagrams in any order.
            _ => return Err(context.unsupported("an Endpoint (its work need not complete in order)")),
        }
        let keepalive = self.keepalive_limit()?;
        Ok((Local::resolve(context, &self.granted(keepalive))?, keepalive))
    }

    /// Creates an endpoint, for datagrams if there is a queue key.
    fn create(self, datagrams: Option<u32>) -> Result<Endpoint> {
        let context = self.pd.context();
        // Before anything is created, since this step fails most often.
        let (local, keepalive) = self.resolve()?;
        let mut fields = FIELDS;
        fields.set(WcFields::COMPLETION_TIMESTAMP, self.timestamps);
        fields.set(SENDER_FIELDS, datagrams.is_some());
        let mut cq = context.completion_queue(self.completions(keepalive)).fields(fields).classic(self.classic_poll);
        if self.events {
            cq = cq.channel(&context.create_channel()?);
        }
        let cq = cq.build()?;
        let poster = self.create_poster(&cq, local, keepalive, datagrams)?;
        Ok(Endpoint { poster, cq })
    }

    /// Creates an endpoint of the set that `cq` belongs to.
    pub(super) fn create_for(self, cq: &CompletionQueue, datagrams: Option<u32>) -> Result<Poster> {
        let (local, keepalive) = self.resolve()?;
        self.create_poster(cq, local, keepalive, datagrams)
    }

    fn create_poster(
        self,
        cq: &CompletionQueue,
        local: Local,
        keepalive: Option<Duration>,
        datagrams: Option<u32>,
    ) -> Result<Poster> {
        let init = self.granted(keepalive);
        let qp = self
            .pd
            .queue_pair(cq, cq)
            .qp_type(self.qp_type)
            // With an entry for a probe of the keepalive.
            .send_depth(self.send_depth.saturating_add(u32::from(keepalive.is_some())))
            .recv_depth(self.recv_depth)
            .inline_data(self.inline_data)
            // A batch may fill the ring.
            .max_batch(self.send_depth.max(1))
            .max_recv_batch(u32::from(datagrams.is_some() || self.recv_sges > 1))
            .send_sges(self.send_sges)
            // Each datagram is preceded by its header.
            .recv_sges(self.recv_sges.saturating_add(u32::from(datagrams.is_some())))
            .classic(self.classic_post);
        let qp = match &self.pool {
            Some(pool) => qp.receives_of(pool.clone()),
            None => qp,
        };
        let mut qp = qp.build()?;
        // After the queue pair, because its creation has checked that the device supports these depths.
        let slots = match datagrams {
            None => None,
            Some(qkey) => {
                let identity = DatagramIdentity::new(self.pd, self.init.port_number(), qp.number(), qkey, Some(local));
                Some(Box::new(DatagramSlots::new(identity, self.send_depth, self.recv_depth)?))
            }
        };
        let address = match datagrams {
            None => qp.init_as(local, &init)?,
            Some(qkey) => qp.init_datagrams(qkey, &init)?,
        };
        let settings = Settings {
            max_message: local.max_message,
            // Signals at least every other entry, so that a full ring always has a completion coming.
            max_unsignaled: (self.send_depth / 2).max(1),
            timestamps: self.timestamps,
            receive_share: self.receive_share,
        };
        let pending = Pending::new(self.pending_sends, qp.capacity().max_inline_data);
        let (send_depth, recv_depth) = self.depths();
        let mut poster = Poster {
            gates: Gates::SHUT,
            countdown: Countdown::OFF,
            live: Live {
                qp: ManuallyDrop::new(qp),
                sends: Ring::with_pending(send_depth, self.pending_sends, 0, Kind::signaled(Operation::Send)),
                receives: Ring::new(recv_depth, RECEIVE, Kind::signaled(Operation::Receive)),
                pool: self.pool,
                datagrams: slots,
                windows: None,
                keepalive: keepalive.map(Keepalive::new).map(Box::new),
                peer_left: false,
                destroyed: false,
            },
            pd: self.pd.clone(),
            settings,
            address,
            run: UnsignaledRun { len: 0, end: 0 },
            slow: SlowResults::NONE,
            pending,
            poisoned: false,
            interface: PhantomData,
        };
        poster.open_gates();
        Ok(poster)
    }
}
