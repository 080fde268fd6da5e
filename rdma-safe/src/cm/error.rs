//! What goes wrong with librdmacm.

use crate::explain::advice;
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
}

pub(super) fn failed(call: &'static str, errno: Errno) -> Error {
    CmError::Call { call, errno }.into()
}
