//! Objects whose destruction fails are leaked together with all objects that they depend on, and never freed while a device may
//! use them.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_safe::counters::CompletionCount;
use rdma_safe::error::Verb;
use rdma_safe::flow::EspAction;
use rdma_safe::mr::{Backing, Pages};
use rdma_safe::{Access, Buffer, Context, Errno, Error, ProtectionDomain, Result};

use crate::fake::{Config, Fake, Live, Mode};
use crate::support::{EXTENDED, builder, endpoints, on_each_interface, raw_pair};

/// Memory that counts how often it is freed.
struct CountedMemory {
    pages: Pages,
    freed: Arc<AtomicUsize>,
}

// SAFETY: `Pages` keeps the contract.
unsafe impl Backing for CountedMemory {
    fn address(&self) -> NonNull<u8> {
        self.pages.address()
    }

    fn len(&self) -> usize {
        self.pages.len()
    }
}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts the freed buffers that were created with it.
#[derive(Default)]
pub(crate) struct Count(Arc<AtomicUsize>);

impl Count {
    fn memory(&self) -> CountedMemory {
        CountedMemory { pages: Pages::new(64).unwrap(), freed: Arc::clone(&self.0) }
    }

    pub(crate) fn buffer(&self, pd: &ProtectionDomain) -> Buffer {
        pd.register(self.memory()).unwrap()
    }

