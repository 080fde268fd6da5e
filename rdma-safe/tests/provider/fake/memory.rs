//! Protection domains, memory regions, and access to memory by the device.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use rdma_sys::*;

use super::state::{Alloc, Device, Pd, Ptr, State, enter, null, own, set_errno};

pub(super) struct Mr {
    pub(super) alloc: Alloc,
    pub(super) raw: Ptr<ibv_mr>,
    pub(super) pd: usize,
    /// The domain that defines the protection of `pd`. Its keys are valid in all domains that extend it.
    protection: usize,
    /// The pointer given at registration. The device accesses the memory with its provenance.
    memory: Ptr<u8>,
    pub(super) len: usize,
    pub(super) lkey: u32,
    /// Remote key; 0 without remote access.
    pub(super) rkey: u32,
    pub(super) access: u32,
    /// Whether this is a null region.
    null: bool,
    /// Address of the first byte in work requests.
    pub(super) iova: u64,
    /// The device memory of the region.
    pub(super) dm: Option<usize>,
    /// The DMA handle of the registration.
    pub(super) dmah: Option<usize>,
    /// The provider memory of the region.
    pub(super) buf: Option<usize>,
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    enter(context, "ibv_alloc_pd", |state, device| {
        if let Some(errno) = state.fault("ibv_alloc_pd") {
            return null(errno);
        }
        if state.context(context.addr(), "ibv_alloc_pd").is_none() {
            return null(libc::EINVAL);
        }
        let (alloc, raw) = Alloc::new(ibv_pd { context, handle: state.handle() });
        own(raw, device);
        state
            .pds
            .insert(raw.addr(), Pd { alloc, raw: Ptr(raw), context: context.addr(), extends: None, imports: None });
        raw
    })
}

