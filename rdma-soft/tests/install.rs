//! The function tables of the device, and functions that need no device.

use std::ffi::{CStr, c_char, c_int};
use std::io::Error;
use std::ptr::null_mut;
use std::sync::Once;

use rdma_sys::*;

fn text(text: *const c_char) -> &'static CStr {
    // SAFETY: the tested functions return static strings.
    unsafe { CStr::from_ptr(text) }
}

/// The device's tables.
fn installed() -> (&'static Verbs, &'static RdmaCm) {
    // The first test installs the device, and the others wait for it.
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| rdma_soft::install().unwrap());
    (verbs().unwrap(), rdmacm().unwrap())
}

#[test]
fn a_second_provider_is_refused() {
    installed();
    assert_eq!(rdma_soft::install().unwrap_err().library, "libibverbs.so.1");
}

#[test]
fn ids_use_the_open_device_and_rsockets_are_refused() {
    let (_, cm) = installed();
    let (mut number, mut id) = (7, null_mut());
    // SAFETY: the functions get objects of each other, and the descriptor that the refused functions get is not read.
    unsafe {
        let devices = (cm.rdma_get_devices)(&mut number);
        assert_eq!((number, devices.is_null()), (1, false));
        (cm.rdma_free_devices)(devices);
        let channel = (cm.rdma_create_event_channel)();
        assert_eq!((cm.rdma_create_id)(channel, &mut id, null_mut(), RDMA_PS_TCP), 0);
        assert_eq!((cm.rdma_destroy_id)(id), 0);
        assert_eq!((cm.rdma_create_id)(channel, &mut id, null_mut(), RDMA_PS_IB), -1);
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
        (cm.rdma_destroy_event_channel)(channel);
        assert_eq!((cm.rsocket)(libc::AF_INET, libc::SOCK_STREAM, 0), -1);
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
        assert_eq!((cm.riowrite)(-1, null_mut(), 0, 0, 0) as isize, -1);
        assert_eq!((cm.rfcntl)(-1, libc::F_GETFL), -1);
        assert_eq!(text((cm.rdma_event_str)(RDMA_CM_EVENT_UNREACHABLE)), c"RDMA_CM_EVENT_UNREACHABLE");
        assert_eq!(text((cm.rdma_event_str)(rdma_cm_event_type(99))), c"UNKNOWN EVENT");
    }
}

#[test]
fn unsupported_verbs_return_eopnotsupp() {
    let (verbs, _) = installed();
    // SAFETY: the functions access no argument.
    unsafe {
        assert_eq!((verbs.ibv_set_ece)(null_mut(), null_mut()), libc::EOPNOTSUPP);
        assert!((verbs.ibv_reg_dmabuf_mr)(null_mut(), 0, 1, 0, 0, 0).is_null());
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
        assert_eq!((verbs.ibv_fork_init)(), 0);
        assert_eq!((verbs.ibv_is_fork_initialized)(), IBV_FORK_UNNEEDED);
    }
}

/// Names and conversions of known and unknown values.
fn names(table: &Verbs) -> Vec<(String, String)> {
    let mut names = Vec::new();
    let mut add = |value: String, name: String| names.push((value, name));
    // SAFETY: the functions accept any value.
    unsafe {
        for value in 0..64 {
            let signed = value as c_int - 8;
            let status = text((table.ibv_wc_status_str)(ibv_wc_status(value)));
            add(format!("status {value}"), format!("{status:?}"));
            let event = text((table.ibv_event_type_str)(ibv_event_type(value)));
            add(format!("event {value}"), format!("{event:?}"));
            let node = text((table.ibv_node_type_str)(ibv_node_type(signed)));
            add(format!("node {signed}"), format!("{node:?}"));
            let port = text((table.ibv_port_state_str)(ibv_port_state(value)));
            add(format!("port {value}"), format!("{port:?}"));
            let mbps = (table.ibv_rate_to_mbps)(ibv_rate(value));
            add(format!("rate {value}"), format!("{mbps} {}", (table.ibv_rate_to_mult)(ibv_rate(value))));
            add(format!("mbps {mbps}"), format!("{}", (table.mbps_to_ibv_rate)(mbps).0));
        }
        for mult in -1..1000 {
            add(format!("mult {mult}"), format!("{}", (table.mult_to_ibv_rate)(mult).0));
        }
    }
    names
}

#[test]
fn values_have_the_names_of_rdma_core() {
    let (verbs, _) = installed();
    let ours = names(verbs);
    for (value, name) in
        [("status 12", "\"transport retry counter exceeded\""), ("rate 20", "53125 20"), ("mult 11", "19")]
    {
        assert!(ours.contains(&(value.to_owned(), name.to_owned())), "{value}");
    }
    // SAFETY: a file of this name is libibverbs.
    let theirs = match unsafe { Verbs::load_from("libibverbs.so.1") } {
        Ok(table) => names(&table),
        Err(error) => return println!("skipped: a comparison with libibverbs: {error}"),
    };
    for (ours, theirs) in ours.iter().zip(&theirs) {
        // rdma-core has this event since version 62.
        let is_newer = ours.0 == "event 20" && theirs.1 == "\"unknown\"";
        assert!(ours == theirs || is_newer, "{ours:?} {theirs:?}");
    }
}

#[test]
fn a_sysfs_attribute_is_read_without_its_newline() {
    let directory = std::env::temp_dir().join(format!("rdma-soft-attributes-{}", std::process::id()));
    std::fs::create_dir_all(directory.join("ports")).unwrap();
    std::fs::write(directory.join("ports/state"), "4: ACTIVE\n").unwrap();
    let path = std::ffi::CString::new(directory.to_str().unwrap()).unwrap();
    let read = |file: &CStr, size: usize| {
        let mut buffer = [b'?' as c_char; 16];
        // SAFETY: the buffer has at least this size.
        let length =
            unsafe { rdma_soft::abi::ibv_read_sysfs_file(path.as_ptr(), file.as_ptr(), buffer.as_mut_ptr(), size) };
        (length, buffer.map(|c| c as u8))
    };
    assert_eq!(read(c"ports/state", 16), (9, *b"4: ACTIVE\0??????"));
    // The terminating zero replaces the newline, as in rdma-core.
    assert_eq!(read(c"ports/state", 10), (9, *b"4: ACTIVE\0??????"));
    assert_eq!(read(c"ports/state", 9), (-1, [b'?'; 16]));
    assert_eq!(read(c"ports/state", 0), (-1, [b'?'; 16]));
    assert_eq!(read(c"absent", 16).0, -1);
    assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::ENOENT));
    std::fs::remove_dir_all(directory).unwrap();
}
