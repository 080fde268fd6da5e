//! Handshakes that advance when a descriptor is readable.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::attempt::{Cause, Step};
use super::error::failed;
use super::side::Side;
use super::{Address, EventChannel, EventKind};
use crate::error::Verb;
use crate::{EndpointSet, Errno, Error, Result, readiness};

/// A handshake in progress, which ends in a `T`. It never blocks.
///
/// | started by | ends in |
/// |---|---|
/// | [`Connector::start_resolve`] | [`Route`] |
/// | [`PreparedRoute::start_connect`], [`PreparedRequest::start_accept`] | [`Connection`] |
/// | [`Route::start_connect_in`], [`Request::start_accept_in`] | [`SetConnection`] |
/// | [`Connection::start_disconnect`] | [`Disconnected`] |
/// | [`SetConnection::start_disconnect`] | [`SetDisconnected`] |
/// | [`Connector::start_resolve_datagrams`] | [`DatagramRoute`] |
/// | [`DatagramRoute::start_find`] | [`DatagramService`] |
/// | [`Connector::start_resolve_group`] | [`GroupRoute`] |
/// | [`GroupRoute::start_join`] | [`GroupMember`] |
/// | [`GroupRoute::start_membership`] | [`GroupMembership`] |
///
/// Call [`advance`](Handshake::advance) once, then whenever the descriptor ([`AsFd`]) is readable, and at the
/// [`deadline`](Handshake::deadline). It takes the handshake and returns it, or its result, as [`Progress`]. A call without
/// an event costs one system call and changes nothing. For an endpoint of a set, call
/// [`advance_in`](Handshake::advance_in).
///
/// The blocking calls ([`Connector::resolve`], [`PreparedRoute::connect`], …) are these handshakes with
/// [`wait`](Handshake::wait). A handshake waits for the network only: `advance` itself opens the device and modifies the
/// queue pair, which the kernel does at once.
///
/// # Dropping
///
/// A handshake can be dropped at any time, and an error drops it. The kernel then informs the peer: its handshake fails
/// with [`Cause::Rejected`], a request that it has not answered fails when it is accepted, and a connection ends. If this
/// message is lost, the deadline of the peer ends its handshake. The endpoint is destroyed with the buffers that were
/// posted to it.
///
/// The endpoint of a [`SetConnection`] belongs to its set, and leaves it with the next call of the set, before that call
/// does anything else. So it is not lent, its completions are not handed out, and it does not count as a member. To get
/// its buffers back, make that call an [`EndpointSet::remove`] of its [`key`](Handshake::key). Otherwise its buffers are
/// dropped, which makes room in its receive pool.
///
/// # Example
///
/// One thread connects to several servers and accepts connections at the same time. (The example program `hello_service` also
/// transfers data and stops gracefully.)
///
/// ```no_run
/// use std::net::SocketAddr;
/// use std::os::fd::AsFd;
/// use std::time::{Duration, Instant};
///
/// use rdma_safe::cm::{Connection, Connector, Handshake, Listener, Outcome, Progress, Request, Route};
/// use rdma_safe::{Endpoint, Error, Result};
/// use rustix::event::{PollFd, PollFlags, Timespec, poll};
/// use rustix::io::Errno;
///
/// /// The event loop of a program that connects and accepts.
/// struct Peers {
///     listener: Listener,
///     resolving: Vec<Handshake<Route>>,
///     /// Both ends: those that connect and those that accept.
///     connecting: Vec<Handshake<Connection>>,
///     connected: Vec<Connection>,
/// }
///
/// fn accept(request: Request) -> Result<Handshake<Connection>> {
///     let pd = request.pd()?;
///     let mut prepared = request.prepare(Endpoint::builder(&pd))?;
///     prepared.receive(pd.allocate(4096)?)?;
///     prepared.start_accept(b"welcome")
/// }
///
/// fn connect(route: Route) -> Result<Handshake<Connection>> {
///     let pd = route.pd().clone();
///     let mut prepared = route.prepare(Endpoint::builder(&pd))?;
///     prepared.receive(pd.allocate(4096)?)?;
///     prepared.start_connect(b"hello")
/// }
///
/// /// An error affects one peer only.
/// fn report<T>(result: Result<T>) -> Option<T> {
///     result.inspect_err(|error| eprintln!("{error}")).ok()
/// }
///
/// /// Advances the handshakes. Returns the results of the complete ones.
/// fn advance<T: Outcome<Context = (), Error = Error>>(handshakes: &mut Vec<Handshake<T>>) -> Vec<T> {
///     let mut results = Vec::new();
///     for handshake in std::mem::take(handshakes) {
///         match report(handshake.advance()) {
///             Some(Progress::Ready(result)) => results.push(result),
///             Some(Progress::Pending(handshake)) => handshakes.push(handshake),
///             None => {}
///         }
///     }
///     results
/// }
///
/// impl Peers {
///     fn turn(&mut self) -> std::io::Result<()> {
///         while let Some(request) = report(self.listener.next(Duration::ZERO)).flatten() {
///             self.connecting.extend(report(accept(request)));
///         }
///         for route in advance(&mut self.resolving) {
///             self.connecting.extend(report(connect(route)));
///         }
///         self.connected.extend(advance(&mut self.connecting));
///
///         // Sleep until a descriptor is readable, or until the first deadline.
///         let deadlines = self.resolving.iter().map(Handshake::deadline);
///         let next = deadlines.chain(self.connecting.iter().map(Handshake::deadline)).min();
///         let timeout = next.map(|deadline| deadline.saturating_duration_since(Instant::now()));
///         let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
///         let resolving = self.resolving.iter().map(AsFd::as_fd);
///         let descriptors = resolving.chain(self.connecting.iter().map(AsFd::as_fd)).chain([self.listener.as_fd()]);
///         let mut polled: Vec<_> = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
///         match poll(&mut polled, timeout.as_ref()) {
///             // A signal handler has run. The next turn handles the descriptors that are readable.
///             Ok(_) | Err(Errno::INTR) => Ok(()),
///             Err(errno) => Err(errno.into()),
///         }
///     }
/// }
///
/// fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
///     let connector = Connector::new();
///     let listener = Listener::bind("0.0.0.0:7471")?;
///     let mut peers = Peers { listener, resolving: Vec::new(), connecting: Vec::new(), connected: Vec::new() };
///     for host in [2, 3, 4] {
///         peers.resolving.push(connector.start_resolve(SocketAddr::from(([10, 0, 0, host], 7471)))?);
///     }
///     while peers.connected.len() < 6 {
///         peers.turn()?;
///     }
///     Ok(())
/// }
/// ```
///
/// # Async runtimes
///
/// With tokio, make one `AsyncFd` of a clone of the [`channel`](Handshake::channel). The route, the connection and their
/// handshakes have the same channel, so one registration is enough:
///
/// ```text
/// // SAFETY: all clones of a channel have the same descriptor, which is open as long as one of them exists.
/// let readable = unsafe { AsyncFd::register(handshake.channel().clone()) }?;
/// let connection = loop {
///     match handshake.advance()? {
///         Progress::Ready(connection) => break connection,
///         Progress::Pending(pending) => handshake = pending,
///     }
///     // After the deadline, `advance` returns the error.
///     if let Ok(guard) = timeout_at(handshake.deadline().into(), readable.readable()).await {
///         guard?.clear_ready();
///     }
/// };
/// ```
///
/// tokio before 1.54 has the safe function `AsyncFd::new` instead.
///
/// `advance` returns [`Progress::Pending`] only when the channel is empty, so it also suits edge-triggered reactors. After
/// [`Progress::Ready`] the channel may have another event: call [`Connection::is_connected`] before waiting for the next
/// edge.
///
/// [`Connection`]: super::Connection
/// [`Connection::is_connected`]: super::Connection::is_connected
/// [`Connection::start_disconnect`]: super::Connection::start_disconnect
/// [`Connector::resolve`]: super::Connector::resolve
/// [`Connector::start_resolve`]: super::Connector::start_resolve
/// [`Connector::start_resolve_datagrams`]: super::Connector::start_resolve_datagrams
/// [`Connector::start_resolve_group`]: super::Connector::start_resolve_group
/// [`DatagramRoute`]: super::DatagramRoute
/// [`DatagramRoute::start_find`]: super::DatagramRoute::start_find
/// [`DatagramService`]: super::DatagramService
/// [`Disconnected`]: super::Disconnected
/// [`GroupMember`]: super::GroupMember
/// [`GroupMembership`]: super::GroupMembership
/// [`GroupRoute`]: super::GroupRoute
/// [`GroupRoute::start_join`]: super::GroupRoute::start_join
/// [`GroupRoute::start_membership`]: super::GroupRoute::start_membership
/// [`PreparedRequest::start_accept`]: super::PreparedRequest::start_accept
/// [`PreparedRoute::connect`]: super::PreparedRoute::connect
/// [`PreparedRoute::start_connect`]: super::PreparedRoute::start_connect
/// [`Request::start_accept_in`]: super::Request::start_accept_in
/// [`Route`]: super::Route
/// [`Route::start_connect_in`]: super::Route::start_connect_in
/// [`SetConnection`]: super::SetConnection
/// [`SetConnection::start_disconnect`]: super::SetConnection::start_disconnect
/// [`SetDisconnected`]: super::SetDisconnected
#[must_use = "dropping a handshake abandons it; call `advance` or `wait`"]
pub struct Handshake<T: Outcome> {
    // Dropped first, so that nothing arrives after the id is destroyed.
    pub(super) state: T::State,
    pub(super) side: Side,
    pub(super) step: Step,
    /// Whether it waits for an event. Otherwise its result is available.
    is_waiting: bool,
    /// Time limit of the step in progress.
    pub(super) timeout: Duration,
    deadline: Instant,
}

