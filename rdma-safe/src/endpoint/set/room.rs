//! How much of the completion queue its endpoints may need.

use std::sync::Arc;

use crate::endpoint::{EndpointBuilder, Live};
use crate::{Error, Result, srq};

/// Completions that there can be at once: work stays in its ring, and a receive in its pool, until its completion was taken out of
/// the queue, and each has one at most.
#[derive(Default)]
pub(super) struct Room {
    occupied: u64,
    pools: Vec<Share>,
}

/// A pool that endpoints take from.
struct Share {
    pool: Arc<srq::Shared>,
    endpoints: usize,
}

/// What an endpoint needs.
pub(super) struct Wanted {
    own: u64,
    pool: Option<Arc<srq::Shared>>,
}

impl Room {
    /// # Errors
    /// [`Error::EndpointSetFull`] unless it fits into `capacity` beside the others.
    pub(super) fn find(&self, builder: &EndpointBuilder<'_>, capacity: u32) -> Result<Wanted> {
        let pool = builder.pool().cloned();
        let own = sum(builder.depths());
        let is_new = |pool: &&Arc<srq::Shared>| self.share(pool).is_none();
        let needed = self.occupied + own + pool.as_ref().filter(is_new).map_or(0, depth);
        if needed > u64::from(capacity) {
            return Err(Error::EndpointSetFull { needed, capacity });
        }
        Ok(Wanted { own, pool })
    }

    pub(super) fn occupy(&mut self, wanted: Wanted) {
        let Wanted { own, pool } = wanted;
        self.occupied += own;
        let Some(pool) = pool else { return };
        match self.share(&pool) {
            Some(index) => self.pools[index].endpoints += 1,
            None => {
                self.occupied += depth(&pool);
                self.pools.push(Share { pool, endpoints: 1 });
            }
        }
    }

    /// Of an endpoint that was destroyed, and none of whose completions is left.
    pub(super) fn vacate(&mut self, live: &Live) {
        self.occupied -= sum((live.sends.capacity(), live.receives.capacity()));
        let Some(index) = live.pool.as_ref().and_then(|pool| self.share(pool)) else { return };
        self.pools[index].endpoints -= 1;
        if self.pools[index].endpoints == 0 {
            self.occupied -= depth(&self.pools.swap_remove(index).pool);
        }
    }

    /// Number of receives of all pools.
    pub(super) fn shared(&self) -> u32 {
        let shared: u64 = self.pools.iter().map(|share| depth(&share.pool)).sum();
        u32::try_from(shared).unwrap_or(u32::MAX)
    }

    fn share(&self, pool: &Arc<srq::Shared>) -> Option<usize> {
        self.pools.iter().position(|share| Arc::ptr_eq(&share.pool, pool))
    }
}

fn sum((sends, receives): (u32, u32)) -> u64 {
    u64::from(sends) + u64::from(receives)
}

fn depth(pool: &Arc<srq::Shared>) -> u64 {
    u64::from(pool.receives())
}
