//! Creation of objects: supported sizes and types, and the attributes that the objects report.

use std::collections::BTreeSet;

use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{Error, QueuePairState, QueuePairType, WcFields};

use crate::support::lab::{Mode, cq_builder};
use crate::support::link::{Link, PSN};
use crate::support::{device, error_of};

#[test]
fn many_domains_exist_at_once_and_differ() {
    let Some(rdma) = device() else { return };
    let domains: Vec<_> = (0..100).map(|_| rdma.pd()).collect();
    // SAFETY: the domains exist, and the field does not change.
    let handles: BTreeSet<u32> = domains.iter().map(|pd| unsafe { (*pd.as_raw()).handle }).collect();
    assert_eq!(handles.len(), domains.len());
    assert!(!domains[0].is_same(&domains[1]));
}

#[test]
fn queue_pairs_of_every_type_have_the_requested_capacity() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for mode in Mode::each() {
        let cq = cq_builder(&rdma, 64, mode).build().unwrap();
        for qp_type in [QueuePairType::RC, QueuePairType::UC, QueuePairType::UD] {
            let builder = pd.queue_pair(&cq, &cq).qp_type(qp_type).classic(mode.classic_qp);
            let builder = builder.send_depth(17).recv_depth(9).send_sges(3).recv_sges(2).inline_data(40);
            let mut qp = builder.build().unwrap();
            assert_eq!((qp.qp_type(), qp.state()), (qp_type, QueuePairState::RESET), "{mode}");
            let granted = qp.capacity();
            // Providers that miscount lists support only one element with the extended interface, so rdma-safe falls back to
            // ibv_post_send.
            assert!(granted.max_send_wr >= 17 && granted.max_recv_wr >= 9, "{mode}: {granted:?}");
            assert!(granted.max_send_sge >= 3 && granted.max_recv_sge >= 2, "{mode}: {granted:?}");
            assert!(granted.max_inline_data >= 40, "{mode}: {granted:?}");
            let queried = qp.query().unwrap();
            let cap = queried.as_raw().cap;
            assert_eq!(queried.state(), Some(QueuePairState::RESET), "{mode}");
            assert!(cap.max_send_wr >= 17 && cap.max_recv_wr >= 9, "{mode}: {cap:?}");
            // SAFETY: the queue pair exists, and the fields do not change.
            let (number, raw_type) = unsafe { ((*qp.as_raw()).qp_num, (*qp.as_raw()).qp_type) };
            assert_eq!((number, raw_type.0), (qp.number(), qp_type.0), "{mode}");
            let init = QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(rdma.port).set_pkey_index(0);
            let init = match qp_type {
                QueuePairType::UD => init.set_qkey(0x111),
                _ => init.set_access(Link::default().access),
            };
            qp.modify(&init).unwrap();
            assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::INIT), "{mode}: {qp_type}");
        }
    }
}

#[test]
fn a_datagram_queue_pair_returns_its_queue_key_and_packet_number() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for mode in Mode::each() {
        let cq = cq_builder(&rdma, 64, mode).build().unwrap();
        let mut qp = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).classic(mode.classic_qp).build().unwrap();
        let new = QueuePairAttributes::new;
        let init = new().set_state(QueuePairState::INIT).set_port(rdma.port).set_pkey_index(0).set_qkey(0x0012_3456);
        qp.modify(&init).unwrap();
        assert_eq!(qp.query().unwrap().qkey(), Some(0x0012_3456), "{mode}");
        qp.modify(&new().set_state(QueuePairState::RTR)).unwrap();
        qp.modify(&new().set_state(QueuePairState::RTS).set_sq_psn(PSN)).unwrap();
        let queried = qp.query().unwrap();
        assert_eq!((queried.state(), queried.sq_psn()), (Some(QueuePairState::RTS), Some(PSN)), "{mode}");
        qp.modify(&new().set_qkey(0x0065_4321)).unwrap();
        assert_eq!(qp.query().unwrap().qkey(), Some(0x0065_4321), "{mode}: it can be changed in RTS");
    }
}

#[test]
fn at_least_the_requested_reads_and_atomics_may_be_in_flight() {
    let Some(rdma) = device() else { return };
    let (pd, most) = (rdma.pd(), rdma.attributes().max_qp_rd_atom().min(rdma.attributes().max_qp_init_rd_atom()));
    let cq = rdma.completion_queue(8).build().unwrap();
    for asked in [1, 2, 3, 5, 8, 16].into_iter().filter(|asked| i64::from(*asked) <= i64::from(most)) {
        let mut qp = pd.queue_pair(&cq, &cq).build().unwrap();
        let number = qp.number();
        Link { rd_atomic: asked, ..Link::default() }.connect(&rdma, &mut qp, number).unwrap();
        let queried = qp.query().unwrap();
        for granted in [queried.max_rd_atomic(), queried.max_dest_rd_atomic()] {
            assert!(granted.is_some_and(|granted| granted >= asked), "{granted:?} of {asked}");
        }
    }
}

#[test]
fn completion_queues_on_any_vector_have_the_requested_capacity() {
    let Some(rdma) = device() else { return };
    let (channel, max) = (rdma.create_channel().unwrap(), rdma.attributes().max_cqe());
    for mode in [Mode::EXTENDED, Mode::ALL[1]] {
        for vector in 0..rdma.completion_vectors() {
            for entries in [1, 2, 7, 64, 1000, max / 2] {
                let cq = cq_builder(&rdma, entries, mode).vector(vector).build().unwrap();
                assert!(cq.capacity() >= entries && cq.channel().is_none(), "{mode}: {} of {entries}", cq.capacity());
                let cq = cq_builder(&rdma, entries, mode).vector(vector).channel(&channel).build().unwrap();
                assert!(cq.capacity() >= entries && cq.channel().is_some(), "{mode}: {} of {entries}", cq.capacity());
            }
        }
    }
}

#[test]
fn every_field_can_be_asked_for_alone_or_is_refused_by_name() {
    let Some(rdma) = device() else { return };
    for field in WcFields::all().iter().chain([WcFields::from_bits_retain(1 << 40)]) {
        match rdma.completion_queue(8).fields(field).build() {
            Ok(cq) => {
                assert_eq!(cq.fields(), field);
                assert!(!rdma.is_rxe() || WcFields::STANDARD.contains(field), "SoftRoCE has no {field:?}");
                assert!(WcFields::all().contains(field), "no provider knows {field:?}");
            }
            Err(Error::CompletionFields { fields }) => {
                assert_eq!(fields, field);
                assert!(!WcFields::STANDARD.contains(field), "every device has {field:?}");
            }
            Err(error) => panic!("{field:?}: {error}"),
        }
    }
}

#[test]
fn a_queue_pair_of_another_type_is_refused_before_the_device_is_asked() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let cq = rdma.completion_queue(8).build().unwrap();
    let error = error_of(pd.queue_pair(&cq, &cq).qp_type(QueuePairType::DRIVER).build());
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::DRIVER, .. }), "{error}");
}
