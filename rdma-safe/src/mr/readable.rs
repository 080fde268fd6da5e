//! Registered bytes that do not change, and that peers can read.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::shared::ReadOnlyBacking;
use super::{ReadOnly, Region, RegisterError, RemoteMemory};
use crate::{Access, ProtectionDomain};

/// Registered bytes that do not change, and that peers can read at any time.
///
/// Unlike [`ExposedRegion`](crate::ExposedRegion) it lends its bytes, since no peer can write to them. It takes memory that others
/// share and read at the same time, such as `Arc<[u8]>`, `Bytes` and [`SharedBuffer`](crate::SharedBuffer). Dropping it revokes the
/// access, and a later read fails.
///
/// ```
/// # #[cfg(feature = "soft")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # rdma_safe::soft::install()?;
/// use std::time::Duration;
/// use rdma_safe::{Access, Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let region = pd.expose_read_only("hello world".to_owned())?;
/// let mut owner = Endpoint::builder(&pd).peer_access(Access::REMOTE_READ).build()?;
/// // The peer would be on another host.
/// let mut peer = Endpoint::builder(&pd).build()?;
/// owner.connect(&peer.address())?;
/// peer.connect(&owner.address())?;
///
/// peer.read(pd.allocate(5)?, region.remote().slice(6, 5)?)?;
/// let read = peer.wait(Duration::from_secs(60))?.ok()?.buffer.unwrap();
/// assert_eq!(&read[..], b"world");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "soft"))]
/// # fn main() {}
/// ```
pub struct ReadableRegion {
    region: Arc<Region>,
}

impl ReadableRegion {
    /// The domain of the region.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.region.registration.pd()
    }

    /// Address and key for peers. Give them only to peers that may read the bytes.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { address: self.region.iova, len: self.region.len as u64, rkey: self.region.registration.rkey }
    }
}

impl Deref for ReadableRegion {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region keeps memory that `ReadOnly` describes, so these bytes exist, are initialised and do not change as
        // long as the region exists. `expose_read_only`, which alone makes this type, registers them without any write access.
        unsafe { std::slice::from_raw_parts(self.region.address.as_ptr(), self.region.len) }
    }
}

impl fmt::Debug for ReadableRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadableRegion").field("remote", &self.remote()).finish_non_exhaustive()
    }
}

impl ProtectionDomain {
    /// Registers bytes that do not change, for peers to read: `ibv_reg_mr(3)` with remote read access alone.
    ///
    /// Peers need the address and key from [`ReadableRegion::remote`], and a local queue pair that allows reads
    /// ([`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access)).
    ///
    /// # Errors
    /// [`RegisterError`] returns the memory, with the errors of [`ProtectionDomain::register`].
    pub fn expose_read_only<M: ReadOnly>(&self, memory: M) -> Result<ReadableRegion, RegisterError<M>> {
        match Region::new::<M, _>(self.registration(Access::REMOTE_READ), Box::new(ReadOnlyBacking(memory)), None) {
            Ok(region) => Ok(ReadableRegion { region }),
            Err((error, backing)) => Err(RegisterError { error, memory: backing.0 }),
        }
    }
}
