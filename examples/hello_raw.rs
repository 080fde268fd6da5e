//! A message between two raw queue pairs: memory is posted by address and key, which is `unsafe`.

use std::error::Error;
use std::time::{Duration, Instant};

use rdma_safe::qp::{ConnectOptions, InitOptions};
use rdma_safe::{Access, Device, Sge, WorkRequest};

/// Bytes of each of the two buffers in the registered memory.
const LEN: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);

fn main() {
    if let Err(error) = run() {
        // A `main` that returned the error would print `{error:?}`, without the advice in its text.
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    // Without an RDMA device, run on soft0, a software device in this process.
    rdma_safe::soft::install_by_default();

    // Declared before the queue pairs, so freed after them.
    let mut memory = vec![0_u8; 2 * LEN];

    let pd = Device::first()?.open()?.alloc_pd()?;
    let mut cq = pd.context().completion_queue(16).build()?;
    let mut client = pd.queue_pair(&cq, &cq).build()?;
    let mut server = pd.queue_pair(&cq, &cq).build()?;
    let addresses = [client.init(&InitOptions::default())?, server.init(&InitOptions::default())?];
    client.connect(&addresses[1], &ConnectOptions::default())?;
    server.connect(&addresses[0], &ConnectOptions::default())?;

    memory[..5].copy_from_slice(b"hello");
    // SAFETY: the memory is not freed or moved before the region and the queue pairs are dropped.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr(), memory.len(), Access::LOCAL_WRITE)? };
    let sge = |offset, len| Sge { address: region.address() + offset as u64, len, lkey: region.lkey() };

    // SAFETY: nobody accesses these bytes before the completion.
    unsafe { server.receive(1, sge(LEN, LEN as u32))? };
    let mut batch = client.send_batch()?;
    // SAFETY: nobody changes these bytes before the completion.
    unsafe { batch.send(WorkRequest::new(2).signaled(), sge(0, 5))? };
    batch.post()?;

    let (start, mut completed) = (Instant::now(), 0);
    while completed < 2 {
        let mut poll = cq.poll();
        while let Some(completion) = poll.next()? {
            completion.ok()?;
            println!("work request {} completed: {}", completion.wr_id(), completion.opcode());
            completed += 1;
        }
        if start.elapsed() > TIMEOUT {
            return Err(format!("{completed} of 2 completions within {TIMEOUT:?}").into());
        }
    }
    // Both work requests have completed, so the memory may be accessed again.
    println!("received {:?}", String::from_utf8_lossy(&memory[LEN..LEN + 5]));
    Ok(())
}
