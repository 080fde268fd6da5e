//! Unreliable datagrams: destinations, headers, replies, and dropped datagrams.

use rdma_safe::address::{AddressError, AddressVector, GidEntry, Grh};
use rdma_safe::device::Quirks;
use rdma_safe::interface::{Classic, Extended};
use rdma_safe::post::InlineList;
use rdma_safe::{
    AddressHandle, ConnectOptions, Error, GidType, InitOptions, Inline, LinkLayer, PostError, ProtectionDomain,
    QueuePairAddress, QueuePairState, QueuePairType, SendOps, Sge, UdTarget, WcFlags, WcOpcode, WorkRequest,
};

use crate::support::lab::{Lab, MEMORY, Memory, Mode, Side, cq_builder, try_next};
use crate::support::{Rdma, device, error_of, lossless_device, pattern, within_deadline};

const QKEY: u32 = 0x1122_3344;

fn on_every_interface(device: fn() -> Option<Rdma>, body: impl Fn(&Rdma, Mode)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        body(&rdma, mode);
    }
}

fn side(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, gid: &GidEntry, sges: u32) -> (Side, QueuePairAddress) {
    let cq = cq_builder(rdma, 128, mode).build().expect("a completion queue");
    let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).send_sges(sges).inline_data(64);
    let mut qp = builder.classic(mode.classic_qp).build().expect("a queue pair");
    if rdma.is_rxe() {
        let miscounts = sges > 1 && rdma.quirks().contains(Quirks::SGE_LISTS_MISCOUNTED);
        assert_eq!(qp.is_extended(), !mode.classic_qp && !miscounts);
    }
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
        Pair::with_sges(rdma, mode, gid, 1)
    }

    /// Queue pairs for lists of up to `sges` elements. SoftRoCE posts lists by `ibv_post_send` in every mode.
    fn with_sges(rdma: &Rdma, mode: Mode, gid: &GidEntry, sges: u32) -> Self {
        let pd = rdma.pd();
        let ((a, _), (b, to_b)) = (side(rdma, &pd, mode, gid, sges), side(rdma, &pd, mode, gid, sges));
        let options = ConnectOptions::default().traffic_class(8);
        let handle = pd.address_handle(&a.qp.address_of(&to_b, &options).unwrap()).expect("an address handle");
        Pair { a, b, to_b, handle, pd }
    }

    fn target(&self) -> UdTarget<'_> {
        UdTarget::new(&self.handle, self.to_b.qp_num, QKEY)
    }

    /// Sends the first `len` bytes of `a`'s memory to `b`, as work `id`.
    fn send(&mut self, id: u64, len: usize, change: impl Fn(UdTarget<'_>) -> UdTarget<'_>) -> Result<(), PostError> {
        let (wr, sge) = (WorkRequest::new(id).signaled(), self.a.memory.sge(0..len));
        let target = UdTarget::new(&self.handle, self.to_b.qp_num, QKEY);
        let mut batch = self.a.qp.send_batch()?;
        // SAFETY: the memory tolerates any access, and the memory and the handle are dropped after the queue pair.
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
            pair.b.memory.put(139 + len, &[0xaa; 2]);
            pair.b.receive(id, 100..6000).unwrap();
            pair.a.memory.put(0, &pattern(id, len));
            pair.send(id + 100, len, |to| to).unwrap();
            assert_eq!(pair.a.next_ok(id + 100).opcode, WcOpcode::SEND);
            let wc = pair.b.next_ok(id);
            assert_eq!((wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RECV, Some((Grh::LEN + len) as u32), None));
            assert!(pair.b.memory.get(140..140 + len) == pattern(id, len), "{len} bytes");
            assert_eq!(pair.b.memory.get(140 + len..141 + len), [0xaa]);
            if wc.flags.contains(WcFlags::GRH) {
                let grh = Grh::parse(&pair.b.memory.get(100..140)).unwrap();
                assert_eq!((grh.sgid(), grh.dgid()), (rdma.gid.gid, rdma.gid.gid), "{grh:?}");
                // On RoCE the hop limit comes from the route of the host.
                assert_eq!(grh.traffic_class() & 0xfc, 8, "{grh:?}");
                assert!(grh.payload_len() as usize >= len, "{grh:?}");
            }
        }
    });
}

