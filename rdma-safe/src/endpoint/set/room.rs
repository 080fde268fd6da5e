//! Room in the completion queue of a set.

use std::sync::Arc;

use crate::endpoint::{EndpointBuilder, Live};
use crate::{Error, Result, srq};

/// Completion queue entries that the endpoints of a set may need at the same time.
///
/// Each send and each receive has one completion at most, and keeps its slot in the ring or the pool until that
/// completion is polled.
pub(super) struct Room {
    /// Entries for work.
    capacity: u32,
    /// Further entries, for probes of keepalives.
    reserve: u32,
    /// Endpoints with a keepalive. Each needs an entry for its probe.
    probes: u64,
    occupied: u64,
    pools: Vec<PoolUse>,
}

/// A pool and the number of endpoints that use it.
struct PoolUse {
    pool: Arc<srq::Shared>,
    endpoints: usize,
}

/// Entries that a new endpoint needs.
pub(super) struct Demand {
    own: u64,
    probe: bool,
    pool: Option<Arc<srq::Shared>>,
}

/// Most entries that are reserved for keepalives.
const MAX_RESERVE: u32 = 1 << 16;

/// Number of entries to request for the work of endpoints and for probes, from a device that supports `max`.
///
/// The queue has as many entries for probes as for work, up to [`MAX_RESERVE`]. Each endpoint needs at least one of those for work,
/// so up to this limit the others suffice for a probe of each.
pub(super) fn with_probes(capacity: u32, max: u32) -> u32 {
    capacity + capacity.min(MAX_RESERVE).min(max.saturating_sub(capacity))
}

impl Room {
    /// Room for `capacity` completions of work in a queue of `entries`. The other entries are for probes.
    pub(super) fn new(capacity: u32, entries: u32) -> Self {
        Room { capacity, reserve: entries.saturating_sub(capacity), probes: 0, occupied: 0, pools: Vec::new() }
    }

    /// Number of entries for work.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Computes the entries that a new endpoint needs.
    ///
    /// # Errors
    /// [`Error::EndpointSetFull`] unless they fit in along with those of the other endpoints.
    pub(super) fn check(&self, builder: &EndpointBuilder<'_>, probe: bool) -> Result<Demand> {
        let capacity = self.capacity;
        let pool = builder.pool().cloned();
        let own = sum(builder.depths());
        let is_new = |pool: &&Arc<srq::Shared>| self.pool_index(pool).is_none();
        let probes = (self.probes + u64::from(probe)).saturating_sub(self.reserve.into());
        let needed = self.occupied + own + pool.as_ref().filter(is_new).map_or(0, depth) + probes;
        if needed > u64::from(capacity) {
            return Err(Error::EndpointSetFull { needed, capacity });
        }
        Ok(Demand { own, probe, pool })
    }

    pub(super) fn occupy(&mut self, demand: Demand) {
        let Demand { own, probe, pool } = demand;
        self.occupied += own;
        self.probes += u64::from(probe);
        let Some(pool) = pool else { return };
        match self.pool_index(&pool) {
            Some(index) => self.pools[index].endpoints += 1,
            None => {
                self.occupied += depth(&pool);
                self.pools.push(PoolUse { pool, endpoints: 1 });
            }
        }
    }

    /// Frees the entries of a destroyed endpoint, all of whose completions have been polled.
    pub(super) fn vacate(&mut self, live: &Live) {
        self.occupied -= sum((live.sends.capacity(), live.receives.capacity()));
        self.probes -= u64::from(live.keepalive.is_some());
        let Some(index) = live.pool.as_ref().and_then(|pool| self.pool_index(pool)) else { return };
        self.pools[index].endpoints -= 1;
        if self.pools[index].endpoints == 0 {
            self.occupied -= depth(&self.pools.swap_remove(index).pool);
        }
    }

    /// Number of receives of all pools.
    pub(super) fn shared(&self) -> u32 {
        let shared: u64 = self.pools.iter().map(|pool_index| depth(&pool_index.pool)).sum();
        u32::try_from(shared).unwrap_or(u32::MAX)
    }

    fn pool_index(&self, pool: &Arc<srq::Shared>) -> Option<usize> {
        self.pools.iter().position(|pool_index| Arc::ptr_eq(&pool_index.pool, pool))
    }
}

fn sum((sends, receives): (u32, u32)) -> u64 {
    u64::from(sends) + u64::from(receives)
}

fn depth(pool: &Arc<srq::Shared>) -> u64 {
    u64::from(pool.receives())
}
