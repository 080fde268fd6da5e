//! Sets up the objects that a loop runs on.

use std::num::NonZeroU32;
use std::sync::Arc;

use rdma_rivals::{BATCH, DEPTH, INLINE, LEN, Result};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::AddressHandleAttribute;
use sideway::ibverbs::completion::{BasicCompletionQueue, ExtendedCompletionQueue, GenericCompletionQueue};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::{DeviceContext, Mtu};
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, ExtendedQueuePair, GenericQueuePair, QueuePair, QueuePairAttribute, QueuePairBuilder,
    QueuePairState, SendOperationFlags,
};

/// The device and a registered buffer.
pub(crate) struct Rig {
    context: Arc<DeviceContext>,
    pd: Arc<ProtectionDomain>,
    mr: Arc<MemoryRegion>,
    /// Memory that `mr` registers.
    data: Vec<u8>,
}

/// A queue pair, a completion queue of the same kind, and the addresses and keys for operations.
pub(crate) struct Objects<Q, C> {
    pub(crate) qp: Q,
    pub(crate) cq: C,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) inline: [u8; INLINE],
}

pub(crate) type Extended = Objects<ExtendedQueuePair, Arc<ExtendedCompletionQueue>>;
pub(crate) type Basic = Objects<BasicQueuePair, Arc<BasicCompletionQueue>>;
pub(crate) type Generic = Objects<GenericQueuePair, GenericCompletionQueue>;

impl Rig {
    pub(crate) fn new() -> Result<Self> {
        let devices = DeviceList::new()?;
        let context = devices.get(0).ok_or("no device")?.open()?;
        let pd = context.alloc_pd()?;
        let data = vec![0_u8; LEN as usize * BATCH];
        let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite;
        // SAFETY: the rig keeps the memory as long as its registration, and the stub moves no data.
        let mr = unsafe { pd.reg_mr(data.as_ptr().expose_provenance(), data.len(), access)? };
        Ok(Rig { context, pd, mr, data })
    }

    pub(crate) fn extended(&self) -> Result<Extended> {
        let cq = self.context.create_cq_builder().setup_cqe(DEPTH).build_ex()?;
        let qp = self.queue_pair(cq.clone()).build_ex()?;
        self.objects(qp, cq)
    }

    pub(crate) fn basic(&self) -> Result<Basic> {
        let mut cq = self.context.create_cq_builder().setup_cqe(DEPTH).build()?;
        // The number of entries per poll with which sideway is fastest; its default is 32. One poll returns all completions of a
        // round of `BATCH` requests and shows that there are no more.
        let poll_batch = NonZeroU32::new(BATCH as u32 + 1).ok_or("empty poll batch")?;
        Arc::get_mut(&mut cq).ok_or("the queue is shared")?.setup_poll_batch(poll_batch);
        let qp = self.queue_pair(cq.clone()).build()?;
        self.objects(qp, cq)
    }

    fn queue_pair(&self, cq: impl Into<GenericCompletionQueue>) -> QueuePairBuilder {
        let cq = cq.into();
        let mut builder = self.pd.create_qp_builder();
        builder.setup_max_send_wr(DEPTH).setup_max_recv_wr(DEPTH).setup_max_inline_data(LEN);
        builder.setup_send_ops_flags(SendOperationFlags::Send | SendOperationFlags::Write);
        builder.setup_send_cq(cq.clone()).setup_recv_cq(cq);
        builder
    }

    fn objects<Q: QueuePair, C>(&self, mut qp: Q, cq: C) -> Result<Objects<Q, C>> {
        to_rts(&mut qp)?;
        let (local, mut inline) = (self.mr.get_ptr() as u64, [0; INLINE]);
        inline.copy_from_slice(&self.data[..INLINE]);
        let (lkey, rkey) = (self.mr.lkey(), self.mr.rkey());
        Ok(Objects { qp, cq, lkey, rkey, local, remote: local, inline })
    }
}

impl From<Extended> for Generic {
    fn from(Objects { qp, cq, lkey, rkey, local, remote, inline }: Extended) -> Self {
        Objects { qp: qp.into(), cq: cq.into(), lkey, rkey, local, remote, inline }
    }
}

impl From<Basic> for Generic {
    fn from(Objects { qp, cq, lkey, rkey, local, remote, inline }: Basic) -> Self {
        Objects { qp: qp.into(), cq: cq.into(), lkey, rkey, local, remote, inline }
    }
}

fn to_rts(qp: &mut impl QueuePair) -> Result<()> {
    let mut init = QueuePairAttribute::new();
    init.setup_state(QueuePairState::Init).setup_port(1).setup_pkey_index(0);
    init.setup_access_flags(AccessFlags::LocalWrite | AccessFlags::RemoteWrite);
    qp.modify(&init)?;
    let mut address = AddressHandleAttribute::new();
    address.setup_port(1);
    let mut rtr = QueuePairAttribute::new();
    rtr.setup_state(QueuePairState::ReadyToReceive).setup_path_mtu(Mtu::Mtu4096).setup_address_vector(&address);
    rtr.setup_dest_qp_num(1).setup_rq_psn(0).setup_max_dest_read_atomic(1).setup_min_rnr_timer(12);
    qp.modify(&rtr)?;
    let mut rts = QueuePairAttribute::new();
    rts.setup_state(QueuePairState::ReadyToSend).setup_sq_psn(0).setup_max_read_atomic(1);
    rts.setup_timeout(14).setup_retry_cnt(6).setup_rnr_retry(7);
    qp.modify(&rts)?;
    Ok(())
}
