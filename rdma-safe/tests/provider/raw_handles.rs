//! Adopting objects of other code where the provider fails or lies, and domains that soft0 lacks.
//!
//! All else is tested on a device: `tests/device/raw_handles.rs`.

use std::ptr::NonNull;

use rdma_safe::error::Verb;
use rdma_safe::pd::ThreadDomain;
use rdma_safe::sys::*;
use rdma_safe::{Context, Error, WcFields};

use crate::fake::{Config, Fake, Live};

fn table() -> &'static Verbs {
    verbs().unwrap()
}

#[track_caller]
fn created<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).expect("an object")
}

#[test]
fn a_thread_domain_and_a_parent_domain_of_other_code_are_destroyed_once() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let context = pd.context();
    // SAFETY: each object was just created with its parents, and nothing else uses it.
    unsafe {
        let mut attr = ibv_td_init_attr::zeroed();
        let td = ThreadDomain::from_raw(context, created(ibv_alloc_td(context.as_raw(), &mut attr)));
        let mut attr =
            ibv_parent_domain_init_attr { pd: pd.as_raw(), td: td.as_raw(), ..ibv_parent_domain_init_attr::zeroed() };
        let raw = created(ibv_alloc_parent_domain(context.as_raw(), &mut attr));
        let parent = pd.parent_from_raw(Some(&td), raw);
        assert!(parent.is_parent() && parent.is_same(&pd) && parent.thread_domain().is_some());
        assert_eq!(parent.as_raw(), raw.as_ptr());
        drop(td);
        drop(parent);
    }
    drop(pd);
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_context_that_cannot_be_queried_is_closed_only_if_it_was_given_up() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    for (borrowed, left) in [(false, 1), (true, 2)] {
        // SAFETY: the device belongs to an open context.
        let raw = unsafe { created((table().ibv_open_device)((*context.as_raw()).device)) };
        fake.fail("query_device_ex", libc::EIO);
        // SAFETY: nothing else uses the context. A borrowed one is closed below.
        let adopted = unsafe { if borrowed { Context::from_raw_borrowed(raw) } else { Context::from_raw(raw) } };
        let error = adopted.unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::QueryDeviceEx, .. }), "{error}");
        assert_eq!(fake.live().contexts, left);
        if borrowed {
            // SAFETY: the context still belongs to the test.
            assert_eq!(unsafe { (table().ibv_close_device)(raw.as_ptr()) }, 0);
        }
        fake.heal("query_device_ex");
    }
}

#[test]
fn a_queue_without_an_accessor_of_its_fields_is_not_adopted() {
    for (hollow_fields, no_end_poll) in [(WcFields::BYTE_LEN.bits(), false), (0, true)] {
        let fake = Fake::new(Config { hollow_fields, no_end_poll, ..Config::default() });
        let context = fake.open();
        let mut attr =
            ibv_cq_init_attr_ex { cqe: 16, wc_flags: WcFields::STANDARD.bits(), ..ibv_cq_init_attr_ex::zeroed() };
        // SAFETY: the context is valid.
        let raw: NonNull<ibv_cq> = created(unsafe { ibv_create_cq_ex(context.as_raw(), &mut attr) }).cast();
        // SAFETY: the queue was just created with these fields, and nothing else uses it.
        let error = unsafe { context.completion_queue(0).from_raw(raw) }.unwrap_err();
        match error {
            Error::CompletionFields { fields } => assert_eq!(fields, WcFields::BYTE_LEN),
            Error::Unsupported { feature, .. } => assert!(no_end_poll && feature == "extended completion queues"),
            other => panic!("{other}"),
        }
        // SAFETY: the queue still belongs to the test.
        unsafe {
            assert!((*raw.as_ptr()).cq_context.is_null(), "a refused queue is unchanged");
            assert_eq!((table().ibv_destroy_cq)(raw.as_ptr()), 0);
        }
    }
}

#[test]
fn a_queue_pair_that_cannot_be_queried_stays_the_callers() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(16).build().unwrap();
    let mut attr = ibv_qp_init_attr_ex::zeroed();
    (attr.send_cq, attr.recv_cq, attr.pd, attr.qp_type) = (cq.as_raw(), cq.as_raw(), pd.as_raw(), IBV_QPT_RC);
    attr.comp_mask = IBV_QP_INIT_ATTR_PD.0;
    fake.fail("ibv_query_qp", libc::EIO);
    // SAFETY: the queue pair was just created for this domain and queue, and nothing else uses it.
    unsafe {
        let raw = created(ibv_create_qp_ex(pd.context().as_raw(), &mut attr));
        let error = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::QueryQp, .. }), "{error}");
        assert_eq!((table().ibv_destroy_qp)(raw.as_ptr()), 0);
    }
}
