//! Handshakes of connections.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_pool::{Budget, Pool};
use rdma_safe::cm::{Handshake, Outcome, Progress, SetConnection};
use rdma_safe::endpoint::EndpointMut;
use rdma_safe::{Access, Buffer, Endpoint, EndpointBuilder, EndpointKey, EndpointSet, ProtectionDomain};

use crate::connection::{Facts, Inner};
use crate::driver::events::{Deadline, Events, Source};
use crate::driver::queue::Queue;
use crate::options::Options;
use crate::receives::Receives;
use crate::{Connection, Driver, Error, Result, SharedReceives, Sharing, trace};

/// Advances a handshake that needs no endpoint until it is complete.
pub(crate) async fn complete<S: Sharing, T>(events: &S::Rc<Events<S>>, mut handshake: Handshake<T>) -> Result<T>
where
    T: Outcome<Context = ()>,
{
    let source = Source::<S>::channel(events, handshake.channel())?;
    let mut deadline = Deadline::<S>::new(events);
    loop {
        handshake = match handshake.advance() {
            Ok(Progress::Ready(result)) => return Ok(result),
            Ok(Progress::Pending(handshake)) => handshake,
            Err(error) => return Err(error.into().into()),
        };
        let until = handshake.deadline();
        poll_fn(|context| match source.poll_ready(context) {
            Poll::Ready(ready) => Poll::Ready(ready),
            Poll::Pending => deadline.poll(until, context).map(Ok),
        })
        .await?;
    }
}

/// What an endpoint is built from.
pub(crate) struct Plan<S: Sharing> {
    pub(crate) driver: Driver<S>,
    pub(crate) options: Options,
    pub(crate) pd: ProtectionDomain,
    pool: Pool,
    /// Until the endpoint is built.
    receives: Option<Receives<S>>,
    /// The memory of own receives.
    buffers: Vec<Buffer>,
}

impl<S: Sharing> Plan<S> {
    /// Reserves shared receives. Own receives need memory: [`Plan::with_memory`] or [`Plan::try_with_memory`].
    pub(crate) fn new(
        driver: &Driver<S>,
        options: &Options,
        shared: Option<&SharedReceives<S>>,
        pd: &ProtectionDomain,
    ) -> Result<Self> {
        let pool = driver.pool(pd)?;
        let receives = match shared {
            Some(shared) => Receives::Shared(shared.reserve(pd, options.receives)?),
            None => Receives::Own(options.receives),
        };
        let (driver, options, pd) = (driver.clone(), options.clone(), pd.clone());
        Ok(Plan { driver, options, pd, pool, receives: Some(receives), buffers: Vec::new() })
    }

    /// Takes memory for own receives from the pool, once there is some.
    pub(crate) async fn with_memory(mut self) -> Result<Self> {
        for _ in 0..self.own_receives() {
            self.buffers.push(self.pool.get_async(Budget::Receives, self.options.message_size).await?);
        }
        Ok(self)
    }

    /// Like [`Plan::with_memory`], without waiting.
    pub(crate) fn try_with_memory(mut self) -> Result<Self> {
        for _ in 0..self.own_receives() {
            self.buffers.push(self.pool.try_get(Budget::Receives, self.options.message_size)?);
        }
        Ok(self)
    }

    fn own_receives(&self) -> u32 {
        match &self.receives {
            Some(Receives::Own(receives)) => *receives,
            _ => 0,
        }
    }

    fn builder(&self, receives: &Receives<S>) -> EndpointBuilder<'_> {
        let Options { sends, send_elements, keepalive, .. } = self.options;
        let builder = Endpoint::builder(&self.pd)
            .send_depth(sends)
            .recv_depth(receives.count())
            .send_sges(send_elements.min(self.pd.context().attributes().max_sge().max(1)))
            .recv_sges(1)
            .keepalive(keepalive)
            // The peer needs a key of memory that was exposed with the right.
            .peer_access(Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        match receives.shared() {
            Some(shared) => shared.build(builder),
            None => builder,
        }
    }

    /// Starts the handshake with `start`.
    pub(crate) fn start(
        mut self,
        start: impl FnOnce(
            EndpointBuilder<'_>,
            &mut EndpointSet,
            &mut Vec<Buffer>,
        ) -> rdma_safe::Result<Handshake<SetConnection>>,
    ) -> Result<Opening<S>> {
        let (guard, handshake) = self.open(|builder, set, receives| {
            let handshake = start(builder, set, receives)?;
            Ok((handshake.key(), handshake))
        })?;
        let events = self.driver.shared.events.clone();
        let source = Source::channel(&events, handshake.channel())?;
        let deadline = Deadline::new(&events);
        Ok(Opening { guard, handshake: Some(handshake), source: Some(source), deadline, plan: self })
    }

