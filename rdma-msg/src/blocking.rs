//! Channels for programs without async. Calls that wait for a peer take a timeout.
//!
//! A driver on a separate thread serves the connections.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use rdma_msg::blocking::Channel;
//!
//! # fn main() -> rdma_msg::Result<()> {
//! const TIMEOUT: Duration = Duration::from_secs(5);
//!
//! let channel = Channel::connect("10.0.0.2:7471", TIMEOUT)?;
//! channel.send("a question", TIMEOUT)?;
//! channel.finish(TIMEOUT)?;
//! while let Some(answer) = channel.receive(TIMEOUT)? {
//!     println!("{}", String::from_utf8_lossy(&answer));
//! }
//! channel.close(TIMEOUT)?;
//! # Ok(())
//! # }
//! ```

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rdma_async::Destination;
use rdma_safe::cm::Address;

use crate::{Error, Message, Messages, Payload, Result};

/// A [`Channel`](crate::Channel) whose calls block.
#[derive(Clone, Debug)]
pub struct Channel(crate::Channel);

/// A [`Listener`](crate::Listener) whose calls block.
#[derive(Debug)]
pub struct Listener(crate::Listener);

impl Channel {
    /// Connects to `peer` with default options.
    ///
    /// # Errors
    /// [`Error::Timeout`], and the errors of [`Connector::connect`](crate::Connector::connect).
    pub fn connect(peer: impl Into<Destination>, timeout: Duration) -> Result<Self> {
        block_on(crate::connect(peer), timeout).map(Channel)
    }

    /// Connects to `peer` with the options of `connector`.
    ///
    /// # Errors
    /// Like [`Channel::connect`].
    pub fn connect_with(connector: &crate::Connector, peer: impl Into<Destination>, timeout: Duration) -> Result<Self> {
        block_on(connector.connect(peer), timeout).map(Channel)
    }

    /// Sends a message: [`Channel::send`](crate::Channel::send). After a timeout, the message does not arrive.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the peer has no room; the errors of [`Channel::send`](crate::Channel::send).
    pub fn send<'c>(&'c self, message: impl Into<Payload<'c>>, timeout: Duration) -> Result<()> {
        block_on(self.0.send(message), timeout)
    }

    /// The next message; `None` when the peer sends no more. After a timeout, no message is lost.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::receive`](crate::Channel::receive).
    pub fn receive(&self, timeout: Duration) -> Result<Option<Message>> {
        block_on(self.0.receive(), timeout)
    }

    /// Sends messages in order: [`Channel::send_many`](crate::Channel::send_many). After a timeout, some of the first messages may
    /// have been sent.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the peer has no room; the errors of [`Channel::send_many`](crate::Channel::send_many).
    pub fn send_many<'m, B>(&self, messages: impl IntoIterator<Item = &'m B>, timeout: Duration) -> Result<()>
    where
        B: AsRef<[u8]> + ?Sized + 'm,
    {
        block_on(self.0.send_many(messages), timeout)
    }

    /// The next messages: [`Channel::receive_many`](crate::Channel::receive_many). After a timeout, no message is lost.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::receive_many`](crate::Channel::receive_many).
    pub fn receive_many(&self, timeout: Duration) -> Result<Option<Messages>> {
        block_on(self.0.receive_many(), timeout)
    }

    /// Offers memory for a message: [`Channel::offer`](crate::Channel::offer). After a timeout, the memory is dropped.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::offer`](crate::Channel::offer).
    pub fn offer(&self, memory: Vec<u8>, timeout: Duration) -> Result<bool> {
        block_on(self.0.offer(memory), timeout)
    }

    /// Waits until all messages that were sent before have reached the memory of the peer.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::flush`](crate::Channel::flush).
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        block_on(self.0.flush(), timeout)
    }

    /// Says that this end sends no more.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::finish`](crate::Channel::finish).
    pub fn finish(&self, timeout: Duration) -> Result<()> {
        block_on(self.0.finish(), timeout)
    }

    /// Ends the channel in order: [`Channel::close`](crate::Channel::close).
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Channel::close`](crate::Channel::close).
    pub fn close(&self, timeout: Duration) -> Result<()> {
        block_on(self.0.close(), timeout)
    }

    /// The channel for tasks.
    #[must_use]
    pub fn into_async(self) -> crate::Channel {
        self.0
    }
}

impl From<crate::Channel> for Channel {
    fn from(channel: crate::Channel) -> Self {
        Channel(channel)
    }
}

impl Listener {
    /// Listens for channels with default options. Waits only while a name is resolved.
    ///
    /// # Errors
    /// Like [`Listener::bind`](crate::Listener::bind).
    pub fn bind(address: impl Into<Destination>) -> Result<Self> {
        Listener::bind_with(crate::Listener::builder(), address)
    }

    /// Listens for channels with the options of [`Listener::builder`](crate::Listener::builder). Waits only while a name is
    /// resolved.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub fn bind_with(builder: crate::ListenerBuilder, address: impl Into<Destination>) -> Result<Self> {
        wait(pin!(builder.bind(address)), None).unwrap_or(Err(Error::Closed)).map(Listener)
    }

    /// The next channel.
    ///
    /// # Errors
    /// [`Error::Timeout`]; the errors of [`Listener::accept`](crate::Listener::accept).
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        block_on(self.0.accept(), timeout).map(Channel)
    }

    /// The address that it listens at, including the actual port.
    #[must_use]
    pub fn local_address(&self) -> Address {
        self.0.local_address()
    }
}

impl From<crate::Listener> for Listener {
    fn from(listener: crate::Listener) -> Self {
        Listener(listener)
    }
}

/// Unparks a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The output of a future, if it is ready in time.
fn block_on<T>(future: impl Future<Output = Result<T>>, timeout: Duration) -> Result<T> {
    wait(pin!(future), Instant::now().checked_add(timeout)).unwrap_or(Err(Error::Timeout(timeout)))
}

/// Polls a future until it is ready, or until the deadline if there is one.
fn wait<F: Future>(mut future: std::pin::Pin<&mut F>, deadline: Option<Instant>) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let context = &mut Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Some(output);
        }
        match deadline {
            None => thread::park(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return None;
                }
                thread::park_timeout(left);
            }
        }
    }
}
