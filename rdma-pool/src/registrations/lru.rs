//! Values by key, limited by bytes: the least recently used one that is idle goes first.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value with a count of references.
pub(crate) trait References: Clone {
    /// Whether this is the only reference.
    fn is_only(&self) -> bool;
}

/// A cache that many threads share. Values are made and dropped outside of its lock.
///
/// In a forked child, other threads of the parent may hold the lock for ever and may have been changing the entries. An inherited
/// cache must not be used there, and dropped only after [`Lru::leak`].
pub(crate) struct Lru<K, V> {
    entries: Mutex<Entries<K, V>>,
    limit: usize,
}

/// A value is in use while there are references to it besides the one in `by_key`.
struct Entries<K, V> {
    by_key: HashMap<K, Entry<V>>,
    /// Keys by the time of the last use.
    by_use: BTreeMap<u64, K>,
    /// The time, which each use advances by one.
    now: u64,
    /// Bytes of all entries and reservations.
    bytes: usize,
    counts: Counts,
}

struct Entry<V> {
    value: V,
    bytes: usize,
    used: u64,
}

/// Events since the cache was created.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Values that were not to be cached.
    pub(crate) uncached: u64,
    pub(crate) evictions: u64,
}

/// State at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Usage {
    pub(crate) entries: usize,
    pub(crate) bytes: usize,
    /// Bytes that cannot be evicted: values in use, and reservations.
    pub(crate) pinned: usize,
}

/// Why there is no value.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Failed<E> {
    /// Even without all idle entries, the bytes exceed the limit.
    Full {
        /// Bytes that cannot be evicted.
        pinned: usize,
    },
    /// The value could not be made.
    Make(E),
}

impl<K: Copy + Eq + Hash, V: References> Lru<K, V> {
    pub(crate) fn new(limit: usize) -> Self {
        Lru { entries: Mutex::new(Entries::new()), limit }
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn counts(&self) -> Counts {
        self.lock().counts
    }

    pub(crate) fn usage(&self) -> Usage {
        let entries = self.lock();
        Usage { entries: entries.by_key.len(), bytes: entries.bytes, pinned: entries.pinned() }
    }

    /// The value of `key`, or a new one of `bytes` bytes.
    ///
    /// Idle entries are evicted until the bytes are within the limit, and one more each time that `make` fails with an error that
    /// `is_limit`. Two threads that miss the same key at the same time both make a value, of which one is dropped.
    pub(crate) fn get<E>(
        &self,
        key: K,
        bytes: usize,
        make: impl FnMut() -> Result<V, E>,
        is_limit: impl Fn(&E) -> bool,
    ) -> Result<V, Failed<E>> {
        if let Some(value) = self.lock().hit(&key) {
            return Ok(value);
        }
        let value = self.make(bytes, make, is_limit, |counts| &mut counts.misses)?;
        let mut entries = self.lock();
        if let Some(first) = entries.reuse(&key) {
            entries.bytes -= bytes;
            // Values are dropped outside of the lock.
            drop(entries);
            drop(value);
            return Ok(first);
        }
        Ok(entries.insert(key, bytes, value))
    }

    /// Makes a value of `bytes` bytes that is not cached. The bytes count until [`Lru::give_back`].
    #[cfg(any(test, feature = "bytes"))]
    pub(crate) fn reserve<E>(
        &self,
        bytes: usize,
        make: impl FnMut() -> Result<V, E>,
        is_limit: impl Fn(&E) -> bool,
    ) -> Result<V, Failed<E>> {
        self.make(bytes, make, is_limit, |counts| &mut counts.uncached)
    }

    /// Makes a value whose bytes are reserved, and counts it.
    fn make<E>(
        &self,
        bytes: usize,
        mut make: impl FnMut() -> Result<V, E>,
        is_limit: impl Fn(&E) -> bool,
        count: impl FnOnce(&mut Counts) -> &mut u64,
    ) -> Result<V, Failed<E>> {
        let evicted = {
            let mut entries = self.lock();
            *count(&mut entries.counts) += 1;
            entries.reserve(bytes, self.limit).map_err(|pinned| Failed::Full { pinned })?
        };
        // Also gives the bytes back if an evicted owner or `make` panics.
        let reservation = Reservation { of: self, bytes };
        drop(evicted);
        loop {
            match make() {
                Ok(value) => {
                    std::mem::forget(reservation);
                    return Ok(value);
                }
                Err(error) if is_limit(&error) => {
                    let evicted = self.lock().evict_oldest();
                    if evicted.is_none() {
                        return Err(Failed::Make(error));
                    }
                }
                Err(error) => return Err(Failed::Make(error)),
            }
        }
    }

    /// Ends the reservation of a value that [`Lru::reserve`] made.
    pub(crate) fn give_back(&self, bytes: usize) {
        self.lock().bytes -= bytes;
    }

    /// Removes `key` unless its value is in use. Returns whether there was such an entry.
    pub(crate) fn evict(&self, key: &K) -> bool {
        let evicted = self.lock().evict(key);
        evicted.is_some()
    }

    /// Removes all idle entries. Returns their bytes.
    pub(crate) fn clear(&self) -> usize {
        let mut evicted = Vec::new();
        let mut entries = self.lock();
        let before = entries.bytes;
        while let Some(value) = entries.evict_oldest() {
            evicted.push(value);
        }
        before - entries.bytes
    }

    /// Forgets all entries, which another thread may have been changing at a fork.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.entries, Mutex::new(Entries::new())));
    }

