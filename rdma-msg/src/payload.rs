//! What a program sends.

use std::fmt;
use std::io::IoSlice;

use rdma_safe::mr::RegisterError;
use rdma_safe::{Buffer, ProtectionDomain, ReadableRegion, SharedBuffer};

/// The bytes of a message to send: a slice, a list of slices, or memory that moves into the channel.
///
/// The peer reads long memory that moves in where it is: `Vec<u8>`, `Bytes` and registered buffers; see
/// [`Connector::rendezvous_threshold`](crate::Connector::rendezvous_threshold). Everything else is copied into packets.
pub struct Payload<'a>(Source<'a>);

enum Source<'a> {
    Slice(&'a [u8]),
    List(&'a [IoSlice<'a>]),
    Vec(Vec<u8>),
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
    Buffer(Buffer),
    /// A buffer that cannot be exposed.
    Shared(SharedBuffer),
}

impl Payload<'_> {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Source::List(list) => list.iter().map(|slice| slice.len()).sum(),
            _ => self.slice().len(),
        }
    }

    /// Whether the message has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Registers memory that the peer can read in place, if the message has at least `least` bytes. `None` if the message is
    /// shorter, borrowed, or cannot be registered. It is then copied.
    pub(crate) fn expose(&mut self, pd: &ProtectionDomain, least: usize) -> Option<ReadableRegion> {
        if self.len() < least.max(1) {
            return None;
        }
        let (region, source) = match std::mem::replace(&mut self.0, Source::Slice(&[])) {
            Source::Vec(bytes) => region_or_source(pd.expose_read_only(bytes), Source::Vec),
            #[cfg(feature = "bytes")]
            Source::Bytes(bytes) => region_or_source(pd.expose_read_only(bytes), Source::Bytes),
            Source::Buffer(buffer) => region_or_source(pd.expose_read_only(buffer.freeze()), Source::Shared),
            copied => (None, Some(copied)),
        };
        self.0 = source.unwrap_or(Source::Slice(&[]));
        region
    }

    /// Copies the bytes from `offset` on, as many as `target` has room for.
    pub(crate) fn copy(&self, mut offset: usize, mut target: &mut [u8]) {
        let Source::List(list) = &self.0 else {
            if let Some(rest) = self.slice().get(offset..) {
                let len = rest.len().min(target.len());
                target[..len].copy_from_slice(&rest[..len]);
            }
            return;
        };
        for slice in *list {
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

    /// The bytes of anything but a list.
    fn slice(&self) -> &[u8] {
        match &self.0 {
            Source::Slice(slice) => slice,
            Source::List(_) => &[],
            Source::Vec(bytes) => bytes,
            #[cfg(feature = "bytes")]
            Source::Bytes(bytes) => bytes,
            Source::Buffer(buffer) => buffer,
            Source::Shared(buffer) => buffer,
        }
    }
}

/// The region, or the memory to copy.
fn region_or_source<'a, M>(
    exposed: Result<ReadableRegion, RegisterError<M>>,
    copied: impl FnOnce(M) -> Source<'a>,
) -> (Option<ReadableRegion>, Option<Source<'a>>) {
    match exposed {
        Ok(region) => (Some(region), None),
        Err(error) => (None, Some(copied(error.memory))),
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

impl From<crate::Message> for Payload<'_> {
    fn from(message: crate::Message) -> Self {
        Payload(Source::Vec(message.into_vec()))
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
        Payload(Source::Bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
