//! A queue pair of a device with memory, for tests.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use rdma_sys::*;

use super::cq::{Completions, Cq};
use super::host::Identity;
use super::keys::Registration;
use super::net_address::Destination;
use super::qp::{Answers, PKEY, Qp, Sending};
use super::queues::Task;
use super::state::State;
use crate::net::Origin;
use crate::transport::{Payload, Request, Time};
use crate::wire::{Data, Header, ICRC, Operation, Psn, RemoteRange, Trailer, Transport};

pub(super) const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 1, 1, 1));
pub(super) const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 2, 2, 2));
pub(super) const PAGE: usize = 4096;
pub(super) const MTU: u32 = 256;
pub(super) const PSN: u32 = 0xff_fff0;
pub(super) const QKEY: u32 = 0x1234;

/// A device with three pages of memory, of which the middle one is registered.
pub(super) struct Target {
    pub(super) state: State,
    pub(super) memory: Vec<u8>,
    pub(super) region: usize,
    pub(super) rkey: u32,
    pub(super) qp: u32,
    pub(super) receive_buffer: Vec<u8>,
    lkey: u32,
}

impl Target {
    pub(super) fn new(kind: ibv_qp_type, access: u32) -> Box<Target> {
        let mut target = Box::new(Target {
            state: State::new(),
            memory: vec![0x55; 4 * PAGE],
            region: 0,
            rkey: 0,
            qp: 0,
            receive_buffer: vec![0; 64],
            lkey: 0,
        });
        target.region = (target.memory.as_ptr() as usize).next_multiple_of(PAGE) + PAGE;
        let start = target.region as u64;
        let mut register = |address, len, access| {
            let wanted = Registration { pd: 1, address, len, iova: address, access };
            target.state.shared.keys.register(&wanted)
        };
        target.rkey = register(start, PAGE as u64, access | IBV_ACCESS_LOCAL_WRITE.0);
        let (address, len) = (target.receive_buffer.as_ptr() as u64, target.receive_buffer.len());
        target.lkey = register(address, len as u64, IBV_ACCESS_LOCAL_WRITE.0);
        target.qp = target.add_qp(kind);
        target
    }

    /// Adds a queue pair that is connected to [`PEER`], with four receives. Returns its number.
    pub(super) fn add_qp(&mut self, kind: ibv_qp_type) -> u32 {
        let cq = |state: &mut State| {
            state.shared.cqs.insert(Cq {
                completions: Arc::new(Completions::new(64)),
                context: 1,
                channel: None,
                object: 0,
                users: 0,
                queued_events: 0,
                events: (0, 0),
            })
        };
        let (send_cq, recv_cq) = (cq(&mut self.state), cq(&mut self.state));
        let cap = ibv_qp_cap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let number = self.state.add_qp(Identity {
            number: 0,
            pd: 1,
            context: 1,
            object: 0,
            kind,
            send_cq,
            recv_cq,
            srq: None,
            is_all_signaled: true,
            cap,
        });
        self.connect(number, kind);
        let qp = self.state.qps.get_mut(&number).unwrap();
        let (addr, length) = (self.receive_buffer.as_ptr() as u64, self.receive_buffer.len() as u32);
        let sge = ibv_sge { addr, length, lkey: self.lkey };
        (0..4).for_each(|id| qp.queues.receive.push(id, &[sge]).unwrap());
        number
    }

