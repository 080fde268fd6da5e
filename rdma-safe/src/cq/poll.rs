//! Taking completions.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use rdma_sys::*;

use super::{CompletionQueue, Mode, StandardFields, WcFields, WcFlags, WcOpcode, WcStatus, rare};
use crate::{Errno, TagInfo};

/// A completion queue that cannot be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PollError {
    /// The provider failed.
    #[error(
        "polling a completion queue failed ({0}): it overran, or the device is gone; create it anew, with more entries"
    )]
    Provider(Errno),

    /// A completion names work that is not in flight: the provider repeated or invented it.
    #[error("a completion with identifier {wr_id:#x} names work that is not in flight; the provider is faulty")]
    Unexpected {
        /// The identifier.
        wr_id: u64,
    },
}

/// A cursor over the completions of a queue: `ibv_start_poll`, `ibv_next_poll`, `ibv_end_poll`, or `ibv_poll_cq(3)`.
///
/// It lends one completion at a time. Between the first [`Poll::next`] and the drop the provider holds a lock, so the
/// cursor stays in its thread and borrows the queue mutably. What was not taken stays in the queue.
///
/// Some providers take the same lock to destroy or reset a queue pair that completes to this queue. In this thread a queue
/// pair that is dropped while a completion is lent is therefore destroyed when the cursor moves on or goes; a reset, and
/// [`QueuePair::destroy`](crate::QueuePair::destroy), which has to answer, report [`Error::PolledHere`](crate::Error::PolledHere).
///
/// Nor should this thread, while a completion is lent, post to a queue that completes here and may be full: mlx5 then waits for
/// that lock, for ever, and does not report [`PostError::QueueFull`](crate::PostError::QueueFull). One receive for each that was
/// taken always has room.
#[must_use = "nothing is taken until `next` is called"]
pub struct Poll<'cq> {
    cq: &'cq mut CompletionQueue,
    stage: Stage,
    /// Why, where the stage is `Failed`. Apart from it, so that the stage is a small number.
    error: PollError,
    not_send: PhantomData<*mut ()>,
}

/// How far a cursor has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It has not asked the queue; what an earlier one had left over does not count. Or it asks anew for each completion:
    /// see [`Quirks::ONE_COMPLETION_PER_POLL`](crate::Quirks::ONE_COMPLETION_PER_POLL).
    Fresh,
    /// It stands on a completion of an extended queue, between start_poll and end_poll.
    Standing,
    /// It has asked a classic queue.
    Asked,
    /// There was nothing more to take.
    Empty,
    Failed,
}

impl CompletionQueue {
    /// Starts taking completions.
    ///
    /// ```no_run
    /// # fn example(cq: &mut rdma_safe::CompletionQueue) -> rdma_safe::Result<()> {
    /// let mut poll = cq.poll();
    /// while let Some(completion) = poll.next()? {
    ///     println!("{}: {}", completion.wr_id(), completion.status());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline(always)]
    pub fn poll(&mut self) -> Poll<'_> {
        Poll { cq: self, stage: Stage::Fresh, error: PollError::Provider(Errno(0)), not_send: PhantomData }
    }
}