pub(super) unsafe extern "C" fn dealloc_pd(raw: *mut ibv_pd) -> c_int {
    enter(raw, "ibv_dealloc_pd", |state, _| {
        let address = raw.addr();
        if state.pd(address, "ibv_dealloc_pd").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("ibv_dealloc_pd") {
            return errno;
        }
        let children = state.children_of_pd(address);
        if children > 0 {
            state.violation(format!("ibv_dealloc_pd of a domain with {children} objects"));
            return libc::EBUSY;
        }
        if state.pds[&address].imports.is_some() {
            state.violation("ibv_dealloc_pd of an imported domain");
            return libc::EINVAL;
        }
        state.check_imports(address, "ibv_dealloc_pd");
        let pd = state.pds.remove(&address).unwrap();
        state.retire(pd.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    unsafe { reg_mr_iova2(pd, addr, len, addr.addr() as u64, access as c_uint) }
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    enter(pd, "ibv_reg_mr", |state, device| {
        if let Some(errno) = state.fault("ibv_reg_mr") {
            return null(errno);
        }
        if state.pd(pd.addr(), "ibv_reg_mr").is_none() || len == 0 || (iova ^ addr.addr() as u64) % 4096 != 0 {
            return null(libc::EINVAL);
        }
        let access = ibv_access_flags(access);
        let on_demand = (access & IBV_ACCESS_ON_DEMAND).0 != 0;
        if on_demand && state.config.odp == 0 || addr.is_null() && (!on_demand || len != usize::MAX) {
            return null(libc::EINVAL);
        }
        let remote = IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_ATOMIC
            | IBV_ACCESS_FLUSH_GLOBAL
            | IBV_ACCESS_FLUSH_PERSISTENT;
        let remote_change = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        if (access & remote_change).0 != 0 && (access & IBV_ACCESS_LOCAL_WRITE).0 == 0 {
            return null(libc::EINVAL);
        }
        let handle = state.handle();
        let lkey = handle << 8 | 1;
        let rkey = if (access & remote).0 != 0 { handle << 8 | 2 } else { 0 };
        let context = unsafe { (*pd).context };
        let (alloc, raw) = Alloc::new(ibv_mr { context, pd, addr, length: len, handle, lkey, rkey });
        own(raw, device);
        let protection = state.protection(pd.addr());
        let mr = Mr {
            alloc,
            raw: Ptr(raw),
            pd: pd.addr(),
            protection,
            memory: Ptr(addr.cast()),
            len,
            lkey,
            rkey,
            access: access.0,
            null: false,
            iova,
            dm: None,
            dmah: None,
            buf: None,
        };
        state.mrs.insert(raw.addr(), mr);
        raw
    })
}

pub(super) unsafe extern "C" fn dereg_mr(raw: *mut ibv_mr) -> c_int {
    enter(raw, "ibv_dereg_mr", |state, _| {
        let Some(mr) = state.mr(raw.addr(), "ibv_dereg_mr") else { return libc::EINVAL };
        let (lkey, protection) = (mr.lkey, mr.protection);
        if let Some(errno) = state.fault("ibv_dereg_mr") {
            return errno;
        }
        let in_flight = state.qps.values().filter(|qp| state.protection(qp.pd) == protection).any(|qp| qp.uses(lkey));
        let shared = state.srqs.values().filter(|srq| state.protection(srq.pd) == protection).any(|srq| srq.uses(lkey));
        if in_flight || shared {
            state.violation("ibv_dereg_mr of memory that posted work names");
        }
        state.check_imports(raw.addr(), "ibv_dereg_mr");
        let mr = state.mrs.remove(&raw.addr()).unwrap();
        state.retire(mr.alloc);
        0
    })
}

/// An injected fault is the return code, an `ibv_rereg_mr_err_code`.
pub(super) unsafe extern "C" fn rereg_mr(
    raw: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    enter(raw, "ibv_rereg_mr", |state, _| {
        if state.mr(raw.addr(), "ibv_rereg_mr").is_none() {
            return IBV_REREG_MR_ERR_INPUT.0;
        }
        let has = |flag: ibv_rereg_mr_flags| flags as u32 & flag.0 != 0;
        let (moves, translates, allows) =
            (has(IBV_REREG_MR_CHANGE_PD), has(IBV_REREG_MR_CHANGE_TRANSLATION), has(IBV_REREG_MR_CHANGE_ACCESS));
        if flags == 0 || translates && (len == 0 || addr.is_null()) || access != 0 && !allows {
            set_errno(libc::EINVAL);
            return IBV_REREG_MR_ERR_INPUT.0;
        }
        if !state.config.rereg {
            set_errno(libc::EOPNOTSUPP);
            return IBV_REREG_MR_ERR_CMD.0;
        }
        let fault = state.fault("ibv_rereg_mr").unwrap_or(0);
        if fault != 0 {
            set_errno(libc::EIO);
        }
        if fault != 0 && fault != IBV_REREG_MR_ERR_DO_FORK_OLD.0 {
            return fault;
        }
        if moves && state.pd(pd.addr(), "ibv_rereg_mr").is_none() {
            return IBV_REREG_MR_ERR_INPUT.0;
        }
        let protection = moves.then(|| state.protection(pd.addr()));
        let handle = state.handle();
        let mr = state.mrs.get_mut(&raw.addr()).unwrap();
        if let Some(protection) = protection {
            (mr.pd, mr.protection) = (pd.addr(), protection);
            unsafe { (*raw).pd = pd };
        }
        if translates {
            (mr.memory, mr.len, mr.iova) = (Ptr(addr.cast()), len, addr.addr() as u64);
            unsafe { ((*raw).addr, (*raw).length) = (addr, len) };
        }
        if allows {
            mr.access = access as u32;
        }
        (mr.lkey, mr.rkey) = (handle << 8 | 1, handle << 8 | 2);
        unsafe { ((*raw).lkey, (*raw).rkey) = (mr.lkey, mr.rkey) };
        fault
    })
}

/// Registers a DMA-BUF. This device cannot access its bytes.
pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    enter(pd, "ibv_reg_dmabuf_mr", |state, device| {
        if let Some(errno) = state.fault("ibv_reg_dmabuf_mr") {
            return null(errno);
        }
        if !state.config.dmabuf {
            return null(libc::EOPNOTSUPP);
        }
        if state.pd(pd.addr(), "ibv_reg_dmabuf_mr").is_none() || fd < 0 || len == 0 || (offset ^ iova) % 4096 != 0 {
            return null(libc::EINVAL);
        }
        state.dmabufs.push((offset, len, iova));
        let memory = std::ptr::without_provenance_mut(iova as usize);
        add(state, device, pd, memory, len, access as u32, false)
    })
}

pub(super) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    enter(pd, "alloc_null_mr", |state, device| {
        if let Some(errno) = state.fault("alloc_null_mr") {
            return null(errno);
        }
        if state.pd(pd.addr(), "alloc_null_mr").is_none() {
            return null(libc::EINVAL);
        }
        add(state, device, pd, std::ptr::null_mut(), usize::MAX, IBV_ACCESS_LOCAL_WRITE.0, true)
    })
}

pub(super) fn add(
    state: &mut State,
    device: &Arc<Device>,
    pd: *mut ibv_pd,
    memory: *mut u8,
    len: usize,
    access: u32,
    null: bool,
) -> *mut ibv_mr {
    let handle = state.handle();
    let (lkey, rkey) = (handle << 8 | 1, handle << 8 | 2);
    let context = unsafe { (*pd).context };
    let (alloc, raw) = Alloc::new(ibv_mr { context, pd, addr: memory.cast(), length: len, handle, lkey, rkey });
    own(raw, device);
    let protection = state.protection(pd.addr());
    let mr = Mr {
        alloc,
        raw: Ptr(raw),
        pd: pd.addr(),
        protection,
        memory: Ptr(memory),
        len,
        lkey,
        rkey,
        access,
        null,
        iova: memory.addr() as u64,
        dm: None,
        dmah: None,
        buf: None,
    };
    state.mrs.insert(raw.addr(), mr);
    raw
}

impl State {
    /// Number of objects that prevent the deallocation of a domain.
    pub(super) fn children_of_pd(&self, address: usize) -> usize {
        self.mrs.values().filter(|mr| mr.pd == address).count()
            + self.imported_mrs.values().filter(|mr| mr.pd == address).count()
            + self.bufs.values().filter(|buf| buf.pd == address).count()
            + self.ahs.values().filter(|ah| ah.pd == address).count()
            + self.qps.values().filter(|qp| qp.pd == address).count()
            + self.srqs.values().filter(|srq| srq.pd == address).count()
            + self.cqs.values().filter(|cq| cq.domain == Some(address)).count()
            + self.pds.values().filter(|pd| pd.extends.is_some_and(|extends| extends.pd == address)).count()
            + self.work_queues_in(address)
    }

    pub(super) fn is_on_demand(&self, lkey: u32) -> bool {
        self.mrs.values().any(|mr| mr.lkey == lkey && mr.access & IBV_ACCESS_ON_DEMAND.0 != 0)
    }

    /// Whether a work request uses a null region.
    fn is_null(&self, pd: usize, sge: &ibv_sge) -> bool {
        let protection = self.protection(pd);
        self.mrs.values().any(|mr| mr.null && mr.lkey == sge.lkey && mr.protection == protection)
    }

    /// Memory of a local scatter/gather element; `None` if access is not permitted.
    pub(super) fn local(&self, pd: usize, sge: &ibv_sge, write: bool) -> Option<*mut u8> {
        let protection = self.protection(pd);
        let mr = self.mrs.values().find(|mr| mr.lkey == sge.lkey && mr.protection == protection)?;
        let allowed = !write || mr.access & IBV_ACCESS_LOCAL_WRITE.0 != 0;
        mr.at(sge.addr, sge.length.into()).filter(|_| allowed)
    }

    /// Memory that a peer requests by a remote key, through a queue pair of `pd`.
    pub(super) fn remote(
        &self,
        pd: usize,
        rkey: u32,
        addr: u64,
        len: u64,
        access: ibv_access_flags,
    ) -> Option<*mut u8> {
        let protection = self.protection(pd);
        let mr = self.mrs.values().find(|mr| rkey != 0 && mr.rkey == rkey && mr.protection == protection)?;
        mr.at(addr, len).filter(|_| mr.access & access.0 == access.0)
    }

    /// Invalidates the remote key of a region; `false` if no region has this key.
    pub(super) fn invalidate(&mut self, pd: usize, rkey: u32) -> bool {
        let protection = self.protection(pd);
        let mr = self.mrs.values_mut().find(|mr| rkey != 0 && mr.rkey == rkey && mr.protection == protection);
        mr.map(|mr| mr.rkey = 0).is_some()
    }

    /// Reads all elements in order; `None` if one is not registered.
    pub(super) fn gather(&self, pd: usize, sges: &[ibv_sge]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            if self.is_null(pd, sge) {
                bytes.resize(bytes.len() + sge.length as usize, 0);
                continue;
            }
            let from = self.local(pd, sge, false)?;
            bytes.extend_from_slice(&unsafe { read(from, sge.length as usize) });
        }
        Some(bytes)
    }

    /// Writes bytes to the elements in order; `None` if one is not registered for writing, or they are too short.
    pub(super) fn scatter(&self, pd: usize, sges: &[ibv_sge], mut bytes: &[u8]) -> Option<()> {
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let (now, later) = bytes.split_at(bytes.len().min(sge.length as usize));
            if !self.is_null(pd, sge) {
                unsafe { write(self.local(pd, sge, true)?, now) };
            }
            bytes = later;
        }
        bytes.is_empty().then_some(())
    }
}

impl Mr {
    pub(super) fn at(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let offset = addr.checked_sub(self.iova)?;
        let end = offset.checked_add(len)?;
        let memory = |offset| match self.len {
            // The region covers the whole address space.
            usize::MAX if !self.null => std::ptr::with_exposed_provenance_mut(offset),
            _ => unsafe { self.memory.0.add(offset) },
        };
        (end <= self.len as u64).then(|| memory(offset as usize))
    }
}

/// Copies the bytes. A reference is not allowed, since others access the memory.
pub(super) unsafe fn read(from: *const u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
    bytes
}

pub(super) unsafe fn write(to: *mut u8, bytes: &[u8]) {
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
}
