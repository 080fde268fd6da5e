//! Devices, ports and tables: byte orders, replacements for missing functions, and errors that name their cause.

use std::net::{Ipv4Addr, Ipv6Addr};

use rdma_safe::address::Guid;
use rdma_safe::cm::Devices;
use rdma_safe::device::TransportType;
use rdma_safe::error::Verb;
use rdma_safe::mr::Pages;
use rdma_safe::{Context, Device, Endpoint, Errno, Error, Gid, GidType, LinkLayer, Mtu, PortState, devices};
use rdma_sys::{IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, RdmaCm, Verbs, ibv_gid_type};

use crate::fake::{Config, DeviceList, Fake, FakeGid, Port, with_device_list};
use crate::support::{EXTENDED, builder, connect};

fn device(fake: &Fake) -> Device {
    Device::by_name(fake.name()).unwrap()
}

#[test]
fn guids_are_in_host_byte_order() {
    let fake = Fake::new(Config { guid: 0x0200_00ff_fe12_3456, ..Config::default() });
    let device = device(&fake);
    assert_eq!(device.guid(), Guid(0x0200_00ff_fe12_3456));
    assert_eq!(device.guid().to_string(), "0200:00ff:fe12:3456");
    let context = device.open().unwrap();
    assert_eq!(context.attributes().node_guid(), device.guid());
    assert_eq!(context.attributes().sys_image_guid(), Guid(0x0200_00ff_fe12_3457));
    assert_eq!(Device::by_guid("0200:00ff:fe12:3456".parse().unwrap()).unwrap().name(), fake.name());
}

#[test]
fn gids_are_in_network_byte_order() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let entry = context.gid(1, 1).unwrap();
    assert_eq!(entry.gid.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 9, 1]);
    assert_eq!(entry.gid.to_string(), "::ffff:10.9.9.1");
    assert_eq!((entry.index, entry.port, entry.gid_type, entry.interface_index), (1, 1, GidType::ROCE_V2, 7));
    assert_eq!(context.gid(1, 0).unwrap().gid, "fe80::ff:fe00:1".parse().unwrap());
}

#[test]
fn a_device_is_found_by_name_index_and_guid() {
    let fake = Fake::new(Config { guid: 0xabc, ..Config::default() });
    let found = device(&fake);
    assert_eq!((found.name(), found.uverbs_name()), (fake.name().to_owned(), "uverbs0".to_owned()));
    assert_eq!(found.transport_type(), TransportType::IB);
    assert_eq!(Device::by_index(found.index().unwrap()).unwrap().name(), fake.name());
    let error = Device::by_name("mlx5_99").unwrap_err();
    let Error::DeviceNotFound { requested, available } = &error else { panic!("{error}") };
    assert_eq!(requested, "named mlx5_99");
    assert!(available.contains(&fake.name().to_owned()));
    assert!(error.to_string().contains(fake.name()), "lists the available devices: {error}");
    let error = Device::by_guid(Guid(0x1234)).unwrap_err().to_string();
    assert!(error.contains("0000:0000:0000:1234"), "{error}");
}

/// Hint that applies to any machine.
const SOFT: &str = "call rdma_safe::soft::install_by_default() before the first verb to run on soft0";

#[test]
#[cfg_attr(miri, ignore = "dlopen(3)")]
fn a_library_that_is_not_there_is_an_error_that_says_what_to_do() {
    // SAFETY: the file does not exist.
    let (verbs, cm) = unsafe { (Verbs::load_from("/nowhere.so"), RdmaCm::load_from("/nowhere.so")) };
    let error = Error::from(&*Box::leak(Box::new(verbs.unwrap_err())));
    assert!(error.to_string().contains("apt install libibverbs1") && error.to_string().contains(SOFT), "{error}");
    let error = Error::from(&*Box::leak(Box::new(cm.unwrap_err())));
    assert!(error.to_string().contains("librdmacm1") && error.to_string().contains(SOFT), "{error}");
}

