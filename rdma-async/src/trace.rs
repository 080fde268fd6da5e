//! Events of connections, for subscribers of the crate tracing.

use std::fmt::{Debug, Display};

/// A connection was made.
#[inline]
pub(crate) fn connected(local: impl Debug, peer: impl Debug) {
    #[cfg(feature = "tracing")]
    tracing::debug!(?local, ?peer, "connected");
    #[cfg(not(feature = "tracing"))]
    let _ = (local, peer);
}

/// A handshake has failed.
#[inline]
pub(crate) fn handshake_failed(error: &dyn Display) {
    #[cfg(feature = "tracing")]
    tracing::warn!(%error, "handshake failed");
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// A connection has failed, for another reason than that one of its ends has closed it.
#[inline]
pub(crate) fn failed(error: &dyn Display) {
    #[cfg(feature = "tracing")]
    tracing::warn!(%error, "connection failed");
    #[cfg(not(feature = "tracing"))]
    let _ = error;
}

/// The last handle of a connection was dropped.
#[inline]
pub(crate) fn closing(peer: impl Debug) {
    #[cfg(feature = "tracing")]
    tracing::debug!(?peer, "closing");
    #[cfg(not(feature = "tracing"))]
    let _ = peer;
}
