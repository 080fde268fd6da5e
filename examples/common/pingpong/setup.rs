//! Settings, domain and memory of an end.

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Errno, ProtectionDomain};

use super::{PeerOptions, pattern};
use crate::Result;

/// Settings of one end, and the domain for its objects.
#[derive(Debug)]
pub struct Setup<'a> {
    pub pd: &'a ProtectionDomain,
    pub peer: &'a PeerOptions,
    /// Length of a message in bytes.
    pub size: usize,
    /// Messages each way, over all queue pairs.
    pub iters: u32,
    /// Receives to keep posted, over all queue pairs.
    pub rx_depth: u32,
    /// The server checks the last messages.
    pub check: bool,
}

impl Setup<'_> {
    /// Registers memory for `count` buffers, each with room for `header` bytes and a message.
    ///
    /// Returns the memory as one buffer, and the length to split it into.
    pub fn allocate(&self, count: usize, header: usize, access: Access) -> Result<(Buffer, usize)> {
        /// No two messages share a cache line. Long ones begin at a page, like the message of the C programs.
        const CACHE_LINE: usize = 64;

        let (size, page) = (self.size, Pages::page_size());
        let stride = (header + size).next_multiple_of(if header + size < page { CACHE_LINE } else { page });
        let too_large = |problem: String| {
            format!("{problem}; {count} buffers for messages of {size} bytes are needed: use a smaller --rx-depth")
        };
        let len = stride.checked_mul(count).ok_or_else(|| too_large("the buffers do not fit into memory".into()))?;
        let region = Pages::new(len).and_then(|pages| self.pd.register_with(pages, access));
        let mut region = region.map_err(|error| match error {
            rdma_safe::Error::Allocate { .. } | rdma_safe::Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. } => {
                too_large(error.to_string()).into()
            }
            error => Box::<dyn std::error::Error + Send + Sync>::from(error),
        })?;
        if self.check {
            // Unmarked, so that a page that no message wrote to fails the check.
            pattern::fill(&mut region, false);
        }
        Ok((region, stride))
    }
}
