//! Posting: chains of `ibv_post_send`, `ibv_post_recv` and `ibv_post_srq_recv`, and batches of `ibv_wr_*`.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::thread::{ThreadId, current};

use rdma_safe::sys::*;

use super::control::{known_state, operations};

/// How a posting fails.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostFault {
    pub(crate) errno: i32,
    /// Number of work requests that the device accepts although the call fails.
    pub(crate) taken: usize,
    pub(crate) bad: Bad,
}

/// The value of `bad_wr` after a failed posting.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bad {
    /// The first work request that was not accepted, as the manual page says.
    FirstNotTaken,
    /// NULL.
    Null,
    /// Unchanged.
    Untouched,
    /// A pointer outside of the chain.
    Elsewhere,
    /// A pointer into the chain, but not to the start of a work request.
    Between,
}

/// A work request that the device has accepted.
#[derive(Clone, Debug)]
pub(crate) struct Posted {
    /// The function that posted it.
    pub(crate) verb: &'static str,
    /// The function that set its data, for `ibv_wr_*`.
    pub(crate) setter: &'static str,
    pub(crate) wr_id: u64,
    pub(crate) flags: u32,
    pub(crate) len: u64,
    pub(super) lkeys: Vec<u32>,
}

/// A raw pointer that may move between threads, because a lock protects the state behind it.
pub(super) struct Ptr<T>(pub(super) *mut T);

// SAFETY: the lock of the state protects the pointer. Only `break_qp`, whose caller excludes other threads, uses the object.
unsafe impl<T> Send for Ptr<T> {}

pub(super) struct Qp {
    pub(super) raw: Ptr<ibv_qp>,
    pub(super) number: u32,
    /// The completion queues of sends and of receives.
    pub(super) cqs: [usize; 2],
    pub(super) srq: Option<usize>,
    /// Accepted work that has not completed.
    pub(super) sends: VecDeque<Posted>,
    pub(super) receives: VecDeque<Posted>,
    /// The thread between `wr_start` and `wr_complete`.
    pub(super) builder: Option<ThreadId>,
    building: Vec<Posted>,
    /// The functions of soft0, for an extended queue pair.
    soft: Option<WrFunctions>,
}

#[derive(Clone, Copy)]
struct WrFunctions {
    start: unsafe extern "C" fn(*mut ibv_qp_ex),
    complete: unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int,
    abort: unsafe extern "C" fn(*mut ibv_qp_ex),
    set_sge: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
    set_sge_list: unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge),
    set_inline_data: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize),
    set_inline_data_list: unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf),
}

impl Qp {
    /// # Safety
    /// The queue pair exists.
    pub(super) unsafe fn new(raw: *mut ibv_qp) -> Self {
        // SAFETY: the caller's promise.
        let ibv_qp { qp_num: number, send_cq, recv_cq, srq, .. } = unsafe { raw.read() };
        Qp {
            raw: Ptr(raw),
            number,
            cqs: [send_cq.addr(), recv_cq.addr()],
            srq: (!srq.is_null()).then(|| srq.addr()),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            builder: None,
            building: Vec::new(),
            soft: None,
        }
    }

    /// Replaces the functions of an extended queue pair.
    ///
    /// # Safety
    /// The queue pair exists, and no other thread uses it.
    pub(super) unsafe fn replace_functions(mut self) -> Self {
        // SAFETY: the caller's promise, and the function takes any queue pair.
        unsafe {
            let qp = (super::soft().ibv_qp_to_qp_ex)(self.raw.0);
            if qp.is_null() {
                return self;
            }
            self.soft = Some(WrFunctions {
                start: (*qp).wr_start.expect("wr_start"),
                complete: (*qp).wr_complete.expect("wr_complete"),
                abort: (*qp).wr_abort.expect("wr_abort"),
                set_sge: (*qp).wr_set_sge.expect("wr_set_sge"),
                set_sge_list: (*qp).wr_set_sge_list.expect("wr_set_sge_list"),
                set_inline_data: (*qp).wr_set_inline_data.expect("wr_set_inline_data"),
                set_inline_data_list: (*qp).wr_set_inline_data_list.expect("wr_set_inline_data_list"),
            });
            (*qp).wr_start = Some(wr_start);
            (*qp).wr_complete = Some(wr_complete);
            (*qp).wr_abort = Some(wr_abort);
            (*qp).wr_set_sge = Some(wr_set_sge);
            (*qp).wr_set_sge_list = Some(wr_set_sge_list);
            (*qp).wr_set_inline_data = Some(wr_set_inline_data);
            (*qp).wr_set_inline_data_list = Some(wr_set_inline_data_list);
        }
        self
    }
}

