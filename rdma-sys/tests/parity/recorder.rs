//! Replaces the provider and libibverbs: every function records its arguments and returns values from a script.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::ops::Range;

use rdma_sys::*;

/// A call: the function's name and its arguments.
pub type Call = (&'static str, Vec<u64>);

#[derive(Default)]
pub struct Recorder {
    log: Vec<Call>,
    answer: i64,
    scripts: HashMap<&'static str, VecDeque<i64>>,
    shared: Vec<Range<usize>>,
    created: usize,
    event: (usize, usize),
    datagrams: bool,
}

thread_local! {
    static RECORDER: RefCell<Recorder> = RefCell::default();
}

/// Clears the recorder. `answer` is the return value of functions without a script.
pub fn start(world: &crate::world::World, answer: i64) {
    RECORDER.set(Recorder {
        answer,
        shared: world.ranges().into(),
        created: world.created.addr(),
        event: (world.cq.addr(), world.id.addr()),
        ..Recorder::default()
    });
}

/// Sets the return values of a function's first, second, … call.
pub fn script(name: &'static str, answers: &[i64]) {
    RECORDER.with_borrow_mut(|recorder| recorder.scripts.insert(name, answers.iter().copied().collect()));
}

/// Sends are datagrams: records their address handle, too.
pub fn datagrams() {
    RECORDER.with_borrow_mut(|recorder| recorder.datagrams = true);
}

pub fn log() -> Vec<Call> {
    RECORDER.with_borrow_mut(|recorder| std::mem::take(&mut recorder.log))
}

fn is_shared(address: usize) -> bool {
    RECORDER.with_borrow(|recorder| recorder.shared.iter().any(|range| range.contains(&address)))
}

/// Converts any argument or result to a number that is equal on both sides.
pub trait Word {
    fn word(self) -> u64;
}

/// Converts a number to any result.
pub trait Answer {
    fn answer(value: i64) -> Self;
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl Word for $integer {
            fn word(self) -> u64 {
                self as u64
            }
        }

        impl Answer for $integer {
            fn answer(value: i64) -> Self {
                // Wider types also get bits in their upper half.
                if size_of::<Self>() == size_of::<c_int>() {
                    value as $integer
                } else {
                    (value ^ 0x1234_5678_9abc_def0) as $integer
                }
            }
        }
    )*};
}
integers!(u8 u16 u32 u64 usize i32 isize);

macro_rules! newtypes {
    ($($newtype:ident)*) => {$(
        impl Word for $newtype {
            fn word(self) -> u64 {
                self.0.word()
            }
        }
    )*};
}
newtypes!(
    ibv_mw_type ibv_qp_type ibv_advise_mr_advice ibv_wc_opcode ibv_wr_opcode ibv_mr_init_attr_mask
    ibv_dmah_init_attr_mask ibv_tph_mem_type ibv_qp_attach_comp_cntr_op ibv_comp_cntr_type ibv_event_type
    ibv_odp_transport_cap_bits ibv_query_qp_data_in_order_flags ibv_parent_domain_init_attr_mask rdma_cm_event_type
);

impl Word for () {
    fn word(self) -> u64 {
        0
    }
}

impl Answer for () {
    fn answer(_: i64) {}
}

impl Answer for ibv_wc_opcode {
    fn answer(value: i64) -> Self {
        Self(value as u32)
    }
}

const STACK: u64 = 0x57ac;

impl<T> Word for *mut T {
    fn word(self) -> u64 {
        let address = self.addr();
        if address < 0x1_0000 || is_shared(address) { address as u64 } else { STACK }
    }
}

impl<T> Word for *const T {
    fn word(self) -> u64 {
        self.cast_mut().word()
    }
}

impl<T> Answer for *mut T {
    fn answer(value: i64) -> Self {
        if value == 0 {
            set_errno(libc::ENOMEM);
            return std::ptr::null_mut();
        }
        std::ptr::with_exposed_provenance_mut(RECORDER.with_borrow(|recorder| recorder.created))
    }
}

pub fn set_errno(errno: c_int) {
    unsafe { *libc::__errno_location() = errno }
}

pub fn errno() -> c_int {
    unsafe { *libc::__errno_location() }
}

/// Records a call and returns the next answer. An answer other than 0 also sets errno.
fn record(name: &'static str, arguments: &[u64]) -> i64 {
    const ENDLESS: usize = 24;
    let answer = RECORDER.with_borrow_mut(|recorder| {
        recorder.log.push((name, arguments.to_vec()));
        assert!(recorder.log.len() < ENDLESS, "no end: {:?}", recorder.log);
        recorder.scripts.get_mut(name).and_then(VecDeque::pop_front).unwrap_or(recorder.answer)
    });
    if answer != 0 {
        set_errno(77);
    }
    answer
}

