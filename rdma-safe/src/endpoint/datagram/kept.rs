//! What is kept of datagrams in flight, beside their buffers.

use std::sync::Arc;

use super::peer::{Arrival, Sender};
use crate::endpoint::completion::RECEIVE;
use crate::endpoint::ring::places_of;
use crate::{AddressHandle, Buffer, Grh, ProtectionDomain, Result, Sge, WorkCompletion};

/// By the places of the two rings: headers of receives, and handles of sends.
pub(in crate::endpoint) struct Kept {
    /// [`Grh::LEN`] bytes for each receive, of which the device writes those of receives that are posted. Not to be looked at as a
    /// whole, therefore.
    headers: Buffer,
    /// From whom each has come; `None` before that.
    senders: Box<[Option<(u32, Arrival)>]>,
    /// What the send in each place goes by. It stays until there is another one.
    handles: Box<[Option<Arc<AddressHandle>>]>,
}

impl Kept {
    pub(in crate::endpoint) fn new(pd: &ProtectionDomain, sends: u32, receives: u32) -> Result<Self> {
        let [sends, receives] = [sends, receives].map(places_of);
        Ok(Kept {
            headers: pd.allocate(receives * Grh::LEN)?,
            senders: vec![None; receives].into(),
            handles: vec![None; sends].into(),
        })
    }

    /// Where the header of the receive with this number goes.
    pub(in crate::endpoint) fn header(&mut self, receive: u64) -> Sge {
        let place = place(receive, self.senders.len());
        if let Some(sender) = self.senders.get_mut(place) {
            *sender = None;
        }
        let address = self.headers.address() + (place * Grh::LEN) as u64;
        Sge { address, len: Grh::LEN as u32, lkey: self.headers.lkey() }
    }

    /// Notes whom the receive with this number has come from.
    pub(in crate::endpoint) fn note(&mut self, receive: u64, completion: &WorkCompletion<'_>) {
        let place = place(receive, self.senders.len());
        if let Some(sender) = self.senders.get_mut(place) {
            *sender = completion.src_qp().zip(Arrival::of(completion));
        }
    }

    /// Whom the receive with this number, which has completed and is not posted again, has come from.
    pub(super) fn sender(&self, receive: u64) -> Option<Sender> {
        let place = place(receive, self.senders.len());
        let (qp_num, arrival) = (*self.senders.get(place)?)?;
        // SAFETY: the place is below their number, and headers has as many bytes for each, which are initialised. The device writes
        // those of posted receives only, of which this is none: what was noted is forgotten when one is posted.
        let header = unsafe { self.headers.as_ptr_of(place * Grh::LEN).cast::<[u8; Grh::LEN]>().read() };
        Some(Sender::new(qp_num, arrival, Grh::of(&header)?))
    }

    /// Keeps the handle that the send with this number goes by.
    pub(in crate::endpoint) fn keep(&mut self, send: u64, handle: &Arc<AddressHandle>) {
        let place = place(send, self.handles.len());
        if let Some(kept) = self.handles.get_mut(place) {
            *kept = Some(Arc::clone(handle));
        }
    }
}

/// Numbers of a ring begin with 1. It is one of the places, of which there are a power of two; the compiler, which does not know
/// that, would have a panic where they are indexed.
fn place(number: u64, places: usize) -> usize {
    (number & !RECEIVE).wrapping_sub(1) as usize & (places - 1)
}
