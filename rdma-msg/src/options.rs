//! Options of connections.

use std::time::Duration;

use crate::SharedReceives;
use crate::engine::{READS, WRITES};
use crate::flow::{ABORT_SENDS, ANSWER_SENDS, CONTROL, CONTROL_SENDS, HEARTBEAT_SENDS, HEARTBEATS, OFFERS};
use crate::wire::{Hello, MAX_PACKET, MAX_WINDOW, MIN_PACKET, Purpose, VERSIONS};

/// Options of channels and streams, for [`Connector`](crate::Connector) and [`Listener`](crate::Listener).
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) packet_size: u32,
    pub(crate) window: u32,
    pub(crate) sends: u32,
    pub(crate) max_message: usize,
    pub(crate) rendezvous_threshold: usize,
    pub(crate) copy_budget: usize,
    pub(crate) keepalive: Option<Duration>,
    pub(crate) linger: Duration,
    pub(crate) timeout: Duration,
    pub(crate) shared: Option<SharedReceives>,
}

/// Default packet size in bytes: a block size of the pool, with room for a message of 64 KiB.
const PACKET: u32 = 80 << 10;

impl Default for Options {
    fn default() -> Self {
        Options {
            packet_size: PACKET,
            window: 6,
            sends: 6,
            max_message: 64 << 20,
            rendezvous_threshold: 64 << 10,
            copy_budget: 1 << 20,
            keepalive: Some(Duration::from_secs(10)),
            linger: Duration::from_secs(2),
            timeout: Duration::from_secs(10),
            shared: None,
        }
    }
}

/// The methods that set them, for connectors and listeners.
macro_rules! setters {
    () => {
        /// The longest packet in bytes, 512 to 1 MiB; 80 KiB by default. A connection uses the smaller value of its two ends.
        ///
        /// Longer messages that are sent in packets are divided, and copied once at the receiver. A packet of more than 60 KiB is
        /// filled only by a message that the peer waits for. Others end at a multiple of 60 KiB, which suits soft0 over UDP.
        ///
        /// Longer packets take more memory, and less work for each byte.
        pub fn packet_size(mut self, bytes: usize) -> Self {
            self.options.packet_size =
                bytes.clamp(crate::wire::MIN_PACKET as usize, crate::wire::MAX_PACKET as usize) as u32;
            self
        }

        /// Packets that may wait at this end, 1 to 16384; 6 by default. The peer sends no more until messages are dropped.
        ///
        /// A connection has a receive for each of them, and six for control packets.
        pub fn window(mut self, packets: u32) -> Self {
            self.options.window = packets.clamp(1, crate::wire::MAX_WINDOW);
            self
        }

        /// Connections share these receives. The window is 1 packet while a connection is idle, and grows up to
        /// [`window`](Self::window) while it is busy. Packets are at most as long as the shared receives.
        pub fn shared_receives(mut self, shared: &crate::SharedReceives) -> Self {
            self.options.shared = Some(shared.clone());
            self
        }

        /// Packets that may be on their way to the peer, 1 to 16384; 6 by default.
        pub fn sends(mut self, packets: u32) -> Self {
            self.options.sends = packets.clamp(1, crate::wire::MAX_WINDOW);
            self
        }

        /// The longest message that this end accepts, in bytes, up to 1 GiB; 64 MiB by default. Channels only.
        ///
        /// A sender learns it from the handshake. It bounds the memory for a message that arrives in parts.
        pub fn max_message(mut self, bytes: usize) -> Self {
            self.options.max_message = bytes.min(1 << 30);
            self
        }

        /// Least length in bytes of messages that are not copied; 64 KiB by default. Channels only, and for memory that
        /// [moves in](crate::Payload). The peer reads the memory in place, or this end writes the message to memory that the peer
        /// has [offered](crate::Channel::offer).
        ///
        /// The memory is registered for that message alone, and deregistered after the read or write. This saves the copies. On
        /// hardware, a registration costs system calls. `usize::MAX` disables both.
        pub fn rendezvous_threshold(mut self, bytes: usize) -> Self {
            self.options.rendezvous_threshold = bytes;
            self
        }

        /// Bytes of messages that are copied while the program keeps many, so that the peer can go on; 1 MiB by default.
        ///
        /// A message is copied if messages of more than half of the packets of the [window](Self::window) are kept. The bytes are
        /// free again when the copy is dropped. 0 disables it.
        pub fn copy_budget(mut self, bytes: usize) -> Self {
            self.options.copy_budget = bytes;
            self
        }

        /// Time after which a silent peer counts as lost; 10 s by default. `None` disables it.
        ///
        /// The programs of both ends exchange heartbeats. A program that is stopped, or whose runtime is blocked, does not answer.
        /// Its connection then ends with [`Error::Unresponsive`](crate::Error::Unresponsive), after this time or up to a fifth
        /// later. A program may block its runtime for three quarters of it. A pause of this program does not count.
        ///
        /// The range is 10 ms to 24 hours; other values fail when a connection is made. For heartbeats, less than 100 ms counts as
        /// 100 ms.
        pub fn keepalive(mut self, within: impl Into<Option<std::time::Duration>>) -> Self {
            self.options.keepalive = within.into();
            self
        }

        /// Time for packets in flight to be acknowledged when the last handle is dropped; 2 s by default.
        pub fn linger(mut self, time: std::time::Duration) -> Self {
            self.options.linger = time;
            self
        }

        /// Time for the device of the peer to answer when a connection is made, or ended; 10 s by default.
        ///
        /// It does not limit how long [`Channel::close`](crate::Channel::close) waits for a peer that does not receive.
        pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
            self.options.timeout = timeout;
            self
        }
    };
}

