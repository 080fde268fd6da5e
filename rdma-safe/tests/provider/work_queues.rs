//! Work queues, indirection tables, and RSS queue pairs.

use std::any::Any;
use std::ptr::NonNull;

use rdma_safe::async_event::{AsyncEventType, AsyncSource};
use rdma_safe::device::{RxHashFields, RxHashFunctions};
use rdma_safe::error::Verb;
use rdma_safe::flow::FlowRule;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::wq::{IndirectionTable, RssQueuePair, WorkQueue, WorkQueueFlags, WorkQueueState};
use rdma_safe::{Buffer, CompletionQueue, Context, Errno, Error, PostError, ProtectionDomain, QueuePairType, WcStatus};

use crate::fake::{Config, Fake, Live};
use crate::support::{drop_in_order, seen};

pub(crate) const KEY: [u8; 40] = [7; 40];

/// A frame of Ethernet, IPv4 and UDP from 10.0.0.1 to 10.0.0.2, with four bytes of text.
pub(crate) fn frame(from_port: u16, to_port: u16, text: &[u8; 4]) -> Vec<u8> {
    let mut frame = vec![0; 46];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    frame[14] = 0x45;
    frame[23] = 17;
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..36].copy_from_slice(&from_port.to_be_bytes());
    frame[36..38].copy_from_slice(&to_port.to_be_bytes());
    frame[42..].copy_from_slice(text);
    frame
}

struct Queue {
    wq: WorkQueue,
    cq: CompletionQueue,
    inbox: Buffer,
}

impl Queue {
    fn new(pd: &ProtectionDomain) -> Self {
        let cq = pd.context().completion_queue(16).build().unwrap();
        let mut wq = pd.work_queue(&cq, 4).sges(2).build().unwrap();
        wq.ready().unwrap();
        Queue { wq, cq, inbox: pd.allocate(256).unwrap() }
    }

    fn receive(&mut self, wr_id: u64) -> Result<(), PostError> {
        let sge = rdma_safe::Sge { address: self.inbox.address() + 64 * wr_id, len: 64, lkey: self.inbox.lkey() };
        // SAFETY: the inbox is read only after the receives have completed.
        unsafe { self.wq.receive(wr_id, sge) }
    }
}

fn table(context: &Context, queues: &[&WorkQueue]) -> IndirectionTable {
    context.indirection_table(queues).unwrap()
}

fn rss(pd: &ProtectionDomain, table: &IndirectionTable) -> RssQueuePair {
    pd.rss_queue_pair(table, &KEY, RxHashFields::SRC_PORT_UDP).build().unwrap()
}

#[test]
fn packets_are_spread_over_work_queues_by_their_hash() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let mut queues = [Queue::new(&pd), Queue::new(&pd)];
    for queue in &mut queues {
        (0..3).for_each(|wr_id| queue.receive(wr_id).unwrap());
    }
    let table = table(pd.context(), &[&queues[0].wq, &queues[1].wq, &queues[0].wq, &queues[1].wq]);
    assert_eq!((table.len(), table.is_empty()), (4, false));
    let qp = rss(&pd, &table);
    assert_eq!((qp.qp_type(), qp.pd().is_same(&pd)), (QueuePairType::RAW_PACKET, true));
    let _flow = FlowRule::new(1).steer(&qp).unwrap();
    for (port, text) in [(1, b"one."), (2, b"two."), (5, b"five"), (4, b"four"), (3, b"3...")] {
        fake.packet(&frame(port, 9, text));
    }
    let texts = |queue: &Queue, count: usize| -> Vec<Vec<u8>> {
        (0..count).map(|index| queue.inbox[64 * index + 42..64 * index + 46].to_vec()).collect()
    };
    for (queue, expected) in queues.iter_mut().zip([&[b"two.", b"four"][..], &[b"one.", b"five", b"3..."]]) {
        let done = seen(&mut queue.cq);
        assert!(done.iter().all(|wc| (wc.byte_len, wc.status) == (Some(46), WcStatus::SUCCESS)), "{done:?}");
        assert!(done.iter().all(|wc| wc.qp_num == Some(queue.wq.number())));
        assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..expected.len() as u64).collect::<Vec<_>>());
        assert_eq!(texts(queue, expected.len()), expected.iter().map(|text| text.to_vec()).collect::<Vec<_>>());
    }
}

