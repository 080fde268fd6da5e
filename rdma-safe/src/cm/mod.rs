//! Connections by address: librdmacm.
//!
//! A [`Connector`] connects to an address, and a [`Listener`] accepts connections. Both create a [`Connection`], an
//! [`Endpoint`](crate::Endpoint) that is notified when the peer disconnects. Requests, replies and rejections carry
//! private data. Every step has a deadline, and a failed step returns a typed error, [`ConnectError`].
//!
//! Each call that waits for a peer has a counterpart that does not block: it returns a [`Handshake`], which advances when
//! its descriptor is readable. One thread, or an async runtime, can thus drive any number of handshakes.
//!
//! For datagrams, a [`Connector`] looks up the service of a [`DatagramListener`] and joins multicast groups
//! ([`GroupMember`]). Both yield a [`DatagramEndpoint`](crate::DatagramEndpoint) and the peer to send to. An
//! [`AddressQuery`] resolves names.
//!
//! The lower layer wraps the calls of librdmacm. An [`Id`] corresponds to a socket of TCP. It is bound to an address or
//! resolves one, and it connects, or listens and accepts. An [`EventChannel`] reports the results as [`Event`]s. An id
//! transfers no data. Create a [`QueuePair`](crate::QueuePair) for that, and modify it with the attributes that
//! [`Id::attributes`] returns.
//!
//! librdmacm (Debian: `librdmacm1`) is loaded when the first channel is created. It opens devices internally, which
//! this crate does not expose. An id names its device ([`Id::device_name`]), and its queue pair may belong to any
//! [`Context`](crate::Context) of that device.
//!
//! `soft0`, the software RNIC of the crate rdma-soft, needs no librdmacm. The device of each process has its own address. Still,
//! programs on the same host also find each other at `127.0.0.1`, `::1` and the other addresses of the host.
//!
//! Programs with their own queue pairs use ids and their events:
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
//!     // If the peer is to read or write, add its access rights here: `set_access`.
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
mod handshake;
mod id;
mod listener;
mod multicast;
mod option;
mod parameters;
mod resolve;
mod set_connection;
mod side;

pub use address::{Address, IbAddress};
pub use address_info::{AddressFamily, AddressInfo, AddressQuery, Paths};
pub use attempt::{Cause, ConnectError, Step};
pub use channel::EventChannel;
pub use connection::{Connection, DisconnectError, Disconnected};
pub use connector::{Connector, PreparedRoute, Route};
pub use datagram::{DATAGRAM_QKEY, DatagramListener, DatagramRequest, DatagramRoute, DatagramService};
pub use devices::Devices;
pub use error::CmError;
pub use event::{Event, EventKind, RejectReason, ServiceStatus};
pub use group::{GroupMember, GroupMembership, GroupRoute};
pub use handshake::{Handshake, Outcome, Progress};
pub use id::{Id, PortSpace};
pub use listener::{Listener, PreparedRequest, Request};
pub use parameters::{ConnectParameters, Parameters, PeerParameters, PrivateData, UdParameters};
pub use set_connection::{SetConnection, SetDisconnected};

pub use crate::id::CmId;
