//! Runs the loops over the crate ibverbs, as far as its interface allows.
//!
//! ibverbs posts one signaled send or one receive at a time, with `ibv_post_send` and `ibv_post_recv`, and polls with
//! `ibv_poll_cq` into an array of the caller.

use std::ops::Range;
use std::process::ExitCode;

use ibverbs::{CompletionQueue, MemoryRegion, QueuePair, ibv_qp_type, ibv_wc};
use rdma_rivals::{BATCH, DEPTH, FAILED, LEN, Result, endless, finish, measure};

fn main() -> ExitCode {
    finish(run())
}

fn run() -> Result<()> {
    let devices = ibverbs::devices()?;
    let context = devices.get(0).ok_or("no device")?.open()?;
    let pd = context.alloc_pd()?;
    let cq = context.create_cq(DEPTH as i32, 0)?;
    let mut builder = pd.create_qp(&cq, &cq, ibv_qp_type::IBV_QPT_RC);
    let prepared = builder.set_max_send_wr(DEPTH).set_max_recv_wr(DEPTH).build()?;
    let own_endpoint = prepared.endpoint();
    let mut qp = prepared.handshake(own_endpoint)?;
    let mut mr = pd.allocate::<u8>(LEN as usize * BATCH)?;
    measure("ibverbs", "send_cl1", |n| send(&mut qp, &cq, &mut mr, n))?;
    measure("ibverbs", "rv1", |n| receive(&mut qp, &mut mr, n))?;
    measure("ibverbs", "em_cl", |n| empty(&cq, n))?;
    endless()?;
    measure("ibverbs", "poll_cl", |n| poll(&cq, n))
}

/// send_cl1: `wr_id` is the offset of the buffer, which is posted again after its completion.
#[inline(never)]
fn send(qp: &mut QueuePair<'_>, cq: &CompletionQueue<'_>, mr: &mut MemoryRegion<u8>, n: u64) -> u64 {
    let mut wcs = [ibv_wc::default(); BATCH];
    let (mut buffer, mut sum) = (0, 0);
    for _ in 0..n {
        // SAFETY: the memory stays registered while the loop runs, and the stub never accesses it.
        if unsafe { qp.post_send(mr, range(buffer), buffer) }.is_err() {
            return FAILED;
        }
        let Ok(taken) = cq.poll(&mut wcs) else { return FAILED };
        for wc in taken {
            buffer = wc.wr_id();
            sum += status(wc) + 1;
        }
    }
    if buffer == 0 { sum } else { FAILED }
}

/// rv1
#[inline(never)]
fn receive(qp: &mut QueuePair<'_>, mr: &mut MemoryRegion<u8>, n: u64) -> u64 {
    for i in 0..n {
        // SAFETY: the memory stays registered while the loop runs, and the stub never accesses it.
        if unsafe { qp.post_receive(mr, range(0), i) }.is_err() {
            return FAILED;
        }
    }
    n
}

/// em_cl
#[inline(never)]
fn empty(cq: &CompletionQueue<'_>, n: u64) -> u64 {
    let mut wcs = [ibv_wc::default(); BATCH];
    for _ in 0..n {
        let Ok([]) = cq.poll(&mut wcs) else { return FAILED };
    }
    n
}

/// poll_cl
#[inline(never)]
fn poll(cq: &CompletionQueue<'_>, n: u64) -> u64 {
    let mut wcs = [ibv_wc::default(); BATCH];
    let mut sum = 0;
    for _ in (0..n).step_by(BATCH) {
        loop {
            let Ok(taken) = cq.poll(&mut wcs) else { return FAILED };
            if taken.is_empty() {
                break;
            }
            for wc in taken {
                sum += wc.wr_id() + status(wc) + u64::from(wc.opcode()) + wc.len() as u64;
                sum += u64::from(wc.imm_data().map_or(0, u32::from_be));
            }
        }
    }
    sum
}

fn range(start: u64) -> Range<usize> {
    start as usize..start as usize + LEN as usize
}

/// Number of the status, which ibverbs exposes only through `error`.
fn status(wc: &ibv_wc) -> u64 {
    wc.error().map_or(0, |(status, _)| u64::from(status))
}
