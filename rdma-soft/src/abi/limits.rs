//! The limits of the device.

/// Bytes of a message: 2²² packets at the smallest MTU. Their PSNs, of 24 bits, must tell them apart.
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;

/// Work requests in a queue.
pub(crate) const MAX_WR: u32 = 1 << 15;
/// Completions in a queue.
pub(crate) const MAX_CQE: u32 = 1 << 22;
/// Scatter/gather elements of a work request.
pub(crate) const MAX_SGE: u32 = 32;
/// Bytes of inline data of a work request.
pub(crate) const MAX_INLINE: u32 = 1024;
/// Bytes of inline data that every queue pair takes: the size of a scatter/gather element.
///
/// Devices use the memory of the elements for inline data, so they grant more than a program asks for. `rdma_xclient` asks for none
/// and sends 16 bytes inline.
pub(crate) const MIN_INLINE: u32 = 16;
/// Incoming and outgoing reads and atomics that a queue pair may have outstanding.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
/// Objects of each type that the device reports as its limit.
pub(crate) const MAX_OBJECTS: i32 = 1 << 16;
