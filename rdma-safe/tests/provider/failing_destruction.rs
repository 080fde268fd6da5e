//! Objects whose destruction fails are leaked together with all objects that they depend on, and never freed while a device may
//! use them.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_safe::counters::CompletionCount;
use rdma_safe::flow::EspAction;
use rdma_safe::mr::{Backing, Pages};
use rdma_safe::{Access, Buffer, Context, Errno, Error, ProtectionDomain, Result};

use crate::fake::{Config, Fake, Live};

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

/// Creates an object and destroys it, while another object still needs it if the argument is `true`.
type Destruction = fn(&Context, bool) -> Result<()>;

const DESTRUCTIONS: [(&str, Destruction); 5] = [
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
fn destroying_an_object_in_use_is_an_error_and_is_tried_once() {
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
