//! Operations that soft0 lacks: atomic write, flush, TCP segmentation.

use rdma_safe::address::Grh;
use rdma_safe::mr::Pages;
use rdma_safe::post::{FlushPlacement, FlushRange, Segments};
use rdma_safe::sys::*;
use rdma_safe::{
    Access, ConnectOptions, Error, InitOptions, Inline, PostError, QueuePairType, Remote, SendOps, Sge, UdTarget,
    WcFields, WcOpcode, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, Flush};
use crate::support::{
    CLASSIC, EXTENDED, Raw, init, on_each_interface, post, raw_with, receive, rtr, rts, seen, to_rts,
};

/// A device that reports all of them, and a library that supports them.
fn config() -> Config {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        attr.device_cap_flags_ex |= 0b111 << 38;
        attr.tso_caps =
            ibv_tso_caps { max_tso: 1 << 16, supported_qpts: 1 << IBV_QPT_UD.0 | 1 << IBV_QPT_RAW_PACKET.0 };
    };
    Config { change_device, send_ops: 0x1fff, ..Config::default() }
}

fn pair(fake: &Fake, peer_access: Access) -> (Raw, Raw) {
    let pd = fake.pd();
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    for attributes in [init().set_access(peer_access), rtr(a.qp.number()), rts()] {
        b.qp.modify(&attributes).unwrap();
    }
    (a, b)
}

/// Identifiers, statuses and opcodes of the completions.
fn completions(raw: &mut Raw) -> Vec<(u64, WcStatus, WcOpcode)> {
    seen(&mut raw.cq).iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect()
}

#[test]
fn an_atomic_write_writes_exactly_eight_bytes() {
    let fake = Fake::new(config());
    let (mut a, b) = pair(&fake, Access::REMOTE);
    assert!(a.qp.operations().contains(SendOps::ATOMIC_WRITE | SendOps::FLUSH), "all operations of the device");
    let exposed = b.qp.pd().expose(Pages::new(24).unwrap(), Access::REMOTE_WRITE).unwrap();
    let at = |offset| Remote { address: exposed.remote().address + offset, rkey: exposed.remote().rkey };
    fake.take_posted();
    post!(a,
        atomic_write(WorkRequest::new(1).signaled(), at(8), *b"01234567");
        write(WorkRequest::new(2), at(0), Inline(b"x"));
    )
    .unwrap();
    assert_eq!(completions(&mut a), [(1, WcStatus::SUCCESS, WcOpcode::ATOMIC_WRITE)]);
    let mut bytes = [0; 24];
    exposed.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"x\0\0\0\0\0\0\x0001234567\0\0\0\0\0\0\0\0");
    let posted: Vec<_> = fake.take_posted().iter().map(|posted| (posted.opcode.0, posted.setter)).collect();
    assert_eq!(posted, [(IBV_WR_ATOMIC_WRITE.0, "nothing"), (IBV_WR_RDMA_WRITE.0, "inline_data")]);
    let mut batch = a.qp.send_batch().unwrap();
    // SAFETY: nothing is posted.
    let refused = unsafe { batch.atomic_write(WorkRequest::new(3), at(4), [0; 8]) };
    assert_eq!((refused, batch.len()), (Err(PostError::AtomicOperand), 0));
}

#[test]
fn an_atomic_write_needs_the_remote_write_right() {
    let fake = Fake::new(config());
    let (mut a, b) = pair(&fake, Access::REMOTE_READ);
    let exposed = b.qp.pd().expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
    post!(a, atomic_write(WorkRequest::new(1), exposed.remote(), [1; 8]);).unwrap();
    assert_eq!(completions(&mut a)[0].1, WcStatus::REM_ACCESS_ERR);
}