#[test]
fn a_soft_device_that_was_not_installed_is_an_error_that_says_what_to_do() {
    let fake = Fake::new(Config::default());
    let error = Device::by_name("soft0").unwrap_err();
    assert!(matches!(error, Error::DeviceNotFound { .. }) && error.to_string().contains(SOFT), "{error}");
    let error = Device::by_name("mlx5_9").unwrap_err();
    assert!(error.to_string().contains(fake.name()) && !error.to_string().contains("soft0"), "{error}");
}

#[test]
fn no_device_is_an_error_that_says_what_to_do() {
    for list in [DeviceList::Empty, DeviceList::Fails(libc::ENOSYS)] {
        with_device_list(list, || {
            assert_eq!(devices().unwrap().len(), 0);
            for error in [Device::first().unwrap_err(), Device::by_name("mlx5_0").unwrap_err()] {
                assert!(matches!(error, Error::NoDevice), "{error}");
                assert!(error.to_string().contains("rdma link add rxe0"), "{error}");
                assert!(error.to_string().contains(SOFT), "{error}");
            }
        });
    }
    with_device_list(DeviceList::Fails(libc::EPERM), || {
        let error = devices().unwrap_err();
        assert!(matches!(error, Error::DeviceList { errno: Errno(libc::EPERM) }), "{error}");
        assert!(error.to_string().contains("modprobe ib_uverbs"), "{error}");
        assert!(error.to_string().contains(SOFT), "{error}");
    });
    with_device_list(DeviceList::Fails(0), || {
        // A stale errno is not reported as the reason.
        std::fs::metadata("/nowhere").unwrap_err();
        let error = devices().unwrap_err().to_string();
        assert!(error.contains("gave no reason"), "{error}");
    });
}

#[test]
fn a_device_that_cannot_be_opened_is_an_error_that_names_it() {
    let fake = Fake::new(Config::default());
    let found = device(&fake);
    for (errno, reason) in [(libc::EACCES, "Permission denied"), (0, "gave no reason")] {
        fake.fail("ibv_open_device", errno);
        let error = found.open().unwrap_err();
        assert!(
            matches!(&error, Error::OpenDevice { device, errno: Errno(e) } if device == fake.name() && *e == errno)
        );
        let text = error.to_string();
        assert!(text.contains(fake.name()) && text.contains(reason) && text.contains("/dev/infiniband"), "{text}");
    }
    drop(fake);
    let error = found.open().unwrap_err();
    assert!(matches!(error, Error::OpenDevice { errno: Errno(libc::ENODEV), .. }), "unplugged: {error}");
}

#[test]
fn limits_are_those_of_the_device_with_or_without_the_extended_query() {
    let without = Config { query_device_ex: false, ..Config::default() };
    let ancient = Config { extended_context: false, ..Config::default() };
    for (config, clock) in [(Config::default(), 1_000_000), (without, 0), (ancient, 0)] {
        let fake = Fake::new(config);
        let context = fake.open();
        let attributes = context.attributes();
        assert_eq!((attributes.ports(), attributes.max_qp(), attributes.max_cqe()), (1, 1000, 4096));
        assert_eq!((attributes.max_sge(), attributes.vendor_id()), (8, 0x2c9));
        assert_eq!(attributes.firmware_version(), "1.2.3");
        assert_eq!(attributes.as_raw().hca_core_clock, clock);
        assert_eq!(fake.calls("ibv_query_device"), usize::from(clock == 0));
        assert_eq!(context.completion_vectors(), 2);
    }
}

#[test]
fn a_failed_extended_query_falls_back_only_if_it_is_not_supported() {
    let fake = Fake::new(Config::default());
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS] {
        fake.fail("query_device_ex", errno);
        assert_eq!(fake.open().attributes().ports(), 1);
    }
    fake.fail("query_device_ex", libc::EIO);
    let error = device(&fake).open().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryDeviceEx, errno: Errno(libc::EIO), .. }), "{error}");
    assert_eq!(fake.live().contexts, 0, "the device is closed");
}

