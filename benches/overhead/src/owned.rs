//! The loops over the owned door of rdma-safe.

use rdma_safe::{Completion, Operation, Work};

use crate::rig::{BATCH, FAILED, Owned};

#[inline(always)]
fn sent(done: &Completion) -> u64 {
    u64::from(done.status.0) + 1
}

#[inline(always)]
fn received(done: &Completion) -> u64 {
    u64::from(done.status.0)
        + u64::from(done.operation == Operation::Receive)
        + u64::from(done.byte_len)
        + u64::from(done.imm.unwrap_or(0))
}

macro_rules! one_at_a_time {
    ($($name:ident = $post:ident, $seen:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned, n: u64) -> u64 {
            let mut sum = 0;
            let Some(mut buffer) = owned.buffers[0].take() else { return FAILED };
            for _ in 0..n {
                if owned.endpoint.$post(buffer).is_err() {
                    return FAILED;
                }
                match owned.endpoint.poll() {
                    Ok(Some(done)) => {
                        sum += $seen(&done);
                        match done.buffer {
                            Some(back) => buffer = back,
                            None => return FAILED,
                        }
                    }
                    _ => return FAILED,
                }
            }
            owned.buffers[0] = Some(buffer);
            sum
        }
    )+};
}

one_at_a_time! {
    loop_owned_send_ex1 = send, sent;
    loop_owned_send_cl1 = send, sent;
    loop_owned_recv_ex1 = receive, received;
    loop_owned_recv_cl1 = receive, received;
}

macro_rules! batches {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned, n: u64) -> u64 {
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                let Ok(mut batch) = owned.endpoint.batch() else { return FAILED };
                for buffer in &mut owned.buffers {
                    let Some(buffer) = buffer.take() else { return FAILED };
                    if batch.add(Work::send(buffer)).is_err() {
                        return FAILED;
                    }
                }
                if batch.post().is_err() {
                    return FAILED;
                }
                for buffer in &mut owned.buffers {
                    let Ok(Some(done)) = owned.endpoint.poll() else { return FAILED };
                    sum += sent(&done);
                    *buffer = done.buffer;
                }
            }
            sum
        }
    )+};
}

batches! { loop_owned_send_ex16 loop_owned_send_cl16 }

macro_rules! empty {
    ($($name:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned, n: u64) -> u64 {
            for _ in 0..n {
                if !matches!(owned.endpoint.poll(), Ok(None)) {
                    return FAILED;
                }
            }
            n
        }
    )+};
}

empty! { loop_owned_em_ex loop_owned_em_cl }
