//! The clock of a device.

use std::time::{Duration, Instant, SystemTime};

use rdma_safe::error::Verb;
use rdma_safe::sys::*;
use rdma_safe::{Context, Error};

use crate::fake::{Config, Fake};

/// A device whose clock has 32 bits, runs at 1 GHz and shows 5 s. Bits beyond the mask are set, too.
fn device(raw_clock: fn(&mut ibv_values_ex)) -> Fake {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        attr.completion_timestamp_mask = 0xffff_ffff;
        attr.hca_core_clock = 1_000_000;
    };
    Fake::new(Config { change_device, raw_clock: Some(raw_clock), ..Config::default() })
}

fn five_seconds(values: &mut ibv_values_ex) {
    values.raw_clock.tv_sec = 0;
    values.raw_clock.tv_nsec = 5_000_000_000;
}

#[test]
fn a_timestamp_becomes_a_time_of_the_host() {
    let fake = device(five_seconds);
    let context = fake.open();
    assert_eq!(context.raw_clock().unwrap(), 5_000_000_000);
    let clock = context.clock().unwrap();
    assert_eq!((clock.khz(), clock.mask()), (1_000_000, 0xffff_ffff));

    let (before, today) = (Instant::now(), SystemTime::now());
    let reading = context.read_clock().unwrap();
    assert!(before <= reading.instant() && reading.instant() <= Instant::now());
    assert!(reading.uncertainty() <= before.elapsed());
    assert!(reading.system_time() >= today && reading.clock() == clock);
    assert_eq!(reading.ticks(), 5_000_000_000 & 0xffff_ffff);

    let later = (reading.ticks() + 250_000) & clock.mask();
    assert_eq!(reading.instant_of(later), Some(reading.instant() + Duration::from_micros(250)));
    assert_eq!(reading.system_time_of(later), Some(reading.system_time() + Duration::from_micros(250)));
    assert_eq!(clock.between(reading.ticks(), later), Duration::from_micros(250));
}

#[track_caller]
fn unsupported(result: Result<impl std::fmt::Debug, Error>, expected: &str) {
    match result.unwrap_err() {
        Error::Unsupported { feature, .. } => assert!(feature.contains(expected), "{feature}"),
        error => panic!("{error:?}"),
    }
}

fn each(context: &Context, expected: &str) {
    unsupported(context.raw_clock(), expected);
}

#[test]
fn a_clock_that_cannot_be_read_is_refused_by_name() {
    let without = Fake::new(Config::default());
    each(&without.open(), "ibv_query_rt_values_ex");
    // The call succeeds, but the mask reports no value.
    let silent = device(|values| values.comp_mask = 0);
    each(&silent.open(), "ibv_query_rt_values_ex");
    let refusing = device(five_seconds);
    refusing.fail("query_rt_values", libc::EOPNOTSUPP);
    each(&refusing.open(), "ibv_query_rt_values_ex");
    let broken = device(five_seconds);
    broken.fail("query_rt_values", libc::EIO);
    let error = broken.open().raw_clock().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryRtValuesEx, .. }), "{error}");
}

#[test]
fn a_device_without_timestamps_has_no_clock() {
    let rate_only = Fake::new(Config { raw_clock: Some(five_seconds), ..Config::default() });
    let mask_only = |attr: &mut ibv_device_attr_ex| {
        attr.completion_timestamp_mask = u64::MAX;
        attr.hca_core_clock = 0;
    };
    let mask_only = Fake::new(Config { change_device: mask_only, raw_clock: Some(five_seconds), ..Config::default() });
    for fake in [rate_only, mask_only] {
        let context = fake.open();
        unsupported(context.clock(), "timestamps of completions");
        unsupported(context.read_clock(), "timestamps of completions");
        assert_eq!(fake.calls("query_rt_values"), 0, "checked before the call");
    }
}
