//! Connections by address: librdmacm.
//!
//! A [`Connector`] connects to an address, and a [`Listener`] is connected to: both give a [`Connection`], which is an
//! [`Endpoint`](crate::Endpoint) whose end its peer is told of. Bytes come with the request and the answer, and whoever refuses
//! says why. Every step has a deadline, and one that fails a typed error, [`ConnectError`].
//!
//! For datagrams, a [`Connector`] finds the service that a [`DatagramListener`] answers for, and joins multicast groups
//! ([`GroupMember`]): both give a [`DatagramEndpoint`](crate::DatagramEndpoint) with whom to send to. An [`AddressQuery`] finds the
//! addresses of names.
//!
//! Below that are the calls of librdmacm. An [`Id`] is what a socket is to TCP. It is bound to an address, or
//! resolves one; connects, or listens and accepts; and is told how that went by [`Event`]s of its [`EventChannel`]. It moves no
//! data: for that there is a [`QueuePair`](crate::QueuePair), which is made beside it and brought to connection with the attributes
//! that [`Id::attributes`] gives.
//!
//! librdmacm (Debian: `librdmacm1`) is loaded when the first channel is made. It opens devices of its own, of which nothing is to
//! be seen here: an id names its device ([`Id::device_name`]), and a queue pair may be of any [`Context`](crate::Context) of that.
//!
//! A software RNIC of the crate rdma-soft, `soft0`, has no connection manager, and all of this is refused there.
//!
//! The same with ids and queue pairs of one's own, as event-driven programs want it:
//!
//! ```no_run
//! use std::collections::HashMap;
//! use std::error::Error;
//! use std::net::Ipv4Addr;
//! use std::time::Duration;
//!
//! use rdma_safe::cm::{ConnectParameters, EventChannel, EventKind, Id, PortSpace};
//! use rdma_safe::{Device, QueuePair, QueuePairState};
//!
//! const PORT: u16 = 7471;
//! const SOON: Duration = Duration::from_secs(2);
//!
//! /// A queue pair in INIT, on the device of an id: from now on receives can be posted to it.
//! fn queue_pair(id: &Id) -> Result<QueuePair, Box<dyn Error>> {
//!     let name = id.device_name().ok_or("the id has no device yet")?;
//!     let context = Device::by_name(&name)?.open()?; // a server opens each device once
//!     let cq = context.completion_queue(256).build()?;
//!     let mut qp = context.alloc_pd()?.queue_pair(&cq, &cq).build()?;
//!     // Here is the place for the rights of the peer, `set_access`, if it is to write or read.
//!     qp.modify(&id.attributes(QueuePairState::INIT)?)?;
//!     Ok(qp)
//! }
//!
//! fn ready(id: &Id, qp: &mut QueuePair) -> Result<(), Box<dyn Error>> {
//!     for state in [QueuePairState::RTR, QueuePairState::RTS] {
//!         qp.modify(&id.attributes(state)?)?;
//!     }
//!     Ok(())
//! }
//!
//! fn client(server: Ipv4Addr) -> Result<(Id, QueuePair), Box<dyn Error>> {
//!     let channel = EventChannel::new()?;
//!     let mut id = Id::new(&channel, PortSpace::TCP)?;
//!     id.resolve_address(None, (server, PORT), SOON)?;
//!     let mut made = None;
//!     loop {
//!         let event = channel.wait(Duration::from_secs(60))?.ok_or("the server does not answer")?;
//!         match (event.kind, &mut made) {
//!             (EventKind::AddressResolved, _) => id.resolve_route(SOON)?,
//!             (EventKind::RouteResolved, made) => {
//!                 let qp = made.insert(queue_pair(&id)?);
//!                 id.connect(&ConnectParameters::new(qp.number()))?;
//!             }
//!             (EventKind::ConnectResponse(_), Some(qp)) => {
//!                 ready(&id, qp)?;
//!                 id.establish()?;
//!                 break;
//!             }
//!             (other, _) => {
//!                 if let Some(error) = other.error() {
//!                     return Err(error.into()); // which says why, and what to do
//!                 }
//!             }
//!         }
//!     }
//!     Ok((id, made.ok_or("no queue pair")?)) // dropping the id would end the connection
//! }
//!
//! fn server() -> Result<(), Box<dyn Error>> {
//!     let channel = EventChannel::new()?;
//!     let mut listener = Id::new(&channel, PortSpace::TCP)?;
//!     listener.bind((Ipv4Addr::UNSPECIFIED, PORT))?;
//!     listener.listen(16)?;
//!     let mut clients = HashMap::new();
//!     loop {
//!         let Some(event) = channel.wait(Duration::from_secs(60))? else { continue };
//!         match event.kind {
//!             EventKind::ConnectRequest(mut id, _) => {
//!                 let mut qp = queue_pair(&id)?;
//!                 ready(&id, &mut qp)?;
//!                 id.accept(&ConnectParameters::new(qp.number()))?;
//!                 clients.insert(id.id(), (id, qp));
//!             }
//!             EventKind::Established(_) => println!("{} may be sent to", event.id),
//!             EventKind::Disconnected => drop(clients.remove(&event.id)),
//!             other => eprintln!("{}: {other:?}", event.id),
//!         }
//!     }
//! }
//! ```

mod address;
mod address_info;
mod attempt;
mod channel;
mod connection;
mod connector;
mod datagram;
mod devices;
mod error;
mod event;
mod group;
mod id;
mod listener;
mod member;
mod multicast;
mod option;
mod parameters;
mod side;

pub use address::{Address, IbAddress};
pub use address_info::{AddressFamily, AddressInfo, AddressQuery, Paths};
pub use attempt::{Cause, ConnectError, Step};
pub use channel::EventChannel;
pub use connection::{Connection, Unconfirmed};
pub use connector::{Connector, PreparedRoute, Route};
pub use datagram::{DATAGRAM_QKEY, DatagramListener, DatagramRequest, DatagramRoute, DatagramService};
pub use error::CmError;
pub use event::{Event, EventKind, RejectReason, ServiceStatus};
pub use group::{GroupMember, GroupRoute};
pub use id::{Id, PortSpace};
pub use listener::{Listener, PreparedRequest, Request};
pub use member::Member;
pub use parameters::{ConnectParameters, Parameters, PeerParameters, PrivateData, UdParameters};

pub use crate::id::CmId;
