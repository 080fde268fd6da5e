//! Actions of flows.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use super::{Ipv4ExtHeader, Ipv6Header};
use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Errno, Result};

bitflags::bitflags! {
    /// Options of ESP: `enum ib_uverbs_flow_action_esp_flags`.
    ///
    /// Without any option, the action decrypts in tunnel mode and leaves the headers unchanged.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct EspFlags: u32 {
        /// The device also adds and removes the ESP header and trailer.
        const FULL_OFFLOAD = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD.0;
        /// Transport mode instead of tunnel mode.
        const TRANSPORT = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT.0;
        /// Encrypt instead of decrypt.
        const ENCRYPT = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT.0;
        /// Advance the window of extended sequence numbers.
        const ESN_NEW_WINDOW = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW.0;

        const _ = !0;
    }
}

/// An AES key.
#[derive(Clone, Copy)]
pub enum AesKey {
    /// 128 bits.
    Aes128([u8; 16]),
    /// 192 bits.
    Aes192([u8; 24]),
    /// 256 bits.
    Aes256([u8; 32]),
}

impl fmt::Debug for AesKey {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AesKey")
    }
}

/// Builds an ESP (IPsec) encryption or decryption with AES-GCM: `struct ibv_flow_action_esp_attr`.
#[derive(Clone)]
#[must_use = "it does nothing until `create` or `FlowAction::modify`"]
pub struct EspAction {
    attributes: Option<ib_uverbs_flow_action_esp>,
    key: Option<ib_uverbs_flow_action_esp_keymat_aes_gcm>,
    replay: Option<ib_uverbs_flow_action_esp_replay_bmp>,
    esn: Option<u32>,
    encapsulation: Option<EspEncapsulation>,
}

/// The IP header that tunnel mode adds and removes in front of the ESP header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum EspEncapsulation {
    /// An IPv4 header.
    Ipv4(Ipv4ExtHeader),
    /// An IPv6 header.
    Ipv6(Ipv6Header),
}

impl EspEncapsulation {
    /// Type, bytes and length of the header in the kernel's format: `struct ib_uverbs_flow_ipv4_filter` and
    /// `…_ipv6_filter`.
    fn to_bytes(self) -> (u16, [u8; 40], u16) {
        let mut bytes = [0; 40];
        match self {
            EspEncapsulation::Ipv4(Ipv4ExtHeader { src, dst, protocol, tos, ttl, flags }) => {
                bytes[..4].copy_from_slice(&src.octets());
                bytes[4..8].copy_from_slice(&dst.octets());
                bytes[8..12].copy_from_slice(&[protocol, tos, ttl, flags]);
                (IBV_FLOW_SPEC_IPV4.0 as u16, bytes, 12)
            }
            EspEncapsulation::Ipv6(header) => {
                bytes[..16].copy_from_slice(&header.src.octets());
                bytes[16..32].copy_from_slice(&header.dst.octets());
                bytes[32..36].copy_from_slice(&header.flow_label.to_be_bytes());
                bytes[36..39].copy_from_slice(&[header.next_header, header.traffic_class, header.hop_limit]);
                (IBV_FLOW_SPEC_IPV6.0 as u16, bytes, 40)
            }
        }
    }
}

impl EspAction {
    /// An action without attributes. Only attributes that are set are created or modified.
    pub fn new() -> Self {
        EspAction { attributes: None, key: None, replay: None, esn: None, encapsulation: None }
    }

    /// Options, security parameter index (SPI) and first sequence number.
    ///
    /// SPI and sequence number matter only with [`EspFlags::FULL_OFFLOAD`].
    pub fn attributes(mut self, flags: EspFlags, spi: u32, seq: u32) -> Self {
        let before = self.attributes.unwrap_or(ib_uverbs_flow_action_esp::zeroed());
        self.attributes = Some(ib_uverbs_flow_action_esp { spi, seq, flags: flags.bits(), ..before });
        self
    }

    /// Padding for traffic flow confidentiality (TFC) in bytes, and the packet limit of the key; 0 for none.
    pub fn limits(mut self, tfc_pad: u32, hard_limit_pkts: u64) -> Self {
        let before = self.attributes.unwrap_or(ib_uverbs_flow_action_esp::zeroed());
        self.attributes = Some(ib_uverbs_flow_action_esp { tfc_pad, hard_limit_pkts, ..before });
        self
    }

