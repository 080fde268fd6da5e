//! Wake-ups and drops that wait until no lock is held.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use rdma_safe::mr::Piece;
use rdma_safe::{Buffer, Completion};

use crate::driver::state::Done;
use crate::trace;

/// Memory of a connection. It is dropped when the connection is gone.
pub(crate) type Attachment = Box<dyn Send>;

/// Tasks to wake and memory to drop. Both can run code of the user, so they wait until no lock is held.
///
/// Dropping it wakes the tasks that are left, also if a destructor of memory panics.
#[derive(Default)]
pub(crate) struct Effects {
    /// The first task to wake. Most sweeps wake only one.
    first: Option<Waker>,
    more: More,
    wakers: Vec<Waker>,
    completions: Vec<Completion>,
    done: Vec<Done>,
    buffers: Vec<Buffer>,
    pieces: Vec<Piece>,
    attachments: Vec<Attachment>,
    dropped_wakers: Vec<Waker>,
    /// Why connections have failed. A subscriber of events is code of the user, too.
    failures: Vec<Arc<rdma_safe::Error>>,
}

/// What there is to do besides waking the first task.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum More {
    #[default]
    Nothing,
    /// To wake further tasks.
    Wakers,
    /// Also to drop memory, or to report failures.
    All,
}

impl Effects {
    #[inline(always)]
    pub(crate) fn wake(&mut self, waker: Waker) {
        match self.first {
            None => self.first = Some(waker),
            Some(_) => self.wake_later(waker),
        }
    }

    #[inline(never)]
    fn wake_later(&mut self, waker: Waker) {
        self.more = self.more.max(More::Wakers);
        self.wakers.push(waker);
    }

    pub(crate) fn drop_completion(&mut self, completion: Completion) {
        self.more().completions.push(completion);
    }

    #[inline(always)]
    pub(crate) fn drop_done(&mut self, done: Done) {
        self.more().done.push(done);
    }

    pub(crate) fn drop_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        self.more().buffers.extend(buffers);
    }

    pub(crate) fn drop_pieces(&mut self, pieces: Vec<Piece>) {
        self.more().pieces.extend(pieces);
    }

    pub(crate) fn drop_attachments(&mut self, attachments: Vec<Attachment>) {
        self.more().attachments.extend(attachments);
    }

    /// A connection has failed.
    pub(crate) fn note_failure(&mut self, error: Arc<rdma_safe::Error>) {
        self.more().failures.push(error);
    }

    pub(crate) fn drop_waker(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.more().dropped_wakers.push(waker);
        }
    }

    #[inline(always)]
    fn more(&mut self) -> &mut Self {
        self.more = More::All;
        self
    }

    /// Drops the memory, and wakes the tasks in order. Keeps its own allocations.
    #[inline(always)]
    pub(crate) fn run(&mut self) {
        if self.more != More::Nothing {
            self.run_more();
        } else if let Some(first) = self.first.take() {
            wake(first);
        }
    }

    #[inline(never)]
    fn run_more(&mut self) {
        if std::mem::take(&mut self.more) == More::All {
            self.drop_all();
        }
        self.wake_all();
    }

    fn drop_all(&mut self) {
        // First, so that a task that waits for the end of its connection finds its memory in the pool.
        self.done.clear();
        self.failures.drain(..).for_each(|error| trace::failed(&error));
        self.completions.clear();
        self.buffers.clear();
        self.pieces.clear();
        self.attachments.clear();
        self.dropped_wakers.drain(..).for_each(drop_waker);
    }

    fn wake_all(&mut self) {
        if let Some(first) = self.first.take() {
            wake(first);
        }
        self.wakers.drain(..).for_each(wake);
    }
}

/// Wakes a task. A waker that panics keeps neither the other tasks nor the driver from going on.
#[inline(always)]
pub(crate) fn wake(waker: Waker) {
    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
}

/// Drops a waker. If that panics, the caller still stores what it has posted.
fn drop_waker(waker: Waker) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(waker)));
}

impl Drop for Effects {
    fn drop(&mut self) {
        self.wake_all();
    }
}
