//! The objects and arguments of a call. The C function and the Rust function get them at the same addresses, in the same state.

use std::cell::Cell;
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr;

use rdma_sys::*;

use crate::recorder;

macro_rules! objects {
    ($($name:ident: $ty:ty,)*) => {
        #[repr(C)]
        pub struct Objects { $($name: $ty,)* }

        /// Pointers to the objects.
        pub struct World {
            objects: *mut Objects,
            page: *mut u8,
            context: Cell<*mut ibv_context>,
            $(pub $name: *mut $ty,)*
        }

        impl World {
            pub fn new() -> Self {
                let objects: *mut Objects = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<Objects>()) }.cast();
                Self {
                    objects,
                    page: guarded_page(),
                    context: Cell::new(ptr::null_mut()),
                    $($name: unsafe { &raw mut (*objects).$name },)*
                }
            }
        }
    };
}

objects! {
    device: ibv_device,
    pd: ibv_pd,
    other_pd: ibv_pd,
    qp: ibv_qp_ex,
    cq: ibv_cq_ex,
    srq: ibv_srq,
    wq: ibv_wq,
    mr: ibv_mr,
    mw: ibv_mw,
    dm: ibv_dm,
    td: ibv_td,
    xrcd: ibv_xrcd,
    flow: ibv_flow,
    flow_action: ibv_flow_action,
    counters: ibv_counters,
    rwq_ind_table: ibv_rwq_ind_table,
    ah: ibv_ah,
    channel: ibv_comp_channel,
    id: rdma_cm_id,
    qp_init_attr: ibv_qp_init_attr_ex,
    srq_init_attr: ibv_srq_init_attr_ex,
    wq_init_attr: ibv_wq_init_attr,
    port_attr: ibv_port_attr,
    device_input: ibv_query_device_ex_input,
    device_attr: ibv_device_attr_ex,
    gid_entries: [ibv_gid_entry; 2],
    sges: [ibv_sge; 2],
    send_wr: ibv_send_wr,
    bad_send_wr: *mut ibv_send_wr,
    recv_wr: ibv_recv_wr,
    bad_recv_wr: *mut ibv_recv_wr,
    ops_wr: ibv_ops_wr,
    bad_ops_wr: *mut ibv_ops_wr,
    mw_bind: ibv_mw_bind,
    wc: ibv_wc,
    tm_info: ibv_wc_tm_info,
    addresses: [ib_addr; 2],
    numbers: [u64; 8],
    // Attributes that no inline function reads.
    attr: [u64; 64],
    data: [u64; 64],
    // Return value of creating operations.
    created: [u64; 128],
}

/// The operations that a context has, in relation to the operation of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// All operations.
    Has,
    /// The operation, as the first field of a shorter verbs_context.
    Covers,
    /// A null pointer instead of the operation.
    Lacks,
    /// A verbs_context that starts right after the position of the operation.
    Predates,
    /// No verbs_context.
    Plain,
    /// No verbs_context, and an abi_compat with all of its lower 32 bits set.
    LowBits,
}

pub const PROVIDERS: [Provider; 6] =
    [Provider::Has, Provider::Covers, Provider::Lacks, Provider::Predates, Provider::Plain, Provider::LowBits];

const PAGE: usize = 4096;
const CONTEXT: usize = offset_of!(verbs_context, context);

/// A page after an inaccessible one: reading before it ends the process.
fn guarded_page() -> *mut u8 {
    unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // Pages of aarch64 can have 64 KiB.
        let guard = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let region = libc::mmap(ptr::null_mut(), guard + PAGE, prot, flags, -1, 0);
        assert_ne!(region, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(region, guard, libc::PROT_NONE), 0);
        region.cast::<u8>().add(guard)
    }
}

impl World {
    pub fn context(&self) -> *mut ibv_context {
        self.context.get()
    }

    pub fn qp(&self) -> *mut ibv_qp {
        self.qp.cast()
    }

    pub fn cq(&self) -> *mut ibv_cq {
        self.cq.cast()
    }

    /// The address ranges with the same contents on both sides, unlike the stack.
    pub fn ranges(&self) -> [std::ops::Range<usize>; 2] {
        let objects = self.objects.addr();
        let page = self.page.addr();
        [objects..objects + size_of::<Objects>(), page..page + PAGE]
    }

