//! DMA handles, and registration by attributes, which libraries support since rdma-core 64.

use std::ffi::c_int;

use rdma_sys::*;

use super::memory::{add, reg_dmabuf_mr, reg_mr_iova2};
use super::state::{Alloc, State, enter, null, own};

pub(super) struct Dmah {
    pub(super) alloc: Alloc,
    pub(super) context: usize,
}

const HAS: [ibv_dmah_init_attr_mask; 3] =
    [IBV_DMAH_INIT_ATTR_MASK_CPU_ID, IBV_DMAH_INIT_ATTR_MASK_PH, IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE];

/// Requires the same attributes as mlx5.
pub(super) unsafe extern "C" fn alloc_dmah(context: *mut ibv_context, attr: *mut ibv_dmah_init_attr) -> *mut ibv_dmah {
    enter(context, "ibv_alloc_dmah", |state, device| {
        let attr = unsafe { *attr };
        if let Some(errno) = state.fault("ibv_alloc_dmah") {
            return null(errno);
        }
        let [cpu, hint, memory_type] = HAS.map(|bit| attr.comp_mask & bit.0 != 0);
        if attr.comp_mask > 7 || attr.ph > 3 || attr.tph_mem_type > 1 {
            state.violation("ibv_alloc_dmah with attributes that are not in the manual page");
            return null(libc::EINVAL);
        }
        if state.context(context.addr(), "ibv_alloc_dmah").is_none() || !hint || cpu != memory_type {
            return null(libc::EINVAL);
        }
        state.dmah_attrs.push(attr);
        let (alloc, raw) = Alloc::new(ibv_dmah { context });
        own(raw, device);
        state.dmahs.insert(raw.addr(), Dmah { alloc, context: context.addr() });
        raw
    })
}

pub(super) unsafe extern "C" fn dealloc_dmah(raw: *mut ibv_dmah) -> c_int {
    enter(raw, "ibv_dealloc_dmah", |state, _| {
        let address = raw.addr();
        if state.dmah(address, "ibv_dealloc_dmah").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("ibv_dealloc_dmah") {
            return errno;
        }
        if state.mrs.values().any(|mr| mr.dmah == Some(address)) {
            state.violation("ibv_dealloc_dmah of a handle that regions have");
            return libc::EBUSY;
        }
        let dmah = state.dmahs.remove(&address).unwrap();
        state.retire(dmah.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    const VERB: &str = "ibv_reg_mr_ex";
    let attr = unsafe { *attr };
    let has = |bit: ibv_mr_init_attr_mask| attr.comp_mask & u64::from(bit.0) != 0;
    let check = |state: &mut State| {
        if let Some(errno) = state.fault(VERB) {
            return Err(errno);
        }
        let context = state.pd(pd.addr(), VERB).ok_or(libc::EINVAL)?.context;
        if attr.comp_mask > 0x3f || has(IBV_REG_MR_MASK_FD) == has(IBV_REG_MR_MASK_ADDR) {
            state.violation("ibv_reg_mr_ex with attributes that are not in the manual page");
            return Err(libc::EINVAL);
        }
        if has(IBV_REG_MR_MASK_BUF) {
            let is_dmabuf = state.check_buf(attr.buf, pd, attr.addr, attr.length)?;
            if has(IBV_REG_MR_MASK_IOVA) && is_dmabuf {
                return Err(libc::EINVAL);
            }
        }
        if has(IBV_REG_MR_MASK_DMAH) {
            if state.dmah(attr.dmah.addr(), VERB).is_none_or(|dmah| dmah.context != context) {
                state.violation("ibv_reg_mr_ex with a DMA handle of another context");
                return Err(libc::EINVAL);
            }
            if attr.access as u32 & IBV_ACCESS_ON_DEMAND.0 != 0 {
                return Err(libc::EOPNOTSUPP);
            }
        }
        Ok(())
    };
    let refused = enter(pd, VERB, |state, _| check(state).map_err(null::<()>).is_err());
    if refused {
        return std::ptr::null_mut();
    }
    let mr = match has(IBV_REG_MR_MASK_FD) {
        true => unsafe { reg_dmabuf_mr(pd, attr.fd_offset, attr.length, attr.iova, attr.fd, attr.access) },
        false => {
            let iova = if has(IBV_REG_MR_MASK_IOVA) { attr.iova } else { attr.addr.addr() as u64 };
            unsafe { reg_mr_iova2(pd, attr.addr, attr.length, iova, attr.access as u32) }
        }
    };
    enter(pd, "notes of ibv_reg_mr_ex", |state, _| {
        if let Some(mr) = state.mrs.get_mut(&mr.addr()) {
            mr.dmah = has(IBV_REG_MR_MASK_DMAH).then(|| attr.dmah.addr());
            mr.buf = has(IBV_REG_MR_MASK_BUF).then(|| attr.buf.addr());
        }
    });
    mr
}

/// Registers provider memory like the library, without a recorded call.
pub(super) unsafe extern "C" fn reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut std::ffi::c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    const VERB: &str = "ibv_reg_buf_mr";
    enter(pd, VERB, |state, device| {
        let allowed = match state.fault(VERB) {
            Some(errno) => Err(errno),
            None if state.pd(pd.addr(), VERB).is_none() => Err(libc::EINVAL),
            None => state.check_buf(buf, pd, addr, len),
        };
        if let Err(errno) = allowed {
            return null(errno);
        }
        let mr = add(state, device, pd, addr.cast(), len, access as u32, false);
        state.mrs.get_mut(&mr.addr()).unwrap().buf = Some(buf.addr());
        mr
    })
}
