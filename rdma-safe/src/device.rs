//! The RDMA devices of this host.

use std::ffi::CStr;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::named::named;
use crate::{Context, Errno, Error, Guid, Result};

/// The devices that libibverbs finds: `ibv_get_device_list(3)`.
///
/// The list is a snapshot. It stays valid when a device is unplugged; opening that device then fails.
///
/// # Errors
/// [`Error::Load`] without libibverbs, [`Error::DeviceList`] when the list cannot be read. An empty list, which is also what
/// a kernel without verbs support has, is not an error here; [`Device::first`] and [`Device::by_name`] make one of it.
#[doc(alias = "ibv_get_device_list")]
pub fn devices() -> Result<Vec<Device>> {
    let verbs = verbs()?;
    let mut count = 0;
    // SAFETY: `count` is a valid out pointer for the duration of the call.
    let list = match check_ptr(|| unsafe { (verbs.ibv_get_device_list)(&mut count) }) {
        Ok(list) => Arc::new(List { list, verbs }),
        // What libibverbs reports on a kernel without InfiniBand support: there is no device, and nothing is broken.
        Err(Errno(libc::ENOSYS)) => return Ok(Vec::new()),
        Err(errno) => return Err(Error::DeviceList { errno }),
    };
    let device = |index: usize| {
        // SAFETY: libibverbs returned an array of `count` device pointers followed by NULL; it lives until
        // `ibv_free_device_list`, which `List` calls on drop.
        let raw = NonNull::new(unsafe { *list.list.as_ptr().add(index) })?;
        Some(Device { raw, list: Arc::clone(&list) })
    };
    Ok((0..usize::try_from(count).unwrap_or(0)).map_while(device).collect())
}

/// One RDMA device, not opened: `struct ibv_device`.
#[derive(Clone)]
pub struct Device {
    raw: NonNull<ibv_device>,
    list: Arc<List>,
}

struct List {
    list: NonNull<*mut ibv_device>,
    verbs: &'static Verbs,
}

// SAFETY: the list is an immutable array that any thread may read and free (ibv_get_device_list(3) names no thread).
unsafe impl Send for List {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for List {}
// SAFETY: `ibv_device` is immutable after the list was made; libibverbs counts references to it under its own lock.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `list` came from `ibv_get_device_list`, and every `Device` that points into it holds this `Arc`, so
        // none is left. Devices that were opened are kept by libibverbs' own reference.
        unsafe { (self.verbs.ibv_free_device_list)(self.list.as_ptr()) }
    }
}

impl Device {
    /// The first device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is none, and those of [`devices`].
    pub fn first() -> Result<Device> {
        devices()?.into_iter().next().ok_or(Error::NoDevice)
    }

    /// The device with this kernel name, such as `mlx5_0` or `rxe0`.
    ///
    /// # Errors
    /// [`Error::DeviceNotFound`] names the devices there are; [`Error::NoDevice`] when there is none at all.
    pub fn by_name(name: &str) -> Result<Device> {
        find(format!("named {name}"), |device| device.name() == name)
    }

    /// The device with this node GUID.
    ///
    /// # Errors
    /// As [`Device::by_name`].
    pub fn by_guid(guid: Guid) -> Result<Device> {
        find(format!("with GUID {guid}"), |device| device.guid() == guid)
    }

    /// The device with this kernel index, which stays the same while the device exists: `ibv_get_device_index(3)`.
    ///
    /// # Errors
    /// As [`Device::by_name`].
    pub fn by_index(index: u32) -> Result<Device> {
        find(format!("with index {index}"), |device| device.index() == Some(index))
    }

    /// Kernel name, such as `mlx5_0`: `ibv_get_device_name(3)`.
    #[must_use]
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self) -> String {
        // SAFETY: the device is valid while the list is, and its name is a NUL-terminated string inside it.
        unsafe { CStr::from_ptr((self.list.verbs.ibv_get_device_name)(self.raw.as_ptr())) }
            .to_string_lossy()
            .into_owned()
    }

    /// Name of the character device below `/dev/infiniband`, such as `uverbs0`.
    #[must_use]
    pub fn uverbs_name(&self) -> String {
        // SAFETY: `dev_name` is a NUL-terminated array inside a device that is valid while the list is.
        unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).dev_name).cast()) }.to_string_lossy().into_owned()
    }

    /// Node GUID: `ibv_get_device_guid(3)`.
    #[must_use]
    #[doc(alias = "ibv_get_device_guid")]
    pub fn guid(&self) -> Guid {
        // SAFETY: the device is valid while the list is.
        Guid::from_be(unsafe { (self.list.verbs.ibv_get_device_guid)(self.raw.as_ptr()) })
    }

    /// Kernel index, stable while the device exists; `None` where the kernel has no RDMA netlink:
    /// `ibv_get_device_index(3)`.
    #[must_use]
    #[doc(alias = "ibv_get_device_index")]
    pub fn index(&self) -> Option<u32> {
        // SAFETY: the device is valid while the list is.
        let index = unsafe { (self.list.verbs.ibv_get_device_index)(self.raw.as_ptr()) };
        u32::try_from(index).ok()
    }

    /// Kind of node.
    #[must_use]
    pub fn node_type(&self) -> NodeType {
        // SAFETY: the device is valid and immutable while the list is.
        NodeType(unsafe { (*self.raw.as_ptr()).node_type }.0)
    }

    /// Kind of transport.
    #[must_use]
    pub fn transport_type(&self) -> TransportType {
        // SAFETY: as for `node_type`.
        TransportType(unsafe { (*self.raw.as_ptr()).transport_type }.0)
    }

    /// Opens it: `ibv_open_device(3)`.
    ///
    /// # Errors
    /// [`Error::OpenDevice`], for instance with `EACCES` when this user may not open `/dev/infiniband/uverbs*`.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self) -> Result<Context> {
        Context::open(self, self.list.verbs)
    }

    /// The C object, valid while this `Device` is.
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

fn find(wanted: String, is_it: impl Fn(&Device) -> bool) -> Result<Device> {
    let devices = devices()?;
    if devices.is_empty() {
        return Err(Error::NoDevice);
    }
    match devices.iter().find(|device| is_it(device)) {
        Some(device) => Ok(device.clone()),
        None => Err(Error::DeviceNotFound { wanted, available: devices.iter().map(Device::name).collect() }),
    }
}

named! {
    /// Kind of node: `enum ibv_node_type`.
    pub struct NodeType(i32) as "node type" {
        /// Not known.
        UNKNOWN = IBV_NODE_UNKNOWN.0 => "unknown",
        /// An InfiniBand or RoCE adapter.
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
        /// An adapter without a transport that verbs names, such as EFA.
        UNSPECIFIED = IBV_NODE_UNSPECIFIED.0 => "unspecified",
    }
}

named! {
    /// Kind of transport: `enum ibv_transport_type`.
    pub struct TransportType(i32) as "transport" {
        /// Not known.
        UNKNOWN = IBV_TRANSPORT_UNKNOWN.0 => "invalid transport",
        /// InfiniBand, which RoCE counts as.
        IB = IBV_TRANSPORT_IB.0 => "InfiniBand",
        /// iWARP.
        IWARP = IBV_TRANSPORT_IWARP.0 => "iWARP",
        /// usNIC.
        USNIC = IBV_TRANSPORT_USNIC.0 => "usNIC",
        /// usNIC over UDP.
        USNIC_UDP = IBV_TRANSPORT_USNIC_UDP.0 => "usNIC UDP",
        /// None that verbs names.
        UNSPECIFIED = IBV_TRANSPORT_UNSPECIFIED.0 => "unspecified",
    }
}
