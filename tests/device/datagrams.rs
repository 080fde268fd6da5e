//! Unreliable datagrams: destinations, headers, answers, and what is dropped.

use rdma_safe::{
    AddressError, AddressHandle, AddressVector, ConnectOptions, Error, GidEntry, GidType, Grh, InitOptions, Inline,
    LinkLayer, PostError, ProtectionDomain, QueuePairAddress, QueuePairState, QueuePairType, SendOps, UdTarget,
    WcFlags, WcOpcode, WorkRequest,
};

use crate::support::lab::{MEMORY, Memory, Mode, Side, cq_builder, try_next};
use crate::support::{Rdma, device, lossless_device, pattern, within_deadline};

const QKEY: u32 = 0x1122_3344;

fn on_every_interface(device: fn() -> Option<Rdma>, body: impl Fn(&Rdma, Mode)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        println!("{mode}");
        body(&rdma, mode);
    }
}

fn side(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, gid: &GidEntry) -> (Side, QueuePairAddress) {
    let cq = cq_builder(rdma, 128, mode).build().expect("a completion queue");
    let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).inline_data(64);
    let mut qp = builder.classic(mode.classic_qp).build().expect("a queue pair");
    assert!(!rdma.is_rxe() || qp.is_extended() != mode.classic_qp);
    let options = InitOptions::default().port(rdma.port).gid_index(gid.index);
    let address = qp.init_datagrams(QKEY, &options).expect("it sends and receives");
    assert_eq!((qp.state(), qp.operations()), (QueuePairState::RTS, SendOps::UD));
    (Side { qp, cq, memory: Memory::new(pd, MEMORY) }, address)
}

struct Pair {
    a: Side,
    b: Side,
    to_b: QueuePairAddress,
    handle: AddressHandle,
    pd: ProtectionDomain,
}

impl Pair {
    fn new(rdma: &Rdma, mode: Mode, gid: &GidEntry) -> Self {
        let pd = rdma.pd();
        let ((a, _), (b, to_b)) = (side(rdma, &pd, mode, gid), side(rdma, &pd, mode, gid));
        let options = ConnectOptions::default().traffic_class(8);
        let handle = pd.address_handle(&a.qp.address_of(&to_b, &options).unwrap()).expect("an address handle");
        Pair { a, b, to_b, handle, pd }
    }

    fn target(&self) -> UdTarget<'_> {
        UdTarget::new(&self.handle, self.to_b.qp_num, QKEY)
    }

    /// Sends the first `len` bytes of the memory of `a`, from there to `b`, as `id`.
    fn send(&mut self, id: u64, len: usize, change: impl Fn(UdTarget<'_>) -> UdTarget<'_>) -> Result<(), PostError> {
        let (wr, sge) = (WorkRequest::new(id).signaled(), self.a.memory.sge(0..len));
        let target = UdTarget::new(&self.handle, self.to_b.qp_num, QKEY);
        let mut batch = self.a.qp.send_batch()?;
        // SAFETY: memory of a `Memory` and a handle, both of which go after the queue pair.
        unsafe { batch.send_to(wr, change(target), sge)? };
        batch.post()
    }
}

#[test]
fn datagrams_arrive_behind_their_header() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        let max = pair.a.qp.max_datagram().unwrap() as usize;
        assert_eq!(Some(max as u32), rdma.query_port(rdma.port).unwrap().active_mtu().bytes());
        for (id, len) in [(1, 1), (2, 100), (3, max)] {
            pair.b.memory.put(0, &[0xaa; 8192]);
            pair.b.receive(id, 100..6000).unwrap();
            pair.a.memory.put(0, &pattern(id, len));
            pair.send(id + 100, len, |to| to).unwrap();
            assert_eq!(pair.a.next_ok(id + 100).opcode, WcOpcode::SEND);
            let wc = pair.b.next_ok(id);
            assert_eq!((wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RECV, Some((Grh::LEN + len) as u32), None));
            assert!(pair.b.memory.get(140..140 + len) == pattern(id, len), "{len} bytes");
            assert_eq!(pair.b.memory.get(140 + len..141 + len), [0xaa]);
            if wc.flags.contains(WcFlags::GRH) {
                let grh = Grh::of(&pair.b.memory.get(100..140)).unwrap();
                assert_eq!((grh.sgid(), grh.dgid()), (rdma.gid.gid, rdma.gid.gid), "{grh:?}");
                // The hop limit is that of the host's route, on RoCE.
                assert_eq!(grh.traffic_class() & 0xfc, 8, "{grh:?}");
                assert!(grh.payload_len() as usize >= len, "{grh:?}");
            }
        }
    });
}

#[test]
fn a_datagram_carries_immediate_data_and_inline_bytes() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.b.receive(1, 0..100).unwrap();
        let target = UdTarget::new(&pair.handle, pair.to_b.qp_num, QKEY);
        let mut batch = pair.a.qp.send_batch().unwrap();
        // SAFETY: inline bytes, and a handle that goes after the queue pair.
        unsafe { batch.send_imm_to(WorkRequest::new(2).signaled(), target, 0xcafe_0001, Inline(b"inline")) }.unwrap();
        batch.post().unwrap();
        pair.a.next_ok(2);
        let wc = pair.b.next_ok(1);
        assert_eq!((wc.imm, wc.byte_len), (Some(0xcafe_0001), Some(46)));
        assert_eq!(pair.b.memory.get(40..47), b"inline\0");
    });
}

