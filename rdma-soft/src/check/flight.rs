//! Work in flight, and the memory that it uses.

use std::backtrace::Backtrace;
use std::collections::{BTreeMap, VecDeque};

use super::memory::{Scratch, read, update};
use super::{Checker, Kind, Report};

/// The queue that work was posted to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Owner {
    /// A queue pair.
    Qp(u32),
    /// A shared receive queue.
    Srq(u32),
}

impl Owner {
    fn qp(self) -> Option<u32> {
        match self {
            Owner::Qp(number) => Some(number),
            Owner::Srq(_) => None,
        }
    }
}

/// A scatter/gather element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    /// First address in this process.
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) key: u32,
}

impl Element {
    fn end(&self) -> u64 {
        self.address + self.len
    }
}

/// Work that was just posted.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) owner: Owner,
    pub(crate) wr_id: u64,
    /// Name of the operation.
    pub(crate) name: &'static str,
    /// Whether the device writes to the elements.
    pub(crate) is_written: bool,
    /// Completion queue that gets its completion, if it is signaled.
    pub(crate) cq: Option<u32>,
    pub(crate) elements: Vec<Element>,
}

/// A receive whose message is longer.
#[derive(Debug)]
pub(crate) struct TooLong {
    pub(crate) qp: u32,
    /// Completion queue of the receive.
    pub(crate) cq: u32,
    pub(crate) srq: Option<u32>,
    /// Identifier of the receive in the checker, or 0.
    pub(crate) work: u64,
    pub(crate) wr_id: u64,
    /// Bytes of the message that have arrived.
    pub(crate) bytes: u64,
    pub(crate) room: u64,
    /// Number of elements of the receive.
    pub(crate) elements: usize,
    pub(crate) first: Option<Element>,
    pub(crate) is_datagram: bool,
}

struct Work {
    posted: Posted,
    backtrace: Option<Backtrace>,
}

/// A range of memory that work in flight uses.
struct Flight {
    /// Expected content of the first bytes.
    copy: Vec<u8>,
    /// Work that uses exactly this range.
    users: VecDeque<u64>,
    /// How many users are work that the device writes to.
    writers: u32,
}

/// The send queue of a queue pair, as the checker knows it.
struct Sends {
    /// Number of the oldest request.
    first: u64,
    work: VecDeque<u64>,
}

/// All work in flight. The maps are trees, whose memory is in proportion to their content: programs are also checked for leaks.
pub(super) struct Flights {
    works: BTreeMap<u64, Work>,
    next: u64,
    sends: BTreeMap<u32, Sends>,
    /// Memory in use, by its first address and the address after its end.
    memory: BTreeMap<(u64, u64), Flight>,
    /// Upper bound of the lengths in `memory`.
    longest: u64,
    /// Bytes of each element that are compared.
    bytes: usize,
    scratch: Box<Scratch>,
}

impl Flights {
    pub(super) fn new(bytes: usize) -> Flights {
        Flights {
            works: BTreeMap::new(),
            // 0 stands for a receive that the checker does not know.
            next: 1,
            sends: BTreeMap::new(),
            memory: BTreeMap::new(),
            longest: 0,
            bytes,
            scratch: Box::new([0; size_of::<Scratch>()]),
        }
    }

    /// The ranges in use that overlap `start..end`.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let from = (start.saturating_sub(self.longest), 0);
        self.memory.range(from..(end, 0)).map(|(range, _)| *range).filter(move |range| range.1 > start)
    }

    /// Finds the first byte of `start..end` that differs from the expected content of a range, and expects the current content
    /// from now on. With `is_readable` the caller has checked that the memory is.
    fn difference(&mut self, range: (u64, u64), start: u64, end: u64, is_readable: bool) -> Option<u64> {
        let flight = self.memory.get_mut(&range)?;
        let from = (start.max(range.0) - range.0) as usize;
        let to = ((end.min(range.1) - range.0) as usize).min(flight.copy.len());
        let expected = flight.copy.get_mut(from..to)?;
        let at = update(range.0 + from as u64, expected, is_readable, &mut self.scratch)?;
        Some(range.0 + (from + at) as u64)
    }

    /// Expects `data` at `address` from now on.
    fn expect(&mut self, range: (u64, u64), address: u64, data: &[u8]) {
        let Some(flight) = self.memory.get_mut(&range) else { return };
        let start = address.max(range.0);
        let end = (address + data.len() as u64).min(range.0 + flight.copy.len() as u64);
        if start < end {
            let (to, from) = ((start - range.0) as usize, (start - address) as usize);
            let len = (end - start) as usize;
            flight.copy[to..to + len].copy_from_slice(&data[from..from + len]);
        }
    }

    /// The work to name in a report about a range: one that the device writes to, if there is one.
    fn user(&self, range: (u64, u64)) -> Option<u64> {
        let flight = self.memory.get(&range)?;
        let is_written = |id: &&u64| self.works.get(id).is_some_and(|work| work.posted.is_written);
        flight.users.iter().find(is_written).or(flight.users.front()).copied()
    }

    /// A report about work.
    fn report(&self, id: u64, kind: Kind, text: impl Into<String>) -> Report {
        let mut report = Report::new(kind, text);
        if let Some(Work { posted, backtrace }) = self.works.get(&id) {
            report.qp = posted.owner.qp();
            report.wr_id = Some(posted.wr_id);
            report.backtrace = backtrace.as_ref().map(ToString::to_string);
        }
        report
    }

    fn name(&self, id: u64) -> &'static str {
        self.works.get(&id).map_or("work", |work| work.posted.name)
    }
}

