//! Queue pairs of raw packets, which soft0 lacks, and options of creation.

use rdma_safe::post::Segments;
use rdma_safe::qp::QueuePairFlags;
use rdma_safe::sys::*;
use rdma_safe::{
    ConnectOptions, Errno, Error, InitOptions, Inline, PostError, QueuePairState, QueuePairType, SendFlags, SendOps,
    Sge, WcFields, WcOpcode, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake};
use crate::support::{EXTENDED, Raw, on_each_interface, post, raw_with, receive, seen};

/// A device that supports all options.
fn config() -> Config {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        attr.tso_caps = ibv_tso_caps { max_tso: 1 << 16, supported_qpts: 1 << IBV_QPT_RAW_PACKET.0 };
        attr.raw_packet_caps = (IBV_RAW_PACKET_CAP_CVLAN_STRIPPING | IBV_RAW_PACKET_CAP_SCATTER_FCS).0;
        attr.device_cap_flags_ex |= IBV_DEVICE_PCI_WRITE_END_PADDING;
    };
    Config { change_device, send_ops: 0x7ff, ..Config::default() }
}

fn completions(raw: &mut Raw) -> Vec<(u64, WcStatus, WcOpcode, u32)> {
    seen(&mut raw.cq).iter().map(|wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len.unwrap())).collect()
}

#[test]
fn a_frame_arrives_unchanged() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let make = || {
            let mut raw = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::RAW_PACKET));
            raw.qp.init_packets(1).unwrap();
            assert_eq!((raw.qp.state(), raw.qp.operations()), (QueuePairState::RTS, SendOps::RAW_PACKET));
            raw
        };
        let (mut a, mut b) = (make(), make());
        let masks: Vec<_> = fake.take_modified().iter().map(|(_, mask)| *mask).collect();
        assert_eq!(masks, [0x21, 1, 1, 0x21, 1, 1]);
        let inbox = pd.allocate(64).unwrap();
        receive!(b, 7, inbox.sge()).unwrap();
        let mut frame = pd.allocate(18).unwrap();
        frame.copy_from_slice(b"to----from--\x88\xb5data");
        fake.take_posted();
        let checksums = WorkRequest::new(1).signaled().with_flags(SendFlags::IP_CSUM);
        post!(a, send(checksums, frame.sge()); send(WorkRequest::new(2), Inline(b"no receive"));).unwrap();
        assert_eq!(completions(&mut a), [(1, WcStatus::SUCCESS, WcOpcode::SEND, 18)]);
        assert_eq!(completions(&mut b), [(7, WcStatus::SUCCESS, WcOpcode::RECV, 18)]);
        assert_eq!(&inbox[..21], b"to----from--\x88\xb5data\0\0\0");
        assert_eq!(fake.take_posted()[0].flags, IBV_SEND_IP_CSUM.0 | IBV_SEND_SIGNALED.0);

        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            let refused = batch.send_imm(WorkRequest::new(1), 1, Sge::EMPTY);
            assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::SEND_WITH_IMM }));
            let refused = batch.to_srq(1).send(WorkRequest::new(1), Sge::EMPTY);
            assert_eq!(refused, Err(PostError::NotXrc));
        }
    });
}

#[test]
fn a_stream_is_cut_into_frames() {
    on_each_interface(|_, interfaces| {
        let fake = Fake::new(config());
        let pd = fake.pd();
        let make = || {
            let mut raw = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| {
                qp.qp_type(QueuePairType::RAW_PACKET).tso_header(16)
            });
            raw.qp.init_packets(1).unwrap();
            raw
        };
        let (mut a, mut b) = (make(), make());
        let inboxes = [pd.allocate(16).unwrap(), pd.allocate(16).unwrap()];
        for (wr_id, inbox) in (0..).zip(&inboxes) {
            receive!(b, wr_id, inbox.sge()).unwrap();
        }
        let mut stream = pd.allocate(6).unwrap();
        stream.copy_from_slice(b"stream");
        let segments = Segments { header: b"headers", mss: 5 };
        post!(a, send_tso(WorkRequest::new(1).signaled(), segments, stream.sge());).unwrap();
        assert_eq!(completions(&mut a), [(1, WcStatus::SUCCESS, WcOpcode::TSO, 6)]);
        assert_eq!((&inboxes[0][..12], &inboxes[1][..8]), (&b"headersstrea"[..], &b"headersm"[..]));
        assert_eq!(completions(&mut b).len(), 2);
    });
}

#[test]
fn options_reach_the_provider_with_and_without_the_extended_interface() {
    for classic in [false, true] {
        let fake = Fake::new(config());
        let pd = fake.pd();
        let cq = pd.context().completion_queue(8).build().unwrap();
        let builder = || pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).classic(classic);
        let all = QueuePairFlags::all();
        let qp = builder().flags(all).source_qpn(0x1234).build().unwrap();
        assert_eq!(qp.is_extended(), !classic);
        drop(builder().flags(QueuePairFlags::BLOCK_SELF_MULTICAST).build().unwrap());
        let flags = fake.take_create_flags();
        assert_eq!(flags, [(all.bits() | IBV_QP_CREATE_SOURCE_QPN.0, 0x1234), (2, 0)]);
        drop(builder().build().unwrap());
        assert_eq!(fake.take_create_flags(), []);
        assert_eq!((fake.calls("create_qp_ex"), fake.calls("ibv_create_qp")), if classic { (2, 1) } else { (3, 0) });
    }
}

#[test]
fn a_missing_right_to_send_raw_packets_is_named() {
    for (verb, classic) in [("create_qp_ex", false), ("ibv_create_qp", true)] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let cq = pd.context().completion_queue(8).build().unwrap();
        fake.fail(verb, libc::EPERM);
        let error = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::RAW_PACKET).classic(classic).build().unwrap_err();
        let Error::CreateQueuePair { qp_type: QueuePairType::RAW_PACKET, errno: Errno(libc::EPERM), .. } = error else {
            panic!("{error:?}")
        };
        assert!(error.to_string().contains("CAP_NET_RAW"), "{error}");
    }
}

#[test]
fn raw_packet_queue_pairs_have_no_peer() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::RAW_PACKET));
    let mut connected = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let address = connected.qp.init(&InitOptions::default()).unwrap();
    for error in [
        raw.qp.init(&InitOptions::default()).unwrap_err(),
        raw.qp.init_datagrams(1, &InitOptions::default()).unwrap_err(),
        raw.qp.connect(&address, &ConnectOptions::default()).unwrap_err(),
    ] {
        assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RAW_PACKET, .. }), "{error}");
    }
    let error = raw.qp.init_packets(9).unwrap_err();
    assert!(matches!(error, Error::Modify(_)), "{error}");
}
