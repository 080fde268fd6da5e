//! Memory functions that are newer than rdma-core 56.

use rdma_safe::dmah::ProcessingHint;
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Error};

use crate::support::{device, error_of};

#[test]
fn newer_memory_functions_work_or_name_the_required_release() {
    let Some(rdma) = device() else { return };
    let (pd, verbs) = (rdma.pd(), rdma_safe::sys::verbs().unwrap());
    let refused = |error: Error, release: &str| {
        assert!(matches!(&error, Error::Unsupported { feature, .. } if feature.contains(release)), "{error:?}");
        assert!(error.to_string().contains(rdma.device_name()), "{error}");
    };
    match rdma.dma_handle().hint(ProcessingHint::TARGET).build() {
        Ok(handle) => {
            assert!(!rdma.is_rxe(), "SoftRoCE has no processing hints");
            let hinted = pd.registration(Access::empty()).dma_handle(&handle).register(Pages::new(4096).unwrap());
            assert_eq!(hinted.unwrap().len(), 4096);
        }
        Err(error) => refused(error, "rdma-core 59"),
    }
    // A library with this function implements it for all providers.
    match verbs.ibv_alloc_buf {
        Some(_) => {
            let buffer = pd.register(pd.alloc_buf(4096).unwrap()).unwrap();
            assert_eq!(&buffer[..], &[0; 4096][..]);
            let region = pd.expose(pd.alloc_buf(4096).unwrap(), Access::REMOTE_READ).unwrap();
            assert_eq!((region.len(), region.remote().len), (4096, 4096));
        }
        None => refused(error_of(pd.alloc_buf(4096)), "rdma-core 64"),
    }
}