impl Poll<'_> {
    /// The next completion, or `None` when there was none left.
    ///
    /// `None` and an error end this cursor: it says the same from then on and asks the queue no more. To look again, drop
    /// it and call [`CompletionQueue::poll`].
    ///
    /// # Errors
    /// [`PollError`] when the provider failed; it is never taken for an empty queue.
    // Inlined even where the compiler finds it too long: then its state stays in registers.
    #[inline(always)]
    #[allow(clippy::should_implement_trait)] // A lending cursor cannot be an `Iterator`: collecting it would alias one cursor.
    pub fn next(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        let cq = self.cq.raw.cast::<ibv_cq_ex>();
        // Comparisons and not a `match`, which would be compiled to a jump table.
        if self.stage == Stage::Standing {
            // SAFETY: the queue is valid, this thread is between start_poll and end_poll, and a provider that has start_poll
            // has next_poll.
            let result = unsafe { ibv_next_poll(cq.as_ptr()) };
            if result == 0 {
                return Ok(Some(WorkCompletion { row: Row::Extended(cq), fields: self.cq.fields }));
            }
            // Nothing is lent any more: the lock need not be held until the cursor goes.
            // SAFETY: as above.
            unsafe { self.cq.end_open_poll() };
            self.stage = Stage::Empty;
            return if result == libc::ENOENT { Ok(None) } else { Err(self.fail(result)) };
        }
        if self.stage == Stage::Fresh {
            if self.cq.mode != Mode::Extended {
                if self.cq.mode == Mode::Classic {
                    return self.next_classic();
                }
                rare();
                // The completion before, or a cursor that was forgotten instead of dropped.
                self.cq.end_poll();
            }
            let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
            // SAFETY: the queue is valid and not being polled: `&mut CompletionQueue` is the only way here, and the mode says
            // so. No flag is defined for `attr`.
            let result = unsafe { ibv_start_poll(cq.as_ptr(), &mut attr) };
            if result == 0 {
                self.cq.mode = Mode::Open;
                self.cq.shared.poll_started();
                if !self.cq.one_per_poll {
                    self.stage = Stage::Standing;
                }
                return Ok(Some(WorkCompletion { row: Row::Extended(cq), fields: self.cq.fields }));
            }
            self.stage = Stage::Empty;
            return if result == libc::ENOENT { Ok(None) } else { Err(self.fail(result)) };
        }
        if self.stage == Stage::Asked {
            return self.next_classic();
        }
        if self.stage == Stage::Failed { Err(self.error) } else { Ok(None) }
    }

    #[inline(always)]
    fn next_classic(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        let raw = self.cq.raw;
        let taken = &mut self.cq.taken;
        if !taken.has_next() {
            // A short batch means that the queue was empty: no need to ask once more.
            if matches!(self.stage, Stage::Asked) && !taken.full {
                self.stage = Stage::Empty;
                return Ok(None);
            }
            self.stage = Stage::Asked;
            // SAFETY: the queue is valid, and a classic one; nothing is left, as was just found.
            let result = unsafe { taken.refill(raw) };
            if result <= 0 {
                if result < 0 {
                    // ibv_poll_cq(3) promises no errno; providers return codes of their own.
                    return Err(self.fail(result));
                }
                self.stage = Stage::Empty;
                return Ok(None);
            }
        }
        // SAFETY: there is one: as found above, or as `refill` has taken more than none.
        let row = unsafe { self.cq.taken.take() };
        Ok(Some(WorkCompletion { row: Row::Classic(row), fields: WcFields::STANDARD }))
    }
}

impl Poll<'_> {
    /// `result` is what `ibv_start_poll`, `ibv_next_poll` or `ibv_poll_cq` returned.
    #[inline(always)]
    fn fail(&mut self, result: i32) -> PollError {
        rare();
        self.stage = Stage::Failed;
        self.error = PollError::of_provider(result);
        self.error
    }
}

impl PollError {
    /// `result` is what `ibv_start_poll`, `ibv_next_poll` or `ibv_poll_cq` returned.
    #[inline(always)]
    pub(super) fn of_provider(result: i32) -> Self {
        rare();
        // A provider's own code, such as CQ_POLL_ERR of mlx5, says nothing here.
        PollError::Provider(Errno(if result > 0 { result } else { libc::EIO }))
    }
}

impl Drop for Poll<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Also what a cursor before it has begun, if this one has not asked. Not where there is surely nothing to end.
        if matches!(self.stage, Stage::Fresh | Stage::Standing) {
            self.cq.end_poll();
        }
    }
}

impl fmt::Debug for Poll<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poll").field("stage", &self.stage).finish_non_exhaustive()
    }
}

