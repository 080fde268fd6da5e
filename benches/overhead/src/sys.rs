//! The loops of loops.c, over rdma-sys.

use rdma_sys::*;

use crate::rig::{BATCH, FAILED, INLINE, Objects};

macro_rules! drain_ex {
    ($cq:ident, $sum:ident, $value:expr) => {
        let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
        if ibv_start_poll($cq, &mut attr) != 0 {
            return FAILED;
        }
        loop {
            $sum += $value;
            if ibv_next_poll($cq) != 0 {
                break;
            }
        }
        ibv_end_poll($cq);
    };
}

macro_rules! drain_cl {
    ($cq:ident, $rows:ident, $sum:ident) => {
        let taken = ibv_poll_cq($cq, BATCH as i32, $rows.as_mut_ptr());
        if taken <= 0 {
            return FAILED;
        }
        for row in 0..taken as usize {
            let wc = $rows.as_ptr().add(row);
            $sum += (*wc).wr_id + u64::from((*wc).status.0) + u64::from((*wc).opcode.0);
        }
    };
}

/// Sum of the fields that C reads of every completion: identifier, status, opcode.
///
/// # Safety
/// The cursor of the queue must be on a completion.
#[inline(always)]
unsafe fn read_basic_ex(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { (*cq).wr_id + u64::from((*cq).status.0) + u64::from(ibv_wc_read_opcode(cq).0) }
}

macro_rules! post_and_poll {
    ($($name:ident = |$o:ident, $qp:ident, $i:ident| $build:expr;)+) => {$(
        /// # Safety
        /// The objects must belong to the stub and use the extended interface.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe fn $name($o: &Objects, n: u64) -> u64 {
            let ($qp, cq, mut sum) = ($o.qp_ex, $o.cq_ex, 0);
            for $i in 0..n {
                // SAFETY: the objects exist, and the stub moves no data.
                unsafe {
                    ibv_wr_start($qp);
                    (*$qp).wr_id = $i;
                    (*$qp).wr_flags = IBV_SEND_SIGNALED.0;
                    $build;
                    ibv_wr_set_sge($qp, $o.lkey, $o.local, $o.len);
                    if ibv_wr_complete($qp) != 0 {
                        return FAILED;
                    }
                    drain_ex!(cq, sum, read_basic_ex(cq));
                }
            }
            sum
        }
    )+};
}

post_and_poll! {
    loop_sys_ex1 = |o, qp, i| ibv_wr_rdma_write(qp, o.rkey, o.remote);
    loop_sys_read = |o, qp, i| ibv_wr_rdma_read(qp, o.rkey, o.remote);
    loop_sys_write_imm = |o, qp, i| ibv_wr_rdma_write_imm(qp, o.rkey, o.remote, (i as u32).to_be());
    loop_sys_send_inv = |o, qp, i| ibv_wr_send_inv(qp, o.rkey);
    loop_sys_fetch_add = |o, qp, i| ibv_wr_atomic_fetch_add(qp, o.rkey, o.remote, i);
    loop_sys_ud_send = |o, qp, i| {
        ibv_wr_send(qp);
        ibv_wr_set_ud_addr(qp, o.ah, o.qp_num, o.qkey)
    };
}

/// # Safety
/// The objects must belong to the stub and use the extended interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_ex16(o: &Objects, n: u64) -> u64 {
    let (qp, cq, mut sum) = (o.qp_ex, o.cq_ex, 0);
    for i in (0..n).step_by(BATCH) {
        // SAFETY: the objects exist, and the stub moves no data.
        unsafe {
            ibv_wr_start(qp);
            for j in 0..BATCH as u64 {
                (*qp).wr_id = i + j;
                (*qp).wr_flags = IBV_SEND_SIGNALED.0;
                ibv_wr_rdma_write(qp, o.rkey, o.remote);
                ibv_wr_set_sge(qp, o.lkey, o.local, o.len);
            }
            if ibv_wr_complete(qp) != 0 {
                return FAILED;
            }
            drain_ex!(cq, sum, read_basic_ex(cq));
        }
    }
    sum
}