impl Checker {
    /// Records work, and compares it with other work in flight. Returns its identifier.
    fn posted(&mut self, posted: Posted) -> u64 {
        let id = self.flights.next;
        self.flights.next += 1;
        let backtrace = self.options.backtrace.then(Backtrace::force_capture);
        let (owner, elements, is_written) = (posted.owner, posted.elements.clone(), posted.is_written);
        self.flights.works.insert(id, Work { posted, backtrace });
        for element in elements {
            self.check_overlap(id, owner, &element, is_written);
            self.add_memory(id, &element, is_written);
        }
        id
    }

    fn check_overlap(&mut self, id: u64, owner: Owner, element: &Element, is_written: bool) {
        let object = match owner {
            Owner::Qp(number) => number.into(),
            Owner::Srq(number) => 1 << 32 | u64::from(number),
        };
        if !self.is_new(Kind::Overlap, object) {
            return;
        }
        let flights = &self.flights;
        let conflicts = |range: &(u64, u64)| {
            let flight = flights.memory.get(range);
            flight.is_some_and(|flight| is_written || flight.writers > 0)
        };
        let found = flights.overlapping(element.address, element.end()).find(conflicts);
        let Some((range, other)) = found.and_then(|range| Some((range, flights.user(range)?))) else { return };
        let of = flights.report(other, Kind::Overlap, "");
        let (name, with) = (flights.name(id), flights.name(other));
        let start = range.0.max(element.address);
        let len = range.1.min(element.end()) - start;
        let same = if other == id {
            "another element of the same work request".to_owned()
        } else {
            let qp = of.qp.map(|qp| format!(" of queue pair {qp:#x}")).unwrap_or_default();
            format!("the {with}{qp} with wr_id {:#x}, which has not completed", of.wr_id.unwrap_or(0))
        };
        let text = format!("{} uses the same memory as {same}", with_article(name));
        let mut report = flights.report(id, Kind::Overlap, text);
        report.memory = Some((start, len));
        report.region = self.regions.region(element.key);
        self.report_once(Kind::Overlap, object, || report);
    }

    fn add_memory(&mut self, id: u64, element: &Element, is_written: bool) {
        let range = (element.address, element.end());
        // Other work may use the range, which then has an expected content already.
        if let Some(at) = self.flights.difference(range, range.0, range.1, false) {
            self.report_change(range, at);
        }
        let flights = &mut self.flights;
        if flights.memory.is_empty() {
            flights.longest = 0;
        }
        flights.longest = flights.longest.max(element.len);
        let bytes = flights.bytes;
        let flight = flights.memory.entry(range).or_insert_with(|| {
            let mut copy = vec![0; (element.len as usize).min(bytes)];
            if !read(element.address, &mut copy) {
                copy.clear();
            }
            Flight { copy, users: VecDeque::new(), writers: 0 }
        });
        flight.users.push_back(id);
        flight.writers += u32::from(is_written);
    }

    /// Reports that the program has changed memory that is in use.
    fn report_change(&mut self, range: (u64, u64), at: u64) {
        let Some(user) = self.flights.user(range) else { return };
        self.report_change_of(user, range, at);
    }

