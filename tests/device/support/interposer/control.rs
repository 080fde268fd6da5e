//! Verbs that create, change and destroy objects.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, PoisonError};

use rdma_safe::sys::*;

use super::posts::Qp;
use super::state::{Operations, State};
use super::{CONTEXTS, OPENING, completions, posts, soft, state_of};

/// The context of a C object.
pub(super) trait Object {
    /// # Safety
    /// The object exists.
    unsafe fn context(self) -> *mut ibv_context;
}

impl Object for *mut ibv_context {
    unsafe fn context(self) -> *mut ibv_context {
        self
    }
}

macro_rules! objects {
    ($($object:ty),*) => {
        $(impl Object for *mut $object {
            unsafe fn context(self) -> *mut ibv_context {
                // SAFETY: the caller's promise.
                unsafe { (*self).context }
            }
        })*
    };
}

objects!(ibv_pd, ibv_mr, ibv_mw, ibv_comp_channel, ibv_cq, ibv_cq_ex, ibv_qp, ibv_srq, ibv_ah);

/// The state of the device of an object, if it is interposed.
///
/// # Safety
/// The object exists.
pub(super) unsafe fn state_of_object(object: impl Object) -> Option<Arc<State>> {
    // SAFETY: the caller's promise.
    state_of(unsafe { object.context() })
}

/// The state of the device of an object whose functions were replaced.
///
/// # Safety
/// The object exists, and its device is interposed.
pub(super) unsafe fn known_state(object: impl Object) -> Arc<State> {
    // SAFETY: the caller's promise.
    unsafe { state_of_object(object) }.expect("only interposed devices have these functions")
}

macro_rules! verbs {
    ($($name:ident($object:ident: $of:ty $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty;)*) => {
        $(unsafe extern "C" fn $name($object: $of $(, $argument: $type)*) -> $result {
            // SAFETY: the caller keeps the contract of the verb.
            let call = || unsafe { (soft().$name)($object $(, $argument)*) };
            // SAFETY: as above, so the object exists.
            match unsafe { state_of_object($object) } {
                Some(state) => state.run(stringify!($name), $object.addr(), call),
                None => call(),
            }
        })*

        fn replace_plain(table: &mut Verbs) {
            $(table.$name = $name;)*
        }
    };
}

verbs! {
    ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr;
    ibv_rereg_mr(
        mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, address: *mut c_void, len: usize, access: c_int
    ) -> c_int;
    ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    ibv_create_cq(
        context: *mut ibv_context, entries: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int
    ) -> *mut ibv_cq;
    ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int;
    ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
}

pub(super) fn replace(table: &mut Verbs) {
    replace_plain(table);
    table.ibv_open_device = ibv_open_device;
    table.ibv_close_device = ibv_close_device;
    table.ibv_reg_mr_iova2 = ibv_reg_mr_iova2;
    table.ibv_dereg_mr = ibv_dereg_mr;
    table.ibv_create_qp = ibv_create_qp;
}

unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: the caller keeps the contract of the verb.
    let call = || unsafe { (soft().ibv_open_device)(device) };
    let Some(state) = OPENING.with_borrow(Clone::clone) else { return call() };
    let context = state.run("ibv_open_device", 0, call);
    if !context.is_null() {
        // SAFETY: the context was just created, and no other thread knows of it.
        unsafe { adopt(context, &state) };
        CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).insert(context.addr(), state);
    }
    context
}

unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    let call = || unsafe { (soft().ibv_close_device)(context) };
    let Some(state) = state_of(context) else { return call() };
    state.run("ibv_close_device", context.addr(), || {
        // Another context may get the address before the call returns.
        CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner).remove(&context.addr());
        call()
    })
}

/// Replaces the operations of a context.
///
/// # Safety
/// The context is one of soft0, and no other thread uses it.
unsafe fn adopt(context: *mut ibv_context, state: &State) {
    // SAFETY: the caller's promise; a context of soft0 is extended and has these operations.
    unsafe {
        let verbs = verbs_get_ctx(context);
        let ops = &raw mut (*context).ops;
        state.lock().soft = Some(Operations {
            ops: *ops,
            create_cq_ex: (*verbs).create_cq_ex.expect("create_cq_ex"),
            create_qp_ex: (*verbs).create_qp_ex.expect("create_qp_ex"),
            query_device_ex: (*verbs).query_device_ex.expect("query_device_ex"),
            query_port: (*verbs).query_port.expect("query_port"),
        });
        (*verbs).create_cq_ex = Some(completions::create_cq_ex);
        (*verbs).create_qp_ex = Some(create_qp_ex);
        (*verbs).query_device_ex = Some(query_device_ex);
        (*verbs).query_port = Some(query_port);
        (*ops).poll_cq = Some(completions::poll_cq);
        (*ops).req_notify_cq = Some(req_notify_cq);
        (*ops).post_send = Some(posts::post_send);
        (*ops).post_recv = Some(posts::post_recv);
        (*ops).post_srq_recv = Some(posts::post_srq_recv);
        (*ops).alloc_mw = Some(alloc_mw);
        (*ops).bind_mw = Some(bind_mw);
        (*ops).dealloc_mw = Some(dealloc_mw);
    }
}

