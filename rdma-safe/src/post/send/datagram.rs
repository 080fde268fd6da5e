//! Sends of unreliable datagrams.

use super::super::{Payload, PostError, WorkRequest};
use super::SendBatch;
use super::destination::{Destination, UdTarget};
use crate::branch::rare;
use crate::interface::Interface;

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `payload` to `to` as one packet: `ibv_wr_send` and `ibv_wr_set_ud_addr`. UD queue pairs only.
    ///
    /// The receive at the peer needs [`Grh::LEN`](crate::address::Grh::LEN) bytes in addition to the payload. A datagram is
    /// dropped without notice to the sender if no receive is posted or the queue key does not match.
    ///
    /// # Errors
    /// Those of [`SendBatch::send`]; [`PostError::NotDatagram`] on other queue pairs; [`PostError::DatagramTooLong`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_set_ud_addr")]
    #[inline(always)]
    pub unsafe fn send_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        self.check_datagram(&payload)?;
        // SAFETY: the caller's contract.
        unsafe { self.add_send(Destination::Datagram(to), wr, payload) }
    }

    /// Like [`SendBatch::send_to`], with immediate data in host byte order: `ibv_wr_send_imm` and `ibv_wr_set_ud_addr`.
    ///
    /// # Errors
    /// Those of [`SendBatch::send_to`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send_imm_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        self.check_datagram(&payload)?;
        // SAFETY: the caller's contract.
        unsafe { self.add_send_imm(Destination::Datagram(to), wr, imm, payload) }
    }

    /// Checks that the payload fits in one packet. Some devices drop a longer datagram and report success.
    #[inline(always)]
    fn check_datagram(&self, payload: &impl Payload) -> Result<(), PostError> {
        let (len, max) = (payload.bytes(), self.info.limits.max_datagram);
        if len > u64::from(max) {
            rare();
            return Err(match max {
                u16::MAX => PostError::NotDatagram,
                max => PostError::DatagramTooLong { len, max: max.into() },
            });
        }
        Ok(())
    }
}
