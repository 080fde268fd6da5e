//! Channels of messages.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use rdma_async::{Connection, coop};
use rdma_pool::{Budget, Pool};
use rdma_safe::ProtectionDomain;
use rdma_safe::cm::Address;

use crate::engine::{Engine, Reserved, Unpacker, WRITE_PARTS, Waits};
use crate::error::{Error, Result};
use crate::flow::Limits;
use crate::lent::Lent;
use crate::many::Messages;
use crate::message::{Arrival, CopyBudget, Message};
use crate::options::Options;
use crate::payload::{self, Payload};
use crate::sending::Send;
use crate::shared::Shared;
use crate::waiting::Place;
use crate::wire::{HEADER, Hello};

/// A connection for messages of any size, for any number of tasks.
///
/// Messages arrive in order, each once. Short messages that are sent while others are on their way share packets. A sender waits
/// while its peer has no room, in order of arrival. A message has at most 64 MiB by default; see
/// [`Connector::max_message`](crate::Connector::max_message).
///
/// Cloning gives another handle of the same channel. Call [`Channel::close`] at the end: when the last handle is dropped, messages
/// that the peer has no room for or has not read are lost, also long ones whose [`Channel::send`] was ready. The peer then gets an
/// error, usually [`Error::Disconnected`].
///
/// ```no_run
/// # async fn example() -> rdma_msg::Result<()> {
/// let channel = rdma_msg::connect("10.0.0.2:7471").await?;
/// channel.send("a question").await?;
/// channel.finish().await?;
/// while let Some(answer) = channel.receive().await? {
///     println!("{}", String::from_utf8_lossy(&answer));
/// }
/// channel.close().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Channel {
    handle: Handle,
}

/// Counts of a channel since it was connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// Messages that were sent.
    pub messages_sent: u64,
    /// Messages that have reached the memory of the peer, whose device has acknowledged them.
    pub messages_acknowledged: u64,
    /// Messages that tasks have taken.
    pub messages_received: u64,
    /// Data packets that were sent. Several short messages share a packet, and a long one takes several.
    pub packets_sent: u64,
    /// Data packets that have arrived.
    pub packets_received: u64,
    /// Updates of credit that were sent alone. Usually the credit travels with messages.
    pub updates_sent: u64,
    /// Bytes that this end copied: into packets, and out of packets into long messages. The reads of a stream are not counted.
    pub bytes_copied: u64,
    /// Offers of memory for messages that this end has made: [`Channel::offer`].
    pub offers_sent: u64,
    /// Offers of memory for messages that the peer has made.
    pub offers_received: u64,
    /// Messages that this end wrote to memory that the peer had [offered](Channel::offer).
    pub messages_written: u64,
    /// Messages that were copied since the program keeps many.
    pub messages_copied: u64,
    /// Times that a task waited for a message while the program kept those of all packets, so that the peer could not send.
    pub starved: u64,
    /// Packets of the peer that may wait at this end now. It changes only with [shared receives](crate::SharedReceives).
    pub window: u32,
    /// Times that a task has waited: to send, to receive, for acknowledgements, or to offer memory.
    pub waits: u64,
}

/// The shared owner of an engine.
#[derive(Clone)]
pub(crate) struct Handle(pub(crate) Arc<Owner>);

/// Leaves the channel when the last handle is dropped.
pub(crate) struct Owner {
    pub(crate) shared: Arc<Shared>,
    /// This end and the peer.
    pub(crate) addresses: [Option<Address>; 2],
    /// The domain in which long messages and offered memory are registered.
    pub(crate) pd: ProtectionDomain,
    pub(crate) pool: Pool,
    /// Least length in bytes of owned memory that is not copied.
    pub(crate) rendezvous_threshold: usize,
    /// The most parts of memory of a message that is written to memory of the peer.
    pub(crate) write_parts: usize,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.leave();
    }
}

