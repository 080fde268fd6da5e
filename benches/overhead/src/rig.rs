//! Sets up the objects that a loop runs on.

use std::error::Error;
use std::ffi::{c_int, c_void};

use libloading::os::unix::Library;
use rdma_safe::address::AddressVector;
use rdma_safe::interface::Interface;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    Access, AddressHandle, Buffer, CompletionQueue, Device, Endpoint, Gid, InitOptions, Mtu, ProtectionDomain,
    QueuePair, QueuePairState, QueuePairType, Remote, Sge, SharedReceiveQueue,
};
use rdma_sys::*;

pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Work requests in a batch.
pub(crate) const BATCH: usize = 16;

/// Bytes of an inline send.
pub(crate) const INLINE: usize = 32;

/// Bytes of any other operation, except atomics, which have eight.
const LEN: u32 = 64;

/// Queue key of datagrams.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// Value that a loop returns if a verb fails.
pub(crate) const FAILED: u64 = u64::MAX;

/// Configuration of the objects and of the stub for a loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setting {
    /// Whether to use `ibv_post_send` and `ibv_poll_cq` instead of `ibv_wr_*` and `ibv_start_poll`.
    pub(crate) classic: bool,
    /// Whether a posted receive completes immediately.
    pub(crate) receive_at_once: bool,
    /// Whether the stub generates completions, a batch at a time.
    pub(crate) endless: bool,
    /// Whether operations are atomics, with eight bytes.
    pub(crate) atomic: bool,
    /// Whether the queue pair is of type UD.
    pub(crate) datagrams: bool,
}

/// The objects for C: `struct objects` of loops.c.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Objects {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) qp_ex: *mut ibv_qp_ex,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) cq_ex: *mut ibv_cq_ex,
    pub(crate) ah: *mut ibv_ah,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) len: u32,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
    pub(crate) destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
}

/// Objects of the raw API.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) srq: SharedReceiveQueue,
    pub(crate) pd: ProtectionDomain,
    pub(crate) sge: Sge,
    pub(crate) remote: Remote,
    pub(crate) buffer: Buffer,
    pub(crate) handle: AddressHandle,
}

/// Objects of the owned API.
#[derive(Debug)]
pub(crate) struct Owned<I: Interface> {
    pub(crate) endpoint: Endpoint<I>,
    pub(crate) buffers: [Option<Buffer>; BATCH],
}

/// The stub, which replaces libibverbs, and its device.
pub(crate) struct Rig {
    receive_at_once: unsafe extern "C" fn(*mut ibv_qp, bool),
    endless: unsafe extern "C" fn(*mut ibv_cq, u32),
    pd: ProtectionDomain,
}

