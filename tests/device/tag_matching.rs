//! Tag matching, which SoftRoCE and soft0 lack.

use rdma_safe::srq::TagListSize;
use rdma_safe::{Error, WcFields};

use crate::support::{device, error_of};

#[test]
fn a_device_without_tag_matching_refuses_it_by_name() {
    let Some(rdma) = device() else { return };
    let caps = rdma.attributes().tag_matching();
    let lacks = rdma.is_rxe() || rdma.is_soft();
    assert!(!(lacks && caps.is_some()), "{} now matches tags: {caps:?}", rdma.device_name());
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    let size = TagListSize { tags: 1, ops: 1 };
    if let Some(caps) = caps {
        let mut srq = pd.tag_matching_queue(&cq, 4, size).build().unwrap();
        assert!(srq.tag_list().is_some());
        let asked = TagListSize { tags: caps.max_tags + 1, ..size };
        assert!(matches!(error_of(pd.tag_matching_queue(&cq, 4, asked).build()), Error::TagList { .. }));
        return;
    }
    let error = error_of(pd.tag_matching_queue(&cq, 4, size).build());
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("matching of tags")), "{error}");
    let error = error_of(rdma.completion_queue(4).fields(WcFields::STANDARD | WcFields::TM_INFO).build());
    assert!(matches!(error, Error::CompletionFields { fields: WcFields::TM_INFO }), "{error}");
}