/// The functions of soft0 in the context of an object.
///
/// # Safety
/// The object exists, and its device is interposed.
pub(super) unsafe fn operations(object: impl Object) -> (Arc<State>, Operations) {
    // SAFETY: the caller's promise.
    let state = unsafe { known_state(object) };
    let soft = state.lock().soft.expect("the device is open");
    (state, soft)
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(context);
        let result = (soft.query_device_ex)(context, input, attr, size);
        if result == 0 {
            let reported = &raw mut (*attr).orig_attr;
            let hidden = state.config.without_capabilities.bits();
            (*reported).device_cap_flags &= !(hidden as u32);
            (*attr).device_cap_flags_ex &= !hidden;
            (*reported).vendor_id = state.config.vendor_id.unwrap_or((*reported).vendor_id);
        }
        result
    }
}

unsafe extern "C" fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, size: usize) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(context);
        let result = (soft.query_port)(context, port, attr, size);
        if let (0, Some(longest)) = (result, state.config.max_msg_sz) {
            (*attr).max_msg_sz = longest;
        }
        result
    }
}

/// Counts and fails as `ibv_reg_mr`, which is a macro for one of two functions.
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller keeps the contract of the verb.
    let call = || unsafe { (soft().ibv_reg_mr_iova2)(pd, address, len, iova, access) };
    // SAFETY: as above, so the domain exists.
    match unsafe { state_of_object(pd) } {
        Some(state) => state.run("ibv_reg_mr", pd.addr(), call),
        None => call(),
    }
}

unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    let call = || unsafe { (soft().ibv_dereg_mr)(mr) };
    // SAFETY: as above, so the region exists.
    let (state, lkey) = unsafe { (state_of_object(mr), (*mr).lkey) };
    let Some(state) = state else { return call() };
    state.lock().needs_unused(lkey);
    state.run("ibv_dereg_mr", mr.addr(), call)
}

unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller keeps the contract of the verb.
    let call = || unsafe { (soft().ibv_create_qp)(pd, init) };
    // SAFETY: as above, so the domain exists.
    let Some(state) = (unsafe { state_of_object(pd) }) else { return call() };
    let qp = state.run("ibv_create_qp", pd.addr(), call);
    if !qp.is_null() {
        // SAFETY: the queue pair was just created.
        state.lock().qps.insert(qp.addr(), unsafe { Qp::new(qp) });
    }
    qp
}

unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller keeps the contract of the verb.
    let (state, soft) = unsafe { operations(context) };
    // SAFETY: as above.
    let qp = state.run("create_qp_ex", context.addr(), || unsafe { (soft.create_qp_ex)(context, init) });
    if !qp.is_null() {
        // SAFETY: the queue pair was just created, and no other thread knows of it.
        let record = unsafe { Qp::new(qp).replace_functions() };
        state.lock().qps.insert(qp.addr(), record);
    }
    qp
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(cq);
        let call = || (soft.ops.req_notify_cq.expect("req_notify_cq"))(cq, solicited_only);
        state.run("ibv_req_notify_cq", cq.addr(), call)
    }
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(pd);
        state.run("alloc_mw", pd.addr(), || (soft.ops.alloc_mw.expect("alloc_mw"))(pd, kind))
    }
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(mw);
        state.run("dealloc_mw", mw.addr(), || (soft.ops.dealloc_mw.expect("dealloc_mw"))(mw))
    }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(qp);
        if state.lock().qps.get(&qp.addr()).is_some_and(|qp| qp.builder.is_some()) {
            state.lock().violation("bind_mw between wr_start and wr_complete");
        }
        state.run("bind_mw", qp.addr(), || (soft.ops.bind_mw.expect("bind_mw"))(qp, mw, bind))
    }
}
