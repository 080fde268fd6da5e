//! Attributes of devices and ports, and refusals of features that a device lacks.

use std::ffi::CStr;

use rdma_safe::address::Rate;
use rdma_safe::async_event::AsyncEventType;
use rdma_safe::device::{AtomicCapability, DeviceCapabilities, NodeType, RawPacketCapabilities};
use rdma_safe::fork::{self, ForkStatus};
use rdma_safe::port::PhysicalState;
use rdma_safe::qp::{Ece, RateLimit, WrOpcode};
use rdma_safe::sys::{ibv_event_type, ibv_node_type, ibv_port_state, ibv_rate, verbs};
use rdma_safe::{Device, Error, PortState, Result};

use crate::support::lab::{Lab, Mode};
use crate::support::{Rdma, device, device_unless_soft, error_of};

fn port_sysfs(rdma: &Rdma, path: &str) -> String {
    let file = format!("/sys/class/infiniband/{}/ports/{}/{path}", rdma.device_name(), rdma.port);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}")).trim().to_owned()
}

/// Hexadecimal after `0x`, or decimal.
fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

#[test]
fn the_link_of_a_port_is_what_sysfs_says() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let port = rdma.query_port(rdma.port).unwrap();
    // For example "100 Gb/sec (4X EDR)".
    let rate = port_sysfs(&rdma, "rate");
    let gbps: f64 = rate.split_whitespace().next().unwrap().parse().unwrap();
    let width = port.active_width().to_string();
    assert!(rate.contains(&format!("({width}")), "{rate} has the width {width}");
    assert_eq!(port.nominal_mbps(), Some((gbps * 1_000.0) as u64), "{rate} at {:?}", port.active_speed());
    let state = port_sysfs(&rdma, "phys_state");
    assert_eq!(state, format!("{}: {}", port.physical_state().0, port.physical_state()));
    assert_eq!(port.physical_state(), PhysicalState::LINK_UP);
    assert_eq!(number(&port_sysfs(&rdma, "sm_lid")), u64::from(port.subnet_manager_lid()));
    assert_eq!(number(&port_sysfs(&rdma, "sm_sl")), u64::from(port.subnet_manager_sl()));
    assert_eq!(number(&port_sysfs(&rdma, "lid_mask_count")), u64::from(port.lid_mask_bits()));
    assert_eq!(number(&port_sysfs(&rdma, "cap_mask")), u64::from(port.capabilities().bits()));
}

#[test]
fn softroce_reports_its_known_capabilities() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() {
        return;
    }
    let attributes = rdma.attributes();
    let capabilities = attributes.capabilities();
    let has = DeviceCapabilities::MEM_WINDOW
        | DeviceCapabilities::MEM_WINDOW_TYPE_2B
        | DeviceCapabilities::MEM_MGT_EXTENSIONS
        | DeviceCapabilities::SRQ_RESIZE
        | DeviceCapabilities::RC_RNR_NAK_GEN;
    assert!(capabilities.contains(has), "{capabilities:?}");
    assert!(!capabilities.intersects(DeviceCapabilities::XRC | DeviceCapabilities::MANAGED_FLOW_STEERING));
    let newer =
        DeviceCapabilities::ATOMIC_WRITE | DeviceCapabilities::FLUSH_GLOBAL | DeviceCapabilities::FLUSH_PERSISTENT;
    let expected = if rdma.is_newer_rxe() { newer } else { DeviceCapabilities::empty() };
    assert_eq!(capabilities & newer, expected);
    let longest = rdma.query_port(rdma.port).unwrap().max_message_size();
    assert_eq!(longest, if rdma.is_newer_rxe() { 1 << 31 } else { 1 << 23 });
    assert_eq!(attributes.atomic_capability(), AtomicCapability::HCA);
    assert_eq!((attributes.max_sge_rd(), attributes.max_ah(), attributes.max_srq_sge()), (32, 32_767, 27));
    assert_eq!(attributes.physical_ports(), 1);
}

#[test]
fn a_software_device_has_no_attributes_of_features_that_it_lacks() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        return println!("skipped: an RNIC may have any of the features");
    }
    let attributes = rdma.attributes();
    assert!(attributes.segmentation_offload().is_none());
    assert!(attributes.receive_side_scaling().is_none());
    assert!(attributes.packet_pacing().is_none());
    assert!(attributes.tag_matching().is_none());
    assert!(attributes.cq_moderation().is_none());
    assert_eq!((attributes.max_device_memory(), attributes.completion_timestamp_mask()), (0, None));
    if rdma.is_soft() {
        // SoftRoCE of newer kernels has on-demand paging.
        assert!(attributes.on_demand_paging().is_none());
        assert_eq!((attributes.max_receive_work_queues(), attributes.hca_core_clock()), (0, 0));
        assert_eq!(attributes.raw_packets(), RawPacketCapabilities::empty());
    }
}

/// Checks that a feature that the device lacks is refused by name. It has to be refused on SoftRoCE and soft0.
#[track_caller]
fn lacks<T: std::fmt::Debug>(rdma: &Rdma, result: Result<T>, expected: &str) {
    if result.is_ok() && !rdma.is_rxe() && !rdma.is_soft() {
        return;
    }
    match error_of(result) {
        Error::Unsupported { device, feature } => {
            assert_eq!(device, rdma.device_name());
            assert!(feature.contains(expected), "{feature}");
        }
        error => panic!("{error:?}"),
    }
}

