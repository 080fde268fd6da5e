//! Timers by number, at most one for each.

use std::collections::{BTreeMap, BTreeSet};

use super::ConnectionId;
use crate::transport::Time;

/// Timers of connections and lookups, or of ids.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Timers {
    by_time: BTreeSet<(Time, ConnectionId)>,
    by_id: BTreeMap<ConnectionId, Time>,
}

impl Timers {
    /// Sets the timer of a connection, in place of its current one.
    pub(crate) fn set(&mut self, id: ConnectionId, at: Time) {
        self.clear(id);
        self.by_time.insert((at, id));
        self.by_id.insert(id, at);
    }

    /// Stops the timer of a connection. Returns whether there was one.
    pub(crate) fn clear(&mut self, id: ConnectionId) -> bool {
        match self.by_id.remove(&id) {
            Some(at) => self.by_time.remove(&(at, id)),
            None => false,
        }
    }

    /// The earliest timer.
    pub(crate) fn first(&self) -> Option<(Time, ConnectionId)> {
        self.by_time.first().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn has(&self, id: ConnectionId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// The connections with a timer.
    pub(super) fn ids(&self) -> impl Iterator<Item = ConnectionId> + '_ {
        self.by_id.keys().copied()
    }
}
