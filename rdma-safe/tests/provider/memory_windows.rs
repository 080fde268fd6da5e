//! Memory windows of both types.

use rdma_safe::{
    Access, BindInfo, Errno, Error, ExposedRegion, Inline, MemoryWindow, Pages, PostError, ProtectionDomain,
    QueuePairType, RemoteMemory, ReregisterError, Reregistration, SendOps, Type1, Type2, WcOpcode, WcStatus,
    WindowType, WorkRequest,
};

use crate::fake::{Config, Fake, Live, Mode};
use crate::support::{Raw, on_each_interface, post, raw_pair, receive, seen};

fn region(pd: &ProtectionDomain) -> ExposedRegion {
    pd.expose(Pages::new(4096).unwrap(), Access::MW_BIND).unwrap()
}

/// How work of the first end ends, which writes `bytes`.
#[track_caller]
fn write(a: &mut Raw, remote: RemoteMemory, bytes: &[u8]) -> WcStatus {
    post!(a, write(WorkRequest::new(9).signaled(), remote, Inline(bytes));).unwrap();
    let [wc] = seen(&mut a.cq)[..] else { panic!("one completion") };
    assert_eq!(wc.wr_id, 9);
    wc.status
}

/// Takes the one completion that is there, of work `id`.
#[track_caller]
fn done(side: &mut Raw, id: u64, opcode: WcOpcode) {
    let [wc] = seen(&mut side.cq)[..] else { panic!("one completion") };
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (id, WcStatus::SUCCESS, opcode));
}

fn get(region: &ExposedRegion, offset: usize) -> [u8; 4] {
    let mut bytes = [0; 4];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

/// Invalidates by a batch of one, and says so.
#[track_caller]
fn invalidate(side: &mut Raw, window: &mut MemoryWindow<Type2>) {
    let mut batch = side.qp.send_batch().unwrap();
    batch.invalidate(WorkRequest::new(6).signaled(), window.rkey()).unwrap();
    batch.post().unwrap();
    done(side, 6, WcOpcode::LOCAL_INV);
    window.invalidated();
}

/// Binds by a batch of one, and confirms.
#[track_caller]
fn bind(side: &mut Raw, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) -> RemoteMemory {
    let mut batch = side.qp.send_batch().unwrap();
    // SAFETY: the window is left alone until the batch is posted.
    let remote = unsafe { batch.bind(WorkRequest::new(5).signaled(), window, info) }.unwrap();
    batch.post().unwrap();
    done(side, 5, WcOpcode::BIND_MW);
    window.confirm();
    remote
}

#[test]
fn a_window_of_type_1_opens_its_bytes_until_it_is_unbound() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let before = window.rkey();
        let info = region.bind_info(100, 8, Access::REMOTE_WRITE).unwrap();
        let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        assert_eq!((remote.address, remote.len), (region.remote().address + 100, 8));
        assert!(remote.rkey == window.rkey() && remote.rkey != before && window.is_pending() && window.is_bound());
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.confirm();
        assert!(window.is_bound() && !window.is_pending());
        assert_eq!(write(&mut a, remote.slice(4, 4).unwrap(), b"four"), WcStatus::SUCCESS);
        assert_eq!((get(&region, 104), get(&region, 100), get(&region, 108)), (*b"four", [0; 4], [0; 4]));
        b.qp.unbind_window(WorkRequest::new(2).signaled(), &mut window).unwrap();
        done(&mut b, 2, WcOpcode::BIND_MW);
        window.confirm();
        assert!(!window.is_bound());
        assert!(matches!(b.qp.unbind_window(WorkRequest::new(3), &mut window), Err(PostError::NotBound)));
        assert_eq!(write(&mut a, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 100), [0; 4]);
    });
}

