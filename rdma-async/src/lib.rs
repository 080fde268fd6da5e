//! Await RDMA from any runtime.
//!
//! Connections by address, on any device. Buffers move into an operation and come back with its result. Dropping a future is
//! always safe: the device keeps the memory until it no longer uses it.
//!
//! ```no_run
//! # async fn example() -> rdma_async::Result<()> {
//! let connection = rdma_async::connect("10.0.0.2:7471").await?;
//! connection.send(connection.buffer_of(b"hello").await?).await?;
//! while let Some(message) = connection.receive().await? {
//!     println!("{:?}", &*message);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The other end:
//!
//! ```no_run
//! # async fn example() -> rdma_async::Result<()> {
//! async fn serve(connection: rdma_async::Connection) -> rdma_async::Result<()> {
//!     while let Some(message) = connection.receive().await? {
//!         connection.send(connection.buffer_of(&message).await?).await?;
//!     }
//!     Ok(())
//! }
//!
//! let listener = rdma_async::Listener::bind("0.0.0.0:7471").await?;
//! loop {
//!     tokio::spawn(serve(listener.accept().await?));
//! }
//! # }
//! ```
//!
//! For datagrams and multicast groups, see [`Datagrams`].
//!
//! To run without an RDMA device, enable the feature `soft` and call `rdma_safe::soft::install_by_default()` first.
//!
//! # Drivers
//!
//! A [`Driver`] takes the completions of its connections and wakes the tasks that await them. A send, write or read may also
//! find its own completion: [`Operation`]. By default, each tokio runtime has one driver, which is a task of the runtime. Programs
//! without tokio have one on a separate thread. A driver that has nothing to do spins for some microseconds and then sleeps:
//! [`Idle`].
//!
//! | program | driver |
//! |---|---|
//! | tokio | nothing to do; or [`Driver::builder`] with `tokio()` for options |
//! | smol, async-io | `smol::spawn(runner.run_async_io())` with the runner of [`DriverBuilder::build`] |
//! | any other executor | nothing to do, or [`Runner::run_with`] as one of its tasks |
//! | one thread per core | `DriverBuilder::build::<Local>()`, and [`Runner::block_on`], `run_tokio` or [`Runner::run_with`] |
//!
//! With [`Local`], nothing is `Send` and nothing is locked. The driver is a task of the executor of the thread: tokio's `LocalSet`,
//! compio or monoio. The thread sleeps when neither the driver nor another task has anything to do.
//!
//! # One thread of tokio, or several
//!
//! A program that mostly exchanges messages is fastest on one thread, which also runs the driver:
//! `#[tokio::main(flavor = "current_thread")]`. Run long computations with `spawn_blocking`, since they would stop the driver. A
//! service that needs several cores starts such a runtime on each of several threads, each with a listener at another port.
//! [`connect`] and [`Listener::bind`] give each runtime a driver of its own.
//!
//! ```no_run
//! # async fn serve(port: u16) -> rdma_async::Result<()> { Ok(()) }
//! # fn start() {
//! let threads = [7471, 7472].map(|port| {
//!     std::thread::spawn(move || {
//!         let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
//!         runtime.block_on(serve(port))
//!     })
//! });
//! # }
//! ```
//!
//! `#[tokio::main]` without a flavor has a worker for each core. Whenever a driver that spins yields, tokio wakes another worker to
//! look for tasks. `main` itself runs on a further thread, so each of its wake-ups crosses threads. On two cores, a client of the
//! example `kv_server` then has about a sixth of the rate.
//!
//! # Cancellation
//!
//! | a future is dropped | |
//! |---|---|
//! | operation, before it was posted or while it waits for room | is not posted, its memory is dropped |
//! | operation in flight | goes on; its memory is dropped when the device no longer uses it |
//! | [`Connection::batch`] | posted operations go on; the others are not posted |
//! | [`Connection::receive`] | loses no message |
//! | [`Connector::connect`] | ends the handshake |
//! | [`Listener::accept`] | loses no connection |
//! | [`Datagrams::receive_from`] | loses no datagram |
//! | [`Datagrams::peer`], [`Datagrams::join`] | ends the lookup, or leaves the group |
//! | [`Connection::close`], [`Datagrams::close`] | the connection or socket is closed nevertheless |
//!
//! So the caller sets deadlines with its runtime: `tokio::time::timeout(…, connection.receive())`.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `tokio` (default) | drivers as tasks of tokio |
//! | `async-io` | drivers as tasks of smol and other programs on async-io |
//! | `bytes` | `Bytes` of received messages without a copy |
//! | `metrics` | [`Driver`]'s counts for recorders of the crate metrics |
//! | `tracing` | events of connections that are made, fail and end |
//! | `soft` | soft0, a software RNIC in the process |

#![deny(missing_docs)]

mod batch;
mod connection;
mod connector;
#[doc(hidden)]
pub mod coop;
mod core;
mod datagrams;
mod driver;
mod effects;
mod error;
mod exchange;
mod listener;
mod opening;
mod operation;
mod options;
mod receive;
mod receives;
mod request;
mod resolve;
mod sharing;
mod sync;
mod trace;

#[cfg(feature = "async-io")]
mod async_io;
#[cfg(feature = "tokio")]
mod tokio;

pub use batch::{Batch, FailedBatch, PostingBatch};
pub use connection::Connection;
pub use connector::{Connector, connect};
pub use datagrams::{Datagrams, DatagramsBuilder, Group, Peer, ReceiveFrom};
pub use driver::events::Deadline;
pub use driver::{Driver, DriverBuilder, Idle, Runner, Statistics, Turn};
pub use error::{Error, Failed, Result};
pub use exchange::Unconnected;
pub use listener::{Listener, ListenerBuilder};
pub use operation::{Operation, OwnedOperation, Posting};
pub use receive::{Message, Receive, Receiver};
pub use receives::SharedReceives;
pub use request::{List, OneBuffer, ReadOne, Request, SendOne, SendTo, WriteOne};
pub use resolve::Destination;
pub use sharing::{Local, Sharing, Threads};