#[test]
fn a_flush_has_its_range_and_placement() {
    let fake = Fake::new(config());
    let (mut a, b) = pair(&fake, Access::REMOTE | Access::FLUSH);
    let exposed = b.qp.pd().expose(Pages::new(64).unwrap(), Access::REMOTE_WRITE | Access::FLUSH).unwrap();
    let remote = exposed.remote();
    let mut batch = a.qp.send_batch().unwrap();
    let both = FlushPlacement::GLOBAL | FlushPlacement::PERSISTENT;
    batch.flush(WorkRequest::new(1).signaled(), remote, 16, FlushPlacement::GLOBAL, FlushRange::RANGE).unwrap();
    batch.flush(WorkRequest::new(2).signaled(), remote, 0, both, FlushRange::REGION).unwrap();
    batch.post().unwrap();
    let flushed = |wr_id| (wr_id, WcStatus::SUCCESS, WcOpcode::FLUSH);
    assert_eq!(completions(&mut a), [flushed(1), flushed(2)]);
    let address = remote.address;
    let expected =
        [Flush { address, len: 16, placement: 1, level: 0 }, Flush { address, len: 0, placement: 3, level: 1 }];
    assert_eq!(fake.take_flushes(), expected);
}

#[test]
fn a_flush_needs_the_right_of_the_region_and_of_the_queue_pair() {
    for (of_queue_pair, of_region) in
        [(Access::FLUSH, Access::FLUSH_PERSISTENT), (Access::FLUSH_PERSISTENT, Access::FLUSH)]
    {
        let fake = Fake::new(config());
        let (mut a, b) = pair(&fake, Access::REMOTE | of_queue_pair);
        let exposed = b.qp.pd().expose(Pages::new(64).unwrap(), Access::REMOTE_WRITE | of_region).unwrap();
        let flush = |a: &mut Raw, placement| {
            let mut batch = a.qp.send_batch().unwrap();
            batch.flush(WorkRequest::new(1).signaled(), exposed.remote(), 8, placement, FlushRange::RANGE).unwrap();
            batch.post().unwrap();
            completions(a)[0].1
        };
        assert_eq!(flush(&mut a, FlushPlacement::PERSISTENT), WcStatus::SUCCESS);
        assert_eq!(flush(&mut a, FlushPlacement::GLOBAL), WcStatus::REM_ACCESS_ERR);
        assert_eq!(fake.take_flushes().len(), 1);
    }
}

#[test]
fn init_keeps_only_the_remote_and_flush_rights() {
    let fake = Fake::new(config());
    let mut raw = raw_with(&fake.pd(), EXTENDED, WcFields::STANDARD, |qp| qp);
    raw.qp.init(&InitOptions::default().peer_access(Access::FLUSH | Access::LOCAL_WRITE)).unwrap();
    assert_eq!(fake.take_modified()[0].0.qp_access_flags, Access::FLUSH.bits());
}

#[test]
fn operations_that_only_the_provider_accepts_are_refused_without_a_call() {
    let fake = Fake::new(Config { send_ops: 0x1fff, ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(8).build().unwrap();
    for op in [SendOps::ATOMIC_WRITE, SendOps::FLUSH, SendOps::TSO] {
        let error = pd.queue_pair(&cq, &cq).operations(SendOps::SEND | op).build().unwrap_err();
        assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == op), "{error}");
    }
    assert_eq!(fake.calls("create_qp_ex") + fake.calls("ibv_create_qp"), 0);
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    assert_eq!(qp.operations(), SendOps::RC | SendOps::WINDOWS);
}

#[test]
fn operations_that_the_library_lacks_are_not_enabled() {
    // The library refuses a set that contains unknown operations.
    let fake = Fake::new(Config { send_ops: 0x3ff, ..config() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(8).build().unwrap();
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    assert_eq!((qp.operations(), qp.is_extended()), (SendOps::RC | SendOps::WINDOWS, true));
    let error = pd.queue_pair(&cq, &cq).operations(SendOps::ATOMIC_WRITE).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::ATOMIC_WRITE }), "{error}");
    assert_eq!(fake.live().qps, 1);
}

#[test]
fn operations_without_a_function_are_not_enabled() {
    let hollow_ops = (SendOps::ATOMIC_WRITE | SendOps::FLUSH).bits();
    let fake = Fake::new(Config { hollow_ops, ..config() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(8).build().unwrap();
    assert_eq!(pd.queue_pair(&cq, &cq).build().unwrap().operations(), SendOps::RC | SendOps::WINDOWS);
    let error = pd.queue_pair(&cq, &cq).operations(SendOps::FLUSH).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::FLUSH }), "{error}");
}