#[test]
fn a_window_opens_no_more_than_its_bytes_and_rights() {
    for (offset, len, access) in [
        (0, 16, Access::REMOTE_READ),
        (0, 16, Access::empty()),
        (1, 16, Access::REMOTE_WRITE),
        (0, 3, Access::REMOTE_WRITE),
    ] {
        on_each_interface(|fake, interfaces| {
            let pd = fake.pd();
            let (mut a, mut b) = raw_pair(&pd, interfaces);
            let region = region(&pd);
            let mut window = pd.memory_window::<Type2>().unwrap();
            let remote = bind(&mut b, &mut window, region.bind_info(offset, len, access).unwrap());
            let wide = RemoteMemory { address: region.remote().address, len: 4, rkey: remote.rkey };
            assert_eq!(write(&mut a, wide, b"more"), WcStatus::REM_ACCESS_ERR, "{offset} {len} {access:?}");
            assert_eq!(get(&region, 0), [0; 4]);
        });
    }
}

#[test]
fn a_window_of_type_2_is_bound_in_the_send_queue_and_invalidated_there() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        let mut keys = Vec::new();
        // More often than there are keys, but for Miri, which takes a second for three of them.
        for _ in 0..if cfg!(miri) { 12 } else { 300 } {
            let remote = bind(&mut b, &mut window, region.bind_info(8, 8, Access::REMOTE_WRITE).unwrap());
            keys.push(remote.rkey);
            invalidate(&mut b, &mut window);
        }
        assert!(
            keys.windows(2).all(|two| two[0] >> 8 == two[1] >> 8 && two[1] as u8 == (two[0] as u8).wrapping_add(1))
        );
        let remote = bind(&mut b, &mut window, region.bind_info(8, 8, Access::REMOTE_WRITE).unwrap().zero_based());
        assert_eq!((remote.address, remote.len), (0, 8));
        assert_eq!(write(&mut a, remote.slice(4, 4).unwrap(), b"zero"), WcStatus::SUCCESS);
        assert_eq!(get(&region, 12), *b"zero");
        invalidate(&mut b, &mut window);
        assert_eq!(write(&mut a, remote, b"late"), WcStatus::REM_ACCESS_ERR);
    });
}

#[test]
fn a_peer_can_invalidate_a_window_of_type_2() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let (region, inbox) = (region(&pd), pd.allocate(8).unwrap());
        let mut window = pd.memory_window::<Type2>().unwrap();
        let remote = bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap());
        receive!(b, 1, inbox.sge()).unwrap();
        post!(a, send_invalidate(WorkRequest::new(2).signaled(), remote.rkey, Inline(b"back"));).unwrap();
        let wc = seen(&mut b.cq)[0];
        assert_eq!((wc.wr_id, wc.invalidated_rkey), (1, Some(window.rkey())));
        assert_eq!(seen(&mut a.cq).len(), 1);
        window.invalidated();
        assert!(!window.is_bound());
        // It is free to be bound anew.
        let again = bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap());
        assert_ne!(again.rkey, remote.rkey);
        assert_eq!(write(&mut a, again, b"anew"), WcStatus::SUCCESS);
        assert_eq!(write(&mut a, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 0), *b"anew");
    });
}

#[test]
fn a_binding_that_fails_is_taken_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        let remote = bind(&mut b, &mut window, info);
        // A dropped batch.
        let mut batch = b.qp.send_batch().unwrap();
        // SAFETY: the window is left alone until the batch is dropped.
        unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap();
        drop(batch);
        assert_ne!(window.rkey(), remote.rkey);
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
        assert_eq!(write(&mut a, remote, b"kept"), WcStatus::SUCCESS);
        // A window that is bound cannot be bound again.
        let mut batch = b.qp.send_batch().unwrap();
        // SAFETY: as above.
        unsafe { batch.bind(WorkRequest::new(7), &mut window, info) }.unwrap();
        batch.post().unwrap();
        let wc = seen(&mut b.cq)[0];
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::MW_BIND_ERR));
        window.revert();
        assert!(window.rkey() == remote.rkey && window.is_bound());
    });
}

