//! The `static inline` functions of the C headers, which no library exports, and macros that bindgen cannot express.
//!
//! They dispatch to one of three places: the operations in `ibv_context`, the optional operations in the
//! `verbs_context` around it, and function pointers in queue pairs, completion queues and other objects.
//!
//! Each behaves like its C original, with documented exceptions: where a C program would crash and a check is cheap, it
//! returns an error. `__ibv_get_device_list` has no counterpart, because it names the providers of a static link.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr;

use crate::bindings::{ibv_context, verbs_context};

mod cq;
mod domain;
mod flow;
mod ib;
mod mr;
mod qp;
mod query;
mod rdma_cma;
mod rdma_verbs;
mod srq;
mod wq;
mod wr;

pub use cq::*;
pub use domain::*;
pub use flow::*;
pub use ib::*;
pub use mr::*;
pub use qp::*;
pub use query::*;
pub use rdma_cma::*;
pub use rdma_verbs::*;
pub use srq::*;
pub use wq::*;
pub use wr::*;

/// Value of a context's `abi_compat` if it is embedded in a [`verbs_context`].
pub const __VERBS_ABI_IS_EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// Return value of an [`ibv_parent_domain_init_attr`](crate::ibv_parent_domain_init_attr) `alloc` function that lets
/// the provider allocate.
pub const IBV_ALLOCATOR_USE_DEFAULT: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// The extended context around `ctx`, or null if there is none.
///
/// `verbs_context` grows at its front. With a library older than the bindings, the result points before the allocation.
/// Never create a reference from it, and only read fields that `sz` covers, counted from the end.
///
/// # Safety
/// `ctx` must point to a context.
#[inline]
pub unsafe fn verbs_get_ctx(ctx: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: the caller vouches for the context.
    if unsafe { (*ctx).abi_compat } != __VERBS_ABI_IS_EXTENDED {
        return ptr::null_mut();
    }
    ctx.wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
}

/// The operation at `offset` of the extended context around `ctx`.
///
/// `None` if the context is not extended or has no such field, or if the operation is not set.
///
/// # Safety
/// `ctx` must point to a context, and `offset` must be the offset of the field that `_field` returns.
#[inline]
unsafe fn extended_op<F>(ctx: *mut ibv_context, offset: usize, _field: fn(&verbs_context) -> Option<F>) -> Option<F> {
    const CONTEXT: usize = offset_of!(verbs_context, context);
    const SZ: usize = offset_of!(verbs_context, sz);
    // SAFETY: the caller vouches for the context. If abi_compat says that it is extended, `sz` is right before it. `sz`
    // is the length of the library's verbs_context. The end of that structure never changes, so the library has an
    // operation if its distance from the end is at most `sz`.
    unsafe {
        if (*ctx).abi_compat != __VERBS_ABI_IS_EXTENDED {
            return None;
        }
        let sz = ctx.byte_sub(CONTEXT - SZ).cast::<usize>().read();
        if sz < size_of::<verbs_context>() - offset {
            return None;
        }
        ctx.byte_sub(CONTEXT - offset).cast::<Option<F>>().read()
    }
}

/// Reads an operation of `verbs_context` by name.
macro_rules! op {
    ($ctx:expr, $op:ident) => {
        crate::inline::extended_op($ctx, core::mem::offset_of!(crate::bindings::verbs_context, $op), |table| table.$op)
    };
}
use op;

/// Defines functions that call an operation of `verbs_context`.
macro_rules! extended {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($argument:ident: $ty:ty),+ $(,)?) -> $ret:ty = $op:ident of $ctx:expr;
    )+) => {$(
        $(#[$meta])*
        ///
        /// Fails with `EOPNOTSUPP` if the provider or the library lacks the operation.
        ///
        /// # Safety
        /// All pointers must be valid for the call, as the manual page of the verb requires: existing objects,
        /// initialized attributes, and memory for results.
        #[inline]
        pub unsafe fn $name($($argument: $ty),+) -> $ret {
            // SAFETY: the caller vouches for the objects, and so for their context. An operation that exists takes
            // these arguments.
            unsafe {
                match crate::inline::op!($ctx, $op) {
                    Some(op) => op($($argument),+),
                    None => crate::inline::Unsupported::unsupported(),
                }
            }
        }
    )+};
}
use extended;

/// Defines functions that call a function pointer in an object. Like C, they do not check whether it is null.
macro_rules! object {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($object:ident: $of:ty $(, $argument:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? = $op:ident;
    )+) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        #[doc = concat!("`", stringify!($object), "` must exist and its `", stringify!($op), "` must be set. ")]
        /// Nobody else may use the object's queue or cursor at the same time. All other pointers must be as the manual
        /// page of the verb requires.
        #[inline]
        pub unsafe fn $name($object: $of $(, $argument: $ty)*) $(-> $ret)? {
            // SAFETY: the caller vouches for the object, its function pointer and the arguments.
            unsafe { crate::inline::set((*$object).$op)($object $(, $argument)*) }
        }
    )+};
}
use object;

