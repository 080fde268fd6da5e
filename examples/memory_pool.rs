//! Sends and receives with buffers of a pool, and shows what happens when all of its buffers are in use.
#![forbid(unsafe_code)]

use std::error::Error;
use std::future::Future;
use std::iter;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use rdma_pool::{Budget, Pool};
use rdma_safe::{Buffer, Device, Endpoint};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Length of a message, and the size of its block.
const MESSAGE: usize = 4096;
/// Number of receives that are always posted.
const RECEIVES: usize = 8;
const MESSAGES: usize = 1000;

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
    let pd = Device::first()?.open()?.alloc_pd()?;
    let pool = Pool::builder(&pd)
        .share(Budget::Receives, RECEIVES * MESSAGE) // no other budget can take these
        .common(64 << 10) // for all budgets, registered as needed
        .build()?;

    let mut client = Endpoint::builder(&pd).build()?;
    let mut server = Endpoint::builder(&pd).recv_depth(RECEIVES as u32).build()?;
    client.connect(&server.address())?;
    server.connect(&client.address())?;
    for _ in 0..RECEIVES {
        server.receive(pool.try_get(Budget::Receives, MESSAGE)?)?;
    }

    // The sends take all they can. Three ways to get one more:
    let sends: Vec<Buffer> = iter::from_fn(|| pool.try_get(Budget::Sends, MESSAGE).ok()).collect();
    println!("the sends have {} buffers", sends.len());
    match pool.try_get(Budget::Sends, MESSAGE) {
        Err(error) => println!("try_get: {error}"),
        Ok(_) => println!("try_get: one more buffer"),
    }
    match pool.get(Budget::Sends, MESSAGE, Duration::from_millis(10)) {
        Err(_) => println!("get: nothing within 10 ms"),
        Ok(_) => println!("get: one more buffer"),
    }
    let next = pool.get_async(Budget::Sends, MESSAGE);
    let other = thread::spawn(move || drop(sends)); // back to the pool, from any thread
    let mut message = block_on(next)?;
    println!("get_async: one more buffer, of {} bytes", message.len());
    other.join().map_err(|_| "the other thread has panicked")?;

    // Received messages are handed on without a copy. The reader returns them to the pool when it has read them.
    let (messages, inbox) = mpsc::channel::<Buffer>();
    let reader = thread::spawn(move || inbox.into_iter().filter(|message| message.ends_with(b"message")).count());
    for _ in 0..MESSAGES {
        message.fill_from(b"a message")?;
        client.send(message)?;
        messages.send(server.wait(TIMEOUT)?.ok()?.buffer.expect("a receive has a buffer"))?;
        // Waits for the reader if it has not returned enough buffers.
        server.receive(pool.get(Budget::Receives, MESSAGE, TIMEOUT)?)?;
        let _ = client.wait(TIMEOUT)?.ok()?;
        message = pool.get(Budget::Sends, MESSAGE, TIMEOUT)?;
    }
    println!("sent {MESSAGES} messages");
    drop((message, messages));
    println!("the reader has read {} of them", reader.join().map_err(|_| "the reader has panicked")?);

    let posted = pool.statistics().used();
    drop((client, server)); // returns the receives that are still posted
    let statistics = pool.statistics();
    println!("{posted} bytes were posted, and {} are in use now", statistics.used());
    let (share, common) = (statistics.share(Budget::Receives).registered, statistics.common().registered);
    println!("registered: {share} bytes for the receives and {common} for all budgets");
    Ok(())
}

/// Polls `future` in this thread. A program that has a runtime awaits it instead.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
