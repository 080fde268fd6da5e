//! Accepting connections.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use rdma_safe::ProtectionDomain;
use rdma_safe::cm::{self, Address, Request};

use crate::driver::events::Source;
use crate::opening::{Opening, Plan, post_receives};
use crate::options::{Options, setters};
use crate::sharing::Lock;
use crate::{Connection, Destination, Driver, Error, Result, SharedReceives, Sharing, Threads, trace};

/// Listens at an address for connections.
///
/// ```no_run
/// # async fn serve(_: rdma_async::Connection) {}
/// # async fn example() -> rdma_async::Result<()> {
/// let listener = rdma_async::Listener::bind("0.0.0.0:7471").await?;
/// loop {
///     let connection = listener.accept().await?;
///     tokio::spawn(serve(connection));
/// }
/// # }
/// ```
///
/// Handshakes of several peers advance at the same time, while any task is in [`Listener::accept`].
pub struct Listener<S: Sharing = Threads> {
    // Dropped before the listener, whose descriptor it watches.
    source: Source<S>,
    state: S::Cell<State<S>>,
    /// Wakes all tasks in [`Listener::accept`].
    acceptors: Arc<Acceptors>,
    driver: Driver<S>,
    options: Options,
    shared: Option<SharedReceives<S>>,
    local: Address,
}

struct State<S: Sharing> {
    listener: cm::Listener,
    opening: Vec<Opening<S>>,
    failed: u64,
}

/// The tasks in [`Listener::accept`]. Any of them can advance any handshake, so all are woken.
struct Acceptors(Lock<Wakers>);

#[derive(Default)]
struct Wakers {
    /// Number of the next acceptor.
    next: u64,
    /// By the numbers of their acceptors.
    waiting: Vec<(u64, Waker)>,
}

impl Acceptors {
    fn with<R>(&self, f: impl FnOnce(&mut Wakers) -> R) -> R {
        Threads::with(&self.0, f)
    }
}

impl Wake for Acceptors {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waiting = self.with(|wakers| std::mem::take(&mut wakers.waiting));
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

/// One call of [`Listener::accept`]. Dropping it drops its waker.
struct Acceptor<'a> {
    acceptors: &'a Acceptors,
    number: u64,
}

impl<'a> Acceptor<'a> {
    fn new(acceptors: &'a Acceptors) -> Self {
        let number = acceptors.with(|wakers| {
            wakers.next += 1;
            wakers.next
        });
        Acceptor { acceptors, number }
    }

    /// Wakes the task with all others.
    fn register(&self, waker: &Waker) {
        let waker = waker.clone();
        drop(self.acceptors.with(|wakers| {
            if let Some((_, current)) = wakers.waiting.iter_mut().find(|(number, _)| *number == self.number) {
                return Some(std::mem::replace(current, waker));
            }
            wakers.waiting.push((self.number, waker));
            None
        }));
    }
}

impl Drop for Acceptor<'_> {
    fn drop(&mut self) {
        if self.acceptors.0.is_inherited() {
            return;
        }
        drop(self.acceptors.with(|wakers| {
            let place = wakers.waiting.iter().position(|(number, _)| *number == self.number);
            place.map(|place| wakers.waiting.swap_remove(place))
        }));
    }
}

/// Options of a listener. Made by [`Listener::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `bind`"]
pub struct ListenerBuilder<S: Sharing = Threads> {
    driver: Option<Driver<S>>,
    options: Options,
    shared: Option<SharedReceives<S>>,
    backlog: u32,
    pd: Option<ProtectionDomain>,
}

impl Listener {
    /// Listens at the first of these addresses that is available, with the driver of the current runtime.
    ///
    /// An unspecified IP address stands for all addresses of this host, on any device. Port 0 selects a free port.
    ///
    /// # Errors
    /// [`Error::Rdma`], [`Error::Name`] and the errors of [`Driver::current`].
    pub async fn bind(address: impl Into<Destination>) -> Result<Self> {
        Listener::builder().bind(address).await
    }

    /// Options, for the driver of the current runtime.
    pub fn builder() -> ListenerBuilder {
        ListenerBuilder { driver: None, options: Options::default(), shared: None, backlog: 128, pd: None }
    }
}

impl ListenerBuilder {
    /// Listens at the first of these addresses that is available.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub async fn bind(self, address: impl Into<Destination>) -> Result<Listener> {
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => Driver::current()?,
        };
        self.bind_with(driver, address).await
    }

    /// Uses this driver, of one thread or of any. Shared receives that were set before are dropped, since they may be of another
    /// kind.
    pub fn driver<S: Sharing>(self, driver: &Driver<S>) -> ListenerBuilder<S> {
        let ListenerBuilder { options, backlog, pd, .. } = self;
        ListenerBuilder { driver: Some(driver.clone()), options, shared: None, backlog, pd }
    }
}

impl ListenerBuilder<crate::Local> {
    /// Like [`Listener::bind`], with a driver of one thread.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub async fn bind(self, address: impl Into<Destination>) -> Result<Listener<crate::Local>> {
        let driver = self.driver.clone().ok_or(Error::DriverStopped)?;
        self.bind_with(driver, address).await
    }
}

impl<S: Sharing> ListenerBuilder<S> {
    setters!(
        "At most 196 bytes that the reply carries, for the [private data](crate::Connection::private_data) of the peer."
    );

    /// Connections share these receives with others. Each reserves [`receives`](ListenerBuilder::receives) of them, and its
    /// request is rejected if there are not as many.
    pub fn shared_receives(mut self, shared: &SharedReceives<S>) -> Self {
        self.shared = Some(shared.clone());
        self
    }

