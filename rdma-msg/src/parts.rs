//! Memory of one or more parts.

use std::{iter, vec};

use rdma_safe::RemoteMemory;

/// The parts of a message in memory, in order: at least one. A message of one part needs no allocation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Parts<T> {
    pub(crate) first: T,
    pub(crate) rest: Vec<T>,
}

impl<T> Parts<T> {
    /// `None` if there are no parts.
    pub(crate) fn new(parts: impl IntoIterator<Item = T>) -> Option<Self> {
        let mut parts = parts.into_iter();
        Some(Parts { first: parts.next()?, rest: parts.collect() })
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.rest.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        iter::once(&self.first).chain(&self.rest)
    }
}

impl Parts<RemoteMemory> {
    /// Length of all parts in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.iter().map(|part| part.len).sum()
    }
}

impl<T> From<T> for Parts<T> {
    fn from(first: T) -> Self {
        Parts { first, rest: Vec::new() }
    }
}

impl<T> IntoIterator for Parts<T> {
    type Item = T;
    type IntoIter = iter::Chain<iter::Once<T>, vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        iter::once(self.first).chain(self.rest)
    }
}
