//! Devices and their queries, compared with sysfs.

use std::ffi::CString;
use std::net::Ipv4Addr;

use rdma_safe::address::Guid;
use rdma_safe::sys::{Zeroed, ibv_device_attr, ibv_gid, verbs};
use rdma_safe::{Device, Endpoint, Error, Gid, GidType, LinkLayer, PortState, devices};

use crate::support::{Rdma, device, device_unless_soft, error_of};

/// Trimmed contents of a file in the device's sysfs directory.
fn sysfs(rdma: &Rdma, path: &str) -> Option<String> {
    let file = format!("/sys/class/infiniband/{}/{path}", rdma.device_name());
    std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// Trimmed contents of a file in the port's sysfs directory.
fn port_sysfs(rdma: &Rdma, path: &str) -> Option<String> {
    sysfs(rdma, &format!("ports/{}/{path}", rdma.port))
}

#[test]
fn a_device_is_found_by_name_index_and_guid() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let found = Device::by_name(rdma.device_name()).unwrap();
    assert_eq!(found.name(), rdma.device_name());
    assert_eq!(found.guid().to_string(), sysfs(&rdma, "node_guid").unwrap());

    let index = found.index().expect("the kernel has RDMA netlink");
    assert_eq!(Device::by_index(index).unwrap().name(), found.name());
    // Ports of one adapter may share a GUID, so the first device with it may have another name.
    assert_eq!(Device::by_guid(found.guid()).unwrap().guid(), found.guid());
    assert!(devices().unwrap().iter().any(|device| device.name() == found.name()));

    let uverbs = found.uverbs_name();
    let names = std::fs::read_to_string(format!("/sys/class/infiniband_verbs/{uverbs}/ibdev")).unwrap();
    assert_eq!(names.trim(), found.name(), "{uverbs} belongs to the device");
}

#[test]
fn an_unknown_device_is_refused_and_available_ones_are_listed() {
    let Some(rdma) = device() else { return };
    for (error, wanted) in [
        (error_of(Device::by_name("no_such_device")), "named no_such_device"),
        (error_of(Device::by_name("")), "named "),
        (error_of(Device::by_index(u32::MAX)), "with index 4294967295"),
        (error_of(Device::by_guid(Guid(0xdead_beef))), "with GUID 0000:0000:dead:beef"),
    ] {
        let text = error.to_string();
        let Error::DeviceNotFound { requested: named, available } = error else { panic!("{error:?}") };
        assert_eq!(named, wanted);
        assert!(available.iter().any(|name| name == rdma.device_name()), "{available:?}");
        assert!(text.contains(wanted) && text.contains(rdma.device_name()), "{text}");
    }
}

#[test]
fn a_device_outlives_its_device_list() {
    let Some(rdma) = device() else { return };
    let found = devices().unwrap().into_iter().find(|device| device.name() == rdma.device_name()).unwrap();
    let context = found.clone().open().unwrap();
    drop(found);
    assert_eq!(context.device_name(), rdma.device_name());
    assert_eq!(context.attributes().node_guid(), rdma.attributes().node_guid());
}

#[test]
fn device_attributes_agree_with_sysfs() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let attributes = rdma.attributes();
    assert_eq!(attributes.node_guid().to_string(), sysfs(&rdma, "node_guid").unwrap());
    assert_eq!(attributes.sys_image_guid().to_string(), sysfs(&rdma, "sys_image_guid").unwrap());
    // SoftRoCE reports a version only through libibverbs, and it is 0.0.0.
    let version = sysfs(&rdma, "fw_ver").unwrap();
    assert_eq!(attributes.firmware_version(), if rdma.is_rxe() { "0.0.0" } else { version.as_str() });
    let node_type = sysfs(&rdma, "node_type").unwrap();
    let device = Device::by_name(rdma.device_name()).unwrap();
    assert_eq!(node_type.split(':').next().unwrap().parse(), Ok(device.node_type().0), "{node_type}");
    let ports = std::fs::read_dir(format!("/sys/class/infiniband/{}/ports", rdma.device_name())).unwrap().count();
    assert_eq!(usize::from(attributes.ports()), ports);
    for (limit, value) in [
        ("max_qp", attributes.max_qp()),
        ("max_qp_wr", attributes.max_qp_wr()),
        ("max_sge", attributes.max_sge()),
        ("max_cq", attributes.max_cq()),
        ("max_cqe", attributes.max_cqe()),
        ("max_mr", attributes.max_mr()),
        ("max_pd", attributes.max_pd()),
        ("completion_vectors", rdma.completion_vectors()),
    ] {
        assert!(value > 0, "{limit} is {value}");
    }
    if rdma.is_rxe() {
        assert_eq!(attributes.max_sge(), 32);
        assert_eq!(attributes.max_cqe(), 32767);
        assert_eq!(attributes.max_qp_wr(), 1 << 20);
        assert_eq!(attributes.max_qp_rd_atom(), 128);
    }
}