    /// Requests that wait to be accepted; 128 by default. Further ones are dropped, and retried by the peers.
    pub fn backlog(mut self, requests: u32) -> Self {
        self.backlog = requests;
        self
    }

    /// Uses this domain for connections on its device, instead of opening the device.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.pd = Some(pd.clone());
        self
    }

    async fn bind_with(self, driver: Driver<S>, address: impl Into<Destination>) -> Result<Listener<S>> {
        let mut last = None;
        for address in address.into().addresses().await? {
            match cm::Listener::bind_with(address, self.backlog) {
                Ok(listener) => return self.listen(driver, listener),
                Err(error) => last = Some(error.into()),
            }
        }
        Err(last.unwrap_or_else(Error::no_address))
    }

    fn listen(self, driver: Driver<S>, listener: cm::Listener) -> Result<Listener<S>> {
        let mut listener = listener.timeout(self.options.timeout).devices(&driver.shared.devices);
        if let Some(pd) = &self.pd {
            listener = listener.pd(pd);
        }
        let source = Source::channel(&driver.shared.events, listener.channel())?;
        let local = listener.local_address();
        let state = S::cell(State { listener, opening: Vec::new(), failed: 0 });
        let acceptors = Arc::new(Acceptors(Threads::cell(Wakers::default())));
        Ok(Listener { source, state, acceptors, driver, options: self.options, shared: self.shared, local })
    }
}

impl<S: Sharing> Listener<S> {
    /// The address that it listens at, including the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.local
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver<S> {
        &self.driver
    }

    /// Number of requests whose handshake has failed, for example because the peer died or there was no memory.
    #[must_use]
    pub fn failed(&self) -> u64 {
        S::with(&self.state, |state| state.failed)
    }

    /// The next connection.
    ///
    /// A handshake that fails concerns one peer only. It is counted by [`Listener::failed`] and not returned here. Dropping the
    /// future loses no connection.
    ///
    /// # Errors
    /// [`Error::Rdma`] when one request cannot be used, for example because the process has no file descriptor left (`EMFILE`).
    /// That request is rejected, and the listener goes on: log the error, wait for some milliseconds, and call this again. After
    /// the device of the address was removed, each call fails with `Cause::DeviceRemoved`: end the loop.
    ///
    /// [`Error::DriverStopped`].
    pub async fn accept(&self) -> Result<Connection<S>> {
        let acceptor = Acceptor::new(&self.acceptors);
        poll_fn(|context| self.poll_accept(&acceptor, context)).await
    }

    fn poll_accept(&self, acceptor: &Acceptor<'_>, context: &mut Context<'_>) -> Poll<Result<Connection<S>>> {
        acceptor.register(context.waker());
        let waker = Waker::from(self.acceptors.clone());
        let context = &mut Context::from_waker(&waker);
        loop {
            // Takes requests until there are none. The next one makes the descriptor readable again.
            loop {
                let next = S::with(&self.state, |state| state.listener.next(Duration::ZERO));
                match next {
                    Ok(Some(request)) => match self.start(request) {
                        Ok(opening) => S::with(&self.state, |state| state.opening.push(opening)),
                        Err(Error::DriverStopped) => return Poll::Ready(Err(Error::DriverStopped)),
                        Err(error) => {
                            trace::handshake_failed(&error);
                            S::with(&self.state, |state| state.failed += 1);
                        }
                    },
                    Ok(None) => break,
                    Err(error) => {
                        // There may be further requests, and this task need not come back.
                        self.acceptors.wake_by_ref();
                        return Poll::Ready(Err(error.into()));
                    }
                }
            }
            if let Some(connection) = self.poll_opening(context) {
                return Poll::Ready(Ok(connection));
            }
            ready!(self.source.poll_ready(context))?;
        }
    }

    /// Advances the handshakes. Returns a connection that is complete.
    fn poll_opening(&self, context: &mut Context<'_>) -> Option<Connection<S>> {
        // Not inside the cell, since dropping a handshake can run code of the user.
        let mut opening = S::with(&self.state, |state| std::mem::take(&mut state.opening));
        let (mut index, mut failed, mut connection) = (0, 0, None);
        while connection.is_none() && index < opening.len() {
            match Pin::new(&mut opening[index]).poll(context) {
                Poll::Pending => index += 1,
                Poll::Ready(result) => {
                    drop(opening.swap_remove(index));
                    match result {
                        Ok(complete) => connection = Some(complete),
                        Err(_) => failed += 1,
                    }
                }
            }
        }
        let has_more = !opening.is_empty();
        S::with(&self.state, |state| {
            state.opening.append(&mut opening);
            state.failed += failed;
        });
        if connection.is_some() && has_more {
            // Some of them were not polled, and other tasks may have looked while they were out of the cell.
            self.acceptors.wake_by_ref();
        }
        connection
    }

    fn start(&self, request: Request) -> Result<Opening<S>> {
        let pd = request.pd()?;
        let plan = Plan::new(&self.driver, &self.options, self.shared.as_ref(), &pd);
        let plan = match plan.and_then(Plan::try_with_memory) {
            Ok(plan) => plan,
            Err(error) => {
                let reason = error.to_string();
                request.reject(&reason.as_bytes()[..reason.len().min(MAX_REASON)])?;
                return Err(error);
            }
        };
        let private_data = &self.options.private_data;
        plan.start(|builder, set, receives| {
            request.start_accept_in_with(builder, set, private_data, |endpoint| post_receives(endpoint, receives))
        })
    }
}

/// Most bytes of private data in a rejection.
const MAX_REASON: usize = 148;

impl<S: Sharing> fmt::Debug for Listener<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local_address", &self.local).finish_non_exhaustive()
    }
}
