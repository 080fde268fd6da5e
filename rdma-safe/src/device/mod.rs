//! The RDMA devices of this host: how to find and open them, and what they support.
//!
//! Start with [`Device::first`] or [`devices`]. [`Device::open`] returns a [`Context`], which makes all other objects.

mod attributes;
mod clock;
mod context;
mod import;
mod quirks;

use std::ffi::CStr;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::address::Guid;
use crate::errno::check_ptr;
use crate::named::named;
use crate::{Errno, Error, Result};

pub use attributes::{
    AtomicCapability, CqModeration, DeviceAttributes, DeviceCapabilities, OdpCapabilities, OdpOperations,
    OnDemandPaging, PacketPacing, PciAtomicSizes, PciAtomics, QueuePairTypes, RawPacketCapabilities,
    ReceiveSideScaling, RxHashFields, RxHashFunctions, SegmentationOffload, TagMatching, TagMatchingFlags,
};
pub use clock::{ClockReading, DeviceClock};
pub use context::Context;
pub use quirks::Quirks;

/// The devices that libibverbs finds: `ibv_get_device_list(3)`.
///
/// The list is a snapshot. It stays valid when a device is unplugged; opening that device then fails.
///
/// # Errors
/// [`Error::Load`] without libibverbs; [`Error::DeviceList`] if the list cannot be read. An empty list is not an error,
/// also on a kernel without verbs support. [`Device::first`] and [`Device::by_name`] report it as an error.
#[doc(alias = "ibv_get_device_list")]
pub fn devices() -> Result<Vec<Device>> {
    let verbs = verbs()?;
    let mut count = 0;
    // SAFETY: `count` is a valid out pointer for the duration of the call.
    let list = match check_ptr(|| unsafe { (verbs.ibv_get_device_list)(&mut count) }) {
        Ok(list) => Arc::new(List { list, verbs }),
        // libibverbs reports this on a kernel without InfiniBand support: there is no device, but this is not a
        // failure.
        Err(Errno(libc::ENOSYS)) => return Ok(Vec::new()),
        Err(errno) => return Err(Error::DeviceList { errno }),
    };
    let device = |index: usize| {
        // SAFETY: libibverbs returned an array of `count` device pointers and a final NULL. It exists until `List`
        // frees it on drop.
        let raw = NonNull::new(unsafe { *list.list.as_ptr().add(index) })?;
        Some(Device { raw, list: Arc::clone(&list) })
    };
    Ok((0..usize::try_from(count).unwrap_or(0)).map_while(device).collect())
}

/// An RDMA device that is not opened: `struct ibv_device`.
#[derive(Clone)]
pub struct Device {
    raw: NonNull<ibv_device>,
    list: Arc<List>,
}

struct List {
    list: NonNull<*mut ibv_device>,
    verbs: &'static Verbs,
}

// SAFETY: the list is an immutable array that any thread may read and free (ibv_get_device_list(3) has no restriction).
unsafe impl Send for List {}
// SAFETY: a shared reference only reads the immutable array.
unsafe impl Sync for List {}
// SAFETY: `ibv_device` is immutable once the list exists. libibverbs counts references to it under its own lock.
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `list` came from `ibv_get_device_list`. Each `Device` that points into it holds this `Arc`, so none
        // is left. libibverbs has its own references to opened devices.
        unsafe { (self.verbs.ibv_free_device_list)(self.list.as_ptr()) }
    }
}

impl Device {
    /// The first device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none; those of [`devices`].
    pub fn first() -> Result<Device> {
        devices()?.into_iter().next().ok_or(Error::NoDevice)
    }

    /// The device with this kernel name, such as `mlx5_0` or `rxe0`.
    ///
    /// # Errors
    /// [`Error::DeviceNotFound`], which lists the available devices; [`Error::NoDevice`] if there is none.
    pub fn by_name(name: &str) -> Result<Device> {
        find(format!("named {name}"), |device| device.name() == name)
    }

    /// The device with this node GUID.
    ///
    /// # Errors
    /// Those of [`Device::by_name`].
    pub fn by_guid(guid: Guid) -> Result<Device> {
        find(format!("with GUID {guid}"), |device| device.guid() == guid)
    }

    /// The device with this kernel index, which does not change as long as the device exists:
    /// `ibv_get_device_index(3)`.
    ///
    /// # Errors
    /// Those of [`Device::by_name`].
    pub fn by_index(index: u32) -> Result<Device> {
        find(format!("with index {index}"), |device| device.index() == Some(index))
    }