/// rdma-safe uses the classic query only where there is no extended one.
#[test]
fn the_classic_query_of_a_device_agrees_with_the_extended_one() {
    let Some(rdma) = device() else { return };
    let mut classic = ibv_device_attr::zeroed();
    // SAFETY: the context is valid, and the structure is valid during the call.
    assert_eq!(unsafe { (verbs().unwrap().ibv_query_device)(rdma.as_raw(), &mut classic) }, 0);
    assert_eq!(format!("{classic:?}"), format!("{:?}", rdma.attributes().as_raw().orig_attr));
}

#[test]
fn port_attributes_agree_with_sysfs() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let port = rdma.query_port(rdma.port).unwrap();
    let state = port_sysfs(&rdma, "state").unwrap();
    assert_eq!(state, format!("{}: ACTIVE", port.state().0));
    assert_eq!(port.state(), PortState::ACTIVE);
    assert_eq!(port_sysfs(&rdma, "link_layer").unwrap(), port.link_layer().to_string());
    let lid = port_sysfs(&rdma, "lid").unwrap();
    assert_eq!(u16::from_str_radix(lid.trim_start_matches("0x"), 16), Ok(port.lid()));
    assert!(port.active_mtu() <= port.max_mtu());
    assert!(port.active_mtu().bytes().is_some(), "{:?}", port.active_mtu());
    assert!(port.max_message_size() >= 1 << 20);
    if rdma.is_rxe() {
        assert_eq!(port.link_layer(), LinkLayer::ETHERNET);
        assert_eq!(port.max_mtu().bytes(), Some(4096));
        assert_eq!((port.gid_table_len(), port.pkey_table_len()), (1024, 1));
    }
}

#[test]
fn the_gid_table_agrees_with_sysfs_entry_by_entry() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let gids = rdma.gids(rdma.port).unwrap();
    assert!(!gids.is_empty());
    for entry in &gids {
        let index = entry.index;
        let raw = port_sysfs(&rdma, &format!("gids/{index}")).unwrap();
        assert_eq!(raw.parse::<Gid>().unwrap(), entry.gid);
        assert_eq!(entry.port, rdma.port);
        let kind = port_sysfs(&rdma, &format!("gid_attrs/types/{index}")).unwrap();
        let expected = match entry.gid_type {
            GidType::ROCE_V2 => "RoCE v2",
            GidType::ROCE_V1 | GidType::INFINIBAND => "IB/RoCE v1",
            other => panic!("GID {index} is of {other:?}"),
        };
        assert_eq!(kind, expected, "GID {index}");
        let Some(interface) = port_sysfs(&rdma, &format!("gid_attrs/ndevs/{index}")) else { continue };
        let name = CString::new(interface).unwrap();
        // SAFETY: a NUL-terminated string that lives during the call.
        assert_eq!(entry.interface_index, unsafe { libc::if_nametoindex(name.as_ptr()) }, "{name:?}");
    }
}

#[test]
fn querying_all_gids_agrees_with_querying_each() {
    let Some(rdma) = device() else { return };
    let table_len = rdma.query_port(rdma.port).unwrap().gid_table_len();
    let mut singly = Vec::new();
    for index in 0..table_len {
        match rdma.gid(rdma.port, index) {
            Ok(entry) => singly.push(entry),
            Err(Error::NoSuchGid { .. }) => {}
            Err(error) => panic!("GID {index}: {error}"),
        }
    }
    let mut at_once = rdma.gids(rdma.port).unwrap();
    at_once.sort_by_key(|entry| entry.index);
    assert_eq!(at_once, singly);
}

/// rdma-safe uses the classic query only where there is no extended one.
#[test]
fn the_classic_query_of_a_gid_agrees_with_the_extended_one() {
    let Some(rdma) = device() else { return };
    for entry in rdma.gids(rdma.port).unwrap() {
        let mut classic = ibv_gid { raw: [0xff; 16] };
        let index = i32::try_from(entry.index).unwrap();
        // SAFETY: the context is valid, and the structure is valid during the call.
        assert_eq!(unsafe { (verbs().unwrap().ibv_query_gid)(rdma.as_raw(), rdma.port, index, &mut classic) }, 0);
        // SAFETY: both variants consist of 16 bytes.
        assert_eq!(Gid(unsafe { classic.raw }), entry.gid);
    }
}

