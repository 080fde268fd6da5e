//! Shared receive queues. Posted receives never complete, because no peer sends.

use std::ffi::c_int;

use rdma_sys::*;

use crate::memory::next_number;
use crate::qp::MAX_SGE;
use crate::{free, new, null};

#[repr(C)]
struct Srq {
    srq: ibv_srq,
    ring: Box<[(u64, ibv_sge)]>,
    producer: u32,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let ibv_srq_init_attr { srq_context, attr } = unsafe { *init };
    if attr.max_sge > MAX_SGE {
        return null(libc::EINVAL);
    }
    let context = unsafe { (*pd).context };
    let entry = (0, ibv_sge { addr: 0, length: 0, lkey: 0 });
    new(Srq {
        srq: ibv_srq { context, srq_context, pd, handle: next_number(), ..ibv_srq::zeroed() },
        ring: vec![entry; attr.max_wr.max(1).next_power_of_two() as usize].into_boxed_slice(),
        producer: 0,
    })
    .cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    unsafe { free(srq.cast::<Srq>()) }
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    _: *mut *mut ibv_recv_wr,
) -> c_int {
    let srq = unsafe { &mut *srq.cast::<Srq>() };
    let mask = srq.ring.len() as u32 - 1;
    let mut next = wr;
    while let Some(wr) = unsafe { next.as_ref() } {
        let sge = if wr.num_sge > 0 { unsafe { *wr.sg_list } } else { ibv_sge { addr: 0, length: 0, lkey: 0 } };
        srq.ring[(srq.producer & mask) as usize] = (wr.wr_id, sge);
        srq.producer = srq.producer.wrapping_add(1);
        next = wr.next;
    }
    0
}