/// Defines functions that record their call, may have an effect on memory, and return an answer.
macro_rules! recorders {
    ($(fn $name:ident($($argument:ident: $ty:ty),*) $(-> $ret:ty)? $(=> |$answer:ident| $effect:expr)?;)*) => {$(
        pub unsafe extern "C" fn $name($($argument: $ty),*) $(-> $ret)? {
            let answer = super::record(stringify!($name), &[$(super::Word::word($argument)),*]);
            $(
                let $answer = answer;
                $effect;
            )?
            super::Answer::answer(answer)
        }
    )*};
}

/// Fills `length` bytes with a value that `reset` does not use.
fn fill<T>(memory: *mut T, length: usize) {
    unsafe { memory.cast::<u8>().write_bytes(0x5a, length) }
}

/// Operations of `verbs_context`.
pub mod extended {
    use super::*;

    recorders! {
        fn query_port(context: *mut ibv_context, port_num: u8, attr: *mut ibv_port_attr, len: usize) -> c_int =>
            |_answer| fill(attr, len);
        fn advise_mr(pd: *mut ibv_pd, advice: ibv_advise_mr_advice, flags: u32, sg_list: *mut ibv_sge, num_sges: u32) -> c_int;
        fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr;
        fn read_counters(counters: *mut ibv_counters, values: *mut u64, ncounters: u32, flags: u32) -> c_int =>
            |_answer| fill(values, 8 * ncounters as usize);
        fn attach_counters_point_flow(
            counters: *mut ibv_counters, attr: *mut ibv_counter_attach_attr, flow: *mut ibv_flow
        ) -> c_int;
        fn create_counters(context: *mut ibv_context, attr: *mut ibv_counters_init_attr) -> *mut ibv_counters;
        fn destroy_counters(counters: *mut ibv_counters) -> c_int;
        fn reg_dm_mr(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, length: usize, access: c_uint) -> *mut ibv_mr;
        fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm;
        fn free_dm(dm: *mut ibv_dm) -> c_int;
        fn modify_flow_action_esp(action: *mut ibv_flow_action, attr: *mut ibv_flow_action_esp_attr) -> c_int;
        fn destroy_flow_action(action: *mut ibv_flow_action) -> c_int;
        fn create_flow_action_esp(context: *mut ibv_context, attr: *mut ibv_flow_action_esp_attr) -> *mut ibv_flow_action;
        fn modify_qp_rate_limit(qp: *mut ibv_qp, attr: *mut ibv_qp_rate_limit_attr) -> c_int;
        fn alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
        fn dealloc_td(td: *mut ibv_td) -> c_int;
        fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td;
        fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int;
        fn post_srq_ops(srq: *mut ibv_srq, op: *mut ibv_ops_wr, bad_op: *mut *mut ibv_ops_wr) -> c_int;
        fn destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int;
        fn create_rwq_ind_table(context: *mut ibv_context, attr: *mut ibv_rwq_ind_table_init_attr) -> *mut ibv_rwq_ind_table;
        fn destroy_wq(wq: *mut ibv_wq) -> c_int;
        fn modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int;
        fn create_wq(context: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> *mut ibv_wq;
        fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int =>
            |_answer| fill(values, size_of::<ibv_values_ex>());
        fn create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
        fn query_device_ex(
            context: *mut ibv_context, input: *const ibv_query_device_ex_input, attr: *mut ibv_device_attr_ex, size: usize
        ) -> c_int =>
            |_answer| fill(attr, size);
        fn ibv_destroy_flow(flow: *mut ibv_flow) -> c_int;
        fn ibv_create_flow(qp: *mut ibv_qp, attr: *mut ibv_flow_attr) -> *mut ibv_flow;
        fn open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp;
        fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
        fn get_srq_num(srq: *mut ibv_srq, num: *mut u32) -> c_int => |_answer| fill(num, 4);
        fn create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
        fn open_xrcd(context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;
        fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int;
    }
}

/// The offset of each operation in `verbs_context`, and its recorder.
pub fn extended_ops() -> Vec<(usize, *const c_void)> {
    macro_rules! ops {
        ($($op:ident)*) => {{
            // Assigned by field, so that a recorder of the wrong type does not compile.
            let table = verbs_context { $($op: Some(extended::$op),)* ..verbs_context::zeroed() };
            vec![$((offset_of!(verbs_context, $op), table.$op.unwrap() as *const c_void)),*]
        }};
    }
    ops!(
        query_port advise_mr alloc_null_mr read_counters attach_counters_point_flow create_counters destroy_counters
        reg_dm_mr alloc_dm free_dm modify_flow_action_esp destroy_flow_action create_flow_action_esp
        modify_qp_rate_limit alloc_parent_domain dealloc_td alloc_td modify_cq post_srq_ops destroy_rwq_ind_table
        create_rwq_ind_table destroy_wq modify_wq create_wq query_rt_values create_cq_ex query_device_ex
        ibv_destroy_flow ibv_create_flow open_qp create_qp_ex get_srq_num create_srq_ex open_xrcd close_xrcd
    )
}

/// The contents of a scatter/gather list. They are recorded because a list on the stack has no comparable address.
fn sge_words(list: *const ibv_sge, count: c_int) -> Vec<u64> {
    let mut words = vec![list.word(), count.word()];
    for i in 0..count.max(0) as usize {
        let sge = unsafe { *list.add(i) };
        words.extend([sge.addr, sge.length.into(), sge.lkey.into()]);
    }
    words
}

fn recv_words(wr: *const ibv_recv_wr) -> Vec<u64> {
    if is_shared(wr.addr()) {
        return Vec::new();
    }
    let wr = unsafe { *wr };
    [vec![wr.wr_id, wr.next.word()], sge_words(wr.sg_list, wr.num_sge)].concat()
}

fn send_words(wr: *const ibv_send_wr) -> Vec<u64> {
    if is_shared(wr.addr()) {
        return Vec::new();
    }
    let wr = unsafe { *wr };
    let mut words = vec![wr.wr_id, wr.next.word(), wr.opcode.word(), wr.send_flags.into()];
    words.extend(sge_words(wr.sg_list, wr.num_sge));
    unsafe {
        if wr.opcode != IBV_WR_SEND {
            words.extend([wr.wr.rdma.remote_addr, wr.wr.rdma.rkey.into()]);
        } else if RECORDER.with_borrow(|recorder| recorder.datagrams) {
            words.extend([wr.wr.ud.ah.word(), wr.wr.ud.remote_qpn.into(), wr.wr.ud.remote_qkey.into()]);
        }
    }
    words
}

/// Sets the bad work request on failure only, as providers do.
fn refuse<T>(answer: i64, wr: *mut T, bad_wr: *mut *mut T) {
    if answer != 0 {
        unsafe { *bad_wr = wr }
    }
}

/// Operations of `ibv_context`, and function pointers of smaller objects.
pub mod object {
    use super::*;

    recorders! {
        fn alloc_mw(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw;
        fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int;
        fn dealloc_mw(mw: *mut ibv_mw) -> c_int;
        fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int => |_answer| fill(wc, size_of::<ibv_wc>());
        fn req_notify_cq(cq: *mut ibv_cq, solicited: c_int) -> c_int;
        fn wq_post_recv(wq: *mut ibv_wq, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int =>
            |answer| refuse(answer, wr, bad_wr);
        fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int;
        fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int => |_answer| fill(to, length);
    }

    pub unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> c_int {
        let answer = record("post_send", &[vec![qp.word(), wr.word(), bad_wr.word()], send_words(wr)].concat());
        refuse(answer, wr, bad_wr);
        answer as c_int
    }

    pub unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int {
        let answer = record("post_recv", &[vec![qp.word(), wr.word(), bad_wr.word()], recv_words(wr)].concat());
        refuse(answer, wr, bad_wr);
        answer as c_int
    }

    pub unsafe extern "C" fn post_srq_recv(
        srq: *mut ibv_srq,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> c_int {
        let answer = record("post_srq_recv", &[vec![srq.word(), wr.word(), bad_wr.word()], recv_words(wr)].concat());
        refuse(answer, wr, bad_wr);
        answer as c_int
    }
}

pub fn context_ops() -> ibv_context_ops {
    ibv_context_ops {
        alloc_mw: Some(object::alloc_mw),
        bind_mw: Some(object::bind_mw),
        dealloc_mw: Some(object::dealloc_mw),
        poll_cq: Some(object::poll_cq),
        req_notify_cq: Some(object::req_notify_cq),
        post_srq_recv: Some(object::post_srq_recv),
        post_send: Some(object::post_send),
        post_recv: Some(object::post_recv),
        ..ibv_context_ops::zeroed()
    }
}

/// Function pointers of an extended queue pair.
pub mod qp {
    use super::*;

    recorders! {
        fn wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, compare: u64, swap: u64);
        fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, add: u64);
        fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info);
        fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32);
        fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, addr: u64);
        fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64);
        fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, imm: __be32);
        fn wr_send(qp: *mut ibv_qp_ex);
        fn wr_send_imm(qp: *mut ibv_qp_ex, imm: __be32);
        fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32);
        fn wr_send_tso(qp: *mut ibv_qp_ex, hdr: *mut c_void, hdr_sz: u16, mss: u16);
        fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32);
        fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32);
        fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize);
        fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf);
        fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32);
        fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge);
        fn wr_start(qp: *mut ibv_qp_ex);
        fn wr_complete(qp: *mut ibv_qp_ex) -> c_int;
        fn wr_abort(qp: *mut ibv_qp_ex);
        fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, data: *const c_void);
        fn wr_flush(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, length: usize, type_: u8, level: u8);
    }
}

