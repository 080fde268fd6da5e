//! Registered regions, and accesses that their keys do not allow.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use super::{Checker, Kind, Object, Region, Report};

/// Deregistered regions that are remembered.
const REMEMBERED: usize = 1024;

/// A page. Pinned memory is counted in pages.
const PAGE: u64 = 4096;

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registered {
    pub(crate) key: u32,
    pub(crate) pd: u32,
    /// First address in this process.
    pub(crate) address: u64,
    /// First address, as peers see it.
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Registered {
    fn region(&self, is_deregistered: bool) -> Region {
        Region { key: self.key, address: self.address, len: self.len, is_deregistered }
    }

    fn pinned(&self) -> u64 {
        (self.address % PAGE + self.len).div_ceil(PAGE) * PAGE
    }

    /// Bytes between an address of the key's address space and the region.
    fn distance(&self, address: u64) -> u64 {
        let end = self.base + self.len;
        if address < self.base { self.base - address } else { address.saturating_sub(end - 1) }
    }
}

/// An access that a key did not allow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) qp: u32,
    pub(crate) pd: u32,
    /// The work request. `None` for an access by the peer.
    pub(crate) wr_id: Option<u64>,
    pub(crate) key: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// The access flag that is needed, or 0.
    pub(crate) needed: u32,
    /// The access in words.
    pub(crate) name: &'static str,
    /// Whether the queue pair itself allows the access.
    pub(crate) is_allowed_by_qp: bool,
}

/// All regions that the checker knows.
pub(super) struct Regions {
    live: BTreeMap<u32, Registered>,
    dead: VecDeque<Registered>,
    pinned: u64,
}

impl Regions {
    pub(super) fn new() -> Regions {
        // Programs are also checked for leaks, so the memory of the checker does not grow with their work.
        Regions { live: BTreeMap::new(), dead: VecDeque::with_capacity(REMEMBERED), pinned: 0 }
    }

    pub(super) fn region(&self, key: u32) -> Option<Region> {
        self.live.get(&key).map(|of| of.region(false))
    }

    /// The region that contains an address of this process.
    pub(super) fn containing(&self, address: u64) -> Option<Region> {
        let contains = |of: &&Registered| address.checked_sub(of.address).is_some_and(|offset| offset < of.len);
        self.live.values().find(contains).map(|of| of.region(false))
    }

    fn explain(&self, attempt: &Attempt) -> (Kind, String, Option<Region>) {
        let Attempt { pd, key, address, len, needed, name, is_allowed_by_qp, .. } = *attempt;
        if !is_allowed_by_qp {
            let text = format!("{name}: the access flags of the queue pair do not allow it");
            return (Kind::KeyAccess, text, self.region(key));
        }
        if let Some(of) = self.live.get(&key) {
            let (kind, text) = if of.pd != pd {
                (Kind::KeyDomain, format!("{name}: the region is in another protection domain than the queue pair"))
            } else if address < of.base {
                let by = of.base - address;
                (Kind::KeyRange, format!("{name}: it starts {by} bytes before the region of its key"))
            } else if address.saturating_add(len) > of.base + of.len {
                let by = address.saturating_add(len) - (of.base + of.len);
                (Kind::KeyRange, format!("{name}: it ends {by} bytes after the region of its key"))
            } else if of.access & needed != needed {
                let missing = needed & !of.access;
                (Kind::KeyAccess, format!("{name}: the region lacks the access flags {missing:#x}"))
            } else {
                (Kind::KeyAccess, format!("{name}: the region does not allow it, or the address is not aligned"))
            };
            return (kind, text, Some(of.region(false)));
        }
        if let Some(of) = self.dead.iter().rev().find(|of| of.key == key) {
            let text = format!("{name}: the region of key {key:#x} was deregistered");
            return (Kind::StaleKey, text, Some(of.region(true)));
        }
        let nearest = self.live.values().min_by_key(|of| (of.distance(address), of.key));
        let text = match nearest {
            Some(of) if of.distance(address) == 0 => {
                format!(
                    "{name}: no region has key {key:#x}, and no window that allows it; the key of the region here is {:#x}",
                    of.key
                )
            }
            Some(of) => format!(
                "{name}: no region has key {key:#x}, and no window that allows it; the nearest region is {} bytes away",
                of.distance(address)
            ),
            None => format!("{name}: no region has key {key:#x}, and none is registered"),
        };
        (Kind::UnknownKey, text, nearest.map(|of| of.region(false)))
    }
}

impl Checker {
    pub(crate) fn registered(&mut self, region: Registered) {
        self.created(Object::Region(region.key));
        self.regions.live.insert(region.key, region);
        self.regions.pinned += region.pinned();
        let (pinned, limit) = (self.regions.pinned, self.options.memlock.or_else(memlock_limit));
        if let Some(limit) = limit.filter(|limit| pinned > *limit) {
            let text = format!(
                "{pinned} bytes are registered, more than the limit of {limit} bytes: with an RNIC, this \
                 registration fails with ENOMEM"
            );
            let mut report = Report::new(Kind::Memlock, text);
            report.region = Some(region.region(false));
            report.memory = Some((region.address, region.len));
            self.report_once(Kind::Memlock, 0, || report);
        }
    }

    /// Notes that a region is about to be deregistered.
    pub(crate) fn deregistering(&mut self, key: u32) {
        self.check_region_in_use(key, "deregistered");
        self.remove_region(key);
        self.destroyed(Object::Region(key));
    }

    fn remove_region(&mut self, key: u32) {
        let Some(region) = self.regions.live.remove(&key) else { return };
        self.regions.pinned -= region.pinned();
        if self.regions.dead.len() == REMEMBERED {
            self.regions.dead.pop_front();
        }
        self.regions.dead.push_back(region);
    }

    /// Notes that a region was replaced by another with the same key.
    pub(crate) fn reregistered(&mut self, region: Registered) {
        self.check_region_in_use(region.key, "changed");
        if let Some(before) = self.regions.live.remove(&region.key) {
            self.regions.pinned -= before.pinned();
        }
        self.registered(region);
    }

    /// Notes that all regions of a protection domain are gone.
    pub(crate) fn domain_closed(&mut self, pd: u32) {
        let keys: Vec<u32> = self.regions.live.values().filter(|of| of.pd == pd).map(|of| of.key).collect();
        keys.into_iter().for_each(|key| self.remove_region(key));
    }

    /// Reports an access that a key did not allow.
    pub(crate) fn key_failed(&mut self, attempt: &Attempt) {
        let (kind, text, region) = self.regions.explain(attempt);
        let report = Report {
            qp: Some(attempt.qp),
            wr_id: attempt.wr_id,
            memory: Some((attempt.address, attempt.len)),
            region,
            ..Report::new(kind, text)
        };
        self.report(report);
    }
}

/// The bytes that this process may lock, or `None` if there is no limit or a capability lifts it.
fn memlock_limit() -> Option<u64> {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the structure.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    let is_unlimited = failed || effective >> CAP_IPC_LOCK & 1 == 1 || limit.rlim_cur == libc::RLIM_INFINITY;
    (!is_unlimited).then_some(limit.rlim_cur)
}