    /// AES-GCM with a sequential IV that starts at `iv`. `icv_len` is the length of the integrity check value in bytes.
    pub fn aes_gcm(mut self, key: AesKey, salt: u32, iv: u64, icv_len: u32) -> Self {
        let key = match &key {
            AesKey::Aes128(key) => &key[..],
            AesKey::Aes192(key) => &key[..],
            AesKey::Aes256(key) => &key[..],
        };
        let mut aes_key = [0; 8];
        for (word, bytes) in aes_key.iter_mut().zip(key.chunks_exact(4)) {
            // The bytes keep their order in memory.
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        self.key = Some(ib_uverbs_flow_action_esp_keymat_aes_gcm {
            iv,
            iv_algo: IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ.0,
            salt,
            icv_len,
            key_len: key.len() as u32,
            aes_key,
        });
        self
    }

    /// Drops replayed packets, with a bitmap of `packets` bits.
    pub fn replay_window(mut self, packets: u32) -> Self {
        self.replay = Some(ib_uverbs_flow_action_esp_replay_bmp { size: packets });
        self
    }

    /// Initial upper half of extended sequence numbers.
    pub fn esn(mut self, esn: u32) -> Self {
        self.esn = Some(esn);
        self
    }

    /// Outer header of tunnel mode: `struct ib_uverbs_flow_action_esp_encap`. The kernel supports one header.
    pub fn encapsulation(mut self, header: EspEncapsulation) -> Self {
        self.encapsulation = Some(header);
        self
    }

    /// Creates the action: `ibv_create_flow_action_esp(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_create_flow_action_esp")]
    pub fn create(self, context: &Context) -> Result<FlowAction> {
        // SAFETY: the context is valid, and so are the attributes, with everything they point to, during the call.
        let raw = self.with_raw(|attr| check_ptr(|| unsafe { ibv_create_flow_action_esp(context.as_raw(), attr) }));
        let raw = raw.map_err(|errno| context.feature_error(Verb::CreateFlowActionEsp, FEATURE, errno))?;
        // SAFETY: just created, and not shared with anything.
        Ok(unsafe { FlowAction::from_raw(context, raw) })
    }

    fn with_raw<R>(mut self, call: impl FnOnce(*mut ibv_flow_action_esp_attr) -> R) -> R {
        let mut attr = ibv_flow_action_esp_attr::zeroed();
        attr.esp_attr = self.attributes.as_mut().map_or(null_mut(), |attributes| attributes);
        if let Some(key) = &mut self.key {
            attr.keymat_proto = IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM;
            attr.keymat_len = size_of_val(key) as u16;
            attr.keymat_ptr = (&raw mut *key).cast::<c_void>();
        }
        if let Some(replay) = &mut self.replay {
            attr.replay_proto = IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP;
            attr.replay_len = size_of_val(replay) as u16;
            attr.replay_ptr = (&raw mut *replay).cast::<c_void>();
        }
        if let Some(esn) = self.esn {
            attr.esn = esn;
            attr.comp_mask = IBV_FLOW_ACTION_ESP_MASK_ESN.0;
        }
        let mut outer = self.encapsulation.map(EspEncapsulation::to_bytes);
        let mut encap = ib_uverbs_flow_action_esp_encap::zeroed();
        if let Some((kind, bytes, len)) = &mut outer {
            encap.__bindgen_anon_1.val_ptr = bytes.as_mut_ptr().cast::<c_void>();
            (encap.len, encap.type_) = (*len, *kind);
            attr.esp_encap = &mut encap;
        }
        call(&mut attr)
    }
}

impl Default for EspAction {
    fn default() -> Self {
        EspAction::new()
    }
}

impl fmt::Debug for EspAction {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EspAction").field("esn", &self.esn).finish_non_exhaustive()
    }
}

const FEATURE: &str = "flow actions of ESP";

/// An action on the packets of flows: `struct ibv_flow_action`.
///
/// Clones share it, and several flows can use it: [`FlowRule::action`](crate::flow::FlowRule::action).
#[derive(Clone)]
pub struct FlowAction {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    /// Serializes modifications.
    change: Mutex<()>,
}

impl Parents for MadeFrom {
    type Raw = ibv_flow_action;

    const VERB: Verb = Verb::DestroyFlowAction;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_flow_action) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_flow_action(raw) }
    }
}

impl FlowAction {
    /// Adopts an action that other code has created. It is destroyed after the last flow that uses it.
    ///
    /// # Safety
    /// `raw` must be an existing action of `context` that no flow uses. Other code must not modify or destroy it from
    /// now on.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_flow_action>) -> Self {
        let made_from = MadeFrom { context: context.clone(), change: Mutex::new(()) };
        // SAFETY: the caller's contract. Each flow that uses the action holds an `Arc` of the action.
        FlowAction { inner: Arc::new(unsafe { Object::new(raw, made_from) }) }
    }

    /// Destroys the action: `ibv_destroy_flow_action(3)`.
    ///
    /// Dropping the last clone and flow does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) while clones or flows use it; it is destroyed when the last of them is
    /// dropped. [`Error::Verb`](crate::Error::Verb) with the provider's error; the action and its device are then kept
    /// until the process ends.
    #[doc(alias = "ibv_destroy_flow_action")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "flow action", "clones or flows").map(drop)
    }

    /// Modifies the attributes that are set in `esp`, for all flows that use the action:
    /// `ibv_modify_flow_action_esp(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_modify_flow_action_esp")]
    pub fn modify(&self, esp: EspAction) -> Result<()> {
        let _alone = self.inner.change.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the action is valid, and so are the attributes, with everything they point to, during the call.
        let change = |attr| check(unsafe { ibv_modify_flow_action_esp(self.as_raw(), attr) });
        let error = |errno: Errno| self.context().feature_error(Verb::ModifyFlowActionEsp, FEATURE, errno);
        esp.with_raw(change).map_err(error)
    }

    /// The device of the action.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this action or a flow that uses it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_flow_action {
        self.inner.as_raw()
    }
}

impl fmt::Debug for FlowAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowAction").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