    fn report_change_of(&mut self, user: u64, range: (u64, u64), at: u64) {
        let Some(Work { posted, .. }) = self.flights.works.get(&user) else { return };
        let (kind, name) =
            (if posted.is_written { Kind::ReceiveWritten } else { Kind::SendChanged }, with_article(posted.name));
        let key = posted.elements.iter().find(|element| (element.address, element.end()) == range);
        let region = key.and_then(|element| self.regions.region(element.key));
        let offset = at - range.0;
        let text = match kind {
            Kind::SendChanged => format!(
                "the program changed byte {offset} of the data of {name} before its completion, so the peer may get either value"
            ),
            _ => format!("the program wrote byte {offset} of the memory of {name} that has not completed"),
        };
        let mut report = self.flights.report(user, kind, text);
        report.memory = Some((at, range.1 - at));
        report.region = region;
        self.report(report);
    }

    /// Reports a message that is longer than its receive.
    pub(crate) fn receive_too_small(&mut self, found: &TooLong) {
        let TooLong { qp, cq, srq, work, wr_id, bytes, room, elements, first, is_datagram } = *found;
        let queue = srq.map(|srq| format!(" of shared receive queue {srq}")).unwrap_or_default();
        let header = if is_datagram { ", both with the 40 bytes of the global route header" } else { "" };
        let text = format!(
            "a message of at least {bytes} bytes is longer than its receive{queue}, which has {room} bytes in {elements} \
             elements{header}. Its completion is in completion queue {cq}"
        );
        let mut report = self.flights.report(work, Kind::ReceiveTooSmall, text);
        (report.qp, report.wr_id) = (Some(qp), Some(wr_id));
        report.memory = first.map(|element| (element.address, element.len));
        report.region = first.and_then(|element| self.regions.region(element.key));
        self.report(report);
    }

    /// Number of the first request of a send queue that the checker does not know.
    pub(crate) fn next_send(&mut self, qp: u32, head: u64) -> u64 {
        let sends = self.flights.sends.entry(qp).or_insert_with(|| Sends { first: head, work: VecDeque::new() });
        if sends.work.is_empty() {
            sends.first = sends.first.max(head);
        }
        sends.first + sends.work.len() as u64
    }

    /// Records a send work request. Call it for all in their order, from [`Checker::next_send`] on.
    pub(crate) fn posted_send(&mut self, qp: u32, posted: Posted, capacity: u32) {
        self.queues.send_posted(qp, posted.cq);
        if self.queues.unsignaled(qp) == capacity && capacity > 0 {
            let text = format!(
                "the last {capacity} work requests are unsignaled and fill the send queue: an RNIC frees their entries only with \
                 the completion of a later signaled one"
            );
            let report = Report { qp: Some(qp), wr_id: Some(posted.wr_id), ..Report::new(Kind::UnsignaledFull, text) };
            self.report_once(Kind::UnsignaledFull, qp.into(), || report);
        }
        let id = self.posted(posted);
        if let Some(sends) = self.flights.sends.get_mut(&qp) {
            sends.work.push_back(id);
        }
    }

    /// Records a receive, and returns its identifier.
    pub(crate) fn posted_receive(&mut self, posted: Posted) -> u64 {
        self.queues.receive_posted(posted.cq);
        self.posted(posted)
    }

    /// Ends the send work request `number`, the oldest one.
    pub(crate) fn sent(&mut self, qp: u32, number: u64) {
        while let Some(sends) = self.flights.sends.get_mut(&qp).filter(|sends| sends.first <= number) {
            let Some(id) = sends.work.pop_front() else { break };
            sends.first += 1;
            self.done(id);
        }
    }

    /// Ends a receive or other work: verifies its memory, and forgets it.
    pub(crate) fn done(&mut self, id: u64) {
        let Some(work) = self.flights.works.get(&id) else { return };
        for element in work.posted.elements.clone() {
            let range = (element.address, element.end());
            if let Some(at) = self.flights.difference(range, range.0, range.1, false) {
                self.report_change_of(id, range, at);
            }
        }
        self.forget(id);
    }

    /// Forgets work without verifying its memory.
    pub(crate) fn forget(&mut self, id: u64) {
        let flights = &mut self.flights;
        let Some(Work { posted, .. }) = flights.works.remove(&id) else { return };
        self.queues.completed(posted.cq);
        for element in &posted.elements {
            let range = (element.address, element.end());
            let Some(flight) = flights.memory.get_mut(&range) else { continue };
            if let Some(at) = flight.users.iter().position(|user| *user == id) {
                flight.users.remove(at);
                flight.writers -= u32::from(posted.is_written);
            }
            if flight.users.is_empty() {
                flights.memory.remove(&range);
            }
        }
    }