#[test]
fn a_binding_of_type_1_that_is_refused_changes_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        let error = b.qp.bind_window(WorkRequest::new(2), &mut window, info).unwrap_err();
        assert_eq!(error, PostError::WindowPending);
        window.confirm();
        for (errno, expected) in [
            (libc::ENOMEM, PostError::QueueFull { posted: 0 }),
            (libc::EINVAL, PostError::Refused { posted: 0, errno: Errno(libc::EINVAL) }),
        ] {
            fake.fail_once("bind_mw", errno);
            let error = b.qp.bind_window(WorkRequest::new(2), &mut window, info).unwrap_err();
            assert_eq!((error, window.rkey(), window.is_pending()), (expected, remote.rkey, false));
        }
        let zero = b.qp.bind_window(WorkRequest::new(2), &mut window, info.zero_based());
        assert_eq!(zero, Err(PostError::ZeroBased));
        assert_eq!(write(&mut a, remote, b"kept"), WcStatus::SUCCESS);
        // The device fails one that was posted: its region has gone meanwhile.
        b.qp.bind_window(WorkRequest::new(3), &mut window, info).unwrap();
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
    });
}

#[test]
fn binding_closes_a_forgotten_batch_first() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        std::mem::forget(b.qp.send_batch().unwrap());
        let info = region.bind_info(0, 8, Access::REMOTE_READ).unwrap();
        let (mut sends, _) = b.qp.split();
        sends.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.confirm();
        let (mut sends, _) = b.qp.split();
        sends.unbind_window(WorkRequest::new(2).signaled(), &mut window).unwrap();
        done(&mut b, 2, WcOpcode::BIND_MW);
    });
}

#[test]
fn a_window_keeps_each_region_that_it_was_bound_to_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let (first, second) = (region(&pd), region(&pd));
        let mut window = pd.memory_window::<Type1>().unwrap();
        let mut bind = |b: &mut Raw, region: &ExposedRegion| {
            let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
            let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
            done(b, 1, WcOpcode::BIND_MW);
            window.confirm();
            remote
        };
        // More bindings than a window takes regions. Fewer under Miri, which takes a second for three of them.
        for _ in 0..if cfg!(miri) { 2 } else { MemoryWindow::<Type1>::MAX_REGIONS } {
            bind(&mut b, &first);
            bind(&mut b, &second);
        }
        let remote = bind(&mut b, &first);
        drop((first, second));
        assert_eq!(fake.live().mrs, 2);
        assert_eq!(write(&mut a, remote, b"held"), WcStatus::SUCCESS);
        // SAFETY: all reports to the window were true.
        unsafe { window.release_former() };
        assert_eq!(fake.live().mrs, 1);
        assert_eq!(write(&mut a, remote, b"held"), WcStatus::SUCCESS);
        window.deallocate().unwrap();
        assert_eq!((fake.live().mrs, fake.live().mws), (0, 0));
    });
}

#[test]
fn a_window_takes_so_many_regions_and_no_more() {
    const MAX: usize = MemoryWindow::<Type2>::MAX_REGIONS;
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_a, mut b) = raw_pair(&pd, crate::support::EXTENDED);
    let mut window = pd.memory_window::<Type2>().unwrap();
    // Dropped bindings count, too: only the user knows whether they were posted.
    for _ in 0..MAX {
        let region = region(&pd);
        let mut batch = b.qp.send_batch().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        // SAFETY: the window is left alone until the batch is dropped.
        unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap();
        drop(batch);
        window.revert();
    }
    assert_eq!(fake.live().mrs, MAX);
    let further = region(&pd);
    let info = further.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
    let mut batch = b.qp.send_batch().unwrap();
    // SAFETY: nothing is added.
    let error = unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap_err();
    assert_eq!(error, PostError::WindowRegions { max: MAX });
    assert!(batch.is_empty());
    drop((batch, window));
    let mut window = pd.memory_window::<Type2>().unwrap();
    assert_eq!(fake.live().mrs, 1, "the former window is gone");
    bind(&mut b, &mut window, info);
}

