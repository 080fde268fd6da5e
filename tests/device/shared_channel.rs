//! One completion channel shared by many queues.

use std::collections::BTreeMap;
use std::time::Duration;

use rdma_safe::cq::CqId;
use rdma_safe::{
    CompletionChannel, CompletionQueue, ConnectOptions, InitOptions, ProtectionDomain, QueuePair, QueuePairAddress,
    QueuePairType, UdTarget, WcStatus, WorkRequest,
};

use crate::support::lab::{Memory, Mode, Wc, cq_builder, next_ok, try_next};
use crate::support::link::Link;
use crate::support::{DEADLINE, Rdma, device, lossless_device};

const QKEY: u32 = 0x0123_4567;

/// A queue pair with a completion queue for each direction. Both queues report on a shared channel.
struct Node {
    qp: QueuePair,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    memory: Memory,
}

fn queue(rdma: &Rdma, mode: Mode, channel: &CompletionChannel) -> CompletionQueue {
    cq_builder(rdma, 32, mode).channel(channel).build().expect("a completion queue")
}

fn node(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, qp_type: QueuePairType, channel: &CompletionChannel) -> Node {
    let (send_cq, recv_cq) = (queue(rdma, mode, channel), queue(rdma, mode, channel));
    let qp = pd.queue_pair(&send_cq, &recv_cq).qp_type(qp_type).classic(mode.classic_qp).build().expect("a queue pair");
    Node { qp, send_cq, recv_cq, memory: Memory::new(pd, 4096) }
}

fn datagrams(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, channel: &CompletionChannel) -> (Node, QueuePairAddress) {
    let mut node = node(rdma, pd, mode, QueuePairType::UD, channel);
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
    let address = node.qp.init_datagrams(QKEY, &options).expect("a queue pair in RTS");
    (node, address)
}

/// Waits for `count` events, each of a different queue.
#[track_caller]
fn events(channel: &CompletionChannel, count: usize) -> Vec<CqId> {
    let mut ids: Vec<CqId> = Vec::new();
    while ids.len() < count {
        let id = channel.wait(DEADLINE).unwrap().unwrap_or_else(|| panic!("{} of {count} events", ids.len()));
        assert!(!ids.contains(&id), "one event for one arm");
        ids.push(id);
    }
    ids
}

/// Polls a queue only after an event has named it.
#[test]
fn datagrams_are_driven_by_events_alone() {
    let Some(rdma) = lossless_device() else { return };
    for mode in Mode::each() {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let ((mut a, _), (mut b, to_b)) =
            (datagrams(&rdma, &pd, mode, &channel), datagrams(&rdma, &pd, mode, &channel));
        let handle = pd.address_handle(&a.qp.address_of(&to_b, &ConnectOptions::default()).unwrap()).unwrap();
        for round in 0..20_u64 {
            // SAFETY: the memory tolerates any access and is freed after its queue pair.
            unsafe { b.qp.receive(round, b.memory.sge(0..1000)) }.unwrap();
            a.send_cq.arm(false).unwrap();
            b.recv_cq.arm(false).unwrap();
            a.memory.put_u64(0, round);
            let (wr, target) = (WorkRequest::new(round).signaled(), UdTarget::new(&handle, to_b.qp_num, QKEY));
            let mut batch = a.qp.send_batch().unwrap();
            // SAFETY: the same as above. The handle is dropped after the queue pair as well.
            unsafe { batch.send_to(wr, target, a.memory.sge(0..8)) }.unwrap();
            batch.post().unwrap();
            let mut named = events(&channel, 2);
            named.sort_by_key(|id| *id == b.recv_cq.id());
            assert_eq!(named, [a.send_cq.id(), b.recv_cq.id()], "{mode}");
            next_ok(&mut a.send_cq, round);
            assert_eq!(next_ok(&mut b.recv_cq, round).byte_len, Some(48), "{mode}");
            assert_eq!(b.memory.get_u64(40), round, "{mode}");
        }
        assert_eq!(channel.try_event().unwrap(), None, "{mode}: the other two queues were never armed");
        drop((a, b, handle));
    }
}

