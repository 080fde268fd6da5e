//! What only `ibv_create_qp_ex` takes.

use bitflags::bitflags;
use rdma_sys::*;

use super::QueuePairBuilder;
use crate::{Context, DeviceCapabilities, RawPacketCapabilities, Result};

bitflags! {
    /// How a queue pair deals with packets: `enum ibv_qp_create_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct QueuePairFlags: u32 {
        /// It does not receive the multicast packets that it sends itself.
        const BLOCK_SELF_MULTICAST = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB.0;
        /// Packets are received with their frame check sequence; of devices with [`RawPacketCapabilities::SCATTER_FCS`].
        const SCATTER_FCS = IBV_QP_CREATE_SCATTER_FCS.0;
        /// VLAN tags are taken off, and told by [`WorkCompletion::cvlan`](crate::WorkCompletion::cvlan); of devices with
        /// [`RawPacketCapabilities::CVLAN_STRIPPING`].
        const CVLAN_STRIPPING = IBV_QP_CREATE_CVLAN_STRIPPING.0;
        /// Writes over PCI are padded to whole cache lines; of devices with [`DeviceCapabilities::PCI_WRITE_END_PADDING`].
        const PCI_WRITE_END_PADDING = IBV_QP_CREATE_PCI_WRITE_END_PADDING.0;
    }
}

/// Of a queue pair that has none of them, `ibv_create_qp` can be asked.
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

    /// Refuses what the device says that it lacks.
    pub(super) fn check(&self, context: &Context) -> Result<()> {
        use {QueuePairFlags as F, RawPacketCapabilities as Raw};
        let device = context.attributes();
        let (caps, raw) = (device.capabilities(), device.raw_packets());
        let fcs = raw.contains(Raw::SCATTER_FCS) || caps.contains(DeviceCapabilities::RAW_SCATTER_FCS);
        let padding = caps.contains(DeviceCapabilities::PCI_WRITE_END_PADDING);
        let needs = [
            (F::SCATTER_FCS, fcs, "receiving frame check sequences"),
            (F::CVLAN_STRIPPING, raw.contains(Raw::CVLAN_STRIPPING), "taking off VLAN tags"),
            (F::PCI_WRITE_END_PADDING, padding, "padding writes over PCI"),
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
    /// Bytes of the headers before what the device segments, with [`SendBatch::send_tso`](crate::SendBatch::send_tso); 0 unless
    /// set, which leaves [`SendOps::TSO`](crate::SendOps::TSO) out. Of types that
    /// [`SegmentationOffload`](crate::SegmentationOffload) has.
    pub fn tso_header(mut self, bytes: u16) -> Self {
        self.options.max_tso_header = bytes;
        self
    }

    /// How it deals with packets; in no special way unless set. Flags that the device says it lacks are refused by
    /// [`QueuePairBuilder::build`] with [`Error::Unsupported`](crate::Error::Unsupported).
    pub fn flags(mut self, flags: QueuePairFlags) -> Self {
        self.options.flags = flags;
        self
    }

    /// Sends in the name of the queue pair `number`: `IBV_QP_CREATE_SOURCE_QPN`. Of privileged users, and of UD queue pairs.
    pub fn source_qpn(mut self, number: u32) -> Self {
        self.options.source_qpn = Some(number);
        self
    }
}
