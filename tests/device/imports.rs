//! Contexts, domains and regions that processes share by a descriptor. SoftRoCE and soft0 refuse to share them.

use rdma_safe::error::Verb;
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Context, Error};

use crate::support::device;

#[test]
fn a_context_is_shared_by_its_descriptor_or_refused_by_name() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE_READ).unwrap();
    let fd = match pd.context().command_fd() {
        Ok(fd) => fd.try_clone_to_owned().unwrap(),
        Err(Error::Unsupported { device, feature }) => {
            assert!(rdma.is_soft() && device == rdma.device_name(), "{device}");
            assert_eq!(feature, "sharing by a descriptor");
            return;
        }
        Err(error) => panic!("{error:?}"),
    };
    // SAFETY: no other process has the descriptor, and the imports are dropped before `region` and `pd`.
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
#[cfg_attr(miri, ignore = "opens files")]
fn a_descriptor_of_another_file_is_refused_with_the_reason() {
    let Some(rdma) = device() else { return };
    for path in ["/dev/null", "/proc/self/exe"] {
        let fd = std::fs::File::open(path).unwrap().into();
        // SAFETY: the import is refused.
        let error = unsafe { Context::import(fd) }.unwrap_err();
        if rdma.is_soft() {
            assert!(matches!(error, Error::Unsupported { .. }), "{path}: {error:?}");
            continue;
        }
        assert!(matches!(error, Error::Verb { verb: Verb::ImportDevice, .. }), "{path}: {error:?}");
        assert!(error.to_string().contains("Context::command_fd"), "{path}: {error}");
    }
}

#[test]
fn importing_domains_and_regions_is_refused_by_name() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        return println!("skipped: an RNIC may support imports, and the handles are invalid");
    }
    let pd = rdma.pd();
    // SAFETY: these devices refuse every handle.
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
