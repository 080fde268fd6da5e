//! Received messages.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use rdma_safe::{Buffer, ExposedRegion};

use crate::error::Result;
use crate::long::Long;
use crate::shared::Shared;

/// A received message. Its memory goes back to the channel when it is dropped.
///
/// Messages that arrived in one packet share its memory. When a program keeps messages of more than half of the packets of the
/// [window](crate::Connector::window), further messages are copied, up to a [budget](crate::Connector::copy_budget). When it keeps
/// those of all packets, its peer cannot send.
pub struct Message(Storage);

enum Storage {
    /// The only message of a packet.
    Packet(Packet, Part),
    /// One of several messages of a packet.
    Shared(Arc<Packet>, Part),
    /// A message that was read from the memory of the peer.
    Read(Buffer),
    /// Memory of this program, to which the peer has written a message of this length.
    Written(Vec<u8>, usize),
    /// A message that was copied from several packets or reads.
    Assembled(Long),
    /// A message that was copied since the program keeps many packets.
    Copied { bytes: Vec<u8>, _loan: Loan },
}

/// A message on its way from the engine to a task.
pub(crate) enum Arrival {
    Message(Message),
    /// Memory that the peer has written, and may still access. Also the length of the message.
    Written(ExposedRegion, usize),
}

impl Arrival {
    /// The message. Ends the access of the peer, by a system call on hardware, so this is called without a lock.
    pub(crate) fn into_message(self) -> Result<Message> {
        match self {
            Arrival::Message(message) => Ok(message),
            Arrival::Written(region, len) => match region.into_memory() {
                Ok(memory) => Ok(Message(Storage::Written(memory, len))),
                Err(error) => Err(rdma_async::Error::from(rdma_safe::Error::from(error)).into()),
            },
        }
    }
}

impl From<Message> for Arrival {
    fn from(message: Message) -> Self {
        Arrival::Message(message)
    }
}

/// Bytes that a copy takes besides the message, approximately.
const OVERHEAD: usize = 128;

/// The bytes by which programs may keep copies instead of packets.
pub(crate) struct CopyBudget {
    limit: usize,
    used: Arc<AtomicUsize>,
}

/// Bytes of a budget that a copy uses.
struct Loan {
    bytes: usize,
    used: Arc<AtomicUsize>,
}

impl CopyBudget {
    pub(crate) fn new(limit: usize) -> Self {
        CopyBudget { limit, used: Arc::default() }
    }

    /// A copy of a message. `None` if the budget does not suffice.
    pub(crate) fn copy(&self, message: &Message) -> Option<Message> {
        let bytes = message.len() + OVERHEAD;
        // Only the engine adds, and it is locked.
        if bytes > self.limit.saturating_sub(self.used.load(Ordering::Relaxed)) {
            return None;
        }
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Some(Message(Storage::Copied { bytes: message.to_vec(), _loan: Loan { bytes, used: self.used.clone() } }))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The place of a message in its packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// A received data packet. Dropping it returns its receive.
pub(crate) struct Packet {
    /// `None` only while it is being dropped.
    message: Option<rdma_async::Message>,
    channel: Weak<Shared>,
}

impl Packet {
    pub(crate) fn new(message: rdma_async::Message, channel: &Weak<Shared>) -> Self {
        Packet { message: Some(message), channel: channel.clone() }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.message.as_deref().unwrap_or_default()
    }

    fn part(&self, part: Part) -> &[u8] {
        self.bytes().get(part.start..part.start + part.len).unwrap_or_default()
    }
}

impl Drop for Packet {
    fn drop(&mut self) {
        // Posts the receive before the credit for it is granted.
        self.message = None;
        if let Some(channel) = self.channel.upgrade() {
            channel.returned();
        }
    }
}

impl Message {
    pub(crate) fn only(packet: Packet, part: Part) -> Self {
        Message(Storage::Packet(packet, part))
    }

    pub(crate) fn of(packet: Arc<Packet>, part: Part) -> Self {
        Message(Storage::Shared(packet, part))
    }

    pub(crate) fn read(buffer: Buffer) -> Self {
        Message(Storage::Read(buffer))
    }

    pub(crate) fn assembled(bytes: Long) -> Self {
        Message(Storage::Assembled(bytes))
    }

    /// Whether the bytes are where the device has put them, without a copy.
    ///
    /// A message of several packets or several reads is copied once. So is a message that is taken while the program keeps many.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        !matches!(self.0, Storage::Assembled(_) | Storage::Copied { .. })
    }

    /// Whether it occupies a receive of the channel.
    pub(crate) fn is_in_packet(&self) -> bool {
        matches!(self.0, Storage::Packet(..) | Storage::Shared(..))
    }

    /// The bytes. Copies them if they are in a packet, whose memory then goes back to the channel.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Storage::Assembled(bytes) => bytes.into_vec(),
            Storage::Copied { bytes, .. } => bytes,
            Storage::Written(mut memory, len) => {
                memory.truncate(len);
                memory
            }
            Storage::Packet(..) | Storage::Shared(..) | Storage::Read(_) => self.to_vec(),
        }
    }

    /// The buffer into which the message was read.
    pub(crate) fn into_read(self) -> Result<Buffer, Self> {
        match self.0 {
            Storage::Read(buffer) => Ok(buffer),
            _ => Err(self),
        }
    }

    /// The memory that was offered for the message, with its whole length, to [offer](crate::Channel::offer) it again.
    ///
    /// Take [`len`](slice::len) first: the bytes after the message are unspecified.
    ///
    /// # Errors
    /// The message, if its bytes have arrived in another way.
    pub fn into_offered(self) -> Result<Vec<u8>, Self> {
        match self.0 {
            Storage::Written(memory, _) => Ok(memory),
            _ => Err(self),
        }
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Storage::Packet(packet, part) => packet.part(*part),
            Storage::Shared(packet, part) => packet.part(*part),
            Storage::Read(buffer) => buffer,
            Storage::Written(memory, len) => memory.get(..*len).unwrap_or_default(),
            Storage::Assembled(bytes) => bytes,
            Storage::Copied { bytes, .. } => bytes,
        }
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(feature = "bytes")]
impl From<Message> for bytes::Bytes {
    /// The bytes without a copy. The memory goes back to the channel with the last clone.
    fn from(message: Message) -> Self {
        bytes::Bytes::from_owner(message)
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("len", &self.len()).finish_non_exhaustive()
    }
}
