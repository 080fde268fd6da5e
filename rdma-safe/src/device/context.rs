//! Opened devices, and queries of their ports and tables.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::address::{GidEntry, recommended};
use crate::cq::CompletionQueueBuilder;
use crate::device::{DeviceAttributes, Quirks, TransportType};
use crate::errno::{check, check_neg, check_ptr};
use crate::error::Verb;
use crate::fork::{self, Creator};
use crate::port::PortAttributes;
use crate::{CompletionChannel, Device, Errno, Error, Gid, GidType, ProtectionDomain, Result};

/// An opened device: `struct ibv_context`. Clones share it. It is closed with the last object made from it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<ibv_context>,
    verbs: &'static Verbs,
    name: String,
    transport: TransportType,
    attributes: DeviceAttributes,
    quirks: Quirks,
    /// Whether to close the context on drop.
    owned: bool,
    creator: Creator,
}

// SAFETY: libibverbs is thread-safe: any thread may call it with a context (rdma-core Documentation/libibverbs.md,
// "Thread safety"). The other fields are immutable.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned || self.creator.is_parent() {
            return;
        }
        // SAFETY: every object made from this context holds an `Arc` of the context, so no such object is left. The manual
        // documents no failure of this call. A failure would leak the descriptor, and cannot be reported here.
        unsafe { (self.verbs.ibv_close_device)(self.raw.as_ptr()) };
    }
}

impl Context {
    pub(crate) fn open(device: &Device, verbs: &'static Verbs) -> Result<Context> {
        fork::device_opened();
        // SAFETY: the device is valid as long as `device`.
        let raw = check_ptr(|| unsafe { (verbs.ibv_open_device)(device.as_raw()) })
            .map_err(|errno| Error::OpenDevice { device: device.name(), errno })?;
        Context::new(raw, verbs, device.name(), device.transport_type(), true)
    }

    /// Queries a valid context. It must be `owned`, or outlive this `Context`.
    fn new(
        raw: NonNull<ibv_context>,
        verbs: &'static Verbs,
        name: String,
        transport: TransportType,
        owned: bool,
    ) -> Result<Context> {
        let watched = fork::watch();
        // Created before the attributes are queried, so that an error closes the device.
        let (attributes, quirks) = (DeviceAttributes::zeroed(), Quirks::default());
        let mut inner = Inner { raw, verbs, name, transport, attributes, quirks, owned, creator: Creator::current() };
        if let Err(errno) = watched {
            return Err(Error::Verb { verb: Verb::PthreadAtfork, device: inner.name.clone(), errno });
        }
        inner.attributes = query_device(&inner)?;
        inner.quirks = Quirks::of(&inner.attributes, verbs);
        Ok(Context { inner: Arc::new(inner) })
    }

    /// Adopts a context that other code has opened, for example with vendor options (`mlx5dv_open_device`).
    ///
    /// It is closed with the last object that is made from it.
    ///
    /// # Errors
    /// [`Error::Load`]; [`Error::Verb`] if the device attributes cannot be queried: the context is then closed.
    ///
    /// # Safety
    /// `raw` must be a context of the libibverbs that this crate uses ([`sys::verbs`](crate::sys::verbs)), which nobody
    /// else closes. Other objects made from it must be destroyed before it is closed.
    pub unsafe fn from_raw(raw: NonNull<ibv_context>) -> Result<Context> {
        // SAFETY: the caller's contract.
        unsafe { Context::adopt(raw, true) }
    }

    /// Adopts a context like [`Context::from_raw`], but does not close it: for example a context of librdmacm.
    ///
    /// # Errors
    /// Those of [`Context::from_raw`]; the context stays open.
    ///
    /// # Safety
    /// Those of [`Context::from_raw`], except that other code closes the context. It must not do so as long as this, or
    /// anything made from it, exists.
    pub unsafe fn from_raw_borrowed(raw: NonNull<ibv_context>) -> Result<Context> {
        // SAFETY: the caller's contract.
        unsafe { Context::adopt(raw, false) }
    }

    /// # Safety
    /// See [`Context::from_raw`].
    unsafe fn adopt(raw: NonNull<ibv_context>, owned: bool) -> Result<Context> {
        let verbs = rdma_sys::verbs()?;
        fork::device_opened();
        // SAFETY: the caller guarantees that the context, and so its device, is valid. The name is a NUL-terminated
        // string in it.
        let (name, transport) = unsafe {
            let device = (*raw.as_ptr()).device;
            let name = std::ffi::CStr::from_ptr((verbs.ibv_get_device_name)(device));
            (name.to_string_lossy().into_owned(), TransportType((*device).transport_type.0))
        };
        Context::new(raw, verbs, name, transport, owned)
    }

