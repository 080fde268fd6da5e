//! Memory windows.

use std::ffi::c_int;

use rdma_sys::*;

use super::engine::{Data, SendWr};
use super::memory::Mr;
use super::post::{build, can_send};
use super::state::{Alloc, State, enter, null, own};

pub(super) struct Mw {
    pub(super) alloc: Alloc,
    pub(super) pd: usize,
    window_type: ibv_mw_type,
    rkey: u32,
    /// The binding; `None` if the window is not bound.
    bound: Option<Bound>,
    /// Whether the window can be bound. Used for type 2 only.
    free: bool,
}

#[derive(Clone, Copy)]
struct Bound {
    mr: usize,
    /// Start address in work requests of peers.
    address: u64,
    /// Start address in the address space of the region.
    start: u64,
    len: u64,
    access: u32,
    /// The queue pair that a window of type 2 is bound to.
    qp: Option<usize>,
}

/// The parameters of a posted bind request, copied when it is posted.
#[derive(Clone, Copy)]
pub(super) struct Bind {
    mw: usize,
    former: u32,
    rkey: u32,
    mr: usize,
    addr: u64,
    len: u64,
    access: u32,
}

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, window_type: ibv_mw_type) -> *mut ibv_mw {
    enter(pd, "alloc_mw", |state, device| {
        if let Some(errno) = state.fault("alloc_mw") {
            return null(errno);
        }
        if state.pd(pd.addr(), "alloc_mw").is_none() {
            return null(libc::EINVAL);
        }
        let handle = state.handle();
        let (context, rkey) = (unsafe { (*pd).context }, handle << 8 | 0xfe);
        let (alloc, raw) = Alloc::new(ibv_mw { context, pd, rkey, handle, type_: window_type });
        own(raw, device);
        state.mws.insert(raw.addr(), Mw { alloc, pd: pd.addr(), window_type, rkey, bound: None, free: true });
        raw
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(raw: *mut ibv_mw) -> c_int {
    enter(raw, "dealloc_mw", |state, _| {
        if state.mw(raw.addr(), "dealloc_mw").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("dealloc_mw") {
            return errno;
        }
        let mw = state.mws.remove(&raw.addr()).unwrap();
        state.retire(mw.alloc);
        0
    })
}

/// Binds a window of type 1: posts the work and sets the new key.
pub(super) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    enter(qp, "bind_mw", |state, _| {
        let Some(found) = state.qp(qp.addr(), "bind_mw") else { return libc::EINVAL };
        let (number, full) = (found.state, found.sq_posted - found.sq_reclaimed >= u64::from(found.cap.max_send_wr));
        let (is_open, send_cq) = (found.batch.is_some(), found.send_cq);
        state.needs_no_batch([send_cq, send_cq], "bind_mw");
        if is_open || !can_send(number) {
            state.violation(format!("bind_mw in state {}, in a batch: {is_open}", number.0));
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault_once("bind_mw") {
            return errno;
        }
        if full {
            return libc::ENOMEM;
        }
        let (raw, rkey) = unsafe { (*bind, ibv_inc_rkey((*mw).rkey)) };
        if raw.bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED.0 != 0 {
            return libc::EINVAL;
        }
        let Some(bind) = (unsafe { state.bind(mw, rkey, &raw.bind_info, "bind_mw") }) else { return libc::EINVAL };
        let found = state.qps.get_mut(&qp.addr()).unwrap();
        let mut wr = super::post::blank(found, IBV_WR_BIND_MW);
        (wr.wr_id, wr.flags, wr.data) = (raw.wr_id, raw.send_flags, Data::Bind(bind));
        found.sq_posted += 1;
        found.sq.push_back(wr);
        unsafe { (*mw).rkey = rkey };
        state.after_post(qp.addr());
        0
    })
}

pub(super) unsafe extern "C" fn wr_bind_mw(
    raw: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    let bind = enter(raw, "the window of wr_bind_mw", |state, _| unsafe { state.bind(mw, rkey, &*info, "wr_bind_mw") });
    build(raw, "wr_bind_mw", IBV_WR_BIND_MW, |wr| wr.data = bind.map_or(Data::Invalid, Data::Bind));
}

pub(super) unsafe extern "C" fn wr_local_inv(raw: *mut ibv_qp_ex, rkey: u32) {
    build(raw, "wr_local_inv", IBV_WR_LOCAL_INV, |wr| (wr.imm_data, wr.data) = (rkey, Data::Key));
}

impl State {
    /// Checks the window and the region when the work is posted.
    pub(super) unsafe fn bind(
        &mut self,
        mw: *mut ibv_mw,
        rkey: u32,
        info: &ibv_mw_bind_info,
        verb: &str,
    ) -> Option<Bind> {
        self.mw(mw.addr(), verb)?;
        self.mr(info.mr.addr(), verb)?;
        let former = unsafe { (*mw).rkey };
        let (addr, len) = (info.addr, info.length);
        Some(Bind { mw: mw.addr(), former, rkey, mr: info.mr.addr(), addr, len, access: info.mw_access_flags })
    }

    /// Performs a binding, with the device's checks at execution; returns whether it succeeded.
    pub(super) fn bind_window(&mut self, qp: usize, bind: Bind) -> bool {
        let Bind { mw, former, rkey, mr, addr, len, access } = bind;
        let protection = self.protection(self.qps[&qp].pd);
        let (Some(window), Some(region)) = (self.mws.get(&mw), self.mrs.get(&mr)) else { return false };
        let is_type_2 = window.window_type == IBV_MW_TYPE_2;
        let same = [window.pd, region.pd].iter().all(|pd| self.protection(*pd) == protection);
        let writes = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC).0 != 0;
        let allowed = region.allows(IBV_ACCESS_MW_BIND) && (!writes || region.allows(IBV_ACCESS_LOCAL_WRITE));
        let takes = !is_type_2 || window.free && len > 0;
        if !same || window.rkey != former || !allowed || !takes || region.at(addr, len).is_none() {
            return false;
        }
        let address = if access & IBV_ACCESS_ZERO_BASED.0 != 0 { 0 } else { addr };
        let bound = Bound { mr, address, start: addr, len, access, qp: is_type_2.then_some(qp) };
        let window = self.mws.get_mut(&mw).unwrap();
        (window.rkey, window.free) = (former & !0xff | rkey & 0xff, !is_type_2);
        window.bound = (len > 0).then_some(bound);
        true
    }

    /// Invalidates the key of a window of type 2; `false` if no bound window of type 2 has this key.
    pub(super) fn invalidate_window(&mut self, pd: usize, rkey: u32) -> bool {
        let protection = self.protection(pd);
        let found = self.mws.iter().find(|(_, mw)| mw.rkey == rkey && self.protection(mw.pd) == protection);
        let Some(address) = found.map(|(address, _)| *address) else { return false };
        let window = self.mws.get_mut(&address).unwrap();
        let can = window.window_type == IBV_MW_TYPE_2 && !window.free;
        if can {
            (window.bound, window.free) = (None, true);
        }
        can
    }

    /// Memory that a peer of `qp` requests by the key of a window.
    pub(super) fn through_window(
        &self,
        qp: usize,
        rkey: u32,
        addr: u64,
        len: u64,
        access: ibv_access_flags,
    ) -> Option<*mut u8> {
        let protection = self.protection(self.qps[&qp].pd);
        let window = self.mws.values().find(|mw| mw.rkey == rkey && self.protection(mw.pd) == protection)?;
        let bound = window.bound?;
        let allowed = bound.access & access.0 == access.0 && bound.qp.is_none_or(|of| of == qp);
        let offset = addr.checked_sub(bound.address)?;
        let within = offset.checked_add(len)? <= bound.len;
        self.mrs.get(&bound.mr)?.at(bound.start + offset, len).filter(|_| allowed && within)
    }

    /// Whether any window is bound to a region.
    pub(super) fn has_windows(&self, mr: usize) -> bool {
        self.mws.values().any(|mw| mw.bound.is_some_and(|bound| bound.mr == mr))
    }

    /// Whether any window is bound to a queue pair.
    pub(super) fn serves_windows(&self, qp: usize) -> bool {
        self.mws.values().any(|mw| mw.bound.is_some_and(|bound| bound.qp == Some(qp)))
    }
}

/// Reads a bind request from a work request of `ibv_post_send`.
pub(super) unsafe fn posted(state: &mut State, raw: &ibv_send_wr, wr: &mut SendWr) {
    if raw.opcode == IBV_WR_LOCAL_INV {
        (wr.imm_data, wr.data) = (unsafe { raw.__bindgen_anon_1.invalidate_rkey }, Data::Key);
        return;
    }
    let bind = unsafe { raw.__bindgen_anon_2.bind_mw };
    if raw.num_sge != 0 || unsafe { raw.__bindgen_anon_1.imm_data } != 0 {
        state.violation("ibv_post_send of a binding with elements or immediate data");
    }
    let found = unsafe { state.bind(bind.mw, bind.rkey, &bind.bind_info, "ibv_post_send") };
    wr.data = found.map_or(Data::Invalid, Data::Bind);
}

impl Mr {
    fn allows(&self, access: ibv_access_flags) -> bool {
        self.access & access.0 == access.0
    }
}
