//! Flows: matching, C layout, actions and counters, and destruction.

use std::any::Any;
use std::net::{Ipv4Addr, Ipv6Addr};

use rdma_safe::counters::{CounterDescription, Counters};
use rdma_safe::error::Verb;
use rdma_safe::flow::{
    AesKey, EspAction, EspEncapsulation, EspFlags, EspHeader, EthernetHeader, Flow, FlowAction, FlowFlags, FlowRule,
    FlowType, GreHeader, Ipv4ExtHeader, Ipv4Header, Ipv6Header, MplsHeader, TcpHeader, UdpHeader, VxlanHeader,
};
use rdma_safe::{Endpoint, Errno, Error, InitOptions, ProtectionDomain, QueuePairType, WcFields};

use crate::fake::{Config, Fake, Live};
use crate::support::{EXTENDED, Raw, drop_in_order, raw_with, receive, seen};
use crate::work_queues::frame;

fn datagrams(pd: &ProtectionDomain) -> Raw {
    let mut raw = raw_with(pd, EXTENDED, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UD));
    raw.qp.init_datagrams(1, &InitOptions::default()).unwrap();
    raw
}

const ONES: UdpHeader = UdpHeader { dst_port: 0xffff, src_port: 0 };

fn to_port(dst_port: u16) -> FlowRule {
    FlowRule::new(1).matching(UdpHeader { dst_port, src_port: 0 }, ONES)
}

/// The header specification that the provider received: type, size, value and mask.
fn laid_out(rule: FlowRule) -> (u32, u16, Vec<u8>, Vec<u8>) {
    let fake = Fake::new(Config::steering());
    let raw = datagrams(&fake.pd());
    drop(rule.steer(&raw.qp).unwrap());
    let flow = fake.take_flows().remove(0);
    assert_eq!(flow.size, 20 + flow.specs[0].size);
    let spec = flow.specs.into_iter().next().unwrap();
    (spec.kind, spec.size, spec.val, spec.mask)
}

#[test]
fn every_header_is_laid_out_as_c_does_in_network_byte_order() {
    let rule = || FlowRule::new(1);
    let (a, b) = (Ipv4Addr::new(10, 1, 2, 3), Ipv4Addr::new(10, 4, 5, 6));
    let ethernet = EthernetHeader {
        dst_mac: [1, 2, 3, 4, 5, 6],
        src_mac: [7, 8, 9, 10, 11, 12],
        ether_type: 0x0800,
        vlan_tag: 0x1234,
    };
    let of_ethernet = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 0, 0x12, 0x34].to_vec();
    let mask = EthernetHeader { ether_type: 0xffff, ..EthernetHeader::default() };
    let of_mask = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0].to_vec();
    assert_eq!(laid_out(rule().matching(ethernet, mask)), (0x20, 40, of_ethernet, of_mask));

    let mask = Ipv4Header { src: Ipv4Addr::BROADCAST, ..Ipv4Header::default() };
    let expected = (0x30, 24, vec![10, 1, 2, 3, 10, 4, 5, 6], vec![255, 255, 255, 255, 0, 0, 0, 0]);
    assert_eq!(laid_out(rule().matching(Ipv4Header { src: a, dst: b }, mask)), expected);

    let value = Ipv4ExtHeader { src: a, dst: b, protocol: 6, tos: 4, ttl: 64, flags: 2 };
    let mask = Ipv4ExtHeader { protocol: 255, ttl: 1, ..Ipv4ExtHeader::default() };
    let expected = (0x32, 32, vec![10, 1, 2, 3, 10, 4, 5, 6, 6, 4, 64, 2], vec![0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 1, 0]);
    assert_eq!(laid_out(rule().matching(value, mask)), expected);

    let (src, dst): (Ipv6Addr, Ipv6Addr) = ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
    let value = Ipv6Header { src, dst, flow_label: 0x12345, next_header: 17, traffic_class: 8, hop_limit: 9 };
    let mask = Ipv6Header { flow_label: 0xfffff, hop_limit: 255, ..Ipv6Header::default() };
    let bytes = [&src.octets()[..], &dst.octets(), &[0, 1, 0x23, 0x45, 17, 8, 9]].concat();
    let of_mask = [&[0; 32][..], &[0, 0xf, 0xff, 0xff, 0, 0, 255]].concat();
    assert_eq!(laid_out(rule().matching(value, mask)), (0x31, 88, bytes, of_mask));

    let ports = (vec![0x12, 0xb7, 0, 80], vec![0xff, 0xff, 0, 1]);
    let (value, mask) = (TcpHeader { dst_port: 4791, src_port: 80 }, TcpHeader { dst_port: 0xffff, src_port: 1 });
    assert_eq!(laid_out(rule().matching(value, mask)), (0x40, 16, ports.0.clone(), ports.1.clone()));
    let (value, mask) = (UdpHeader { dst_port: 4791, src_port: 80 }, UdpHeader { dst_port: 0xffff, src_port: 1 });
    assert_eq!(laid_out(rule().matching(value, mask)), (0x41, 16, ports.0.clone(), ports.1.clone()));
    assert_eq!(laid_out(rule().matching_inner(value, mask)), (0x141, 16, ports.0, ports.1));

    let (value, mask) = (VxlanHeader { vni: 0x010203 }, VxlanHeader { vni: 0xffffff });
    assert_eq!(laid_out(rule().matching(value, mask)), (0x50, 16, vec![0, 1, 2, 3], vec![0, 255, 255, 255]));
    let value = GreHeader { flags: 0x2000, protocol: 0x86dd, key: 0x01020304 };
    let mask = GreHeader { flags: 0, protocol: 0xffff, key: 0xff };
    let expected = (0x51, 24, vec![0x20, 0, 0x86, 0xdd, 1, 2, 3, 4], vec![0, 0, 255, 255, 0, 0, 0, 255]);
    assert_eq!(laid_out(rule().matching(value, mask)), expected);
    let (value, mask) = (MplsHeader { entry: 0x01020304 }, MplsHeader { entry: 0xfffff000 });
    assert_eq!(laid_out(rule().matching(value, mask)), (0x60, 16, vec![1, 2, 3, 4], vec![255, 255, 0xf0, 0]));
    let (value, mask) = (EspHeader { spi: 0x0a0b0c0d, seq: 7 }, EspHeader { spi: u32::MAX, seq: 0 });
    let expected = (0x34, 24, vec![0xa, 0xb, 0xc, 0xd, 0, 0, 0, 7], vec![255, 255, 255, 255, 0, 0, 0, 0]);
    assert_eq!(laid_out(rule().matching(value, mask)), expected);
}