/// One completion, valid until the cursor moves on.
///
/// Fields that the queue was created without are `None`. When the status is not success, only
/// [`wr_id`](Self::wr_id), [`status`](Self::status), [`qp_num`](Self::qp_num) and [`vendor_error`](Self::vendor_error)
/// mean anything (ibv_poll_cq(3)).
pub struct WorkCompletion<'a> {
    row: Row<'a>,
    fields: WcFields,
}

#[derive(Clone, Copy)]
pub(super) enum Row<'a> {
    /// The queue itself: its cursor stands on the completion for as long as `'a` borrows the `Poll`.
    Extended(NonNull<ibv_cq_ex>),
    Classic(&'a ibv_wc),
}

/// Reads a field by its extended accessor where the queue was created with it, else from `ibv_wc`.
macro_rules! field {
    ($self:ident, $field:expr, $read:ident, |$wc:ident| $classic:expr) => {
        match $self.row {
            Row::Extended(cq) if $self.fields.contains($field) => {
                // SAFETY: the cursor stands on a completion, and the queue has the accessor of this field: `accessors::check`
                // saw it.
                Some(unsafe { $read(cq.as_ptr()) })
            }
            Row::Extended(_) => None,
            Row::Classic($wc) => $classic,
        }
    };
}

impl<'a> WorkCompletion<'a> {
    /// On which the cursor of `cq` stands, between start_poll and end_poll, for as long as `'a`.
    #[inline(always)]
    pub(super) fn extended(cq: NonNull<ibv_cq_ex>, fields: WcFields) -> Self {
        WorkCompletion { row: Row::Extended(cq), fields }
    }

    #[inline(always)]
    pub(crate) fn classic(row: &'a ibv_wc) -> Self {
        WorkCompletion { row: Row::Classic(row), fields: WcFields::STANDARD }
    }

    /// The row of a classic queue that it is; null of an extended one.
    #[inline(always)]
    pub(crate) fn row(&self) -> *const ibv_wc {
        match self.row {
            Row::Classic(row) => row,
            Row::Extended(_) => std::ptr::null(),
        }
    }

    /// The same, for less long.
    #[inline(always)]
    pub(crate) fn reborrow(&self) -> WorkCompletion<'_> {
        WorkCompletion { row: self.row, fields: self.fields }
    }
}

