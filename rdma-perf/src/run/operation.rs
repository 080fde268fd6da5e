//! What a message is: the only thing in which the loops of the four verbs differ.

use rdma_safe::{Inline, Interface, PostError, SendBatch, UdTarget, WcOpcode, WorkRequest};

use crate::datagram::HEADER;
use crate::worker::LaneMemory;

/// Adds messages to a batch. Each is a type of its own, so that the loop over it has no branches that it does not need.
pub(super) trait Operation: Copy {
    /// What a receive completes as that takes the message.
    const RECEIVED_AS: WcOpcode = WcOpcode::RECV;
    /// Whether messages carry [`IMMEDIATE`].
    const HAS_IMMEDIATE: bool = false;
    /// Bytes of a receive before those of the message.
    const HEADER: u64 = 0;

    /// # Safety
    /// The contract of [`SendBatch`], for the bytes of the lane that the message names.
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
    /// Where it lies, in the source here and in the target there.
    pub(super) offset: u64,
    pub(super) size: u64,
    /// How often this place was used before.
    pub(super) round: u64,
}

/// Immediate data, where it is asked for.
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

    /// Where it goes as a datagram.
    #[inline(always)]
    fn to(&self) -> Result<UdTarget<'_>, PostError> {
        // Nothing is sent before there is one.
        self.memory.to().ok_or(PostError::NotDatagram)
    }

    /// Its bytes, which are copied in the call that they are given to.
    #[inline]
    fn bytes(&self) -> Inline<'_> {
        let first = self.memory.source.byte(self.offset);
        // SAFETY: the message lies within the source. No device writes it: it is neither a target nor read into by a plan that
        // sends inline. This thread does between messages, but not while this slice exists, which is for one call.
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
                // SAFETY: the caller's contract is the same.
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
operation!(SendTo, |batch, wr, message| batch.send_to(wr, message.to()?, message.sge()), HEADER: u64 = HEADER);
operation!(
    SendImmTo,
    |batch, wr, message| batch.send_imm_to(wr, message.to()?, IMMEDIATE, message.sge()),
    HAS_IMMEDIATE: bool = true,
    HEADER: u64 = HEADER
);
operation!(SendInlineTo, |batch, wr, message| batch.send_to(wr, message.to()?, message.bytes()), HEADER: u64 = HEADER);
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
// What the words count is how often they were swapped.
operation!(CompareSwap, |batch, wr, message| batch.compare_swap(
    wr,
    message.remote(),
    message.round,
    message.round + 1,
    message.sge()
));
