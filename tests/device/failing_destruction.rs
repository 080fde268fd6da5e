//! Objects whose destruction fails are leaked together with all objects that they depend on, and never freed while a device may
//! use them.

use std::sync::Arc;

use rdma_safe::error::Verb;
use rdma_safe::mr::ReclaimReason;
use rdma_safe::{Access, Errno, Error};

use crate::support::interposer::rig::{Count, CountedMemory, builder, endpoints, on_each_mode};
use crate::support::interposer::{Live, interposed};
use crate::support::lab::Mode;

#[test]
fn memory_is_freed_once_and_after_it_was_deregistered() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd_of_own_context();
    let count = Count::default();
    let parts = count.buffer(&pd).into_chunks(16).unwrap();
    assert_eq!(parts.len(), 4);
    for part in parts {
        assert_eq!((count.freed(), soft.calls("ibv_dereg_mr")), (0, 0), "only the last part frees the memory");
        drop(part);
    }
    assert_eq!((count.freed(), soft.calls("ibv_dereg_mr")), (1, 1));
    drop(pd.expose(count.memory(), Access::REMOTE).unwrap());
    assert_eq!((count.freed(), soft.calls("ibv_dereg_mr")), (2, 2));
}

#[test]
fn memory_that_cannot_be_registered_is_freed() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd_of_own_context();
    let count = Count::default();
    for errno in [libc::ENOMEM, 0] {
        soft.fail("ibv_reg_mr", errno);
        let error = pd.register(count.memory()).unwrap_err();
        assert!(
            matches!(error, Error::RegisterMemory { len: 64, access: Access::LOCAL_WRITE, errno: Errno(found) } if found == errno),
            "{error}"
        );
    }
    let error = pd.register_with(count.memory(), Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error, Error::BufferAccess { access: Access::REMOTE_READ }), "{error}");
    assert_eq!(count.freed(), 3);
    assert_eq!(soft.live().mrs, 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn memory_that_cannot_be_deregistered_is_never_freed() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let pd = soft.pd_of_own_context();
    let count = Count::default();
    soft.fail("ibv_dereg_mr", libc::EBUSY);
    drop(count.buffer(&pd).into_chunks(32).unwrap());
    drop(pd.expose(count.memory(), Access::REMOTE).unwrap());
    drop(pd);
    assert_eq!(count.freed(), 0);
    assert_eq!(soft.calls("ibv_dereg_mr"), 2, "one attempt for each");
    let live = Live { contexts: 1, pds: 1, mrs: 2, ..Live::default() };
    assert_eq!(soft.live(), live, "the domain and the context stay");
    assert_eq!(
        (soft.calls("ibv_dealloc_pd"), soft.calls("ibv_close_device")),
        (0, 0),
        "the destruction of the parents is not attempted"
    );
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn raw_memory_that_cannot_be_deregistered_keeps_its_domain() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let pd = soft.pd_of_own_context();
    let mut memory = [0_u8; 16];
    // SAFETY: no work uses the region, and the provider never reads its memory.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr(), 16, Access::LOCAL_WRITE).unwrap() };
    soft.fail("ibv_dereg_mr", libc::EBUSY);
    drop((region, pd));
    assert_eq!(soft.live(), Live { contexts: 1, pds: 1, mrs: 1, ..Live::default() });
    assert_eq!(soft.calls("ibv_dealloc_pd"), 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn buffers_of_an_endpoint_that_cannot_be_destroyed_are_never_freed() {
    on_each_mode(|soft, mode| {
        soft.may_leak();
        let pd = soft.pd_of_own_context();
        let (in_flight, done) = (Count::default(), Count::default());
        let (mut a, b) = endpoints(soft, &pd, mode);
        drop(b);
        a.receive(in_flight.buffer(&pd)).unwrap();
        a.send(in_flight.buffer(&pd)).unwrap();
        drop(done.buffer(&pd));
        soft.fail("ibv_destroy_qp", libc::EBUSY);
        drop((a, pd));
        assert_eq!((in_flight.freed(), done.freed()), (0, 1));
        let live = Live { contexts: 1, pds: 1, mrs: 2, cqs: 1, qps: 1, ..Live::default() };
        assert_eq!(soft.live(), live, "the parents of the queue pair stay");
        let tried = ["ibv_destroy_qp", "ibv_dealloc_pd", "ibv_close_device"].map(|verb| soft.calls(verb));
        assert_eq!(tried, [2, 0, 0], "the destruction of the parents is not attempted");
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn closing_an_endpoint_that_cannot_be_destroyed_is_an_error_that_names_the_verb() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let pd = soft.pd_of_own_context();
    let count = Count::default();
    let mut endpoint = builder(&soft, &pd, Mode::EXTENDED).build().unwrap();
    endpoint.receive(count.buffer(&pd)).unwrap();
    soft.fail("ibv_destroy_qp", libc::EBUSY);
    let error = endpoint.close().unwrap_err();
    assert!(
        matches!(&error, Error::Verb { verb: Verb::DestroyQp, device, errno: Errno(libc::EBUSY) } if device == soft.device_name()),
        "{error}"
    );
    assert_eq!(count.freed(), 0);
    assert_eq!(soft.calls("ibv_destroy_qp"), 1, "not repeated by the drop");
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_queue_pair_that_cannot_be_destroyed_keeps_its_queues_and_its_domain() {
    on_each_mode(|soft, mode| {
        soft.may_leak();
        let pd = soft.pd_of_own_context();
        let make = || {
            let cq = pd.context().completion_queue(8).classic(mode.classic_cq).build().unwrap();
            (pd.queue_pair(&cq, &cq).classic(mode.classic_qp).build().unwrap(), cq)
        };
        let ((qp, cq), other) = (make(), make());
        soft.fail("ibv_destroy_qp", libc::EBUSY);
        let error = qp.destroy().unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, .. }), "{error}");
        soft.heal("ibv_destroy_qp");
        drop((cq, other, pd));
        assert_eq!(soft.live(), Live { contexts: 1, pds: 1, cqs: 1, qps: 1, ..Live::default() });
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_completion_queue_that_cannot_be_destroyed_keeps_its_channel_and_its_device() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let context = soft.open();
    let channel = context.create_channel().unwrap();
    let cq = context.completion_queue(4).channel(&channel).build().unwrap();
    soft.fail("ibv_destroy_cq", libc::EBUSY);
    drop((cq, channel, context));
    assert_eq!(soft.live(), Live { contexts: 1, channels: 1, cqs: 1, ..Live::default() });
    assert_eq!((soft.calls("ibv_destroy_comp_channel"), soft.calls("ibv_close_device")), (0, 0));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_domain_that_cannot_be_deallocated_keeps_its_device() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let pd = soft.pd_of_own_context();
    soft.fail("ibv_dealloc_pd", libc::EBUSY);
    drop(pd);
    assert_eq!(soft.live(), Live { contexts: 1, pds: 1, ..Live::default() });
    assert_eq!(soft.calls("ibv_close_device"), 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_channel_that_cannot_be_destroyed_keeps_its_device() {
    let Some(soft) = interposed() else { return };
    soft.may_leak();
    let channel = soft.open().create_channel().unwrap();
    soft.fail("ibv_destroy_comp_channel", libc::EBUSY);
    drop(channel);
    assert_eq!(soft.live(), Live { contexts: 1, channels: 1, ..Live::default() });
    assert_eq!(soft.calls("ibv_close_device"), 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn destroying_a_completion_queue_in_use_is_an_error_and_is_tried_once() {
    let Some(soft) = interposed() else { return };
    let context = soft.open();
    let make = || context.completion_queue(4).build().unwrap();
    make().destroy().unwrap();
    assert_eq!(soft.calls("ibv_destroy_cq"), 1);

    let (cq, pd) = (make(), context.alloc_pd().unwrap());
    let qp = pd.queue_pair(&cq, &cq).build().unwrap();
    let error = cq.destroy().unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert_eq!(soft.calls("ibv_destroy_cq"), 1);
    drop((qp, pd));
    assert_eq!(soft.calls("ibv_destroy_cq"), 2, "destroyed with the last dependent");
    assert_eq!(soft.live(), Live { contexts: 1, ..Live::default() });

    soft.may_leak();
    soft.fail("ibv_destroy_cq", libc::EBUSY);
    let error = make().destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DestroyCq, errno: Errno(libc::EBUSY), .. }), "{error}");
    drop(context);
    assert_eq!((soft.calls("ibv_destroy_cq"), soft.live().contexts), (3, 1), "the context stays");
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn shared_memory_of_an_endpoint_that_cannot_be_destroyed_is_never_freed() {
    on_each_mode(|soft, mode| {
        soft.may_leak();
        let pd = soft.pd_of_own_context();
        let (owner, count): (Arc<[u8]>, _) = (vec![7; 64].into(), Count::default());
        let (mut a, b) = endpoints(soft, &pd, mode);
        drop(b);
        a.receive_list(count.buffer(&pd)).unwrap();
        a.send_list(pd.share(Arc::clone(&owner)).unwrap()).unwrap();
        soft.fail("ibv_destroy_qp", libc::EBUSY);
        drop((a, pd));
        assert_eq!((Arc::strong_count(&owner), count.freed()), (2, 0));
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn memory_is_returned_only_after_it_was_deregistered() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd_of_own_context();
    let count = Count::default();
    let memory: CountedMemory = count.buffer(&pd).into_memory().unwrap();
    assert_eq!((count.freed(), soft.calls("ibv_dereg_mr")), (0, 1));
    drop(memory);
    assert_eq!((count.freed(), soft.live().mrs), (1, 0));

    soft.may_leak();
    let owner: Arc<[u8]> = vec![7; 64].into();
    let shared = pd.share(Arc::clone(&owner)).unwrap();
    soft.fail("ibv_dereg_mr", libc::EBUSY);
    let reasons = [
        count.buffer(&pd).into_memory::<CountedMemory>().unwrap_err().reason,
        pd.expose(count.memory(), Access::REMOTE).unwrap().into_memory::<CountedMemory>().unwrap_err().reason,
        shared.into_memory::<Arc<[u8]>>().unwrap_err().reason,
    ];
    assert_eq!(reasons, [ReclaimReason::Deregister { errno: Errno(libc::EBUSY) }; 3]);
    drop(pd);
    assert_eq!((count.freed(), Arc::strong_count(&owner)), (1, 2), "the device may still use them");
    assert_eq!(soft.live(), Live { contexts: 1, pds: 1, mrs: 3, ..Live::default() });
}
