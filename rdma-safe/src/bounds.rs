//! Ranges of regions.

use crate::{Error, Result};

/// Whether there are `len` bytes from `offset` on in a region of `region` bytes.
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