#[test]
fn a_negative_limit_counts_as_zero() {
    let fake = Fake::new(Config { max_qp_rd_atom: -1, max_qp_init_rd_atom: i32::MIN, ..Config::default() });
    let context = fake.open();
    assert_eq!((context.attributes().max_qp_rd_atom(), context.attributes().max_qp_init_rd_atom()), (0, 0));
}

#[test]
fn ports_are_queried_with_or_without_the_extended_operation() {
    for extended_context in [true, false] {
        let fake = Fake::new(Config {
            extended_context,
            ports: vec![Port::ethernet(), Port::infiniband()],
            ..Config::default()
        });
        let context = fake.open();
        let ethernet = context.query_port(1).unwrap();
        assert_eq!((ethernet.state(), ethernet.link_layer()), (PortState::ACTIVE, LinkLayer::ETHERNET));
        assert_eq!((ethernet.active_mtu(), ethernet.max_mtu()), (Mtu::MTU_1024, Mtu::MTU_4096));
        assert_eq!((ethernet.lid(), ethernet.gid_table_len(), ethernet.max_message_size()), (0, 16, 1 << 20));
        let infiniband = context.query_port(2).unwrap();
        assert_eq!((infiniband.lid(), infiniband.link_layer()), (0x11, LinkLayer::INFINIBAND));
        assert_eq!((infiniband.pkey_table_len(), ethernet.pkey_table_len()), (2, 1));
        assert_eq!(fake.calls("ibv_query_port") == 0, extended_context);
    }
}

#[test]
fn a_port_that_is_not_there_is_an_error_that_names_those_that_are() {
    let fake = Fake::new(Config { ports: vec![Port::ethernet(), Port::ethernet()], ..Config::default() });
    let context = fake.open();
    let calls = fake.calls("query_port");
    for port in [0, 3, 255] {
        let errors = [
            context.query_port(port).unwrap_err(),
            context.gid(port, 0).unwrap_err(),
            context.gids(port).unwrap_err(),
            context.recommended_gid(port).unwrap_err(),
            context.pkey(port, 0).unwrap_err(),
            context.pkey_index(port, 0xffff).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::NoSuchPort { port: p, ports: 2, .. } if p == port), "{error}");
            assert!(error.to_string().contains("its ports are 1 to 2"), "{error}");
        }
    }
    assert_eq!(fake.calls("query_port"), calls, "checked before the call");
    fake.fail("query_port", libc::EIO);
    let error = context.query_port(1).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryPort, errno: Errno(libc::EIO), .. }), "{error}");
}

#[test]
fn a_device_that_has_come_back_is_opened_again() {
    let fake = Fake::new(Config::default());
    let devices = Devices::default();
    let first = devices.domain(fake.name()).unwrap();
    assert!(devices.clone().domain(fake.name()).unwrap().is_same(&first));
    fake.fail("query_port", libc::EIO);
    let second = devices.domain(fake.name()).unwrap();
    assert!(!second.is_same(&first) && !second.context().is_same(first.context()));
    assert!(devices.domain("mlx5_99").is_err());
}

fn two_ports(gid_queries: bool) -> Config {
    let second = Port { gids: vec![FakeGid::roce_v2(3, Ipv4Addr::new(10, 1, 1, 1))], ..Port::ethernet() };
    Config { gid_queries, ports: vec![Port::ethernet(), second], ..Config::default() }
}

fn indices(context: &Context, port: u8) -> Vec<(u32, Gid)> {
    context.gids(port).unwrap().iter().map(|entry| (entry.index, entry.gid)).collect()
}

