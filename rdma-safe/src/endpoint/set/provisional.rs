//! Members of a set that are connecting, and leave the set if the attempt is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{EndpointKey, EndpointSet};

/// A member that leaves its set when this is dropped, with the next call of the set.
#[derive(Debug)]
pub(crate) struct Provisional {
    key: EndpointKey,
    dropped: Arc<Dropped>,
    is_kept: bool,
}

impl Provisional {
    /// The key of the endpoint.
    pub(crate) fn key(&self) -> EndpointKey {
        self.key
    }

    /// Makes the endpoint a permanent member.
    pub(crate) fn keep(mut self) -> EndpointKey {
        self.is_kept = true;
        self.key
    }
}

impl Drop for Provisional {
    fn drop(&mut self) {
        self.dropped.end(Some(self.key).filter(|_| !self.is_kept));
    }
}

/// The provisional members of a set that were dropped.
#[derive(Default, Debug)]
pub(super) struct Dropped {
    state: Mutex<State>,
    /// Whether the state has changed since [`Dropped::take`].
    has_changed: AtomicBool,
}

#[derive(Default, Debug)]
struct State {
    /// Keys of the dropped members.
    keys: Vec<EndpointKey>,
    /// Number of provisional members that are neither dropped nor kept.
    remaining: usize,
}

impl Dropped {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the provisional membership of an endpoint, which is dropped if there is a key.
    fn end(&self, dropped: Option<EndpointKey>) {
        let mut state = self.lock();
        state.remaining -= 1;
        state.keys.extend(dropped);
        self.has_changed.store(true, Ordering::Release);
    }

    /// Takes the keys of the dropped members and returns them with the number of provisional members; `None` if nothing
    /// has changed.
    fn take(&self) -> Option<(Vec<EndpointKey>, usize)> {
        if !self.has_changed.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.lock();
        self.has_changed.store(false, Ordering::Release);
        Some((std::mem::take(&mut state.keys), state.remaining))
    }

    fn contains(&self, key: EndpointKey) -> bool {
        self.has_changed.load(Ordering::Acquire) && self.lock().keys.contains(&key)
    }
}

impl EndpointSet {
    /// Makes a member provisional.
    pub(crate) fn provisional(&mut self, key: EndpointKey) -> Provisional {
        self.has_provisional = true;
        self.update_looks();
        self.dropped.lock().remaining += 1;
        Provisional { key, dropped: self.dropped.clone(), is_kept: false }
    }

    /// Removes the members whose [`Provisional`] was dropped.
    ///
    /// An endpoint that cannot be destroyed is leaked, as with [`EndpointSet::remove`].
    #[cold]
    #[inline(never)]
    pub(super) fn remove_dropped(&mut self) {
        let Some((keys, remaining)) = self.dropped.take() else { return };
        for key in keys {
            let _ = self.remove(key);
        }
        self.has_provisional = remaining != 0;
        self.update_looks();
    }

    /// Whether the [`Provisional`] of a member was dropped, so that it no longer counts as a member.
    pub(super) fn was_dropped(&self, key: EndpointKey) -> bool {
        self.has_provisional && self.dropped.contains(key)
    }
}
