//! Keeping a queue pair for flows and memory windows that outlive its handle.

use std::sync::{Arc, OnceLock};

use super::{Core, Parents};
use crate::Error;
use crate::object::Object;

/// Keeps the C object of a queue pair that is dropped before its flows and memory windows.
///
/// Each of them holds an `Arc` of it. The [`QueuePair`](super::QueuePair) owns the C object until it is dropped. Then the last
/// owner of the keeper destroys the object.
#[derive(Default)]
pub(crate) struct Keeper(OnceLock<Object<Parents>>);

impl Core {
    /// The keeper of the queue pair. The C object exists at least as long as a clone of this.
    pub(crate) fn keeper(&self) -> Arc<Keeper> {
        Arc::clone(self.extras().get_or_insert_default().keeper.get_or_insert_default())
    }

    /// Leaves the C object to flows and memory windows that use it, and returns the error that says so.
    ///
    /// # Safety
    /// `self` must only be dropped afterwards.
    #[cold]
    pub(super) unsafe fn leave_to_users(&mut self) -> Error {
        let keeper = self.object.extras_mut().as_mut().and_then(|extras| extras.keeper.take());
        // SAFETY: the caller's contract.
        let object = unsafe { self.object.take() };
        if let Some(keeper) = keeper {
            let left = keeper.0.set(object).is_ok();
            debug_assert!(left, "only the queue pair leaves its C object");
        }
        Error::InUse { object: "queue pair", users: "flows or memory windows" }
    }
}

impl Parents {
    /// Whether flows or memory windows use the queue pair.
    #[inline(always)]
    pub(super) fn has_users(&mut self) -> bool {
        let keeper = self.extras_mut().as_mut().and_then(|extras| extras.keeper.as_mut());
        keeper.is_some_and(|keeper| Arc::get_mut(keeper).is_none())
    }
}
