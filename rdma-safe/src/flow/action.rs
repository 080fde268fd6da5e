//! Actions of flows.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use super::{Ipv4ExtHeader, Ipv6Header};
use crate::errno::{check, check_ptr};
use crate::object::{Object, Parents};
use crate::{Context, Errno, Result};

bitflags::bitflags! {
    /// Options of ESP: `enum ib_uverbs_flow_action_esp_flags`. Without any, it is decryption in the tunnel mode, with headers left
    /// as they are.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct EspFlags: u32 {
        /// The device adds and removes the ESP header and trailer, too.
        const FULL_OFFLOAD = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD.0;
        /// Transport mode instead of tunnel mode.
        const TRANSPORT = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT.0;
        /// Encrypts instead of decrypting.
        const ENCRYPT = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT.0;
        /// The window of extended sequence numbers moves on.
        const ESN_NEW_WINDOW = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW.0;

        const _ = !0;
    }
}

/// A key of AES.
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
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AesKey")
    }
}

/// Describes encryption or decryption of IPsec's ESP: `struct ibv_flow_action_esp_attr`, with AES-GCM.
#[derive(Clone)]
#[must_use = "it does nothing until `create` or `FlowAction::modify`"]
pub struct EspAction {
    attributes: Option<ib_uverbs_flow_action_esp>,
    key: Option<ib_uverbs_flow_action_esp_keymat_aes_gcm>,
    replay: Option<ib_uverbs_flow_action_esp_replay_bmp>,
    esn: Option<u32>,
    encapsulation: Option<EspEncapsulation>,
}

/// The IP header that the tunnel mode puts before ESP's, and takes away.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum EspEncapsulation {
    /// Of IPv4.
    Ipv4(Ipv4ExtHeader),
    /// Of IPv6.
    Ipv6(Ipv6Header),
}

impl EspEncapsulation {
    /// Type, bytes and how many of them count, as the kernel has them: `struct ib_uverbs_flow_ipv4_filter` and `…_ipv6_filter`.
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
    /// No attributes yet: with those that are set, an action is made or changed.
    pub fn new() -> Self {
        EspAction { attributes: None, key: None, replay: None, esn: None, encapsulation: None }
    }

    /// Options, security parameter index and first sequence number. The latter two count where headers are added and removed.
    pub fn attributes(mut self, flags: EspFlags, spi: u32, seq: u32) -> Self {
        let before = self.attributes.unwrap_or(ib_uverbs_flow_action_esp::zeroed());
        self.attributes = Some(ib_uverbs_flow_action_esp { spi, seq, flags: flags.bits(), ..before });
        self
    }

    /// Bytes of padding for confidentiality of the traffic's flow, and packets before the key is worn out; 0 for none.
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
            // As they lie in memory.
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

    /// Refuses packets again that came before, by a bitmap of so many.
    pub fn replay_window(mut self, packets: u32) -> Self {
        self.replay = Some(ib_uverbs_flow_action_esp_replay_bmp { size: packets });
        self
    }

    /// The upper half of extended sequence numbers at the start.
    pub fn esn(mut self, esn: u32) -> Self {
        self.esn = Some(esn);
        self
    }

    /// The outer header of the tunnel mode: `struct ib_uverbs_flow_action_esp_encap`. The kernel takes one.
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
        // SAFETY: the context is valid, and the attributes with all that they point to are for the duration of the call.
        let raw = self.with_raw(|attr| check_ptr(|| unsafe { ibv_create_flow_action_esp(context.as_raw(), attr) }));
        let raw = raw.map_err(|errno| context.feature_error("ibv_create_flow_action_esp", FEATURE, errno))?;
        // SAFETY: just made, and given to nobody else.
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
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EspAction").field("esn", &self.esn).finish_non_exhaustive()
    }
}

const FEATURE: &str = "flow actions of ESP";

/// What is done to the packets of flows: `struct ibv_flow_action`. Clones share it, and so can flows:
/// [`FlowRule::action`](crate::FlowRule::action).
#[derive(Clone)]
pub struct FlowAction {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    /// One change at a time.
    change: Mutex<()>,
}

impl Parents for MadeFrom {
    type Raw = ibv_flow_action;

    const VERB: &'static str = "ibv_destroy_flow_action";

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&self, raw: *mut ibv_flow_action) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_flow_action(raw) }
    }
}

impl FlowAction {
    /// Adopts an action that other code has created. It is destroyed when the last flow with it is gone.
    ///
    /// # Safety
    /// `raw` must be an action of `context` that exists, and no flow may have it. Nobody else may change or destroy it from here
    /// on.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_flow_action>) -> Self {
        let made_from = MadeFrom { context: context.clone(), change: Mutex::new(()) };
        // SAFETY: the caller's contract; a flow with it holds an `Arc` of it.
        FlowAction { inner: Arc::new(unsafe { Object::new(raw, made_from) }) }
    }

    /// Destroys it: `ibv_destroy_flow_action(3)`. Dropping does the same, when no flow has it any more, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) while there are clones of it or flows with it: it is destroyed when the last of those
    /// is gone. [`Error::Verb`](crate::Error::Verb) with the provider's answer; it, and its device, then stay until the process
    /// ends.
    #[doc(alias = "ibv_destroy_flow_action")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "flow action", "clones or flows").map(drop)
    }

    /// Changes what of `esp` is set, for all flows that have it: `ibv_modify_flow_action_esp(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_modify_flow_action_esp")]
    pub fn modify(&self, esp: EspAction) -> Result<()> {
        let _alone = self.inner.change.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the action is valid, and the attributes with all that they point to are for the duration of the call.
        let change = |attr| check(unsafe { ibv_modify_flow_action_esp(self.as_raw(), attr) });
        let error = |errno: Errno| self.context().feature_error("ibv_modify_flow_action_esp", FEATURE, errno);
        esp.with_raw(change).map_err(error)
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this action or a flow with it is.
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
