//! One completion channel for the events of many queues.

use std::collections::BTreeMap;
use std::time::Duration;

use rdma_safe::{
    CompletionChannel, CompletionQueue, ConnectOptions, CqId, InitOptions, ProtectionDomain, QueuePair,
    QueuePairAddress, QueuePairType, UdTarget, WcStatus, WorkRequest,
};

use crate::support::lab::{Memory, Mode, Wc, cq_builder, next_ok, try_next};
use crate::support::link::Link;
use crate::support::{DEADLINE, Rdma, device, lossless_device};

const QKEY: u32 = 0x0123_4567;

/// A queue pair with a completion queue for each direction, all of which report over one channel.
struct Station {
    qp: QueuePair,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    memory: Memory,
}

fn queue(rdma: &Rdma, mode: Mode, channel: &CompletionChannel) -> CompletionQueue {
    cq_builder(rdma, 32, mode).channel(channel).build().expect("a completion queue")
}

fn station(
    rdma: &Rdma,
    pd: &ProtectionDomain,
    mode: Mode,
    qp_type: QueuePairType,
    channel: &CompletionChannel,
) -> Station {
    let (send_cq, recv_cq) = (queue(rdma, mode, channel), queue(rdma, mode, channel));
    let qp = pd.queue_pair(&send_cq, &recv_cq).qp_type(qp_type).classic(mode.classic_qp).build().expect("a queue pair");
    Station { qp, send_cq, recv_cq, memory: Memory::new(pd, 4096) }
}

fn datagrams(
    rdma: &Rdma,
    pd: &ProtectionDomain,
    mode: Mode,
    channel: &CompletionChannel,
) -> (Station, QueuePairAddress) {
    let mut station = station(rdma, pd, mode, QueuePairType::UD, channel);
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
    let address = station.qp.init_datagrams(QKEY, &options).expect("it sends and receives");
    (station, address)
}

/// Waits for `count` events, each of another queue.
#[track_caller]
fn events(channel: &CompletionChannel, count: usize) -> Vec<CqId> {
    let mut ids: Vec<CqId> = Vec::new();
    while ids.len() < count {
        let id = channel.wait(DEADLINE).unwrap().unwrap_or_else(|| panic!("{} of {count} events", ids.len()));
        assert!(!ids.contains(&id), "one arming, one event");
        ids.push(id);
    }
    ids
}

/// Nothing is polled that no event has named.
#[test]
fn datagrams_are_driven_by_events_alone() {
    let Some(rdma) = lossless_device() else { return };
    for mode in Mode::ALL {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let ((mut a, _), (mut b, to_b)) =
            (datagrams(&rdma, &pd, mode, &channel), datagrams(&rdma, &pd, mode, &channel));
        let handle = pd.address_handle(&a.qp.address_of(&to_b, &ConnectOptions::default()).unwrap()).unwrap();
        for round in 0..20_u64 {
            // SAFETY: memory that tolerates any access, and which goes after its queue pair.
            unsafe { b.qp.receive(round, b.memory.sge(0..1000)) }.unwrap();
            a.send_cq.arm(false).unwrap();
            b.recv_cq.arm(false).unwrap();
            a.memory.put_u64(0, round);
            let (wr, target) = (WorkRequest::new(round).signaled(), UdTarget::new(&handle, to_b.qp_num, QKEY));
            let mut batch = a.qp.send_batch().unwrap();
            // SAFETY: as above; the handle goes after the queue pair, too.
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

/// Sixteen connections to themselves, of which some are armed: those report, each once, and no other.
#[test]
fn of_many_queues_each_event_names_the_one_that_is_due() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let mut stations = BTreeMap::new();
        for index in 0..16_u64 {
            let mut station = station(&rdma, &pd, mode, QueuePairType::RC, &channel);
            let number = station.qp.number();
            Link::default().connect(&rdma, &mut station.qp, number).unwrap();
            stations.insert(index, station);
        }
        for round in 0..3_u64 {
            let is_due = |index: u64| (index + round) % 3 == 0;
            for (index, station) in &mut stations {
                if is_due(*index) {
                    station.recv_cq.arm(false).unwrap();
                }
                // SAFETY: memory that tolerates any access, and which goes after its queue pair.
                unsafe { station.qp.receive(*index, station.memory.sge(0..64)) }.unwrap();
                let sge = station.memory.sge(64..72);
                let mut batch = station.qp.send_batch().unwrap();
                // SAFETY: as above.
                unsafe { batch.send(WorkRequest::new(100 + index).signaled(), sge) }.unwrap();
                batch.post().unwrap();
            }
            let due: Vec<CqId> =
                stations.iter().filter(|(index, _)| is_due(**index)).map(|(_, station)| station.recv_cq.id()).collect();
            let named = events(&channel, due.len());
            assert!(due.iter().all(|id| named.contains(id)), "{mode}: {named:?} of {due:?}");
            assert_eq!(channel.try_event().unwrap(), None, "{mode}: the others were not armed");
            for (index, station) in &mut stations {
                next_ok(&mut station.recv_cq, *index);
                next_ok(&mut station.send_cq, 100 + index);
            }
        }
    }
}

/// An event that nobody has taken goes with its queue, and those of other queues stay.
#[test]
fn a_queue_that_goes_with_its_event_pending_takes_no_other_event_along() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
        let mut stations: Vec<Station> = Vec::new();
        for id in 0..3 {
            let mut station = station(&rdma, &pd, mode, QueuePairType::RC, &channel);
            let number = station.qp.number();
            Link::default().connect(&rdma, &mut station.qp, number).unwrap();
            // SAFETY: memory that tolerates any access, and which goes after its queue pair.
            unsafe { station.qp.receive(id, station.memory.sge(0..64)) }.unwrap();
            station.recv_cq.arm(false).unwrap();
            let sge = station.memory.sge(64..72);
            let mut batch = station.qp.send_batch().unwrap();
            // SAFETY: as above.
            unsafe { batch.send(WorkRequest::new(10 + id).signaled(), sge) }.unwrap();
            batch.post().unwrap();
            // The message has arrived when its send is done, and its event with it.
            next_ok(&mut station.send_cq, 10 + id);
            stations.push(station);
        }
        let gone = stations.remove(1);
        let gone_id = gone.recv_cq.id();
        drop(gone);
        let ids = [stations[0].recv_cq.id(), stations[1].recv_cq.id()];
        let mut seen = Vec::new();
        // Two events must arrive, and then no more.
        let limit = |seen: usize| if seen < 2 { DEADLINE } else { Duration::from_millis(50) };
        while let Some(id) = channel.wait(limit(seen.len())).unwrap() {
            seen.push(id);
        }
        assert!(
            ids.iter().all(|id| seen.contains(id)) && !seen.contains(&gone_id),
            "{mode}: {seen:?}, {gone_id:?} is gone"
        );
        assert_eq!(seen.len(), 2, "{mode}: {seen:?}");
        for (id, station) in [0, 2].into_iter().zip(&mut stations) {
            let wc: Wc = next_ok(&mut station.recv_cq, id);
            assert_eq!(wc.status, WcStatus::SUCCESS, "{mode}");
            assert_eq!(try_next(&mut station.recv_cq), None, "{mode}");
        }
    }
}
