//! Headers, senders and address handles of datagrams in flight.

use std::sync::Arc;

use super::identity::DatagramIdentity;
use super::peer::DatagramSender;
use crate::address::Arrival;
use crate::address::Grh;
use crate::endpoint::completion::{Completion, RECEIVE};
use crate::endpoint::ring::slot_count;
use crate::{AddressHandle, Buffer, Result, Sge, WcStatus, WorkCompletion};

/// State of datagrams in flight, for each slot of the two rings.
pub(in crate::endpoint) struct DatagramSlots {
    pub(super) identity: DatagramIdentity,
    /// [`Grh::LEN`] bytes for each receive.
    ///
    /// The device writes the headers of posted receives, so this buffer must not be read as a whole.
    headers: Buffer,
    /// Queue pair and route of each sender; `None` until the receive completes.
    senders: Box<[Option<(u32, Arrival)>]>,
    /// Address handle of the latest send in each slot, kept until the next send in that slot.
    handles: Box<[Option<Arc<AddressHandle>>]>,
}

impl DatagramSlots {
    pub(in crate::endpoint) fn new(identity: DatagramIdentity, sends: u32, receives: u32) -> Result<Self> {
        let [sends, receives] = [sends, receives].map(slot_count);
        Ok(DatagramSlots {
            headers: identity.pd().allocate(receives * Grh::LEN)?,
            identity,
            senders: vec![None; receives].into(),
            handles: vec![None; sends].into(),
        })
    }

    /// Memory for the header of the receive with this number.
    pub(in crate::endpoint) fn header(&mut self, receive: u64) -> Sge {
        let slot_index = slot_index(receive, self.senders.len());
        if let Some(sender) = self.senders.get_mut(slot_index) {
            *sender = None;
        }
        let address = self.headers.address() + (slot_index * Grh::LEN) as u64;
        Sge { address, len: Grh::LEN as u32, lkey: self.headers.lkey() }
    }

    /// Records the sender of the receive with this number.
    pub(in crate::endpoint) fn record_sender(&mut self, receive: u64, completion: &WorkCompletion<'_>) {
        let slot_index = slot_index(receive, self.senders.len());
        if let Some(sender) = self.senders.get_mut(slot_index) {
            *sender = completion.src_qp().zip(Arrival::of(completion));
        }
    }

    /// The sender of a datagram that was just taken: its receive is not posted again yet. `None` for any other completion.
    pub(in crate::endpoint) fn sender_of(&self, taken: &Completion) -> Option<DatagramSender> {
        let is_arrival = taken.id.is_receive() && taken.status == WcStatus::SUCCESS;
        if is_arrival { self.sender(taken.id.0) } else { None }
    }

    /// The sender of the receive with this number, which must have completed and not be posted again.
    fn sender(&self, receive: u64) -> Option<DatagramSender> {
        let slot_index = slot_index(receive, self.senders.len());
        let (qp_num, arrival) = (*self.senders.get(slot_index)?)?;
        // SAFETY: `headers` has initialised bytes for each slot, and the slot is in range. The device writes only the
        // headers of posted receives. This receive is not posted: posting clears its sender.
        let header = unsafe { self.headers.as_ptr_of(slot_index * Grh::LEN).cast::<[u8; Grh::LEN]>().read() };
        Some(DatagramSender::new(qp_num, self.identity.host_port(), arrival, Grh::parse(&header)?))
    }

    /// Keeps the address handle of the send with this number.
    pub(in crate::endpoint) fn keep_handle(&mut self, send: u64, handle: &Arc<AddressHandle>) {
        let slot_index = slot_index(send, self.handles.len());
        if let Some(slot) = self.handles.get_mut(slot_index) {
            *slot = Some(Arc::clone(handle));
        }
    }
}

/// The slot of a sequence number, below `slots`, which is a power of two.
///
/// Sequence numbers start at 1. The callers still index by `get`, because the compiler cannot prove the bound and would
/// emit a panic.
fn slot_index(number: u64, slots: usize) -> usize {
    (number & !RECEIVE).wrapping_sub(1) as usize & (slots - 1)
}
