//! Contexts, domains and regions that processes share by a descriptor, which SoftRoCE cannot.

use rdma_safe::{Access, Context, Error, Pages};

use crate::support::device;

#[test]
fn a_context_is_shared_by_its_descriptor_or_refused_by_name() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE_READ).unwrap();
    let fd = match pd.context().command_fd() {
        Ok(fd) => fd.try_clone_to_owned().unwrap(),
        Err(Error::Unsupported { device, feature }) => {
            assert!(rdma.is_soft() && device == rdma.device_name() && feature.contains("descriptor"), "{feature}");
            return;
        }
        Err(error) => panic!("{error:?}"),
    };
    // SAFETY: this test is all who hold the descriptor, and what it imports goes before what it has made.
    match unsafe { Context::import(fd) } {
        Ok(context) => {
            assert!(!rdma.is_rxe(), "SoftRoCE cannot import a context");
            assert_eq!(context.device_name(), rdma.device_name());
            // SAFETY: as above.
            let (domain, imported) = unsafe {
                let domain = context.import_pd(pd.handle()).unwrap();
                let imported = domain.import_mr(region.handle()).unwrap();
                (domain, imported)
            };
            assert_eq!((imported.rkey(), imported.len()), (region.remote().rkey, region.len()));
            domain.allocate(64).unwrap();
        }
        Err(Error::Unsupported { device, feature }) => {
            assert_eq!((device.as_str(), feature), (rdma.device_name(), "importing a context"));
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_descriptor_that_is_of_no_device_is_refused_with_the_reason() {
    let Some(rdma) = device() else { return };
    for path in ["/dev/null", "/proc/self/exe"] {
        let fd = std::fs::File::open(path).unwrap().into();
        // SAFETY: it is refused.
        let error = unsafe { Context::import(fd) }.unwrap_err();
        if rdma.is_soft() {
            assert!(matches!(error, Error::Unsupported { .. }), "{path}: {error:?}");
            continue;
        }
        assert!(matches!(error, Error::Verb { verb: "ibv_import_device", .. }), "{path}: {error:?}");
        assert!(error.to_string().contains("Context::command_fd"), "{path}: {error}");
    }
}

#[test]
fn domains_and_regions_that_nobody_shares_cannot_be_imported() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() {
        return println!(
            "skipped: the handles are none, which only a provider that cannot import is safe to be asked about"
        );
    }
    let pd = rdma.pd();
    // SAFETY: it is refused, whatever the handles.
    let (domain, region) = unsafe { (rdma.import_pd(0).unwrap_err(), pd.import_mr(0).unwrap_err()) };
    for (error, named) in [(domain, "importing protection domains"), (region, "importing memory regions")] {
        match error {
            Error::Unsupported { device, feature } => {
                assert_eq!((device.as_str(), feature), (rdma.device_name(), named));
            }
            error => panic!("{error:?}"),
        }
    }
}
