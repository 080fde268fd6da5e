//! Completion queues, with the extended and the classic interface.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use rdma_sys::*;

use crate::memory::next_number;
use crate::{free, new, null};

/// A completion queue entry, as a device would write it to memory.
#[derive(Clone, Copy, Default)]
#[repr(C, align(32))]
pub(crate) struct Cqe {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm: u32,
    pub(crate) qp_num: u32,
    pub(crate) flags: u32,
}

/// A completion queue of either kind. The extended object begins with the classic one.
#[repr(C)]
pub(crate) struct Cq {
    ex: ibv_cq_ex,
    ring: Box<[Cqe]>,
    producer: u32,
    consumer: u32,
    /// Entry at the cursor of the extended interface.
    current: Cqe,
    /// Length of the bursts that [`rdma_stub_endless`] has requested, or 0.
    burst: u32,
    /// Remaining completions of the current burst.
    remaining: u32,
    overrun: bool,
}

impl Cq {
    /// Completion that [`rdma_stub_endless`] generates.
    const ENDLESS: Cqe =
        Cqe { wr_id: 7, opcode: IBV_WC_RECV.0, byte_len: 64, imm: 7_u32.to_be(), qp_num: 1, flags: IBV_WC_WITH_IMM.0 };

    #[inline]
    pub(crate) fn push(&mut self, cqe: Cqe) {
        let mask = self.ring.len() as u32 - 1;
        if self.producer.wrapping_sub(self.consumer) > mask {
            self.overrun = true;
            return;
        }
        self.ring[(self.producer & mask) as usize] = cqe;
        self.producer = self.producer.wrapping_add(1);
    }

    #[inline]
    fn pop(&mut self) -> Option<Cqe> {
        if self.consumer == self.producer {
            return self.generate();
        }
        let mask = self.ring.len() as u32 - 1;
        let cqe = self.ring[(self.consumer & mask) as usize];
        self.consumer = self.consumer.wrapping_add(1);
        Some(cqe)
    }

    /// The next completion of a burst. Returns `None` once between two bursts.
    fn generate(&mut self) -> Option<Cqe> {
        if self.remaining == 0 {
            self.remaining = self.burst;
            return None;
        }
        self.remaining -= 1;
        Some(Cq::ENDLESS)
    }

    /// Moves the cursor of the extended interface to the next completion.
    #[inline]
    fn advance(&mut self) -> c_int {
        let Some(cqe) = self.pop() else { return libc::ENOENT };
        self.current = cqe;
        self.ex.wr_id = cqe.wr_id;
        self.ex.status = IBV_WC_SUCCESS;
        0
    }
}

/// Makes the queue generate bursts of `burst` completions. 0 stops it.
///
/// When the queue is empty, polls alternate between a burst and an empty queue. Each completion is of a receive of 64 bytes
/// with immediate data and the identifier 7.
///
/// # Safety
/// The queue must belong to this provider.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_stub_endless(cq: *mut ibv_cq, burst: u32) {
    let cq = unsafe { &mut *cq.cast::<Cq>() };
    (cq.burst, cq.remaining) = (burst, burst);
}

static LATEST: AtomicPtr<Cq> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the completion queue that was created last. For benchmarks of crates that hide the pointer of a queue.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_stub_latest_cq() -> *mut ibv_cq {
    LATEST.load(Ordering::Relaxed).cast()
}

fn create(context: *mut ibv_context, entries: usize, cq_context: *mut c_void, fields: u64) -> *mut Cq {
    let mut ex = ibv_cq_ex { context, cq_context, handle: next_number(), cqe: entries as c_int, ..ibv_cq_ex::zeroed() };
    ex.start_poll = Some(start_poll);
    ex.next_poll = Some(next_poll);
    ex.end_poll = Some(end_poll);
    ex.read_opcode = Some(read_opcode);
    ex.read_vendor_err = Some(read_vendor_err);
    ex.read_wc_flags = Some(read_wc_flags);
    let wants = |flag: ibv_create_cq_wc_flags| fields & u64::from(flag.0) != 0;
    ex.read_byte_len = wants(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len as _);
    ex.read_imm_data = wants(IBV_WC_EX_WITH_IMM).then_some(read_imm_data as _);
    ex.read_qp_num = wants(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num as _);
    ex.read_src_qp = wants(IBV_WC_EX_WITH_SRC_QP).then_some(read_qp_num as _);
    ex.read_slid = wants(IBV_WC_EX_WITH_SLID).then_some(read_vendor_err as _);
    ex.read_sl = wants(IBV_WC_EX_WITH_SL).then_some(read_zero as _);
    ex.read_dlid_path_bits = wants(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_zero as _);
    ex.read_completion_ts = wants(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).then_some(read_completion_ts as _);
    let ring = vec![Cqe::default(); entries.next_power_of_two()].into_boxed_slice();
    let cq =
        new(Cq { ex, ring, producer: 0, consumer: 0, current: Cqe::default(), burst: 0, remaining: 0, overrun: false });
    LATEST.store(cq, Ordering::Relaxed);
    cq
}

