//! Datagrams and multicast groups.

mod builder;
mod group;
mod peer;
mod receive;

use std::fmt;
use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::task::Poll;

use rdma_pool::Pool;
use rdma_safe::cm::{self, Address};
use rdma_safe::endpoint::DatagramIdentity;
use rdma_safe::{Buffer, ProtectionDomain, Work};

use crate::connection::Inner;
use crate::driver::lookups::Watcher;
use crate::opening::complete;
use crate::operation::Operation;
use crate::receive::Reader;
use crate::request::SendTo;
use crate::{Destination, Driver, Error, Failed, Result, Sharing, Threads};

pub use builder::DatagramsBuilder;
pub use group::Group;
use peer::Handles;
pub use peer::Peer;
pub use receive::ReceiveFrom;

/// Exchanges datagrams with any number of peers, for any number of tasks.
///
/// ```
/// # #[cfg(all(feature = "soft", feature = "tokio"))]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> rdma_async::Result<()> {
/// # rdma_safe::soft::install().unwrap();
/// use rdma_async::Datagrams;
///
/// let server = Datagrams::bind("127.0.0.1:0").await?;
/// let client = Datagrams::bind("127.0.0.1:0").await?;
/// let peer = client.peer(server.local_address()).await?;
/// client.send_to(client.buffer_of(b"hello").await?, &peer).await?;
///
/// let (message, sender) = server.receive_from().await?;
/// assert_eq!(*message, *b"hello");
/// server.send_to(server.buffer_of(b"and to you").await?, &sender).await?;
///
/// let (answer, from) = client.receive_from().await?;
/// assert!(*answer == *b"and to you" && from == peer);
/// # Ok(())
/// # }
/// # #[cfg(not(all(feature = "soft", feature = "tokio")))]
/// # fn main() {}
/// ```
///
/// A datagram has at most [`max_datagram`](Datagrams::max_datagram) bytes, since it fits in one packet. Datagrams can be lost or
/// overtake each other. A datagram that finds no receive at the peer is dropped there, without an error at either end:
/// [`DatagramsBuilder::receives`].
///
/// A buffer *moves* into [`send_to`](Datagrams::send_to) and comes back once the datagram is on its way. When a future is dropped,
/// the device keeps the memory until it no longer uses it.
///
/// Cloning gives another handle. The socket ends with the last one, like a [`Connection`](crate::Connection), or by
/// [`Datagrams::close`].
///
/// # Multicast
///
/// ```
/// # #[cfg(all(feature = "soft", feature = "tokio"))]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> rdma_async::Result<()> {
/// # rdma_safe::soft::install().unwrap();
/// # use rdma_async::Datagrams;
/// let member = Datagrams::bind("127.0.0.1:0").await?;
/// let sender = Datagrams::bind("127.0.0.1:0").await?;
/// let _group = member.join([239, 1, 2, 3]).await?; // until it is dropped
/// let group = sender.join([239, 1, 2, 3]).await?;
/// sender.send_to(sender.buffer_of(b"to all").await?, &group).await?;
/// assert_eq!(*member.receive_from().await?.0, *b"to all");
/// # Ok(())
/// # }
/// # #[cfg(not(all(feature = "soft", feature = "tokio")))]
/// # fn main() {}
/// ```
///
/// # Devices
///
/// A socket uses one port of one device: that of its address. With an unspecified address such as `0.0.0.0` it is the port of
/// [`DatagramsBuilder::pd`], or else the first port of this host that is active. Peers find the service at this port only, and
/// paths and groups that lead over another one are refused with [`CmError::OtherDevice`](rdma_safe::cm::CmError::OtherDevice). For
/// several ports, bind a socket to an address of each.
pub struct Datagrams<S: Sharing = Threads> {
    socket: S::Rc<Socket<S>>,
}

/// What the handles share.
struct Socket<S: Sharing> {
    inner: Inner<S>,
    identity: DatagramIdentity,
    /// Resolves peers and groups, from the address of the socket.
    connector: cm::Connector,
    handles: S::Cell<Handles>,
    local: Address,
    max_datagram: u32,
}

impl<S: Sharing> Socket<S> {
    /// The output of `future`, unless the socket ends before.
    async fn while_open<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        let (mut future, mut watcher) = (pin!(future), Watcher::new(&self.inner.queue, self.inner.key));
        poll_fn(|context| match watcher.poll(context) {
            Poll::Ready(ended) => Poll::Ready(Err(ended)),
            Poll::Pending => future.as_mut().poll(context),
        })
        .await
    }
}

impl<S: Sharing> Clone for Datagrams<S> {
    fn clone(&self) -> Self {
        Datagrams { socket: self.socket.clone() }
    }
}

