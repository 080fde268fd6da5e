//! A reader and a writer for big-endian fields.

use std::mem;

/// Bytes that are still to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// Reads a byte and a 24-bit field.
    pub(super) fn byte_and_u24(&mut self) -> Option<(u8, u32)> {
        self.u32().map(|word| ((word >> 24) as u8, word & 0xff_ffff))
    }

    /// Reads a 24-bit field and a byte.
    pub(super) fn u24_and_byte(&mut self) -> Option<(u32, u8)> {
        self.u32().map(|word| (word >> 8, word as u8))
    }
}

/// Space for fields that are still to be written.
///
/// A write panics if the space is too small.
#[derive(Debug)]
pub(super) struct Writer<'a>(pub(super) &'a mut [u8]);

impl Writer<'_> {
    pub(super) fn put(&mut self, field: &[u8]) {
        let (space, rest) = mem::take(&mut self.0).split_at_mut(field.len());
        space.copy_from_slice(field);
        self.0 = rest;
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.put(&value.to_be_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }

    /// Writes the lower 24 bits of a field, and a byte.
    pub(super) fn u24_and_byte(&mut self, field: u32, byte: u8) {
        self.u32(field << 8 | u32::from(byte));
    }
}