/// The region stays registered, and accessible to peers, until the window is deallocated.
#[track_caller]
fn is_kept(fake: &Fake, a: &mut Raw, remote: RemoteMemory, window: MemoryWindow<impl WindowType>) {
    assert_eq!(fake.live().mrs, 1, "while the window lives");
    assert_eq!(write(a, remote, b"held"), WcStatus::SUCCESS);
    window.deallocate().unwrap();
    assert_eq!(fake.live().mrs, 0);
    assert_eq!(write(a, remote, b"late"), WcStatus::REM_ACCESS_ERR);
}

#[test]
fn a_confirmation_that_comes_too_early_frees_no_region() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.confirm();
        fake.set_mode(Mode::Manual);
        b.qp.unbind_window(WorkRequest::new(2).signaled(), &mut window).unwrap();
        window.confirm();
        assert!(!window.is_bound());
        drop(region);
        assert_eq!(fake.live().mrs, 1, "the device has not unbound it yet");
        fake.progress();
        done(&mut b, 2, WcOpcode::BIND_MW);
        drop(window);
        assert_eq!(fake.live().mrs, 0);
    });
}

#[test]
fn a_reversal_that_is_not_true_frees_no_region() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.revert();
        assert!(!window.is_bound());
        drop(region);
        is_kept(fake, &mut a, remote, window);
    });
}

#[test]
fn a_binding_that_the_provider_refused_frees_no_region() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_a, mut b) = raw_pair(&pd, crate::support::EXTENDED);
    let region = region(&pd);
    let mut window = pd.memory_window::<Type1>().unwrap();
    // Some providers execute work that they have refused.
    fake.fail_once("bind_mw", libc::ENOMEM);
    let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
    let error = b.qp.bind_window(WorkRequest::new(1), &mut window, info).unwrap_err();
    assert_eq!((error, window.is_bound()), (PostError::QueueFull { posted: 0 }, false));
    drop(region);
    assert_eq!(fake.live().mrs, 1, "while the window lives");
    drop(window);
    assert_eq!(fake.live().mrs, 0);
}

#[test]
fn an_invalidation_that_did_not_happen_frees_no_region() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        let remote = bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap());
        window.invalidated();
        assert!(!window.is_bound());
        drop(region);
        is_kept(fake, &mut a, remote, window);
    });
}

#[test]
fn a_raw_region_is_not_deregistered_or_changed_under_its_windows() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_a, mut b) = raw_pair(&pd, crate::support::EXTENDED);
    let mut memory = [0_u64; 4];
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    // SAFETY: nobody writes to the memory, and it stays for longer than the window.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 32, access) }.unwrap();
    let mut window = pd.memory_window::<Type1>().unwrap();
    let info = region.bind_info(8, 8, Access::REMOTE_READ).unwrap();
    let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
    assert_eq!(remote.address, region.address() + 8);
    done(&mut b, 1, WcOpcode::BIND_MW);
    window.confirm();
    // SAFETY: no work names it.
    let error = unsafe { region.reregister(Reregistration::new().access(Access::LOCAL_WRITE)) }.unwrap_err();
    assert!(matches!(error, ReregisterError::Unchanged { errno: Errno(libc::EBUSY), .. }), "{error}");
    assert_eq!(fake.calls("ibv_rereg_mr"), 0);
    let error = error.into_region().unwrap().deregister().unwrap_err();
    assert!(error.to_string().contains("memory windows that were bound to it"), "{error}");
    assert!(matches!(error, Error::InUse { object: "memory region", .. }), "{error}");
    assert_eq!((fake.live().mrs, fake.calls("ibv_dereg_mr")), (1, 0));
    drop(window);
    assert_eq!(fake.live().mrs, 0, "with the last window");
}