/// The state of a handshake that was advanced.
#[derive(Debug)]
#[must_use = "dropping a pending handshake abandons it"]
pub enum Progress<T: Outcome> {
    /// The handshake is complete.
    Ready(T),
    /// The handshake waits until its descriptor is readable, or for its deadline.
    Pending(Handshake<T>),
}

/// The result of a [`Handshake`]. Only types of this module implement this trait.
pub trait Outcome: Sized {
    /// Error of a failed handshake.
    type Error: std::error::Error + Into<Error> + Send + Sync + 'static;

    /// What advancing needs: nothing, or the [`EndpointSet`] of the endpoint.
    type Context;

    /// What the handshake needs besides the id.
    #[doc(hidden)]
    type State: fmt::Debug + Send;

    /// Handles what the handshake has waited for. Returns an error if `arrival` is one.
    #[doc(hidden)]
    fn handle(
        handshake: Handshake<Self>,
        arrival: Arrival,
        context: &mut Self::Context,
    ) -> Result<Progress<Self>, Self::Error>;
}

/// An event, or `None` if nothing had to arrive, or the error that ends the handshake.
///
/// The type cannot be named outside of this crate, so [`Outcome`] cannot be implemented there.
#[derive(Debug)]
pub struct Arrival(pub(super) Result<Option<EventKind>>);

