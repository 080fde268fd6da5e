//! The loops over the raw API of rdma-safe, written for the fewest instructions.
//!
//! They check the interface of each object once, before the loop.

use std::ops::ControlFlow;

use rdma_safe::interface::{Classic, Extended};
use rdma_safe::{Inline, QueuePairType, SendOps, UdTarget, WorkCompletion, WorkRequest};

use crate::rig::{BATCH, FAILED, INLINE, QKEY, Raw};

/// Adds the fields that C reads of every completion: identifier, status, opcode.
#[inline(always)]
pub(crate) fn read_basic(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    sum + wc.wr_id() + u64::from(wc.status().0) + u64::from(wc.opcode().0)
}

/// Adds the fields that C reads of a receive: also length and immediate data.
#[inline(always)]
pub(crate) fn read_receive(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    let sum = read_basic(sum, wc) + u64::from(wc.byte_len().unwrap_or(0));
    match wc.imm() {
        Some(imm) => sum + u64::from(imm),
        None => sum,
    }
}

/// Adds the fields that C reads of a completion with all common fields.
#[inline(always)]
pub(crate) fn read_all(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    let sum = read_basic(sum, wc) + u64::from(wc.vendor_error());
    let Some(fields) = wc.standard() else { return FAILED };
    sum + u64::from(fields.byte_len())
        + fields.imm().map_or(0, u64::from)
        + u64::from(fields.qp_num())
        + u64::from(fields.src_qp())
        + u64::from(fields.slid())
        + u64::from(fields.sl())
        + u64::from(fields.dlid_path_bits())
}

macro_rules! drain {
    ($completions:ident, $sum:ident, $read:ident) => {
        let drained = $completions.poll_all(|wc| {
            $sum = $read($sum, &wc);
            ControlFlow::Continue(())
        });
        if drained.is_err() {
            return FAILED;
        }
    };
}

macro_rules! post_and_poll {
    ($($name:ident = $interface:ident, |$batch:ident, $remote:ident, $sge:ident, $i:ident| $add:expr;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut sends) = raw.qp.split().0.with_interface::<$interface>() else { return FAILED };
            let Some(mut completions) = raw.cq.poller_with_interface::<$interface>() else { return FAILED };
            let ($remote, $sge) = (raw.remote, raw.sge);
            let mut sum = 0;
            let mut $i = 0;
            while $i < n {
                // SAFETY: the stub moves no data.
                if sends.post(|$batch| unsafe { $add }).is_err() {
                    return FAILED;
                }
                drain!(completions, sum, read_basic);
                $i += 1;
            }
            sum
        }
    )+};
}

post_and_poll! {
    loop_raw_ex1 = Extended, |batch, remote, sge, i| batch.write(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_cl1 = Classic, |batch, remote, sge, i| batch.write(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_read = Extended, |batch, remote, sge, i| batch.read(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_write_imm = Extended, |batch, remote, sge, i|
        batch.write_imm(WorkRequest::new(i).signaled(), remote, i as u32, sge);
    loop_raw_send_inv = Extended, |batch, remote, sge, i|
        batch.send_invalidate(WorkRequest::new(i).signaled(), remote.rkey, sge);
    loop_raw_fetch_add = Extended, |batch, remote, sge, i|
        batch.fetch_add(WorkRequest::new(i).signaled(), remote, i, sge);
}

macro_rules! datagrams {
    ($($name:ident = $interface:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let to = UdTarget::new(&raw.handle, raw.qp.number(), QKEY);
            let sge = raw.sge;
            let Some(mut sends) = raw.qp.split().0.with_interface::<$interface>() else { return FAILED };
            let Some(mut completions) = raw.cq.poller_with_interface::<$interface>() else { return FAILED };
            let mut sum = 0;
            let mut i = 0;
            while i < n {
                // SAFETY: the stub moves no data and does not access the handle.
                if sends.post(|batch| unsafe { batch.send_to(WorkRequest::new(i).signaled(), to, sge) }).is_err() {
                    return FAILED;
                }
                drain!(completions, sum, read_basic);
                i += 1;
            }
            sum
        }
    )+};
}

datagrams! {
    loop_raw_ud_send = Extended;
    loop_raw_ud_send_cl = Classic;
}

macro_rules! batch_and_poll {
    ($($name:ident = $interface:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut sends) = raw.qp.split().0.with_interface::<$interface>() else { return FAILED };
            let Some(mut completions) = raw.cq.poller_with_interface::<$interface>() else { return FAILED };
            let (remote, sge) = (raw.remote, raw.sge);
            let mut sum = 0;
            for i in (0..n).step_by(BATCH) {
                let posted = sends.post(|batch| {
                    for j in 0..BATCH as u64 {
                        // SAFETY: the stub moves no data.
                        unsafe { batch.write(WorkRequest::new(i + j).signaled(), remote, sge) }?;
                    }
                    Ok(())
                });
                if posted.is_err() {
                    return FAILED;
                }
                drain!(completions, sum, read_basic);
            }
            sum
        }
    )+};
}

