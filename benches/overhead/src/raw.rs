//! The loops over the raw door of rdma-safe, as one writes them for whom instructions count: the interface of each object is
//! asked for once, before the loop.

use std::ops::ControlFlow;

use rdma_safe::{Inline, QueuePairType, SendOps, UdTarget, WorkCompletion, WorkRequest};

use crate::rig::{BATCH, FAILED, INLINE, QKEY, Raw};

/// Adds what C reads of a completion: identifier, status, opcode.
#[inline(always)]
pub(crate) fn seen(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    sum + wc.wr_id() + u64::from(wc.status().0) + u64::from(wc.opcode().0)
}

/// Adds what C reads of a receive: those, length and immediate data.
#[inline(always)]
pub(crate) fn received(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    let sum = seen(sum, wc) + u64::from(wc.byte_len().unwrap_or(0));
    match wc.imm() {
        Some(imm) => sum + u64::from(imm),
        None => sum,
    }
}

/// Adds all that C reads of a completion with every field that providers commonly have.
#[inline(always)]
pub(crate) fn all(sum: u64, wc: &WorkCompletion<'_>) -> u64 {
    let sum = seen(sum, wc) + u64::from(wc.vendor_error());
    let Some(fields) = wc.standard() else { return FAILED };
    sum + u64::from(fields.byte_len())
        + fields.imm().map_or(0, u64::from)
        + u64::from(fields.qp_num())
        + u64::from(fields.src_qp())
        + u64::from(fields.slid())
        + u64::from(fields.sl())
        + u64::from(fields.dlid_path_bits())
}

macro_rules! poller {
    ($cq:expr, extended) => {
        $cq.extended_poller()
    };
    ($cq:expr, classic) => {
        $cq.classic_poller()
    };
}

macro_rules! drain {
    ($completions:ident, $sum:ident, $seen:ident) => {
        let drained = $completions.drain(|wc| {
            $sum = $seen($sum, &wc);
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
            let Some(mut sends) = raw.qp.split().0.$interface() else { return FAILED };
            let Some(mut completions) = poller!(raw.cq, $interface) else { return FAILED };
            let ($remote, $sge) = (raw.remote, raw.sge);
            let mut sum = 0;
            let mut $i = 0;
            while $i < n {
                // SAFETY: the stub moves no data.
                if sends.post(|$batch| unsafe { $add }).is_err() {
                    return FAILED;
                }
                drain!(completions, sum, seen);
                $i += 1;
            }
            sum
        }
    )+};
}

post_and_poll! {
    loop_raw_ex1 = extended, |batch, remote, sge, i| batch.write(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_cl1 = classic, |batch, remote, sge, i| batch.write(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_read = extended, |batch, remote, sge, i| batch.read(WorkRequest::new(i).signaled(), remote, sge);
    loop_raw_write_imm = extended, |batch, remote, sge, i|
        batch.write_imm(WorkRequest::new(i).signaled(), remote, i as u32, sge);
    loop_raw_send_inv = extended, |batch, remote, sge, i|
        batch.send_invalidate(WorkRequest::new(i).signaled(), remote.rkey, sge);
    loop_raw_fetch_add = extended, |batch, remote, sge, i|
        batch.fetch_add(WorkRequest::new(i).signaled(), remote, i, sge);
}

macro_rules! datagrams {
    ($($name:ident = $interface:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let to = UdTarget::new(&raw.handle, raw.qp.number(), QKEY);
            let sge = raw.sge;
            let Some(mut sends) = raw.qp.split().0.$interface() else { return FAILED };
            let Some(mut completions) = poller!(raw.cq, $interface) else { return FAILED };
            let mut sum = 0;
            let mut i = 0;
            while i < n {
                // SAFETY: the stub moves no data and does not look at the handle.
                if sends.post(|batch| unsafe { batch.send_to(WorkRequest::new(i).signaled(), to, sge) }).is_err() {
                    return FAILED;
                }
                drain!(completions, sum, seen);
                i += 1;
            }
            sum
        }
    )+};
}

datagrams! {
    loop_raw_ud_send = extended;
    loop_raw_ud_send_cl = classic;
}

macro_rules! batch_and_poll {
    ($($name:ident = $interface:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut sends) = raw.qp.split().0.$interface() else { return FAILED };
            let Some(mut completions) = poller!(raw.cq, $interface) else { return FAILED };
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
                drain!(completions, sum, seen);
            }
            sum
        }
    )+};
}

batch_and_poll! {
    loop_raw_ex16 = extended;
    loop_raw_cl16 = classic;
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
    let Some(mut sends) = raw.qp.split().0.extended() else { return FAILED };
    for i in 0..n {
        // SAFETY: the bytes are copied in the call.
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
            let Some(mut completions) = poller!(raw.cq, $interface) else { return FAILED };
            let mut i = 0;
            while i < n {
                if !matches!(completions.take(|_| ()), Ok(None)) {
                    return FAILED;
                }
                i += 1;
            }
            n
        }
    )+};
}

empty! {
    loop_raw_em_ex = extended;
    loop_raw_em_cl = classic;
}

macro_rules! poll {
    ($($name:ident = $interface:ident, $seen:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let Some(mut completions) = poller!(raw.cq, $interface) else { return FAILED };
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                drain!(completions, sum, $seen);
            }
            sum
        }
    )+};
}

poll! {
    loop_raw_poll_ex = extended, received;
    loop_raw_poll_cl = classic, received;
    loop_raw_all_ex = extended, all;
    loop_raw_all_cl = classic, all;
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
        // SAFETY: the memory outlives the registration, and nobody names its keys.
        let region = unsafe { raw.pd.register_raw(raw.sge.address as *mut u8, raw.sge.len as usize, access) };
        if !region.is_ok_and(|region| region.deregister().is_ok()) {
            return FAILED;
        }
    }
    n
}