pub(crate) use setters;

/// Sets the options of a connector or listener of rdma-async.
macro_rules! transport {
    ($options:expr, $hello:expr, $builder:expr) => {{
        let options = $options;
        let builder = $builder;
        let builder = match &options.shared {
            Some(shared) => builder.shared_receives(&shared.0),
            None => builder,
        };
        builder
            .sends(options.transport_sends())
            .send_elements(crate::engine::WRITE_PARTS)
            .receives(options.transport_receives())
            .message_size(options.packet_size as usize)
            .keepalive(options.keepalive)
            .linger(options.linger)
            .timeout(options.timeout)
            .private_data($hello.encode())
    }};
}

pub(crate) use transport;

impl Options {
    /// The handshake of this end.
    pub(crate) fn hello(&self, purpose: Purpose) -> Hello {
        let packet = self.shared.as_ref().map_or(MAX_PACKET, SharedReceives::packet_size);
        let max_window = self.window.clamp(1, MAX_WINDOW);
        Hello {
            versions: VERSIONS,
            purpose,
            window: self.first_window(),
            max_window,
            keepalive: self.keepalive,
            packet: self.packet_size.clamp(MIN_PACKET, packet),
            message: match purpose {
                Purpose::Messages => self.max_message as u64,
                // A chunk is as long as a packet at most.
                Purpose::Stream => MAX_PACKET.into(),
            },
        }
    }

    pub(crate) fn transport_sends(&self) -> u32 {
        self.sends + CONTROL_SENDS + ANSWER_SENDS + HEARTBEAT_SENDS + ABORT_SENDS + READS + WRITES
    }

    pub(crate) fn transport_receives(&self) -> u32 {
        self.first_window() + CONTROL + self.offers() + HEARTBEATS
    }

    /// The window of a new connection.
    fn first_window(&self) -> u32 {
        if self.shared.is_some() { 1 } else { self.window.clamp(1, MAX_WINDOW) }
    }

    /// The most offers that are open. Each needs a receive for its answer.
    pub(crate) fn offers(&self) -> u32 {
        if self.shared.is_some() { 1 } else { OFFERS }
    }
}
