//! The loops over the owned API of rdma-safe, with the interface known before the loop.

use rdma_safe::interface::{Classic, Extended};
use rdma_safe::{Completion, Operation, Work};

use crate::rig::{BATCH, FAILED, Owned};

#[inline(always)]
fn read_send(done: &Completion) -> u64 {
    u64::from(done.status.0) + 1
}

#[inline(always)]
fn read_receive(done: &Completion) -> u64 {
    u64::from(done.status.0)
        + u64::from(done.operation == Operation::Receive)
        + u64::from(done.byte_len)
        + u64::from(done.imm().unwrap_or(0))
}

macro_rules! one_at_a_time {
    ($($name:ident: $interface:ident = $post:ident, $read:ident;)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned<$interface>, n: u64) -> u64 {
            let mut sum = 0;
            let Some(mut buffer) = owned.buffers[0].take() else { return FAILED };
            for _ in 0..n {
                if owned.endpoint.$post(buffer).is_err() {
                    return FAILED;
                }
                let back = owned.endpoint.poll_with(|done| {
                    sum += $read(&done);
                    done.buffer
                });
                match back {
                    Ok(Some(Some(back))) => buffer = back,
                    _ => return FAILED,
                }
            }
            owned.buffers[0] = Some(buffer);
            sum
        }
    )+};
}

one_at_a_time! {
    loop_owned_send_ex1: Extended = send, read_send;
    loop_owned_send_cl1: Classic = send, read_send;
    loop_owned_recv_ex1: Extended = receive, read_receive;
    loop_owned_recv_cl1: Classic = receive, read_receive;
}

macro_rules! many {
    ($($name:ident: $interface:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned<$interface>, n: u64) -> u64 {
            let mut sum = 0;
            for _ in (0..n).step_by(BATCH) {
                let buffers = owned.buffers.iter_mut().map_while(Option::take);
                if owned.endpoint.send_many(buffers).unwrap_or(0) != BATCH {
                    return FAILED;
                }
                let mut places = owned.buffers.iter_mut();
                let taken = owned.endpoint.poll_each(BATCH, |done| {
                    sum += read_send(&done);
                    if let Some(place) = places.next() {
                        *place = done.buffer;
                    }
                });
                if taken != Ok(BATCH) {
                    return FAILED;
                }
            }
            sum
        }
    )+};
}

many! { loop_owned_send_ex16: Extended loop_owned_send_cl16: Classic }

macro_rules! batches {
    ($($name:ident: $interface:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned<$interface>, n: u64) -> u64 {
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
                    let back = owned.endpoint.poll_with(|done| {
                        sum += read_send(&done);
                        done.buffer
                    });
                    let Ok(Some(back)) = back else { return FAILED };
                    *buffer = back;
                }
            }
            sum
        }
    )+};
}

batches! { loop_batch_send_ex16: Extended loop_batch_send_cl16: Classic }

macro_rules! empty {
    ($($name:ident: $interface:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(owned: &mut Owned<$interface>, n: u64) -> u64 {
            for _ in 0..n {
                if !matches!(owned.endpoint.poll(), Ok(None)) {
                    return FAILED;
                }
            }
            n
        }
    )+};
}

empty! { loop_owned_em_ex: Extended loop_owned_em_cl: Classic }
