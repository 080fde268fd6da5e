//! What goes wrong with librdmacm.

use crate::explain::advice;

use super::{Cause, ConnectError};
use crate::{Errno, Error};

/// What went wrong with librdmacm.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// A call failed.
    #[error("{call} failed: {errno}{}", advice(call, *errno))]
    Call {
        /// Its name.
        call: &'static str,
        /// As reported.
        errno: Errno,
    },

    /// More bytes than can come with a request, an answer or a refusal.
    #[error("{len} bytes of private data, but this carries at most {max}: send the rest when there is a connection")]
    PrivateData {
        /// How many.
        len: usize,
        /// How many it can be.
        max: u8,
    },

    /// A step of a connection failed.
    #[error(transparent)]
    Connect(Box<ConnectError>),

    /// A name stands for no address.
    #[error("no address: {reason}")]
    NoAddress {
        /// As the resolver says.
        reason: String,
    },

    /// The library does not have the call.
    #[error("this librdmacm has no {call}, which came with rdma-core {since}: install that release or a newer one")]
    OlderLibrary {
        /// Its name.
        call: &'static str,
        /// The release.
        since: u32,
    },

    /// An endpoint was to be made on another device than the one that leads to the peer.
    #[error(
        "the address leads over {device}, but the endpoint is for {endpoint}: make it in the domain that Route::pd or Request::pd \
         gives, or in another of that device"
    )]
    OtherDevice {
        /// The device that leads to the peer.
        device: String,
        /// That of the endpoint.
        endpoint: String,
    },

    /// An endpoint for datagrams has another queue key than those that it is to have to do with.
    #[error(
        "the endpoint has the queue key {endpoint:#x}, but here it takes {qkey:#x}: build it by DatagramRoute::endpoint, or with \
         DATAGRAM_QKEY"
    )]
    OtherQueueKey {
        /// That of the others.
        qkey: u32,
        /// That of the endpoint.
        endpoint: u32,
    },
}

pub(super) fn failed(call: &'static str, errno: Errno) -> Error {
    CmError::Call { call, errno }.into()
}

impl Error {
    /// Why a connection by address did not come about, or has ended, if that is what went wrong.
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