batch_and_poll! {
    loop_raw_ex16 = Extended;
    loop_raw_cl16 = Classic;
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_rv1(raw: &mut Raw, n: u64) -> u64 {
    for i in 0..n {
        // SAFETY: the stub moves no data.
        if unsafe { raw.qp.receive(i, raw.sge) }.is_err() {
            return FAILED;
        }
    }
    n
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_rv16(raw: &mut Raw, n: u64) -> u64 {
    for i in (0..n).step_by(BATCH) {
        let Ok(mut batch) = raw.qp.recv_batch() else { return FAILED };
        for j in 0..BATCH as u64 {
            // SAFETY: the stub moves no data.
            if unsafe { batch.receive(i + j, &[raw.sge]) }.is_err() {
                return FAILED;
            }
        }
        if batch.post().is_err() {
            return FAILED;
        }
    }
    n
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_srq_rv1(raw: &mut Raw, n: u64) -> u64 {
    for i in 0..n {
        // SAFETY: the stub moves no data.
        if unsafe { raw.srq.receive(i, raw.sge) }.is_err() {
            return FAILED;
        }
    }
    n
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_srq_rv16(raw: &mut Raw, n: u64) -> u64 {
    for i in (0..n).step_by(BATCH) {
        let mut batch = raw.srq.recv_batch();
        for j in 0..BATCH as u64 {
            // SAFETY: the stub moves no data.
            if unsafe { batch.receive(i + j, &[raw.sge]) }.is_err() {
                return FAILED;
            }
        }
        if batch.post().is_err() {
            return FAILED;
        }
    }
    n
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_in1(raw: &mut Raw, n: u64) -> u64 {
    let Some(data) = raw.buffer.get(..INLINE) else { return FAILED };
    let Some(mut sends) = raw.qp.split().0.with_interface::<Extended>() else { return FAILED };
    for i in 0..n {
        // SAFETY: the call copies the bytes.
        if sends.post(|batch| unsafe { batch.send(WorkRequest::new(i), Inline(data)) }).is_err() {
            return FAILED;
        }
    }
    n
}

macro_rules! empty {
    ($($name:ident = $interface:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut completions) = raw.cq.poller_with_interface::<$interface>() else { return FAILED };
            let mut i = 0;
            while i < n {
                if !matches!(completions.poll_one(|_| ()), Ok(None)) {
                    return FAILED;
                }
                i += 1;
            }
            n
        }
    )+};
}

empty! {
    loop_raw_em_ex = Extended;
    loop_raw_em_cl = Classic;
}

macro_rules! poll {
    ($($name:ident = $interface:ident, $read:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut completions) = raw.cq.poller_with_interface::<$interface>() else { return FAILED };
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                drain!(completions, sum, $read);
            }
            sum
        }
    )+};
}

poll! {
    loop_raw_poll_ex = Extended, read_receive;
    loop_raw_poll_cl = Classic, read_receive;
    loop_raw_all_ex = Extended, read_all;
    loop_raw_all_cl = Classic, read_all;
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_qp(raw: &mut Raw, n: u64) -> u64 {
    for _ in 0..n {
        let builder = raw.pd.queue_pair(&raw.cq, &raw.cq).send_depth(16).recv_depth(16).max_batch(1);
        let Ok(qp) = builder.operations(SendOps::SEND).build() else { return FAILED };
        if qp.qp_type() != QueuePairType::RC || qp.destroy().is_err() {
            return FAILED;
        }
    }
    n
}

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_raw_mr(raw: &mut Raw, n: u64) -> u64 {
    let access = rdma_safe::Access::LOCAL_WRITE;
    for _ in 0..n {
        // SAFETY: the memory outlives the registration, and no work uses its keys.
        let region = unsafe { raw.pd.register_raw(raw.sge.address as *mut u8, raw.sge.len as usize, access) };
        if !region.is_ok_and(|region| region.deregister().is_ok()) {
            return FAILED;
        }
    }
    n
}