#[test]
fn a_work_queue_takes_receives_once_it_is_ready() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let mut queue = Queue::new(&pd);
    assert_eq!((queue.wq.state(), queue.wq.max_wr(), queue.wq.max_sge()), (WorkQueueState::RDY, 4, 2));
    queue.wq.modify(WorkQueueState::RESET).unwrap();
    let refused = PostError::WorkQueueNotReady { state: WorkQueueState::RESET };
    assert_eq!(queue.receive(0), Err(refused));
    assert_eq!(queue.wq.recv_batch().map(drop), Err(refused));
    assert_eq!(fake.calls("post_wq_recv"), 0);
    queue.wq.ready().unwrap();
    let sge = queue.inbox.sge();
    let mut batch = queue.wq.recv_batch().unwrap();
    // SAFETY: as in `receive`.
    unsafe {
        batch.receive(0, &[rdma_safe::Sge { len: 20, ..sge }, rdma_safe::Sge { len: 44, ..sge }]).unwrap();
        assert_eq!(batch.receive(1, &[sge; 3]), Err(PostError::TooManySges { count: 3, max: 2 }));
        batch.receive(1, &[]).unwrap();
    }
    batch.post().unwrap();
    assert_eq!(fake.calls("post_wq_recv"), 1);
    queue.receive(2).unwrap();
    queue.receive(3).unwrap();
    assert_eq!(queue.receive(3), Err(PostError::QueueFull { posted: 0 }));
    // Receives posted before and in the error state are flushed.
    queue.wq.modify(WorkQueueState::ERR).unwrap();
    queue.receive(3).unwrap();
    let done = seen(&mut queue.cq);
    assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3, 3]);
    assert!(done.iter().all(|wc| wc.status == WcStatus::WR_FLUSH_ERR));
    let error = queue.wq.ready().unwrap_err();
    assert!(
        matches!(error, Error::ModifyWorkQueue { from: WorkQueueState::ERR, to: WorkQueueState::RDY, .. }),
        "{error}"
    );
    assert_eq!(queue.wq.state(), WorkQueueState::ERR);
}

#[test]
fn a_work_queue_that_fails_is_named_by_its_event() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let events = pd.context().async_events().unwrap();
    let (mut queue, other) = (Queue::new(&pd), Queue::new(&pd));
    assert_ne!(queue.wq.id(), other.wq.id());
    queue.receive(0).unwrap();
    fake.break_wq(queue.wq.as_raw());
    let event = events.try_event().unwrap().unwrap();
    let source = AsyncSource::Wq { id: queue.wq.id(), number: queue.wq.number() };
    assert_eq!((event.event_type, event.source), (AsyncEventType::WQ_FATAL, source));
    assert_eq!(seen(&mut queue.cq)[0].status, WcStatus::WR_FLUSH_ERR);
    queue.wq.destroy().unwrap();
}

#[test]
fn flags_of_a_work_queue_are_set_and_changed() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let stripping = WorkQueueFlags::CVLAN_STRIPPING;
    let mut wq = pd.work_queue(&cq, 4).flags(stripping).build().unwrap();
    wq.set_flags(stripping, WorkQueueFlags::empty()).unwrap();
    let error = wq.set_flags(WorkQueueFlags::SCATTER_FCS, WorkQueueFlags::SCATTER_FCS).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let error = pd.work_queue(&cq, 5).flags(WorkQueueFlags::DELAY_DROP).build().unwrap_err();
    let delay = WorkQueueFlags::DELAY_DROP;
    assert!(
        matches!(error, Error::CreateWorkQueue { work_requests: 5, flags, max_queues: 8, .. } if flags == delay),
        "{error}"
    );
}

#[test]
fn work_queues_tables_and_queue_pairs_are_dropped_in_any_order() {
    let orders: [[usize; 5]; 6] =
        [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1, 2, 0, 3, 4], [3, 4, 1, 0, 2], [0, 2, 1, 4, 3]];
    for order in orders {
        let fake = Fake::new(Config::steering());
        let pd = fake.pd();
        let Queue { wq, cq, inbox } = Queue::new(&pd);
        drop(inbox);
        let table = table(pd.context(), &[&wq]);
        let qp = rss(&pd, &table);
        let flow = FlowRule::new(1).steer(&qp).unwrap();
        let live = Live { contexts: 1, pds: 1, cqs: 1, wqs: 1, tables: 1, qps: 1, flows: 1, ..Live::default() };
        assert_eq!(fake.live(), live);
        drop(pd);
        let objects: [Box<dyn Any>; 5] = [Box::new(wq), Box::new(cq), Box::new(table), Box::new(qp), Box::new(flow)];
        drop_in_order(&order, objects);
        assert_eq!(fake.live(), Live::default(), "{order:?}");
        assert_eq!(fake.take_violations(), [""; 0], "{order:?}");
    }
}