#[test]
fn headers_and_actions_of_a_flow_are_contiguous_and_in_order() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let raw = datagrams(&pd);
    let counters = pd.context().create_counters().unwrap();
    let action = EspAction::new().create(pd.context()).unwrap();
    let rule = to_port(5)
        .tag(0xabcdef)
        .action(&action)
        .count(&counters)
        .drop_packets()
        .matching_inner(Ipv4Header::default(), Ipv4Header::default())
        .priority(3)
        .flags(FlowFlags::DONT_TRAP | FlowFlags::EGRESS);
    let flow = rule.clone().steer(&raw.qp).unwrap();
    let other = rule.flow_type(FlowType::SNIFFER).steer(&raw.qp).unwrap();
    let [first, second] = <[_; 2]>::try_from(fake.take_flows()).unwrap();
    assert_eq!((first.flow_type, first.priority, first.port, first.flags), (0, 3, 1, 2 | 4));
    let specs: Vec<_> = first.specs.iter().map(|spec| (spec.at, spec.kind, spec.size, spec.argument)).collect();
    let expected = [
        (0, 0x41, 16, 0),
        (16, 0x130, 24, 0),
        (40, 0x1002, 16, action.as_raw().addr()),
        (56, 0x1003, 16, counters.as_raw().addr()),
        (72, 0x1001, 8, 0),
        (80, 0x1000, 12, 0xabcdef),
    ];
    assert_eq!((specs, first.size), (expected.to_vec(), 112));
    assert_eq!((second.flow_type, second.specs), (3, first.specs));
    assert_eq!(flow.context().device_name(), fake.name());
    drop(other);
    flow.destroy().unwrap();
    assert_eq!(fake.live().flows, 0);
}

