//! Requests that wait for the program.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::ConnectionId;

/// The requests and lookups of a listener that the program has not taken yet.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Backlog {
    limit: usize,
    waiting: BTreeMap<ConnectionId, Waiting>,
    /// The same by source, in the order of their arrival.
    by_source: BTreeMap<IpAddr, BTreeMap<u64, ConnectionId>>,
    /// Number of requests of each source.
    by_count: BTreeSet<(usize, IpAddr)>,
    /// Requests that have arrived once, in the order of their arrival.
    unrepeated: BTreeMap<u64, ConnectionId>,
    /// Requests that have ended, by arrival.
    ended: BTreeMap<u64, ConnectionId>,
    /// Requests that have ever waited here.
    arrivals: u64,
}

/// A request that waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Waiting {
    source: IpAddr,
    arrival: u64,
}

impl Backlog {
    pub(super) fn new(limit: usize) -> Self {
        Backlog {
            limit,
            waiting: BTreeMap::new(),
            by_source: BTreeMap::new(),
            by_count: BTreeSet::new(),
            unrepeated: BTreeMap::new(),
            ended: BTreeMap::new(),
            arrivals: 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= self.limit
    }

    pub(super) fn push(&mut self, id: ConnectionId, source: IpAddr, is_repeated: bool) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.waiting.insert(id, Waiting { source, arrival });
        self.change_source(source, |requests| _ = requests.insert(arrival, id));
        if !is_repeated {
            self.unrepeated.insert(arrival, id);
        }
    }

    pub(super) fn remove(&mut self, id: ConnectionId) {
        let Some(Waiting { source, arrival }) = self.waiting.remove(&id) else { return };
        self.change_source(source, |requests| _ = requests.remove(&arrival));
        self.unrepeated.remove(&arrival);
        self.ended.remove(&arrival);
    }

    /// Notes that the peer has ended a request, or is gone.
    pub(super) fn end(&mut self, id: ConnectionId) {
        if let Some(Waiting { arrival, .. }) = self.waiting.get(&id) {
            self.unrepeated.remove(arrival);
            self.ended.insert(*arrival, id);
        }
    }

    /// Notes that the peer has retransmitted a request.
    pub(super) fn repeat(&mut self, id: ConnectionId) {
        if let Some(Waiting { arrival, .. }) = self.waiting.get(&id) {
            self.unrepeated.remove(arrival);
        }
    }

    pub(super) fn into_ids(self) -> impl Iterator<Item = ConnectionId> {
        let in_order: BTreeMap<u64, ConnectionId> =
            self.waiting.iter().map(|(id, waiting)| (waiting.arrival, *id)).collect();
        in_order.into_values()
    }

    /// The request of a full backlog that gives its place to a request from `source`.
    ///
    /// A request that has ended gives it up first. The sources share the backlog: the source with the most requests gives up its
    /// newest one if another source would have fewer requests even with one more. Among sources with the same share, a
    /// retransmission takes the place of a request that has arrived once. A peer that retransmits is real, or a forger that had to
    /// send more.
    pub(super) fn displaced_by(&self, source: IpAddr, is_repeated: bool) -> Option<ConnectionId> {
        if let Some((_, id)) = self.ended.first_key_value() {
            return Some(*id);
        }
        let own = self.by_source.get(&source).map_or(0, BTreeMap::len);
        let (most, busiest) = self.by_count.last()?;
        // Two sources that both flood the listener must not displace each other for ever.
        if *most > own + 1 {
            return self.by_source.get(busiest)?.last_key_value().map(|(_, id)| *id);
        }
        self.unrepeated.last_key_value().filter(|_| is_repeated).map(|(_, id)| *id)
    }

    fn change_source(&mut self, source: IpAddr, change: impl FnOnce(&mut BTreeMap<u64, ConnectionId>)) {
        let requests = self.by_source.entry(source).or_default();
        self.by_count.remove(&(requests.len(), source));
        change(requests);
        let count = requests.len();
        if count == 0 {
            self.by_source.remove(&source);
        } else {
            self.by_count.insert((count, source));
        }
    }

    /// Panics if the indexes do not agree.
    pub(super) fn assert_consistent(&self) {
        assert!(self.waiting.len() <= self.limit, "{} requests, {} places", self.waiting.len(), self.limit);
        let by_source = self.by_source.values().map(BTreeMap::len).sum::<usize>();
        let by_count = self.by_count.iter().map(|(count, _)| count).sum::<usize>();
        assert_eq!((by_source, by_count), (self.waiting.len(), self.waiting.len()));
        for (arrival, id) in self.unrepeated.iter().chain(&self.ended) {
            assert_eq!(self.waiting[id].arrival, *arrival);
        }
    }

    pub(super) fn has(&self, id: ConnectionId) -> bool {
        self.waiting.contains_key(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    #[test]
    fn the_busiest_source_gives_its_newest_request_to_another_source() {
        let mut backlog = Backlog::new(3);
        (1..=3).for_each(|id| backlog.push(id, address(1), false));
        assert!(backlog.is_full());
        assert_eq!(backlog.displaced_by(address(1), false), None);
        assert_eq!(backlog.displaced_by(address(2), false), Some(3));
        backlog.remove(3);
        backlog.push(4, address(2), false);
        assert_eq!(backlog.displaced_by(address(2), false), None, "both would displace each other for ever");
        assert_eq!(backlog.displaced_by(address(3), false), Some(2));
        backlog.assert_consistent();
    }

    #[test]
    fn a_retransmission_displaces_the_newest_request_that_arrived_once() {
        let mut backlog = Backlog::new(3);
        (1..=3).for_each(|id| backlog.push(id.into(), address(id), false));
        assert_eq!(backlog.displaced_by(address(4), false), None);
        backlog.repeat(3);
        assert_eq!(backlog.displaced_by(address(4), true), Some(2));
        [1, 2].into_iter().for_each(|id| backlog.repeat(id));
        assert_eq!(backlog.displaced_by(address(4), true), None);
        backlog.assert_consistent();
        assert_eq!(backlog.into_ids().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_request_that_has_ended_gives_its_place_to_any_other() {
        let mut backlog = Backlog::new(3);
        (1..=3).for_each(|id| backlog.push(id, address(1), false));
        [2, 3].into_iter().for_each(|id| backlog.end(id));
        assert!(backlog.is_full());
        assert_eq!(backlog.displaced_by(address(1), false), Some(2));
        backlog.remove(2);
        assert_eq!(backlog.displaced_by(address(2), false), Some(3));
        backlog.assert_consistent();
    }
}
