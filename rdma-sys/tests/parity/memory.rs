use std::ptr::null_mut;

use rdma_sys::*;

use crate::case::{Case, Variant, case};
use crate::world::World;

const OPTIONAL: u32 = IBV_ACCESS_RELAXED_ORDERING.0;

pub fn cases() -> Vec<Case> {
    // The first number has the flags, the second says whether the compiler knows them.
    const REGISTRATIONS: [Variant; 6] = [
        ("known plain flags", |w| set(w, 5, 1)),
        ("known optional flag", |w| set(w, 5 | OPTIONAL, 1)),
        ("known last optional flag", |w| set(w, 1 << 29, 1)),
        ("known flag after the optional ones", |w| set(w, 1 << 30, 1)),
        ("unknown plain flags", |w| set(w, 5, 0)),
        ("unknown optional flag", |w| set(w, 5 | OPTIONAL, 0)),
    ];
    fn set(w: &World, access: u32, known: u64) {
        unsafe { *w.numbers = [access.into(), known, 0, 0, 0, 0, 0, 0] };
    }
    fn access(w: &World) -> u32 {
        unsafe { (*w.numbers)[0] as u32 }
    }
    fn known(w: &World) -> i32 {
        unsafe { (*w.numbers)[1] as i32 }
    }
    const ALLOCATIONS: [Variant; 2] =
        [("", |_| {}), ("without the operation", |w| unsafe { (*w.context()).ops.alloc_mw = None })];
    vec![
        case!(__ibv_reg_mr(w; w.pd, w.data.cast(), 64, access(w), known(w))).variants(&REGISTRATIONS),
        case!(ibv_reg_mr(w; w.pd, w.data.cast(), 64, access(w) as i32)).variants(&REGISTRATIONS),
        case!(__ibv_reg_mr_iova(w; w.pd, w.data.cast(), 64, 1 << 63, access(w), known(w))).variants(&REGISTRATIONS),
        case!(ibv_reg_mr_iova(w; w.pd, w.data.cast(), 64, 1 << 63, access(w) as i32)).variants(&REGISTRATIONS),
        case!(ibv_alloc_mw(w; w.pd, IBV_MW_TYPE_2)).variants(&ALLOCATIONS),
        case!(ibv_dealloc_mw(w; w.mw)),
        case!(ibv_inc_rkey(w; (*w.numbers)[0] as u32)).variants(&[
            ("", |w| unsafe { (*w.numbers)[0] = 0x1234_5600 }),
            ("wrap", |w| unsafe { (*w.numbers)[0] = 0x1234_56ff }),
            ("all", |w| unsafe { (*w.numbers)[0] = 0xffff_ffff }),
        ]),
        case!(ibv_bind_mw(w; w.qp(), w.mw, w.mw_bind)).variants(&[
            ("bind", |_| {}),
            ("type 2", |w| unsafe { (*w.mw).type_ = IBV_MW_TYPE_2 }),
            ("no type", |w| unsafe { (*w.mw).type_ = ibv_mw_type(0) }),
            ("unbind", |w| unsafe { unbind(w, 0, 0) }),
            ("unbind with an address", |w| unsafe { unbind(w, 1, 0) }),
            ("unbind with a length", |w| unsafe { unbind(w, 0, 1 << 32) }),
            ("other domain", |w| unsafe { (*w.mw).pd = w.other_pd }),
        ]),
        case!(ibv_advise_mr(w; w.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 1, w.sges.cast(), 2) of advise_mr),
        case!(ibv_alloc_dm(w; w.context(), w.attr.cast()) of alloc_dm),
        case!(ibv_free_dm(w; w.dm) of free_dm),
        case!(ibv_memcpy_to_dm(w; w.dm, 1 << 40, w.data.cast(), 16)),
        case!(ibv_memcpy_from_dm(w; w.data.cast(), w.dm, 1 << 40, 16)),
        case!(ibv_alloc_null_mr(w; w.pd) of alloc_null_mr),
        case!(ibv_reg_dm_mr(w; w.pd, w.dm, 1 << 40, 1 << 41, 0x8000_0001) of reg_dm_mr),
    ]
}

unsafe fn unbind(w: &World, addr: u64, length: u64) {
    unsafe {
        (*w.mw_bind).bind_info.mr = null_mut();
        (*w.mw_bind).bind_info.addr = addr;
        (*w.mw_bind).bind_info.length = length;
    }
}
