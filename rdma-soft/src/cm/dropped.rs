//! A memory of requests that found no room in a backlog.

use std::net::IpAddr;

use crate::random::mix;

/// Places of the memory of dropped requests: 128 KiB, for half a second of a flood of 65 000 requests a second.
const PLACES: usize = 1 << 15;

/// A memory of requests that were dropped because a backlog was full, to recognize their retransmissions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Dropped {
    seed: u64,
    /// Upper halves of hashes of requests, at the places that the lower halves name. Empty until a request is dropped.
    marks: Vec<u32>,
}

impl Dropped {
    pub(super) fn new(seed: u64) -> Self {
        Dropped { seed: mix(seed), marks: Vec::new() }
    }

    /// Remembers that a request was dropped.
    pub(super) fn insert(&mut self, source: IpAddr, guid: u64, remote_id: u32) {
        self.marks.resize(PLACES, 0);
        let (place, mark) = self.place(source, guid, remote_id);
        self.marks[place] = mark;
    }

    /// Whether a request was probably dropped before.
    pub(super) fn contains(&self, source: IpAddr, guid: u64, remote_id: u32) -> bool {
        let (place, mark) = self.place(source, guid, remote_id);
        self.marks.get(place) == Some(&mark)
    }

    fn place(&self, source: IpAddr, guid: u64, remote_id: u32) -> (usize, u32) {
        let address = match source {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        };
        let words = [address as u64, (address >> 64) as u64, guid, remote_id.into()];
        let hash = words.into_iter().fold(self.seed, |hash, word| mix(hash ^ word));
        (hash as usize % PLACES, (hash >> 32) as u32 | 1)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const SECOND: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn a_dropped_request_is_remembered() {
        let mut dropped = Dropped::new(1);
        assert!(!dropped.contains(FIRST, 2, 3));
        dropped.insert(FIRST, 2, 3);
        assert!(dropped.contains(FIRST, 2, 3));
        assert!(!dropped.contains(SECOND, 2, 3));
        assert!(!dropped.contains(FIRST, 3, 3));
        assert!(!dropped.contains(FIRST, 2, 4));
    }
}
