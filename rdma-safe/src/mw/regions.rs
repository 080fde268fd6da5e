//! Regions that a memory window may be bound to.

use super::bind_info::{BindInfo, BoundRegion};

/// Maximum number of regions of one window.
const MAX: usize = 64;

/// All regions that bindings of the window have used.
///
/// The user reports how a binding ended, and may be wrong. A device need not refuse to deregister a region that a
/// window is bound to: the kernel's mlx5 driver does not check for windows. So all these regions stay registered until
/// the window is deallocated.
#[derive(Default)]
pub(super) struct Regions(Vec<BoundRegion>);

impl Regions {
    pub(super) const MAX: usize = MAX;

    /// Whether the window may also be bound to this region.
    #[inline]
    pub(super) fn have_room_for(&self, info: &BindInfo<'_>) -> bool {
        self.0.len() < MAX || self.contains(info)
    }

    /// Keeps a region, unless it is already kept.
    #[inline]
    pub(super) fn keep(&mut self, info: &BindInfo<'_>) {
        if !self.contains(info) {
            self.0.push(info.keep());
        }
    }

    /// Releases all regions except those that `is_needed` selects.
    pub(super) fn retain(&mut self, is_needed: impl Fn(&BoundRegion) -> bool) {
        self.0.retain(is_needed);
    }

    fn contains(&self, info: &BindInfo<'_>) -> bool {
        self.0.iter().any(|region| region.as_raw() == info.region_raw())
    }
}
