//! Memory keys: regions and windows.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use rdma_sys::*;

use super::mapped::is_mapped;
use super::memory::Memory;
use crate::check::Registered;
use crate::transport::{Access, Place};
use crate::wire::RemoteRange;

/// Access flags that a region may have.
const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE.0
    | IBV_ACCESS_REMOTE_WRITE.0
    | IBV_ACCESS_REMOTE_READ.0
    | IBV_ACCESS_REMOTE_ATOMIC.0
    | IBV_ACCESS_MW_BIND.0
    | IBV_ACCESS_ZERO_BASED.0
    | IBV_ACCESS_HUGETLB.0
    | IBV_ACCESS_RELAXED_ORDERING.0;

/// Memory keys, and the regions and windows that they stand for. The upper 24 bits of a key are the index of its entry. The lower
/// eight bits must match the entry's tag.
#[derive(Debug)]
pub(crate) struct Keys {
    entries: HashMap<u32, Entry, BuildHasherDefault<KeyHasher>>,
    random: RandomState,
    drawn: u64,
    windows: u32,
}

#[derive(Debug)]
struct Entry {
    tag: u8,
    pd: u32,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Region(Range),
    /// A window of type 1 or 2, and its binding.
    Window {
        kind: u8,
        bound: Option<Bound>,
    },
}

/// A range of registered memory.
#[derive(Clone, Copy, Debug)]
struct Range {
    /// First address, as peers see it.
    base: u64,
    /// First address in this process.
    place: u64,
    len: u64,
    access: u32,
    /// Windows that are bound to it.
    windows: u32,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    range: Range,
    region: u32,
    /// Queue pair that a window of type 2 is bound to.
    qp: u32,
}

impl Range {
    fn span(&self, address: u64, len: u64) -> Option<Place> {
        let offset = address.checked_sub(self.base)?;
        (offset.checked_add(len)? <= self.len).then(|| Place(self.place + offset))
    }
}

/// Parameters of a registration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) pd: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// First address, as peers see it.
    pub(crate) iova: u64,
    pub(crate) access: u32,
}

/// Parameters of a bind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) window: u32,
    /// New key of a window of type 2, chosen by the program.
    pub(crate) rkey: u32,
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Registration {
    /// Checks the parameters, and populates all pages. That takes time and needs no lock.
    ///
    /// # Errors
    /// `EINVAL` or `EFAULT`, as in Linux.
    pub(crate) fn check(&self) -> Result<(), i32> {
        let has = |flag: ibv_access_flags| self.access & flag.0 != 0;
        // Unknown flags from here on are optional, and are ignored.
        let mandatory = self.access & (IBV_ACCESS_OPTIONAL_FIRST - 1);
        if mandatory & !KNOWN != 0 {
            return Err(libc::EINVAL);
        }
        if (has(IBV_ACCESS_REMOTE_WRITE) || has(IBV_ACCESS_REMOTE_ATOMIC)) && !has(IBV_ACCESS_LOCAL_WRITE) {
            return Err(libc::EINVAL);
        }
        if self.len == 0 || self.address.checked_add(self.len).is_none() || self.iova.checked_add(self.len).is_none() {
            return Err(libc::EINVAL);
        }
        // `iova` and the address have the same offset in a page.
        if !has(IBV_ACCESS_ZERO_BASED) && (self.address ^ self.iova) % 4096 != 0 {
            return Err(libc::EINVAL);
        }
        // Like Linux, which pins pages for writing unless the device only reads them.
        let writes = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
        if is_mapped(self.address, self.len, self.access & writes.0 != 0) { Ok(()) } else { Err(libc::EFAULT) }
    }

    /// First address, as peers see it.
    fn base(&self) -> u64 {
        if self.access & IBV_ACCESS_ZERO_BASED.0 != 0 { 0 } else { self.iova }
    }

    /// The region as the checker sees it.
    pub(crate) fn registered(&self, key: u32) -> Registered {
        let Registration { pd, address, len, access, .. } = *self;
        Registered { key, pd, address, base: self.base(), len, access }
    }

    fn range(&self) -> Range {
        Range { base: self.base(), place: self.address, len: self.len, access: self.access, windows: 0 }
    }
}

impl Keys {
    pub(crate) fn new() -> Self {
        Keys { entries: HashMap::default(), random: RandomState::new(), drawn: 0, windows: 0 }
    }

