//! The loops of `benches/overhead/loops.c`, for each kind of object.
//!
//! They post with a guard and its handles. They poll as sideway's documentation and examples do: `start_poll` each time, and
//! `while let` over the poller.
//!
//! The module `reused` has loops over basic objects that start a poller once and call it again after it has returned `None`.
//! This avoids allocating its array for each poll. An extended poller cannot be reused: `ibv_end_poll` has to be called
//! between two polls, and only dropping the poller calls it.

use rdma_rivals::{BATCH, FAILED, LEN};
use sideway::ibverbs::completion::PollCompletionQueueError;
use sideway::ibverbs::queue_pair::{PostSendGuard, QueuePair, SetInlineData, SetScatterGatherEntry, WorkRequestFlags};

/// Sum of the fields that C reads of every completion: identifier, status, opcode.
macro_rules! read_basic {
    ($wc:ident) => {
        $wc.wr_id() + u64::from($wc.status()) + u64::from($wc.opcode())
    };
}

/// Sum of the fields that C reads of a receive: also length and immediate data.
macro_rules! read_receive {
    ($wc:ident) => {
        read_basic!($wc) + u64::from($wc.byte_len()) + u64::from(u32::from_be($wc.imm_data()))
    };
}

macro_rules! take {
    ($poller:ident, $sum:ident, |$wc:ident| $value:expr) => {
        while let Some($wc) = $poller.next() {
            $sum += $value;
        }
    };
}

/// Takes all available completions.
macro_rules! drain {
    ($o:ident, $sum:ident, |$wc:ident| $value:expr) => {
        let Ok(mut poller) = $o.cq.start_poll() else { return FAILED };
        take!(poller, $sum, |$wc| $value);
    };
}

/// Adds a signaled write of one element.
macro_rules! add_write {
    ($guard:ident, $o:ident, $wr_id:expr) => {
        let handle = $guard.construct_wr($wr_id, WorkRequestFlags::Signaled).setup_write($o.rkey, $o.remote);
        // SAFETY: the rig keeps the memory, and the stub moves no data.
        unsafe { handle.setup_sge($o.lkey, $o.local, LEN) };
    };
}

macro_rules! loops {
    ($module:ident: $objects:ident) => {
        #[allow(dead_code, reason = "receives and inline sends are measured over one kind only")]
        pub(crate) mod $module {
            use super::*;
            use crate::rig::$objects as Objects;

            /// ex1, cl1
            #[inline(never)]
            pub(crate) fn one(o: &mut Objects, n: u64) -> u64 {
                let mut sum = 0;
                for i in 0..n {
                    let mut guard = o.qp.start_post_send();
                    add_write!(guard, o, i);
                    if guard.post().is_err() {
                        return FAILED;
                    }
                    drain!(o, sum, |wc| read_basic!(wc));
                }
                sum
            }

            /// ex16, cl16
            #[inline(never)]
            pub(crate) fn sixteen(o: &mut Objects, n: u64) -> u64 {
                let mut sum = 0;
                for i in (0..n).step_by(BATCH) {
                    let mut guard = o.qp.start_post_send();
                    for j in 0..BATCH as u64 {
                        add_write!(guard, o, i + j);
                    }
                    if guard.post().is_err() {
                        return FAILED;
                    }
                    drain!(o, sum, |wc| read_basic!(wc));
                }
                sum
            }

            /// rv1
            #[inline(never)]
            pub(crate) fn receive(o: &mut Objects, n: u64) -> u64 {
                for i in 0..n {
                    let mut guard = o.qp.start_post_recv();
                    // SAFETY: the rig keeps the memory, and the stub moves no data.
                    unsafe { guard.construct_wr(i).setup_sge(o.lkey, o.local, LEN) };
                    if guard.post().is_err() {
                        return FAILED;
                    }
                }
                n
            }

            /// in1
            #[inline(never)]
            pub(crate) fn inline(o: &mut Objects, n: u64) -> u64 {
                for i in 0..n {
                    let mut guard = o.qp.start_post_send();
                    guard.construct_wr(i, WorkRequestFlags::Inline).setup_send().setup_inline_data(&o.inline);
                    if guard.post().is_err() {
                        return FAILED;
                    }
                }
                n
            }

            /// em_ex, em_cl
            #[inline(never)]
            pub(crate) fn empty(o: &mut Objects, n: u64) -> u64 {
                for _ in 0..n {
                    let Err(PollCompletionQueueError::CompletionQueueEmpty) = o.cq.start_poll() else { return FAILED };
                }
                n
            }

            /// poll_ex, poll_cl: unlike C, does not check the flags, which sideway does not expose.
            #[inline(never)]
            pub(crate) fn poll(o: &mut Objects, n: u64) -> u64 {
                let mut sum = 0;
                for _ in (0..n).step_by(BATCH) {
                    drain!(o, sum, |wc| read_receive!(wc));
                }
                sum
            }
        }
    };
}

loops!(extended: Extended);
loops!(basic: Basic);
loops!(generic: Generic);

pub(crate) mod reused {
    use super::*;
    use crate::rig::Basic;

    /// Posts writes with the identifiers `from..to`.
    macro_rules! post {
        ($o:ident, $from:expr, $to:expr) => {
            let mut guard = $o.qp.start_post_send();
            for wr_id in $from..$to {
                add_write!(guard, $o, wr_id);
            }
            if guard.post().is_err() {
                return FAILED;
            }
        };
    }

    /// cl1
    #[inline(never)]
    pub(crate) fn one(o: &mut Basic, n: u64) -> u64 {
        let mut sum = 0;
        post!(o, 0, 1);
        let Ok(mut poller) = o.cq.start_poll() else { return FAILED };
        take!(poller, sum, |wc| read_basic!(wc));
        for i in 1..n {
            post!(o, i, i + 1);
            take!(poller, sum, |wc| read_basic!(wc));
        }
        sum
    }

    /// cl16
    #[inline(never)]
    pub(crate) fn sixteen(o: &mut Basic, n: u64) -> u64 {
        let mut sum = 0;
        post!(o, 0, BATCH as u64);
        let Ok(mut poller) = o.cq.start_poll() else { return FAILED };
        take!(poller, sum, |wc| read_basic!(wc));
        for i in (BATCH as u64..n).step_by(BATCH) {
            post!(o, i, i + BATCH as u64);
            take!(poller, sum, |wc| read_basic!(wc));
        }
        sum
    }

    /// em_cl, after a first completion: on an empty queue, `start_poll` returns no poller.
    #[inline(never)]
    pub(crate) fn empty(o: &mut Basic, n: u64) -> u64 {
        post!(o, 0, 1);
        let Ok(mut poller) = o.cq.start_poll() else { return FAILED };
        let mut taken = 0;
        take!(poller, taken, |_wc| 1);
        for _ in 0..n {
            if poller.next().is_some() {
                return FAILED;
            }
        }
        if taken == 1 { n } else { FAILED }
    }

    /// poll_cl
    #[inline(never)]
    pub(crate) fn poll(o: &mut Basic, n: u64) -> u64 {
        let mut sum = 0;
        let Ok(mut poller) = o.cq.start_poll() else { return FAILED };
        for _ in (0..n).step_by(BATCH) {
            take!(poller, sum, |wc| read_receive!(wc));
        }
        sum
    }
}
