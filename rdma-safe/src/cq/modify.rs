//! Resizing completion queues, and moderating their events.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rdma_sys::*;

use super::CompletionQueue;
use crate::errno::check;
use crate::{Errno, Error, Result};

impl CompletionQueue {
    /// Changes the number of completions that the queue can hold: `ibv_resize_cq(3)`.
    ///
    /// It can then hold at least `entries` completions. Completions in the queue are kept.
    ///
    /// # Errors
    /// [`Error::ResizeCompletionQueue`] if the completions in the queue do not fit, or the number exceeds the device's
    /// limit; [`Error::Unsupported`]. The queue is then unchanged.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&mut self, entries: u32) -> Result<()> {
        // A forgotten cursor holds a lock that some providers take in `ibv_resize_cq`.
        self.end_poll();
        let verbs = self.context().verbs();
        let resized = match i32::try_from(entries) {
            // SAFETY: the queue is valid, and nobody polls it, since it is borrowed mutably.
            Ok(entries) => check(unsafe { (verbs.ibv_resize_cq)(self.as_raw(), entries) }),
            Err(_) => Err(Errno(libc::EINVAL)),
        };
        resized.map_err(|errno| match errno.is_unsupported() {
            true => self.context().unsupported("resizing completion queues"),
            false => {
                Error::ResizeCompletionQueue { entries, max_entries: self.context().attributes().max_cqe(), errno }
            }
        })?;
        // SAFETY: the queue is valid. Only a resize changes the field, and that requires the mutable borrow.
        let granted = unsafe { (*self.as_raw()).cqe }.max(0) as u32;
        self.shared.capacity.store(granted, Ordering::Relaxed);
        Ok(())
    }

    /// Delays events until there are `count` completions, or `period` has passed since the first one:
    /// `ibv_modify_cq(3)`.
    ///
    /// The period is rounded up to microseconds. Zeros turn the moderation off.
    ///
    /// # Errors
    /// [`Error::ModerateCompletionQueue`] if the values exceed
    /// [`DeviceAttributes::cq_moderation`](crate::device::DeviceAttributes::cq_moderation) or the period is longer than 65535
    /// µs; [`Error::Unsupported`].
    #[doc(alias = "ibv_modify_cq")]
    pub fn moderate(&mut self, count: u16, period: Duration) -> Result<()> {
        let micros = period.as_nanos().div_ceil(1000);
        let error = |errno| Error::ModerateCompletionQueue {
            count,
            period,
            limits: self.context().attributes().cq_moderation(),
            errno,
        };
        let cq_period = u16::try_from(micros).map_err(|_| error(Errno(libc::EINVAL)))?;
        let moderate = ibv_moderate_cq { cq_count: count, cq_period };
        let mut attr = ibv_modify_cq_attr { attr_mask: IBV_CQ_ATTR_MODERATE.0, moderate };
        // SAFETY: the queue is valid, and `attr` is valid during the call.
        check(unsafe { ibv_modify_cq(self.as_raw(), &mut attr) }).map_err(|errno| match errno.is_unsupported() {
            true => self.context().unsupported("moderation of completion events"),
            false => error(errno),
        })
    }
}
