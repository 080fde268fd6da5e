//! Hints on branches for the compiler.

/// Marks the calling branch as unlikely, so that the compiler moves it out of the common path.
#[cold]
#[inline]
pub(crate) fn rare() {}
