//! Packets that are sent together.

use super::Part;
use crate::wire::{Header, ICRC, increment_psn};

/// Packets to send that differ only in PSN and payload.
pub(crate) struct Run<'a> {
    /// Headers of the next packet.
    headers: &'a mut [u8],
    /// Parts that are not copied completely.
    payload: &'a [Part],
    /// Bytes of the first of these parts that are copied.
    copied: usize,
    /// Payload bytes of each packet.
    len: usize,
    /// Bytes of each packet, including padding and CRC.
    packet_len: usize,
    /// Packets that are not written yet.
    left: u32,
}

impl<'a> Run<'a> {
    /// `count` packets with `len` bytes of the payload each. Bytes that the payload lacks are sent as zeros. `headers` are those of
    /// the first packet, starting with the base transport header.
    pub(crate) fn new(headers: &'a mut [u8], payload: &'a [Part], len: usize, count: u32) -> Run<'a> {
        let content = headers.len().saturating_add(len);
        let packet_len = content.saturating_add(Header::padding(content) + ICRC);
        Run { headers, payload, copied: 0, len, packet_len, left: count }
    }

    /// Headers of the next packet.
    pub(super) fn headers(&self) -> &[u8] {
        self.headers
    }

    /// Bytes of each packet, including padding and CRC.
    pub(crate) fn packet_len(&self) -> usize {
        self.packet_len
    }

    /// Whether all packets were written.
    pub(super) fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// Writes the next packet to `to`, with padding, and zeros instead of a CRC.
    ///
    /// # Safety
    /// `to` is valid for writes of [`packet_len`](Run::packet_len) bytes. Each part of the payload is valid for reads, and is not
    /// in that memory. A peer may write to exposed parts concurrently. The packet then has a mix of old and new bytes.
    #[inline]
    pub(super) unsafe fn write_next(&mut self, to: *mut u8) {
        let (mut at, end) = (self.headers.len(), self.headers.len() + self.len);
        // SAFETY: the packet is longer than its headers. The caller promises the rest.
        unsafe { to.copy_from_nonoverlapping(self.headers.as_ptr(), at) };
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            increment_psn(self.headers);
        }
        while let Some((first, rest)) = self.payload.split_first().filter(|_| at < end) {
            let len = (first.len - self.copied).min(end - at);
            if len > 0 {
                // SAFETY: `copied + len` is at most the length of the part, and `at + len` is at most `end`, within the packet. The
                // caller promises the rest.
                unsafe { Part { address: first.address.add(self.copied), len, ..*first }.copy_to(to.add(at)) };
            }
            (at, self.copied) = (at + len, self.copied + len);
            if self.copied == first.len {
                (self.payload, self.copied) = (rest, 0);
            }
        }
        // SAFETY: `at` is not beyond `end`, which is within the packet. Exactly the rest of its `packet_len` bytes is written.
        unsafe {
            match self.packet_len - at {
                // Without padding. A constant length avoids a call of `memset`.
                ICRC => to.add(at).cast::<[u8; ICRC]>().write([0; ICRC]),
                left => to.add(at).write_bytes(0, left),
            }
        }
    }

    /// Appends the next packet like [`write_next`](Run::write_next).
    ///
    /// # Safety
    /// Each part of the payload is valid for reads, and is not in the vector.
    pub(super) unsafe fn append_next(&mut self, to: &mut Vec<u8>) {
        let len = self.packet_len;
        to.reserve(len);
        // SAFETY: `reserve` has made room for the packet, and all bytes of it are written. The caller promises the rest.
        unsafe {
            self.write_next(to.as_mut_ptr().add(to.len()));
            to.set_len(to.len() + len);
        }
    }
}
