//! The loops over the raw API of rdma-safe, where each call checks the interface of an object.

use rdma_safe::{Inline, UdTarget, WorkRequest};

use crate::raw::{read_all, read_basic, read_receive};
use crate::rig::{BATCH, FAILED, INLINE, QKEY, Raw};

macro_rules! drain {
    ($raw:ident, $sum:ident, $read:ident) => {
        let mut poll = $raw.cq.poll();
        loop {
            match poll.next() {
                Ok(Some(wc)) => $sum = $read($sum, &wc),
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
                drain!($raw, sum, read_basic);
            }
            sum
        }
    )+};
}

post_and_poll! {
    loop_any_ex1 = |batch, raw, i| batch.write(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_any_cl1 = |batch, raw, i| batch.write(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_any_read = |batch, raw, i| batch.read(WorkRequest::new(i).signaled(), raw.remote, raw.sge);
    loop_any_write_imm = |batch, raw, i|
        batch.write_imm(WorkRequest::new(i).signaled(), raw.remote, i as u32, raw.sge);
    loop_any_send_inv = |batch, raw, i|
        batch.send_invalidate(WorkRequest::new(i).signaled(), raw.remote.rkey, raw.sge);
    loop_any_fetch_add = |batch, raw, i|
        batch.fetch_add(WorkRequest::new(i).signaled(), raw.remote, i, raw.sge);
    loop_any_ud_send = |batch, raw, i| {
        let to = UdTarget::new(&raw.handle, raw.remote.rkey, QKEY);
        batch.send_to(WorkRequest::new(i).signaled(), to, raw.sge)
    };
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
                drain!(raw, sum, read_basic);
            }
            sum
        }
    )+};
}

batch_and_poll! { loop_any_ex16 loop_any_cl16 }

#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) fn loop_any_in1(raw: &mut Raw, n: u64) -> u64 {
    let Some(data) = raw.buffer.get(..INLINE) else { return FAILED };
    for i in 0..n {
        let Ok(mut batch) = raw.qp.send_batch() else { return FAILED };
        // SAFETY: the call copies the bytes.
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

empty! { loop_any_em_ex loop_any_em_cl }

macro_rules! poll {
    ($($name:ident = $read:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(raw: &mut Raw, n: u64) -> u64 {
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                drain!(raw, sum, $read);
            }
            sum
        }
    )+};
}

poll! {
    loop_any_poll_ex = read_receive;
    loop_any_poll_cl = read_receive;
    loop_any_all_ex = read_all;
    loop_any_all_cl = read_all;
}