impl Channel {
    pub(crate) fn new(handle: Handle) -> Self {
        Channel { handle }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Sends a message. [`Payload`] lists the types that can be sent.
    ///
    /// Ready when the message is on its way or shares the next packet, like a write to a socket. To know that it has reached the
    /// peer, see [`Channel::flush`]. If the future is dropped before it is ready, the message does not arrive, also if parts of
    /// it were sent already.
    ///
    /// Long memory that moves in is not copied by this end
    /// ([`Connector::rendezvous_threshold`](crate::Connector::rendezvous_threshold)). If the peer has [offered](Channel::offer)
    /// memory that is long enough, this end writes the message there. Otherwise the peer reads the memory when its program receives
    /// the message, or while it handles the one before. The peer copies messages longer than 4 MiB once. At most two messages wait
    /// to be read, or one if this end has [shared receives](crate::SharedReceives); further ones wait to be sent.
    ///
    /// The memory is freed when it was read or written, or when the channel ends. Memory that cannot be registered is copied.
    ///
    /// For many short messages, [`Channel::send_many`] is cheaper.
    ///
    /// Two ends that both wait to send wait for ever if neither receives meanwhile, as with sockets. If both send long or many
    /// messages, receive in another task, or `join!` both.
    pub fn send<'c>(&'c self, message: impl Into<Payload<'c>>) -> Send<'c> {
        let waiting = Waiting::new(&self.handle, Waits::ToSend);
        Send::new(waiting, message.into())
    }

    /// The next message; `None` when the peer sends no more.
    ///
    /// Dropping the future loses no message. When a task takes a message, this end starts to read the next one from the memory of
    /// the peer, if it has arrived, has at most 1 MiB, and at least half of the [pool](Channel::pool) is free.
    ///
    /// For many short messages, [`Channel::receive_many`] is cheaper.
    pub fn receive(&self) -> Receive<'_> {
        Receive(Waiting::new(&self.handle, Waits::ToReceive))
    }

    /// Offers memory to which the peer may write one message. Ready when the offer is on its way.
    ///
    /// False after the last message of the peer: the memory is then freed.
    ///
    /// ```no_run
    /// # async fn example(channel: rdma_msg::Channel) -> rdma_msg::Result<()> {
    /// for _ in 0..8 {
    ///     channel.offer(vec![0; 1 << 20]).await?;
    /// }
    /// while let Some(block) = channel.receive().await? {
    ///     println!("{} bytes", block.len());
    ///     if let Ok(memory) = block.into_offered() {
    ///         channel.offer(memory).await?; // for the next block
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The peer uses it for a message that [moves in](Payload), has at least the
    /// [rendezvous threshold](crate::Connector::rendezvous_threshold) of the peer (64 KiB by default), and at most 16 parts. It
    /// uses the oldest offered memory that is long enough. All other messages arrive as without offers, also those that it sends
    /// before the offer has arrived.
    ///
    /// [`Channel::receive`] returns the message in its turn, without a copy. Until then the peer may change any byte of the memory,
    /// but cannot read it. [`Message::into_offered`] returns the memory. Each offer registers its memory, and the receiving
    /// deregisters it. On hardware, these are system calls.
    ///
    /// At most 16 offers are open. A further one waits until this end receives a written message. So the task that receives may
    /// await an offer for each written message that it has received, but not a seventeenth one. Memory that was not used is freed
    /// when the last handle of the channel is dropped and the connection is gone.
    ///
    /// # Errors
    /// The memory is freed. [`Error::Connection`] when it is empty or cannot be registered; [`Error::Closed`] after
    /// [`Channel::finish`]; the reason why the channel has ended.
    pub async fn offer(&self, memory: Vec<u8>) -> Result<bool> {
        crate::offering::offer(&self.handle, memory).await
    }

    /// Waits until all messages that were sent before have reached the memory of the peer.
    ///
    /// # Errors
    /// The reason why the channel has ended before. [`Statistics::messages_acknowledged`] tells how many messages have reached it.
    pub async fn flush(&self) -> Result<()> {
        self.handle.flush().await
    }