/// Of sixteen queue pairs connected to themselves, some have armed queues. Only those report, once each.
#[test]
fn each_of_many_armed_queues_reports_one_event_that_names_it() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let mut nodes = BTreeMap::new();
        for index in 0..16_u64 {
            let mut node = node(&rdma, &pd, mode, QueuePairType::RC, &channel);
            let number = node.qp.number();
            Link::default().connect(&rdma, &mut node.qp, number).unwrap();
            nodes.insert(index, node);
        }
        for round in 0..3_u64 {
            let is_due = |index: u64| (index + round) % 3 == 0;
            for (index, node) in &mut nodes {
                if is_due(*index) {
                    node.recv_cq.arm(false).unwrap();
                }
                // SAFETY: the memory tolerates any access and is freed after its queue pair.
                unsafe { node.qp.receive(*index, node.memory.sge(0..64)) }.unwrap();
                let sge = node.memory.sge(64..72);
                let mut batch = node.qp.send_batch().unwrap();
                // SAFETY: the same as above.
                unsafe { batch.send(WorkRequest::new(100 + index).signaled(), sge) }.unwrap();
                batch.post().unwrap();
            }
            let due: Vec<CqId> =
                nodes.iter().filter(|(index, _)| is_due(**index)).map(|(_, node)| node.recv_cq.id()).collect();
            let named = events(&channel, due.len());
            assert!(due.iter().all(|id| named.contains(id)), "{mode}: {named:?} of {due:?}");
            assert_eq!(channel.try_event().unwrap(), None, "{mode}: the others were not armed");
            for (index, node) in &mut nodes {
                next_ok(&mut node.recv_cq, *index);
                next_ok(&mut node.send_cq, 100 + index);
            }
        }
    }
}

/// An unread event is destroyed with its queue, and events of other queues stay.
#[test]
fn destroying_a_queue_with_an_unread_event_keeps_events_of_others() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let mut nodes: Vec<Node> = Vec::new();
        for id in 0..3 {
            let mut node = node(&rdma, &pd, mode, QueuePairType::RC, &channel);
            let number = node.qp.number();
            Link::default().connect(&rdma, &mut node.qp, number).unwrap();
            // SAFETY: the memory tolerates any access and is freed after its queue pair.
            unsafe { node.qp.receive(id, node.memory.sge(0..64)) }.unwrap();
            node.recv_cq.arm(false).unwrap();
            let sge = node.memory.sge(64..72);
            let mut batch = node.qp.send_batch().unwrap();
            // SAFETY: the same as above.
            unsafe { batch.send(WorkRequest::new(10 + id).signaled(), sge) }.unwrap();
            batch.post().unwrap();
            // The completion of the send proves that the message, and so its event, has arrived.
            next_ok(&mut node.send_cq, 10 + id);
            nodes.push(node);
        }
        let removed = nodes.remove(1);
        let removed_id = removed.recv_cq.id();
        drop(removed);
        let ids = [nodes[0].recv_cq.id(), nodes[1].recv_cq.id()];
        let mut seen = Vec::new();
        // Exactly two events must arrive.
        let limit = |seen: usize| if seen < 2 { DEADLINE } else { Duration::from_millis(50) };
        while let Some(id) = channel.wait(limit(seen.len())).unwrap() {
            seen.push(id);
        }
        assert!(
            ids.iter().all(|id| seen.contains(id)) && !seen.contains(&removed_id),
            "{mode}: {seen:?}, {removed_id:?} was destroyed"
        );
        assert_eq!(seen.len(), 2, "{mode}: {seen:?}");
        for (id, node) in [0, 2].into_iter().zip(&mut nodes) {
            let wc: Wc = next_ok(&mut node.recv_cq, id);
            assert_eq!(wc.status, WcStatus::SUCCESS, "{mode}");
            assert_eq!(try_next(&mut node.recv_cq), None, "{mode}");
        }
    }
}