    /// Calls `run` with the lock held.
    #[cfg(test)]
    pub(crate) fn locked(&self, run: impl FnOnce()) {
        let _entries = self.lock();
        run();
    }

    fn lock(&self) -> MutexGuard<'_, Entries<K, V>> {
        // No code of others runs under the lock except for `Hash` and `Eq` of the keys, which are the caller's module's.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Reservation<'a, K: Copy + Eq + Hash, V: References> {
    of: &'a Lru<K, V>,
    bytes: usize,
}

impl<K: Copy + Eq + Hash, V: References> Drop for Reservation<'_, K, V> {
    fn drop(&mut self) {
        self.of.give_back(self.bytes);
    }
}

impl<K: Copy + Eq + Hash, V: References> Entries<K, V> {
    fn new() -> Self {
        Entries { by_key: HashMap::new(), by_use: BTreeMap::new(), now: 0, bytes: 0, counts: Counts::default() }
    }

    fn hit(&mut self, key: &K) -> Option<V> {
        let value = self.reuse(key)?;
        self.counts.hits += 1;
        Some(value)
    }

    /// The value of `key`, which becomes the most recently used.
    fn reuse(&mut self, key: &K) -> Option<V> {
        let entry = self.by_key.get_mut(key)?;
        self.by_use.remove(&entry.used);
        self.now += 1;
        entry.used = self.now;
        self.by_use.insert(self.now, *key);
        Some(entry.value.clone())
    }

    /// Adds an entry whose bytes are reserved.
    fn insert(&mut self, key: K, bytes: usize, value: V) -> V {
        self.now += 1;
        self.by_use.insert(self.now, key);
        self.by_key.insert(key, Entry { value: value.clone(), bytes, used: self.now });
        value
    }

    /// Reserves `bytes` and returns the evicted entries, or how many bytes are pinned if these are too many.
    fn reserve(&mut self, bytes: usize, limit: usize) -> Result<Vec<V>, usize> {
        let mut evicted = Vec::new();
        if bytes > limit.saturating_sub(self.bytes) {
            // Nothing is evicted in vain.
            let pinned = self.pinned();
            if bytes > limit.saturating_sub(pinned) {
                return Err(pinned);
            }
            while bytes > limit.saturating_sub(self.bytes) {
                // A value in use may become idle meanwhile, but no idle one comes into use under the lock.
                evicted.push(self.evict_oldest().ok_or(pinned)?);
            }
        }
        self.bytes += bytes;
        Ok(evicted)
    }

    /// Removes the idle entry that was used least recently.
    fn evict_oldest(&mut self) -> Option<V> {
        let is_idle = |key: &&K| self.by_key.get(key).is_some_and(Entry::is_idle);
        let key = *self.by_use.values().find(is_idle)?;
        self.evict(&key)
    }

    fn evict(&mut self, key: &K) -> Option<V> {
        self.by_key.get(key).filter(|entry| entry.is_idle())?;
        let entry = self.by_key.remove(key)?;
        self.by_use.remove(&entry.used);
        self.bytes -= entry.bytes;
        self.counts.evictions += 1;
        Some(entry.value)
    }

    fn pinned(&self) -> usize {
        let idle: usize = self.by_key.values().filter(|entry| entry.is_idle()).map(|entry| entry.bytes).sum();
        self.bytes - idle
    }
}