#[test]
fn a_work_queue_is_not_destroyed_while_a_table_has_it_or_this_thread_polls() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let Queue { wq, cq, .. } = Queue::new(&pd);
    let table = table(pd.context(), &[&wq]);
    let error = wq.destroy().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "work queue", users: "indirection tables" }), "{error}");
    assert_eq!(fake.live().wqs, 1);
    drop((table, cq));
    assert_eq!(fake.live().wqs, 0);

    let Queue { mut wq, mut cq, .. } = Queue::new(&pd);
    let mut queue = Queue::new(&pd);
    queue.wq.modify(WorkQueueState::ERR).unwrap();
    queue.receive(1).unwrap();
    let mut poll = queue.cq.poll();
    assert!(poll.next().unwrap().is_some());
    let error = queue.wq.modify(WorkQueueState::RESET).unwrap_err();
    assert!(matches!(error, Error::PollInProgress { verb: Verb::ModifyWq }), "{error}");
    let error = queue.wq.destroy().unwrap_err();
    assert!(matches!(error, Error::PollInProgress { verb: Verb::DestroyWq }), "{error}");
    assert_eq!(fake.live().wqs, 2);
    drop(poll);
    assert_eq!(fake.live().wqs, 1);
    // Polling an unrelated queue does not prevent the destruction.
    let mut poll = cq.poll();
    assert!(poll.next().unwrap().is_none());
    drop(queue.cq);
    drop(poll);
    wq.modify(WorkQueueState::RESET).unwrap();
    wq.destroy().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn an_object_that_cannot_be_destroyed_keeps_its_parents() {
    let all = Live { contexts: 1, pds: 1, cqs: 1, wqs: 1, ..Live::default() };
    for (verb, live) in [
        ("destroy_wq", all),
        ("destroy_rwq_ind_table", Live { tables: 1, ..all }),
        ("ibv_destroy_qp", Live { tables: 1, qps: 1, ..all }),
        ("destroy_flow", Live { tables: 1, qps: 1, flows: 1, ..all }),
    ] {
        let fake = Fake::new(Config::steering());
        fake.may_leak();
        let pd = fake.pd();
        let Queue { wq, cq, inbox } = Queue::new(&pd);
        let table = table(pd.context(), &[&wq]);
        let qp = rss(&pd, &table);
        let flow = FlowRule::new(1).steer(&qp).unwrap();
        fake.fail(verb, libc::EBUSY);
        drop((pd, wq, cq, inbox, table, qp, flow));
        assert_eq!(fake.live(), live, "{verb}");
        assert_eq!(fake.calls(verb), 1, "tried only once");
        assert_eq!(fake.take_violations(), [""; 0], "{verb}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn an_rss_queue_pair_reports_why_it_is_not_destroyed() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let queue = Queue::new(&pd);
    let table = table(pd.context(), &[&queue.wq]);
    rss(&pd, &table).destroy().unwrap();
    assert_eq!(fake.live().qps, 0);
    let qp = rss(&pd, &table);
    let flow = FlowRule::new(1).steer(&qp).unwrap();
    let error = qp.destroy().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "queue pair", users: "flows" }), "{error}");
    assert_eq!(fake.live().qps, 1);
    drop(flow);
    assert_eq!(fake.live().qps, 0);
    fake.may_leak();
    let qp = rss(&pd, &table);
    fake.fail("ibv_destroy_qp", libc::EBUSY);
    let error = qp.destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, errno: Errno(libc::EBUSY), .. }), "{error}");
    assert_eq!((fake.live().qps, fake.calls("ibv_destroy_qp")), (1, 3), "tried only once");
}

#[test]
fn the_size_of_a_table_is_a_power_of_two_within_the_device_limit() {
    let fake = Fake::new(Config::steering());
    let (pd, stranger) = (fake.pd(), fake.pd());
    let queue = Queue::new(&pd);
    for count in [0, 3, 16] {
        let error = pd.context().indirection_table(&vec![&queue.wq; count]).unwrap_err();
        assert!(matches!(error, Error::IndirectionTable { entries, max: 8, .. } if entries == count), "{error}");
    }
    let error = stranger.context().indirection_table(&[&queue.wq]).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "work queue" }), "{error}");
    let error = stranger.work_queue(&queue.cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "completion queue" }), "{error}");
    assert_eq!((fake.calls("create_rwq_ind_table"), fake.calls("create_wq")), (0, 1));
    assert_eq!(table(pd.context(), &[&queue.wq; 8]).len(), 8);
    fake.fail("create_rwq_ind_table", libc::ENOMEM);
    let error = pd.context().indirection_table(&[&queue.wq]).unwrap_err();
    assert!(matches!(error, Error::IndirectionTable { errno: Errno(libc::ENOMEM), .. }), "{error}");
}