/// Over every GID of the port that is of RoCE v2 or InfiniBand: IPv4 and IPv6 have different headers.
#[test]
fn a_datagram_can_be_answered_by_what_came_with_it() {
    on_every_interface(lossless_device, |rdma, mode| {
        for gid in rdma.gids(rdma.port).unwrap().iter().filter(|gid| gid.gid_type != GidType::ROCE_V1) {
            let mut pair = Pair::new(rdma, mode, gid);
            pair.a.receive(1, 200..300).unwrap();
            pair.b.receive(2, 0..100).unwrap();
            pair.a.memory.put(0, b"question");
            pair.send(3, 8, |to| to).unwrap();
            pair.a.next_ok(3);
            let (back, number) = within_deadline("the question", || {
                let mut poll = pair.b.cq.poll();
                let wc = poll.next().unwrap()?;
                assert_eq!((wc.wr_id(), wc.src_qp()), (2, Some(pair.a.qp.number())));
                let grh = Grh::of(&pair.b.memory.get(0..40));
                let address = rdma.sender_address(rdma.port, &wc, grh.as_ref()).expect("the way back");
                if let Some(route) = address.route {
                    // A port may list a GID twice.
                    let from = rdma.gid(rdma.port, route.sgid_index.into()).unwrap();
                    assert_eq!((route.dgid, from.gid, from.gid_type), (gid.gid, gid.gid, gid.gid_type), "{grh:?}");
                    let link_layer = rdma.query_port(rdma.port).unwrap().link_layer();
                    assert!(link_layer != LinkLayer::ETHERNET || address.sl == 0, "{:?} of {:?}", address.sl, wc.sl());
                    assert!(matches!(rdma.sender_address(rdma.port, &wc, None), Err(Error::NoGrh)));
                }
                let handle = pair.pd.address_handle_to_sender(rdma.port, &wc, grh.as_ref()).expect("a handle");
                Some((handle, wc.src_qp().unwrap()))
            });
            pair.b.memory.put(500, b"answer");
            let target = UdTarget::new(&back, number, QKEY);
            let sge = pair.b.memory.sge(500..506);
            let mut batch = pair.b.qp.send_batch().unwrap();
            // SAFETY: memory of a `Memory`, and a handle whose work has completed when it goes.
            unsafe { batch.send_to(WorkRequest::new(4).signaled(), target, sge) }.unwrap();
            batch.post().unwrap();
            pair.b.next_ok(4);
            assert_eq!(pair.a.next_ok(1).byte_len, Some(46), "over {}", gid.gid);
            assert_eq!(pair.a.memory.get(240..246), b"answer");
        }
    });
}

#[test]
fn a_datagram_with_a_wrong_key_or_without_a_receive_is_dropped() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.a.memory.put(0, b"lost and found");
        pair.send(1, 4, |to| to).unwrap();
        pair.a.next_ok(1);
        pair.b.receive(7, 0..100).unwrap();
        pair.send(2, 4, |mut to| {
            to.qkey ^= 1;
            to
        })
        .unwrap();
        pair.a.next_ok(2);
        pair.send(3, 14, |to| to).unwrap();
        pair.a.next_ok(3);
        assert_eq!(pair.b.next_ok(7).byte_len, Some(54), "neither of the others took the receive");
        assert_eq!(pair.b.memory.get(40..54), b"lost and found");
        assert_eq!(try_next(&mut pair.b.cq), None);
        assert_eq!(pair.b.qp.query().unwrap().state(), Some(QueuePairState::RTS));
    });
}

#[test]
fn a_datagram_that_is_longer_than_the_mtu_is_refused() {
    on_every_interface(device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        let max = pair.a.qp.max_datagram().unwrap();
        let refused = pair.send(1, max as usize + 1, |to| to);
        assert_eq!(refused, Err(PostError::DatagramTooLong { len: u64::from(max) + 1, max }));
        assert_eq!(try_next(&mut pair.a.cq), None);
    });
}

#[test]
fn sends_without_a_destination_are_refused_on_datagrams() {
    on_every_interface(device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        assert_eq!(pair.target().qp_num, pair.b.qp.number());
        let sge = pair.a.memory.sge(0..4);
        let mut batch = pair.a.qp.send_batch().unwrap();
        // SAFETY: nothing of it is posted.
        unsafe {
            assert_eq!(batch.send(WorkRequest::new(1), sge), Err(PostError::NoDestination));
            let remote = pair.b.memory.remote(0);
            let refused = batch.write(WorkRequest::new(1), remote, sge);
            assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::RDMA_WRITE }));
        }
    });
}

#[test]
fn an_address_that_a_device_refuses_is_explained() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let address = AddressVector::from_gid(rdma.port, rdma.gid.gid, rdma.gid.index as u8);
    let explained = |address: AddressVector| match pd.address_handle(&address) {
        Err(Error::Address(error)) => *error,
        other => panic!("{other:?}"),
    };
    if rdma.is_rxe() {
        let error = explained(AddressVector { route: None, ..address });
        assert!(matches!(error, AddressError::MissingGlobalRoute { .. }), "{error}");
    }
    let empty = (0..255).rev().find(|index| rdma.gid(rdma.port, u32::from(*index)).is_err()).expect("an empty entry");
    let error = explained(AddressVector::from_gid(rdma.port, rdma.gid.gid, empty));
    assert!(matches!(error, AddressError::NoSourceGid { index, .. } if index == empty), "{error}");
    pd.address_handle(&address).unwrap().destroy().unwrap();
}