#[test]
fn a_queue_pair_stays_as_long_as_windows_of_type_2_are_bound_to_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_READ).unwrap());
        let error = b.qp.destroy().unwrap_err();
        assert!(matches!(error, Error::InUse { object: "queue pair", .. }), "{error}");
        drop(b.cq);
        assert_eq!((fake.live().qps, fake.live().cqs), (2, 2));
        drop(window);
        assert_eq!((fake.live().qps, fake.live().cqs), (1, 1));
        // Of one that was invalidated nothing is left at the queue pair.
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let mut window = pd.memory_window::<Type2>().unwrap();
        bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_READ).unwrap());
        invalidate(&mut b, &mut window);
        b.qp.destroy().unwrap();
    });
}

#[test]
fn what_cannot_be_bound_is_refused_with_the_reason() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let plain = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let error = plain.bind_info(0, 8, Access::REMOTE_READ).unwrap_err();
    assert!(matches!(error, Error::NotBindable { missing: Access::MW_BIND }), "{error}");
    let mut memory = [0_u64; 2];
    // SAFETY: nobody writes to the memory.
    let raw = unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 16, Access::MW_BIND) }.unwrap();
    let _reads = raw.bind_info(0, 8, Access::REMOTE_READ).unwrap();
    let error = raw.bind_info(0, 8, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(error, Error::NotBindable { missing: Access::LOCAL_WRITE }), "{error}");
    let region = region(&pd);
    for (offset, len) in [(0, 4097), (4096, 1), (usize::MAX, 2)] {
        assert!(matches!(region.bind_info(offset, len, Access::REMOTE), Err(Error::OutOfBounds { .. })));
    }
    assert!(matches!(region.bind_info(8, 0, Access::REMOTE), Err(Error::EmptyRegion)));
    let error = pd.register_with(Pages::new(64).unwrap(), Access::MW_BIND).unwrap_err();
    assert!(matches!(error, Error::BufferAccess { access: Access::MW_BIND }), "{error}");
}

#[test]
fn windows_regions_and_queue_pairs_of_different_domains_do_not_meet() {
    on_each_interface(|fake, interfaces| {
        let context = fake.open();
        let (pd, other) = (context.alloc_pd().unwrap(), fake.pd());
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let (ours, theirs) = (region(&pd), region(&other));
        let (mut here, mut there) = (pd.memory_window().unwrap(), other.memory_window().unwrap());
        let (near, far) =
            (ours.bind_info(0, 8, Access::REMOTE_READ).unwrap(), theirs.bind_info(0, 8, Access::REMOTE_READ).unwrap());
        let wr = WorkRequest::new(1);
        let foreign = |object| Err(PostError::ForeignDomain { object });
        assert_eq!(b.qp.bind_window(wr, &mut there, near), foreign("memory window"));
        assert_eq!(b.qp.bind_window(wr, &mut here, far), foreign("memory region"));
        assert_eq!(b.qp.unbind_window(wr, &mut there), Err(PostError::ForeignDomain { object: "memory window" }));
        let (mut here, mut there) = (pd.memory_window().unwrap(), other.memory_window().unwrap());
        let mut batch = b.qp.send_batch().unwrap();
        // SAFETY: nothing is added.
        unsafe {
            assert_eq!(batch.bind(wr, &mut there, near), foreign("memory window"));
            assert_eq!(batch.bind(wr, &mut here, far), foreign("memory region"));
        }
        assert!(batch.is_empty());
    });
}