    /// Draws a number that nobody can guess: a hash of a counter, keyed by random bytes of the kernel.
    pub(crate) fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.random.hash_one(self.drawn)
    }

    fn insert(&mut self, pd: u32, kind: Kind) -> u32 {
        loop {
            let key = self.draw() as u32;
            // Many programs take the key 0 for no key.
            if key >> 8 != 0 && !self.entries.contains_key(&(key >> 8)) {
                self.entries.insert(key >> 8, Entry { tag: key as u8, pd, kind });
                return key;
            }
        }
    }

    fn entry(&self, key: u32) -> Option<&Entry> {
        self.entries.get(&(key >> 8)).filter(|entry| entry.tag == key as u8)
    }

    /// Registers memory that [`Registration::check`] has accepted, and returns its key.
    pub(crate) fn register(&mut self, wanted: &Registration) -> u32 {
        self.insert(wanted.pd, Kind::Region(wanted.range()))
    }

    /// Returns the registration of a key.
    ///
    /// # Errors
    /// `EBUSY` while windows are bound to it, `EINVAL` if there is no region with this key.
    pub(crate) fn registration(&self, key: u32) -> Result<Registration, i32> {
        match self.entries.get(&(key >> 8)) {
            Some(Entry { kind: Kind::Region(range), .. }) if range.windows > 0 => Err(libc::EBUSY),
            Some(&Entry { pd, kind: Kind::Region(Range { base, place, len, access, .. }), .. }) => {
                Ok(Registration { pd, address: place, len, iova: base, access })
            }
            _ => Err(libc::EINVAL),
        }
    }

    /// Replaces a registration by one that [`Registration::check`] has accepted.
    ///
    /// # Errors
    /// Those of [`registration`](Keys::registration).
    pub(crate) fn reregister(&mut self, key: u32, wanted: &Registration) -> Result<(), i32> {
        self.registration(key)?;
        if let Some(entry) = self.entries.get_mut(&(key >> 8)) {
            (entry.pd, entry.kind) = (wanted.pd, Kind::Region(wanted.range()));
        }
        Ok(())
    }

    /// Removes a registration.
    ///
    /// # Errors
    /// Those of [`registration`](Keys::registration).
    pub(crate) fn deregister(&mut self, key: u32) -> Result<(), i32> {
        match self.entries.get(&(key >> 8)).map(|entry| &entry.kind) {
            Some(Kind::Region(range)) if range.windows > 0 => Err(libc::EBUSY),
            Some(Kind::Region(_)) => {
                self.entries.remove(&(key >> 8));
                Ok(())
            }
            _ => Err(libc::EINVAL),
        }
    }

    /// Removes all keys of a protection domain.
    pub(crate) fn remove_pd(&mut self, pd: u32) {
        self.entries.retain(|_, entry| entry.pd != pd);
        let is_window = |entry: &&Entry| matches!(entry.kind, Kind::Window { .. });
        self.windows = self.entries.values().filter(is_window).count() as u32;
    }

    /// Returns the numbers of regions and of windows.
    pub(crate) fn count(&self) -> (usize, usize) {
        let windows = self.windows as usize;
        (self.entries.len() - windows, windows)
    }

    /// Returns the regions and the keys of the windows of the protection domains for which `has` returns true.
    pub(super) fn objects(&self, has: impl Fn(u32) -> bool) -> (Vec<Registered>, Vec<u32>) {
        let (mut regions, mut windows) = (Vec::new(), Vec::new());
        for (index, Entry { tag, pd, kind }) in self.entries.iter().filter(|(_, entry)| has(entry.pd)) {
            let key = index << 8 | u32::from(*tag);
            match *kind {
                Kind::Region(Range { base, place, len, access, .. }) => {
                    regions.push(Registered { key, pd: *pd, address: place, base, len, access });
                }
                Kind::Window { .. } => windows.push(key),
            }
        }
        (regions, windows)
    }

    pub(crate) fn has_pd(&self, pd: u32) -> bool {
        self.entries.values().any(|entry| entry.pd == pd)
    }

    /// Returns local memory, if its key allows the access.
    pub(crate) fn local(&self, pd: u32, sge: &ibv_sge, is_written: bool) -> Option<Memory> {
        let exposes = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
        let entry = self.entry(sge.lkey).filter(|entry| entry.pd == pd)?;
        let Kind::Region(range) = &entry.kind else { return None };
        if is_written && range.access & IBV_ACCESS_LOCAL_WRITE.0 == 0 {
            return None;
        }
        let place = range.span(sge.addr, sge.length.into())?;
        Some(Memory { place, is_exposed: range.access & exposes.0 != 0 })
    }

    /// Returns memory that a peer has named, if the key allows the peer of the queue pair to access all of it.
    pub(crate) fn remote(&self, pd: u32, qp: u32, wanted: &RemoteRange, access: Access) -> Option<Place> {
        let entry = self.entry(wanted.rkey).filter(|entry| entry.pd == pd)?;
        let range = match &entry.kind {
            Kind::Region(range) => range,
            Kind::Window { kind, bound: Some(bound) } if *kind == 1 || bound.qp == qp => &bound.range,
            Kind::Window { .. } => return None,
        };
        if range.access & access_flag(access) == 0 {
            return None;
        }
        let place = range.span(wanted.address, wanted.len.into())?;
        // In a zero-based region an aligned address may be unaligned in memory.
        (access != Access::Atomic || place.0 % 8 == 0).then_some(place)
    }

    /// Allocates a window of type 1 or 2, and returns its key.
    pub(crate) fn add_window(&mut self, pd: u32, kind: u8) -> u32 {
        self.windows += 1;
        self.insert(pd, Kind::Window { kind, bound: None })
    }

    pub(crate) fn remove_window(&mut self, key: u32) {
        self.unbind(key >> 8);
        if self.entries.remove(&(key >> 8)).is_some() {
            self.windows -= 1;
        }
    }

    fn unbind(&mut self, index: u32) {
        let Some(Entry { kind: Kind::Window { bound, .. }, .. }) = self.entries.get_mut(&index) else { return };
        let Some(Bound { region, .. }) = bound.take() else { return };
        if let Some(Entry { kind: Kind::Region(range), .. }) = self.entries.get_mut(&region) {
            range.windows -= 1;
        }
    }

    /// Binds a window, and returns its new key. A length of 0 unbinds a window of type 1. `kind` is the window type of the
    /// operation.
    pub(crate) fn bind(&mut self, pd: u32, qp: u32, kind: u8, wanted: &Binding) -> Option<u32> {
        let index = wanted.window >> 8;
        let window = self.entries.get(&index).filter(|entry| entry.pd == pd)?;
        let Kind::Window { kind: found, bound } = &window.kind else { return None };
        let is_bound = bound.is_some();
        // A window of type 2 has to be invalidated before it is bound again.
        if *found != kind || (kind == 2 && (is_bound || wanted.rkey >> 8 != index)) {
            return None;
        }
        let tag = if kind == 2 { wanted.rkey as u8 } else { window.tag.wrapping_add(1) };
        let bound = match wanted.len {
            0 if kind == 1 => None,
            _ => Some(self.bound(pd, qp, wanted)?),
        };
        self.unbind(index);
        if let Some(bound) = bound {
            if let Some(Entry { kind: Kind::Region(range), .. }) = self.entries.get_mut(&bound.region) {
                range.windows += 1;
            }
        }
        let window = self.entries.get_mut(&index)?;
        window.tag = tag;
        window.kind = Kind::Window { kind, bound };
        Some(index << 8 | u32::from(tag))
    }

    fn bound(&self, pd: u32, qp: u32, wanted: &Binding) -> Option<Bound> {
        let region = self.entry(wanted.region).filter(|entry| entry.pd == pd)?;
        let Kind::Region(range) = &region.kind else { return None };
        let has = |flag: ibv_access_flags, access: u32| access & flag.0 != 0;
        let writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        if !has(IBV_ACCESS_MW_BIND, range.access)
            || has(IBV_ACCESS_ZERO_BASED, range.access)
            || (has(writes, wanted.access) && !has(IBV_ACCESS_LOCAL_WRITE, range.access))
        {
            return None;
        }
        let place = range.span(wanted.address, wanted.len)?.0;
        let base = if has(IBV_ACCESS_ZERO_BASED, wanted.access) { 0 } else { wanted.address };
        let range = Range { base, place, len: wanted.len, access: wanted.access, windows: 0 };
        Some(Bound { range, region: wanted.region >> 8, qp })
    }

    /// Invalidates a window of type 2 for its queue pair or the peer. Returns `false` if that is not allowed.
    pub(crate) fn invalidate(&mut self, pd: u32, qp: u32, key: u32) -> bool {
        let found = self.entry(key).filter(|entry| entry.pd == pd);
        let is_bound = found
            .is_some_and(|entry| matches!(&entry.kind, Kind::Window { kind: 2, bound: Some(bound) } if bound.qp == qp));
        if is_bound {
            self.unbind(key >> 8);
        }
        is_bound
    }

    /// Unbinds the windows of type 2 that are bound to a queue pair.
    pub(crate) fn unbind_qp(&mut self, qp: u32) {
        if self.windows == 0 {
            return;
        }
        let of = |entry: &Entry| matches!(&entry.kind, Kind::Window { kind: 2, bound: Some(bound) } if bound.qp == qp);
        let bound: Vec<u32> = self.entries.iter().filter(|(_, entry)| of(entry)).map(|(index, _)| *index).collect();
        bound.into_iter().for_each(|index| self.unbind(index));
    }
}

/// The access flag that allows a peer this access.
pub(crate) const fn access_flag(access: Access) -> u32 {
    match access {
        Access::Read => IBV_ACCESS_REMOTE_READ.0,
        Access::Write => IBV_ACCESS_REMOTE_WRITE.0,
        Access::Atomic => IBV_ACCESS_REMOTE_ATOMIC.0,
    }
}

/// Hashes keys and queue pair numbers. The device chooses both, so a peer cannot make them collide.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, word: u32) {
        self.0 = (self.0 ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
