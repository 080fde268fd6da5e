//! The ping-pong of rdma-async, without locks.

use std::time::Duration;

use rdma_async::{Connection, Connector, Driver, Idle, Local, Runner};
use tokio::task::LocalSet;

use crate::{End, Result, SIZE, open, timed};

fn driver() -> Result<(Driver<Local>, Runner<Local>)> {
    Ok(Driver::builder().idle(Idle::Sleep).completions(128).build()?)
}

/// A connection to the other end.
async fn connect(end: &End<'_>, driver: &Driver<Local>) -> Result<Connection<Local>> {
    let connector = Connector::with_driver(driver).sends(64).receives(64).message_size(SIZE);
    let unconnected = connector.prepare(&open()?).await?;
    let peer = end.exchange(unconnected.address())?;
    Ok(unconnected.connect(&peer)?)
}

async fn exchange(end: &End<'_>, connection: &Connection<Local>, messages: u32) -> Result<()> {
    let mut buffer = connection.buffer(SIZE).await?;
    for _ in 0..messages {
        if !end.is_client {
            connection.receive().await?.ok_or("the client has left")?;
        }
        buffer = connection.send(buffer).await?;
        if end.is_client {
            connection.receive().await?.ok_or("the server has left")?;
        }
    }
    Ok(())
}

/// The driver and the messages take turns on this thread, without an executor.
pub(crate) fn on_this_thread(end: &End<'_>) -> Result<Duration> {
    let (driver, mut runner) = driver()?;
    let connection = runner.block_on(connect(end, &driver))?;
    timed(end, |messages| runner.block_on(exchange(end, &connection, messages)))
}

/// The driver and the messages are tasks of tokio.
pub(crate) fn on_tokio(end: &End<'_>) -> Result<Duration> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let tasks = LocalSet::new();
    let (driver, runner) = driver()?;
    tasks.spawn_local(runner.run_tokio());
    let connection = tasks.block_on(&runtime, connect(end, &driver))?;
    timed(end, |messages| tasks.block_on(&runtime, exchange(end, &connection, messages)))
}
