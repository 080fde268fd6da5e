//! Errors of connections by address.

use crate::explain::advice;

use super::{Cause, ConnectError};
use crate::error::Verb;
use crate::id::CmId;
use crate::{Errno, Error};

/// An error of librdmacm, or of a connection by address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// A call failed.
    #[error("{verb} failed: {errno}{}", advice(*verb, *errno))]
    Call {
        /// The function that failed.
        verb: Verb,
        /// The reported error.
        errno: Errno,
    },

    /// The private data is too long for a request, a reply or a rejection.
    #[error("{len} bytes of private data, but at most {max} are possible: send the rest over the connection")]
    PrivateData {
        /// Length of the data in bytes.
        len: usize,
        /// Maximum length in bytes.
        max: u8,
    },

    /// A step of a connection failed.
    #[error(transparent)]
    Connect(Box<ConnectError>),

    /// A name has no address.
    #[error("no address: {reason}")]
    NoAddress {
        /// The resolver's message.
        reason: String,
    },

    /// An id has failed to leave a multicast group ([`Id::leave_multicast`](super::Id::leave_multicast)).
    ///
    /// librdmacm would use freed memory if it read events of this id. Until the id is dropped, its channel returns no events.
    #[error("{id:?} has failed to leave a multicast group, so no events of its channel can be read: drop this id")]
    FailedLeave {
        /// The id to drop.
        id: CmId,
    },

    /// The installed librdmacm lacks the call.
    #[error("this librdmacm has no {verb}, which came with rdma-core {since}: install that release or a newer one")]
    OlderLibrary {
        /// The missing function.
        verb: Verb,
        /// Release of rdma-core that added it.
        since: u32,
    },

    /// The endpoint belongs to another device than the one that leads to the peer.
    #[error(
        "the route uses {device}, but the endpoint belongs to {endpoint}: build it in the domain of Route::pd or Request::pd, \
         or in another domain of that device"
    )]
    OtherDevice {
        /// The device that leads to the peer.
        device: String,
        /// The device of the endpoint.
        endpoint: String,
    },

    /// The queue key of a datagram endpoint differs from the one that its peers use.
    #[error(
        "the endpoint has the queue key {endpoint:#x}, but its peers use {qkey:#x}: build it with DatagramRoute::endpoint, or \
         with DATAGRAM_QKEY"
    )]
    OtherQueueKey {
        /// Queue key of the peers.
        qkey: u32,
        /// Queue key of the endpoint.
        endpoint: u32,
    },
}

pub(super) fn failed(verb: Verb, errno: Errno) -> Error {
    CmError::Call { verb, errno }.into()
}

impl Error {
    /// The cause, if a connection by address failed or has ended.
    ///
    /// ```no_run
    /// # fn example(connection: &mut rdma_safe::cm::Connection) -> rdma_safe::Result<()> {
    /// use std::time::Duration;
    /// use rdma_safe::cm::Cause;
    ///
    /// loop {
    ///     match connection.wait(Duration::from_secs(60)) {
    ///         Ok(done) => println!("{:?}", done.operation),
    ///         Err(error) if error.connect_cause() == Some(&Cause::Disconnected) => return Ok(()),
    ///         Err(error) => return Err(error),
    ///     }
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn connect_cause(&self) -> Option<&Cause> {
        match self {
            Error::Cm(CmError::Connect(failed)) => Some(&failed.cause),
            _ => None,
        }
    }
}