#[test]
fn a_packet_goes_to_the_first_matching_flow() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let [mut a, mut b, mut rest] = [(); 3].map(|()| datagrams(&pd));
    let inboxes = [&mut a, &mut b, &mut rest].map(|raw| {
        let inbox = pd.allocate(128).unwrap();
        let sge = inbox.sge();
        receive!(raw, 1, rdma_safe::Sge { len: 64, ..sge }).unwrap();
        receive!(raw, 2, rdma_safe::Sge { address: sge.address + 64, len: 64, ..sge }).unwrap();
        inbox
    });
    let mac = EthernetHeader { dst_mac: [2, 0, 0, 0, 0, 2], ..EthernetHeader::default() };
    let whole = EthernetHeader { dst_mac: [255; 6], ..EthernetHeader::default() };
    let to = Ipv4Header { dst: Ipv4Addr::new(10, 0, 0, 2), ..Ipv4Header::default() };
    let subnet = Ipv4Header { dst: Ipv4Addr::new(255, 255, 255, 0), ..Ipv4Header::default() };
    let counters = pd.context().create_counters().unwrap();
    counters.attach(CounterDescription::PACKETS, 0).unwrap();
    counters.attach(CounterDescription::BYTES, 2).unwrap();
    let flows = [
        to_port(1000).matching(mac, whole).count(&counters).steer(&a.qp).unwrap(),
        to_port(2000).matching(to, subnet).count(&counters).steer(&b.qp).unwrap(),
        to_port(3000).drop_packets().steer(&b.qp).unwrap(),
        FlowRule::new(1).priority(1).steer(&rest.qp).unwrap(),
    ];
    for (port, text) in [(2000, b"to b"), (1000, b"to a"), (3000, b"gone"), (4000, b"rest")] {
        fake.packet(&frame(9, port, text));
    }
    for (raw, (inbox, text)) in
        [&mut a, &mut b, &mut rest].into_iter().zip(inboxes.iter().zip([b"to a", b"to b", b"rest"]))
    {
        assert_eq!(seen(&mut raw.cq).iter().map(|wc| wc.byte_len).collect::<Vec<_>>(), [Some(46)]);
        assert_eq!(&inbox[42..46], text);
    }
    let mut values = [u64::MAX; 4];
    counters.read(&mut values, false).unwrap();
    assert_eq!(values, [2, 0, 92, 0]);
    // A destroyed flow no longer receives packets.
    let [first, others @ ..] = flows;
    first.destroy().unwrap();
    fake.packet(&frame(9, 1000, b"more"));
    assert_eq!((seen(&mut a.cq).len(), seen(&mut rest.cq).len()), (0, 1));
    counters.read(&mut values, true).unwrap();
    assert_eq!(values, [2, 0, 92, 0]);
    drop((others, a, b, rest));
}

#[test]
fn a_flow_delivers_to_a_raw_packet_queue_pair() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let Raw { qp, cq: _cq } = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::RAW_PACKET));
    drop(to_port(9).steer(&qp).unwrap());
    assert_eq!(fake.take_flows().len(), 1);
}

#[test]
fn invalid_uses_of_flow_counters_are_refused_with_the_reason() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let raw = datagrams(&pd);
    let counters = pd.context().create_counters().unwrap();
    counters.attach(CounterDescription::PACKETS, 1).unwrap();
    let error = counters.attach(CounterDescription(9), 0).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "counters of flows", .. }), "{error}");
    let mut flow = to_port(7).count(&counters).steer(&raw.qp).unwrap();
    let error = counters.attach(CounterDescription::BYTES, 0).unwrap_err();
    assert!(matches!(error, Error::Verb { errno: Errno(libc::EBUSY), .. }), "{error}");
    let error = counters.read(&mut [0], false).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::ReadCounters, errno: Errno(libc::EINVAL), .. }), "{error}");
    // Attaches counters to an existing flow.
    let late = pd.context().create_counters().unwrap();
    flow.attach(&late, CounterDescription::PACKETS, 0).unwrap();
    fake.packet(&frame(1, 7, b"abcd"));
    let mut values = [0; 2];
    late.read(&mut values, false).unwrap();
    assert_eq!(values, [1, 0]);
    counters.read(&mut values, false).unwrap();
    assert_eq!(values, [0, 1]);
    let stranger = fake.open().create_counters().unwrap();
    let error = flow.attach(&stranger, CounterDescription::PACKETS, 0).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "set of counters" }), "{error}");
    drop((counters, late));
    assert_eq!(fake.live().counters, 3, "the flow keeps them");
    drop(flow);
    assert_eq!(fake.live().counters, 1);
}

