//! Creating endpoints.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::datagram::{DatagramEndpoint, Kept};
use super::pending::Pending;
use super::ring::{Kind, Ring};
use super::{
    Endpoint, EndpointKey, EndpointSet, Gates, Live, Operation, Poster, RECEIVE, Rare, ReceivePool, Run, Settings,
};
use crate::qp::Local;
use crate::{
    Access, CompletionQueue, Context, Error, InitOptions, ProtectionDomain, QueuePairType, Result, TransportType,
    WcFields, srq,
};

/// Fields of completions that endpoints look at.
pub(super) const FIELDS: WcFields = WcFields::BYTE_LEN.union(WcFields::IMM);

/// Fields that say whom a datagram has come from.
const SENDER_FIELDS: WcFields =
    WcFields::SRC_QP.union(WcFields::SLID).union(WcFields::SL).union(WcFields::DLID_PATH_BITS);

/// Describes an endpoint. Made by [`Endpoint::builder`].
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // As many sends in flight as there can be answers, and room for a burst of requests.
/// let mut server = Endpoint::builder(&pd).send_depth(64).recv_depth(256).build()?;
/// // Small messages are copied into the work request, and `wait` sleeps instead of polling.
/// let mut client = Endpoint::builder(&pd).inline_data(32).events(true).build()?;
/// server.receive(pd.allocate(4096)?)?;
/// server.connect(&client.address())?;
/// client.connect(&server.address())?;
///
/// client.send_inline(b"hello")?;
/// client.wait(Duration::from_secs(60))?.ok()?;
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
    init: InitOptions,
    send_depth: u32,
    recv_depth: u32,
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
            init: InitOptions::default(),
            send_depth: 128,
            recv_depth: 128,
            pending_sends: 0,
            inline_data: 0,
            events: false,
            timestamps: false,
            classic_post: false,
            classic_poll: false,
        }
    }

    /// Type of the connection: [`QueuePairType::RC`], which it is unless set, or [`QueuePairType::UC`].
    ///
    /// Over an unreliable connection messages get lost without anybody being told, whole or in part: a send that completed has
    /// left, and no more. There are no reads and atomics. For datagrams there is [`EndpointBuilder::build_datagrams`].
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Port of the device, counted from 1; 1 unless set.
    pub fn port(mut self, port: u8) -> Self {
        self.init = self.init.port(port);
        self
    }

    /// Index of the GID to connect from; [`Context::recommended_gid`](crate::Context::recommended_gid) unless set.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.init = self.init.gid_index(index);
        self
    }

    /// Index of the partition key to connect with, see [`Context::pkey_index`](crate::Context::pkey_index); 0 unless set, which on
    /// RoCE is the only one.
    pub fn pkey_index(mut self, index: u16) -> Self {
        self.init = self.init.pkey_index(index);
        self
    }

    /// Sends, writes, reads and atomics that can be in flight, or done and not yet polled; 128 unless set.
    pub fn send_depth(mut self, work: u32) -> Self {
        self.send_depth = work;
        self
    }

    /// Sends, writes, reads and atomics that may wait for room in the send queue; 0 unless set.
    ///
    /// Work beyond [`EndpointBuilder::send_depth`] then waits in the endpoint instead of being refused. [`Endpoint::poll`] and
    /// [`Endpoint::wait`], or those of its [`EndpointSet`], post it in order when completions make room. With `work` pieces
    /// pending, more work is refused with [`PostError::EndpointFull`](crate::PostError::EndpointFull), which gives the buffer
    /// back. Work of a [`Batch`](crate::Batch) never waits, and is refused while other work is pending.
    ///
    /// This absorbs a burst and guarantees nothing. A client may send its next request as soon as it has an answer, before the
    /// server gets the ACK of that answer, and verbs do not bound how much later the ACK arrives. When packets are lost, a client
    /// that keeps n requests unanswered can leave more than n answers unacknowledged. A server that answers requests handles
    /// `EndpointFull` by ending that client, or uses [`EndpointBuilder::receive_share`], which holds a request back until there
    /// is room for its answer.
    ///
    /// When the connection fails, pending work completes as flushed, after the posted work. [`Endpoint::close`] and
    /// [`EndpointSet::remove`] return its buffers with the others.
    pub fn pending_sends(mut self, work: u32) -> Self {
        self.pending_sends = work;
        self
    }

    /// Receives that can be posted, or done and not yet polled; 128 unless set.
    pub fn recv_depth(mut self, receives: u32) -> Self {
        self.recv_depth = receives;
        self
    }

    /// Takes receives from `pool` instead of its own.
    ///
    /// [`Endpoint::receive`] is refused then, and [`EndpointBuilder::recv_depth`] has no effect. Every receive of the pool may
    /// complete to this endpoint, so its completion queue has room for its sends and for all of them. Many endpoints that share a
    /// large pool need less memory in an [`EndpointSet`](crate::EndpointSet), which has one queue.
    pub fn receive_pool(mut self, pool: &ReceivePool) -> Self {
        self.pool = Some(pool.shared().clone());
        self
    }

    /// Messages of the peer that may wait in an [`EndpointSet`], each in a receive of the pool; no limit unless set.
    ///
    /// It has no effect without [`EndpointBuilder::receive_pool`] and [`EndpointBuilder::build_in`].
    ///
    /// With a share, the endpoints of the set take turns. [`EndpointSet::poll`] first moves all completions of the device into
    /// a backlog for each endpoint, and then hands out one completion of each endpoint per round. A peer that floods therefore
    /// delays another by one completion, however many messages it has sent. A message stays in the backlog while
    /// [`EndpointBuilder::send_depth`] and [`EndpointBuilder::pending_sends`] are used up, so that there is room for its answer
    /// when it is handed out.
    ///
    /// A message that finds `messages` others in the backlog ends the connection. The queue pair goes into error, and the set
    /// hands the message out next, as a failed receive whose [`Completion::exceeded_share`](crate::Completion::exceeded_share)
    /// is `messages`. [`EndpointSet::remove`] then returns the buffers of the backlog. Choose at least as many messages as the
    /// protocol allows a peer to have unanswered. The peer is not told: its next send fails, but a peer that only waits for
    /// answers waits on, so tell it over the connection by which addresses were exchanged.
    ///
    /// One peer thus holds a bounded number of the pool's receives: `messages` in the backlog, those whose answers have not
    /// completed (`send_depth` and `pending_sends`), and those that the caller keeps. The device does not enforce this: it
    /// gives a receive to whichever message arrives first. Between two polls one peer can therefore take all posted receives.
    /// Other peers then get RNR NAKs, and retry until the set is polled and receives are posted again. Peers that must not
    /// affect each other at all need separate receives ([`EndpointBuilder::recv_depth`]) or separate pools.
    pub fn receive_share(mut self, messages: u32) -> Self {
        self.receive_share = Some(messages);
        self
    }

    /// Bytes that can be sent inline; 0 unless set. Small messages are faster that way on most devices, which allow some
    /// hundred bytes.
    pub fn inline_data(mut self, bytes: u32) -> Self {
        self.inline_data = bytes;
        self
    }

    /// Lets [`Endpoint::wait`] sleep until there is an event, instead of spinning.
    pub fn events(mut self, events: bool) -> Self {
        self.events = events;
        self
    }

    /// Notes when work completed: [`Completion::timestamp`](crate::Completion::timestamp). Devices without timestamps
    /// refuse it with [`Error::CompletionFields`].
    pub fn timestamps(mut self, timestamps: bool) -> Self {
        self.timestamps = timestamps;
        self
    }

    /// Which of the rights in [`Access::REMOTE`] the peer may use on [`ExposedRegion`](crate::ExposedRegion)s of this domain;
    /// none unless set, so that its reads and writes fail.
    pub fn peer_access(mut self, access: Access) -> Self {
        self.init = self.init.peer_access(access);
        self
    }

    /// First packet sequence number to send, 24 bits; a random one unless set.
    pub fn psn(mut self, psn: u32) -> Self {
        self.init = self.init.psn(psn);
        self
    }

    /// Posts by `ibv_post_send` even where `ibv_wr_*` exists.
    pub fn classic_post(mut self, classic: bool) -> Self {
        self.classic_post = classic;
        self
    }

    /// Polls by `ibv_poll_cq` even where `ibv_start_poll` exists.
    pub fn classic_poll(mut self, classic: bool) -> Self {
        self.classic_poll = classic;
        self
    }

    /// Creates a completion queue and a queue pair, and brings the queue pair to INIT, so that receives can be posted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on iWARP, EFA and usNIC; [`Error::WrongType`]; those of [`QueuePair::init`],
    /// [`CompletionQueueBuilder::build`] and [`QueuePairBuilder::build`].
    ///
    /// [`QueuePair::init`]: crate::QueuePair::init
    /// [`CompletionQueueBuilder::build`]: crate::CompletionQueueBuilder::build
    /// [`QueuePairBuilder::build`]: crate::QueuePairBuilder::build
    pub fn build(self) -> Result<Endpoint> {
        self.require_connection("EndpointBuilder::build")?;
        self.create(None)
    }

    /// Creates a queue pair that completes to the queue of `set`, which the endpoint then belongs to, and brings it to INIT, so
    /// that receives can be posted.
    ///
    /// How completions are taken is for the set to say: [`EndpointBuilder::events`], [`EndpointBuilder::timestamps`] and
    /// [`EndpointBuilder::classic_poll`] do not matter here.
    ///
    /// # Errors
    /// [`Error::EndpointSetFull`] when there may be more completions than the set has room for; [`Error::ForeignContext`] when the
    /// set belongs to another context; those of [`EndpointBuilder::build`].
    pub fn build_in(self, set: &mut EndpointSet) -> Result<EndpointKey> {
        self.require_connection("EndpointBuilder::build_in")?;
        set.insert(self)
    }

    fn require_connection(&self, what: &'static str) -> Result<()> {
        if [QueuePairType::RC, QueuePairType::UC].contains(&self.qp_type) {
            return Ok(());
        }
        let instead = "an Endpoint is a connection, of the type RC or UC; see EndpointBuilder::build_datagrams, and for \
                       other types ProtectionDomain::queue_pair";
        Err(Error::WrongType { what, qp_type: self.qp_type, instead })
    }

    /// Creates a completion queue and a queue pair for datagrams, ready to send and receive. Datagrams with another queue key than
    /// `qkey` are dropped; keys with the highest bit set are for privileged users. The type and the rights of a peer do not matter.
    ///
    /// # Errors
    /// [`Error::WrongType`] with a pool of receives or with pending sends, which are for connections; those of
    /// [`EndpointBuilder::build`], and of [`QueuePair::init_datagrams`](crate::QueuePair::init_datagrams).
    pub fn build_datagrams(mut self, qkey: u32) -> Result<DatagramEndpoint> {
        self.qp_type = QueuePairType::UD;
        if self.pool.is_some() {
            let instead = "a datagram endpoint posts its own receives; leave EndpointBuilder::receive_pool unset";
            return Err(Error::WrongType { what: "EndpointBuilder::receive_pool", qp_type: self.qp_type, instead });
        }
        if self.pending_sends != 0 {
            let instead = "datagram sends complete without an ACK; leave EndpointBuilder::pending_sends unset";
            return Err(Error::WrongType { what: "EndpointBuilder::pending_sends", qp_type: self.qp_type, instead });
        }
        let port = self.init.port_number();
        Ok(DatagramEndpoint::new(self.create(Some(qkey))?, port, qkey))
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

    /// Entries that a completion queue needs for its sends, and for receives of its own.
    pub(super) fn depths(&self) -> (u32, u32) {
        (self.send_depth, if self.pool.is_some() { 0 } else { self.recv_depth })
    }

    /// Entries of the endpoint's own completion queue. All receives of a pool may complete to it.
    fn completions(&self) -> u32 {
        let (sends, receives) = self.depths();
        let shared = self.pool.as_ref().map_or(0, |pool| pool.receives());
        sends.saturating_add(receives).saturating_add(shared).max(1)
    }

    /// Finds out where to connect from, or why not.
    fn resolve(&self) -> Result<Local> {
        let context = self.pd.context();
        match context.transport_type() {
            TransportType::IB => {}
            // Connections of iWARP are made by rdma_cm, and its sends do not all complete in order.
            TransportType::IWARP => return Err(context.unsupported("an Endpoint (it is an iWARP device)")),
            // Datagrams of EFA complete in any order.
            _ => return Err(context.unsupported("an Endpoint (its work need not complete in order)")),
        }
        Local::resolve(context, &self.init)
    }

    /// For datagrams with that queue key, if there is one.
    fn create(self, datagrams: Option<u32>) -> Result<Endpoint> {
        let context = self.pd.context();
        // Before anything is created, since this is what most often fails.
        let local = self.resolve()?;
        let mut fields = FIELDS;
        fields.set(WcFields::COMPLETION_TIMESTAMP, self.timestamps);
        fields.set(SENDER_FIELDS, datagrams.is_some());
        let mut cq = context.completion_queue(self.completions()).fields(fields).classic(self.classic_poll);
        if self.events {
            cq = cq.channel(&context.create_channel()?);
        }
        let cq = cq.build()?;
        let poster = self.create_poster(&cq, local, datagrams)?;
        Ok(Endpoint { poster, cq })
    }

    /// As [`EndpointBuilder::create`], of a set that `cq` belongs to.
    pub(super) fn create_for(self, cq: &CompletionQueue) -> Result<Poster> {
        let local = self.resolve()?;
        self.create_poster(cq, local, None)
    }

    fn create_poster(self, cq: &CompletionQueue, local: Local, datagrams: Option<u32>) -> Result<Poster> {
        let qp = self
            .pd
            .queue_pair(cq, cq)
            .qp_type(self.qp_type)
            .send_depth(self.send_depth)
            .recv_depth(self.recv_depth)
            .inline_data(self.inline_data)
            // A batch may fill the ring.
            .max_batch(self.send_depth)
            .max_recv_batch(if datagrams.is_some() { 1 } else { 0 })
            // Before a datagram comes its header.
            .recv_sges(if datagrams.is_some() { 2 } else { 1 })
            .classic(self.classic_post);
        let qp = match &self.pool {
            Some(pool) => qp.receives_of(pool.clone()),
            None => qp,
        };
        let mut qp = qp.build()?;
        // The device has found the queues not too long.
        let kept = match datagrams {
            None => None,
            Some(_) => Some(Box::new(Kept::new(self.pd, self.send_depth, self.recv_depth)?)),
        };
        let address = match datagrams {
            None => qp.init_as(local, &self.init)?,
            Some(qkey) => qp.init_datagrams(qkey, &self.init)?,
        };
        let settings = Settings {
            max_message: local.max_message,
            // At least every other entry, so that a full ring always has a completion coming.
            max_unsignaled: (self.send_depth / 2).max(1),
            timestamps: self.timestamps,
            receive_share: self.receive_share,
        };
        let pending = Pending::new(self.pending_sends, qp.capacity().max_inline_data);
        let (send_depth, recv_depth) = self.depths();
        let mut poster = Poster {
            gates: Gates::SHUT,
            live: Live {
                qp: ManuallyDrop::new(qp),
                sends: Ring::with_pending(send_depth, self.pending_sends, 0, Kind::signaled(Operation::Send)),
                receives: Ring::new(recv_depth, RECEIVE, Kind::signaled(Operation::Receive)),
                pool: self.pool,
                datagrams: kept,
                destroyed: false,
            },
            pd: self.pd.clone(),
            settings,
            address,
            run: Run { len: 0, end: 0 },
            rare: Rare::NOTHING,
            pending,
            poisoned: false,
            interface: PhantomData,
        };
        poster.open_gates();
        Ok(poster)
    }
}
