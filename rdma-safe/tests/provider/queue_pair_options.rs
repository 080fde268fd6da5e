//! Optional features of queue pairs: ECE, rate limits, the order of data.

use rdma_safe::error::Verb;
use rdma_safe::qp::{DataInOrder, Ece, ModifyError, RateLimit, WrOpcode};
use rdma_safe::sys::*;
use rdma_safe::{Errno, Error};

use crate::fake::{Config, Fake};
use crate::support::{EXTENDED, Raw, raw_with};

fn queue_pair(fake: &Fake) -> Raw {
    raw_with(&fake.pd(), EXTENDED, rdma_safe::WcFields::STANDARD, |qp| qp)
}

#[track_caller]
fn unsupported<T: std::fmt::Debug>(result: Result<T, Error>, expected: &str) {
    match result.unwrap_err() {
        Error::Unsupported { feature, .. } => assert!(feature.contains(expected), "{feature}"),
        error => panic!("{error:?}"),
    }
}

#[test]
fn both_ends_agree_on_options_of_the_vendor() {
    let fake = Fake::new(Config { ece_options: Some(0b0110), ..Config::default() });
    let (mut a, mut b) = (queue_pair(&fake), queue_pair(&fake));
    let offered = a.qp.ece().unwrap();
    assert_eq!(offered, Ece::new(0x02c9, 0b0110));
    let accepted = b.qp.set_ece(Ece::new(offered.vendor_id, 0b0011)).unwrap();
    assert_eq!(accepted.options, 0b0010, "only the options that the device supports");
    a.qp.set_ece(accepted).unwrap();
    assert_eq!((a.qp.ece().unwrap(), b.qp.ece().unwrap()), (accepted, accepted));
}

#[test]
fn ece_of_another_vendor_or_on_a_device_without_ece_is_refused() {
    let fake = Fake::new(Config::default());
    let mut raw = queue_pair(&fake);
    let error = raw.qp.set_ece(Ece::new(1, 0)).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::SetEce, errno: Errno(libc::EINVAL), .. }), "{error}");
    fake.fail("ibv_query_ece", libc::EIO);
    let error = raw.qp.ece().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryEce, errno: Errno(libc::EIO), .. }), "{error}");

    let without = Fake::new(Config { ece_options: None, ..Config::default() });
    let mut raw = queue_pair(&without);
    unsupported(raw.qp.ece(), "ECE");
    unsupported(raw.qp.set_ece(Ece::new(0x02c9, 0)), "ECE");
}

fn paced(attr: &mut ibv_device_attr_ex) {
    attr.packet_pacing_caps =
        ibv_packet_pacing_caps { qp_rate_limit_min: 100, qp_rate_limit_max: 1_000, supported_qpts: 1 << 2 };
}

#[test]
fn a_rate_limit_reaches_the_provider() {
    let fake = Fake::new(Config { change_device: paced, ..Config::default() });
    let mut raw = queue_pair(&fake);
    raw.qp.limit_rate(RateLimit::new(500).max_burst(4_096).typical_packet(1_024)).unwrap();
    raw.qp.limit_rate(RateLimit::new(100)).unwrap();
    raw.qp.limit_rate(RateLimit::new(1_000)).unwrap();
    raw.qp.limit_rate(RateLimit::NONE).unwrap();
    let seen: Vec<_> = fake.take_rate_limits();
    let seen: Vec<_> = seen.iter().map(|limit| (limit.rate_limit, limit.max_burst_sz, limit.typical_pkt_sz)).collect();
    assert_eq!(seen, [(500, 4_096, 1_024), (100, 0, 0), (1_000, 0, 0), (0, 0, 0)]);
}

#[test]
fn a_rate_beyond_the_device_is_refused_with_its_limits() {
    let fake = Fake::new(Config { change_device: paced, ..Config::default() });
    let mut raw = queue_pair(&fake);
    for kbps in [1, 99, 1_001, u32::MAX] {
        let error = raw.qp.limit_rate(RateLimit::new(kbps)).unwrap_err();
        let text = error.to_string();
        let Error::Modify(error) = error else { panic!("{error:?}") };
        assert!(matches!(*error, ModifyError::OutOfRange { value, .. } if value == u64::from(kbps)), "{error:?}");
        assert!(text.contains("100 to 1000 kbit/s"), "{text}");
    }
    assert_eq!(fake.calls("modify_qp_rate_limit"), 0, "checked before the call");
    fake.fail("modify_qp_rate_limit", libc::EINVAL);
    let error = raw.qp.limit_rate(RateLimit::new(500)).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::ModifyQpRateLimit, .. }), "{error}");
}

#[test]
fn a_rate_limit_is_refused_for_unsupported_queue_pair_types() {
    let raw_only = |attr: &mut ibv_device_attr_ex| {
        paced(attr);
        attr.packet_pacing_caps.supported_qpts = 1 << 8;
    };
    for fake in [Fake::new(Config::default()), Fake::new(Config { change_device: raw_only, ..Config::default() })] {
        let mut raw = queue_pair(&fake);
        unsupported(raw.qp.limit_rate(RateLimit::new(500)), "rate limits");
        assert_eq!(fake.calls("modify_qp_rate_limit"), 0, "checked before the call");
    }
    let claimed = Fake::new(Config { change_device: paced, rate_limits: false, ..Config::default() });
    unsupported(queue_pair(&claimed).qp.limit_rate(RateLimit::new(500)), "rate limits");
}

#[test]
fn data_in_order_is_reported_per_operation() {
    let data_in_order = [(WrOpcode::RDMA_WRITE.0, 3), (WrOpcode::SEND.0, 2), (WrOpcode::FLUSH.0, 8)].into();
    let fake = Fake::new(Config { data_in_order, ..Config::default() });
    let qp = queue_pair(&fake).qp;
    assert_eq!(qp.data_in_order(WrOpcode::RDMA_WRITE), DataInOrder::WHOLE_MESSAGE | DataInOrder::ALIGNED_128_BYTES);
    assert_eq!(qp.data_in_order(WrOpcode::SEND), DataInOrder::ALIGNED_128_BYTES);
    assert_eq!(qp.data_in_order(WrOpcode::RDMA_READ), DataInOrder::empty());
    assert_eq!(qp.data_in_order(WrOpcode::FLUSH).bits(), 8, "unknown bits are kept");
    assert_eq!(qp.data_in_order(WrOpcode(4_000)), DataInOrder::empty());
}

#[test]
fn an_older_library_reports_data_in_order_as_yes_or_no() {
    let data_in_order = [(WrOpcode::RDMA_WRITE.0, 1)].into();
    let fake = Fake::new(Config { data_in_order, data_in_order_flags: false, ..Config::default() });
    let qp = queue_pair(&fake).qp;
    assert_eq!(qp.data_in_order(WrOpcode::RDMA_WRITE), DataInOrder::all() & DataInOrder::from_bits_retain(3));
    assert_eq!(qp.data_in_order(WrOpcode::SEND), DataInOrder::empty());
}
