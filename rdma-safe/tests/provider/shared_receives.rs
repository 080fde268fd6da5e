//! Shared receive queues on a provider that refuses, lacks or fails a function, and the number of calls.

use rdma_safe::error::Verb;
use rdma_safe::{Errno, Error, PostError, Sge, SharedReceiveQueue};

use crate::fake::{Bad, Config, Fake, Live, PostFault};

fn queue(fake: &Fake, depth: u32) -> SharedReceiveQueue {
    fake.pd().shared_receive_queue(depth).build().unwrap()
}

/// Posts receives without memory as one batch.
fn post(srq: &mut SharedReceiveQueue, count: u64) -> Result<(), PostError> {
    let mut batch = srq.recv_batch();
    // SAFETY: the receives have no memory.
    (0..count).for_each(|wr_id| unsafe { batch.receive(wr_id, &[]) }.unwrap());
    batch.post()
}

#[test]
fn a_batch_of_shared_receives_is_one_call_and_an_empty_or_dropped_one_is_none() {
    let fake = Fake::new(Config::default());
    let mut srq = queue(&fake, 8);
    post(&mut srq, 0).unwrap();
    let mut batch = srq.recv_batch();
    // SAFETY: nothing is posted.
    unsafe { batch.receive(1, &[]) }.unwrap();
    drop(batch);
    assert_eq!(fake.calls("ibv_post_srq_recv"), 0);
    post(&mut srq, 3).unwrap();
    assert_eq!((fake.calls("ibv_post_srq_recv"), fake.shared_receives(srq.as_raw())), (1, vec![0, 1, 2]));
}

#[test]
fn a_full_shared_queue_and_a_refused_receive_say_how_many_were_posted() {
    let fake = Fake::new(Config::default());
    let mut srq = queue(&fake, 8);
    post(&mut srq, 6).unwrap();
    assert_eq!(post(&mut srq, 3), Err(PostError::QueueFull { posted: 2 }));
    // SAFETY: the receive has no memory.
    assert_eq!(unsafe { srq.receive(1, Sge::EMPTY) }, Err(PostError::QueueFull { posted: 0 }));
    let mut srq = queue(&fake, 8);
    let fault = |bad| PostFault { errno: libc::EIO, taken: 1, bad };
    fake.fail_post_recv(fault(Bad::FirstNotTaken));
    assert_eq!(post(&mut srq, 3), Err(PostError::Refused { posted: 1, errno: Errno(libc::EIO) }));
    fake.fail_post_recv(fault(Bad::Untouched));
    assert_eq!(post(&mut srq, 3), Err(PostError::MaybePosted { errno: Errno(libc::EIO) }));
}

#[test]
fn a_resize_whose_result_cannot_be_queried_is_as_requested() {
    let fake = Fake::new(Config::default());
    let mut srq = queue(&fake, 4);
    fake.fail("ibv_query_srq", libc::EIO);
    let error = srq.resize(20).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QuerySrq, errno: Errno(libc::EIO), .. }), "{error}");
    assert_eq!(srq.max_wr(), 20);
    fake.heal("ibv_query_srq");
    assert_eq!(srq.query().unwrap().max_wr, 32);
}

#[test]
fn unsupported_operations_of_shared_receive_queues_are_refused_by_name() {
    let without = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        Fake::new(config)
    };
    let unsupported = |error: Error, expected: &str| {
        assert!(matches!(error, Error::Unsupported { feature, .. } if feature == expected), "{error}");
    };
    let fake = without(|config| config.srqs = false);
    unsupported(fake.pd().shared_receive_queue(4).build().unwrap_err(), "shared receive queues");
    let fake = without(|config| config.srq_resize = false);
    let mut srq = queue(&fake, 4);
    unsupported(srq.resize(8).unwrap_err(), "resizing shared receive queues");
    assert_eq!(fake.calls("ibv_modify_srq"), 0, "checked before the call");
    fake.fail("ibv_modify_srq", libc::EOPNOTSUPP);
    unsupported(srq.set_limit(2).unwrap_err(), "limits of shared receive queues");
    fake.fail("ibv_modify_srq", libc::EINVAL);
    assert!(matches!(srq.set_limit(2), Err(Error::LimitSharedReceiveQueue { limit: 2, work_requests: 4, .. })));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_shared_queue_that_cannot_be_destroyed_keeps_its_domain() {
    let fake = Fake::new(Config::default());
    let srq = queue(&fake, 4);
    fake.fail("ibv_destroy_srq", libc::EBUSY);
    drop(srq);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, srqs: 1, ..Live::default() });
    assert_eq!((fake.calls("ibv_destroy_srq"), fake.calls("ibv_dealloc_pd")), (1, 0));
    fake.may_leak();
}
