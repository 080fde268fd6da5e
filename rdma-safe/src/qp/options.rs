//! Options that only `ibv_create_qp_ex` supports.

use bitflags::bitflags;
use rdma_sys::*;

use super::QueuePairBuilder;
use crate::device::{DeviceCapabilities, RawPacketCapabilities};
use crate::{Context, Result};

bitflags! {
    /// Packet processing options of a queue pair: `enum ibv_qp_create_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct QueuePairFlags: u32 {
        /// Does not receive its own multicast packets.
        const BLOCK_SELF_MULTICAST = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB.0;
        /// Receives packets with their frame check sequence. Requires [`RawPacketCapabilities::SCATTER_FCS`].
        const SCATTER_FCS = IBV_QP_CREATE_SCATTER_FCS.0;
        /// Strips VLAN tags and reports them in [`WorkCompletion::cvlan`](crate::WorkCompletion::cvlan). Requires
        /// [`RawPacketCapabilities::CVLAN_STRIPPING`].
        const CVLAN_STRIPPING = IBV_QP_CREATE_CVLAN_STRIPPING.0;
        /// Pads PCI writes to whole cache lines. Requires [`DeviceCapabilities::PCI_WRITE_END_PADDING`].
        const PCI_WRITE_END_PADDING = IBV_QP_CREATE_PCI_WRITE_END_PADDING.0;
    }
}

/// Options of a queue pair that require `ibv_create_qp_ex`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Options {
    pub(super) max_tso_header: u16,
    flags: QueuePairFlags,
    source_qpn: Option<u32>,
}

impl Options {
    pub(super) fn is_none(&self) -> bool {
        *self == Options::default()
    }

    /// Returns an error for options that the device does not support.
    #[inline]
    pub(super) fn check(&self, context: &Context) -> Result<()> {
        match self.flags.is_empty() {
            true => Ok(()),
            false => self.check_flags(context),
        }
    }

    fn check_flags(&self, context: &Context) -> Result<()> {
        use {QueuePairFlags as F, RawPacketCapabilities as Raw};
        let device = context.attributes();
        let (caps, raw) = (device.capabilities(), device.raw_packets());
        let fcs = raw.contains(Raw::SCATTER_FCS) || caps.contains(DeviceCapabilities::RAW_SCATTER_FCS);
        let padding = caps.contains(DeviceCapabilities::PCI_WRITE_END_PADDING);
        let needs = [
            (F::SCATTER_FCS, fcs, "receiving frame check sequences"),
            (F::CVLAN_STRIPPING, raw.contains(Raw::CVLAN_STRIPPING), "stripping VLAN tags"),
            (F::PCI_WRITE_END_PADDING, padding, "padding of PCI writes"),
        ];
        match needs.into_iter().find(|(flag, has, _)| self.flags.contains(*flag) && !has) {
            Some((_, _, feature)) => Err(context.unsupported(feature)),
            None => Ok(()),
        }
    }

    pub(super) fn set(&self, attr: &mut ibv_qp_init_attr_ex) {
        if self.max_tso_header > 0 {
            attr.max_tso_header = self.max_tso_header;
            attr.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER.0;
        }
        attr.create_flags = self.flags.bits();
        if let Some(number) = self.source_qpn {
            attr.source_qpn = number;
            attr.create_flags |= IBV_QP_CREATE_SOURCE_QPN.0;
        }
        if attr.create_flags != 0 {
            attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS.0;
        }
    }
}

impl QueuePairBuilder<'_> {
    /// Largest header for [`SendBatch::send_tso`](crate::SendBatch::send_tso), in bytes; 0 unless set.
    ///
    /// With 0, [`SendOps::TSO`](crate::SendOps::TSO) is not enabled.
    /// [`SegmentationOffload`](crate::device::SegmentationOffload) has the types that support it.
    pub fn tso_header(mut self, bytes: u16) -> Self {
        self.options.max_tso_header = bytes;
        self
    }

    /// Packet processing options; none unless set.
    ///
    /// [`QueuePairBuilder::build`] refuses flags that the device does not support with
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    pub fn flags(mut self, flags: QueuePairFlags) -> Self {
        self.options.flags = flags;
        self
    }

    /// Sends with the queue pair number `number` as the source: `IBV_QP_CREATE_SOURCE_QPN`. For privileged users and UD
    /// queue pairs only.
    pub fn source_qpn(mut self, number: u32) -> Self {
        self.options.source_qpn = Some(number);
        self
    }
}