#[test]
fn the_gid_table_is_that_of_the_port_with_or_without_the_kernels_help() {
    for gid_queries in [true, false] {
        let fake = Fake::new(two_ports(gid_queries));
        let context = fake.open();
        let (local, first) = ("fe80::ff:fe00:1".parse().unwrap(), "::ffff:10.9.9.1".parse().unwrap());
        assert_eq!(indices(&context, 1), [(0, local), (1, first)]);
        assert_eq!(indices(&context, 2), [(3, "::ffff:10.1.1.1".parse().unwrap())]);
        let entry = context.gid(2, 3).unwrap();
        assert_eq!((entry.index, entry.port, entry.gid.to_string()), (3, 2, "::ffff:10.1.1.1".to_owned()));
        assert_eq!(fake.calls("ibv_query_gid") == 0, gid_queries);
    }
}

#[test]
fn a_gid_that_is_not_there_is_an_error_that_names_the_index() {
    for gid_queries in [true, false] {
        let fake = Fake::new(two_ports(gid_queries));
        let context = fake.open();
        for index in [2, 15, 16, 1 << 31, u32::MAX] {
            let error = context.gid(1, index).unwrap_err();
            assert!(
                matches!(error, Error::NoSuchGid { port: 1, index: i, table_len: 16, .. } if i == index),
                "{error}"
            );
            assert!(error.to_string().contains(&format!("at index {index}")), "{error}");
        }
    }
    let fake = Fake::new(Config::default());
    let context = fake.open();
    fake.fail("ibv_query_gid_ex", libc::EIO);
    fake.fail("ibv_query_gid_table", libc::EIO);
    let error = context.gid(1, 0).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryGidEx, errno: Errno(libc::EIO), .. }), "{error}");
    let error = context.gids(1).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryGidTable, errno: Errno(libc::EIO), .. }), "{error}");
}

#[test]
fn the_gid_to_connect_from_is_roce_v2_and_unknown_types_are_kept() {
    let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    let mut port = Port::ethernet();
    port.gids = vec![
        FakeGid::new(0, address, IBV_GID_TYPE_ROCE_V1),
        FakeGid::new(2, address, IBV_GID_TYPE_ROCE_V2),
        FakeGid::new(5, address, ibv_gid_type(77)),
    ];
    let fake =
        Fake::new(Config { ports: vec![port, Port { gids: Vec::new(), ..Port::ethernet() }], ..Config::default() });
    let context = fake.open();
    assert_eq!(context.recommended_gid(1).unwrap().index, 2);
    assert_eq!(context.gid(1, 5).unwrap().gid_type, GidType(77));
    let error = context.recommended_gid(2).unwrap_err();
    assert!(matches!(error, Error::NoGid { port: 2, .. }), "{error}");
    let pd = context.alloc_pd().unwrap();
    let error = Endpoint::builder(&pd).port(2).build().unwrap_err();
    assert!(matches!(error, Error::NoGid { port: 2, .. }), "{error}");
}

#[test]
fn partition_keys_are_in_host_byte_order() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
    let context = fake.open();
    assert_eq!((context.pkey(1, 0).unwrap(), context.pkey(1, 1).unwrap()), (0xffff, 0x8001));
    assert_eq!(context.pkey_index(1, 0x8001).unwrap(), 1);
    let error = context.pkey(1, 2).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryPkey, errno: Errno(libc::EINVAL), .. }), "{error}");
    let error = context.pkey_index(1, 0x0180).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::GetPkeyIndex, errno: Errno(libc::ENOENT), .. }), "{error}");
}

#[test]
fn an_endpoint_with_a_bad_port_or_gid_is_an_error() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let error = Endpoint::builder(&pd).port(2).build().unwrap_err();
    assert!(matches!(error, Error::NoSuchPort { port: 2, ports: 1, .. }), "{error}");
    for index in [9, 255, 256, 300] {
        let error = Endpoint::builder(&pd).gid_index(index).build().unwrap_err();
        assert!(matches!(error, Error::NoSuchGid { index: i, .. } if i == index), "{error}");
    }
    assert_eq!((fake.live().cqs, fake.live().qps), (0, 0));
}

