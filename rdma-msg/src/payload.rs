//! What a program sends.

use std::collections::VecDeque;
use std::fmt;
use std::hint::black_box;
use std::io::IoSlice;
use std::mem;

use rdma_safe::{Buffer, ProtectionDomain, ReadableRegion, SharedBuffer};

use crate::parts::Parts;
use crate::wire::MAX_OFFER_PARTS;

/// The bytes of a message to send: a slice, a list of slices, or memory that moves into the channel.
///
/// Long memory that moves in is not copied: `Vec<u8>`, `String`, `Bytes`, [`Buffer`], [`SharedBuffer`], and a `Vec` of up to 16 of
/// one of the last three, where empty ones do not count. The length of the whole message decides; see
/// [`Connector::rendezvous_threshold`](crate::Connector::rendezvous_threshold). Everything else is copied into packets. So a header
/// and its payload are one message by `channel.send(vec![header, payload])`, where both are `Bytes`.
///
/// A [`Message`](crate::Message) moves in, too. If its bytes are in a packet, they are copied first.
pub struct Payload<'a>(Source<'a>);

enum Source<'a> {
    Slice(&'a [u8]),
    List(&'a [IoSlice<'a>]),
    Vec(Vec<u8>),
    Buffer(Buffer),
    Segment(Segment),
    Segments(Vec<Segment>),
}

/// Memory that does not change, and that is cheap to clone.
#[derive(Clone)]
enum Segment {
    Shared(SharedBuffer),
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
}

impl Segment {
    fn slice(&self) -> &[u8] {
        match self {
            Segment::Shared(buffer) => buffer,
            #[cfg(feature = "bytes")]
            Segment::Bytes(bytes) => bytes,
        }
    }

    /// Registers it for local work, unless it is registered already.
    fn share(&self, pd: &ProtectionDomain) -> Option<SharedBuffer> {
        match self {
            Segment::Shared(buffer) => is_same(buffer.pd(), pd).then(|| buffer.clone()),
            #[cfg(feature = "bytes")]
            Segment::Bytes(bytes) => pd.share(bytes.clone()).ok(),
        }
    }

    /// Registers it for peers to read.
    fn expose(&self, pd: &ProtectionDomain) -> Option<ReadableRegion> {
        match self.clone() {
            Segment::Shared(buffer) => pd.expose_read_only(buffer).ok(),
            #[cfg(feature = "bytes")]
            Segment::Bytes(bytes) => pd.expose_read_only(bytes).ok(),
        }
    }
}

impl Payload<'_> {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Source::List(list) => list.iter().map(|slice| slice.len()).sum(),
            Source::Segments(parts) => parts.iter().map(|part| part.slice().len()).sum(),
            _ => self.slice().len(),
        }
    }

    /// Whether the message has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether its memory moves in.
    pub(crate) fn is_owned(&self) -> bool {
        !matches!(self.0, Source::Slice(_) | Source::List(_))
    }

    /// Registers memory that moves in, to write it to the peer. `None` if it has too many parts, is of another domain, or cannot be
    /// registered.
    pub(crate) fn register(&mut self, pd: &ProtectionDomain) -> Option<VecDeque<SharedBuffer>> {
        match mem::replace(&mut self.0, Source::Slice(&[])) {
            Source::Vec(bytes) => match pd.try_register(bytes) {
                Ok(buffer) => self.0 = Source::Buffer(buffer),
                Err(error) => self.0 = Source::Vec(error.memory),
            },
            other => self.0 = other,
        }
        self.freeze();
        // A vector that cannot be registered has no parts.
        let is_possible = (1..=MAX_OFFER_PARTS).contains(&self.parts().count());
        if is_possible { self.parts().map(|part| part.share(pd)).collect() } else { None }
    }

    /// A buffer becomes memory that can be shared.
    fn freeze(&mut self) {
        match mem::replace(&mut self.0, Source::Slice(&[])) {
            Source::Buffer(buffer) => self.0 = Source::Segment(Segment::Shared(buffer.freeze())),
            other => self.0 = other,
        }
    }

    /// Registers memory that moves in, for the peer to read. `None` if it has too many parts, or cannot be registered. It is then
    /// copied.
    pub(crate) fn expose(&mut self, pd: &ProtectionDomain) -> Option<Parts<ReadableRegion>> {
        match mem::replace(&mut self.0, Source::Slice(&[])) {
            Source::Vec(bytes) => match pd.expose_read_only(bytes) {
                Ok(region) => return Some(region.into()),
                Err(error) => self.0 = Source::Vec(error.memory),
            },
            other => self.0 = other,
        }
        self.freeze();
        if self.parts().count() > MAX_OFFER_PARTS {
            return None;
        }
        let mut regions = self.parts().map(|part| part.expose(pd));
        Some(Parts { first: regions.next()??, rest: regions.collect::<Option<_>>()? })
    }

    /// The parts of memory that can be shared.
    fn parts(&self) -> impl Iterator<Item = &Segment> {
        let parts = match &self.0 {
            Source::Segment(part) => std::slice::from_ref(part),
            Source::Segments(parts) => &parts[..],
            _ => &[],
        };
        parts.iter().filter(|part| !part.slice().is_empty())
    }

    /// Reads a byte of each page, so that a copy right afterwards does not wait for a disk.
    #[inline]
    pub(crate) fn touch(&self) {
        match &self.0 {
            Source::List(list) => list.iter().for_each(|slice| touch(slice)),
            Source::Segments(parts) => parts.iter().for_each(|part| touch(part.slice())),
            _ => touch(self.slice()),
        }
    }

    /// Copies the bytes from `offset` on, as many as `target` has room for.
    pub(crate) fn copy(&self, offset: usize, target: &mut [u8]) {
        match &self.0 {
            Source::List(list) => copy(list.iter().map(|slice| &**slice), offset, target),
            Source::Segments(parts) => copy(parts.iter().map(Segment::slice), offset, target),
            _ => copy([self.slice()].into_iter(), offset, target),
        }
    }

    /// The bytes of anything but a list.
    fn slice(&self) -> &[u8] {
        match &self.0 {
            Source::Slice(slice) => slice,
            Source::List(_) | Source::Segments(_) => &[],
            Source::Vec(bytes) => bytes,
            Source::Buffer(buffer) => buffer,
            Source::Segment(part) => part.slice(),
        }
    }
}