impl Arrival {
    /// The event of `step`, for a handshake that waits for one.
    pub(super) fn event(self, side: &Side, step: Step) -> Result<EventKind> {
        self.0?.ok_or_else(|| side.error(step, Cause::Unexpected))
    }

    /// Whether the connection has ended, for a handshake that ends one.
    pub(super) fn disconnect(self, side: &Side) -> Result<()> {
        self.0?.map_or(Ok(()), |event| side.confirm_disconnect(&event))
    }
}

impl<T: Outcome> Handshake<T> {
    /// A handshake whose result is available: the first [`Handshake::advance`] returns it.
    pub(super) fn ready(state: T::State, side: Side, step: Step) -> Self {
        Handshake { state, side, step, is_waiting: false, timeout: Duration::ZERO, deadline: Instant::now() }
    }

    /// A handshake that waits for an event of `step`, for `timeout` at most.
    pub(super) fn waiting(state: T::State, side: Side, step: Step, timeout: Duration) -> Self {
        let mut handshake = Handshake::ready(state, side, step);
        handshake.wait_for(step, timeout);
        handshake
    }

    /// Makes it wait for an event of `step`, for `timeout` at most.
    pub(super) fn wait_for(&mut self, step: Step, timeout: Duration) {
        (self.step, self.is_waiting, self.timeout, self.deadline) = (step, true, timeout, deadline_after(timeout));
    }

    /// The time at which to call [`Handshake::advance`] even if the descriptor is not readable.
    ///
    /// After this time, `advance` fails with [`Cause::Timeout`] unless an event has arrived. Each step has another deadline, so
    /// ask again after each call of `advance`. If the handshake need not wait, the deadline has passed.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The step in progress.
    #[must_use]
    pub fn step(&self) -> Step {
        self.step
    }

