//! Keys to memory: regions and windows.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use rdma_sys::*;

use super::memory::{Memory, is_mapped};
use crate::transport::{Access, Place};
use crate::wire::RemoteRange;

/// All access that a region can give.
const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE.0
    | IBV_ACCESS_REMOTE_WRITE.0
    | IBV_ACCESS_REMOTE_READ.0
    | IBV_ACCESS_REMOTE_ATOMIC.0
    | IBV_ACCESS_MW_BIND.0
    | IBV_ACCESS_ZERO_BASED.0
    | IBV_ACCESS_HUGETLB.0
    | IBV_ACCESS_RELAXED_ORDERING.0;

/// Keys, and what they open. The upper 24 bits of a key find it; the lower eight have to be right.
#[derive(Debug)]
pub(crate) struct Keys {
    entries: HashMap<u32, Entry, BuildHasherDefault<Spread>>,
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
    /// The other kind of window (1 or 2), and what it is bound to.
    Window {
        kind: u8,
        bound: Option<Bound>,
    },
}

/// Memory.
#[derive(Clone, Copy, Debug)]
struct Range {
    /// What peers call its beginning.
    base: u64,
    /// Where it is.
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
    /// The queue pair that a window of type 2 serves.
    qp: u32,
}

impl Range {
    fn span(&self, address: u64, len: u64) -> Option<Place> {
        let offset = address.checked_sub(self.base)?;
        (offset.checked_add(len)? <= self.len).then(|| Place(self.place + offset))
    }
}

/// What to register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) pd: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// What peers call its beginning.
    pub(crate) iova: u64,
    pub(crate) access: u32,
}

/// What to bind a window to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) window: u32,
    /// As the consumer wants it, of a window of type 2.
    pub(crate) rkey: u32,
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

impl Registration {
    /// Brings all pages in, which takes its time: it needs no lock.
    ///
    /// # Errors
    /// `EINVAL` or `EFAULT`, as the kernel has it.
    pub(crate) fn check(&self) -> Result<(), i32> {
        let has = |flag: ibv_access_flags| self.access & flag.0 != 0;
        // Flags from there on are optional: unknown ones are ignored.
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
        // What peers call it lies as far into a page as it does.
        if !has(IBV_ACCESS_ZERO_BASED) && (self.address ^ self.iova) % 4096 != 0 {
            return Err(libc::EINVAL);
        }
        // As Linux, which pins pages to be written unless the device only ever reads them.
        let writes = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
        if is_mapped(self.address, self.len, self.access & writes.0 != 0) { Ok(()) } else { Err(libc::EFAULT) }
    }

    fn range(&self) -> Range {
        let base = if self.access & IBV_ACCESS_ZERO_BASED.0 != 0 { 0 } else { self.iova };
        Range { base, place: self.address, len: self.len, access: self.access, windows: 0 }
    }
}

impl Keys {
    pub(crate) fn new() -> Self {
        Keys { entries: HashMap::default(), random: RandomState::new(), drawn: 0, windows: 0 }
    }

