//! Device memory, which neither SoftRoCE nor soft0 has.

use std::process::{Command, Stdio};

use rdma_safe::{Access, Error};

use crate::support::{device, skip};

#[test]
fn device_memory_is_reached_by_copies_or_refused_by_name() {
    let Some(rdma) = device() else { return };
    match rdma.alloc_dm(64, 8) {
        Ok(mut memory) => {
            assert!(!rdma.is_rxe() && !rdma.is_soft(), "{} has no device memory", rdma.device_name());
            memory.write(8, b"12345678").unwrap();
            let mut bytes = [0; 8];
            memory.read(8, &mut bytes).unwrap();
            assert_eq!(&bytes, b"12345678");
            rdma.pd().register_dm(&memory, 0, 64, Access::LOCAL_WRITE).unwrap();
        }
        Err(Error::Unsupported { device, feature }) => {
            assert_eq!((device.as_str(), feature), (rdma.device_name(), "device memory"));
            assert_eq!(rdma.attributes().max_device_memory(), 0);
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn importing_device_memory_is_refused_by_name() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        return println!("skipped: an RNIC may support imports, and the handle is invalid");
    }
    // SAFETY: these devices refuse every handle.
    let error = unsafe { rdma.import_dm(0, 8) }.unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "importing device memory", .. }), "{error:?}");
}

#[test]
#[cfg_attr(miri, ignore = "starts a program")]
fn the_example_counts_in_device_memory_or_prints_that_there_is_none() {
    let Some(rdma) = device() else { return };
    let tests = std::env::current_exe().expect("the test's program has a path");
    let file = tests.parent().and_then(|deps| deps.parent()).expect("a folder").join("examples/device_memory");
    if !file.is_file() {
        let text = format!("{} is not there; build it with `cargo build --example device_memory`", file.display());
        return skip::<()>(&text).unwrap_or(());
    }
    let output = Command::new(&file).args(["-d", rdma.device_name(), "-n", "3"]).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if rdma.attributes().max_device_memory() > 0 {
        assert_eq!(out, format!("{}: a peer counted to 3 in device memory\n", rdma.device_name()), "{err}");
    } else {
        assert_eq!(err, format!("device_memory: {} does not support device memory\n", rdma.device_name()));
        assert_eq!((output.status.code(), out.as_str()), (Some(1), ""));
    }
    let help = Command::new(&file).arg("--help").stdin(Stdio::null()).output().unwrap();
    assert!(help.status.success() && text(&help.stdout).contains("Examples:"), "{}", text(&help.stdout));
}