    /// The channel that becomes readable when an event has arrived.
    ///
    /// It belongs to the handshake and to its result: do not read its events.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        self.side.id.channel()
    }

    /// The local address, once it is known.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.side.id.local_address()
    }

    /// The address of the peer: the requested one until the peer is resolved. `None` only if it is of a family that [`Address`]
    /// does not have.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.side.peer_address()
    }

    /// What it has waited for; `None` if that has not arrived yet.
    fn arrival(&self) -> Option<Arrival> {
        if !self.is_waiting {
            return Some(Arrival(Ok(None)));
        }
        match self.channel().try_event() {
            Ok(Some(event)) => Some(Arrival(Ok(Some(event.kind)))),
            Ok(None) if Instant::now() < self.deadline => None,
            Ok(None) => Some(Arrival(Err(self.side.error(self.step, Cause::Timeout(self.timeout))))),
            Err(error) => Some(Arrival(Err(error))),
        }
    }

    /// Handles all events that have arrived.
    fn advance_with(mut self, context: &mut T::Context) -> Result<Progress<T>, T::Error> {
        while let Some(arrival) = self.arrival() {
            match T::handle(self, arrival, context)? {
                Progress::Pending(handshake) => self = handshake,
                ready => return Ok(ready),
            }
        }
        Ok(Progress::Pending(self))
    }

    /// Waits until the handshake is complete.
    fn wait_with(mut self, context: &mut T::Context) -> Result<T, T::Error> {
        loop {
            self = match self.advance_with(context)? {
                Progress::Ready(result) => return Ok(result),
                Progress::Pending(handshake) => handshake,
            };
            let left = self.deadline.saturating_duration_since(Instant::now());
            let errno = match readiness::poll([self.as_fd()], left) {
                Ok([ready]) if ready == 0 || ready & libc::POLLIN != 0 => continue,
                // POLLHUP or POLLERR: there will be nothing to read.
                Ok(_) => Errno(libc::EIO),
                Err(errno) => errno,
            };
            match T::handle(self, Arrival(Err(failed(Verb::PollFd, errno))), context)? {
                Progress::Ready(result) => return Ok(result),
                Progress::Pending(handshake) => self = handshake,
            }
        }
    }
}

impl<T: Outcome<Context = ()>> Handshake<T> {
    /// Handles the events that have arrived, and starts the next step. Never blocks.
    ///
    /// # Errors
    /// [`CmError::Connect`](super::CmError::Connect) names the step that has failed and its cause. After the deadline the cause is
    /// [`Cause::Timeout`]. The other errors are those of the blocking call.
    pub fn advance(self) -> Result<Progress<T>, T::Error> {
        self.advance_with(&mut ())
    }

    /// Waits until the handshake is complete or has reached its deadline.
    ///
    /// # Errors
    /// Like [`Handshake::advance`].
    pub fn wait(self) -> Result<T, T::Error> {
        self.wait_with(&mut ())
    }
}

impl<T: Outcome<Context = EndpointSet>> Handshake<T> {
    /// Like [`Handshake::advance`], for an endpoint in `set`.
    ///
    /// # Errors
    /// Like [`Handshake::advance`]. The endpoint then leaves its set as if the handshake were dropped.
    /// [`Error::NoSuchEndpoint`] if the endpoint was removed, or belongs to another set.
    pub fn advance_in(self, set: &mut EndpointSet) -> Result<Progress<T>, T::Error> {
        self.advance_with(set)
    }

    /// Like [`Handshake::wait`], for an endpoint in `set`.
    ///
    /// # Errors
    /// Like [`Handshake::advance_in`].
    pub fn wait_in(self, set: &mut EndpointSet) -> Result<T, T::Error> {
        self.wait_with(set)
    }
}

/// The descriptor of [`Handshake::channel`].
impl<T: Outcome> AsFd for Handshake<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel().as_fd()
    }
}

impl<T: Outcome> fmt::Debug for Handshake<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake")
            .field("step", &self.step)
            .field("deadline", &self.deadline)
            .field("side", &self.side)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// The time after `timeout`, or after thirty years if the clock cannot represent it.
fn deadline_after(timeout: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + FAR)
}