    /// Half-closes the channel: this end sends no more. Messages can still be received.
    ///
    /// # Errors
    /// The reason why the channel has ended.
    pub async fn finish(&self) -> Result<()> {
        self.handle.finish().await
    }

    /// Ends the channel in order: [`Channel::finish`], [`Channel::flush`], and then the end of the connection.
    ///
    /// Does not wait for the peer to finish. Messages that the peer sends afterwards are lost, and the peer gets an error.
    ///
    /// A peer that does not receive keeps this waiting. So a service that stops sets a deadline, and then aborts:
    ///
    /// ```no_run
    /// # async fn example(channel: rdma_msg::Channel) {
    /// use std::time::Duration;
    ///
    /// match tokio::time::timeout(Duration::from_secs(5), channel.close()).await {
    ///     Ok(closed) => closed.unwrap_or_else(|error| eprintln!("{error}")),
    ///     Err(_) => channel.abort(1, "the service stops"),
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// The reason why the channel has ended before its messages have reached the peer.
    pub async fn close(&self) -> Result<()> {
        let finished = self.finish().await;
        let flushed = match finished {
            Ok(()) => self.flush().await,
            Err(error) => Err(error),
        };
        self.handle.close_connection().await;
        match flushed {
            // A second close finds the channel closed.
            Err(Error::Closed) if self.handle.with(|engine| engine.is_complete()) => Ok(()),
            flushed => flushed,
        }
    }

    /// Ends the channel at once, and tells the peer why: [`Error::Aborted`]. Messages on their way may be lost.
    ///
    /// The driver sends the reason. A process that ends right afterwards may end before that.
    pub fn abort(&self, code: u32, reason: &str) {
        self.handle.abort(code, reason);
    }

    /// Counts since the channel was connected.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.handle.statistics()
    }

    /// The pool of registered memory that the connections of the driver share, for messages that are sent as buffers:
    /// `channel.pool().get_async(Budget::Sends, len).await`.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.handle.0.pool
    }

    /// The address of this end. `None` if it has no IP address.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.handle.local_address()
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.handle.peer_address()
    }
}

impl Handle {
    /// Starts the engine of a connection whose handshake is complete.
    pub(crate) async fn start(options: &Options, connection: Connection, own: &Hello, is_active: bool) -> Result<Self> {
        let peer = own.decode(connection.private_data())?;
        let packet = own.packet.min(peer.packet) as usize;
        let of_connection = connection.pool();
        let get =
            |budget, len| async move { of_connection.get_async(budget, len).await.map_err(rdma_async::Error::from) };
        let control = || get(Budget::Control, HEADER);
        let control = [control().await?, control().await?, control().await?];
        let reserved = Reserved { packet: get(Budget::Sends, packet).await?, control };
        let (pd, pool) = (connection.pd().clone(), connection.pool().clone());
        let addresses = [connection.local_address(), connection.peer_address()];
        let limits = Limits {
            window: own.window,
            max_window: own.max_window,
            peer_window: peer.window,
            peer_max_window: peer.max_window,
            sends: options.sends,
            offers: options.offers(),
            is_active,
        };
        let copies = CopyBudget::new(options.copy_budget);
        let shared = Shared::new(|wakers, channel| {
            Engine::new(connection, [own, &peer], limits, copies, reserved, wakers, channel)
        });
        let rendezvous_threshold = options.rendezvous_threshold;
        let write_parts = WRITE_PARTS.min(pd.context().attributes().max_sge()).max(1) as usize;
        Ok(Handle(Arc::new(Owner { shared, addresses, pd, pool, rendezvous_threshold, write_parts })))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Engine) -> R) -> R {
        self.0.shared.with(f)
    }

    pub(crate) fn local_address(&self) -> Option<Address> {
        self.0.addresses[0]
    }

    pub(crate) fn peer_address(&self) -> Option<Address> {
        self.0.addresses[1]
    }

    pub(crate) fn abort(&self, code: u32, reason: &str) {
        self.with(|engine| engine.abort(code, reason));
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.with(|engine| engine.statistics())
    }

    pub(crate) async fn finish(&self) -> Result<()> {
        let mut waiting = Waiting::new(self, Waits::ToSend);
        poll_fn(|context| waiting.poll(context, Engine::try_finish)).await
    }

    /// Ends the connection, and waits for that.
    pub(crate) async fn close_connection(&self) {
        // The peer may need the last credits to know that its data was taken.
        let (mut waiting, posted) =
            (Waiting::new(self, Waits::ForAcknowledgements), self.with(|engine| engine.posted()));
        let _: Result<()> = poll_fn(|context| waiting.poll(context, |engine| engine.try_drain(posted))).await;
        let connection = self.with(|engine| {
            engine.end(Error::Closed);
            engine.connection().clone()
        });
        connection.close().await;
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        let mut flush = Flush::new(self);
        poll_fn(|context| flush.poll(context)).await
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [local, peer] = self.0.addresses;
        f.debug_struct("Handle").field("local", &local).field("peer", &peer).finish_non_exhaustive()
    }
}