    /// All bytes of these ranges.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_of::<Objects>() + PAGE);
        unsafe {
            bytes.extend_from_slice(std::slice::from_raw_parts(self.objects.cast(), size_of::<Objects>()));
            bytes.extend_from_slice(std::slice::from_raw_parts(self.page, PAGE));
        }
        bytes
    }

    /// Resets everything to the initial state: recognizable bytes, and objects of one context with all operations. The
    /// operation at `offset` is as `provider` says.
    pub fn reset(&self, provider: Provider, offset: usize) {
        let full = size_of::<verbs_context>();
        let sz = match provider {
            Provider::Has | Provider::Lacks => full,
            Provider::Covers => full - offset,
            Provider::Predates => full - offset - size_of::<usize>(),
            Provider::Plain | Provider::LowBits => size_of::<ibv_context>(),
        };
        unsafe {
            for (start, length) in [(self.objects.cast::<u8>(), size_of::<Objects>()), (self.page, PAGE)] {
                for i in 0..length {
                    *start.add(i) = (i * 31 + 7) as u8;
                }
            }
            // The allocation of the provider starts with the page.
            let context: *mut ibv_context = self.page.add(sz - size_of::<ibv_context>()).cast();
            self.context.set(context);
            (*context).device = self.device;
            (*context).ops = recorder::context_ops();
            (*context).abi_compat = match provider {
                Provider::Plain => ptr::null_mut(),
                Provider::LowBits => ptr::without_provenance_mut(u32::MAX as usize),
                _ => __VERBS_ABI_IS_EXTENDED,
            };
            if !matches!(provider, Provider::Plain | Provider::LowBits) {
                let field = |at: usize| context.byte_sub(CONTEXT - at).cast::<*const c_void>();
                for (at, operation) in recorder::extended_ops() {
                    if at >= full - sz {
                        let set = at != offset || provider != Provider::Lacks;
                        *field(at) = if set { operation } else { ptr::null() };
                    }
                }
                field(offset_of!(verbs_context, sz)).cast::<usize>().write(sz);
            }

            for pd in [self.pd, self.other_pd] {
                (*pd).context = context;
            }
            (*self.qp).qp_base.context = context;
            recorder::set_qp(self.qp);
            (*self.cq).context = context;
            recorder::set_cq(self.cq);
            (*self.srq).context = context;
            (*self.wq).context = context;
            (*self.wq).post_recv = Some(recorder::object::wq_post_recv);
            (*self.mr).context = context;
            (*self.mr).pd = self.pd;
            (*self.mr).addr = self.data.cast();
            (*self.mr).length = size_of_val(&*self.data);
            (*self.mw).context = context;
            (*self.mw).pd = self.pd;
            (*self.mw).type_ = IBV_MW_TYPE_1;
            (*self.mw_bind).bind_info.mr = self.mr;
            (*self.dm).context = context;
            (*self.dm).memcpy_to_dm = Some(recorder::object::memcpy_to_dm);
            (*self.dm).memcpy_from_dm = Some(recorder::object::memcpy_from_dm);
            (*self.td).context = context;
            (*self.xrcd).context = context;
            (*self.flow).context = context;
            (*self.flow_action).context = context;
            (*self.counters).context = context;
            (*self.rwq_ind_table).context = context;
            (*self.ah).context = context;
            (*self.channel).context = context;
            (*self.id).verbs = context;
            (*self.id).qp = self.qp();
            (*self.id).pd = self.pd;
            (*self.id).srq = ptr::null_mut();
            (*self.id).send_cq = self.cq();
            (*self.id).recv_cq = self.cq();
            (*self.id).send_cq_channel = self.channel;
            (*self.id).recv_cq_channel = self.channel;
            (*self.qp_init_attr).pd = self.pd;
            (*self.srq_init_attr).pd = self.pd;
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        unsafe {
            std::alloc::dealloc(self.objects.cast(), std::alloc::Layout::new::<Objects>());
            let guard = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            libc::munmap(self.page.sub(guard).cast(), guard + PAGE);
        }
    }
}
