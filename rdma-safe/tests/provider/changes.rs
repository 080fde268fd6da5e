//! Changes that a provider fails or lacks, event moderation, and special kinds of regions.

use std::time::Duration;

use rdma_safe::mr::{ReregisterError, Reregistration};
use rdma_safe::{Access, Errno, Error, ProtectionDomain, RawMemoryRegion, Sge, WorkRequest};

use crate::fake::{Config, Cqe, Fake, Live};
use crate::support::{on_each_interface, post, raw_pair, seen};

#[track_caller]
fn unsupported(error: &Error, expected: &str) {
    assert!(matches!(error, Error::Unsupported { feature, .. } if *feature == expected), "{error}");
}

#[test]
fn resizing_ends_a_forgotten_cursor_first() {
    let fake = Fake::new(Config::default());
    let mut cq = fake.open().completion_queue(7).build().unwrap();
    (0..2).for_each(|wr_id| fake.inject(cq.as_raw(), Cqe { wr_id, ..Cqe::default() }));
    let mut poll = cq.poll();
    assert_eq!(poll.next().unwrap().unwrap().wr_id(), 0);
    std::mem::forget(poll);
    // The provider reports a resize by the thread that holds its lock.
    cq.resize(15).unwrap();
    assert_eq!(seen(&mut cq).iter().map(|seen| seen.wr_id).collect::<Vec<_>>(), [1]);
}

#[test]
fn events_are_moderated_within_the_limits_of_the_device() {
    for classic in [false, true] {
        let fake = Fake::new(Config { moderation: Some((1000, 500)), ..Config::default() });
        let mut cq = fake.open().completion_queue(7).classic(classic).build().unwrap();
        cq.moderate(1000, Duration::from_micros(500)).unwrap();
        cq.moderate(1, Duration::from_nanos(1)).unwrap();
        cq.moderate(0, Duration::ZERO).unwrap();
        assert_eq!(fake.take_moderations(), [(1000, 500), (1, 1), (0, 0)]);
        let refused = [
            (1001, Duration::ZERO),
            (1, Duration::from_micros(501)),
            (1, Duration::from_micros(65536)),
            (1, Duration::MAX),
        ];
        for (count, period) in refused {
            let error = cq.moderate(count, period).unwrap_err();
            assert!(matches!(error, Error::ModerateCompletionQueue { limits: Some(_), .. }), "{error}");
            assert!(error.to_string().contains("1000 completions and 500 µs"), "{error}");
        }
        assert_eq!(fake.take_moderations(), []);
    }
}

#[test]
fn unsupported_resizing_and_registration_is_refused_by_name() {
    let (cq_resize, rereg, dmabuf, null_mr) = (false, false, false, false);
    let fake = Fake::new(Config { cq_resize, rereg, dmabuf, null_mr, ..Config::default() });
    let pd = fake.pd();
    let mut cq = pd.context().completion_queue(7).build().unwrap();
    unsupported(&cq.resize(8).unwrap_err(), "resizing completion queues");
    unsupported(&cq.moderate(1, Duration::ZERO).unwrap_err(), "moderation of completion events");
    unsupported(&pd.null_region().unwrap_err(), "null memory regions");
    // SAFETY: the registration fails.
    let error = unsafe { pd.register_dmabuf(std::io::stdin(), 0, 8, 0, Access::LOCAL_WRITE) }.unwrap_err();
    unsupported(&error, "registering DMA-BUFs");
    let mut memory = [0_u64; 2];
    let region = region(&pd, &mut memory);
    let keys = (region.lkey(), region.rkey());
    // SAFETY: no work uses the region.
    let error = unsafe { region.reregister(Reregistration::new().access(Access::REMOTE_READ)) }.unwrap_err();
    assert!(matches!(&error, ReregisterError::Unchanged { errno, .. } if errno.is_unsupported()), "{error}");
    let region = error.into_region().expect("the region stays usable");
    assert_eq!((region.lkey(), region.rkey()), keys);
}

fn region(pd: &ProtectionDomain, memory: &mut [u64; 2]) -> RawMemoryRegion {
    // SAFETY: no work of the tests uses the region after its memory is freed.
    unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 16, Access::LOCAL_WRITE) }.unwrap()
}

#[test]
fn a_reregistered_region_has_a_new_key_and_leaves_its_old_domain() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let (pd, other) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let (mut first, mut second) = ([1_u64; 2], [2_u64; 2]);
    let region = region(&other, &mut first);
    let before = region.lkey();
    let change = Reregistration::new().memory(second.as_mut_ptr().cast(), 8).pd(&pd);
    // SAFETY: no work uses the region.
    let region = unsafe { region.reregister(change) }.unwrap();
    assert_ne!(region.lkey(), before);
    drop(other);
    assert_eq!(fake.live().pds, 1);
}

