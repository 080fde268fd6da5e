//! Messages of any size and byte streams over RDMA.
//!
//! ```no_run
//! # async fn example() -> rdma_msg::Result<()> {
//! let channel = rdma_msg::connect("10.0.0.2:7471").await?;
//! channel.send("hello").await?;
//! channel.finish().await?; // otherwise the echo server below waits for more messages
//! while let Some(message) = channel.receive().await? {
//!     println!("{:?}", &*message);
//! }
//! channel.close().await?;
//! # Ok(())
//! # }
//! ```
//!
//! The other end:
//!
//! ```no_run
//! # async fn example() -> rdma_msg::Result<()> {
//! async fn serve(channel: rdma_msg::Channel) -> rdma_msg::Result<()> {
//!     while let Some(message) = channel.receive().await? {
//!         channel.send(&message).await?;
//!     }
//!     channel.close().await
//! }
//!
//! let listener = rdma_msg::Listener::bind("0.0.0.0:7471").await?;
//! loop {
//!     tokio::spawn(serve(listener.accept().await?));
//! }
//! # }
//! ```
//!
//! [`blocking`] has channels for programs without async. [`Stream`] carries bytes instead, for libraries that want `AsyncRead`
//! and `AsyncWrite`.
//!
//! To run without an RDMA device, enable the feature `soft` and call `rdma_safe::soft::install_by_default()` first.
//!
//! On tokio, programs are fastest on one thread: `#[tokio::main(flavor = "current_thread")]`. The documentation of [`rdma_async`]
//! says why, and what a service on several cores does.
//!
//! # Flow control
//!
//! A connection has receives for a [`window`](Connector::window) of packets. The peer sends a packet only if it knows of a free
//! receive, so packets never find the receive queue empty (RNR). It learns of free receives by the packets of the other
//! direction, or by control packets, which have receives of their own. A program that does not receive, or that keeps its
//! messages, holds back its peer, and nobody else: senders wait, in order, until there is room.
//!
//! # Memory
//!
//! A connection has registered memory for its [`window`](Connector::window) and for six control packets: 12 times 80 KiB by
//! default, each in a block of the [pool](rdma_pool). While it sends, it also has up to [`sends`](Connector::sends) + 1 packets.
//! When it is idle, it keeps one of them. So with default options it has 1040 KiB when idle, and at most 1520 KiB. A message that
//! arrives in parts, of at most [`max_message`](Connector::max_message), also takes up to twice its length. Of this memory, the
//! process keeps up to 16 MiB for the next messages. Copies for a program that keeps messages have a
//! [budget](Connector::copy_budget). Messages that were read from the memory of the peer, of up to 4 MiB each, and
//! [offered](Channel::offer) memory, up to 16 vectors, come on top. So do up to two messages that the peer has not read yet,
//! whose memory stays registered after [`Channel::send`].
//!
//! For many connections, [share the receives](SharedReceives) and choose smaller packets. A connection that is idle then has seven
//! packets, for example 28 KiB.
//!
//! # Cancellation
//!
//! | a future is dropped | |
//! |---|---|
//! | [`Channel::send`] | the message does not arrive |
//! | [`Channel::send_many`] | some of the first messages may arrive |
//! | [`Channel::offer`] | the memory is freed, and the peer does not learn of it |
//! | [`Channel::flush`], [`Channel::finish`] | can be called again |
//! | [`Channel::receive`], [`Channel::receive_many`] | loses no message |
//! | [`Channel::close`] | the channel is closed when its last handle is dropped |
//!
//! So the caller sets deadlines with its runtime: `tokio::time::timeout(…, channel.receive())`.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `tokio` (default) | `AsyncRead` and `AsyncWrite` of tokio; drivers as tasks of tokio |
//! | `futures` | `AsyncRead` and `AsyncWrite` of futures-io |
//! | `hyper` | module `hyper`: HTTP/1.1 and HTTP/2 over streams; `Incoming` |
//! | `tonic` | module `tonic`: gRPC over streams |
//! | `bytes` | `Bytes` are sent and received without a copy |
//! | `soft` | soft0, a software RNIC in the process |

#![deny(missing_docs)]
#![forbid(unsafe_code)]

#[cfg(feature = "hyper")]
mod adapters;
mod assembly;
pub mod blocking;
mod channel;
mod connector;
mod engine;
mod error;
mod flow;
mod lent;
mod listener;
mod long;
mod many;
mod message;
mod offering;
mod options;
mod parts;
mod payload;
mod receives;
mod sending;
mod shared;
#[cfg_attr(
    not(any(feature = "futures", feature = "tokio")),
    allow(dead_code, unused_imports, unused_macros, reason = "it is read and written by their traits")
)]
mod stream;
mod waiting;
mod wire;

#[cfg(feature = "hyper")]
pub use adapters::Incoming;
#[cfg(feature = "hyper")]
pub use adapters::hyper;
#[cfg(feature = "tonic")]
pub use adapters::tonic;
pub use channel::{Channel, Receive, Statistics};
pub use connector::{Connector, connect, connect_stream};
pub use error::{Error, Incompatible, Result, Violation};
pub use listener::{Listener, ListenerBuilder, StreamListener};
pub use many::{Messages, MessagesIter, ReceiveMany};
pub use message::Message;
pub use payload::Payload;
pub use rdma_async::{Destination, Driver};
pub use rdma_pool::{Budget, Pool};
pub use rdma_safe::cm::Address;
pub use rdma_safe::{Buffer, SharedBuffer};
pub use receives::SharedReceives;
pub use sending::Send;
pub use stream::{ReadHalf, Stream, WriteHalf};