/// A work request of a chain.
trait Request: Copy {
    fn next(&mut self) -> &mut *mut Self;

    /// # Safety
    /// The elements of the work request exist.
    unsafe fn posted(&self, verb: &'static str) -> Posted;
}

/// # Safety
/// There are `count` elements at `list`.
unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> &'a [ibv_sge] {
    match usize::try_from(count) {
        // SAFETY: the caller's promise.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(list, count) },
        _ => &[],
    }
}

impl Posted {
    fn new(verb: &'static str, setter: &'static str, wr_id: u64, flags: u32, sges: &[ibv_sge]) -> Self {
        let lkeys = if flags & IBV_SEND_INLINE.0 == 0 { sges.iter().map(|sge| sge.lkey).collect() } else { Vec::new() };
        let len = sges.iter().map(|sge| u64::from(sge.length)).sum();
        Posted { verb, setter, wr_id, flags, len, lkeys }
    }
}

impl Request for ibv_send_wr {
    fn next(&mut self) -> &mut *mut Self {
        &mut self.next
    }

    unsafe fn posted(&self, verb: &'static str) -> Posted {
        // SAFETY: the caller's promise.
        Posted::new(verb, "", self.wr_id, self.send_flags, unsafe { elements(self.sg_list, self.num_sge) })
    }
}

impl Request for ibv_recv_wr {
    fn next(&mut self) -> &mut *mut Self {
        &mut self.next
    }

    unsafe fn posted(&self, verb: &'static str) -> Posted {
        // SAFETY: the caller's promise.
        Posted::new(verb, "", self.wr_id, 0, unsafe { elements(self.sg_list, self.num_sge) })
    }
}

/// Posts a chain with the function of soft0, up to the work request that fails. Returns what soft0 has accepted.
///
/// # Safety
/// The chain and `bad` keep the contract of the verb, and so does `post` if it gets a part of the chain.
unsafe fn chain<R: Request>(
    verb: &'static str,
    first: *mut R,
    bad: *mut *mut R,
    fault: Option<PostFault>,
    post: impl FnOnce(*mut R, *mut *mut R) -> c_int,
) -> (c_int, Vec<Posted>) {
    let (mut originals, mut copies) = (Vec::new(), Vec::new());
    let mut at = first;
    while !at.is_null() {
        originals.push(at);
        // SAFETY: the caller's promise.
        let mut copy = unsafe { *at };
        at = *copy.next();
        copies.push(copy);
    }
    let most = fault.map_or(copies.len(), |fault| fault.taken.min(copies.len()));
    copies.truncate(most);
    // The chain of the caller stays unchanged, and soft0 gets a copy of its beginning.
    let copy = copies.as_mut_ptr();
    for index in 0..copies.len() {
        let next = if index + 1 < copies.len() { copy.wrapping_add(index + 1) } else { null_mut() };
        // SAFETY: the index is within the copies.
        unsafe { *(*copy.add(index)).next() = next };
    }
    let (mut refused, mut result) = (null_mut(), 0);
    if !copies.is_empty() {
        result = post(copy, &raw mut refused);
    }
    let accepted = copies.iter().position(|copy| std::ptr::eq(copy, refused)).unwrap_or(copies.len());
    // SAFETY: the elements of the caller's work requests exist.
    let posted = copies[..accepted].iter().map(|copy| unsafe { copy.posted(verb) }).collect();
    let not_taken = originals.get(accepted).copied().unwrap_or(null_mut());
    // SAFETY: the caller passes a valid pointer.
    let set_bad = |value| unsafe { bad.write(value) };
    match fault {
        Some(fault) if result == 0 => {
            match fault.bad {
                Bad::FirstNotTaken => set_bad(not_taken),
                Bad::Null => set_bad(null_mut()),
                Bad::Untouched => {}
                Bad::Elsewhere => set_bad(first.wrapping_byte_add(1 << 20)),
                Bad::Between => set_bad(first.wrapping_byte_add(4)),
            }
            (fault.errno, posted)
        }
        _ if result != 0 => {
            set_bad(not_taken);
            (result, posted)
        }
        _ => (0, posted),
    }
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(qp);
        let mut inner = state.lock();
        if first.is_null() {
            inner.violation("ibv_post_send of no chain");
        }
        if let Some(errno) = inner.call("ibv_post_send") {
            bad.write(first);
            return errno;
        }
        let post = |first, bad| (soft.ops.post_send.expect("post_send"))(qp, first, bad);
        let (result, posted) = chain("ibv_post_send", first, bad, inner.post_send.take(), post);
        inner.posted.extend(posted.iter().cloned());
        inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device").sends.extend(posted);
        result
    }
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(qp);
        let mut inner = state.lock();
        if first.is_null() {
            inner.violation("ibv_post_recv of no chain");
        }
        if let Some(errno) = inner.call("ibv_post_recv") {
            bad.write(first);
            return errno;
        }
        let post = |first, bad| (soft.ops.post_recv.expect("post_recv"))(qp, first, bad);
        let (result, posted) = chain("ibv_post_recv", first, bad, inner.post_recv.take(), post);
        inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device").receives.extend(posted);
        result
    }
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let (state, soft) = operations(srq);
        let mut inner = state.lock();
        if first.is_null() {
            inner.violation("ibv_post_srq_recv of no chain");
        }
        if let Some(errno) = inner.call("ibv_post_srq_recv") {
            bad.write(first);
            return errno;
        }
        let post = |first, bad| (soft.ops.post_srq_recv.expect("post_srq_recv"))(srq, first, bad);
        let (result, posted) = chain("ibv_post_srq_recv", first, bad, inner.post_recv.take(), post);
        inner.srqs.get_mut(&srq.addr()).expect("a queue of this device").extend(posted);
        result
    }
}

