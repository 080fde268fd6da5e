//! Memory of a peer.

use std::fmt;

use crate::{Error, Result};

/// Location of a peer's memory, and the key to it, from [`ExposedRegion::remote`](crate::ExposedRegion::remote).
///
/// Exchange it out of band; with the feature `serde` it can be serialised. A plain value that gets no further fields.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RemoteMemory {
    /// Address in the peer's address space.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Remote key.
    pub rkey: u32,
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteMemory")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("rkey", &format_args!("{:#x}", self.rkey))
            .finish()
    }
}

impl RemoteMemory {
    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] when they are not within the memory.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RemoteMemory> {
        let out_of_bounds =
            || Error::OutOfBounds { offset: offset as usize, len: len as usize, region: self.len as usize };
        match (offset.checked_add(len), self.address.checked_add(offset)) {
            (Some(end), Some(address)) if end <= self.len => Ok(RemoteMemory { address, len, rkey: self.rkey }),
            _ => Err(out_of_bounds()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_never_leaves_its_memory() {
        let memory = RemoteMemory { address: 0x1000, len: 100, rkey: 7 };
        assert_eq!(memory.slice(40, 60).unwrap(), RemoteMemory { address: 0x1028, len: 60, rkey: 7 });
        assert_eq!(memory.slice(100, 0).unwrap().len, 0);
        assert!(memory.slice(41, 60).is_err());
        assert!(memory.slice(u64::MAX, 2).is_err());
        let forged = RemoteMemory { address: u64::MAX - 10, len: u64::MAX, rkey: 7 };
        assert!(forged.slice(11, 1).is_err(), "an address that wraps is refused");
    }
}
