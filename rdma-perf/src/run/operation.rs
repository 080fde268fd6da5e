//! The operations that messages consist of. The loops are generic over them.

use rdma_safe::interface::Interface;
use rdma_safe::{Inline, PostError, SendBatch, UdTarget, WcOpcode, WorkRequest};

use crate::endpoint::memory::LaneMemory;
use crate::transport::GRH_LEN;

/// Adds messages to a batch. Each operation is a type, so that the compiled loop has no branches for the others.
pub(super) trait Operation: Copy {
    /// Opcode of the peer's receive completion.
    const RECEIVED_AS: WcOpcode = WcOpcode::RECV;
    /// Whether messages carry [`IMMEDIATE`].
    const HAS_IMMEDIATE: bool = false;
    /// Bytes of a receive buffer before the message.
    const HEADER: u64 = 0;

    /// # Safety
    /// The contract of [`SendBatch`], for the bytes of the lane that `message` describes.
    unsafe fn add<I: Interface>(
        self,
        batch: &mut SendBatch<'_, I>,
        wr: WorkRequest,
        message: Message<'_>,
    ) -> Result<(), PostError>;
}

/// One message.
#[derive(Clone, Copy)]
pub(super) struct Message<'l> {
    pub(super) memory: &'l LaneMemory,
    /// Offset in the source of this end and in the target of the peer.
    pub(super) offset: u64,
    pub(super) size: u64,
    /// How often the slot was used before.
    pub(super) round: u64,
}

/// Immediate data of all messages that have it.
pub(super) const IMMEDIATE: u32 = 0x5eed;

#[derive(Clone, Copy)]
pub(super) struct Send;
#[derive(Clone, Copy)]
pub(super) struct SendImm;
#[derive(Clone, Copy)]
pub(super) struct SendInline;
#[derive(Clone, Copy)]
pub(super) struct SendTo;
#[derive(Clone, Copy)]
pub(super) struct SendImmTo;
#[derive(Clone, Copy)]
pub(super) struct SendInlineTo;
#[derive(Clone, Copy)]
pub(super) struct Write;
#[derive(Clone, Copy)]
pub(super) struct WriteImm;
#[derive(Clone, Copy)]
pub(super) struct WriteInline;
#[derive(Clone, Copy)]
pub(super) struct Read;
#[derive(Clone, Copy)]
pub(super) struct FetchAdd;
#[derive(Clone, Copy)]
pub(super) struct CompareSwap;

impl Message<'_> {
    #[inline]
    fn sge(&self) -> rdma_safe::Sge {
        self.memory.source.sge(self.offset, self.size)
    }

    #[inline]
    fn remote(&self) -> rdma_safe::Remote {
        self.memory.remote(self.offset)
    }

    /// The peer's address for a datagram.
    #[inline(always)]
    fn ud_target(&self) -> Result<UdTarget<'_>, PostError> {
        // The address is set before the first message.
        self.memory.ud_target().ok_or(PostError::NotDatagram)
    }

    /// The bytes of the message, for inline sends. Verbs copy them during the call.
    #[inline]
    fn bytes(&self) -> Inline<'_> {
        let first = self.memory.source.byte(self.offset);
        // SAFETY: the message lies within the source. No device writes to it: with a plan that sends inline, the source
        // is neither a target nor read into. This thread writes to it only between messages, not while the slice
        // exists, which is for one call.
        Inline(unsafe { std::slice::from_raw_parts(first, self.size as usize) })
    }
}

macro_rules! operation {
    ($name:ident, |$batch:ident, $wr:ident, $message:ident| $add:expr $(, $const:ident: $type:ty = $value:expr)*) => {
        impl Operation for $name {
            $(const $const: $type = $value;)*

            #[inline(always)]
            unsafe fn add<I: Interface>(
                self,
                $batch: &mut SendBatch<'_, I>,
                $wr: WorkRequest,
                $message: Message<'_>,
            ) -> Result<(), PostError> {
                // SAFETY: the caller upholds the same contract.
                unsafe { $add }
            }
        }
    };
}

operation!(Send, |batch, wr, message| batch.send(wr, message.sge()));
operation!(
    SendImm,
    |batch, wr, message| batch.send_imm(wr, IMMEDIATE, message.sge()),
    HAS_IMMEDIATE: bool = true
);
operation!(SendInline, |batch, wr, message| batch.send(wr, message.bytes()));
operation!(SendTo, |batch, wr, message| batch.send_to(wr, message.ud_target()?, message.sge()), HEADER: u64 = GRH_LEN);
operation!(
    SendImmTo,
    |batch, wr, message| batch.send_imm_to(wr, message.ud_target()?, IMMEDIATE, message.sge()),
    HAS_IMMEDIATE: bool = true,
    HEADER: u64 = GRH_LEN
);
operation!(SendInlineTo, |batch, wr, message| batch.send_to(wr, message.ud_target()?, message.bytes()), HEADER: u64 = GRH_LEN);
operation!(Write, |batch, wr, message| batch.write(wr, message.remote(), message.sge()));
operation!(
    WriteImm,
    |batch, wr, message| batch.write_imm(wr, message.remote(), IMMEDIATE, message.sge()),
    RECEIVED_AS: WcOpcode = WcOpcode::RECV_RDMA_WITH_IMM,
    HAS_IMMEDIATE: bool = true
);
operation!(WriteInline, |batch, wr, message| batch.write(wr, message.remote(), message.bytes()));
operation!(Read, |batch, wr, message| batch.read(wr, message.remote(), message.sge()));
operation!(FetchAdd, |batch, wr, message| batch.fetch_add(wr, message.remote(), 1, message.sge()));
// Each word counts how often it was swapped.
operation!(CompareSwap, |batch, wr, message| batch.compare_swap(
    wr,
    message.remote(),
    message.round,
    message.round + 1,
    message.sge()
));
