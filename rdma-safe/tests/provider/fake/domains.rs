//! Thread domains and parent domains.

use std::ffi::c_int;

use rdma_sys::*;

use super::state::{Alloc, Pd, Ptr, State, enter, null, own};

pub(super) struct Td {
    pub(super) alloc: Alloc,
    pub(super) context: usize,
}

/// The parts of a parent domain.
#[derive(Clone, Copy)]
pub(super) struct Extends {
    pub(super) pd: usize,
    /// The thread domain; 0 for none.
    pub(super) td: usize,
    /// Whether provider memory may be shared with the host.
    unprotected: bool,
}

pub(super) unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    enter(context, "alloc_td", |state, device| {
        if let Some(errno) = state.fault("alloc_td") {
            return null(errno);
        }
        if state.context(context.addr(), "alloc_td").is_none() || unsafe { (*attr).comp_mask } != 0 {
            return null(libc::EINVAL);
        }
        let (alloc, raw) = Alloc::new(ibv_td { context });
        own(raw, device);
        state.tds.insert(raw.addr(), Td { alloc, context: context.addr() });
        raw
    })
}

pub(super) unsafe extern "C" fn dealloc_td(raw: *mut ibv_td) -> c_int {
    enter(raw, "dealloc_td", |state, _| {
        let address = raw.addr();
        if state.td(address, "dealloc_td").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("dealloc_td") {
            return errno;
        }
        if state.pds.values().any(|pd| pd.extends.is_some_and(|extends| extends.td == address)) {
            state.violation("dealloc_td of a thread domain that parent domains have");
            return libc::EBUSY;
        }
        let td = state.tds.remove(&address).unwrap();
        state.retire(td.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let attr = unsafe { *attr };
    enter(context, "alloc_parent_domain", |state, device| {
        if let Some(errno) = state.fault("alloc_parent_domain") {
            return null(errno);
        }
        let flag = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC.0;
        let unprotected = crate::NEWER_LIBRARY && attr.comp_mask == flag;
        if attr.comp_mask != 0 && !unprotected || attr.alloc.is_some() || attr.free.is_some() {
            state.violation("alloc_parent_domain with allocators");
            return null(libc::EINVAL);
        }
        let address = context.addr();
        let Some(pd) = state.pd(attr.pd.addr(), "alloc_parent_domain") else { return null(libc::EINVAL) };
        if pd.context != address || pd.extends.is_some() {
            state.violation("alloc_parent_domain of a domain of another context, or of a parent domain");
            return null(libc::EINVAL);
        }
        if !attr.td.is_null() && state.td(attr.td.addr(), "alloc_parent_domain").is_none_or(|td| td.context != address)
        {
            state.violation("alloc_parent_domain with a thread domain of another context");
            return null(libc::EINVAL);
        }
        let (alloc, raw) = Alloc::new(ibv_pd { context, handle: unsafe { (*attr.pd).handle } });
        own(raw, device);
        let extends = Some(Extends { pd: attr.pd.addr(), td: attr.td.addr(), unprotected });
        state.pds.insert(raw.addr(), Pd { alloc, raw: Ptr(raw), context: address, extends, imports: None });
        raw
    })
}

impl State {
    pub(super) fn is_unprotected(&self, pd: usize) -> bool {
        self.pds.get(&pd).and_then(|pd| pd.extends).is_some_and(|extends| extends.unprotected)
    }

    /// Returns the domain that defines protection: the base of a parent domain, or the original of an imported domain.
    pub(super) fn protection(&self, pd: usize) -> usize {
        let extended = self.pds.get(&pd).and_then(|pd| pd.extends).map_or(pd, |extends| extends.pd);
        self.pds.get(&extended).and_then(|pd| pd.imports).unwrap_or(extended)
    }
}
