//! Registered memory.
//!
//! There are six types:
//!
//! | type | access to the bytes | view of the CPU |
//! |---|---|---|
//! | [`Buffer`] | this process, and the device while the buffer is in flight | `&[u8]`, `&mut [u8]` |
//! | [`SharedBuffer`] | this process and, at any time, the device, which only reads | `&[u8]` |
//! | [`ReadableRegion`] | this process, and at any time peers, which only read | `&[u8]` |
//! | [`ExposedRegion`] | this process, and peers at any time | atomic access, never a slice |
//! | [`NullRegion`] | there are no bytes | none: a key |
//! | [`ImportedRegion`] | determined by its owner, another process | none: keys |
//! | [`RawMemoryRegion`] | determined by the `unsafe` caller | none: keys and an address |

mod access;
mod advise;
mod backing;
mod buffer;
mod builder;
mod cut;
mod dmabuf;
mod exposed;
mod exposed_part;
mod gather;
mod huge_pages;
mod implicit;
mod imported;
mod list;
mod memory;
mod null;
mod piece;
mod provider_memory;
mod raw;
mod readable;
mod reclaim;
mod region;
mod register;
mod registration;
mod remote;
mod reregister;
mod returned;
mod shared;

pub use access::Access;
pub use advise::Advice;
pub use backing::{Backing, Pages};
pub use buffer::Buffer;
pub use builder::RegistrationBuilder;
pub use cut::{JoinError, JoinReason};
pub use exposed::ExposedRegion;
pub use exposed_part::ExposedPart;
pub use gather::{Gather, IntoIter};
pub use huge_pages::{HugePages, PageKind};
pub use imported::ImportedRegion;
pub use memory::Memory;
pub use null::NullRegion;
pub use piece::Piece;
pub use provider_memory::ProviderMemory;
pub use raw::RawMemoryRegion;
pub use readable::ReadableRegion;
pub use reclaim::{ReclaimError, ReclaimReason};
pub(crate) use region::Region;
pub use register::RegisterError;
pub(crate) use registration::Registration;
pub use remote::RemoteMemory;
pub use reregister::{ReregisterError, Reregistration};
pub use returned::Returned;
pub use shared::{ReadOnly, SharedBuffer};
