//! Bytes of packets that may still be in shared memory.

#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Bytes of a packet, in private memory or in memory that a peer may write at any time.
///
/// Two copies of the same bytes may differ. So check a copy, and then use that copy.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    start: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> Data<'a> {
    /// Refers to `len` bytes at `start`.
    ///
    /// # Safety
    /// The `len` bytes at `start` are valid for reads during `'a`. This process does not write them during that time. Other
    /// processes may.
    #[must_use]
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Data<'a> {
        Data { start, len, memory: PhantomData }
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Address of the first byte. All bytes are valid for reads during `'a`.
    #[must_use]
    pub fn as_ptr(self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The first `at` bytes, and the others. `None` if `at` exceeds the length.
    #[must_use]
    pub fn split_at(self, at: usize) -> Option<(Data<'a>, Data<'a>)> {
        let after = self.len.checked_sub(at)?;
        // SAFETY: both parts are within these bytes.
        unsafe { Some((Data { len: at, ..self }, Data { start: self.start.add(at), len: after, ..self })) }
    }

    /// Parts of `len` bytes, the last perhaps shorter. `len` is at least 1.
    #[must_use]
    pub fn chunks(self, len: usize) -> Chunks<'a> {
        Chunks { rest: self, len }
    }

    /// Copies the bytes.
    ///
    /// # Panics
    /// `to` has another length.
    pub fn copy_to(self, to: &mut [u8]) {
        assert_eq!(self.len, to.len());
        // SAFETY: the bytes are valid for reads. They do not overlap `to`, because this process does not write them while `self`
        // exists. If another process writes them, the copy has old and new bytes.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(self.as_ptr(), self.len) };
    }

    /// A copy of the bytes. `None` unless there are exactly `N`.
    #[must_use]
    pub fn to_array<const N: usize>(self) -> Option<[u8; N]> {
        let mut array = [0; N];
        (self.len == N).then(|| {
            self.copy_to(&mut array);
            array
        })
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }
}

/// Iterator over parts of equal length, from [`Data::chunks`]. The last part may be shorter.
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    rest: Data<'a>,
    len: usize,
}

impl<'a> Chunks<'a> {
    /// Returns `accept` of the next part. Advances only if that is `Some`.
    pub fn next_if<T>(&mut self, accept: impl FnOnce(Data<'a>) -> Option<T>) -> Option<T> {
        let mut after = self.clone();
        let accepted = accept(after.next()?)?;
        *self = after;
        Some(accepted)
    }

    /// Length of a part. The last may be shorter.
    #[must_use]
    pub fn chunk_len(&self) -> usize {
        self.len
    }

    /// Number of remaining parts.
    #[must_use]
    pub fn remaining(&self) -> usize {
        // Most messages are one packet, which needs no division.
        if self.rest.len() <= self.len {
            (!self.rest.is_empty()).into()
        } else {
            self.rest.len().div_ceil(self.len.max(1))
        }
    }

    /// All remaining bytes.
    #[must_use]
    pub fn rest(&self) -> Data<'a> {
        self.rest
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Data<'a>;

    fn next(&mut self) -> Option<Data<'a>> {
        let (chunk, after) = self.rest.split_at(self.len.min(self.rest.len)).filter(|(chunk, _)| !chunk.is_empty())?;
        self.rest = after;
        Some(chunk)
    }
}

impl<'a> From<&'a [u8]> for Data<'a> {
    fn from(bytes: &'a [u8]) -> Data<'a> {
        Data { start: NonNull::from(bytes).cast(), len: bytes.len(), memory: PhantomData }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Data<'a> {
    fn from(bytes: &'a [u8; N]) -> Data<'a> {
        Data::from(&bytes[..])
    }
}

impl<'a> From<&'a Vec<u8>> for Data<'a> {
    fn from(bytes: &'a Vec<u8>) -> Data<'a> {
        Data::from(&bytes[..])
    }
}

/// Compares copies.
impl PartialEq for Data<'_> {
    fn eq(&self, other: &Data<'_>) -> bool {
        self.to_vec() == other.to_vec()
    }
}

impl Eq for Data<'_> {}

impl fmt::Debug for Data<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_vec().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_split_like_those_of_a_slice() {
        let bytes: Vec<u8> = (0..10).collect();
        let data = Data::from(&bytes);
        for at in 0..=10 {
            let (before, after) = data.split_at(at).unwrap();
            assert_eq!((before.to_vec(), after.to_vec()), (bytes[..at].to_vec(), bytes[at..].to_vec()));
        }
        assert_eq!(data.split_at(11), None);
        for len in 1..=11 {
            let chunks: Vec<_> = data.chunks(len).map(Data::to_vec).collect();
            assert_eq!(chunks, bytes.chunks(len).map(<[u8]>::to_vec).collect::<Vec<_>>(), "{len}");
            assert_eq!(data.chunks(len).remaining(), chunks.len());
        }
        let mut chunks = data.chunks(4);
        assert_eq!(chunks.next_if(|_| None::<()>), None);
        assert_eq!(chunks.next_if(|chunk| chunk.to_array::<4>()), Some([0, 1, 2, 3]));
        assert_eq!((chunks.rest().to_vec(), chunks.remaining()), (bytes[4..].to_vec(), 2));
        assert_eq!(Data::from(&[]).chunks(4).remaining(), 0);
        assert_eq!((data.to_array::<10>().unwrap()[9], data.to_array::<9>()), (9, None));
    }
}
