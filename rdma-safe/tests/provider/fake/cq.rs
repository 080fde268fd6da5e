//! Completion channels, and completion queues with either interface.

mod poll;

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::thread::ThreadId;

use rdma_sys::*;

use super::engine::{Cqe, Release};
use super::state::{Alloc, Ptr, Qp, State, enter, null, own, set_errno};
pub(super) use poll::poll_cq;
use poll::set_accessors;

pub(super) struct Channel {
    pub(super) alloc: Alloc,
    pub(super) context: usize,
    /// Both ends of a pipe, which holds one byte for each event.
    fds: [c_int; 2],
    events: VecDeque<usize>,
}

pub(super) struct Cq {
    pub(super) alloc: Alloc,
    pub(super) context: usize,
    channel: Option<usize>,
    /// The parent domain of the queue.
    pub(super) domain: Option<usize>,
    raw: Ptr<ibv_cq>,
    cqe: u32,
    /// Ring buffer, of which one entry stays free. As in shared memory, consumed entries are not cleared.
    ring: Vec<Cqe>,
    producer: u32,
    consumer: u32,
    /// Index of the entry under the cursor of the extended interface.
    current: u32,
    /// The thread between `start_poll` and `end_poll`, which holds the lock.
    polling: Option<ThreadId>,
    /// Whether the cursor is on a completion.
    on_completion: bool,
    /// Whether a completion was lost because the ring was full.
    overrun: bool,
    /// Whether the queue is armed; `Some(true)` if for solicited completions only.
    armed: Option<bool>,
    events_read: u32,
    events_acknowledged: u32,
}

impl Cq {
    fn mask(&self) -> u32 {
        self.ring.len() as u32 - 1
    }

    fn count(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & self.mask()
    }

    fn after(&self, index: u32) -> u32 {
        (index + 1) & self.mask()
    }

    /// Moves the cursor to the current entry; returns the queue space that the entry releases.
    fn load_entry(&mut self) -> Option<Release> {
        self.on_completion = true;
        let entry = self.ring[self.current as usize];
        let raw = self.raw.0.cast::<ibv_cq_ex>();
        unsafe {
            (*raw).status = ibv_wc_status(entry.status);
            (*raw).wr_id = entry.wr_id;
        }
        entry.release
    }
}

pub(super) unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    enter(context, "ibv_create_comp_channel", |state, device| {
        if let Some(errno) = state.fault("ibv_create_comp_channel") {
            return null(errno);
        }
        if state.context(context.addr(), "ibv_create_comp_channel").is_none() {
            return null(libc::EINVAL);
        }
        let mut fds = [-1; 2];
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
            return null(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        let (alloc, raw) = Alloc::new(ibv_comp_channel { context, fd: fds[0], refcnt: 0 });
        own(raw, device);
        let channel = Channel { alloc, context: context.addr(), fds, events: VecDeque::new() };
        state.channels.insert(raw.addr(), channel);
        raw
    })
}