const FIELDS: u64 = IBV_WC_STANDARD_FLAGS as u64 | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0 as u64;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    match usize::try_from(cqe) {
        Ok(entries @ 1..) => attach_channel(channel, create(context, entries, cq_context, 0)).cast(),
        _ => null(libc::EINVAL),
    }
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let ibv_cq_init_attr_ex { cqe, cq_context, wc_flags, channel, .. } = unsafe { *attr };
    match cqe {
        0 => null(libc::EINVAL),
        _ if wc_flags & !FIELDS != 0 => null(libc::EOPNOTSUPP),
        entries => attach_channel(channel, create(context, entries as usize, cq_context, wc_flags)).cast(),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    unsafe { free(cq.cast::<Cq>()) }
}

/// A completion channel. It always has an event of its latest queue, if it has one.
#[repr(C)]
struct Channel {
    base: ibv_comp_channel,
    cq: *mut Cq,
}

/// Makes `channel`, unless it is NULL, report events of `cq`.
fn attach_channel(channel: *mut ibv_comp_channel, cq: *mut Cq) -> *mut Cq {
    if !channel.is_null() {
        unsafe { (*channel.cast::<Channel>()).cq = cq };
    }
    cq
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let fd = unsafe { libc::eventfd(1, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return std::ptr::null_mut();
    }
    let base = ibv_comp_channel { context, fd, refcnt: 0 };
    new(Channel { base, cq: std::ptr::null_mut() }).cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    unsafe {
        libc::close((*channel).fd);
        free(channel.cast::<Channel>());
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    unsafe {
        let latest = (*channel.cast::<Channel>()).cq;
        if latest.is_null() {
            *libc::__errno_location() = libc::EAGAIN;
            return -1;
        }
        *cq = latest.cast();
        *cq_context = (*latest).ex.cq_context;
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

pub(crate) extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, wcs: *mut ibv_wc) -> c_int {
    let cq = unsafe { &mut *cq.cast::<Cq>() };
    if cq.overrun {
        return -1;
    }
    let mut taken = 0;
    while taken < room {
        let Some(cqe) = cq.pop() else { break };
        // Providers write field by field, too.
        unsafe {
            let wc = wcs.add(taken as usize);
            (*wc).wr_id = cqe.wr_id;
            (*wc).status = IBV_WC_SUCCESS;
            (*wc).opcode = ibv_wc_opcode(cqe.opcode);
            (*wc).vendor_err = 0;
            (*wc).byte_len = cqe.byte_len;
            (*wc).__bindgen_anon_1.imm_data = cqe.imm;
            (*wc).qp_num = cqe.qp_num;
            (*wc).src_qp = cqe.qp_num;
            (*wc).slid = 0;
            (*wc).sl = 0;
            (*wc).dlid_path_bits = 0;
            (*wc).wc_flags = cqe.flags;
        }
        taken += 1;
    }
    taken
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, _: *mut ibv_poll_cq_attr) -> c_int {
    let cq = unsafe { &mut *cq.cast::<Cq>() };
    if cq.overrun { libc::EIO } else { cq.advance() }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    unsafe { &mut *cq.cast::<Cq>() }.advance()
}

unsafe extern "C" fn end_poll(_: *mut ibv_cq_ex) {}

/// Accessors, which read a field of the completion at the cursor.
macro_rules! accessors {
    ($($name:ident -> $ty:ty = |$cqe:ident| $value:expr;)+) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
            let $cqe = unsafe { &(*cq.cast::<Cq>()).current };
            $value
        })+
    };
}

accessors! {
    read_opcode -> ibv_wc_opcode = |cqe| ibv_wc_opcode(cqe.opcode);
    read_vendor_err -> u32 = |_cqe| 0;
    read_wc_flags -> c_uint = |cqe| cqe.flags;
    read_byte_len -> u32 = |cqe| cqe.byte_len;
    read_imm_data -> u32 = |cqe| cqe.imm;
    read_qp_num -> u32 = |cqe| cqe.qp_num;
    read_zero -> u8 = |_cqe| 0;
    read_completion_ts -> u64 = |cqe| cqe.wr_id;
}