#[test]
fn features_that_the_device_lacks_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    lacks(&rdma, rdma.clock(), "timestamps of completions");
    lacks(&rdma, rdma.raw_clock(), "ibv_query_rt_values_ex");
    lacks(&rdma, rdma.read_clock(), "timestamps of completions");
    lacks(&rdma, rdma.alloc_td(), "thread domains");
    lacks(&rdma, pd.parent_domain(), "parent domains");
    // rdma-core 62 and newer kernels have this query.
    if verbs().unwrap().ibv_query_port_speed.is_none() {
        lacks(&rdma, rdma.port_speed(rdma.port), "ibv_query_port_speed");
    }
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        lacks(&rdma, lab.a.qp.ece(), "ECE");
        lacks(&rdma, lab.a.qp.set_ece(Ece::new(0xff_ffff, 1)), "ECE");
        lacks(&rdma, lab.a.qp.limit_rate(RateLimit::new(1_000)), "rate limits");
        if rdma.is_rxe() {
            for opcode in [WrOpcode::RDMA_WRITE, WrOpcode::RDMA_READ, WrOpcode::SEND, WrOpcode(77)] {
                assert!(lab.a.qp.data_in_order(opcode).is_empty(), "{opcode}");
            }
        }
    }
}

#[test]
fn a_completion_queue_takes_a_parent_domain_and_no_other() {
    let Some(rdma) = device() else { return };
    let error = error_of(rdma.completion_queue(8).parent_domain(&rdma.pd()).build());
    assert!(matches!(error, Error::NotParentDomain), "{error:?}");
    assert!(error.to_string().contains("ProtectionDomain::parent_domain"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "reads the version of the kernel")]
fn forking_needs_no_preparation_on_a_kernel_that_copies() {
    let Some(_rdma) = device() else { return };
    // Kernels before 5.12 may need preparation.
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let status = fork::status().unwrap();
    if release.starts_with("6.") {
        assert_eq!(status, ForkStatus::UNNEEDED, "{release}");
    }
    match status {
        ForkStatus::DISABLED => {
            assert!(matches!(error_of(fork::init()), Error::Fork { errno } if errno.0 == libc::EINVAL));
        }
        _ => fork::init().unwrap(),
    }
    assert_eq!(fork::status().unwrap(), status);
}

/// The name that libibverbs gives to a value.
fn name(text: *const std::ffi::c_char) -> String {
    // SAFETY: the functions that the tests call return static strings.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[test]
fn every_node_type_port_state_and_event_of_the_library_is_known() {
    let Some(rdma) = device() else { return };
    let verbs = verbs().unwrap();
    // SAFETY: the function accepts any number.
    let node_name = |number| name(unsafe { (verbs.ibv_node_type_str)(ibv_node_type(number)) });
    let node = Device::by_name(rdma.device_name()).unwrap().node_type();
    assert!(NodeType::KNOWN.contains(&node) && node_name(node.0) == node.to_string(), "{node}");
    // SAFETY: as above.
    let state = |number| name(unsafe { (verbs.ibv_port_state_str)(ibv_port_state(number)) });
    let unknown = state(10_000);
    for number in 0..32 {
        assert!(state(number) == unknown || PortState::KNOWN.contains(&PortState(number)), "{}", state(number));
    }
    // SAFETY: as above.
    let event = |number| name(unsafe { (verbs.ibv_event_type_str)(ibv_event_type(number)) });
    let unknown = event(10_000);
    for kind in 0..64 {
        // An older library may not know all of `KNOWN`.
        assert!(event(kind) == unknown || AsyncEventType::KNOWN.contains(&AsyncEventType(kind)), "{}", event(kind));
    }
}

#[test]
fn rates_agree_with_the_library() {
    // Without a device there may be no library.
    let Some(_rdma) = device() else { return };
    let verbs = verbs().unwrap();
    let known = |answer: i32| u32::try_from(answer).ok();
    for code in 0..=u8::MAX {
        let rate = Rate(code);
        // SAFETY: the function accepts any number.
        let (mbps, multiplier) = unsafe {
            let raw = ibv_rate(code.into());
            (known((verbs.ibv_rate_to_mbps)(raw)), known((verbs.ibv_rate_to_mult)(raw)))
        };
        // An older library may not know the newest rates. Its 0 means no limit.
        assert!(mbps.is_none_or(|mbps| rate.mbps().unwrap_or(0) == mbps), "{rate}: {mbps:?}");
        assert!(multiplier.is_none_or(|multiplier| rate.multiplier() == Some(multiplier)), "{rate}: {multiplier:?}");
        if let (Some(mbps @ 1..), Some(multiplier)) = (mbps, multiplier) {
            // SAFETY: as above.
            let back = unsafe { ((verbs.mbps_to_ibv_rate)(mbps as i32), (verbs.mult_to_ibv_rate)(multiplier as i32)) };
            assert_eq!((back.0.0, back.1.0), (u32::from(code), u32::from(code)), "{rate}");
        }
    }
}