impl<V: References> Entry<V> {
    /// Whether the cache has the only reference. Others are cloned from it only under the lock.
    fn is_idle(&self) -> bool {
        self.value.is_only()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::HashSet;
    use std::convert::Infallible;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    impl<T> References for Arc<T> {
        fn is_only(&self) -> bool {
            Arc::strong_count(self) == 1
        }
    }

    impl<T> References for Rc<T> {
        fn is_only(&self) -> bool {
            Rc::strong_count(self) == 1
        }
    }

    /// A cache of values that record their drop.
    struct Rig {
        lru: Lru<u32, Rc<Value>>,
        dropped: Rc<RefCell<Vec<u32>>>,
    }

    struct Value(u32, Rc<RefCell<Vec<u32>>>);

    impl Drop for Value {
        fn drop(&mut self) {
            self.1.borrow_mut().push(self.0);
        }
    }

    impl Rig {
        fn new(limit: usize) -> Self {
            Rig { lru: Lru::new(limit), dropped: Rc::default() }
        }

        fn value(&self, key: u32) -> Rc<Value> {
            Rc::new(Value(key, Rc::clone(&self.dropped)))
        }

        fn get(&self, key: u32, bytes: usize) -> Result<Rc<Value>, Failed<Infallible>> {
            self.lru.get(key, bytes, || Ok(self.value(key)), |never| match *never {})
        }

        fn dropped(&self) -> Vec<u32> {
            std::mem::take(&mut *self.dropped.borrow_mut())
        }
    }

    #[test]
    fn a_key_is_made_once_and_hit_afterwards() {
        let rig = Rig::new(100);
        let first = rig.get(1, 10).ok().unwrap();
        let second = rig.get(1, 10).ok().unwrap();
        assert!(Rc::ptr_eq(&first, &second));
        assert_eq!(rig.lru.counts(), Counts { hits: 1, misses: 1, ..Counts::default() });
        assert_eq!(rig.lru.usage(), Usage { entries: 1, bytes: 10, pinned: 10 });
        drop((first, second));
        assert_eq!(rig.lru.usage(), Usage { entries: 1, bytes: 10, pinned: 0 });
        assert_eq!(rig.dropped(), []);
    }

    #[test]
    fn the_least_recently_used_idle_entry_goes_first() {
        let rig = Rig::new(30);
        let kept = rig.get(1, 10).ok().unwrap();
        for key in [2, 3, 2] {
            rig.get(key, 10).ok().unwrap();
        }
        rig.get(4, 10).ok().unwrap();
        assert_eq!(rig.dropped(), [3], "1 is older, but in use, and 2 was used after 3");
        rig.get(5, 20).ok().unwrap();
        assert_eq!(rig.dropped(), [2, 4]);
        drop(kept);
        rig.get(6, 10).ok().unwrap();
        assert_eq!(rig.dropped(), [1]);
    }

    #[test]
    fn nothing_is_evicted_for_a_value_that_does_not_fit() {
        let rig = Rig::new(30);
        let used = rig.get(1, 20).ok().unwrap();
        rig.get(2, 10).ok().unwrap();
        assert!(matches!(rig.get(3, 11), Err(Failed::Full { pinned: 20 })));
        assert!(matches!(rig.get(4, 31), Err(Failed::Full { pinned: 20 })));
        assert_eq!(rig.dropped(), []);
        assert!(rig.get(5, 10).is_ok());
        assert_eq!(rig.dropped(), [2]);
        drop(used);
        assert!(rig.get(6, 30).is_ok());
    }

    #[test]
    fn an_error_of_the_limit_evicts_one_entry_after_the_other() {
        let rig = Rig::new(100);
        let used = rig.get(0, 10).ok().unwrap();
        for key in 1..=4 {
            rig.get(key, 10).ok().unwrap();
        }
        let failures = Cell::new(2);
        let make = || if failures.replace(failures.get() - 1) > 0 { Err("limit") } else { Ok(rig.value(5)) };
        assert!(rig.lru.get(5, 10, make, |error| *error == "limit").is_ok());
        assert_eq!(rig.dropped(), [1, 2]);
        assert!(matches!(rig.lru.get(6, 10, || Err("other"), |error| *error == "limit"), Err(Failed::Make("other"))));
        assert_eq!(rig.dropped(), [], "only errors of the limit evict");
        assert!(matches!(rig.lru.get(6, 10, || Err("limit"), |error| *error == "limit"), Err(Failed::Make("limit"))));
        assert_eq!(rig.dropped(), [3, 4, 5]);
        assert_eq!(rig.lru.usage(), Usage { entries: 1, bytes: 10, pinned: 10 });
        drop(used);
    }

    #[test]
    fn values_that_are_not_cached_count_until_they_are_given_back() {
        let rig = Rig::new(30);
        rig.get(1, 20).ok().unwrap();
        let value = rig.lru.reserve(25, || Ok(rig.value(2)), |never: &Infallible| match *never {}).ok().unwrap();
        assert_eq!(rig.dropped(), [1]);
        assert_eq!(rig.lru.usage(), Usage { entries: 0, bytes: 25, pinned: 25 });
        assert_eq!(rig.lru.counts(), Counts { misses: 1, uncached: 1, evictions: 1, ..Counts::default() });
        assert!(matches!(rig.get(3, 6), Err(Failed::Full { pinned: 25 })));
        drop(value);
        rig.lru.give_back(25);
        assert!(rig.get(3, 6).is_ok());
    }

    #[test]
    fn a_panic_gives_the_reservation_back() {
        let lru: Lru<u32, Arc<()>> = Lru::new(10);
        let make = || -> Result<Arc<()>, Infallible> { panic!("expected") };
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lru.get(1, 10, make, |_| false)));
        assert!(panics.is_err());
        assert_eq!(lru.usage(), Usage { entries: 0, bytes: 0, pinned: 0 });
    }

    #[test]
    fn only_idle_entries_can_be_evicted_by_the_caller() {
        let rig = Rig::new(30);
        let used = rig.get(1, 10).ok().unwrap();
        rig.get(2, 10).ok().unwrap();
        assert!(!rig.lru.evict(&1) && !rig.lru.evict(&3));
        assert!(rig.lru.evict(&2));
        assert_eq!(rig.dropped(), [2]);
        assert_eq!(rig.lru.clear(), 0);
        drop(used);
        assert_eq!(rig.lru.clear(), 10);
        assert_eq!(rig.dropped(), [1]);
        assert_eq!(rig.lru.usage(), Usage { entries: 0, bytes: 0, pinned: 0 });
    }

    /// The cache behaves as a model: entries in order of their last use, of which some are in use.
    #[test]
    fn random_operations_agree_with_a_model() {
        const LIMIT: usize = 64;
        let operations = if cfg!(miri) { 60 } else { 100_000 };
        let rig = Rig::new(LIMIT);
        let bytes = |key: u32| 1 + (key as usize * 7) % 20;
        // The oldest is first.
        let mut model: Vec<u32> = Vec::new();
        let mut used: Vec<Rc<Value>> = Vec::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..operations {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (key, choice) = ((random >> 33) as u32 % 40, (random >> 60) as u32);
            if choice < 5 && !used.is_empty() {
                used.swap_remove((random >> 40) as usize % used.len());
                continue;
            }
            let in_use: HashSet<u32> = used.iter().map(|value| value.0).collect();
            let total = |keys: &[u32]| keys.iter().map(|key| bytes(*key)).sum::<usize>();
            let mut expected = Vec::new();
            let mut fits = true;
            if let Some(at) = model.iter().position(|other| *other == key) {
                model.remove(at);
                model.push(key);
            } else {
                let pinned: usize = in_use.iter().map(|key| bytes(*key)).sum();
                fits = pinned + bytes(key) <= LIMIT;
                while fits && total(&model) + bytes(key) > LIMIT {
                    let at = model.iter().position(|other| !in_use.contains(other)).unwrap();
                    expected.push(model.remove(at));
                }
                model.extend(fits.then_some(key));
            }
            let got = rig.get(key, bytes(key));
            assert_eq!(got.is_ok(), fits);
            assert_eq!(rig.dropped(), expected);
            assert_eq!(rig.lru.usage().bytes, total(&model));
            if choice < 11 {
                used.extend(got.ok());
            }
        }
        used.clear();
        assert_eq!(rig.lru.clear(), model.iter().map(|key| bytes(*key)).sum::<usize>());
        assert_eq!(rig.dropped(), model);
    }

    #[test]
    fn threads_share_values_and_never_exceed_the_limit() {
        static LIVE: AtomicUsize = AtomicUsize::new(0);
        struct Counted;
        impl Drop for Counted {
            fn drop(&mut self) {
                LIVE.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let rounds = if cfg!(miri) { 8 } else { 20_000 };
        let lru: Lru<u32, Arc<Counted>> = Lru::new(4);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let lru = &lru;
                scope.spawn(move || {
                    for round in 0..rounds {
                        let make = || {
                            // Values that were evicted are dropped before others are made in their place.
                            assert!(LIVE.fetch_add(1, Ordering::Relaxed) < 4 + 3, "values exceed the limit");
                            Ok::<_, Infallible>(Arc::new(Counted))
                        };
                        let value = lru.get((round * (thread + 1)) % 7, 1, make, |_| false);
                        assert!(value.is_ok(), "at most three of four are in use");
                    }
                });
            }
        });
        assert_eq!(lru.usage().pinned, 0);
        let live = LIVE.load(Ordering::Relaxed);
        assert_eq!(lru.clear(), live);
        assert_eq!(LIVE.load(Ordering::Relaxed), 0);
    }
}