#[inline(always)]
fn sge(o: &Objects) -> ibv_sge {
    ibv_sge { addr: o.local, length: o.len, lkey: o.lkey }
}

#[inline(always)]
fn write(o: &Objects, wr_id: u64, next: *mut ibv_send_wr, sg_list: *mut ibv_sge) -> ibv_send_wr {
    let mut wr = ibv_send_wr::zeroed();
    (wr.wr_id, wr.next, wr.sg_list, wr.num_sge) = (wr_id, next, sg_list, 1);
    (wr.opcode, wr.send_flags) = (IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED.0);
    wr.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: o.remote, rkey: o.rkey };
    wr
}

/// # Safety
/// The objects must belong to the stub and use the classic interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_cl1(o: &Objects, n: u64) -> u64 {
    let (qp, cq, mut sum) = (o.qp, o.cq, 0);
    let mut rows = [ibv_wc::zeroed(); BATCH];
    for i in 0..n {
        let mut sge = sge(o);
        let mut wr = write(o, i, std::ptr::null_mut(), &mut sge);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the objects exist, and the stub moves no data.
        unsafe {
            if ibv_post_send(qp, &mut wr, &mut bad) != 0 {
                return FAILED;
            }
            drain_cl!(cq, rows, sum);
        }
    }
    sum
}

/// # Safety
/// The objects must belong to the stub and use the classic interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_ud_send_cl(o: &Objects, n: u64) -> u64 {
    let (qp, cq, mut sum) = (o.qp, o.cq, 0);
    let mut rows = [ibv_wc::zeroed(); BATCH];
    for i in 0..n {
        let mut sge = sge(o);
        let mut wr = write(o, i, std::ptr::null_mut(), &mut sge);
        wr.opcode = IBV_WR_SEND;
        wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: o.ah, remote_qpn: o.qp_num, remote_qkey: o.qkey };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the objects exist, and the stub moves no data.
        unsafe {
            if ibv_post_send(qp, &mut wr, &mut bad) != 0 {
                return FAILED;
            }
            drain_cl!(cq, rows, sum);
        }
    }
    sum
}

/// # Safety
/// The objects must belong to the stub and use the classic interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_cl16(o: &Objects, n: u64) -> u64 {
    let (qp, cq, mut sum) = (o.qp, o.cq, 0);
    let mut rows = [ibv_wc::zeroed(); BATCH];
    let mut sges = [sge(o); BATCH];
    let mut wrs = [ibv_send_wr::zeroed(); BATCH];
    for i in (0..n).step_by(BATCH) {
        let (first, elements) = (wrs.as_mut_ptr(), sges.as_mut_ptr());
        let mut bad = std::ptr::null_mut();
        // SAFETY: the objects exist, the pointers stay within the arrays, and the stub moves no data.
        unsafe {
            for j in 0..BATCH {
                let next = if j + 1 < BATCH { first.add(j + 1) } else { std::ptr::null_mut() };
                elements.add(j).write(sge(o));
                first.add(j).write(write(o, i + j as u64, next, elements.add(j)));
            }
            if ibv_post_send(qp, first, &mut bad) != 0 {
                return FAILED;
            }
            drain_cl!(cq, rows, sum);
        }
    }
    sum
}

/// # Safety
/// The objects must belong to the stub and use the extended interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_bind_mw(o: &Objects, n: u64) -> u64 {
    let (qp, cq, rkey, mut sum) = (o.qp_ex, o.cq_ex, o.rkey, 0);
    let info = ibv_mw_bind_info {
        mr: std::ptr::null_mut(),
        addr: o.local,
        length: o.len.into(),
        mw_access_flags: IBV_ACCESS_REMOTE_WRITE.0,
    };
    for i in 0..n {
        // SAFETY: the objects exist, and the stub does not access windows and regions.
        unsafe {
            ibv_wr_start(qp);
            (*qp).wr_id = i;
            (*qp).wr_flags = IBV_SEND_SIGNALED.0;
            ibv_wr_bind_mw(qp, std::ptr::null_mut(), rkey, &info);
            if ibv_wr_complete(qp) != 0 {
                return FAILED;
            }
            drain_ex!(cq, sum, read_basic_ex(cq));
        }
    }
    sum
}