#[test]
fn a_datagram_carries_every_payload_with_and_without_immediate_data() {
    on_every_interface(lossless_device, |rdma, mode| {
        for sges in [1, 2] {
            let mut pair = Pair::with_sges(rdma, mode, &rdma.gid, sges);
            (0..5).for_each(|id| pair.b.receive(id, 100 * id as usize..100 * (id as usize + 1)).unwrap());
            pair.a.memory.put(0, b"abcdef");
            let part = |range| pair.a.memory.sge(range);
            let list = [part(4..6), part(0..1)];
            let target = UdTarget::new(&pair.handle, pair.to_b.qp_num, QKEY);
            let mut batch = pair.a.qp.send_batch().unwrap();
            // SAFETY: the memory tolerates any access, and the memory and the handle are dropped after the queue pair.
            unsafe {
                batch.send_to(WorkRequest::new(1), target, &list[..sges as usize]).unwrap();
                batch.send_imm_to(WorkRequest::new(2).solicited(), target, 0xcafe_0001, Inline(b"inline")).unwrap();
                batch.send_to(WorkRequest::new(3), target, InlineList(&[b"li", b"st"])).unwrap();
                batch.send_imm_to(WorkRequest::new(4), target, 5, part(0..6)).unwrap();
                batch.send_to(WorkRequest::new(5).signaled(), target, Inline(&[])).unwrap();
            }
            batch.post().unwrap();
            pair.a.next_ok(5);
            let listed: &[u8] = if sges == 1 { b"ef" } else { b"efa" };
            let expected: [(&[u8], _); 5] =
                [(listed, None), (b"inline", Some(0xcafe_0001)), (b"list", None), (b"abcdef", Some(5)), (b"", None)];
            for (id, (text, imm)) in (0..).zip(expected) {
                let wc = pair.b.next_ok(id);
                assert_eq!((wc.imm, wc.byte_len), (imm, Some((Grh::LEN + text.len()) as u32)), "{mode}");
                let at = 100 * id as usize + Grh::LEN;
                assert_eq!(pair.b.memory.get(at..at + text.len() + 1), [text, b"\0"].concat(), "{mode}");
            }
        }
    });
}

/// Tests every RoCE v2 and InfiniBand GID of the port, since IPv4 and IPv6 have different headers.
#[test]
fn a_datagram_can_be_answered_from_its_completion_and_grh() {
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
                let grh = Grh::parse(&pair.b.memory.get(0..40));
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
            // SAFETY: the memory tolerates any access, and the handle is dropped after its work has completed.
            unsafe { batch.send_to(WorkRequest::new(4).signaled(), target, sge) }.unwrap();
            batch.post().unwrap();
            pair.b.next_ok(4);
            assert_eq!(pair.a.next_ok(1).byte_len, Some(46), "over {}", gid.gid);
            assert_eq!(pair.a.memory.get(240..246), b"answer");
        }
    });
}

#[test]
fn a_datagram_reports_the_lid_and_service_level_of_its_sender() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.b.receive(1, 0..100).unwrap();
        pair.send(2, 4, |to| to).unwrap();
        pair.a.next_ok(2);
        let port = rdma.query_port(rdma.port).unwrap();
        within_deadline("the datagram", || {
            let mut poll = pair.b.cq.poll();
            let wc = poll.next().unwrap()?;
            assert_eq!(wc.wr_id(), 1);
            let (slid, sl, path_bits) = (wc.slid().unwrap(), wc.sl().unwrap(), wc.dlid_path_bits().unwrap());
            // On Ethernet, which has no LIDs, some drivers use the fields for other things: mlx5 and soft0 report the
            // packet type as `sl`.
            if rdma.is_rxe() || port.link_layer() == LinkLayer::INFINIBAND {
                assert_eq!((slid, sl, path_bits), (u32::from(port.lid()), 0, 0), "{mode}");
            }
            Some(())
        });
    });
}

