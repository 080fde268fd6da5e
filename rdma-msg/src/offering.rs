//! Offers of memory for messages.

use std::future::poll_fn;

use rdma_safe::{Access, ExposedRegion};

use crate::channel::{Handle, Waiting};
use crate::engine::{Engine, Waits};
use crate::error::Result;

/// One of the offers that may be open.
struct Reservation<'c>(Option<&'c Handle>);

impl Reservation<'_> {
    fn offer(mut self, region: ExposedRegion) -> Result<bool> {
        self.0.take().map_or(Ok(false), |handle| handle.with(|engine| engine.offer_space(Some(region))))
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.0 {
            let _ = handle.0.shared.with_own(|engine| engine.offer_space(None).is_ok());
        }
    }
}

/// Offers memory to the peer, once fewer offers are open. Returns whether the peer needs it.
pub(crate) async fn offer(handle: &Handle, memory: Vec<u8>) -> Result<bool> {
    let mut waiting = Waiting::new(handle, Waits::ForAcknowledgements);
    if !poll_fn(|context| waiting.poll(context, Engine::try_reserve_space)).await? {
        return Ok(false);
    }
    let reservation = Reservation(Some(handle));
    let region = handle.0.pd.expose(memory, Access::REMOTE_WRITE).map_err(rdma_async::Error::from)?;
    reservation.offer(region)
}