#[test]
fn windows_are_bound_where_the_queue_pair_can() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let cq = pd.context().completion_queue(8).classic(!interfaces.extended_cq).build().unwrap();
        let build = |qp_type, ops| {
            let qp = pd.queue_pair(&cq, &cq).qp_type(qp_type).operations(ops).classic(!interfaces.extended_qp);
            qp.build().unwrap()
        };
        let region = region(&pd);
        let info = region.bind_info(0, 8, Access::REMOTE_READ).unwrap();
        let mut window = pd.memory_window::<Type1>().unwrap();
        let mut reset = build(QueuePairType::RC, SendOps::RC | SendOps::WINDOWS);
        let error = reset.bind_window(WorkRequest::new(1), &mut window, info).unwrap_err();
        assert!(matches!(error, PostError::NotReady { .. }), "{error}");
        let mut ud = build(QueuePairType::UD, SendOps::UD);
        ud.init_datagrams(7, &Default::default()).unwrap();
        let not_enabled = |op| PostError::NotEnabled { op };
        assert_eq!(ud.bind_window(WorkRequest::new(1), &mut window, info), Err(not_enabled(SendOps::BIND_MW)));
        let mut window = pd.memory_window::<Type2>().unwrap();
        let mut basic = build(QueuePairType::RC, SendOps::BASIC);
        let number = basic.number();
        crate::support::to_rts(&mut basic, number);
        for qp in [&mut ud, &mut basic] {
            let mut batch = qp.send_batch().unwrap();
            // SAFETY: nothing is added.
            let error = unsafe { batch.bind(WorkRequest::new(1), &mut window, info) };
            assert_eq!(error, Err(not_enabled(SendOps::BIND_MW)));
            assert_eq!(batch.invalidate(WorkRequest::new(1), 7), Err(not_enabled(SendOps::LOCAL_INV)));
        }
        assert!(!window.is_pending());
    });
}

#[test]
fn a_device_without_windows_is_not_asked_for_one() {
    let fake = Fake::new(Config { windows: false, ..Config::default() });
    let pd = fake.pd();
    let refused = |error: Error, expected: &str| {
        assert!(matches!(&error, Error::Unsupported { feature, .. } if *feature == expected), "{error}");
    };
    refused(pd.memory_window::<Type1>().unwrap_err(), "memory windows of type 1");
    refused(pd.memory_window::<Type2>().unwrap_err(), "memory windows of type 2");
    assert_eq!(fake.calls("alloc_mw"), 0);
}

#[test]
fn a_device_that_has_no_more_windows_says_so() {
    let fake = Fake::new(Config::default());
    fake.fail("alloc_mw", libc::ENOMEM);
    let error = fake.pd().memory_window::<Type1>().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: "ibv_alloc_mw", errno: Errno(libc::ENOMEM), .. }), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_window_that_cannot_be_deallocated_keeps_what_it_is_bound_to() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_a, mut b) = raw_pair(&pd, crate::support::EXTENDED);
    let region = region(&pd);
    let mut window = pd.memory_window::<Type2>().unwrap();
    bind(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_READ).unwrap());
    fake.fail("dealloc_mw", libc::EBUSY);
    let error = window.deallocate().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: "ibv_dealloc_mw", errno: Errno(libc::EBUSY), .. }), "{error}");
    drop((region, b, pd));
    let left = fake.live();
    assert_eq!(Live { cqs: 0, ..left }, Live { contexts: 1, pds: 1, mrs: 1, qps: 2, mws: 1, ..Live::default() });
    fake.may_leak();
}

#[test]
fn raw_memory_is_not_given_up_while_a_window_is_bound_to_it() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (_a, mut b) = raw_pair(&pd, crate::support::EXTENDED);
    let mut memory = [0_u64; 4];
    // SAFETY: nobody writes to the memory, and it stays for longer than the window.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 32, Access::MW_BIND) }.unwrap();
    let mut window = pd.memory_window::<Type1>().unwrap();
    let info = region.bind_info(8, 8, Access::REMOTE_READ).unwrap();
    let _ = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
    done(&mut b, 1, WcOpcode::BIND_MW);
    window.confirm();
    let mrs = fake.live().mrs;
    let error = region.into_raw().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "memory region", .. }), "{error}");
    assert_eq!(fake.live().mrs, mrs);
    drop(window);
    assert_eq!(fake.live().mrs, mrs - 1, "with the last that needed it");
}