#[test]
fn operations_that_post_send_lacks_are_refused_on_classic_queue_pairs() {
    let fake = Fake::new(config());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, CLASSIC, WcFields::STANDARD, |qp| qp);
    assert_eq!(raw.qp.operations(), SendOps::RC | SendOps::WINDOWS);
    to_rts(&mut raw.qp, 1);
    let remote = Remote { address: 0, rkey: 1 };
    let mut batch = raw.qp.send_batch().unwrap();
    let flush = batch.flush(WorkRequest::new(1), remote, 8, FlushPlacement::GLOBAL, FlushRange::RANGE);
    assert_eq!(flush, Err(PostError::NotEnabled { op: SendOps::FLUSH }));
    // SAFETY: nothing is posted.
    let write = unsafe { batch.atomic_write(WorkRequest::new(1), remote, [0; 8]) };
    assert_eq!(write, Err(PostError::NotEnabled { op: SendOps::ATOMIC_WRITE }));
    assert!(batch.is_empty());
    drop(batch);
    let cq = pd.context().completion_queue(8).build().unwrap();
    let error = pd.queue_pair(&cq, &cq).classic(true).operations(SendOps::FLUSH).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::FLUSH }), "{error}");
}

#[test]
fn a_stream_is_cut_into_segments_with_headers() {
    on_each_interface(|_, interfaces| {
        let fake = Fake::new(config());
        let pd = fake.pd();
        let make = || {
            let mut raw = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| {
                qp.qp_type(QueuePairType::UD).tso_header(8).send_sges(2)
            });
            let address = raw.qp.init_datagrams(5, &InitOptions::default()).unwrap();
            (raw, address)
        };
        let ((mut a, _), (mut b, to)) = (make(), make());
        assert_eq!(a.qp.operations(), SendOps::UD | SendOps::TSO);
        let handle = pd.address_handle(&a.qp.address_of(&to, &ConnectOptions::default()).unwrap()).unwrap();
        let inboxes: Vec<_> = (0..4).map(|_| pd.allocate(Grh::LEN + 12).unwrap()).collect();
        for (wr_id, inbox) in (0..).zip(&inboxes) {
            receive!(b, wr_id, inbox.sge()).unwrap();
        }
        let mut stream = pd.allocate(10).unwrap();
        stream.copy_from_slice(b"0123456789");
        let part = |offset: u64, len| Sge { address: stream.address() + offset, len, lkey: stream.lkey() };
        let segments = Segments { header: b"head", mss: 4 };
        let target = UdTarget::new(&handle, to.qp_num, 5);
        post!(a, send_tso_to(WorkRequest::new(9).signaled(), target, segments, &[part(0, 5), part(5, 5)][..]);)
            .unwrap();
        assert_eq!(completions(&mut a), [(9, WcStatus::SUCCESS, WcOpcode::TSO)]);
        let lengths: Vec<_> = seen(&mut b.cq).iter().map(|wc| wc.byte_len.unwrap() as usize - Grh::LEN).collect();
        assert_eq!(lengths, [8, 8, 6]);
        let packets: Vec<_> = inboxes.iter().map(|inbox| &inbox[Grh::LEN..]).collect();
        assert_eq!(packets, [b"head0123\0\0\0\0", b"head4567\0\0\0\0", b"head89\0\0\0\0\0\0", &[0; 12]]);

        let mut batch = a.qp.send_batch().unwrap();
        let long = Segments { header: b"nine byte", mss: 4 };
        // SAFETY: nothing is posted.
        unsafe {
            let refused = batch.send_tso_to(WorkRequest::new(1), target, long, stream.sge());
            assert_eq!(refused, Err(PostError::HeaderTooLong { len: 9, max: 8 }));
            assert_eq!(batch.send_tso(WorkRequest::new(1), segments, stream.sge()), Err(PostError::NoDestination));
        }
        drop(batch);
        // One receive is still posted.
        drop(b);
    });
}