/// Runs `with` on the record of a queue pair between `wr_start` and its end, and returns the functions of soft0.
///
/// # Safety
/// The queue pair exists, and its device is interposed.
unsafe fn building(qp: *mut ibv_qp_ex, verb: &'static str, with: impl FnOnce(&mut Vec<Posted>)) -> WrFunctions {
    // SAFETY: the caller's promise.
    let state = unsafe { known_state(&raw mut (*qp).qp_base) };
    let mut inner = state.lock();
    let record = inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device");
    let soft = record.soft.expect("an extended queue pair");
    with(&mut record.building);
    if record.builder.is_none() {
        inner.violation(format!("{verb} outside of wr_start and wr_complete"));
    }
    soft
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller keeps the contract of the verb.
    let state = unsafe { known_state(&raw mut (*qp).qp_base) };
    let mut inner = state.lock();
    _ = inner.call("wr_start");
    let record = inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device");
    record.building.clear();
    if record.builder.replace(current().id()).is_some() {
        return inner.violation("deadlock: wr_start between wr_start and wr_complete");
    }
    let soft = record.soft.expect("an extended queue pair");
    // SAFETY: as above.
    unsafe { (soft.start)(qp) };
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let soft = building(qp, "wr_abort", Vec::clear);
        let state = known_state(&raw mut (*qp).qp_base);
        let mut inner = state.lock();
        _ = inner.call("wr_abort");
        inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device").builder = None;
        (soft.abort)(qp);
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    let mut posted = Vec::new();
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let soft = building(qp, "wr_complete", |building| posted = std::mem::take(building));
        let state = known_state(&raw mut (*qp).qp_base);
        let mut inner = state.lock();
        let failure = inner.call("ibv_wr_complete").map(|errno| (errno, false)).or(inner.wr_complete.take());
        inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device").builder = None;
        if let Some((errno, false)) = failure {
            (soft.abort)(qp);
            return errno;
        }
        let result = (soft.complete)(qp);
        if result != 0 {
            return result;
        }
        inner.posted.extend(posted.iter().cloned());
        inner.qps.get_mut(&qp.addr()).expect("a queue pair of this device").sends.extend(posted);
        failure.map_or(0, |(errno, _)| errno)
    }
}

/// Records a work request when its data is set.
///
/// # Safety
/// The queue pair exists, and its device is interposed.
unsafe fn set(qp: *mut ibv_qp_ex, setter: &'static str, sges: &[ibv_sge]) -> WrFunctions {
    // SAFETY: the caller's promise.
    unsafe {
        let posted = Posted::new("ibv_wr_complete", setter, (*qp).wr_id, (*qp).wr_flags, sges);
        building(qp, setter, |building| building.push(posted))
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { (set(qp, "sge", &[ibv_sge { addr, length, lkey }]).set_sge)(qp, lkey, addr, length) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { (set(qp, "sge_list", elements(list, count as c_int)).set_sge_list)(qp, count, list) }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let inline = ibv_sge { addr: 0, length: length as u32, lkey: 0 };
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { (set(qp, "inline_data", &[inline]).set_inline_data)(qp, addr, length) }
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let length = (0..count).map(|index| (*list.add(index)).length as u32).sum();
        let inline = ibv_sge { addr: 0, length, lkey: 0 };
        (set(qp, "inline_data_list", &[inline]).set_inline_data_list)(qp, count, list);
    }
}
