//! Registrations of shared memory that `rdma-pool` keeps for the next use.

use std::sync::Arc;

use bytes::Bytes;
use rdma_pool::{Payload, PayloadError, RegistrationCache, RegistrationError};
use rdma_safe::{Errno, Error, WcStatus};

use crate::support::interposer::{Live, interposed};
use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::link::connected;
use crate::support::{DEADLINE, device, error_of, filled, pattern};

fn shared(seed: u64, len: usize) -> Arc<[u8]> {
    pattern(seed, len).into()
}

#[test]
fn cached_memory_is_sent_to_several_peers_without_a_copy() {
    let Some(rdma) = device() else { return };
    let mut labs = [Lab::new(&rdma, Mode::EXTENDED), Lab::new(&rdma, Mode::CLASSIC)];
    let payload = shared(1, 5000);
    for (lab, cut) in labs.iter_mut().zip([0..5000, 300..4567]) {
        let cache = RegistrationCache::new(&lab.pd, 1 << 20);
        let memory = cache.register(&payload).unwrap();
        assert_eq!(memory.as_ptr(), payload.as_ptr());
        lab.b.receive(1, 0..8192).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(memory.slice(cut.clone()).unwrap().sge()))]).unwrap();
        assert_eq!(lab.b.next_ok(1).byte_len, Some(cut.len() as u32));
        lab.a.next_ok(1);
        assert!(lab.b.memory.get(0..cut.len()) == payload[cut], "the bytes arrived changed");
    }
}

#[test]
fn the_device_cannot_write_to_cached_memory() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let cache = RegistrationCache::new(&lab.pd, 1 << 20);
    let payload = shared(1, 64);
    let memory = cache.register(&payload).unwrap();
    let remote = lab.b.memory.remote(0);
    lab.a.post(&[Wr::new(1, Op::Read(remote), Data::One(memory.sge()))]).unwrap();
    assert_ne!(lab.a.next().status, WcStatus::SUCCESS);
    assert_eq!(*payload, pattern(1, 64));
}

#[test]
fn cached_memory_in_flight_is_not_evicted() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_sges(2));
    let cache = RegistrationCache::new(&pd, 5000);
    let payload = shared(1, 4000);
    b.receive(pd.allocate(5000).unwrap()).unwrap();
    a.send_list((filled(&pd, b"header"), cache.register(&payload).unwrap().slice(..3000).unwrap())).unwrap();
    let long = Bytes::from(pattern(2, 1001));
    for error in [error_of(cache.register(&shared(2, 1001))), error_of(cache.register_bytes(long.clone()))] {
        assert!(matches!(error, RegistrationError::Full { len: 1001, in_use: 4000, limit: 5000 }), "{error}");
    }
    assert!(!cache.evict(&payload));
    let message = b.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    assert!(message[..6] == *b"header" && message[6..] == payload[..3000]);
    let done = a.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(cache.statistics().bytes_in_use, 4000, "the completion has it");
    drop(done);
    b.receive(message).unwrap();
    a.send_list(cache.register_bytes(long.clone()).unwrap()).unwrap();
    assert_eq!((Arc::strong_count(&payload), cache.statistics().bytes_in_use), (1, 1001), "evicted, and in flight");
    assert!(*b.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap() == *long);
    drop(a.wait(DEADLINE).unwrap().ok().unwrap());
    assert_eq!(cache.statistics().bytes, 0);
}

#[test]
fn one_owner_is_registered_once_until_it_is_evicted() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 300);
    let [first, second, third] = [1, 2, 3].map(|seed| shared(seed, 100));
    for payload in [&first, &second, &first, &third, &first] {
        drop(cache.register(payload).unwrap());
    }
    assert_eq!((soft.calls("ibv_reg_mr"), soft.calls("ibv_dereg_mr")), (3, 0));
    let in_use = cache.register(&second).unwrap();
    drop(cache.register(&shared(4, 150)).unwrap());
    assert_eq!((soft.calls("ibv_reg_mr"), soft.calls("ibv_dereg_mr")), (4, 2));
    assert_eq!([&first, &second, &third].map(Arc::strong_count), [1, 2, 1], "only the one in use is still registered");
    let error = error_of(cache.register(&shared(5, 201)));
    assert!(matches!(error, RegistrationError::Full { len: 201, in_use: 100, limit: 300 }), "{error}");
    assert!(error.to_string().contains("100 of its 300 bytes are in use; drop completions"), "{error}");
    let error = error_of(cache.register(&shared(5, 301)));
    assert!(matches!(error, RegistrationError::TooLong { len: 301, limit: 300 }), "{error}");
    assert!(error.to_string().contains("raise the limit of 300 bytes in RegistrationCache::new"), "{error}");
    drop(in_use);
    assert!(cache.evict(&second));
    assert_eq!(Arc::strong_count(&second), 1, "the owner is back");
    let statistics = cache.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.evictions), (3, 6, 3));
    assert_eq!((statistics.regions, statistics.bytes, statistics.bytes_in_use), (1, 150, 0));
}

#[test]
fn equal_addresses_of_different_owners_are_different_memory() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 1 << 20);
    // Each vector is freed before the next is allocated. A cache that is keyed by addresses finds most of them again.
    let owners = if cfg!(miri) { 8 } else { 100 };
    for seed in 0..owners {
        let payload = Arc::new(pattern(seed, 4096));
        assert_eq!(*cache.register(&payload).unwrap(), **payload);
        assert!(cache.evict(&payload));
    }
    assert_eq!((soft.calls("ibv_reg_mr"), cache.statistics().hits), (owners as usize, 0));
}

