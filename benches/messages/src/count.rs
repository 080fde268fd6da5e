//! A fixed number of messages over one connection, for a clock that counts instructions.

use std::future::Future;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::ValueEnum;
use rdma_async::{Driver, Idle, Threads};

use crate::transport::{FILLING, Link, Listener, Transport};
use crate::{Pattern, Result, runtime, serve};

/// What runs the tasks of an end.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Executor {
    /// A tokio runtime with one worker. The driver is one of its tasks.
    Tokio,
    /// `Runner::block_on`, on one thread.
    BlockOn,
}

/// A server for one connection.
#[derive(clap::Args, Debug)]
pub(crate) struct Server {
    #[arg(long)]
    transport: Transport,
    #[arg(long, default_value = "tokio")]
    executor: Executor,
    #[arg(long)]
    address: String,
    /// Length of a message in bytes.
    #[arg(long, default_value_t = 64)]
    size: usize,
}

/// The client of [`Server`].
#[derive(clap::Args, Debug)]
pub(crate) struct Client {
    #[arg(long)]
    transport: Transport,
    #[arg(long, default_value = "tokio")]
    executor: Executor,
    #[arg(long)]
    address: String,
    #[arg(long)]
    pattern: Pattern,
    /// Length of a message in bytes.
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Messages of the client: round trips of ping-pong.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
}

impl Executor {
    /// Runs the task that `task` makes with a driver, which sleeps while it has nothing to do.
    fn run<T, F>(self, task: impl FnOnce(Driver) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        rdma_safe::soft::install_by_default();
        let driver = Driver::builder().idle(Idle::Sleep);
        match self {
            Executor::Tokio => {
                let runtime = runtime()?;
                let driver = {
                    let _context = runtime.enter();
                    driver.tokio()?
                };
                // A task runs on the worker, the future of `block_on` does not.
                runtime.block_on(runtime.spawn(task(driver)))?
            }
            Executor::BlockOn => {
                let (driver, mut runner) = driver.build::<Threads>()?;
                runner.block_on(task(driver))
            }
        }
    }
}

impl Server {
    pub(crate) fn run(self) -> Result<()> {
        let Server { transport, executor, address, size } = self;
        executor.run(move |driver| async move {
            let listener = Listener::bind(transport, &address, Some(&driver), size).await?;
            // The client ends its process, so the connection may end without its farewell.
            let _ = serve(listener.accept().await?).await;
            Ok(())
        })
    }
}

impl Client {
    pub(crate) fn run(self) -> Result<()> {
        let Client { transport, executor, address, pattern, size, messages } = self;
        if pattern.is_grpc() {
            return Err("gRPC is measured by `compare` only".into());
        }
        let time = executor.run(move |driver| async move {
            let mut link = Link::connect(transport, &address, Some(&driver), size).await?;
            time(&mut link, pattern, &vec![FILLING; size.max(2)].into(), messages).await
        })?;
        let one_way = if pattern == Pattern::PingPong { 2 * messages } else { messages };
        println!("{:.1}", time.as_nanos() as f64 / f64::from(one_way));
        Ok(())
    }
}

/// The time of `messages` exchanges, after a tenth of them to warm up.
async fn time(link: &mut Link, pattern: Pattern, message: &Bytes, messages: u32) -> Result<Duration> {
    link.send(&Bytes::from(vec![pattern as u8])).await?;
    exchange(link, pattern, message, messages.div_ceil(10)).await?;
    let start = Instant::now();
    exchange(link, pattern, message, messages).await?;
    Ok(start.elapsed())
}

async fn exchange(link: &mut Link, pattern: Pattern, message: &Bytes, messages: u32) -> Result<()> {
    for _ in 0..messages {
        link.send(message).await?;
        if pattern == Pattern::PingPong {
            link.flush().await?;
            link.receive(<[u8]>::len).await?.filter(|len| *len == message.len()).ok_or("the echo differs")?;
        }
    }
    if pattern == Pattern::OneWay {
        link.send(&Bytes::from_static(&[1])).await?;
        link.flush().await?;
        link.receive(|_| ()).await?.ok_or("the server has ended")?;
    }
    Ok(())
}