    pub(crate) fn freed(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn memory_is_freed_once_and_after_it_was_deregistered() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let count = Count::default();
    let parts = count.buffer(&pd).into_chunks(16).unwrap();
    assert_eq!(parts.len(), 4);
    for part in parts {
        assert_eq!((count.freed(), fake.calls("ibv_dereg_mr")), (0, 0), "only the last part frees the memory");
        drop(part);
    }
    assert_eq!((count.freed(), fake.calls("ibv_dereg_mr")), (1, 1));
    drop(pd.expose(count.memory(), Access::REMOTE).unwrap());
    assert_eq!((count.freed(), fake.calls("ibv_dereg_mr")), (2, 2));
}

#[test]
fn memory_that_cannot_be_registered_is_freed() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let count = Count::default();
    for errno in [libc::ENOMEM, 0] {
        fake.fail("ibv_reg_mr", errno);
        let error = pd.register(count.memory()).unwrap_err();
        assert!(
            matches!(error, Error::RegisterMemory { len: 64, access: Access::LOCAL_WRITE, errno: Errno(found) } if found == errno),
            "{error}"
        );
    }
    let error = pd.register_with(count.memory(), Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error, Error::BufferAccess { access: Access::REMOTE_READ }), "{error}");
    assert_eq!(count.freed(), 3);
    assert_eq!(fake.live().mrs, 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn memory_that_cannot_be_deregistered_is_never_freed() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let pd = fake.pd();
    let count = Count::default();
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    drop(count.buffer(&pd).into_chunks(32).unwrap());
    drop(pd.expose(count.memory(), Access::REMOTE).unwrap());
    drop(pd);
    assert_eq!(count.freed(), 0);
    assert_eq!(fake.calls("ibv_dereg_mr"), 2, "one attempt for each");
    let live = Live { contexts: 1, pds: 1, mrs: 2, ..Live::default() };
    assert_eq!(fake.live(), live, "the domain and the context stay");
    assert_eq!(
        (fake.calls("ibv_dealloc_pd"), fake.calls("ibv_close_device")),
        (0, 0),
        "the destruction of the parents is not attempted"
    );
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn raw_memory_that_cannot_be_deregistered_keeps_its_domain() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let pd = fake.pd();
    let mut memory = [0_u8; 16];
    // SAFETY: no work uses the region, and the provider never reads its memory.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr(), 16, Access::LOCAL_WRITE).unwrap() };
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    drop((region, pd));
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 1, ..Live::default() });
    assert_eq!(fake.calls("ibv_dealloc_pd"), 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn buffers_of_an_endpoint_that_cannot_be_destroyed_are_never_freed() {
    on_each_interface(|fake, interfaces| {
        fake.may_leak();
        let pd = fake.pd();
        let (in_flight, done) = (Count::default(), Count::default());
        let (mut a, b) = endpoints(&pd, interfaces);
        drop(b);
        fake.set_mode(Mode::Manual);
        a.receive(in_flight.buffer(&pd)).unwrap();
        a.send(in_flight.buffer(&pd)).unwrap();
        drop(done.buffer(&pd));
        fake.fail("ibv_destroy_qp", libc::EBUSY);
        drop((a, pd));
        assert_eq!((in_flight.freed(), done.freed()), (0, 1));
        let live = Live { contexts: 1, pds: 1, mrs: 2, cqs: 1, qps: 1, ..Live::default() };
        assert_eq!(fake.live(), live, "the parents of the queue pair stay");
        let tried = ["ibv_destroy_qp", "ibv_dealloc_pd", "ibv_close_device"].map(|verb| fake.calls(verb));
        assert_eq!(tried, [2, 0, 0], "the destruction of the parents is not attempted");
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn closing_an_endpoint_that_cannot_be_destroyed_is_an_error_that_names_the_verb() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let pd = fake.pd();
    let count = Count::default();
    let mut endpoint = builder(&pd, EXTENDED).build().unwrap();
    endpoint.receive(count.buffer(&pd)).unwrap();
    fake.fail("ibv_destroy_qp", libc::EBUSY);
    let error = endpoint.close().unwrap_err();
    assert!(
        matches!(&error, Error::Verb { verb: Verb::DestroyQp, device, errno: Errno(libc::EBUSY) } if device == fake.name()),
        "{error}"
    );
    assert_eq!(count.freed(), 0);
    assert_eq!(fake.calls("ibv_destroy_qp"), 1, "not repeated by the drop");
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_queue_pair_that_cannot_be_destroyed_keeps_its_queues_and_its_domain() {
    on_each_interface(|fake, interfaces| {
        fake.may_leak();
        let pd = fake.pd();
        let (a, b) = raw_pair(&pd, interfaces);
        fake.fail("ibv_destroy_qp", libc::EBUSY);
        let error = a.qp.destroy().unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, .. }), "{error}");
        fake.heal("ibv_destroy_qp");
        drop((a.cq, b, pd));
        assert_eq!(fake.live(), Live { contexts: 1, pds: 1, cqs: 1, qps: 1, ..Live::default() });
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_completion_queue_that_cannot_be_destroyed_keeps_its_channel_and_its_device() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let context = fake.open();
    let channel = context.create_channel().unwrap();
    let cq = context.completion_queue(4).channel(&channel).build().unwrap();
    fake.fail("ibv_destroy_cq", libc::EBUSY);
    drop((cq, channel, context));
    assert_eq!(fake.live(), Live { contexts: 1, channels: 1, cqs: 1, ..Live::default() });
    assert_eq!((fake.calls("ibv_destroy_comp_channel"), fake.calls("ibv_close_device")), (0, 0));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_domain_that_cannot_be_deallocated_keeps_its_device() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let pd = fake.pd();
    fake.fail("ibv_dealloc_pd", libc::EBUSY);
    drop(pd);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, ..Live::default() });
    assert_eq!(fake.calls("ibv_close_device"), 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_channel_that_cannot_be_destroyed_keeps_its_device() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let channel = fake.open().create_channel().unwrap();
    fake.fail("ibv_destroy_comp_channel", libc::EBUSY);
    drop(channel);
    assert_eq!(fake.live(), Live { contexts: 1, channels: 1, ..Live::default() });
    assert_eq!(fake.calls("ibv_close_device"), 0);
}

/// Creates an object and destroys it, while another object still needs it if the argument is `true`.
type Destruction = fn(&Context, bool) -> Result<()>;

const DESTRUCTIONS: [(&str, Destruction); 6] = [
    ("ibv_destroy_cq", |context, in_use| {
        let cq = context.completion_queue(4).build()?;
        let pd = context.alloc_pd()?;
        let _qp = if in_use { Some(pd.queue_pair(&cq, &cq).build()?) } else { None };
        cq.destroy()
    }),
    ("destroy_counters", |context, in_use| {
        let counters = context.create_counters()?;
        let _clone = in_use.then(|| counters.clone());
        counters.destroy()
    }),
    ("destroy_flow_action", |context, in_use| {
        let action = EspAction::new().create(context)?;
        let _clone = in_use.then(|| action.clone());
        action.destroy()
    }),
    ("destroy_rwq_ind_table", |context, in_use| {
        let (pd, cq) = (context.alloc_pd()?, context.completion_queue(4).build()?);
        let table = context.indirection_table(&[&pd.work_queue(&cq, 4).build()?])?;
        let _clone = in_use.then(|| table.clone());
        table.destroy()
    }),
    ("free_dm", |context, in_use| {
        let (pd, memory) = (context.alloc_pd()?, context.alloc_dm(64, 8)?);
        let _region = if in_use { Some(pd.register_dm(&memory, 0, 64, Access::LOCAL_WRITE)?) } else { None };
        memory.free()
    }),
    ("ibv_destroy_comp_cntr", |context, in_use| {
        let counter = context.completion_counter(CompletionCount::Bytes)?;
        let _clone = in_use.then(|| counter.clone());
        counter.destroy()
    }),
];

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn destroying_says_what_stands_in_the_way_and_is_tried_once() {
    for (verb, destroy) in DESTRUCTIONS {
        let fake = Fake::new(Config { comp_cntrs: Some(1), ..Config::steering() });
        let context = fake.open();
        let calls = || fake.calls(verb);
        destroy(&context, false).unwrap();
        assert_eq!(calls(), 1, "{verb}");
        let error = destroy(&context, true).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{verb}: {error}");
        assert_eq!(calls(), 2, "{verb}: destroyed with the last dependent");
        assert_eq!(fake.live(), Live { contexts: 1, ..Live::default() }, "{verb}");
        fake.may_leak();
        fake.fail(verb, libc::EBUSY);
        let error = destroy(&context, false).unwrap_err();
        assert!(matches!(error, Error::Verb { errno: Errno(libc::EBUSY), .. }), "{verb}: {error}");
        drop(context);
        assert_eq!((calls(), fake.live().contexts), (3, 1), "{verb}: the context stays");
    }
}
