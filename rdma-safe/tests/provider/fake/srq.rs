//! Shared receive queues.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;

use rdma_sys::*;

use super::config::{Bad, Mode};
use super::engine::RecvWr;
use super::post::set_bad;
use super::state::{Alloc, Device, Ptr, State, enter, null, own};
use super::tags::Tags;

pub(super) struct Srq {
    alloc: Alloc,
    raw: Ptr<ibv_srq>,
    pub(super) context: usize,
    pub(super) pd: usize,
    /// Attributes; `srq_limit` is 0 while the limit event is not armed.
    attr: ibv_srq_attr,
    queue: VecDeque<RecvWr>,
    /// Completion queue of the receives; `None` to use the one of the queue pair.
    pub(super) cq: Option<usize>,
    /// The XRC domain of the queue.
    pub(super) xrcd: Option<u64>,
    pub(super) number: u32,
    /// The tag list of a queue with tag matching.
    pub(super) tags: Option<Tags>,
}

/// Optional parts of a shared receive queue.
#[derive(Default)]
pub(super) struct SrqParts {
    pub(super) cq: Option<usize>,
    pub(super) xrcd: Option<u64>,
    pub(super) tags: Option<Tags>,
}

impl Srq {
    pub(super) fn uses(&self, lkey: u32) -> bool {
        let tagged = self.tags.iter().any(|tags| tags.uses(lkey));
        tagged || self.queue.iter().any(|wr| wr.names(lkey))
    }
}

pub(super) unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    enter(pd, "ibv_create_srq", |state, device| {
        if let Some(errno) = state.fault("ibv_create_srq") {
            return null(errno);
        }
        create(state, device, pd, unsafe { &mut *attr }, SrqParts::default())
    })
}

pub(super) fn create(
    state: &mut State,
    device: &Arc<Device>,
    pd: *mut ibv_pd,
    attr: &mut ibv_srq_init_attr,
    parts: SrqParts,
) -> *mut ibv_srq {
    if !state.config.srqs {
        return null(libc::EOPNOTSUPP);
    }
    let Some(domain) = state.pd(pd.addr(), "ibv_create_srq") else { return null(libc::EINVAL) };
    let context = domain.context;
    let wanted = *attr;
    let ibv_srq_attr { max_wr, max_sge, .. } = wanted.attr;
    if max_wr == 0 || max_wr > state.config.max_srq_wr || max_sge > state.config.max_sge {
        return null(libc::EINVAL);
    }
    let granted = ibv_srq_attr { max_wr: max_wr.next_power_of_two(), max_sge, srq_limit: 0 };
    attr.attr = granted;
    let number = state.handle();
    let (alloc, raw) = Alloc::new(ibv_srq {
        context: unsafe { (*pd).context },
        srq_context: wanted.srq_context,
        pd,
        handle: state.handle(),
        ..ibv_srq::zeroed()
    });
    own(raw, device);
    let SrqParts { cq, xrcd, tags } = parts;
    let queue = VecDeque::new();
    let srq = Srq { alloc, raw: Ptr(raw), context, pd: pd.addr(), attr: granted, queue, cq, xrcd, number, tags };
    state.srqs.insert(raw.addr(), srq);
    raw
}

pub(super) unsafe extern "C" fn modify_srq(raw: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let (attr, mask) = (unsafe { *attr }, ibv_srq_attr_mask(mask as u32));
    enter(raw, "ibv_modify_srq", |state, _| {
        if let Some(errno) = state.fault("ibv_modify_srq") {
            return errno;
        }
        let max_srq_wr = state.config.max_srq_wr;
        let Some(srq) = state.srq(raw.addr(), "ibv_modify_srq") else { return libc::EINVAL };
        let mut new = srq.attr;
        if (mask & IBV_SRQ_MAX_WR).0 != 0 {
            let fits = attr.max_wr as usize >= srq.queue.len() && attr.max_wr >= srq.attr.srq_limit;
            if attr.max_wr == 0 || attr.max_wr > max_srq_wr || !fits {
                return libc::EINVAL;
            }
            new.max_wr = attr.max_wr.next_power_of_two();
        }
        if (mask & IBV_SRQ_LIMIT).0 != 0 {
            if attr.srq_limit > new.max_wr {
                return libc::EINVAL;
            }
            new.srq_limit = attr.srq_limit;
        }
        srq.attr = new;
        0
    })
}