macro_rules! receive {
    ($($name:ident = $post:ident($queue:ident);)+) => {$(
        /// # Safety
        /// The objects must belong to the stub.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe fn $name(o: &Objects, n: u64) -> u64 {
            for i in 0..n {
                let mut sge = sge(o);
                let mut wr = ibv_recv_wr { wr_id: i, next: std::ptr::null_mut(), sg_list: &mut sge, num_sge: 1 };
                let mut bad = std::ptr::null_mut();
                // SAFETY: the queue exists, and the stub moves no data.
                if unsafe { $post(o.$queue, &mut wr, &mut bad) } != 0 {
                    return FAILED;
                }
            }
            n
        }
    )+};
}

receive! {
    loop_sys_rv1 = ibv_post_recv(qp);
    loop_sys_srq_rv1 = ibv_post_srq_recv(srq);
}

macro_rules! receive_batch {
    ($($name:ident = $post:ident($queue:ident);)+) => {$(
        /// # Safety
        /// The objects must belong to the stub.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe fn $name(o: &Objects, n: u64) -> u64 {
            let mut sges = [sge(o); BATCH];
            let empty = ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
            let mut wrs = [empty; BATCH];
            for i in (0..n).step_by(BATCH) {
                let (first, elements) = (wrs.as_mut_ptr(), sges.as_mut_ptr());
                let mut bad = std::ptr::null_mut();
                // SAFETY: the queue exists, the pointers stay within the arrays, and the stub moves no data.
                unsafe {
                    for j in 0..BATCH {
                        let next = if j + 1 < BATCH { first.add(j + 1) } else { std::ptr::null_mut() };
                        elements.add(j).write(sge(o));
                        first.add(j).write(ibv_recv_wr { wr_id: i + j as u64, next, sg_list: elements.add(j), num_sge: 1 });
                    }
                    if $post(o.$queue, first, &mut bad) != 0 {
                        return FAILED;
                    }
                }
            }
            n
        }
    )+};
}

receive_batch! {
    loop_sys_rv16 = ibv_post_recv(qp);
    loop_sys_srq_rv16 = ibv_post_srq_recv(srq);
}

/// # Safety
/// The objects must belong to the stub and use the extended interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_in1(o: &Objects, n: u64) -> u64 {
    let qp = o.qp_ex;
    let data = std::ptr::with_exposed_provenance_mut(o.local as usize);
    for i in 0..n {
        // SAFETY: the queue pair exists, and `local` points to at least `INLINE` bytes.
        unsafe {
            ibv_wr_start(qp);
            (*qp).wr_id = i;
            (*qp).wr_flags = IBV_SEND_INLINE.0;
            ibv_wr_send(qp);
            ibv_wr_set_inline_data(qp, data, INLINE);
            if ibv_wr_complete(qp) != 0 {
                return FAILED;
            }
        }
    }
    n
}

/// # Safety
/// The objects must belong to the stub and use the extended interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_em_ex(o: &Objects, n: u64) -> u64 {
    for _ in 0..n {
        let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
        // SAFETY: the queue exists.
        if unsafe { ibv_start_poll(o.cq_ex, &mut attr) } != ENOENT {
            return FAILED;
        }
    }
    n
}

/// `ENOENT` of errno.h.
const ENOENT: i32 = 2;

/// # Safety
/// The objects must belong to the stub and use the classic interface.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) unsafe fn loop_sys_em_cl(o: &Objects, n: u64) -> u64 {
    let mut rows = [ibv_wc::zeroed(); BATCH];
    for _ in 0..n {
        // SAFETY: the queue exists, and `rows` has room for `BATCH` completions.
        if unsafe { ibv_poll_cq(o.cq, BATCH as i32, rows.as_mut_ptr()) } != 0 {
            return FAILED;
        }
    }
    n
}

