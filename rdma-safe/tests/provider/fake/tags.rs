//! Shared receive queues that match messages by tag.

use std::collections::BTreeMap;
use std::ffi::c_int;

use rdma_sys::*;

use super::engine::{Cqe, End, RecvWr};
use super::state::{State, enter};

/// The tag list of a queue, oldest entry first.
pub(super) struct Tags {
    size: ibv_tm_cap,
    entries: BTreeMap<u32, Entry>,
    next: u32,
    /// Number of messages that matched no entry, and how many of them the program has reported as seen.
    unexpected: u32,
    reported: u32,
}

struct Entry {
    receive: RecvWr,
    tag: u64,
    mask: u64,
    /// Number of unexpected messages that the program had reported when it added the entry.
    reported: u32,
}

impl Tags {
    pub(super) fn new(size: ibv_tm_cap) -> Self {
        Tags { size, entries: BTreeMap::new(), next: 5, unexpected: 0, reported: 0 }
    }

    pub(super) fn uses(&self, lkey: u32) -> bool {
        self.entries.values().any(|entry| entry.receive.names(lkey))
    }
}

pub(super) unsafe extern "C" fn post_srq_ops(
    raw: *mut ibv_srq,
    first: *mut ibv_ops_wr,
    bad: *mut *mut ibv_ops_wr,
) -> c_int {
    enter(raw, "post_srq_ops", |state, _| {
        let fault = state.fault_once("post_srq_ops");
        let Some(srq) = state.srq(raw.addr(), "post_srq_ops") else { return libc::EINVAL };
        let cq = srq.cq;
        let Some(tags) = &mut srq.tags else {
            state.violation("post_srq_ops to a queue without tags");
            return libc::EINVAL;
        };
        let wr = unsafe { &mut *first };
        assert!(wr.next.is_null(), "one request at a time is supported");
        let full = wr.opcode == IBV_WR_TAG_ADD && tags.entries.len() >= tags.size.max_num_tags as usize;
        if let Some(errno) = fault.or(full.then_some(libc::ENOMEM)) {
            // With a negative errno, `bad_wr` does not name the failed request.
            unsafe { *bad = if errno > 0 { first } else { std::ptr::null_mut() } };
            return errno.abs();
        }
        if wr.flags as u32 & IBV_OPS_TM_SYNC.0 != 0 {
            tags.reported = wr.tm.unexpected_cnt;
        }
        let (status, opcode) = match wr.opcode {
            IBV_WR_TAG_ADD => {
                let add = wr.tm.add;
                let sges = (0..add.num_sge as usize).map(|index| unsafe { *add.sg_list.add(index) }).collect();
                let receive = RecvWr { sequence: 0, wr_id: add.recv_wr_id, sges };
                let entry = Entry { receive, tag: add.tag, mask: add.mask, reported: tags.reported };
                wr.tm.handle = tags.next;
                tags.entries.insert(tags.next, entry);
                tags.next += 1;
                (IBV_WC_SUCCESS, IBV_WC_TM_ADD)
            }
            IBV_WR_TAG_DEL => match tags.entries.remove(&wr.tm.handle) {
                Some(_) => (IBV_WC_SUCCESS, IBV_WC_TM_DEL),
                None => (IBV_WC_TM_ERR, IBV_WC_TM_DEL),
            },
            _ => (IBV_WC_SUCCESS, IBV_WC_TM_SYNC),
        };
        let wc_flags = if tags.reported < tags.unexpected { IBV_WC_TM_SYNC_REQ.0 } else { 0 };
        if wr.flags as u32 & IBV_OPS_SIGNALED.0 != 0 || status != IBV_WC_SUCCESS {
            let cqe = Cqe { wr_id: wr.wr_id, status: status.0, opcode: opcode.0, wc_flags, ..Cqe::default() };
            state.push_cqe(cq.unwrap(), cqe, false);
        }
        0
    })
}

impl State {
    /// Delivers a message to a queue pair whose receive queue matches tags.
    pub(super) fn deliver_by_tag(&mut self, peer: usize, srq: usize, bytes: &[u8]) -> End {
        let byte_len = bytes.len() as u32;
        let Some((header, payload)) = bytes.split_first_chunk::<16>() else {
            return End::Failed { status: IBV_WC_REM_INV_REQ_ERR };
        };
        let eager = header[0] == 3;
        let tag = u64::from_be_bytes(header[8..].try_into().unwrap());
        let about = (tag, u32::from_be_bytes(header[4..8].try_into().unwrap()));
        let memory = self.receive_domain(peer);
        let tags = self.srqs.get_mut(&srq).unwrap().tags.as_mut().unwrap();
        // An entry that was added before the program had seen all unexpected messages may belong to one of them, so it does not
        // match.
        let matches = |entry: &Entry| eager && entry.reported >= tags.unexpected && tag & entry.mask == entry.tag;
        let found = tags.entries.iter().find(|(_, entry)| matches(entry)).map(|(handle, _)| *handle);
        if let Some(entry) = found.and_then(|handle| tags.entries.remove(&handle)) {
            if self.scatter(memory, &entry.receive.sges, payload).is_none() {
                return End::Failed { status: IBV_WC_REM_OP_ERR };
            }
            let wc_flags = (IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID).0;
            let (opcode, byte_len) = (IBV_WC_TM_RECV.0, payload.len() as u32);
            self.finish_recv(
                peer,
                &entry.receive,
                Cqe { opcode, byte_len, wc_flags, tag: about, ..Cqe::default() },
                false,
            );
            return End::Done { byte_len };
        }
        let Some(receive) = self.take_receive(peer) else { return End::Wait };
        if self.scatter(memory, &receive.sges, bytes).is_none() {
            return End::Failed { status: IBV_WC_REM_OP_ERR };
        }
        let opcode = if eager { IBV_WC_TM_RECV } else { IBV_WC_TM_NO_TAG };
        let tags = self.srqs.get_mut(&srq).unwrap().tags.as_mut().unwrap();
        tags.unexpected += u32::from(eager);
        let wc_flags = if eager { IBV_WC_TM_SYNC_REQ.0 } else { 0 };
        self.finish_recv(
            peer,
            &receive,
            Cqe { opcode: opcode.0, byte_len, wc_flags, tag: about, ..Cqe::default() },
            false,
        );
        End::Done { byte_len }
    }
}