impl<S: Sharing> Datagrams<S> {
    /// Looks up the service at the first of these addresses that answers.
    ///
    /// A service that was restarted is another peer, so look it up again. Datagrams to the old one are lost without an error.
    ///
    /// # Errors
    /// [`Error::Rdma`] with the step that has failed and the cause, for the last address; [`Error::Name`];
    /// [`Error::Closed`]; [`Error::DriverStopped`].
    pub async fn peer(&self, service: impl Into<Destination>) -> Result<Peer> {
        let mut last = None;
        for address in service.into().addresses().await? {
            match self.find(address).await {
                Ok(peer) => return Ok(peer),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(Error::no_address))
    }

    async fn find(&self, service: Address) -> Result<Peer> {
        let Socket { inner, identity, connector, .. } = &*self.socket;
        let events = &inner.driver.shared.events;
        let finding = async {
            let route = complete::<S, _>(events, connector.start_resolve_datagrams(service)?).await?;
            let found = complete::<S, _>(events, route.start_find(identity, &[])?).await?;
            Ok(found.peer.into())
        };
        self.socket.while_open(finding).await
    }

    /// Joins the multicast group at this address, until the [`Group`] is dropped.
    ///
    /// Datagrams of the group arrive in [`Datagrams::receive_from`]. The device may deliver to a sender its own ones.
    ///
    /// # Errors
    /// [`Error::Rdma`], for example because the address is none of a group; [`Error::Closed`]; [`Error::DriverStopped`].
    pub async fn join(&self, group: impl Into<IpAddr>) -> Result<Group<S>> {
        let Socket { inner, identity, connector, .. } = &*self.socket;
        let events = &inner.driver.shared.events;
        let group = SocketAddr::new(group.into(), 0);
        let joining = async {
            let route = complete::<S, _>(events, connector.start_resolve_group(group)?).await?;
            let membership = complete::<S, _>(events, route.start_membership(identity)?).await?;
            Group::attach(&inner.queue, inner.key, membership)
        };
        self.socket.while_open(joining).await
    }

    /// Sends the bytes of `buffer` to a [`Peer`] or to a [`Group`]. Ready when the device has sent the datagram.
    ///
    /// # Errors
    /// [`Failed`], with the buffer. [`Error::Rdma`] names why a datagram was not posted:
    /// - [`PostError::DatagramTooLong`](rdma_safe::PostError::DatagramTooLong): it exceeds
    ///   [`max_datagram`](Datagrams::max_datagram).
    /// - [`PostError::ForeignPeer`](rdma_safe::PostError::ForeignPeer): the peer is of another protection domain, such as that
    ///   of another driver.
    /// - [`AddressError::OtherPort`](rdma_safe::address::AddressError::OtherPort): the peer has sent a datagram to another port.
    #[inline]
    pub fn send_to(&self, buffer: Buffer, to: &impl AsRef<Peer>) -> Operation<'_, S, SendTo> {
        self.start(Work::send(buffer), to.as_ref())
    }

    /// Like [`Datagrams::send_to`], with 32 bits of immediate data for [`Message::immediate`](crate::Message::immediate).
    #[inline]
    pub fn send_to_with_immediate(
        &self,
        buffer: Buffer,
        immediate: u32,
        to: &impl AsRef<Peer>,
    ) -> Operation<'_, S, SendTo> {
        self.start(Work::send(buffer).imm(immediate), to.as_ref())
    }

    fn start(&self, work: Work<'static>, to: &Peer) -> Operation<'_, S, SendTo> {
        let Socket { inner, identity, handles, .. } = &*self.socket;
        match to.resolve::<S>(handles, identity) {
            Ok(peer) => Operation::new(inner, SendTo(work, peer)),
            Err(error) => {
                let (buffer, list) = work.into_memory();
                Operation::refused(inner, Failed { error: error.into(), buffer, list })
            }
        }
    }

    /// The next datagram, and its sender.
    ///
    /// Dropping the future loses no datagram.
    #[inline]
    pub fn receive_from(&self) -> ReceiveFrom<'_, S> {
        ReceiveFrom(Reader::new(&self.socket.inner))
    }

    /// Maximum size of a datagram in bytes: the MTU of the port.
    #[must_use]
    pub fn max_datagram(&self) -> usize {
        self.socket.max_datagram as usize
    }

    /// A buffer of `len` bytes to send, once there is one.
    ///
    /// # Errors
    /// [`Error::Memory`] when `len` exceeds what the pool has.
    #[inline]
    pub async fn buffer(&self, len: usize) -> Result<Buffer> {
        self.socket.inner.buffer(len).await
    }

    /// A buffer with these bytes to send, once there is one.
    ///
    /// # Errors
    /// Like [`Datagrams::buffer`].
    pub async fn buffer_of(&self, bytes: &[u8]) -> Result<Buffer> {
        self.socket.inner.buffer_of(bytes).await
    }

    /// The address at which peers find this socket, including the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.socket.local
    }

    /// The pool of registered memory that the driver's connections and datagrams share.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.socket.inner.pool
    }

    /// The domain in which buffers to send are registered.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.socket.inner.pd
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver<S> {
        &self.socket.inner.driver
    }

    /// Number of messages that tasks have taken and not dropped yet. Each occupies one of the
    /// [receives](DatagramsBuilder::receives).
    #[must_use]
    pub fn messages_kept(&self) -> u32 {
        self.socket.inner.queue.kept(self.socket.inner.key)
    }

    /// Ends the socket, once the operations in flight have completed or the time to linger is over.
    ///
    /// From now on, operations of all handles fail with [`Error::Closed`]. Dropping the future does not stop the closing.
    pub async fn close(&self) {
        self.socket.inner.close().await;
    }
}

impl<S: Sharing> fmt::Debug for Datagrams<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Datagrams").field("local_address", &self.socket.local).finish_non_exhaustive()
    }
}

const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Datagrams>();
    is_shared::<Group>();
    is_shared::<Peer>();
    const fn is_sent<T: Send>() {}
    is_sent::<Operation<'_, Threads, SendTo>>();
    is_sent::<ReceiveFrom<'_, Threads>>();
};