#[test]
fn memory_in_use_outlives_its_cache_and_its_owner() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 1 << 20);
    let payload = shared(1, 100);
    let weak = Arc::downgrade(&payload);
    let memory = cache.register(&payload).unwrap();
    drop((cache, payload));
    assert_eq!((*memory).to_vec(), pattern(1, 100));
    let clone = memory.clone();
    drop(memory);
    assert_eq!((soft.calls("ibv_dereg_mr"), weak.strong_count()), (0, 1));
    drop(clone);
    assert_eq!((soft.calls("ibv_dereg_mr"), weak.strong_count()), (1, 0));
}

#[test]
fn a_memlock_limit_evicts_before_it_fails() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 1 << 20);
    let payloads = [1, 2, 3].map(|seed| shared(seed, 100));
    for payload in &payloads {
        drop(cache.register(payload).unwrap());
    }
    let in_use = cache.register(&payloads[0]).unwrap();
    soft.fail_once("ibv_reg_mr", libc::ENOMEM);
    let another = cache.register(&shared(4, 100)).unwrap();
    assert_eq!(payloads.each_ref().map(Arc::strong_count), [2, 1, 2], "the oldest that was not in use");
    soft.fail("ibv_reg_mr", libc::ENOMEM);
    let error = error_of(cache.register(&shared(5, 100)));
    let RegistrationError::Register(Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. }) = &error else {
        panic!("{error:?}")
    };
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    assert_eq!(payloads.each_ref().map(Arc::strong_count), [2, 1, 1]);
    soft.heal("ibv_reg_mr");
    assert_eq!(cache.statistics().bytes, 200, "a failure reserves nothing");
    drop((in_use, another));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn the_owner_of_memory_that_cannot_be_deregistered_is_leaked() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 1 << 20);
    let payload = shared(1, 100);
    drop(cache.register(&payload).unwrap());
    soft.fail("ibv_dereg_mr", libc::EBUSY);
    assert_eq!(cache.clear(), 100);
    assert_eq!(Arc::strong_count(&payload), 2);
    drop(cache);
    assert_eq!(soft.live(), Live { contexts: 1, pds: 1, mrs: 1, ..Live::default() });
}

#[test]
fn empty_memory_is_refused() {
    let Some(rdma) = device() else { return };
    let cache = RegistrationCache::new(&rdma.pd(), 100);
    let error = error_of(cache.register(&shared(1, 0)));
    assert!(matches!(error, RegistrationError::Register(Error::EmptyRegion)), "{error:?}");
    assert_eq!(cache.statistics().bytes, 0);
}

#[test]
fn long_bytes_are_sent_in_place_and_short_ones_copied() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd_of_own_context();
    let cache = RegistrationCache::new(&pd, 5000);
    let long = Bytes::from(pattern(1, 3000)).slice(100..2500);
    let copy = |len| pd.allocate(len);
    let registered = match cache.payload(long.clone(), 1000, copy).unwrap() {
        Payload::Registered(memory) => memory,
        copied => panic!("{copied:?}"),
    };
    assert_eq!((registered.as_ptr(), registered.len()), (long.as_ptr(), 2400));
    assert_eq!((soft.calls("ibv_reg_mr"), cache.statistics().bytes_in_use), (1, 2400));
    match cache.payload(long.slice(..999), 1000, copy).unwrap() {
        Payload::Copied(buffer) => assert_eq!(*buffer, pattern(1, 3000)[100..1099]),
        registered => panic!("{registered:?}"),
    }
    let error = error_of(cache.payload(long.slice(..10), 1000, |_| pd.allocate(9)));
    assert!(matches!(error, PayloadError::Copy(Error::OutOfBounds { .. })), "{error:?}");
    let error = error_of(cache.payload(Bytes::from(vec![0; 2601]), 1000, copy));
    let PayloadError::Register(RegistrationError::Full { in_use: 2400, .. }) = error else { panic!("{error:?}") };
    let statistics = cache.statistics();
    assert_eq!((statistics.copied, statistics.uncached, statistics.misses), (1, 2, 0), "one payload did not fit");
    let clone = registered.clone();
    drop((registered, long));
    assert_eq!(cache.statistics().bytes_in_use, 2400);
    let mrs = soft.live().mrs;
    drop(clone);
    assert_eq!((mrs - soft.live().mrs, cache.statistics().bytes), (1, 0));
}

#[test]
fn the_owner_of_bytes_is_dropped_after_the_last_use() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 5000);
    let owner = shared(1, 64);
    let memory = cache.register_bytes(Bytes::from_owner(Arc::clone(&owner))).unwrap();
    drop(cache);
    assert_eq!(Arc::strong_count(&owner), 2);
    drop(memory);
    assert_eq!((Arc::strong_count(&owner), soft.calls("ibv_dereg_mr")), (1, 1));
}

#[test]
fn shared_bytes_have_an_identity() {
    let Some(soft) = interposed() else { return };
    let cache = RegistrationCache::new(&soft.pd_of_own_context(), 5000);
    let bytes = Arc::new(Bytes::from(pattern(1, 64)));
    drop(cache.register(&bytes).unwrap());
    assert_eq!(*cache.register(&bytes).unwrap(), pattern(1, 64));
    assert_eq!((soft.calls("ibv_reg_mr"), cache.statistics().hits), (1, 1));
}