#[test]
fn a_datagram_with_a_wrong_key_or_without_a_receive_is_dropped() {
    on_every_interface(lossless_device, |rdma, mode| {
        // The kernel may deliver a datagram after its completion, so a receive that is posted then could still get it.
        let mut without_receive = Pair::new(rdma, mode, &rdma.gid);
        without_receive.send(1, 4, |to| to).unwrap();
        without_receive.a.next_ok(1);
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.a.memory.put(0, b"lost and found");
        pair.b.receive(7, 0..100).unwrap();
        pair.send(4, 4, |mut to| {
            to.qp_num = 0xab_cdef;
            to
        })
        .unwrap();
        pair.a.next_ok(4);
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
        for receiver in [&mut pair.b, &mut without_receive.b] {
            assert_eq!(try_next(&mut receiver.cq), None);
            assert_eq!(receiver.qp.query().unwrap().state(), Some(QueuePairState::RTS));
        }
    });
}

/// IBTA: a Q_Key whose highest bit is set is replaced by the Q_Key of the sender's queue pair.
#[test]
fn a_key_with_the_highest_bit_set_is_replaced_by_that_of_the_sender() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.b.receive(1, 0..100).unwrap();
        pair.send(2, 14, |mut to| {
            to.qkey = 1 << 31;
            to
        })
        .unwrap();
        pair.a.next_ok(2);
        pair.send(3, 4, |to| to).unwrap();
        pair.a.next_ok(3);
        // SoftRoCE sends the key as it is, and the receiver drops the datagram.
        let len = if rdma.is_rxe() { 4 } else { 14 };
        assert_eq!(pair.b.next_ok(1).byte_len, Some((Grh::LEN + len) as u32), "{mode}");
    });
}

#[test]
fn a_datagram_that_is_longer_than_the_mtu_is_refused() {
    on_every_interface(device, |rdma, mode| {
        let mut pair = Pair::with_sges(rdma, mode, &rdma.gid, 2);
        let max = pair.a.qp.max_datagram().unwrap();
        let refused = pair.send(1, max as usize + 1, |to| to);
        let too_long = Err(PostError::DatagramTooLong { len: u64::from(max) + 1, max });
        assert_eq!(refused, too_long);
        let target = UdTarget::new(&pair.handle, pair.to_b.qp_num, QKEY);
        let parts = [pair.a.memory.sge(0..max as usize), pair.a.memory.sge(0..1)];
        let mut batch = pair.a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        assert_eq!(unsafe { batch.send_imm_to(WorkRequest::new(1), target, 1, &parts[..]) }, too_long);
        assert!(batch.is_empty());
        drop(batch);
        let fresh = pair.pd.queue_pair(&pair.a.cq, &pair.a.cq).qp_type(QueuePairType::UD).build().unwrap();
        assert_eq!(fresh.max_datagram(), None, "it has no port yet");
        assert_eq!(try_next(&mut pair.a.cq), None);
    });
}