pub(super) unsafe extern "C" fn destroy_comp_channel(raw: *mut ibv_comp_channel) -> c_int {
    enter(raw, "ibv_destroy_comp_channel", |state, _| {
        let address = raw.addr();
        if state.channel(address, "ibv_destroy_comp_channel").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("ibv_destroy_comp_channel") {
            return errno;
        }
        if state.cqs.values().any(|cq| cq.channel == Some(address)) {
            state.violation("ibv_destroy_comp_channel of a channel that completion queues use");
            return libc::EBUSY;
        }
        let channel = state.channels.remove(&address).unwrap();
        for fd in channel.fds {
            unsafe { libc::close(fd) };
        }
        state.retire(channel.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn get_cq_event(
    raw: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    enter(raw, "ibv_get_cq_event", |state, _| {
        if let Some(errno) = state.fault("ibv_get_cq_event") {
            set_errno(errno);
            return -1;
        }
        let Some(channel) = state.channel(raw.addr(), "ibv_get_cq_event") else { return -1 };
        let mut byte = 0_u8;
        if unsafe { libc::read(channel.fds[0], (&raw mut byte).cast(), 1) } != 1 {
            set_errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
            return -1;
        }
        let address = channel.events.pop_front().unwrap();
        let source = state.cqs.get_mut(&address).unwrap();
        source.events_read += 1;
        unsafe {
            *cq = source.raw.0;
            *cq_context = (*source.raw.0).cq_context;
        }
        0
    })
}

pub(super) unsafe extern "C" fn ack_cq_events(raw: *mut ibv_cq, count: c_uint) {
    enter(raw, "ibv_ack_cq_events", |state, _| {
        let Some(cq) = state.cq(raw.addr(), "ibv_ack_cq_events") else { return };
        cq.events_acknowledged += count;
        if cq.events_acknowledged > cq.events_read {
            state.violation("more events acknowledged than were read");
        }
    });
}

struct Wanted {
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: u32,
    fields: Option<u64>,
    /// NULL for no parent domain.
    domain: *mut ibv_pd,
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let wanted = Wanted {
        entries: entries as u32,
        cq_context,
        channel,
        vector: vector as u32,
        fields: None,
        domain: std::ptr::null_mut(),
    };
    create(context, "ibv_create_cq", wanted)
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let attr = unsafe { *attr };
    let ibv_cq_init_attr_ex { cqe: entries, cq_context, channel, comp_vector: vector, wc_flags, .. } = attr;
    let domain = match attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD.0 {
        0 => std::ptr::null_mut(),
        _ => attr.parent_domain,
    };
    let wanted = Wanted { entries, cq_context, channel, vector, fields: Some(wc_flags), domain };
    create(context, "create_cq_ex", wanted).cast()
}

fn create(context: *mut ibv_context, verb: &'static str, wanted: Wanted) -> *mut ibv_cq {
    enter(context, verb, |state, device| {
        if let Some(errno) = state.fault(verb) {
            return null(errno);
        }
        if state.context(context.addr(), verb).is_none() {
            return null(libc::EINVAL);
        }
        if !wanted.channel.is_null()
            && state.channels.get(&wanted.channel.addr()).is_none_or(|channel| channel.context != context.addr())
        {
            state.violation(format!("{verb} with a channel of another context"));
            return null(libc::EINVAL);
        }
        if wanted.entries == 0 || wanted.entries > state.config.max_cqe || wanted.vector >= 2 {
            return null(libc::EINVAL);
        }
        if wanted.fields.is_some_and(|fields| fields & !state.config.wc_flags != 0) {
            return null(libc::EOPNOTSUPP);
        }
        let domain = (!wanted.domain.is_null()).then(|| wanted.domain.addr());
        if let Some(domain) = domain {
            if !state.config.domain_cqs {
                return null(libc::EINVAL);
            }
            // mlx5 checks this, too.
            if state.pd(domain, verb).is_none_or(|pd| pd.extends.is_none() || pd.context != context.addr()) {
                state.violation(format!("{verb} in a domain that is not a parent domain of the context"));
                return null(libc::EINVAL);
            }
        }
        let (cqe, handle) = (wanted.entries as c_int, state.handle());
        let (cq_context, channel) = (wanted.cq_context, wanted.channel);
        // A classic queue gets only the size of `ibv_cq`, so Miri detects code that uses it as an extended queue.
        let (alloc, raw) = match wanted.fields {
            None => {
                let cq = ibv_cq { context, channel, cq_context, handle, cqe, ..ibv_cq::zeroed() };
                Alloc::new(cq)
            }
            Some(fields) => {
                let mut cq = ibv_cq_ex { context, channel, cq_context, handle, cqe, ..ibv_cq_ex::zeroed() };
                set_accessors(&mut cq, fields & !state.config.hollow_fields);
                cq.end_poll = cq.end_poll.filter(|_| !state.config.no_end_poll);
                let (alloc, raw) = Alloc::new(cq);
                (alloc, raw.cast())
            }
        };
        own(raw, device);
        let cq = Cq {
            alloc,
            context: context.addr(),
            channel: (!channel.is_null()).then(|| channel.addr()),
            domain,
            raw: Ptr(raw),
            cqe: wanted.entries,
            ring: vec![Cqe::default(); (wanted.entries as usize + 1).next_power_of_two()],
            producer: 0,
            consumer: 0,
            current: 0,
            polling: None,
            on_completion: false,
            overrun: false,
            armed: None,
            events_read: 0,
            events_acknowledged: 0,
        };
        state.cqs.insert(raw.addr(), cq);
        raw
    })
}

pub(super) unsafe extern "C" fn destroy_cq(raw: *mut ibv_cq) -> c_int {
    enter(raw, "ibv_destroy_cq", |state, _| {
        let address = raw.addr();
        let Some(cq) = state.cq(address, "ibv_destroy_cq") else { return libc::EINVAL };
        let (channel, unacknowledged, polling) =
            (cq.channel, cq.events_read - cq.events_acknowledged, cq.polling.is_some());
        if unacknowledged > 0 {
            state.violation(format!("deadlock: ibv_destroy_cq waits for {unacknowledged} events"));
        }
        if polling {
            state.violation("ibv_destroy_cq between start_poll and end_poll");
        }
        if let Some(errno) = state.fault("ibv_destroy_cq") {
            return errno;
        }
        if state.qps.values().any(|qp| qp.send_cq == address || qp.recv_cq == address)
            || state.work_queues_complete_to(address)
            || state.srqs.values().any(|srq| srq.cq == Some(address))
        {
            state.violation("ibv_destroy_cq of a queue that queue pairs or shared receive queues use");
            return libc::EBUSY;
        }
        if let Some(channel) = channel.and_then(|channel| state.channels.get_mut(&channel)) {
            // The kernel drops pending events of a destroyed queue.
            let before = channel.events.len();
            channel.events.retain(|event| *event != address);
            for _ in channel.events.len()..before {
                let mut byte = 0_u8;
                unsafe { libc::read(channel.fds[0], (&raw mut byte).cast(), 1) };
            }
        }
        state.end_events(address, "ibv_destroy_cq");
        let cq = state.cqs.remove(&address).unwrap();
        state.retire(cq.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn resize_cq(raw: *mut ibv_cq, entries: c_int) -> c_int {
    enter(raw, "ibv_resize_cq", |state, _| {
        if let Some(errno) = state.fault("ibv_resize_cq") {
            return errno;
        }
        if !state.config.cq_resize {
            return libc::EOPNOTSUPP;
        }
        // mlx5 takes the lock here.
        state.needs_lock([raw.addr(), raw.addr()], "ibv_resize_cq");
        let max_cqe = state.config.max_cqe;
        let Some(cq) = state.cq(raw.addr(), "ibv_resize_cq") else { return libc::EINVAL };
        let count = cq.count();
        if entries <= 0 || entries as u32 > max_cqe || count > entries as u32 {
            return libc::EINVAL;
        }
        // Devices may grant more entries than requested.
        let granted = (entries as u32 + 1).next_power_of_two() - 1;
        let mut ring = vec![Cqe::default(); granted as usize + 1];
        for to in &mut ring[..count as usize] {
            *to = cq.ring[cq.consumer as usize];
            cq.consumer = cq.after(cq.consumer);
        }
        (cq.ring, cq.producer, cq.consumer, cq.cqe) = (ring, count, 0, granted);
        unsafe { (*raw).cqe = granted as c_int };
        0
    })
}

pub(super) unsafe extern "C" fn modify_cq(raw: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    let attr = unsafe { *attr };
    enter(raw, "modify_cq", |state, _| {
        if let Some(errno) = state.fault("modify_cq") {
            return errno;
        }
        let (max_count, max_period) = state.config.moderation.unwrap_or((0, 0));
        if state.cq(raw.addr(), "modify_cq").is_none() || attr.attr_mask != IBV_CQ_ATTR_MODERATE.0 {
            return libc::EINVAL;
        }
        let ibv_moderate_cq { cq_count, cq_period } = attr.moderate;
        if cq_count > max_count || cq_period > max_period {
            return libc::EINVAL;
        }
        state.moderations.push((cq_count, cq_period));
        0
    })
}

pub(super) unsafe extern "C" fn req_notify_cq(raw: *mut ibv_cq, solicited_only: c_int) -> c_int {
    enter(raw, "ibv_req_notify_cq", |state, _| {
        if let Some(errno) = state.fault("ibv_req_notify_cq") {
            return errno;
        }
        // irdma takes the lock here.
        state.needs_lock([raw.addr(), raw.addr()], "ibv_req_notify_cq");
        state.needs_no_batch([raw.addr(), raw.addr()], "ibv_req_notify_cq");
        let Some(cq) = state.cq(raw.addr(), "ibv_req_notify_cq") else { return libc::EINVAL };
        if cq.channel.is_none() {
            state.violation("ibv_req_notify_cq of a queue without a channel");
            return libc::EINVAL;
        }
        // A later request for solicited completions only does not narrow an earlier one for all completions.
        cq.armed = Some(cq.armed.unwrap_or(true) && solicited_only != 0);
        0
    })
}

impl State {
    /// Adds a completion. If the ring is full, the completion is lost and the queue becomes unusable.
    pub(super) fn push_cqe(&mut self, address: usize, cqe: Cqe, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(&address) else { return };
        if cq.count() >= cq.cqe {
            cq.overrun = true;
            return;
        }
        let producer = cq.producer;
        cq.ring[producer as usize] = cqe;
        cq.producer = cq.after(producer);
        let wakes = match cq.armed {
            None => false,
            Some(solicited_only) => !solicited_only || solicited || cqe.status != IBV_WC_SUCCESS.0,
        };
        if wakes {
            cq.armed = None;
            let channel = cq.channel.and_then(|channel| self.channels.get_mut(&channel)).unwrap();
            channel.events.push_back(address);
            assert_eq!(unsafe { libc::write(channel.fds[1], [1_u8].as_ptr().cast(), 1) }, 1);
        }
    }

    /// Handles the completions of a destroyed queue pair: removes them, or keeps them without releasing queue space.
    pub(super) fn discard_completions(&mut self, address: usize, number: u32) {
        let Some(cq) = self.cqs.get_mut(&address) else { return };
        if !self.config.sweeps {
            cq.ring.iter_mut().filter(|cqe| cqe.qp_num == number).for_each(|cqe| cqe.release = None);
            return;
        }
        let (mut from, mut to) = (cq.consumer, cq.consumer);
        while from != cq.producer {
            if cq.ring[from as usize].qp_num != number {
                cq.ring[to as usize] = cq.ring[from as usize];
                to = cq.after(to);
            }
            from = cq.after(from);
        }
        cq.producer = to;
    }

    /// Reports a deadlock if this thread holds the lock of one of `cqs`. mlx5 takes these locks to remove the completions of a
    /// queue pair.
    pub(super) fn needs_lock(&mut self, cqs: [usize; 2], verb: &str) {
        let here = Some(std::thread::current().id());
        if cqs.iter().any(|cq| self.cqs.get(cq).is_some_and(|cq| cq.polling == here)) {
            self.violation(format!("deadlock: {verb} while this thread polls"));
        }
    }

    /// Reports a deadlock if this thread has an open batch whose sends complete to one of `cqs`. ionic holds the lock of the
    /// completion queue from `wr_start` to `wr_complete`.
    pub(super) fn needs_no_batch(&mut self, cqs: [usize; 2], verb: &str) {
        let here = Some(std::thread::current().id());
        let holds = |qp: &Qp| qp.batch.is_some() && qp.builder == here && cqs.contains(&qp.send_cq);
        if self.qps.values().any(holds) {
            self.violation(format!("deadlock: {verb} between wr_start and wr_complete"));
        }
    }
}
