//! The loops over the raw door of rdma-safe.

use rdma_safe::{Inline, QueuePairType, SendOps, WorkCompletion, WorkRequest};

use crate::rig::{BATCH, FAILED, INLINE, Raw};

/// What C reads of a completion: identifier, status, opcode.
#[inline(always)]
fn seen(wc: &WorkCompletion<'_>) -> u64 {
    wc.wr_id() + u64::from(wc.status().0) + u64::from(wc.opcode().0)
}

/// What C reads of a receive: those, length and immediate data.
#[inline(always)]
fn received(wc: &WorkCompletion<'_>) -> u64 {
    seen(wc) + u64::from(wc.byte_len().unwrap_or(0)) + u64::from(wc.imm().unwrap_or(0))
}

macro_rules! drain {
    ($raw:ident, $sum:ident, $seen:ident) => {
        let mut poll = $raw.cq.poll();
        loop {
            match poll.next() {
                Ok(Some(wc)) => $sum += $seen(&wc),
                Ok(None) => break,
                Err(_) => return FAILED,
            }
        }
    };
}

macro_rules! post_and_poll {
    ($($name:ident = |$batch:ident, $raw:ident, $i:ident| $add:expr;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name($raw: &mut Raw, n: u64) -> u64 {
            let mut sum = 0;
            for $i in 0..n {
                let Ok(mut $batch) = $raw.qp.send_batch() else { return FAILED };
                // SAFETY: the stub moves no data.
                if unsafe { $add }.is_err() {
                    return FAILED;
                }
                if $batch.post().is_err() {
                    return FAILED;
                }
                drain!($raw, sum, seen);
            }
            sum
        }
    )+};
}

post_and_poll! {
    loop_raw_ex1 = |batch, raw, i| batch.write(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_raw_cl1 = |batch, raw, i| batch.write(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_raw_read = |batch, raw, i| batch.read(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_raw_write_imm = |batch, raw, i|
        batch.write_imm(WorkRequest::new(i).signaled(), raw.remote, i as u32, raw.sge);
    loop_raw_send_inv = |batch, raw, i|
        batch.send_invalidate(WorkRequest::new(i).signaled(), raw.remote.rkey, raw.sge);
    loop_raw_fetch_add = |batch, raw, i|
        batch.fetch_add(WorkRequest::new(i).signaled(), raw.remote, i, raw.sge);
}

macro_rules! batch_and_poll {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let mut sum = 0;
            for i in (0..n).step_by(BATCH) {
                let Ok(mut batch) = raw.qp.send_batch() else { return FAILED };
                for j in 0..BATCH as u64 {
                    // SAFETY: the stub moves no data.
                    let added = unsafe { batch.write(WorkRequest::new(i + j).signaled(), raw.remote, raw.sge) };
                    if added.is_err() {
                        return FAILED;
                    }
                }
                if batch.post().is_err() {
                    return FAILED;
                }
                drain!(raw, sum, seen);
            }
            sum
        }
    )+};
}

batch_and_poll! { loop_raw_ex16 loop_raw_cl16 }

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
pub(crate) fn loop_raw_in1(raw: &mut Raw, n: u64) -> u64 {
    let Some(data) = raw.buffer.get(..INLINE) else { return FAILED };
    for i in 0..n {
        let Ok(mut batch) = raw.qp.send_batch() else { return FAILED };
        // SAFETY: the bytes are copied in the call.
        if unsafe { batch.send(WorkRequest::new(i), Inline(data)) }.is_err() {
            return FAILED;
        }
        if batch.post().is_err() {
            return FAILED;
        }
    }
    n
}

macro_rules! empty {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            for _ in 0..n {
                if !matches!(raw.cq.poll().next(), Ok(None)) {
                    return FAILED;
                }
            }
            n
        }
    )+};
}

empty! { loop_raw_em_ex loop_raw_em_cl }

macro_rules! poll {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                drain!(raw, sum, received);
            }
            sum
        }
    )+};
}

poll! { loop_raw_poll_ex loop_raw_poll_cl }

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
