//! Raw packets and options of creation, which SoftRoCE does not have.

use rdma_safe::{Error, QueuePairFlags, QueuePairState, QueuePairType};

use crate::support::{device, error_of};

#[test]
fn raw_packet_queue_pairs_are_made_or_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    for classic in [false, true] {
        match pd.queue_pair(&cq, &cq).qp_type(QueuePairType::RAW_PACKET).classic(classic).build() {
            Ok(mut qp) => {
                assert!(!rdma.is_rxe(), "SoftRoCE now has raw packets");
                qp.init_packets(rdma.port).unwrap();
                assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::RTS));
            }
            Err(Error::Unsupported { device, feature }) => {
                assert_eq!((device.as_str(), feature), (rdma.device_name(), "raw packet queue pairs"));
            }
            // Who is not privileged is told so by the kernel, before it looks at the type.
            Err(error) => assert!(error.to_string().contains("CAP_NET_RAW"), "{error:?}"),
        }
    }
}

#[test]
fn options_that_the_device_does_not_report_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    for flag in [QueuePairFlags::SCATTER_FCS, QueuePairFlags::CVLAN_STRIPPING, QueuePairFlags::PCI_WRITE_END_PADDING] {
        let result = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).flags(flag).build();
        if rdma.is_rxe() {
            let error = error_of(result);
            assert!(matches!(error, Error::Unsupported { .. }), "{flag:?}: {error:?}");
        }
    }
    // It reports nothing about this one, so the provider is asked.
    let result = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).flags(QueuePairFlags::BLOCK_SELF_MULTICAST).build();
    if rdma.is_rxe() {
        let error = error_of(result);
        assert!(
            matches!(error, Error::Unsupported { feature, .. } if feature.contains("ibv_create_qp_ex")),
            "{error:?}"
        );
    }
}
