//! The loops over rdma-async: a task sends and awaits the completion, which it finds itself, or which the driver takes.
//!
//! What an executor adds is not counted: the waker does nothing.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use rdma_async::{Connection, Connector, Driver, DriverBuilder, Idle, Local, Runner, Sharing, Threads};
use rdma_safe::{Buffer, ProtectionDomain};

use crate::rig::{FAILED, Result};

/// Objects of rdma-async.
pub(crate) struct Awaited<S: Sharing> {
    runner: Runner<S>,
    connection: Connection<S>,
    buffer: Option<Buffer>,
}

impl<S: Sharing> Awaited<S> {
    /// A connection to itself. With [`Idle::Sleep`], tasks do not look for completions.
    pub(crate) fn new(pd: &ProtectionDomain, idle: Idle) -> Result<Self> {
        let (driver, mut runner): (Driver<S>, _) = DriverBuilder::default().idle(idle).completions(1024).build()?;
        let connector = Connector::with_driver(&driver).sends(64).receives(64);
        let connection = runner.block_on(async {
            let unconnected = connector.prepare(pd).await?;
            let address = unconnected.address();
            unconnected.connect(&address)
        })?;
        Ok(Awaited { runner, connection, buffer: Some(pd.allocate(64)?) })
    }
}

#[inline(always)]
fn send<S: Sharing>(awaited: &mut Awaited<S>, n: u64) -> u64 {
    let mut context = Context::from_waker(Waker::noop());
    let mut sum = 0;
    let Some(mut buffer) = awaited.buffer.take() else { return FAILED };
    for _ in 0..n {
        let mut send = pin!(awaited.connection.send(buffer));
        buffer = loop {
            match send.as_mut().poll(&mut context) {
                Poll::Ready(Ok(back)) => break back,
                Poll::Ready(Err(_)) => return FAILED,
                Poll::Pending => _ = awaited.runner.turn(),
            }
        };
        sum += 1;
    }
    awaited.buffer = Some(buffer);
    sum
}

macro_rules! sends {
    ($($name:ident: $sharing:ident)+) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) fn $name(awaited: &mut Awaited<$sharing>, n: u64) -> u64 {
            send(awaited, n)
        }
    )+};
}

sends! { loop_local_send_ex1: Local loop_shared_send_ex1: Threads }