pub(super) unsafe extern "C" fn query_srq(raw: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    enter(raw, "ibv_query_srq", |state, _| {
        if let Some(errno) = state.fault("ibv_query_srq") {
            return errno;
        }
        let Some(srq) = state.srq(raw.addr(), "ibv_query_srq") else { return libc::EINVAL };
        unsafe { attr.write(srq.attr) };
        0
    })
}

pub(super) unsafe extern "C" fn destroy_srq(raw: *mut ibv_srq) -> c_int {
    enter(raw, "ibv_destroy_srq", |state, _| {
        let address = raw.addr();
        if state.srq(address, "ibv_destroy_srq").is_none() {
            return libc::EINVAL;
        }
        if let Some(errno) = state.fault("ibv_destroy_srq") {
            return errno;
        }
        if state.qps.values().any(|qp| qp.srq == Some(address)) {
            state.violation("ibv_destroy_srq of a queue that queue pairs take from");
            return libc::EBUSY;
        }
        // mlx4 takes the lock here.
        if let Some(cq) = state.srqs[&address].cq {
            state.needs_lock([cq, cq], "ibv_destroy_srq");
        }
        state.end_events(address, "ibv_destroy_srq");
        let srq = state.srqs.remove(&address).unwrap();
        state.retire(srq.alloc);
        0
    })
}

pub(super) unsafe extern "C" fn post_srq_recv(
    raw: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    enter(raw, "ibv_post_srq_recv", |state, _| {
        if state.srq(raw.addr(), "ibv_post_srq_recv").is_none() {
            return libc::EINVAL;
        }
        if first.is_null() || !first.is_aligned() {
            state.violation("ibv_post_srq_recv of no chain");
            return libc::EINVAL;
        }
        let fault = state.post_recv_fault.take();
        let (mut next, mut taken) = (first, 0);
        while !next.is_null() {
            let wr = unsafe { *next };
            let srq = state.srqs.get_mut(&raw.addr()).unwrap();
            let too_many = wr.num_sge < 0 || wr.num_sge as u32 > srq.attr.max_sge;
            let errno = match fault {
                Some(fault) if taken == fault.taken => fault.errno,
                _ if srq.queue.len() >= srq.attr.max_wr as usize => libc::ENOMEM,
                _ if too_many => libc::EINVAL,
                _ => 0,
            };
            if errno != 0 {
                if too_many {
                    state.violation(format!("ibv_post_srq_recv of {} elements", wr.num_sge));
                }
                unsafe { set_bad(fault.map_or(Bad::FirstNotTaken, |fault| fault.bad), bad, next) };
                return errno;
            }
            let sges = (0..wr.num_sge as usize).map(|index| unsafe { *wr.sg_list.add(index) }).collect();
            srq.queue.push_back(RecvWr { sequence: 0, wr_id: wr.wr_id, sges });
            taken += 1;
            next = wr.next;
        }
        if state.mode == Mode::AtPost {
            state.run();
        }
        fault.map_or(0, |fault| {
            unsafe { set_bad(fault.bad, bad, std::ptr::null_mut()) };
            fault.errno
        })
    })
}

impl State {
    pub(super) fn shared_receives(&self, srq: *mut ibv_srq) -> Vec<u64> {
        self.srqs[&srq.addr()].queue.iter().map(|wr| wr.wr_id).collect()
    }

    /// Whether a message to a queue pair would find a receive.
    pub(super) fn has_receive(&self, qp: usize) -> bool {
        let qp = &self.qps[&qp];
        qp.srq.map_or(!qp.rq.is_empty(), |srq| !self.srqs[&srq].queue.is_empty())
    }

    /// Takes the next receive from the receive queue or the shared receive queue of a queue pair.
    pub(super) fn take_receive(&mut self, qp: usize) -> Option<RecvWr> {
        let qp = self.qps.get_mut(&qp).unwrap();
        let Some(address) = qp.srq else { return qp.rq.pop_front() };
        let srq = self.srqs.get_mut(&address).unwrap();
        let receive = srq.queue.pop_front()?;
        if (srq.queue.len() as u32) < srq.attr.srq_limit {
            srq.attr.srq_limit = 0;
            let (context, raw) = (srq.context, srq.raw);
            self.raise_object(context, IBV_EVENT_SRQ_LIMIT_REACHED, raw.0.cast());
        }
        Some(receive)
    }

    /// The domain of the memory that receives of a queue pair use.
    pub(super) fn receive_domain(&self, qp: usize) -> usize {
        let qp = &self.qps[&qp];
        qp.srq.map_or(qp.pd, |srq| self.srqs[&srq].pd)
    }
}
