//! What a program sends.

use std::fmt;
use std::io::IoSlice;

use rdma_safe::Buffer;

/// The bytes of a message to send: a slice, a list of slices, or memory that moves into the channel.
///
/// The peer reads a long `Vec<u8>` where it is: [`Connector::rendezvous_threshold`](crate::Connector::rendezvous_threshold).
/// Everything else is copied into packets.
pub struct Payload<'a>(Source<'a>);

enum Source<'a> {
    Slice(&'a [u8]),
    List(&'a [IoSlice<'a>]),
    Vec(Vec<u8>),
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
    Buffer(Buffer),
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

    /// Takes memory that the peer can read where it is, if the message has at least `least` bytes.
    pub(crate) fn take_exposable(&mut self, least: usize) -> Option<Vec<u8>> {
        match &mut self.0 {
            Source::Vec(bytes) if bytes.len() >= least.max(1) => Some(std::mem::take(bytes)),
            _ => None,
        }
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
        }
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