#[test]
fn an_esp_action_passes_its_attributes_to_the_provider() {
    let fake = Fake::new(Config::steering());
    let context = fake.open();
    let key: [u8; 16] = std::array::from_fn(|index| index as u8);
    let esp = EspAction::new().attributes(EspFlags::ENCRYPT | EspFlags::TRANSPORT, 0x1234, 1).limits(0, 1 << 40);
    let esp = esp.aes_gcm(AesKey::Aes128(key), 5, 6, 16).replay_window(32).esn(9);
    assert!(!format!("{esp:?}").contains('5'), "the key must not appear in logs");
    let action = esp.create(&context).unwrap();
    action.clone().modify(EspAction::new().esn(10)).unwrap();
    let [made, changed] = <[_; 2]>::try_from(fake.take_esp()).unwrap();
    assert_eq!((made.flags, made.spi, made.hard_limit_pkts), (Some(4 | 2), 0x1234, 1 << 40));
    assert_eq!((made.key, made.replay, made.esn), (key.to_vec(), Some(32), Some(9)));
    assert_eq!((changed.flags, changed.key.len(), changed.replay, changed.esn), (None, 0, None, Some(10)));
    let header = Ipv4ExtHeader { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), ttl: 64, ..Default::default() };
    let _ipv4 = EspAction::new().encapsulation(EspEncapsulation::Ipv4(header)).create(&context).unwrap();
    let header = Ipv6Header { dst: Ipv6Addr::LOCALHOST, flow_label: 0x12345, hop_limit: 9, ..Ipv6Header::default() };
    let _ipv6 = EspAction::new().encapsulation(EspEncapsulation::Ipv6(header)).create(&context).unwrap();
    let [ipv4, ipv6] = <[_; 2]>::try_from(fake.take_esp()).unwrap();
    assert_eq!(ipv4.outer, Some((0x30, vec![10, 0, 0, 1, 10, 0, 0, 2, 0, 0, 64, 0])));
    let (kind, bytes) = ipv6.outer.unwrap();
    assert_eq!((kind, bytes.len(), &bytes[31..]), (0x31, 40, &[1, 0, 1, 0x23, 0x45, 0, 0, 9, 0][..]));
    fake.fail("modify_flow_action_esp", libc::EINVAL);
    let error = action.modify(EspAction::default()).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::ModifyFlowActionEsp, .. }), "{error}");
}

#[test]
fn a_flow_and_its_parents_are_dropped_in_any_order() {
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 2, 0, 4, 3], [2, 4, 1, 3, 0], [3, 0, 4, 2, 1]] {
        let fake = Fake::new(Config::steering());
        let pd = fake.pd();
        let Raw { qp, cq } = datagrams(&pd);
        let counters = pd.context().create_counters().unwrap();
        let action = EspAction::new().create(pd.context()).unwrap();
        let flow = to_port(1).count(&counters).action(&action).steer(&qp).unwrap();
        drop(pd);
        let objects: [Box<dyn Any>; 5] =
            [Box::new(qp), Box::new(cq), Box::new(counters), Box::new(action), Box::new(flow)];
        drop_in_order(&order, objects);
        assert_eq!(fake.live(), Live::default(), "{order:?}");
        assert_eq!(fake.take_violations(), [""; 0], "{order:?}");
    }
}

#[test]
fn a_queue_pair_is_not_destroyed_while_it_has_a_flow() {
    let fake = Fake::new(Config::steering());
    let mut raw = datagrams(&fake.pd());
    receive!(raw, 1, rdma_safe::Sge::EMPTY).unwrap();
    let Raw { qp, mut cq } = raw;
    let flow = to_port(1).steer(&qp).unwrap();
    fake.break_qp(qp.number());
    let error = qp.destroy().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "queue pair", users: "flows or memory windows" }), "{error}");
    assert_eq!(fake.live().qps, 1);
    // A queue pair with a flow cannot be released to other code, either.
    let other = datagrams(&fake.pd()).qp;
    let to_other = to_port(2).steer(&other).unwrap();
    assert!(matches!(other.into_raw(), Err(Error::InUse { object: "queue pair", users: "flows or memory windows" })));
    assert_eq!(fake.live().qps, 2);
    drop(to_other);
    assert_eq!(fake.live().qps, 1);
    // The flow is dropped after the queue pair, whose destruction is then deferred until the poll ends.
    let mut poll = cq.poll();
    assert!(poll.next().unwrap().is_some());
    drop(flow);
    assert_eq!((fake.live().flows, fake.live().qps), (0, 1));
    drop(poll);
    assert_eq!(fake.live().qps, 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_flow_that_cannot_be_destroyed_keeps_its_parents() {
    for explicit in [true, false] {
        let fake = Fake::new(Config::steering());
        fake.may_leak();
        let Raw { qp, cq } = datagrams(&fake.pd());
        let counters = fake_counters(&qp);
        let flow = to_port(1).count(&counters).steer(&qp).unwrap();
        fake.fail("destroy_flow", libc::EBUSY);
        match explicit {
            true => {
                let error = flow.destroy().unwrap_err();
                assert!(matches!(error, Error::Verb { verb: Verb::DestroyFlow, .. }), "{error}");
            }
            false => drop(flow),
        }
        drop((qp, cq, counters));
        assert_eq!(fake.live(), Live { contexts: 1, pds: 1, cqs: 1, qps: 1, flows: 1, counters: 1, ..Live::default() });
        assert_eq!((fake.calls("destroy_flow"), fake.take_violations().len()), (1, 0));
    }
}

#[test]
fn an_endpoint_with_a_flow_frees_its_memory_after_the_flow_is_destroyed() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let mut endpoint = Endpoint::builder(&pd).build_datagrams(1).unwrap();
    endpoint.receive(pd.allocate(64).unwrap()).unwrap();
    let flow = to_port(1).steer(endpoint.queue_pair()).unwrap();
    let mrs = fake.live().mrs;
    let error = endpoint.close().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "queue pair", users: "flows or memory windows" }), "{error}");
    assert_eq!((fake.live().mrs, fake.live().qps), (mrs, 1));
    // The queue pair and its receives still exist.
    fake.packet(&frame(9, 1, b"late"));
    drop(flow);
    assert_eq!((fake.live().mrs, fake.live().qps), (0, 0));
}

