//! Errors.

use std::fmt;
use std::sync::Arc;

use rdma_pool::Error as PoolError;
use rdma_safe::endpoint::{FailedWork, Rejected};
use rdma_safe::{Buffer, Gather};

/// Why an operation has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer has ended the connection.
    #[error("the peer has ended the connection")]
    Disconnected,
    /// This side has closed the connection.
    #[error("the connection was closed on this side")]
    Closed,
    /// The connection has failed, and takes no more work.
    #[error("the connection has failed: {0}")]
    Failed(#[source] Arc<rdma_safe::Error>),
    /// The driver has stopped: it was dropped, perhaps along with its runtime.
    #[error(
        "the driver of the connection has stopped, perhaps with its runtime: keep the runtime until the connections are closed"
    )]
    DriverStopped,
    /// A call of rdma-safe has failed. Other work is not affected.
    #[error(transparent)]
    Rdma(Arc<rdma_safe::Error>),
    /// There is no memory for the connection.
    #[error(transparent)]
    Memory(Arc<PoolError>),
    /// Fewer shared receives are free than a connection needs.
    #[error(
        "{wanted} receives are needed, but fewer of the {messages} shared ones are free: \
         close connections, or raise the number of SharedReceives"
    )]
    NoReceives {
        /// Receives that the connection needs.
        wanted: u32,
        /// Shared receives in the protection domain.
        messages: u32,
    },
    /// The peer has sent more messages than its connection has reserved receives for.
    #[error(
        "the peer has sent more messages than its connection has reserved receives for: \
         raise receives, or let it wait for answers"
    )]
    ReceivesExceeded,
    /// The name of the peer cannot be resolved.
    #[error("cannot resolve the name: {0}")]
    Name(#[source] Arc<std::io::Error>),
    /// A system call of the driver has failed.
    #[error("the driver cannot wait for events: {0}")]
    Driver(#[source] Arc<std::io::Error>),
}

impl Error {
    /// A name without addresses.
    pub(crate) fn no_address() -> Self {
        Error::Name(Arc::new(std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address")))
    }

    /// Whether the peer has ended the connection.
    ///
    /// The kernel of a process that dies ends its connections in the same way. So a protocol that has to tell a complete stream
    /// from a truncated one needs a last message.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        matches!(self, Error::Disconnected)
    }
}

impl From<rdma_safe::Error> for Error {
    fn from(error: rdma_safe::Error) -> Self {
        Error::Rdma(Arc::new(error))
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        Error::Memory(Arc::new(error))
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::Driver(Arc::new(error))
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        std::io::Error::from(errno).into()
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An operation that has failed, with its memory.
#[non_exhaustive]
pub struct Failed {
    /// The reason.
    pub error: Error,
    /// The buffer of the operation. `None` if its connection was removed first, or the completion queue has failed: the buffer
    /// then returns to its pool, once the device no longer uses it.
    pub buffer: Option<Buffer>,
    /// The list of an operation with one, like `buffer`.
    pub list: Option<Gather>,
}

impl Failed {
    pub(crate) fn new(error: Error) -> Self {
        Failed { error, buffer: None, list: None }
    }

    pub(crate) fn rejected(rejected: Rejected) -> Self {
        let Rejected { error, buffer, list, .. } = rejected;
        Failed { error: rdma_safe::Error::from(error).into(), buffer, list }
    }

    pub(crate) fn of_work(failed: FailedWork, error: Error) -> Self {
        Failed { error, buffer: failed.0.buffer, list: failed.0.list }
    }
}

impl fmt::Debug for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Failed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<Failed> for Error {
    /// Drops the memory.
    fn from(failed: Failed) -> Self {
        failed.error
    }
}