/// Whether work on a queue pair of `pd` can use memory of `other`.
fn is_same(other: &ProtectionDomain, pd: &ProtectionDomain) -> bool {
    other.as_raw() == pd.as_raw()
}

/// Reads a byte of each page of a slice.
#[inline(always)]
pub(crate) fn touch(slice: &[u8]) {
    const PAGE: usize = 4096;
    slice.chunks(PAGE).filter_map(<[u8]>::first).chain(slice.last()).for_each(|byte| {
        black_box(*byte);
    });
}

/// Copies the bytes of slices, as if they were one, from `offset` on.
#[inline(always)]
fn copy<'s>(slices: impl Iterator<Item = &'s [u8]>, mut offset: usize, mut target: &mut [u8]) {
    for slice in slices {
        let Some(rest) = slice.get(offset..) else {
            offset -= slice.len();
            continue;
        };
        offset = 0;
        let (head, tail) = target.split_at_mut(rest.len().min(target.len()));
        head.copy_from_slice(&rest[..head.len()]);
        target = tail;
    }
}

impl fmt::Debug for Payload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<'a> From<&'a [u8]> for Payload<'a> {
    fn from(slice: &'a [u8]) -> Self {
        Payload(Source::Slice(slice))
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Payload<'a> {
    fn from(array: &'a [u8; N]) -> Self {
        Payload(Source::Slice(array))
    }
}

impl<'a> From<&'a str> for Payload<'a> {
    fn from(text: &'a str) -> Self {
        Payload(Source::Slice(text.as_bytes()))
    }
}

impl<'a> From<&'a Vec<u8>> for Payload<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Payload(Source::Slice(bytes))
    }
}

impl<'a> From<&'a [IoSlice<'a>]> for Payload<'a> {
    fn from(list: &'a [IoSlice<'a>]) -> Self {
        Payload(Source::List(list))
    }
}

impl From<Vec<u8>> for Payload<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Payload(Source::Vec(bytes))
    }
}

impl From<String> for Payload<'_> {
    fn from(text: String) -> Self {
        Payload(Source::Vec(text.into_bytes()))
    }
}

impl From<Buffer> for Payload<'_> {
    fn from(buffer: Buffer) -> Self {
        Payload(Source::Buffer(buffer))
    }
}

impl From<SharedBuffer> for Payload<'_> {
    fn from(buffer: SharedBuffer) -> Self {
        Payload(Source::Segment(Segment::Shared(buffer)))
    }
}

impl From<Vec<Buffer>> for Payload<'_> {
    fn from(buffers: Vec<Buffer>) -> Self {
        Payload(Source::Segments(buffers.into_iter().map(|buffer| Segment::Shared(buffer.freeze())).collect()))
    }
}

impl From<Vec<SharedBuffer>> for Payload<'_> {
    fn from(buffers: Vec<SharedBuffer>) -> Self {
        Payload(Source::Segments(buffers.into_iter().map(Segment::Shared).collect()))
    }
}

impl From<crate::Message> for Payload<'_> {
    /// Copies the bytes only if they are in a packet.
    fn from(message: crate::Message) -> Self {
        match message.into_read() {
            Ok(buffer) => buffer.into(),
            Err(message) => message.into_vec().into(),
        }
    }
}

impl<'a> From<&'a crate::Message> for Payload<'a> {
    fn from(message: &'a crate::Message) -> Self {
        Payload(Source::Slice(message))
    }
}

#[cfg(feature = "bytes")]
impl From<bytes::Bytes> for Payload<'_> {
    fn from(bytes: bytes::Bytes) -> Self {
        Payload(Source::Segment(Segment::Bytes(bytes)))
    }
}

#[cfg(feature = "bytes")]
impl From<Vec<bytes::Bytes>> for Payload<'_> {
    fn from(list: Vec<bytes::Bytes>) -> Self {
        Payload(Source::Segments(list.into_iter().map(Segment::Bytes).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn memory_that_cannot_be_registered_is_neither_lost_nor_written() {
        rdma_safe::soft::install().unwrap();
        let pd = rdma_safe::Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
        // No region is empty, and no list has so many parts.
        let many = vec![pd.allocate(10).unwrap().freeze(); MAX_OFFER_PARTS + 1];
        for mut payload in [Payload::from(Vec::<u8>::new()), Payload::from(many)] {
            let len = payload.len();
            assert!(payload.register(&pd).is_none() && payload.expose(&pd).is_none());
            assert_eq!(payload.len(), len);
        }
    }

    #[test]
    fn lists_are_copied_as_if_they_were_one_slice() {
        let parts = [b"ab".as_slice(), b"", b"cdef", b"g"].map(IoSlice::new);
        let list = Payload::from(&parts[..]);
        let whole = Payload::from(b"abcdefg");
        assert_eq!((list.len(), whole.len()), (7, 7));
        for offset in 0..=8 {
            for len in 0..=8 {
                let [mut one, mut other] = [[b'-'; 8]; 2];
                list.copy(offset, &mut one[..len]);
                whole.copy(offset, &mut other[..len]);
                assert_eq!(one, other, "{offset} {len}");
            }
        }
    }
}