#[test]
fn an_unsupported_hash_is_refused_before_the_call() {
    let fake = Fake::new(Config::steering());
    let (pd, stranger) = (fake.pd(), fake.pd());
    let queue = Queue::new(&pd);
    let table = table(pd.context(), &[&queue.wq]);
    let ports = RxHashFields::SRC_PORT_UDP;
    let long = [0; 256];
    for builder in [
        pd.rss_queue_pair(&table, &KEY, RxHashFields::IPSEC_SPI),
        pd.rss_queue_pair(&table, &KEY, ports).function(RxHashFunctions::from_bits_retain(4)),
        pd.rss_queue_pair(&table, &long, ports),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::RxHash { .. }), "{error}");
    }
    let error = pd.rss_queue_pair(&table, &KEY, ports).qp_type(QueuePairType::UD).build().unwrap_err();
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::UD, .. }), "{error}");
    let error = stranger.rss_queue_pair(&table, &KEY, ports).build().unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "indirection table" }), "{error}");
    assert_eq!(fake.calls("create_qp_ex"), 0);
    let error = pd.rss_queue_pair(&table, &KEY[..16], ports).build().unwrap_err();
    assert!(matches!(error, Error::RxHash { key: 16, errno: Errno(libc::EINVAL), .. }), "{error}");
    let mut qp = pd.rss_queue_pair(&table, &KEY, ports).build().unwrap();
    let error = qp.modify(&QueuePairAttributes::new()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(pd.rss_queue_pair(&table, &KEY, RxHashFields::empty()).build().is_ok());
}

#[test]
fn unsupported_work_queues_are_refused_by_name() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let error = pd.work_queue(&cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "work queues", .. }), "{error}");
    let error = pd.context().indirection_table(&[]).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "receive-side scaling", .. }), "{error}");

    // A work queue without a posting function is unusable, so it is destroyed again.
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    fake.fail("post_wq_recv", 0);
    let error = pd.work_queue(&cq, 4).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "work queues", .. }), "{error}");
    assert_eq!((fake.calls("create_wq"), fake.calls("destroy_wq")), (1, 1));
}

#[test]
fn adopted_work_queues_and_tables_are_destroyed_once() {
    use rdma_safe::sys::*;
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let context = pd.context();
    let cq = context.completion_queue(4).build().unwrap();
    // SAFETY: follows the manual pages; each object is adopted right after its creation.
    unsafe {
        let mut attr = ibv_wq_init_attr { max_wr: 4, max_sge: 1, pd: pd.as_raw(), ..ibv_wq_init_attr::zeroed() };
        attr.cq = cq.as_raw();
        let raw = NonNull::new(ibv_create_wq(context.as_raw(), &mut attr)).unwrap();
        let mut wq = WorkQueue::from_raw(&pd, &cq, raw, 4, 1);
        assert_eq!((wq.as_raw(), wq.state()), (raw.as_ptr(), WorkQueueState::RESET));
        wq.ready().unwrap();
        wq.receive(1, rdma_safe::Sge::EMPTY).unwrap();
        let mut attr =
            ibv_rwq_ind_table_init_attr { ind_tbl: &mut wq.as_raw(), ..ibv_rwq_ind_table_init_attr::zeroed() };
        let raw = NonNull::new(ibv_create_rwq_ind_table(context.as_raw(), &mut attr)).unwrap();
        let table = IndirectionTable::from_raw(context, raw, &[&wq]);
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.comp_mask = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH).0;
        (attr.pd, attr.qp_type, attr.rwq_ind_tbl) = (pd.as_raw(), IBV_QPT_RAW_PACKET, table.as_raw());
        let mut key = KEY;
        attr.rx_hash_conf.rx_hash_key_len = 40;
        attr.rx_hash_conf.rx_hash_key = key.as_mut_ptr();
        let raw = NonNull::new(ibv_create_qp_ex(context.as_raw(), &mut attr)).unwrap();
        let qp = RssQueuePair::from_raw(&pd, &table, raw);
        assert_eq!((qp.as_raw(), qp.qp_type()), (raw.as_ptr(), QueuePairType::RAW_PACKET));
        drop(wq);
        drop(table);
        assert_eq!((fake.live().wqs, fake.live().tables, fake.live().qps), (1, 1, 1));
    }
    assert_eq!((fake.live().wqs, fake.live().tables, fake.live().qps), (0, 0, 0));
}