impl WorkCompletion<'_> {
    /// What the work request was given as its identifier.
    #[must_use]
    #[inline(always)]
    pub fn wr_id(&self) -> u64 {
        match self.row {
            // SAFETY: the queue is valid, and the cursor stands on a completion.
            Row::Extended(cq) => unsafe { (*cq.as_ptr()).wr_id },
            Row::Classic(wc) => wc.wr_id,
        }
    }

    /// How it ended.
    #[must_use]
    #[inline(always)]
    pub fn status(&self) -> WcStatus {
        match self.row {
            // SAFETY: as in `wr_id`.
            Row::Extended(cq) => WcStatus(unsafe { (*cq.as_ptr()).status }.0),
            Row::Classic(wc) => WcStatus(wc.status.0),
        }
    }

    /// Success, or the error to report.
    ///
    /// # Errors
    /// [`CompletionError`] when the status is not success.
    #[inline(always)]
    pub fn ok(&self) -> Result<(), CompletionError> {
        match self.status() {
            WcStatus::SUCCESS => Ok(()),
            status => Err(CompletionError {
                status,
                vendor_error: self.vendor_error(),
                wr_id: self.wr_id(),
                qp_num: self.qp_num(),
            }),
        }
    }

    /// What completed.
    #[must_use]
    #[inline(always)]
    pub fn opcode(&self) -> WcOpcode {
        match self.row {
            // SAFETY: the cursor stands on a completion, and the queue has this accessor, as `accessors::check` saw.
            Row::Extended(cq) => WcOpcode(unsafe { ibv_wc_read_opcode(cq.as_ptr()) }.0),
            Row::Classic(wc) => WcOpcode(wc.opcode.0),
        }
    }

    /// The vendor's own code for an error.
    #[must_use]
    #[inline(always)]
    pub fn vendor_error(&self) -> u32 {
        match self.row {
            // SAFETY: as in `opcode`.
            Row::Extended(cq) => unsafe { ibv_wc_read_vendor_err(cq.as_ptr()) },
            Row::Classic(wc) => wc.vendor_err,
        }
    }

    /// What else is known of it: which of the fields below mean something.
    #[must_use]
    #[inline(always)]
    pub fn flags(&self) -> WcFlags {
        WcFlags::from_bits_retain(match self.row {
            // SAFETY: as in `opcode`.
            Row::Extended(cq) => unsafe { ibv_wc_read_wc_flags(cq.as_ptr()) },
            Row::Classic(wc) => wc.wc_flags,
        })
    }

    /// Bytes transferred; meaningful for receives, reads and atomics. Of a datagram with the [`Grh::LEN`](crate::Grh::LEN) bytes
    /// before its payload.
    #[must_use]
    #[inline(always)]
    pub fn byte_len(&self) -> Option<u32> {
        field!(self, WcFields::BYTE_LEN, ibv_wc_read_byte_len, |wc| Some(wc.byte_len))
    }

    /// Immediate data of the peer in host byte order, if the message has it.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        if !self.flags().contains(WcFlags::WITH_IMM) {
            return None;
        }
        // SAFETY: with this flag the union holds immediate data; four bytes are a number in any case.
        field!(self, WcFields::IMM, ibv_wc_read_imm_data, |wc| Some(unsafe { wc.__bindgen_anon_1.imm_data }))
            .map(u32::from_be)
    }

    /// What is in the place of immediate data, in network byte order, and of a key; 0 where the queue was created without.
    #[inline(always)]
    pub(crate) fn imm_or_key(&self) -> u32 {
        // SAFETY: four bytes are a number whatever they mean.
        field!(self, WcFields::IMM, ibv_wc_read_imm_data, |wc| Some(unsafe { wc.__bindgen_anon_1.imm_data }))
            .unwrap_or(0)
    }

    /// The key that the peer's send invalidated, if it did.
    #[must_use]
    #[inline(always)]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        if !self.flags().contains(WcFlags::WITH_INV) {
            return None;
        }
        field!(self, WcFields::IMM, ibv_wc_read_invalidated_rkey, |wc| {
            // SAFETY: with this flag the union holds the key; four bytes are a number in any case.
            Some(unsafe { wc.__bindgen_anon_1.invalidated_rkey })
        })
    }

    /// Its fields of [`WcFields::STANDARD`], which need not be asked for one by one then; `None` of a queue that was created
    /// without one of them.
    #[must_use]
    #[inline(always)]
    pub fn standard(&self) -> Option<StandardFields<'_>> {
        match self.row {
            Row::Extended(_) if !self.fields.contains(WcFields::STANDARD) => None,
            // SAFETY: a queue with all of these fields, or a row, which has them anyway.
            row => Some(unsafe { StandardFields::new(row) }),
        }
    }

    /// Number of the local queue pair.
    #[must_use]
    #[inline(always)]
    pub fn qp_num(&self) -> Option<u32> {
        field!(self, WcFields::QP_NUM, ibv_wc_read_qp_num, |wc| Some(wc.qp_num))
    }

    /// Number of the sending queue pair; UD only.
    #[must_use]
    #[inline(always)]
    pub fn src_qp(&self) -> Option<u32> {
        field!(self, WcFields::SRC_QP, ibv_wc_read_src_qp, |wc| Some(wc.src_qp))
    }

    /// LID of the sender; UD on InfiniBand only.
    #[must_use]
    #[inline(always)]
    pub fn slid(&self) -> Option<u32> {
        field!(self, WcFields::SLID, ibv_wc_read_slid, |wc| Some(u32::from(wc.slid)))
    }

    /// Service level; UD on InfiniBand only.
    ///
    /// On Ethernet, drivers report the type of the packet here: 0xa for RoCE v2 by IPv4, 0x9 by IPv6.
    #[must_use]
    #[inline(always)]
    pub fn sl(&self) -> Option<u8> {
        field!(self, WcFields::SL, ibv_wc_read_sl, |wc| Some(wc.sl))
    }

    /// Low bits of the destination LID; UD on InfiniBand only.
    #[must_use]
    #[inline(always)]
    pub fn dlid_path_bits(&self) -> Option<u8> {
        field!(self, WcFields::DLID_PATH_BITS, ibv_wc_read_dlid_path_bits, |wc| Some(wc.dlid_path_bits))
    }

    /// When it completed, in ticks of the device's clock, of
    /// [`DeviceAttributes::hca_core_clock`](crate::DeviceAttributes::hca_core_clock) kHz.
    #[must_use]
    #[inline(always)]
    pub fn completion_timestamp(&self) -> Option<u64> {
        field!(self, WcFields::COMPLETION_TIMESTAMP, ibv_wc_read_completion_ts, |_wc| None)
    }

    /// When it completed, in nanoseconds of the wall clock.
    #[must_use]
    #[inline(always)]
    pub fn completion_wallclock_ns(&self) -> Option<u64> {
        field!(self, WcFields::COMPLETION_TIMESTAMP_WALLCLOCK, ibv_wc_read_completion_wallclock_ns, |_wc| None)
    }

    /// Tag of the message, of receives of a shared receive queue that matches tags; meaningful for messages that have one:
    /// `ibv_wc_read_tm_info`.
    #[doc(alias = "ibv_wc_read_tm_info")]
    #[must_use]
    #[inline]
    pub fn tag_info(&self) -> Option<TagInfo> {
        match self.row {
            Row::Extended(cq) if self.fields.contains(WcFields::TM_INFO) => {
                let mut info = ibv_wc_tm_info { tag: 0, priv_: 0 };
                // SAFETY: as in `field`, and `info` is a valid out pointer.
                unsafe { ibv_wc_read_tm_info(cq.as_ptr(), &mut info) };
                Some(TagInfo { tag: info.tag, private: info.priv_ })
            }
            _ => None,
        }
    }

    /// VLAN tag that the device stripped.
    #[must_use]
    #[inline(always)]
    pub fn cvlan(&self) -> Option<u16> {
        field!(self, WcFields::CVLAN, ibv_wc_read_cvlan, |_wc| None)
    }

    /// Tag of the flow that matched.
    #[must_use]
    #[inline(always)]
    pub fn flow_tag(&self) -> Option<u32> {
        field!(self, WcFields::FLOW_TAG, ibv_wc_read_flow_tag, |_wc| None)
    }
}

impl fmt::Debug for WorkCompletion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("WorkCompletion");
        debug.field("wr_id", &self.wr_id()).field("status", &self.status());
        match self.ok() {
            Ok(()) => debug.field("opcode", &self.opcode()).field("byte_len", &self.byte_len()),
            Err(_) => debug.field("vendor_error", &self.vendor_error()),
        }
        .finish()
    }
}

/// A work request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "work request {wr_id}{} failed: {status} (vendor error {vendor_error:#x}): {}",
    qp_num.map(|qp| format!(" of QP {qp:#08x}")).unwrap_or_default(), status.explain()
)]
pub struct CompletionError {
    /// How it ended.
    pub status: WcStatus,
    /// The vendor's own code.
    pub vendor_error: u32,
    /// Identifier of the work request.
    pub wr_id: u64,
    /// Number of the local queue pair, if the completion queue reports it.
    pub qp_num: Option<u32>,
}