#[test]
fn a_failed_reregistration_reports_the_state_of_the_region() {
    for (code, expected) in
        [(-1, "unchanged"), (-2, "unchanged"), (-3, "changed"), (-4, "lost"), (-5, "lost"), (7, "changed?")]
    {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let (mut first, mut second) = ([1_u64; 2], [2_u64; 2]);
        let (old, new) = (first.as_ptr().addr() as u64, second.as_ptr().addr() as u64);
        let region = region(&pd, &mut first);
        fake.fail("ibv_rereg_mr", code);
        // SAFETY: no work uses the region.
        let error = unsafe { region.reregister(Reregistration::new().memory(second.as_mut_ptr().cast(), 8)) };
        let error = error.unwrap_err();
        let found = match &error {
            ReregisterError::Unchanged { region, errno: Errno(libc::EIO) } if region.address() == old => "unchanged",
            ReregisterError::Changed { region, errno: Errno(libc::EIO) } if region.address() == new => "changed",
            ReregisterError::Lost { errno: Errno(libc::EIO) } => "lost",
            // An unknown code is not a success.
            ReregisterError::Lost { errno: Errno(0) } if code > 0 => "changed?",
            _ => "something else",
        };
        assert_eq!(found, expected, "{code}: {error}");
        assert_eq!(fake.live().mrs, usize::from(code > -4 && code < 0), "{error}");
        assert_eq!(error.into_region().is_some(), code > -4 && code < 0);
        assert_eq!(fake.live().mrs, 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_lost_region_that_cannot_be_deregistered_keeps_both_domains() {
    let mut memory = [0; 2];
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let (pd, other) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let region = region(&pd, &mut memory);
    fake.fail("ibv_rereg_mr", -4);
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    // SAFETY: the memory outlives the device.
    let error = unsafe { region.reregister(Reregistration::new().pd(&other)) }.unwrap_err();
    assert!(matches!(error, ReregisterError::Leaked { errno: Errno(libc::EIO) }), "{error}");
    assert!(error.into_region().is_none());
    drop((context, pd, other));
    assert_eq!(fake.live(), Live { contexts: 1, pds: 2, mrs: 1, ..Live::default() });
    assert_eq!(fake.calls("ibv_dereg_mr"), 1);
    fake.may_leak();
}

#[test]
fn a_null_region_discards_writes_and_reads_as_zeros() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let null = pd.null_region().unwrap();
        let mut outbox = pd.allocate(6).unwrap();
        outbox.fill_from(b"abcdef").unwrap();
        let inbox = pd.allocate(8).unwrap();
        let mut batch = b.qp.recv_batch().unwrap();
        let parts = |buffer: &rdma_safe::Buffer, middle: Sge| {
            let head = Sge { len: 2, ..buffer.sge() };
            [head, middle, Sge { address: head.address + 2, ..head }]
        };
        // SAFETY: the inbox is read after the receives have completed.
        unsafe {
            batch.receive(1, &parts(&inbox, null.sge(2))).unwrap();
            batch.receive(2, &[Sge { address: inbox.address() + 4, len: 4, lkey: inbox.lkey() }]).unwrap();
        }
        batch.post().unwrap();
        post!(a, send(WorkRequest::new(3), outbox.sge()); send(WorkRequest::new(4).signaled(), null.sge(3));).unwrap();
        assert_eq!(seen(&mut b.cq).len(), 2);
        assert_eq!(&inbox[..], b"abef\0\0\0\0");
        assert!(null.pd().is_same(&pd));
        drop((a, b, inbox, outbox, null));
        assert_eq!(fake.live().mrs, 0);
    });
}

#[test]
fn a_dma_buf_has_the_address_it_was_registered_with() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let register = |offset, len, iova| {
        // SAFETY: this device accesses none of its bytes.
        unsafe { pd.register_dmabuf(std::io::stdin(), offset, len, iova, Access::REMOTE_READ) }
    };
    let region = register(0x1010, 100, 0x7_0010).unwrap();
    assert_eq!((region.address(), region.len()), (0x7_0010, 100));
    assert_ne!((region.lkey(), region.rkey()), (0, 0));
    assert_eq!(fake.take_dmabufs(), [(0x1010, 100, 0x7_0010)]);
    assert!(matches!(register(0, 0, 0), Err(Error::EmptyRegion)));
    for (offset, iova) in [(0, u64::MAX - 98), (u64::MAX - 98, 0)] {
        let error = register(offset, 100, iova).unwrap_err();
        assert!(matches!(error, Error::RegisterDmaBuf { len: 100, errno: Errno(libc::EINVAL), .. }), "{error}");
    }
    assert!(fake.take_dmabufs().is_empty(), "wrapping addresses are refused before the call");
    let error = register(8, 100, 0x1000).unwrap_err();
    assert!(matches!(error, Error::RegisterDmaBuf { offset: 8, len: 100, errno: Errno(libc::EINVAL), .. }), "{error}");
    region.deregister().unwrap();
}