    /// Kernel name of the device, such as `mlx5_0`.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.inner.name
    }

    /// Transport type.
    #[must_use]
    pub fn transport_type(&self) -> TransportType {
        self.inner.transport
    }

    /// Limits and capabilities when the device was opened: `ibv_query_device_ex(3)`, or `ibv_query_device(3)` if the
    /// provider lacks it.
    #[must_use]
    #[doc(alias = "ibv_query_device")]
    #[doc(alias = "ibv_query_device_ex")]
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.inner.attributes
    }

    /// Deviations of this device's provider that this crate works around.
    #[must_use]
    pub fn quirks(&self) -> Quirks {
        self.inner.quirks
    }

    /// The NUMA node that the device is attached to: `numa_node` in sysfs, read in each call.
    ///
    /// `None` if the host has one node, and for software devices. Memory on this node is nearest to the device, see
    /// [`HugePages::on_node`](crate::mr::HugePages::on_node).
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        let path = format!("/sys/class/infiniband/{}/device/numa_node", self.device_name());
        parse_node(&std::fs::read_to_string(path).ok()?)
    }

    /// Number of completion vectors, across which completion events can be spread.
    #[must_use]
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is valid, and the field does not change after opening.
        unsafe { (*self.as_raw()).num_comp_vectors }.max(0) as u32
    }

    /// State and tables of `port`, which counts from 1: `ibv_query_port(3)`.
    ///
    /// # Errors
    /// [`Error::NoSuchPort`], or [`Error::Verb`].
    #[doc(alias = "ibv_query_port")]
    pub fn query_port(&self, port: u8) -> Result<PortAttributes> {
        let ports = self.attributes().ports();
        if port == 0 || port > ports {
            return Err(Error::NoSuchPort { device: self.device_name().into(), port, ports });
        }
        let mut attributes = ibv_port_attr::zeroed();
        // SAFETY: the context is valid, and `attributes` has the size that the shim passes along.
        check(unsafe { ibv_query_port(self.as_raw(), port, &mut attributes) })
            .map_err(|errno| self.verb_error(Verb::QueryPort, errno))?;
        Ok(PortAttributes::from_raw(attributes))
    }

    /// Speed of `port` in Mbit/s, with a resolution of 100 Mbit/s: `ibv_query_port_speed(3)`.
    ///
    /// It is lower than [`PortAttributes::nominal_mbps`] if, for example, several ports share a link.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 62, or a provider or kernel that does not report it;
    /// [`Error::NoSuchPort`]; [`Error::Verb`].
    #[doc(alias = "ibv_query_port_speed")]
    pub fn port_speed(&self, port: u8) -> Result<u64> {
        let ports = self.attributes().ports();
        if port == 0 || port > ports {
            return Err(Error::NoSuchPort { device: self.device_name().into(), port, ports });
        }
        let unsupported = || self.unsupported("a query of the speed of a port (ibv_query_port_speed)");
        let query = self.verbs().ibv_query_port_speed.ok_or_else(unsupported)?;
        let mut speed = 0;
        // SAFETY: the context is valid, and `speed` is a valid out pointer.
        match check(unsafe { query(self.as_raw(), port.into(), &mut speed) }) {
            Ok(()) => Ok(speed.saturating_mul(100)),
            Err(errno) if errno.is_unsupported() => Err(unsupported()),
            Err(errno) => Err(self.verb_error(Verb::QueryPortSpeed, errno)),
        }
    }

    /// The entry at `index` of the GID table of `port`: `ibv_query_gid_ex(3)`.
    ///
    /// If the kernel lacks that, `ibv_query_gid(3)` is used, with the type from sysfs.
    ///
    /// # Errors
    /// [`Error::NoSuchGid`] if the index is out of range or the entry is empty; [`Error::NoSuchPort`].
    #[doc(alias = "ibv_query_gid_ex")]
    #[doc(alias = "ibv_query_gid")]
    pub fn gid(&self, port: u8, index: u32) -> Result<GidEntry> {
        let table_len = self.query_port(port)?.gid_table_len();
        let missing = || Error::NoSuchGid { device: self.device_name().into(), port, index, table_len };
        if index >= table_len {
            return Err(missing());
        }
        let mut entry = ibv_gid_entry::zeroed();
        // SAFETY: the context is valid, and `entry` has the size that the shim passes along.
        match check(unsafe { ibv_query_gid_ex(self.as_raw(), u32::from(port), index, &mut entry, 0) }) {
            Ok(()) => Ok(gid_entry(&entry)),
            Err(Errno(libc::ENODATA | libc::ENOENT)) => Err(missing()),
            Err(errno) if errno.is_unsupported() => self.gid_from_sysfs(port, index)?.ok_or_else(missing),
            Err(errno) => Err(self.verb_error(Verb::QueryGidEx, errno)),
        }
    }

    /// All non-empty entries of the GID table of `port`: `ibv_query_gid_table(3)`.
    ///
    /// If the kernel lacks that, each entry is queried on its own.
    ///
    /// # Errors
    /// [`Error::NoSuchPort`], [`Error::Verb`].
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>> {
        let table_len = self.query_port(port)?.gid_table_len();
        // The call reports the entries of all ports, so there must be space for all.
        let mut room = 0_usize;
        for port in 1..=self.attributes().ports() {
            room += self.query_port(port)?.gid_table_len() as usize;
        }
        let mut entries = Vec::<ibv_gid_entry>::with_capacity(room);
        // SAFETY: the context is valid, and `entries` has space for `room` structures, whose size the shim passes
        // along.
        let found = unsafe { ibv_query_gid_table(self.as_raw(), entries.as_mut_ptr(), room, 0) };
        match found {
            0.. => {
                // SAFETY: the call has written as many entries as it returned, at most `room`.
                unsafe { entries.set_len((found as usize).min(room)) };
                Ok(entries.iter().filter(|entry| entry.port_num == u32::from(port)).map(gid_entry).collect())
            }
            negative if Errno(negative.unsigned_abs() as i32).is_unsupported() => {
                let entry = |index| self.gid_from_sysfs(port, index).transpose();
                (0..table_len).filter_map(entry).collect()
            }
            negative => Err(self.verb_error(Verb::QueryGidTable, Errno(negative.unsigned_abs() as i32))),
        }
    }

    /// The GID of `port` that suits most connections.
    ///
    /// It prefers RoCE v2 over InfiniBand over RoCE v1, then a routable address over a link-local one, then IPv4 over
    /// IPv6, then the lowest index.
    ///
    /// # Errors
    /// [`Error::NoGid`] if the table is empty; those of [`Context::gids`].
    pub fn recommended_gid(&self, port: u8) -> Result<GidEntry> {
        recommended(&self.gids(port)?).ok_or_else(|| Error::NoGid { device: self.device_name().into(), port })
    }

    /// The partition key at `index` of the table of `port`, in host byte order: `ibv_query_pkey(3)`.
    ///
    /// # Errors
    /// [`Error::Verb`] if the index is not below [`PortAttributes::pkey_table_len`]; [`Error::NoSuchPort`].
    #[doc(alias = "ibv_query_pkey")]
    pub fn pkey(&self, port: u8, index: u16) -> Result<u16> {
        self.query_port(port)?;
        let mut pkey = 0;
        // SAFETY: the context is valid, and `pkey` is a valid out pointer.
        check_neg(|| unsafe { (self.verbs().ibv_query_pkey)(self.as_raw(), port, c_int::from(index), &mut pkey) })
            .map_err(|errno| self.verb_error(Verb::QueryPkey, errno))?;
        Ok(u16::from_be(pkey))
    }

    /// The index of a partition key in the table of `port`: `ibv_get_pkey_index(3)`. `pkey` is in host byte order.
    ///
    /// # Errors
    /// [`Error::Verb`] if the table does not have it; [`Error::NoSuchPort`].
    #[doc(alias = "ibv_get_pkey_index")]
    pub fn pkey_index(&self, port: u8, pkey: u16) -> Result<u16> {
        self.query_port(port)?;
        // SAFETY: the context is valid.
        let index = check_neg(|| unsafe { (self.verbs().ibv_get_pkey_index)(self.as_raw(), port, pkey.to_be()) })
            .map_err(|errno| self.verb_error(Verb::GetPkeyIndex, errno))?;
        Ok(index as u16)
    }

    /// Allocates a protection domain: `ibv_alloc_pd(3)`.
    ///
    /// # Errors
    /// [`Error::AllocPd`].
    #[doc(alias = "ibv_alloc_pd")]
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        self.require_own()?;
        ProtectionDomain::new(self)
    }

    /// Creates a completion channel, through which completion queues report events: `ibv_create_comp_channel(3)`.
    ///
    /// # Errors
    /// [`Error::CreateChannel`].
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn create_channel(&self) -> Result<CompletionChannel> {
        self.require_own()?;
        CompletionChannel::new(self)
    }

    /// Starts describing a completion queue for at least `entries` completions.
    pub fn completion_queue(&self, entries: u32) -> CompletionQueueBuilder {
        CompletionQueueBuilder::new(self, entries)
    }

    /// Whether both are the same opened device. Opening a device twice gives two contexts, whose objects cannot be
    /// combined.
    #[must_use]
    pub fn is_same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The C object, valid while this `Context` or anything made from it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_context {
        self.inner.raw.as_ptr()
    }

    /// Address of the C object of the device, which its contexts share.
    pub(crate) fn device_address(&self) -> usize {
        // SAFETY: the context is valid, and the field does not change after opening.
        unsafe { (*self.as_raw()).device.addr() }
    }

    pub(crate) fn verbs(&self) -> &'static Verbs {
        self.inner.verbs
    }

    /// Returns an error if `object` belongs to another context, `other`.
    pub(crate) fn require_same(&self, other: &Context, object: &'static str) -> Result<()> {
        match self.is_same(other) {
            true => Ok(()),
            false => Err(Error::ForeignContext { object }),
        }
    }

    pub(crate) fn unsupported(&self, feature: &'static str) -> Error {
        Error::Unsupported { device: self.device_name().into(), feature }
    }

    #[cold]
    pub(crate) fn verb_error(&self, verb: Verb, errno: Errno) -> Error {
        if self.is_inherited() {
            return self.inherited();
        }
        Error::Verb { verb, device: self.device_name().into(), errno }
    }

    /// Whether this process was forked after the device was opened.
    ///
    /// The device then belongs to the parent. This process can only [drop](crate::fork) the objects of the device.
    #[must_use]
    #[inline(always)]
    pub fn is_inherited(&self) -> bool {
        self.inner.creator.is_parent()
    }

    /// Returns an error if the device was opened by the parent of this process.
    #[inline(always)]
    pub(crate) fn require_own(&self) -> Result<()> {
        if self.is_inherited() { Err(self.inherited()) } else { Ok(()) }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn inherited(&self) -> Error {
        Error::Inherited { object: self.device_name().into() }
    }

    /// The error of a verb that not every provider has.
    pub(crate) fn feature_error(&self, verb: Verb, feature: &'static str, errno: Errno) -> Error {
        match errno.is_unsupported() {
            true => self.unsupported(feature),
            false => self.verb_error(verb, errno),
        }
    }

    /// Reads a GID by `ibv_query_gid`, which reports no type, and success with zeros for an empty entry.
    fn gid_from_sysfs(&self, port: u8, index: u32) -> Result<Option<GidEntry>> {
        let mut raw = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is valid, and `raw` is a valid out pointer.
        check_neg(|| unsafe { (self.verbs().ibv_query_gid)(self.as_raw(), port, index as c_int, &mut raw) })
            .map_err(|errno| self.verb_error(Verb::QueryGid, errno))?;
        let gid = Gid::from_raw(raw);
        if gid.is_zero() {
            return Ok(None);
        }
        let attrs = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs", self.device_name());
        let read = |what: &str| std::fs::read_to_string(format!("{attrs}/{what}/{index}")).unwrap_or_default();
        let gid_type = match read("types").trim() {
            "RoCE v2" => GidType::ROCE_V2,
            "IB/RoCE v1" if self.query_port(port)?.link_layer() == crate::LinkLayer::ETHERNET => GidType::ROCE_V1,
            _ => GidType::INFINIBAND,
        };
        let interface = std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", read("ndevs").trim()));
        let interface_index = interface.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        Ok(Some(GidEntry { gid, index, port, gid_type, interface_index }))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.device_name()).finish_non_exhaustive()
    }
}

fn query_device(inner: &Inner) -> Result<DeviceAttributes> {
    let mut attributes = ibv_device_attr_ex::zeroed();
    // SAFETY: the context is valid, a NULL input requests nothing extra, and `attributes` has the size that the shim
    // passes along.
    check(unsafe { ibv_query_device_ex(inner.raw.as_ptr(), std::ptr::null(), &mut attributes) })
        .map_err(|errno| Error::Verb { verb: Verb::QueryDeviceEx, device: inner.name.clone(), errno })?;
    Ok(DeviceAttributes::from_raw(attributes))
}

fn gid_entry(raw: &ibv_gid_entry) -> GidEntry {
    GidEntry {
        gid: Gid::from_raw(raw.gid),
        index: raw.gid_index,
        port: raw.port_num as u8,
        gid_type: GidType(raw.gid_type),
        interface_index: raw.ndev_ifindex,
    }
}

/// The number of a NUMA node; `None` for -1, which means no node.
fn parse_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parse_node;

    #[test]
    fn a_negative_numa_node_is_none() {
        assert_eq!(["0\n", "1\n", "-1\n", "", "x"].map(parse_node), [Some(0), Some(1), None, None, None]);
    }
}