macro_rules! setter {
    ($setter:ident, $module:ident, $ty:ty, $($field:ident)*) => {
        pub unsafe fn $setter(object: *mut $ty) {
            unsafe { $((*object).$field = Some($module::$field);)* }
        }
    };
}

setter!(set_qp, qp, ibv_qp_ex,
    wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read wr_rdma_write wr_rdma_write_imm wr_send
    wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr wr_set_xrc_srqn wr_set_inline_data wr_set_inline_data_list
    wr_set_sge wr_set_sge_list wr_start wr_complete wr_abort wr_atomic_write wr_flush);

/// Function pointers of an extended completion queue.
pub mod cq {
    use super::*;

    recorders! {
        fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int;
        fn next_poll(cq: *mut ibv_cq_ex) -> c_int;
        fn end_poll(cq: *mut ibv_cq_ex);
        fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode;
        fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32;
        fn read_byte_len(cq: *mut ibv_cq_ex) -> u32;
        fn read_imm_data(cq: *mut ibv_cq_ex) -> __be32;
        fn read_qp_num(cq: *mut ibv_cq_ex) -> u32;
        fn read_src_qp(cq: *mut ibv_cq_ex) -> u32;
        fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint;
        fn read_slid(cq: *mut ibv_cq_ex) -> u32;
        fn read_sl(cq: *mut ibv_cq_ex) -> u8;
        fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8;
        fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64;
        fn read_cvlan(cq: *mut ibv_cq_ex) -> u16;
        fn read_flow_tag(cq: *mut ibv_cq_ex) -> u32;
        fn read_tm_info(cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) => |_answer| fill(info, size_of::<ibv_wc_tm_info>());
        fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64;
    }
}

