//! Random operations, checked against a map of what is in use.

use std::collections::BTreeMap;

use super::*;

/// Number of operations: 10⁷ in `cargo xtask soak`.
fn operations() -> usize {
    let asked = std::env::var("RDMA_POOL_OPERATIONS").ok().and_then(|count| count.parse().ok());
    asked.unwrap_or(if cfg!(miri) { 100 } else { 100_000 })
}

/// A generator of random numbers: xorshift64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

#[test]
fn random_operations_neither_overlap_nor_lose_a_byte() {
    let source = Ranges::new(40 << 20);
    let pool = super::pool(source.clone(), [64 << 10, 1 << 20, 256 << 10, 0], 48 << 20, 1 << 20);
    let threads: Vec<_> = (0..3).map(|_| Thread::new(&pool)).collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Taken<Range>> = Vec::new();
    let mut places: BTreeMap<Place, usize> = BTreeMap::new();
    let (mut bytes, mut refused) = (0, 0);
    for _ in 0..operations() {
        let thread = &threads[random.below(threads.len())];
        if random.below(2) == 0 && !live.is_empty() {
            let found = live.swap_remove(random.below(live.len()));
            assert_eq!(places.remove(&found.block.place()), Some(found.block.capacity()));
            bytes -= found.block.capacity();
            thread.put(found);
            continue;
        }
        let budget = random.below(BUDGETS);
        // All orders of magnitude occur equally often.
        let order = random.below(18);
        let len = 1 + random.below(64 << order);
        let Some(Taken { block, heap }) = thread.get(budget, len) else {
            refused += 1;
            continue;
        };
        assert!(heap == budget || heap == COMMON);
        let capacity = block.capacity();
        assert!(
            capacity >= len && (capacity == 64 || 4 * (capacity - len) < len),
            "{len} bytes in a block of {capacity}"
        );
        let place = block.place();
        let before = places.range(..=place).next_back().filter(|(other, _)| other.0 == place.0);
        assert!(before.is_none_or(|(other, len)| other.1 + len <= place.1), "{block:?} overlaps {before:?}");
        let after = places.range(place..).next().filter(|(other, _)| other.0 == place.0);
        assert!(after.is_none_or(|(other, _)| place.1 + capacity <= other.1), "{block:?} overlaps {after:?}");
        places.insert(place, capacity);
        bytes += capacity;
        live.push(Taken { block, heap });
    }
    assert_eq!(used(&pool), bytes);
    assert!(refused > 0 || cfg!(miri), "the load never exhausted the pool");
    live.drain(..).for_each(|found| threads[0].put(found));
    assert_eq!(used(&pool), 0);
    drop(threads);
    assert!(pool.is_whole());
    drop(pool);
    assert_eq!(source.alive.load(Ordering::Relaxed), 0);
}