#[test]
fn a_missing_gid_is_refused_and_the_table_length_is_named() {
    let Some(rdma) = device() else { return };
    let len = rdma.query_port(rdma.port).unwrap().gid_table_len();
    let used: Vec<u32> = rdma.gids(rdma.port).unwrap().iter().map(|entry| entry.index).collect();
    let empty = (0..len).find(|index| !used.contains(index));
    for wanted in [Some(len), Some(u32::MAX), empty].into_iter().flatten() {
        let error = error_of(rdma.gid(rdma.port, wanted));
        let text = error.to_string();
        let Error::NoSuchGid { device, port, index, table_len } = error else { panic!("{wanted}: {error:?}") };
        assert_eq!((device.as_str(), port, index, table_len), (rdma.device_name(), rdma.port, wanted, len));
        assert!(text.contains(&format!("no GID at index {wanted}")), "{text}");
    }
}

#[test]
fn a_missing_port_is_refused_by_every_query() {
    let Some(rdma) = device() else { return };
    let ports = rdma.attributes().ports();
    for bad in [0, 255] {
        for error in [
            error_of(rdma.query_port(bad)),
            error_of(rdma.gid(bad, 0)),
            error_of(rdma.gids(bad)),
            error_of(rdma.recommended_gid(bad)),
            error_of(rdma.pkey(bad, 0)),
            error_of(rdma.pkey_index(bad, 0xffff)),
            error_of(Endpoint::builder(&rdma.pd()).port(bad).build()),
        ] {
            let text = error.to_string();
            let Error::NoSuchPort { device, port, ports: known } = error else { panic!("port {bad}: {error:?}") };
            assert_eq!((device.as_str(), port, known), (rdma.device_name(), bad, ports));
            assert!(text.contains(&format!("no port {bad}: its ports are 1 to {ports}")), "{text}");
        }
    }
}

#[test]
fn the_recommended_gid_is_roce_v2_over_ipv4_where_there_is_one() {
    let Some(rdma) = device() else { return };
    let gids = rdma.gids(rdma.port).unwrap();
    let recommended = rdma.recommended_gid(rdma.port).unwrap();
    assert!(gids.contains(&recommended));
    assert_eq!(rdma.gid(rdma.port, recommended.index).unwrap(), recommended);
    let is_best = |gid_type, ipv4| recommended.gid_type == gid_type && recommended.gid.ipv4().is_some() == ipv4;
    if gids.iter().any(|entry| entry.gid_type == GidType::ROCE_V2 && entry.gid.ipv4().is_some()) {
        assert!(is_best(GidType::ROCE_V2, true), "{recommended:?} of {gids:?}");
    }
    if rdma.is_rxe() {
        assert_eq!(recommended.gid_type, GidType::ROCE_V2);
        // The address that `cargo xtask softroce` assigns. The device's link-local address precedes it in the table.
        let own = Gid::from(Ipv4Addr::new(10, 9, 9, 1));
        if gids.iter().any(|entry| entry.gid == own) {
            assert_eq!((recommended.gid, recommended.index), (own, 1));
            assert_eq!(recommended.gid.to_string(), "::ffff:10.9.9.1");
        }
    }
}

#[test]
fn partition_keys_agree_with_sysfs_and_are_found_by_value() {
    let Some(rdma) = device_unless_soft("is not in sysfs") else { return };
    let len = rdma.query_port(rdma.port).unwrap().pkey_table_len();
    for index in 0..len {
        let pkey = rdma.pkey(rdma.port, index).unwrap();
        let raw = port_sysfs(&rdma, &format!("pkeys/{index}")).unwrap();
        assert_eq!(raw, format!("{pkey:#06x}"), "P_Key {index}");
    }
    let first = rdma.pkey(rdma.port, 0).unwrap();
    assert_eq!(rdma.pkey_index(rdma.port, first).unwrap(), 0);

    let unknown = (1..u16::MAX).find(|key| (0..len).all(|index| rdma.pkey(rdma.port, index).unwrap() != *key)).unwrap();
    for (error, wanted) in [
        (error_of(rdma.pkey_index(rdma.port, unknown)), "ibv_get_pkey_index"),
        (error_of(rdma.pkey(rdma.port, u16::MAX)), "ibv_query_pkey"),
    ] {
        let Error::Verb { verb, device, .. } = error else { panic!("{error:?}") };
        assert_eq!((verb.name(), device.as_str()), (wanted, rdma.device_name()));
    }
}
