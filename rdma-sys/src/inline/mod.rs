//! The `static inline` functions of the C headers, which no library exports, and the macros that bindgen cannot express.
//!
//! They dispatch to one of three places: the operations in `ibv_context`, the optional operations in `verbs_context`
//! around it, and function pointers inside queue pairs, completion queues and other objects.
//!
//! Each behaves as its C original does, except where a C program would crash and an answer costs nothing; its
//! documentation says so. `__ibv_get_device_list` has no counterpart: it names the providers of a static link.

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

/// What `abi_compat` of a context is when a [`verbs_context`] surrounds it.
pub const __VERBS_ABI_IS_EXTENDED: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// What `alloc` of [`ibv_parent_domain_init_attr`](crate::ibv_parent_domain_init_attr) returns to let the provider
/// allocate.
pub const IBV_ALLOCATOR_USE_DEFAULT: *mut c_void = ptr::without_provenance_mut(usize::MAX);

/// The extended context around `ctx`, null when there is none.
///
/// `verbs_context` grows at its front, so on a library older than the bindings the result points before the
/// allocation: never make a reference of it, and read only fields that `sz` covers, counted from the end.
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

/// The operation at `offset` of the extended context around `ctx`, if there is one, it reaches that far and the
/// operation is set.
///
/// # Safety
/// `ctx` must point to a context, and `offset` must be that of the field that `_field` returns.
#[inline]
unsafe fn extended_op<F>(ctx: *mut ibv_context, offset: usize, _field: fn(&verbs_context) -> Option<F>) -> Option<F> {
    const CONTEXT: usize = offset_of!(verbs_context, context);
    const SZ: usize = offset_of!(verbs_context, sz);
    // SAFETY: the caller vouches for the context. Where abi_compat says that it is extended, `sz` lies right before it.
    // `sz` counts the bytes from the front of the library's verbs_context to its end; the tail of that structure never
    // changes, so an operation is there if its distance from the end is no larger.
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

/// An operation of `verbs_context`, by name.
macro_rules! op {
    ($ctx:expr, $op:ident) => {
        crate::inline::extended_op($ctx, core::mem::offset_of!(crate::bindings::verbs_context, $op), |table| table.$op)
    };
}
use op;

/// Functions that do nothing but call an operation of `verbs_context`.
macro_rules! extended {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($argument:ident: $ty:ty),+ $(,)?) -> $ret:ty = $op:ident of $ctx:expr;
    )+) => {$(
        $(#[$meta])*
        ///
        /// Fails with `EOPNOTSUPP` where the provider or the library does not have the operation.
        ///
        /// # Safety
        /// Each pointer must be to what the verb's manual page asks for, valid for the call: objects that exist,
        /// attributes that are initialised, memory to write results to.
        #[inline]
        pub unsafe fn $name($($argument: $ty),+) -> $ret {
            // SAFETY: the caller vouches for the objects, and so for their context; an operation that is there takes
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

/// Functions that do nothing but call a function pointer of an object, unchecked as in C.
macro_rules! object {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($object:ident: $of:ty $(, $argument:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? = $op:ident;
    )+) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        #[doc = concat!("`", stringify!($object), "` must exist and its `", stringify!($op), "` must be set. ")]
        /// Nobody else may use the object's queue or cursor meanwhile, and every other pointer must be to what the
        /// verb's manual page asks for.
        #[inline]
        pub unsafe fn $name($object: $of $(, $argument: $ty)*) $(-> $ret)? {
            // SAFETY: the caller vouches for the object, for the pointer in it and for the arguments.
            unsafe { crate::inline::set((*$object).$op)($object $(, $argument)*) }
        }
    )+};
}
use object;

/// The function pointer in `op`, without a branch.
///
/// # Safety
/// `op` must not be `None`.
#[inline(always)]
unsafe fn set<F>(op: Option<F>) -> F {
    debug_assert!(op.is_some(), "the provider did not set this operation");
    // SAFETY: the caller's promise.
    unsafe { op.unwrap_unchecked() }
}

/// How a verb says `EOPNOTSUPP`.
trait Unsupported {
    fn unsupported() -> Self;
}

/// Verbs that return 0 or an errno.
impl Unsupported for c_int {
    #[cold]
    fn unsupported() -> Self {
        libc::EOPNOTSUPP
    }
}

/// Verbs that return an object, or null and set errno.
impl<T> Unsupported for *mut T {
    #[cold]
    fn unsupported() -> Self {
        set_errno(libc::EOPNOTSUPP);
        ptr::null_mut()
    }
}

#[inline]
fn set_errno(errno: c_int) {
    // SAFETY: libc returns a pointer to this thread's errno, which is always valid.
    unsafe { *libc::__errno_location() = errno }
}

#[cfg(test)]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

    use super::*;
    use crate::bindings::{ibv_cq, ibv_modify_cq_attr};

    /// A context, and before it what a library has whose verbs_context is `sz` bytes long: Miri sees each step beyond.
    struct Context {
        memory: *mut u8,
        layout: Layout,
        context: *mut ibv_context,
    }

    impl Context {
        fn new(sz: usize) -> Self {
            let layout = Layout::from_size_align(sz, align_of::<verbs_context>()).unwrap();
            // SAFETY: no test asks for 0 bytes; a context lies at the end of at least as many bytes as it has.
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
            // SAFETY: the tests' lengths cover `sz`, which is right before the context.
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
        // SAFETY: the context exists; the function of the tests takes null.
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
        // `sz` is always there, and is read without a reference to the rest.
        let sz = extended.wrapping_byte_add(offset_of!(verbs_context, sz)).cast::<usize>();
        // SAFETY: the field lies inside the allocation.
        assert_eq!(unsafe { sz.read() }, FULL - MODIFY_CQ);
    }
}