setter!(set_cq, cq, ibv_cq_ex,
    start_poll next_poll end_poll read_opcode read_vendor_err read_byte_len read_imm_data read_qp_num read_src_qp
    read_wc_flags read_slid read_sl read_dlid_path_bits read_completion_ts read_cvlan read_flow_tag read_tm_info
    read_completion_wallclock_ns);

/// The exported functions that inlines call.
pub mod exported {
    use super::*;

    recorders! {
        fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int =>
            |_answer| fill(attr, 48);
        fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int =>
            |_answer| fill(attr, size_of::<ibv_device_attr>());
        fn _ibv_query_gid_ex(
            context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, size: usize
        ) -> c_int =>
            |_answer| fill(entry, size);
        fn _ibv_query_gid_table(
            context: *mut ibv_context, entries: *mut ibv_gid_entry, max: usize, flags: u32, size: usize
        ) -> isize =>
            |_answer| fill(entries, max * size);
        fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        fn ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
        fn ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
        fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint);
        fn _ibv_query_comp_cntr_caps(context: *mut ibv_context, caps: *mut ibv_comp_cntr_caps, size: usize) -> c_int =>
            |_answer| fill(caps, size);
    }

    pub unsafe extern "C" fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        context: *mut *mut c_void,
    ) -> c_int {
        let answer = record("ibv_get_cq_event", &[channel.word()]);
        let (event_cq, event_context) = RECORDER.with_borrow(|recorder| recorder.event);
        unsafe {
            *cq = std::ptr::with_exposed_provenance_mut(event_cq);
            *context = std::ptr::with_exposed_provenance_mut(event_context);
        }
        answer as c_int
    }
}

macro_rules! stubs {
    ($($name:ident)* ; $($optional:ident)*) => {
        /// Addresses of the recorders, in the order of `stubs` in inlines.c.
        pub fn stubs() -> Vec<*const c_void> {
            vec![$(exported::$name as *const c_void,)* $(exported::$optional as *const c_void),*]
        }

        /// The libibverbs of the shims: the recorders, and for every other name a function that must not be called.
        pub fn verbs() -> Verbs {
            extern "C" fn unexpected() {
                panic!("a shim called an exported function that its inline does not call");
            }
            let mut table = unsafe { Verbs::from_lookup("parity", |_| unexpected as *mut c_void) }.unwrap();
            // Assigned by field, so that a recorder of the wrong type does not compile.
            $(table.$name = exported::$name;)*
            $(table.$optional = Some(exported::$optional);)*
            table
        }
    };
}
stubs!(
    ibv_create_qp ibv_create_srq ibv_query_port ibv_query_device _ibv_query_gid_ex _ibv_query_gid_table ibv_reg_mr
    ibv_reg_mr_iova ibv_reg_mr_iova2 ibv_dereg_mr ibv_get_cq_event ibv_ack_cq_events ; _ibv_query_comp_cntr_caps
);