fn fake_counters(qp: &rdma_safe::QueuePair) -> Counters {
    qp.context().create_counters().unwrap()
}

#[test]
fn an_invalid_flow_is_refused_before_the_call() {
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let (raw, connected) = (datagrams(&pd), raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp));
    let error = FlowRule::new(1).steer(&connected.qp).unwrap_err();
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RC, .. }), "{error}");
    let error = FlowRule::new(2).steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::NoSuchPort { port: 2, .. }), "{error}");
    let stranger = fake.open();
    let error = to_port(1).count(&stranger.create_counters().unwrap()).steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "set of counters" }), "{error}");
    let error = to_port(1).action(&EspAction::new().create(&stranger).unwrap()).steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "flow action" }), "{error}");
    let many = (0..256).fold(FlowRule::new(1), |rule, _| rule.matching(ONES, ONES));
    let error = many.steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::CreateFlow { specs: 256, errno: Errno(libc::E2BIG) }), "{error}");
    assert_eq!(fake.calls("create_flow"), 0);
    let most = (0..255).fold(FlowRule::new(1), |rule, _| rule.matching(Ipv6Header::default(), Ipv6Header::default()));
    drop(most.steer(&raw.qp).unwrap());
    assert_eq!(fake.take_flows()[0].size, 20 + 255 * 88);
    fake.fail("create_flow", libc::EPERM);
    let error = to_port(1).steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::CreateFlow { specs: 1, errno: Errno(libc::EPERM) }), "{error}");
    assert!(error.to_string().contains("CAP_NET_RAW"), "{error}");

    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let raw = datagrams(&pd);
    let error = to_port(1).steer(&raw.qp).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "flow steering", .. }), "{error}");
    let error = pd.context().create_counters().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "counters of flows", .. }), "{error}");
    let error = EspAction::new().create(pd.context()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "flow actions of ESP", .. }), "{error}");
}

#[test]
fn adopted_flows_and_counters_are_destroyed_once() {
    use rdma_safe::sys::*;
    let fake = Fake::new(Config::steering());
    let pd = fake.pd();
    let raw = datagrams(&pd);
    let context = pd.context();
    // SAFETY: follows the manual pages; each object is handed over at once.
    unsafe {
        let made = ibv_create_counters(context.as_raw(), &mut ibv_counters_init_attr::zeroed());
        let counters = Counters::from_raw(context, std::ptr::NonNull::new(made).unwrap());
        let made = ibv_create_flow_action_esp(context.as_raw(), &mut ibv_flow_action_esp_attr::zeroed());
        let action = FlowAction::from_raw(context, std::ptr::NonNull::new(made).unwrap());
        let mut attr = ibv_flow_attr { port: 1, size: 20, ..ibv_flow_attr::zeroed() };
        let made = std::ptr::NonNull::new(ibv_create_flow(raw.qp.as_raw(), &mut attr)).unwrap();
        let flow = Flow::from_raw(made, &raw.qp, &[action], &[counters]);
        assert_eq!(flow.as_raw(), made.as_ptr());
        assert_eq!((fake.live().flows, fake.live().flow_actions, fake.live().counters), (1, 1, 1));
    }
    assert_eq!((fake.live().flows, fake.live().flow_actions, fake.live().counters), (0, 0, 0));
}