/// Unwraps the function pointer `op` without a branch.
///
/// # Safety
/// `op` must not be `None`.
#[inline(always)]
unsafe fn set<F>(op: Option<F>) -> F {
    debug_assert!(op.is_some(), "the provider did not set this operation");
    // SAFETY: the caller's contract.
    unsafe { op.unwrap_unchecked() }
}

/// The `EOPNOTSUPP` result of a verb.
trait Unsupported {
    fn unsupported() -> Self;
}

/// For verbs that return 0 or an errno.
impl Unsupported for c_int {
    #[cold]
    fn unsupported() -> Self {
        libc::EOPNOTSUPP
    }
}

/// For verbs that return an object, or null and set errno.
impl<T> Unsupported for *mut T {
    #[cold]
    fn unsupported() -> Self {
        set_errno(libc::EOPNOTSUPP);
        ptr::null_mut()
    }
}

#[inline]
fn set_errno(errno: c_int) {
    // SAFETY: libc returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno }
}

#[cfg(test)]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

    use super::*;
    use crate::bindings::{ibv_cq, ibv_modify_cq_attr};

    /// A context at the end of an allocation of `sz` bytes, like the context of a library whose verbs_context has this size.
    /// Miri detects any access outside of the allocation.
    struct Context {
        memory: *mut u8,
        layout: Layout,
        context: *mut ibv_context,
    }

    impl Context {
        fn new(sz: usize) -> Self {
            let layout = Layout::from_size_align(sz, align_of::<verbs_context>()).unwrap();
            // SAFETY: no test passes a size of 0. The `verbs_context` fits into the allocation, at the end.
            unsafe {
                let memory = alloc_zeroed(layout);
                if memory.is_null() {
                    handle_alloc_error(layout);
                }
                let context: *mut ibv_context = memory.add(sz - size_of::<ibv_context>()).cast();
                Self { memory, layout, context }
            }
        }

        fn extended(sz: usize) -> Self {
            let this = Self::new(sz);
            // SAFETY: the tests' sizes cover `sz`, which is right before the context.
            unsafe {
                (*this.context).abi_compat = __VERBS_ABI_IS_EXTENDED;
                this.context.cast::<usize>().sub(1).write(sz);
            }
            this
        }
    }

    impl Drop for Context {
        fn drop(&mut self) {
            // SAFETY: this is the allocation of `new`.
            unsafe { dealloc(self.memory, self.layout) }
        }
    }

    const FULL: usize = size_of::<verbs_context>();
    const MODIFY_CQ: usize = offset_of!(verbs_context, modify_cq);

    unsafe extern "C" fn answer(_: *mut ibv_cq, _: *mut ibv_modify_cq_attr) -> c_int {
        42
    }

    fn found(context: &Context) -> Option<c_int> {
        // SAFETY: the context exists; the function of the tests accepts null.
        unsafe { op!(context.context, modify_cq).map(|modify| modify(ptr::null_mut(), ptr::null_mut())) }
    }

    #[test]
    fn the_first_operation_of_an_older_library_is_found() {
        let context = Context::extended(FULL - MODIFY_CQ);
        assert_eq!(found(&context), None, "not set yet");
        // SAFETY: the memory starts with this operation.
        unsafe { context.memory.cast::<Option<_>>().write(Some(answer as unsafe extern "C" fn(_, _) -> _)) };
        assert_eq!(found(&context), Some(42));
    }

    #[test]
    fn an_operation_that_the_library_predates_is_not_read() {
        assert_eq!(found(&Context::extended(FULL - MODIFY_CQ - size_of::<usize>())), None);
    }

    #[test]
    fn nothing_before_a_context_that_is_not_extended_is_read() {
        let context = Context::new(size_of::<ibv_context>());
        for abi_compat in [0, u32::MAX as usize, usize::MAX - 1] {
            // SAFETY: the context exists.
            unsafe { (*context.context).abi_compat = ptr::without_provenance_mut(abi_compat) };
            assert_eq!(found(&context), None, "{abi_compat:#x}");
            // SAFETY: the context exists.
            assert!(unsafe { verbs_get_ctx(context.context) }.is_null(), "{abi_compat:#x}");
        }
    }

    #[test]
    fn the_extended_context_may_start_before_the_allocation() {
        let context = Context::extended(FULL - MODIFY_CQ);
        // SAFETY: the context exists.
        let extended = unsafe { verbs_get_ctx(context.context) };
        assert_eq!(extended.addr(), context.memory.addr() - MODIFY_CQ);
        // `sz` always exists, and is read without a reference to the rest.
        let sz = extended.wrapping_byte_add(offset_of!(verbs_context, sz)).cast::<usize>();
        // SAFETY: the field lies in the allocation.
        assert_eq!(unsafe { sz.read() }, FULL - MODIFY_CQ);
    }
}