    /// Kernel name, such as `mlx5_0`: `ibv_get_device_name(3)`.
    #[must_use]
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self) -> String {
        // SAFETY: the device is valid as long as the list, and its name is a NUL-terminated string in it.
        unsafe { CStr::from_ptr((self.list.verbs.ibv_get_device_name)(self.raw.as_ptr())) }
            .to_string_lossy()
            .into_owned()
    }

    /// Name of the character device in `/dev/infiniband`, such as `uverbs0`.
    #[must_use]
    pub fn uverbs_name(&self) -> String {
        // SAFETY: `dev_name` is a NUL-terminated array in a device that is valid as long as the list.
        unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).dev_name).cast()) }.to_string_lossy().into_owned()
    }

    /// Node GUID: `ibv_get_device_guid(3)`.
    #[must_use]
    #[doc(alias = "ibv_get_device_guid")]
    pub fn guid(&self) -> Guid {
        // SAFETY: the device is valid as long as the list.
        Guid::from_be(unsafe { (self.list.verbs.ibv_get_device_guid)(self.raw.as_ptr()) })
    }

    /// Kernel index, which does not change as long as the device exists: `ibv_get_device_index(3)`.
    ///
    /// `None` if the kernel has no RDMA netlink.
    #[must_use]
    #[doc(alias = "ibv_get_device_index")]
    pub fn index(&self) -> Option<u32> {
        // SAFETY: the device is valid as long as the list.
        let index = unsafe { (self.list.verbs.ibv_get_device_index)(self.raw.as_ptr()) };
        u32::try_from(index).ok()
    }

    /// Node type.
    #[must_use]
    pub fn node_type(&self) -> NodeType {
        // SAFETY: the device is valid and immutable as long as the list.
        NodeType(unsafe { (*self.raw.as_ptr()).node_type }.0)
    }

    /// Transport type.
    #[must_use]
    pub fn transport_type(&self) -> TransportType {
        // SAFETY: as for `node_type`.
        TransportType(unsafe { (*self.raw.as_ptr()).transport_type }.0)
    }

    /// Opens the device: `ibv_open_device(3)`.
    ///
    /// # Errors
    /// [`Error::OpenDevice`], for example with `EACCES` if this user may not open `/dev/infiniband/uverbs*`.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self) -> Result<Context> {
        Context::open(self, self.list.verbs)
    }

    /// The C object, valid while this `Device` exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_device {
        self.raw.as_ptr()
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).field("guid", &self.guid()).finish()
    }
}

fn find(requested: String, is_it: impl Fn(&Device) -> bool) -> Result<Device> {
    let devices = devices()?;
    if devices.is_empty() {
        return Err(Error::NoDevice);
    }
    match devices.iter().find(|device| is_it(device)) {
        Some(device) => Ok(device.clone()),
        None => Err(Error::DeviceNotFound { requested, available: devices.iter().map(Device::name).collect() }),
    }
}

named! {
    /// Node type: `enum ibv_node_type`.
    pub struct NodeType(i32) as "node type" {
        /// Unknown.
        UNKNOWN = IBV_NODE_UNKNOWN.0 => "unknown",
        /// An InfiniBand or RoCE adapter (channel adapter).
        CA = IBV_NODE_CA.0 => "InfiniBand channel adapter",
        /// An InfiniBand switch.
        SWITCH = IBV_NODE_SWITCH.0 => "InfiniBand switch",
        /// An InfiniBand router.
        ROUTER = IBV_NODE_ROUTER.0 => "InfiniBand router",
        /// An iWARP adapter.
        RNIC = IBV_NODE_RNIC.0 => "iWARP NIC",
        /// A usNIC adapter.
        USNIC = IBV_NODE_USNIC.0 => "usNIC",
        /// A usNIC adapter over UDP.
        USNIC_UDP = IBV_NODE_USNIC_UDP.0 => "usNIC UDP",
        /// An adapter with another transport, such as EFA.
        UNSPECIFIED = IBV_NODE_UNSPECIFIED.0 => "unspecified",
    }
}

named! {
    /// Transport type: `enum ibv_transport_type`.
    pub struct TransportType(i32) as "transport" {
        /// Unknown.
        UNKNOWN = IBV_TRANSPORT_UNKNOWN.0 => "invalid transport",
        /// InfiniBand or RoCE.
        IB = IBV_TRANSPORT_IB.0 => "InfiniBand",
        /// iWARP.
        IWARP = IBV_TRANSPORT_IWARP.0 => "iWARP",
        /// usNIC.
        USNIC = IBV_TRANSPORT_USNIC.0 => "usNIC",
        /// usNIC over UDP.
        USNIC_UDP = IBV_TRANSPORT_USNIC_UDP.0 => "usNIC UDP",
        /// Another transport.
        UNSPECIFIED = IBV_TRANSPORT_UNSPECIFIED.0 => "unspecified",
    }
}