    /// Forgets all work of a queue pair that is reset, or of a queue that is destroyed.
    pub(crate) fn cleared(&mut self, owner: Owner) {
        if let Owner::Qp(number) = owner {
            self.flights.sends.remove(&number);
            for kind in [Kind::Overlap, Kind::ReceiverNotReady, Kind::UnsignaledFull] {
                self.reported.remove(&(kind, number.into()));
            }
            self.queues.cleared(number);
        }
        let of = self.flights.works.iter().filter(|(_, work)| work.posted.owner == owner);
        let ids: Vec<u64> = of.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.forget(id));
    }

    /// Notes that the device is about to write `data` to `address`, and verifies what it overwrites.
    ///
    /// Returns `false` if the memory is not mapped. The device must then not write.
    pub(crate) fn device_writes(&mut self, address: u64, data: &[u8]) -> bool {
        let end = address + data.len() as u64;
        if !super::is_readable(address, data.len() as u64) {
            return false;
        }
        let ranges: Vec<_> = self.flights.overlapping(address, end).collect();
        for range in ranges {
            if let Some(at) = self.flights.difference(range, address, end, true) {
                self.report_change(range, at);
            }
            self.flights.expect(range, address, data);
        }
        true
    }

    /// Notes that the device has changed `len` bytes at `address` in place.
    pub(crate) fn device_updated(&mut self, address: u64, len: u64) {
        let ranges: Vec<_> = self.flights.overlapping(address, address + len).collect();
        for range in ranges {
            _ = self.flights.difference(range, address, address + len, false);
        }
    }

    /// Reports work in flight that uses a region.
    pub(super) fn check_region_in_use(&mut self, key: u32, change: &str) {
        let uses = |work: &Work| work.posted.elements.iter().any(|element| element.key == key);
        let oldest = self.flights.works.iter().filter(|(_, work)| uses(work)).map(|(id, _)| *id).min();
        let Some(id) = oldest else { return };
        let count = self.flights.works.values().filter(|work| uses(work)).count();
        let name = with_article(self.flights.name(id));
        let text = format!("a region was {change} while {count} work requests in flight use it, the oldest {name}");
        let mut report = self.flights.report(id, Kind::Deregistered, text);
        report.region = self.regions.region(key);
        let of_key = |work: &Work| work.posted.elements.iter().find(|element| element.key == key).copied();
        report.memory = self.flights.works.get(&id).and_then(of_key).map(|element| (element.address, element.len));
        self.report(report);
    }

    /// Reports work in flight whose memory the program is about to unmap.
    pub(super) fn unmapping(&mut self, address: u64, len: u64, function: &str) {
        let end = address.saturating_add(len);
        let Some(range) = self.flights.overlapping(address, end).next() else { return };
        let Some(user) = self.flights.user(range) else { return };
        let name = with_article(self.flights.name(user));
        let text = format!("the program called {function} for memory of {name} that has not completed");
        let mut report = self.flights.report(user, Kind::Unmapped, text);
        report.memory = Some((address, len));
        report.region = self.regions.containing(range.0);
        self.report(report);
    }

    /// Reports memory that is not mapped any more, of the work that is using it or of an access by the peer of `qp`.
    pub(crate) fn not_mapped(&mut self, qp: u32, address: u64, len: u64) {
        let found = self.flights.overlapping(address, address + len).next();
        let user = found.and_then(|range| self.flights.user(range));
        let text = match user {
            Some(user) => {
                format!("memory of {} was unmapped before its completion", with_article(self.flights.name(user)))
            }
            None => "registered memory was unmapped, and the peer accesses it".to_owned(),
        };
        let mut report = match user {
            Some(user) => self.flights.report(user, Kind::Unmapped, text),
            None => Report::new(Kind::Unmapped, text),
        };
        report.qp = Some(qp);
        report.memory = Some((address, len));
        report.region = self.regions.containing(address);
        self.report(report);
    }
}

/// The name of an operation after "a" or "an".
fn with_article(name: &str) -> String {
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {name}")
}

#[cfg(test)]
mod tests {
    use super::with_article;

    #[test]
    fn an_operation_has_its_article() {
        assert_eq!(["read", "atomic operation"].map(with_article), ["a read", "an atomic operation"]);
    }
}
