//! Connections by address: librdmacm.
//!
//! An [`Id`] is what a socket is to TCP. It is bound to an address, or resolves one; connects, or listens and accepts; and is told
//! how that went by [`Event`]s of its [`EventChannel`]. It moves no data: for that there is a [`QueuePair`](crate::QueuePair),
//! which is made beside it and brought to connection with the attributes that [`Id::attributes`] gives.
//!
//! librdmacm is loaded when the first channel is made. It opens devices of its own, of which nothing is to be seen here: an id
//! names its device ([`Id::device_name`]), and a queue pair may be of any [`Context`](crate::Context) of that.

mod address;
mod channel;
mod error;
mod event;
mod id;
mod option;
mod parameters;

pub use address::{Address, IbAddress};
pub use channel::EventChannel;
pub use error::CmError;
pub use event::{Event, EventKind, RejectReason};
pub use id::{Id, PortSpace};
pub use parameters::{ConnectParameters, Parameters, PeerParameters, PrivateData, UdParameters};

pub use crate::id::CmId;