    pub(super) fn connect(&mut self, number: u32, kind: ibv_qp_type) {
        let State { qps, shared, .. } = &mut self.state;
        let qp = qps.get_mut(&number).unwrap();
        let attr = ibv_qp_attr {
            port_num: 1,
            qkey: QKEY,
            qp_access_flags: (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC).0,
            path_mtu: IBV_MTU_256,
            dest_qp_num: 77,
            rq_psn: PSN,
            sq_psn: PSN,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            timeout: 20,
            retry_cnt: 7,
            rnr_retry: 7,
            ..ibv_qp_attr::zeroed()
        };
        let common = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        let route = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let masks = match kind {
            IBV_QPT_RC => [
                common | IBV_QP_ACCESS_FLAGS,
                route | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                IBV_QP_STATE
                    | IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ],
            IBV_QPT_UC => [common | IBV_QP_ACCESS_FLAGS, route, IBV_QP_STATE | IBV_QP_SQ_PSN],
            _ => [common | IBV_QP_QKEY, IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN],
        };
        let peer = Some(Destination { link: 0, address: PEER, class: 0 });
        for (mask, state) in masks.into_iter().zip([IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]) {
            let attr = ibv_qp_attr { qp_state: state, ..attr };
            qp.modify(&attr, mask.0, peer, 64, shared).unwrap();
        }
    }

    /// Delivers a packet of the peer: a write of no bytes. `number` is its distance from the first PSN.
    pub(super) fn arrive(&mut self, number: u32, now: Time) {
        let header = Header {
            transport: Transport::Rc,
            operation: Operation::WriteOnly(RemoteRange { address: 0, rkey: 0, len: 0 }, None),
            pkey: PKEY,
            dest_qp: self.qp,
            psn: Psn::new(PSN).add(number),
            solicited: false,
            ack_request: true,
            migrated: true,
            congestion: (false, false),
        };
        let packet = datagram(&header, &[]);
        self.handle(&packet, packet.len(), now);
    }

    /// Handles packets of `len` bytes each.
    pub(super) fn handle(&mut self, packets: &[u8], len: usize, now: Time) {
        self.state.handle_packets(0, origin(PEER), LOCAL, Data::from(packets).chunks(len), now);
    }

    pub(super) fn post(&mut self) {
        post(self.state.qps.get_mut(&self.qp).unwrap());
    }

    /// Handles a packet, sends all packets that follow from it, and checks the memory.
    pub(super) fn deliver(&mut self, datagram: &[u8]) {
        let now = Time(1);
        self.handle(datagram, datagram.len(), now);
        let State { qps, shared, .. } = &mut self.state;
        let qp = qps.get_mut(&self.qp).unwrap();
        // At most four reads of a page are answered at once. Their responses have fewer packets than this.
        for _ in 0..200 {
            match qp.transmit(now, Answers::Send, shared) {
                Some(Sending::Packet(_, outgoing)) => {
                    if let Payload::Remote { place, len } = outgoing.payload {
                        let (from, to) = (place.0 as usize, place.0 as usize + len as usize);
                        assert!(self.region <= from && to <= self.region + PAGE, "{from:#x} to {to:#x} is read");
                    }
                }
                Some(Sending::Datagram(_)) => {}
                None => break,
            }
        }
        qp.update_state(shared);
        let start = self.region - self.memory.as_ptr() as usize;
        for closed in [&self.memory[..start], &self.memory[start + PAGE..]] {
            assert!(*closed == [0x55; 4 * PAGE][..closed.len()], "memory outside the region was written");
        }
    }

    pub(super) fn region_bytes(&self) -> &[u8] {
        let start = self.region - self.memory.as_ptr() as usize;
        &self.memory[start..][..PAGE]
    }
}

/// Posts a message without data.
pub(super) fn post(qp: &mut Qp) {
    qp.queues.send.push(|job| {
        job.task = Task::Request(Request::Send(Trailer::None));
        job.is_inline = true;
    });
}

/// Where a packet of `address` comes from.
pub(super) fn origin(address: IpAddr) -> Origin {
    Origin { address, class: 0, hops: 64 }
}

/// A packet without a valid invariant CRC, which is checked before.
pub(super) fn datagram(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode(payload.len()).to_vec();
    bytes.extend(payload);
    bytes.resize(bytes.len() + Header::padding(payload.len()) + ICRC, 0);
    bytes
}