impl Rig {
    pub(crate) fn new() -> Result<Self> {
        let path = std::env::var_os("RDMA_SYS_LIBIBVERBS").ok_or("set RDMA_SYS_LIBIBVERBS to the path of the stub")?;
        // SAFETY: the stub has no initialisers, its functions have these signatures, and it stays loaded.
        let (receive_at_once, endless) = unsafe {
            let stub = Library::new(path)?;
            let functions = (*stub.get(b"rdma_stub_receive_at_once\0")?, *stub.get(b"rdma_stub_endless\0")?);
            std::mem::forget(stub);
            functions
        };
        let pd = Device::first()?.open()?.alloc_pd()?;
        Ok(Rig { receive_at_once, endless, pd })
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    pub(crate) fn raw(&self, setting: Setting) -> Result<Raw> {
        let cq = self.pd.context().completion_queue(64).classic(setting.classic).build()?;
        let builder = self.pd.queue_pair(&cq, &cq).send_depth(64).recv_depth(64).inline_data(64);
        let qp = builder.max_batch(BATCH as u32).classic(setting.classic);
        let qp = if setting.datagrams {
            let mut qp = qp.qp_type(QueuePairType::UD).build()?;
            qp.init_datagrams(QKEY, &InitOptions::default())?;
            qp
        } else {
            let mut qp = qp.build()?;
            to_rts(&mut qp)?;
            qp
        };
        let gid = self.pd.context().recommended_gid(1)?;
        let handle = self.pd.address_handle(&AddressVector::from_gid(1, gid.gid, u8::try_from(gid.index)?))?;
        self.set(setting, qp.as_raw(), cq.as_raw());
        let mut buffer = self.pd.allocate(LEN as usize * BATCH)?;
        buffer.set_len(if setting.atomic { 8 } else { LEN as usize })?;
        let sge = buffer.sge();
        let remote = Remote { address: sge.address, rkey: sge.lkey };
        let srq = self.pd.shared_receive_queue(64).max_batch(BATCH as u32).build()?;
        Ok(Raw { qp, cq, srq, pd: self.pd.clone(), sge, remote, buffer, handle })
    }

    /// Creates an endpoint. `convert` turns it into one whose interface is known at compile time.
    pub(crate) fn owned<I: Interface>(
        &self,
        setting: Setting,
        convert: impl FnOnce(Endpoint) -> Result<Endpoint<I>, Endpoint>,
    ) -> Result<Owned<I>> {
        let builder = Endpoint::builder(&self.pd).send_depth(64).recv_depth(64);
        let mut endpoint = builder.classic_post(setting.classic).classic_poll(setting.classic).build()?;
        endpoint.connect(&endpoint.address())?;
        let qp = endpoint.queue_pair().as_raw();
        // SAFETY: the queue pair exists.
        self.set(setting, qp, unsafe { (*qp).send_cq });
        let parts = self.pd.allocate(LEN as usize * BATCH)?.into_chunks(LEN as usize)?;
        let mut parts = parts.into_iter();
        let endpoint = convert(endpoint).map_err(|_| "the endpoint uses the other interface")?;
        Ok(Owned { endpoint, buffers: std::array::from_fn(|_| parts.next()) })
    }

    fn set(&self, setting: Setting, qp: *mut ibv_qp, cq: *mut ibv_cq) {
        // SAFETY: both objects belong to the stub.
        unsafe {
            (self.receive_at_once)(qp, setting.receive_at_once);
            (self.endless)(cq, if setting.endless { BATCH as u32 } else { 0 });
        }
    }
}

impl Raw {
    /// The same objects for C.
    pub(crate) fn objects(&self) -> Objects {
        let verbs = verbs().unwrap_or_else(|error| panic!("{error}"));
        Objects {
            context: self.pd.context().as_raw(),
            pd: self.pd.as_raw(),
            qp: self.qp.as_raw(),
            // NULL for a classic queue pair, whose loops do not use it.
            // SAFETY: the queue pair exists.
            qp_ex: unsafe { (verbs.ibv_qp_to_qp_ex)(self.qp.as_raw()) },
            cq: self.cq.as_raw(),
            // Only loops over extended queues use this pointer.
            cq_ex: self.cq.as_raw().cast(),
            ah: self.handle.as_raw(),
            srq: self.srq.as_raw(),
            local: self.sge.address,
            remote: self.remote.address,
            lkey: self.sge.lkey,
            rkey: self.remote.rkey,
            len: self.sge.len,
            qp_num: self.qp.number(),
            qkey: QKEY,
            destroy_qp: verbs.ibv_destroy_qp,
            reg_mr: verbs.ibv_reg_mr,
            dereg_mr: verbs.ibv_dereg_mr,
        }
    }
}

fn to_rts(qp: &mut QueuePair) -> Result<()> {
    let init = QueuePairAttributes::new().set_state(QueuePairState::INIT);
    let rtr = QueuePairAttributes::new().set_state(QueuePairState::RTR);
    let rts = QueuePairAttributes::new().set_state(QueuePairState::RTS);
    for attributes in [
        init.set_port(1).set_pkey_index(0).set_access(Access::empty()),
        rtr.set_address(AddressVector::from_gid(1, Gid::ZERO, 0))
            .set_path_mtu(Mtu::MTU_4096)
            .set_dest_qp_num(1)
            .set_rq_psn(0)
            .set_max_dest_rd_atomic(1)
            .set_min_rnr_timer(12),
        rts.set_sq_psn(0).set_timeout(14).set_retry_count(6).set_rnr_retry(7).set_max_rd_atomic(1),
    ] {
        qp.modify(&attributes)?;
    }
    Ok(())
}