#[test]
fn each_type_refuses_work_of_another() {
    on_every_interface(device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        assert_eq!(pair.target().qp_num, pair.b.qp.number());
        let (sge, remote, wr) = (pair.a.memory.sge(0..8), pair.b.memory.remote(0), WorkRequest::new(1));
        let not_enabled = |op| Err(PostError::NotEnabled { op });
        let mut batch = pair.a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            assert_eq!(batch.send(wr, sge), Err(PostError::NoDestination));
            assert_eq!(batch.send_imm(wr, 1, Inline(b"")), Err(PostError::NoDestination));
            assert_eq!(batch.send_invalidate(wr, 1, Inline(b"")), not_enabled(SendOps::SEND_WITH_INV));
            assert_eq!(batch.write(wr, remote, sge), not_enabled(SendOps::RDMA_WRITE));
            assert_eq!(batch.write_imm(wr, remote, 1, Inline(b"")), not_enabled(SendOps::RDMA_WRITE_WITH_IMM));
            assert_eq!(batch.read(wr, remote, sge), not_enabled(SendOps::RDMA_READ));
            assert_eq!(batch.fetch_add(wr, remote, 1, sge), not_enabled(SendOps::ATOMIC_FETCH_AND_ADD));
        }
        assert!(batch.is_empty());
        drop(batch);
        let target = UdTarget::new(&pair.handle, pair.to_b.qp_num, QKEY);
        let mut lab = Lab::new(rdma, mode);
        let mut batch = lab.a.qp.send_batch().unwrap();
        // SAFETY: as above.
        unsafe {
            assert_eq!(batch.send_to(wr, target, Inline(b"")), Err(PostError::NotDatagram));
            assert_eq!(batch.send_imm_to(wr, target, 1, Inline(b"")), Err(PostError::NotDatagram));
            let long = Sge { len: u32::MAX, ..sge };
            assert_eq!(batch.send_to(wr, target, long), Err(PostError::NotDatagram));
        }
        assert!(batch.is_empty());
    });
}

#[test]
fn queues_that_know_their_interface_refuse_the_same() {
    on_every_interface(lossless_device, |rdma, mode| {
        let mut pair = Pair::new(rdma, mode, &rdma.gid);
        pair.b.receive(1, 0..100).unwrap();
        let target = UdTarget::new(&pair.handle, pair.to_b.qp_num, QKEY);
        let is_extended = pair.a.qp.is_extended();
        let sends = pair.a.qp.split().0;
        macro_rules! check {
            ($sends:expr) => {{
                let mut sends = $sends;
                // SAFETY: the data is inline, and the handle is dropped after the queue pair.
                unsafe {
                    let refused = sends.post(|batch| batch.send(WorkRequest::new(1), Inline(b"x")));
                    assert_eq!(refused, Err(PostError::NoDestination));
                    sends.post(|batch| batch.send_imm_to(WorkRequest::new(2), target, 9, Inline(b"known"))).unwrap();
                }
            }};
        }
        match is_extended {
            true => check!(sends.with_interface::<Extended>().unwrap()),
            false => check!(sends.with_interface::<Classic>().unwrap()),
        }
        assert_eq!(pair.b.next_ok(1).imm, Some(9));
        assert_eq!(pair.b.memory.get(40..46), b"known\0");
    });
}

#[test]
fn operations_are_those_of_the_type() {
    on_every_interface(device, |rdma, mode| {
        let pd = rdma.pd();
        let cq = rdma.completion_queue(4).build().unwrap();
        let builder = || pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).classic(mode.classic_qp);
        let error = error_of(builder().operations(SendOps::BASIC).build());
        let lacking = SendOps::BASIC - SendOps::UD;
        assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == lacking), "{error}");
        let mut only_imm = builder().operations(SendOps::SEND_WITH_IMM).build().unwrap();
        assert_eq!(only_imm.operations(), SendOps::SEND_WITH_IMM);
        let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
        let to = only_imm.init_datagrams(QKEY, &options).unwrap();
        let address = only_imm.address_of(&to, &ConnectOptions::default()).unwrap();
        let handle = pd.address_handle(&address).unwrap();
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let mut batch = only_imm.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            let refused = batch.send_to(WorkRequest::new(1), target, Inline(b""));
            assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::SEND }));
            batch.send_imm_to(WorkRequest::new(1), target, 1, Inline(b"")).unwrap();
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