    /// Adds an endpoint to a queue with room for it. `start` builds it and returns its key.
    pub(crate) fn open<T>(
        &mut self,
        start: impl FnOnce(EndpointBuilder<'_>, &mut EndpointSet, &mut Vec<Buffer>) -> rdma_safe::Result<(EndpointKey, T)>,
    ) -> Result<(Guard<S>, T)> {
        // Buffers that are not posted are dropped after the lock of the queue is released.
        let mut buffers = std::mem::take(&mut self.buffers);
        let receives = self.receives.take().ok_or(Error::Closed)?;
        let builder = self.builder(&receives);
        let start = |set: &mut EndpointSet| start(builder.clone(), set, &mut buffers);
        let (queue, key, started) =
            self.driver.open(&builder, self.pd.context(), self.options.sends, receives, start)?;
        Ok((Guard { queue, key, is_done: false }, started))
    }
}

/// A connection whose handshake is in progress. Dropping it ends the handshake.
pub(crate) struct Opening<S: Sharing> {
    // Dropped first: it removes the endpoint and then drops the buffers, without the lock.
    guard: Guard<S>,
    handshake: Option<Handshake<SetConnection>>,
    source: Option<Source<S>>,
    deadline: Deadline<S>,
    plan: Plan<S>,
}

/// Removes the endpoint of a connection that does not come about.
pub(crate) struct Guard<S: Sharing> {
    pub(crate) queue: S::Rc<Queue<S>>,
    pub(crate) key: EndpointKey,
    pub(crate) is_done: bool,
}

impl<S: Sharing> Drop for Guard<S> {
    fn drop(&mut self) {
        if !self.is_done {
            self.queue.remove(self.key);
        }
    }
}

impl<S: Sharing> Unpin for Opening<S> {}

impl<S: Sharing> Future for Opening<S> {
    type Output = Result<Connection<S>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Opening { guard, handshake, source, deadline, plan } = &mut *self;
        loop {
            let (Some(current), Some(events)) = (handshake.take(), source.as_ref()) else { return Poll::Pending };
            match guard.queue.advance_opening(current) {
                Ok(Progress::Ready(connection)) => {
                    let Some(source) = source.take() else { return Poll::Pending };
                    guard.is_done = true;
                    return Poll::Ready(Ok(plan.connection(&guard.queue, connection, source)));
                }
                Ok(Progress::Pending(current)) => {
                    let until = current.deadline();
                    *handshake = Some(current);
                    match events.poll_ready(context) {
                        Poll::Ready(ready) => ready?,
                        Poll::Pending => ready!(deadline.poll(until, context)),
                    }
                }
                // A driver that stops removes the endpoint.
                Err(_) if plan.driver.is_stopped() => return Poll::Ready(Err(Error::DriverStopped)),
                Err(error) => {
                    trace::handshake_failed(&error);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }
}

impl<S: Sharing> Plan<S> {
    fn connection(&self, queue: &S::Rc<Queue<S>>, connection: SetConnection, source: Source<S>) -> Connection<S> {
        let facts = Facts {
            local: connection.local_address(),
            peer: connection.peer_address(),
            private_data: connection.private_data().to_vec(),
        };
        let handle = self.handle(queue, connection.key(), facts);
        trace::connected(handle.local_address(), handle.peer_address());
        Queue::establish(queue, connection, source);
        handle
    }

    /// The connection of an endpoint that was connected by exchanged addresses.
    pub(crate) fn exchanged(&self, guard: &Guard<S>) -> Connection<S> {
        guard.queue.set_exchanged(guard.key);
        let facts = Facts { local: None, peer: None, private_data: Vec::new() };
        self.handle(&guard.queue, guard.key, facts)
    }

    fn handle(&self, queue: &S::Rc<Queue<S>>, key: EndpointKey, facts: Facts) -> Connection<S> {
        Connection { inner: S::rc(self.inner(queue, key, facts)) }
    }

    pub(crate) fn inner(&self, queue: &S::Rc<Queue<S>>, key: EndpointKey, facts: Facts) -> Inner<S> {
        Inner {
            queue: queue.clone(),
            key,
            pool: self.pool.clone(),
            pd: self.pd.clone(),
            facts,
            linger: self.options.linger,
            driver: self.driver.clone(),
        }
    }
}

/// Posts the receives of a new endpoint. After an error, the endpoint is removed, and its memory and the rest are in `buffers`.
pub(crate) fn post_receives_in(
    set: &mut EndpointSet,
    key: EndpointKey,
    buffers: &mut Vec<Buffer>,
) -> rdma_safe::Result<()> {
    let mut endpoint = set.endpoint(key).ok_or(rdma_safe::Error::NoSuchEndpoint)?;
    post_receives(&mut endpoint, buffers).inspect_err(|_| buffers.extend(set.remove(key).unwrap_or_default()))
}

/// Posts the receives of a connection. After an error, the rest of the buffers is in `buffers`.
pub(crate) fn post_receives(endpoint: &mut EndpointMut<'_>, buffers: &mut Vec<Buffer>) -> rdma_safe::Result<()> {
    while let Some(buffer) = buffers.pop() {
        if let Err(rejected) = endpoint.receive(buffer) {
            buffers.extend(rejected.buffer);
            return Err(rejected.error.into());
        }
    }
    Ok(())
}