/// Calls `f` with something that the engine has lent. `None` if there is nothing.
#[inline]
fn poll_lent<T, R>(lent: &Lent<T>, context: &mut Context<'_>, f: impl FnOnce(&mut T) -> Option<R>) -> Poll<Option<R>> {
    if !lent.is_lent() {
        return Poll::Ready(None);
    }
    let coop = ready!(coop::poll_proceed(context));
    let result = lent.with(f);
    if result.is_some() {
        coop.made_progress();
    }
    Poll::Ready(result)
}

/// Longest message in bytes that is added to a packet together with others.
const SHORT: usize = 4096;

/// A task that waits for the engine. Its place in line is given back when it is dropped.
pub(crate) struct Waiting<H: AsRef<Handle>> {
    handle: H,
    waits: Waits,
    place: Option<Place>,
}

impl AsRef<Handle> for Handle {
    fn as_ref(&self) -> &Handle {
        self
    }
}

impl<H: AsRef<Handle>> Waiting<H> {
    pub(crate) fn new(handle: H, waits: Waits) -> Self {
        Waiting { handle, waits, place: None }
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.handle.as_ref()
    }

    /// The next message; `None` when the peer sends no more.
    #[inline]
    pub(crate) fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Message>>> {
        let unpacker = &self.handle().0.shared.unpacker;
        if let Some(message) = ready!(poll_lent(unpacker, context, Unpacker::take)) {
            return Poll::Ready(Ok(Some(message)));
        }
        self.poll_arrival(context)
    }

