use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};

use rdma_sys::*;

use crate::case::{Case, Variant, case};
use crate::recorder;
use crate::world::World;

/// The context that a caller passes with a request: any pointer.
fn tag() -> *mut c_void {
    without_provenance_mut(0x1234_5678_9abc)
}

/// The region that the first number selects; null if it is 0.
fn mr(w: &World) -> *mut ibv_mr {
    if unsafe { (*w.numbers)[0] } == 0 { null_mut() } else { w.mr }
}

const REGIONS: [Variant; 2] =
    [("with a region", |w| unsafe { (*w.numbers)[0] = 1 }), ("without a region", |w| unsafe { (*w.numbers)[0] = 0 })];

const QUEUES: [Variant; 2] = [("", |_| {}), ("shared queue", |w| unsafe { (*w.id).srq = w.srq })];

/// Events while the function waits for a completion.
const WAITS: [Variant; 9] = [
    ("there at once", |_| recorder::script("poll_cq", &[1])),
    ("poll fails", |_| recorder::script("poll_cq", &[-2])),
    ("there after arming", |_| {
        recorder::script("poll_cq", &[0, 1]);
        recorder::script("req_notify_cq", &[0]);
    }),
    ("poll fails after arming", |_| {
        recorder::script("poll_cq", &[0, -2]);
        recorder::script("req_notify_cq", &[0]);
    }),
    ("arming fails", |_| {
        recorder::script("poll_cq", &[0]);
        recorder::script("req_notify_cq", &[libc::ENOMEM.into()]);
    }),
    ("there after an event", |_| {
        recorder::script("poll_cq", &[0, 0, 1]);
        recorder::script("req_notify_cq", &[0]);
        recorder::script("ibv_get_cq_event", &[0]);
    }),
    ("there after an event that was for nothing", |_| {
        recorder::script("poll_cq", &[0, 0, 0, 0, 1]);
        recorder::script("req_notify_cq", &[0, 0]);
        recorder::script("ibv_get_cq_event", &[0, 0]);
    }),
    ("waiting fails", |_| {
        recorder::script("poll_cq", &[0, 0]);
        recorder::script("req_notify_cq", &[0]);
        recorder::script("ibv_get_cq_event", &[-1]);
    }),
    ("the second arming fails", |_| {
        recorder::script("poll_cq", &[0, 0, 0]);
        recorder::script("req_notify_cq", &[0, libc::EINVAL.into()]);
        recorder::script("ibv_get_cq_event", &[0]);
    }),
];

const ADDRESSES: [Variant; 7] = [
    ("zero", |w| address(w, [0; 16], [0; 16])),
    ("loopback", |w| address(w, one(15, 1), one(15, 2))),
    ("loopback in the other byte order", |w| address(w, one(12, 1), one(12, 1))),
    ("first byte", |w| address(w, one(0, 1), [0; 16])),
    ("first byte, the other way", |w| address(w, [0; 16], one(0, 0x80))),
    ("second half", |w| address(w, one(8, 0xff), one(8, 1))),
    ("high bits", |w| address(w, [0xff; 16], [0x7f; 16])),
];

fn one(at: usize, value: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[at] = value;
    bytes
}

fn address(w: &World, first: [u8; 16], second: [u8; 16]) {
    unsafe { *w.addresses = [first, second].map(|bytes| ib_addr { ib_u: ib_addr__bindgen_ty_1 { uib_addr8: bytes } }) }
}

pub fn cases() -> Vec<Case> {
    let flags = (IBV_SEND_SIGNALED | IBV_SEND_FENCE).0 as i32;
    assert_eq!(flags, 3);
    vec![
        case!(rdma_seterrno(w; (*w.numbers)[0] as i32)).variants(&[
            ("0", |w| unsafe { (*w.numbers)[0] = 0 }),
            ("errno", |w| unsafe { (*w.numbers)[0] = libc::EINVAL as u64 }),
            ("negative", |w| unsafe { (*w.numbers)[0] = -2_i64 as u64 }),
        ]),
        case!(rdma_reg_msgs(w; w.id, w.data.cast(), 64)),
        case!(rdma_reg_read(w; w.id, w.data.cast(), 64)),
        case!(rdma_reg_write(w; w.id, w.data.cast(), 64)),
        case!(rdma_dereg_mr(w; w.mr)),
        case!(rdma_post_recvv(w; w.id, tag(), w.sges.cast(), 2)).variants(&QUEUES),
        case!(rdma_post_sendv(w; w.id, tag(), w.sges.cast(), 2, 3)),
        case!(rdma_post_readv(w; w.id, tag(), w.sges.cast(), 2, 3, 1 << 63, 1 << 31)),
        case!(rdma_post_writev(w; w.id, tag(), w.sges.cast(), 2, 3, 1 << 63, 1 << 31)),
        case!(rdma_post_recv(w; w.id, tag(), w.data.cast(), 64, w.mr)).variants(&QUEUES),
        case!(rdma_post_send(w; w.id, tag(), w.data.cast(), (1 << 32) + 64, mr(w), 3)).variants(&REGIONS),
        case!(rdma_post_read(w; w.id, tag(), w.data.cast(), 64, w.mr, 3, 1 << 63, 1 << 31)),
        case!(rdma_post_write(w; w.id, tag(), w.data.cast(), 64, mr(w), 3, 1 << 63, 1 << 31)).variants(&REGIONS),
        case!(rdma_post_ud_send(w; w.id, tag(), w.data.cast(), 64, mr(w), 3, w.ah, 1 << 23)).variants(&[
            ("with a region", |w| {
                unsafe { (*w.numbers)[0] = 1 };
                recorder::datagrams();
            }),
            ("without a region", |w| {
                unsafe { (*w.numbers)[0] = 0 };
                recorder::datagrams();
            }),
        ]),
        case!(rdma_get_send_comp(w; w.id, w.wc)).variants(&WAITS),
        case!(rdma_get_recv_comp(w; w.id, w.wc)).variants(&WAITS),
        case!(rdma_get_local_addr(w; w.id)),
        case!(rdma_get_peer_addr(w; w.id)),
        case!(ib_addr_any(w; w.addresses.cast())).variants(&ADDRESSES),
        case!(ib_addr_loopback(w; w.addresses.cast())).variants(&ADDRESSES),
        case!(ib_addr_set(w; w.addresses.cast(), 1, 1 << 31, 3, 4)),
        // memcmp only guarantees the sign.
        case!(ib_addr_cmp(w; w.addresses.cast(), w.addresses.cast::<ib_addr>().add(1)))
            .variants(&ADDRESSES)
            .only_sign(),
    ]
}
