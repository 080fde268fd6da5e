//! Bounds checks of ranges in regions.

use crate::{Error, Result};

/// Checks that `offset..offset + len` lies in a region of `region` bytes.
///
/// # Errors
/// [`Error::OutOfBounds`].
#[inline]
pub(crate) fn check(offset: usize, len: usize, region: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(Error::OutOfBounds { offset, len, region }),
    }
}
