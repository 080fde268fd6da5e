//! Indirection tables.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::{Shared, WorkQueue};
use crate::errno::check_ptr;
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Error, Result};

/// A table of work queues, indexed by the hash of a packet: `struct ibv_rwq_ind_table`. Clones share it.
///
/// It keeps its work queues alive. It is destroyed when the last clone and the last
/// [`RssQueuePair`](crate::wq::RssQueuePair) that uses it are dropped.
#[derive(Clone)]
pub struct IndirectionTable {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    queues: Vec<Arc<Shared>>,
    context: Context,
}

impl Parents for MadeFrom {
    type Raw = ibv_rwq_ind_table;

    const VERB: Verb = Verb::DestroyRwqIndTable;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_rwq_ind_table) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_destroy_rwq_ind_table(raw) }
    }
}

impl Context {
    /// Creates a table of work queues: `ibv_create_rwq_ind_table(3)`. A queue may appear more than once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without [`ReceiveSideScaling`](crate::device::ReceiveSideScaling); [`Error::IndirectionTable`]
    /// unless the number of entries is a power of two within the device's limit, or when the provider refuses;
    /// [`Error::ForeignContext`] when a queue belongs to another context.
    #[doc(alias = "ibv_create_rwq_ind_table")]
    pub fn indirection_table(&self, queues: &[&WorkQueue]) -> Result<IndirectionTable> {
        let unsupported = || self.unsupported("receive-side scaling");
        let max = self.attributes().receive_side_scaling().ok_or_else(unsupported)?.max_indirection_table_size;
        let entries = queues.len();
        let error = |errno| Error::IndirectionTable { entries, max, errno };
        if !entries.is_power_of_two() || entries as u64 > max.into() {
            return Err(error(crate::Errno(libc::EINVAL)));
        }
        for queue in queues {
            self.require_same(queue.context(), "work queue")?;
        }
        let mut list: Vec<*mut ibv_wq> = queues.iter().map(|queue| queue.as_raw()).collect();
        let mut attr =
            ibv_rwq_ind_table_init_attr { log_ind_tbl_size: entries.ilog2(), ind_tbl: list.as_mut_ptr(), comp_mask: 0 };
        // SAFETY: the context is valid, and so are the 2^`log_ind_tbl_size` queues of the list. The list and `attr` are
        // valid during the call.
        let raw =
            check_ptr(|| unsafe { ibv_create_rwq_ind_table(self.as_raw(), &mut attr) }).map_err(|errno| match errno
                .is_unsupported()
            {
                true => unsupported(),
                false => error(errno),
            })?;
        // SAFETY: just created from these queues, and not shared with anything.
        Ok(unsafe { IndirectionTable::from_raw(self, raw, queues) })
    }
}

impl IndirectionTable {
    /// Adopts a table that other code has created.
    ///
    /// It is destroyed when the last clone and the last queue pair that uses it are dropped.
    ///
    /// # Safety
    /// `raw` must be an existing table of `context` that contains no other work queues than `queues`. Other code must
    /// not destroy it from now on.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_rwq_ind_table>, queues: &[&WorkQueue]) -> Self {
        let queues = queues.iter().map(|queue| queue.shared().clone()).collect();
        let made_from = MadeFrom { queues, context: context.clone() };
        // SAFETY: the caller's contract. Each queue pair that uses the table holds an `Arc` of the table.
        IndirectionTable { inner: Arc::new(unsafe { Object::new(raw, made_from) }) }
    }

    /// Destroys the table: `ibv_destroy_rwq_ind_table(3)`.
    ///
    /// Dropping the last clone and queue pair does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`] while clones or queue pairs use it; it is destroyed when the last of them is dropped.
    /// [`Error::Verb`] with the provider's error; the table and its work queues are then kept until the process ends.
    #[doc(alias = "ibv_destroy_rwq_ind_table")]
    pub fn destroy(self) -> Result<()> {
        Object::destroy_last(self.inner, "indirection table", "clones or queue pairs").map(drop)
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.queues.len()
    }

    /// Whether the table has no entries, which is possible only for an adopted one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.queues.is_empty()
    }

    /// The device of the table.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this table or a queue pair that uses it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_rwq_ind_table {
        self.inner.as_raw()
    }
}

impl fmt::Debug for IndirectionTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndirectionTable")
            .field("device", &self.context().device_name())
            .field("entries", &self.len())
            .finish_non_exhaustive()
    }
}