    /// Nobody can guess it: a keyed hash of a counter, the key of which the kernel has given.
    pub(crate) fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.random.hash_one(self.drawn)
    }

    fn insert(&mut self, pd: u32, kind: Kind) -> u32 {
        loop {
            let key = self.draw() as u32;
            // Programs take 0 for none.
            if key >> 8 != 0 && !self.entries.contains_key(&(key >> 8)) {
                self.entries.insert(key >> 8, Entry { tag: key as u8, pd, kind });
                return key;
            }
        }
    }

    fn entry(&self, key: u32) -> Option<&Entry> {
        self.entries.get(&(key >> 8)).filter(|entry| entry.tag == key as u8)
    }

    /// A key to memory, which [`Registration::check`] has found there.
    pub(crate) fn register(&mut self, wanted: &Registration) -> u32 {
        self.insert(wanted.pd, Kind::Region(wanted.range()))
    }

    /// What a key opens.
    ///
    /// # Errors
    /// `EBUSY` while windows are bound to it.
    pub(crate) fn registration(&self, key: u32) -> Result<Registration, i32> {
        match self.entries.get(&(key >> 8)) {
            Some(Entry { kind: Kind::Region(range), .. }) if range.windows > 0 => Err(libc::EBUSY),
            Some(&Entry { pd, kind: Kind::Region(Range { base, place, len, access, .. }), .. }) => {
                Ok(Registration { pd, address: place, len, iova: base, access })
            }
            _ => Err(libc::EINVAL),
        }
    }

    /// Replaces what a key opens by what [`Registration::check`] has found there.
    ///
    /// # Errors
    /// `EBUSY` while windows are bound to it.
    pub(crate) fn reregister(&mut self, key: u32, wanted: &Registration) -> Result<(), i32> {
        self.registration(key)?;
        if let Some(entry) = self.entries.get_mut(&(key >> 8)) {
            (entry.pd, entry.kind) = (wanted.pd, Kind::Region(wanted.range()));
        }
        Ok(())
    }

    /// # Errors
    /// `EBUSY` while windows are bound to it.
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

    /// Takes away all keys of a domain that goes.
    pub(crate) fn forget_pd(&mut self, pd: u32) {
        self.entries.retain(|_, entry| entry.pd != pd);
        let is_window = |entry: &&Entry| matches!(entry.kind, Kind::Window { .. });
        self.windows = self.entries.values().filter(is_window).count() as u32;
    }

    /// How many regions there are, and how many windows.
    pub(crate) fn count(&self) -> (usize, usize) {
        let windows = self.windows as usize;
        (self.entries.len() - windows, windows)
    }

    pub(crate) fn has_pd(&self, pd: u32) -> bool {
        self.entries.values().any(|entry| entry.pd == pd)
    }

    /// Where local memory is, if the key opens it.
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

    /// Where memory is that a peer names, if the key opens all of it to the peer of that queue pair.
    pub(crate) fn remote(&self, pd: u32, qp: u32, wanted: &RemoteRange, access: Access) -> Option<Place> {
        let entry = self.entry(wanted.rkey).filter(|entry| entry.pd == pd)?;
        let range = match &entry.kind {
            Kind::Region(range) => range,
            Kind::Window { kind, bound: Some(bound) } if *kind == 1 || bound.qp == qp => &bound.range,
            Kind::Window { .. } => return None,
        };
        if range.access & flag(access) == 0 {
            return None;
        }
        let place = range.span(wanted.address, wanted.len.into())?;
        // Where addresses begin at zero, an aligned one may lie anywhere.
        (access != Access::Atomic || place.0 % 8 == 0).then_some(place)
    }

    /// A window, of type 1 or 2.
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

    /// Binds a window, or, where nothing is to be in it, unbinds it; the key that opens it from now on. `kind` is that of the
    /// window that the operation is for.
    pub(crate) fn bind(&mut self, pd: u32, qp: u32, kind: u8, wanted: &Binding) -> Option<u32> {
        let index = wanted.window >> 8;
        let window = self.entries.get(&index).filter(|entry| entry.pd == pd)?;
        let Kind::Window { kind: found, bound } = &window.kind else { return None };
        let is_bound = bound.is_some();
        // One of type 2 is invalidated first.
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

    /// Takes a window of type 2 out of use, as its queue pair or its peer asks; whether it could be.
    pub(crate) fn invalidate(&mut self, pd: u32, qp: u32, key: u32) -> bool {
        let found = self.entry(key).filter(|entry| entry.pd == pd);
        let is_bound = found
            .is_some_and(|entry| matches!(&entry.kind, Kind::Window { kind: 2, bound: Some(bound) } if bound.qp == qp));
        if is_bound {
            self.unbind(key >> 8);
        }
        is_bound
    }

    /// Unbinds what is bound to a queue pair that goes, or is reset.
    pub(crate) fn forget_qp(&mut self, qp: u32) {
        if self.windows == 0 {
            return;
        }
        let of = |entry: &Entry| matches!(&entry.kind, Kind::Window { kind: 2, bound: Some(bound) } if bound.qp == qp);
        let bound: Vec<u32> = self.entries.iter().filter(|(_, entry)| of(entry)).map(|(index, _)| *index).collect();
        bound.into_iter().for_each(|index| self.unbind(index));
    }
}

/// The flag that lets a peer do that.
pub(crate) const fn flag(access: Access) -> u32 {
    match access {
        Access::Read => IBV_ACCESS_REMOTE_READ.0,
        Access::Write => IBV_ACCESS_REMOTE_WRITE.0,
        Access::Atomic => IBV_ACCESS_REMOTE_ATOMIC.0,
    }
}

/// Hashes keys and queue pair numbers. The device chooses both, so a peer cannot make them collide.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
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