#[test]
fn an_endpoint_sends_from_the_gid_in_its_address() {
    // An address vector has eight bits for the GID index, but a table can be longer.
    let mut port = Port::ethernet();
    port.gid_table_len = 512;
    port.gids = vec![
        FakeGid::new(0, Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), IBV_GID_TYPE_ROCE_V2),
        FakeGid::roce_v2(44, Ipv4Addr::new(10, 4, 4, 4)),
        FakeGid::roce_v2(300, Ipv4Addr::new(10, 3, 3, 3)),
    ];
    for gids in [port.gids.clone(), vec![port.gids[0], port.gids[2]], vec![port.gids[2]]] {
        let fake = Fake::new(Config { ports: vec![Port { gids: gids.clone(), ..port.clone() }], ..Config::default() });
        let pd = fake.pd();
        let Ok(mut endpoint) = builder(&pd, EXTENDED).build() else { continue };
        let address = endpoint.address();
        assert!(endpoint.connect(&address).is_ok(), "from {}", address.gid);
        let sgid_index = fake
            .take_modified()
            .iter()
            .find_map(|(attr, mask)| (mask & rdma_sys::IBV_QP_AV.0 != 0).then_some(attr.ah_attr.grh.sgid_index));
        let source = gids.iter().find(|gid| Some(gid.index) == sgid_index.map(u32::from)).unwrap();
        assert_eq!(source.gid, address.gid.0);
    }
}

#[test]
fn infiniband_peers_of_one_subnet_are_reached_by_lid_and_others_by_gid() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
    let pd = fake.pd();
    let mut a = builder(&pd, EXTENDED).build().unwrap();
    let mut b = builder(&pd, EXTENDED).build().unwrap();
    connect(&mut a, &mut b);
    let mut elsewhere = b.address();
    (elsewhere.gid, elsewhere.lid) = ("fec0::1".parse().unwrap(), 0x22);
    let mut c = builder(&pd, EXTENDED).build().unwrap();
    c.connect(&elsewhere).unwrap();
    let routes: Vec<_> = fake
        .take_modified()
        .iter()
        .filter(|(_, mask)| mask & rdma_sys::IBV_QP_AV.0 != 0)
        .map(|(attr, _)| (attr.ah_attr.dlid, attr.ah_attr.is_global))
        .collect();
    assert_eq!(routes, [(0x11, 0), (0x11, 0), (0x22, 1)]);
}

#[test]
fn memory_errors_name_their_cause() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    assert!(matches!(pd.allocate(0), Err(Error::EmptyRegion)));
    assert!(matches!(pd.register(Box::<[u8]>::default()), Err(Error::EmptyRegion)));
    assert!(matches!(Pages::new(usize::MAX), Err(Error::Allocate { len: usize::MAX })));
    fake.fail("ibv_reg_mr", libc::ENOMEM);
    let error = pd.allocate(4096).unwrap_err().to_string();
    assert!(error.contains("4096 bytes") && error.contains("ulimit -l"), "{error}");
    fake.fail("ibv_alloc_pd", libc::ENOMEM);
    let error = pd.context().alloc_pd().unwrap_err();
    assert!(matches!(error, Error::AllocPd { errno: Errno(libc::ENOMEM) }), "{error}");
    fake.fail("ibv_create_comp_channel", libc::EMFILE);
    let error = pd.context().create_channel().unwrap_err();
    assert!(matches!(error, Error::CreateChannel { errno: Errno(libc::EMFILE) }), "{error}");
}

#[test]
fn prefetching_is_refused_where_the_device_lacks_it() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let error = pd.allocate(8).unwrap().prefetch().unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(fake.name()), "{error}");
}