/// # Safety
/// `wc` must point to a completion that was polled.
#[inline(always)]
unsafe fn read_receive(wc: *const ibv_wc) -> u64 {
    // SAFETY: the caller's contract. With the flag, the union holds immediate data.
    unsafe {
        let sum = (*wc).wr_id + u64::from((*wc).status.0) + u64::from((*wc).opcode.0) + u64::from((*wc).byte_len);
        match (*wc).wc_flags & IBV_WC_WITH_IMM.0 != 0 {
            true => sum + u64::from(u32::from_be((*wc).__bindgen_anon_1.imm_data)),
            false => sum,
        }
    }
}

/// # Safety
/// `wc` must point to a completion that was polled.
#[inline(always)]
unsafe fn read_all(wc: *const ibv_wc) -> u64 {
    // SAFETY: the caller's contract.
    unsafe {
        read_receive(wc)
            + u64::from((*wc).vendor_err)
            + u64::from((*wc).qp_num)
            + u64::from((*wc).src_qp)
            + u64::from((*wc).slid)
            + u64::from((*wc).sl)
            + u64::from((*wc).dlid_path_bits)
    }
}

/// # Safety
/// The cursor of the queue must be on a completion, and the queue must provide these fields.
#[inline(always)]
unsafe fn read_receive_ex(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the caller's contract.
    unsafe {
        let sum = read_basic_ex(cq) + u64::from(ibv_wc_read_byte_len(cq));
        match ibv_wc_read_wc_flags(cq) & IBV_WC_WITH_IMM.0 != 0 {
            true => sum + u64::from(u32::from_be(ibv_wc_read_imm_data(cq))),
            false => sum,
        }
    }
}

/// # Safety
/// The cursor of the queue must be on a completion, and the queue must provide these fields.
#[inline(always)]
unsafe fn read_all_ex(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the caller's contract.
    unsafe {
        read_receive_ex(cq)
            + u64::from(ibv_wc_read_vendor_err(cq))
            + u64::from(ibv_wc_read_qp_num(cq))
            + u64::from(ibv_wc_read_src_qp(cq))
            + u64::from(ibv_wc_read_slid(cq))
            + u64::from(ibv_wc_read_sl(cq))
            + u64::from(ibv_wc_read_dlid_path_bits(cq))
    }
}

macro_rules! poll_ex {
    ($($name:ident = $read:ident;)+) => {$(
        /// # Safety
        /// The objects must belong to the stub and use the extended interface.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe fn $name(o: &Objects, n: u64) -> u64 {
            let (cq, mut sum) = (o.cq_ex, 0);
            for _ in (0..n).step_by(BATCH) {
                // SAFETY: the queue exists and was created with these fields.
                unsafe {
                    drain_ex!(cq, sum, $read(cq));
                }
            }
            sum
        }
    )+};
}

poll_ex! {
    loop_sys_poll_ex = read_receive_ex;
    loop_sys_all_ex = read_all_ex;
}

macro_rules! poll_cl {
    ($($name:ident = $read:ident;)+) => {$(
        /// # Safety
        /// The objects must belong to the stub and use the classic interface.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) unsafe fn $name(o: &Objects, n: u64) -> u64 {
            let mut rows = [ibv_wc::zeroed(); BATCH];
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                loop {
                    // SAFETY: the queue exists, and `rows` has room for `BATCH` completions.
                    let taken = unsafe { ibv_poll_cq(o.cq, BATCH as i32, rows.as_mut_ptr()) };
                    if taken <= 0 {
                        break;
                    }
                    for row in 0..taken as usize {
                        // SAFETY: the first `taken` rows were polled.
                        sum += unsafe { $read(rows.as_ptr().add(row)) };
                    }
                }
            }
            sum
        }
    )+};
}

poll_cl! {
    loop_sys_poll_cl = read_receive;
    loop_sys_all_cl = read_all;
}
