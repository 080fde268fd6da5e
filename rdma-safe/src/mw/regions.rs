//! The regions that a window may be bound to.

use super::bind_info::{BindInfo, Kept};

/// Most regions that one window may be bound to.
const MAX: usize = 64;

/// Every region that a binding of the window has named.
///
/// The user reports how a binding ended, and may be wrong. The device need not refuse to deregister a region that a window is bound
/// to: the kernel's mlx5 driver does not check for windows. So all these regions stay until the window is deallocated.
#[derive(Default)]
pub(super) struct Regions(Vec<Kept>);

impl Regions {
    pub(super) const MAX: usize = MAX;

    /// Whether the window may be bound to this region, too.
    #[inline]
    pub(super) fn have_room_for(&self, info: &BindInfo<'_>) -> bool {
        self.0.len() < MAX || self.contains(info)
    }

    /// Keeps a region, unless it is kept already.
    #[inline]
    pub(super) fn keep(&mut self, info: &BindInfo<'_>) {
        if !self.contains(info) {
            self.0.push(info.keep());
        }
    }

    /// Releases all regions but these.
    pub(super) fn retain(&mut self, is_needed: impl Fn(&Kept) -> bool) {
        self.0.retain(is_needed);
    }

    fn contains(&self, info: &BindInfo<'_>) -> bool {
        self.0.iter().any(|kept| kept.as_raw() == info.region_raw())
    }
}