    /// The next messages; `None` when the peer sends no more.
    pub(crate) fn poll_messages(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Messages>>> {
        let unpacker = &self.handle().0.shared.unpacker;
        if let Some(run) = ready!(poll_lent(unpacker, context, Unpacker::take_run)) {
            return Poll::Ready(Ok(Some(run.into())));
        }
        self.poll_arrival(context).map_ok(|message| message.map(Messages::from))
    }

    /// The next message, which the engine takes.
    fn poll_arrival(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Message>>> {
        let arrived = ready!(self.poll(context, Engine::try_receive))?;
        let message = arrived.map(Arrival::into_message).transpose();
        Poll::Ready(message.inspect_err(|error| self.handle().with(|engine| engine.lose_written(error.clone()))))
    }

    /// Adds a message to the open packet without the engine, if that is possible.
    #[inline]
    pub(crate) fn poll_add(&self, context: &mut Context<'_>, message: &Payload<'_>) -> Poll<Option<()>> {
        let packer = &self.handle().0.shared.packer;
        if packer.is_lent() {
            // The driver may wait for the lock of the packet.
            message.touch();
        }
        poll_lent(packer, context, |packer| packer.add(message))
    }

    /// Like [`Waiting::poll_add`], for several messages. Returns how many were added.
    pub(crate) fn poll_add_all(&self, context: &mut Context<'_>, messages: &[&[u8]]) -> Poll<usize> {
        let packer = &self.handle().0.shared.packer;
        // Longer ones hardly fit into the open packet.
        let short = messages.iter().take_while(|message| message.len() <= SHORT).count();
        let messages = &messages[..short];
        if packer.is_lent() {
            messages.iter().for_each(|message| payload::touch(message));
        }
        poll_lent(packer, context, |packer| Some(packer.add_all(messages))).map(Option::unwrap_or_default)
    }

    /// Calls `f` if it is the turn of this task. The task waits while `f` returns `None`.
    pub(crate) fn poll<R>(
        &mut self,
        context: &mut Context<'_>,
        mut f: impl FnMut(&mut Engine) -> Result<Option<R>>,
    ) -> Poll<Result<R>> {
        let coop = ready!(coop::poll_proceed(context));
        let Waiting { handle, waits, place } = self;
        let mut attempt = |engine: &mut Engine, waker: &mut Option<Waker>| {
            let is_next = matches!(waits, Waits::ForAcknowledgements)
                || engine.line(*waits).is_next(*place)
                || engine.ended().is_some();
            if let Some(result) = if is_next { f(engine).transpose() } else { None } {
                let left = place.take().and_then(|place| engine.leave_line(*waits, place));
                return (Poll::Ready(result), left);
            }
            // Also without a waker, so that no other task comes before the rest of a message.
            let (joined, unused) = engine.wait(*waits, *place, waker.take());
            *place = Some(joined);
            (Poll::Pending, unused)
        };
        let shared = &handle.as_ref().0.shared;
        let (mut result, mut unused) = (Poll::Pending, None);
        // If there is probably no message, skip the attempt without a waker.
        if !matches!(waits, Waits::ToReceive) || shared.may_have_message() {
            (result, unused) = shared.with_if(|engine| attempt(engine, &mut None), |(result, _)| result.is_ready());
        }
        if result.is_pending() {
            drop(unused);
            // Cloned and dropped without the lock, since both can run code of the user.
            let mut waker = Some(context.waker().clone());
            (result, unused) = shared.with(|engine| attempt(engine, &mut waker));
        }
        drop(unused);
        if result.is_ready() {
            coop.made_progress();
        }
        result
    }
}

impl<H: AsRef<Handle>> Drop for Waiting<H> {
    fn drop(&mut self) {
        let Waiting { handle, waits, place } = self;
        if let Some(place) = place.take() {
            let unused = handle.as_ref().0.shared.with_own(|engine| engine.leave_line(*waits, place));
            drop(unused);
        }
    }
}

/// Waits until the messages that were sent before are acknowledged.
pub(crate) struct Flush<H: AsRef<Handle>> {
    waiting: Waiting<H>,
    /// Numbers of packets and of offers that have to be acknowledged.
    target: [u64; 2],
}

impl<H: AsRef<Handle>> Flush<H> {
    pub(crate) fn new(handle: H) -> Self {
        let target = handle.as_ref().with(|engine| engine.added());
        Flush { waiting: Waiting::new(handle, Waits::ForAcknowledgements), target }
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let target = self.target;
        self.waiting.poll(context, |engine| {
            engine.take_completions();
            engine.try_flush(target)
        })
    }
}

/// The future of [`Channel::receive`].
///
/// # Errors
/// After the messages that have arrived, the reason why the channel has ended.
#[must_use = "a future does nothing unless it is polled"]
pub struct Receive<'c>(Waiting<&'c Handle>);

impl Future for Receive<'_> {
    type Output = Result<Option<Message>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_message(context)
    }
}

impl fmt::Debug for Receive<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").finish_non_exhaustive()
    }
}

const _: () = {
    const fn is_shared<T: std::marker::Send + Sync>() {}
    is_shared::<Channel>();
    is_shared::<Message>();
    is_shared::<Messages>();
    const fn is_sent<T: std::marker::Send>() {}
    is_sent::<Send<'_>>();
    is_sent::<Receive<'_>>();
};
