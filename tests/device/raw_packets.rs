//! Raw packets and options of creation, which SoftRoCE and soft0 lack.

use rdma_safe::qp::QueuePairFlags;
use rdma_safe::{Error, QueuePairState, QueuePairType};

use crate::support::{device, error_of};

#[test]
fn raw_packet_queue_pairs_are_created_or_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    for classic in [false, true] {
        match pd.queue_pair(&cq, &cq).qp_type(QueuePairType::RAW_PACKET).classic(classic).build() {
            Ok(mut qp) => {
                assert!(!rdma.is_rxe() && !rdma.is_soft(), "{} now supports raw packets", rdma.device_name());
                qp.init_packets(rdma.port).unwrap();
                assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::RTS));
            }
            Err(Error::Unsupported { device, feature }) => {
                assert_eq!((device.as_str(), feature), (rdma.device_name(), "raw packet queue pairs"));
            }
            // The kernel checks the privilege before the type.
            Err(error) => assert!(!rdma.is_soft() && error.to_string().contains("CAP_NET_RAW"), "{error:?}"),
        }
    }
}

#[test]
fn options_that_the_device_does_not_report_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    let lacks_all = rdma.is_rxe() || rdma.is_soft();
    for (flag, name) in [
        (QueuePairFlags::SCATTER_FCS, "receiving frame check sequences"),
        (QueuePairFlags::CVLAN_STRIPPING, "stripping VLAN tags"),
        (QueuePairFlags::PCI_WRITE_END_PADDING, "padding of PCI writes"),
    ] {
        let result = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).flags(flag).build();
        if lacks_all {
            let error = error_of(result);
            assert!(matches!(error, Error::Unsupported { feature, .. } if feature == name), "{flag:?}: {error:?}");
        }
    }
    // A device does not report this option, so the provider is asked.
    let result = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).flags(QueuePairFlags::BLOCK_SELF_MULTICAST).build();
    if lacks_all {
        let error = error_of(result);
        assert!(
            matches!(error, Error::Unsupported { feature, .. } if feature.contains("ibv_create_qp_ex")),
            "{error:?}"
        );
    }
}

#[test]
fn init_packets_needs_a_queue_pair_of_raw_packets() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    let mut connected = pd.queue_pair(&cq, &cq).build().unwrap();
    let error = error_of(connected.init_packets(rdma.port));
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RC, .. }), "{error}");
}
