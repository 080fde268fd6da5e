//! Errors.

use std::sync::Arc;

/// Why a channel, stream or listener has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection has failed, or cannot be made.
    #[error(transparent)]
    Connection(#[from] rdma_async::Error),
    /// The peer has ended the connection, or has died. A receiver gets this only if the peer had not finished.
    #[error("the peer has ended the connection, or its process has died; messages may be missing")]
    Disconnected,
    /// The peer has ended the connection by [`Channel::abort`](crate::Channel::abort).
    #[error("the peer has aborted the connection with code {code}: {reason}")]
    Aborted {
        /// The code that the peer gave.
        code: u32,
        /// The reason that the peer gave.
        reason: Arc<str>,
    },
    /// This end has closed or aborted the channel, or has said that it sends no more.
    #[error("the channel was closed on this side")]
    Closed,
    /// The program of the peer has not answered for this time. It is stopped or hangs; its device may still answer.
    #[error(
        "the program of the peer has not answered for {0:?}: it is stopped, or its runtime is blocked; \
         raise keepalive if that is no failure"
    )]
    Unresponsive(std::time::Duration),
    /// The deadline of a blocking call has passed. The channel can still be used.
    #[error("timed out after {0:?}")]
    Timeout(std::time::Duration),
    /// The message is longer than the peer accepts.
    #[error("a message of {len} bytes exceeds the {max} bytes that the peer accepts: raise max_message at the peer")]
    TooLong {
        /// Length of the message in bytes.
        len: usize,
        /// The longest message that the peer accepts, in bytes.
        max: usize,
    },
    /// This end has no memory for a message that the peer sends. The connection was ended.
    #[error("no memory for a message of {len} bytes: lower max_message at this end, so that the peer cannot send it")]
    OutOfMemory {
        /// Length of the message in bytes.
        len: usize,
    },
    /// The peer does not use this protocol, or not for the same purpose.
    #[error("{0}")]
    Incompatible(Incompatible),
    /// The peer does not keep to the protocol. The connection was ended.
    #[error("the peer does not keep to the protocol: {0}")]
    Protocol(Violation),
}

/// Why two ends cannot talk to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// The private data of the peer's handshake is of another protocol.
    #[error("the peer does not use rdma-msg: connect to it with the library that it uses, such as rdma_async")]
    OtherProtocol,
    /// The peer knows only other versions of the protocol.
    #[error(
        "this end knows versions {} to {} of the protocol, the peer {} to {}; update the older one",
        .own[0], .own[1], .peer[0], .peer[1]
    )]
    Version {
        /// The lowest and the highest version of this end.
        own: [u8; 2],
        /// The lowest and the highest version of the peer.
        peer: [u8; 2],
    },
    /// One end has a channel of messages, and the other a stream of bytes.
    #[error("one end uses messages (Channel) and the other a stream of bytes (Stream)")]
    Purpose,
}

/// What a peer has done that the protocol does not allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// More data packets than it was allowed.
    #[error("it has sent more packets than it was allowed")]
    DataBeyondCredit,
    /// More control packets than it was allowed.
    #[error("it has sent more control packets than it was allowed")]
    ControlBeyondCredit,
    /// A credit for more packets than it has receives, or for fewer than before.
    #[error("it allows more packets than it has receives, or fewer than before")]
    ImpossibleCredit,
    /// It has waived more credit than it had.
    #[error("it has waived more credit than it had")]
    ImpossibleWaiver,
    /// More offers than may be open: of memory to read, or of memory for messages.
    #[error("it has made more offers of memory than it may at once")]
    OffersBeyondLimit,
    /// An answer to an offer that was not made, or that was answered before.
    #[error("it has answered an offer that was not made, or twice")]
    ImpossibleAnswer,
    /// A message in memory that this end has not offered, or that has a message already.
    #[error("it has announced a message in memory that was not offered, or twice")]
    NotOffered,
    /// A heartbeat when it was the turn of this end.
    #[error("it has sent a heartbeat out of turn")]
    UnexpectedHeartbeat,
    /// A packet that is shorter than its header, or whose frames exceed it.
    #[error("a packet is shorter than its frames")]
    Truncated,
    /// A kind of packet or frame that this version does not have, or that is not allowed there.
    #[error("a packet or frame of a kind that is not allowed there")]
    UnknownKind,
    /// A message that is longer than this end accepts.
    #[error("a message is longer than this end accepts")]
    TooLong,
    /// Data after it said that it sends no more.
    #[error("data after the end of its messages")]
    AfterEnd,
    /// Impossible values in the private data of its handshake.
    #[error("impossible values in its handshake")]
    Handshake,
}

impl From<Violation> for Error {
    fn from(violation: Violation) -> Self {
        Error::Protocol(violation)
    }
}

impl From<Incompatible> for Error {
    fn from(incompatible: Incompatible) -> Self {
        Error::Incompatible(incompatible)
    }
}

impl Error {
    /// Whether the connection is lost: the peer has left without an end, has died or does not answer, or a device or the network
    /// has failed. A client may connect again.
    #[must_use]
    pub fn is_connection_lost(&self) -> bool {
        use rdma_async::Error as Connection;
        match self {
            Error::Disconnected | Error::Unresponsive(_) => true,
            Error::Connection(error) => matches!(error, Connection::Disconnected | Connection::Failed(_)),
            _ => false,
        }
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        use std::io::ErrorKind;

        use rdma_async::Error as Connection;
        let kind = match &error {
            Error::Connection(Connection::Disconnected) | Error::Disconnected | Error::Aborted { .. } => {
                ErrorKind::ConnectionReset
            }
            Error::Connection(Connection::Closed) | Error::Closed => ErrorKind::BrokenPipe,
            Error::Connection(Connection::Failed(_)) => ErrorKind::ConnectionAborted,
            Error::TooLong { .. } => ErrorKind::InvalidInput,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::Timeout(_) | Error::Unresponsive(_) => ErrorKind::TimedOut,
            Error::Protocol(_) | Error::Incompatible(_) => ErrorKind::InvalidData,
            Error::Connection(_) => ErrorKind::Other,
        };
        std::io::Error::new(kind, error)
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
