//! Options of connections.

use std::time::Duration;

/// Options of connections, for [`Connector`](crate::Connector) and [`Listener`](crate::Listener).
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) sends: u32,
    pub(crate) receives: u32,
    pub(crate) message_size: usize,
    pub(crate) send_elements: u32,
    pub(crate) keepalive: Option<Duration>,
    pub(crate) linger: Duration,
    pub(crate) timeout: Duration,
    pub(crate) private_data: Vec<u8>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            sends: 64,
            receives: 64,
            message_size: 4096,
            send_elements: 4,
            keepalive: Some(Duration::from_secs(10)),
            linger: Duration::from_secs(2),
            timeout: Duration::from_secs(10),
            private_data: Vec::new(),
        }
    }
}

/// The methods that set those that datagrams have, too.
macro_rules! queue_setters {
    () => {
        /// Operations that can be in flight; 64 by default. Further ones wait.
        pub fn sends(mut self, operations: u32) -> Self {
            self.options.sends = operations.max(1);
            self
        }

        /// Receives; 64 by default. They bound the messages that have arrived or that tasks keep.
        pub fn receives(mut self, messages: u32) -> Self {
            self.options.receives = messages.max(1);
            self
        }

        /// Time for operations in flight to complete when the last handle is closed or dropped; 2 s by default.
        pub fn linger(mut self, time: std::time::Duration) -> Self {
            self.options.linger = time;
            self
        }
    };
}

/// The methods that set them, for connectors and listeners.
macro_rules! setters {
    ($private_data:literal) => {
        crate::options::queue_setters!();

        /// The longest message that a connection can receive, in bytes; 4096 by default.
        ///
        /// Each connection has memory for as many messages as it has receives. The pool rounds the size up, so slightly longer
        /// messages arrive, too. A message that does not fit fails at both ends, and the connection with it. With
        /// [shared receives](crate::SharedReceives), their size counts instead.
        pub fn message_size(mut self, bytes: usize) -> Self {
            self.options.message_size = bytes;
            self
        }

        /// Most elements of a list to send, write or read; 4 by default, or what the device supports.
        pub fn send_elements(mut self, elements: u32) -> Self {
            self.options.send_elements = elements.max(1);
            self
        }

        /// Time within which a silent death of the peer is noticed; 10 s by default. `None` disables it.
        pub fn keepalive(mut self, within: impl Into<Option<std::time::Duration>>) -> Self {
            self.options.keepalive = within.into();
            self
        }

        /// Time for the peer to answer when a connection is made or closed; 10 s by default.
        pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
            self.options.timeout = timeout;
            self
        }

        #[doc = $private_data]
        pub fn private_data(mut self, bytes: impl Into<Vec<u8>>) -> Self {
            self.options.private_data = bytes.into();
            self
        }
    };
}

pub(crate) use {queue_setters, setters};
