//! The regions that memory windows keep registered, when a verb fails or the outcome of a binding is reported wrongly.

use rdma_safe::device::DeviceCapabilities;
use rdma_safe::error::Verb;
use rdma_safe::mr::{Pages, ReregisterError, Reregistration};
use rdma_safe::mw::{MemoryWindow, Type1, Type2, WindowType};
use rdma_safe::{
    Access, Errno, Error, ExposedRegion, PostError, ProtectionDomain, RemoteMemory, WcOpcode, WcStatus, WorkRequest,
};

use crate::memory_windows::{bind_2, done};
use crate::support::interposer::rig::{lab, on_each_mode};
use crate::support::interposer::{Config, Interposed, Live, interposed, interposed_with};
use crate::support::lab::{Data, Lab, Mode, Op, Side, Wr};

fn region(pd: &ProtectionDomain) -> ExposedRegion {
    pd.expose(Pages::new(4096).unwrap(), Access::MW_BIND).unwrap()
}

/// Writes `bytes` from the first end; returns the completion status.
#[track_caller]
fn write(a: &mut Side, remote: RemoteMemory, bytes: &[u8]) -> WcStatus {
    a.post(&[Wr::new(9, Op::Write(remote.into()), Data::Inline(bytes))]).unwrap();
    let wc = a.next();
    assert_eq!(wc.wr_id, 9);
    wc.status
}

/// Number of registered regions, except those of the two ends.
fn regions(soft: &Interposed) -> usize {
    soft.live().mrs - 2
}

#[test]
fn a_binding_that_fails_is_taken_back() {
    on_each_mode(|soft, mode| {
        let Lab { mut a, mut b, pd } = lab(soft, mode).build();
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        let remote = bind_2(&mut b, &mut window, info);
        // The batch is dropped.
        let mut batch = b.qp.send_batch().unwrap();
        // SAFETY: the window is not used until the batch is dropped.
        unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap();
        drop(batch);
        assert_ne!(window.rkey(), remote.rkey);
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
        assert_eq!(write(&mut a, remote, b"kept"), WcStatus::SUCCESS);
        // A bound window cannot be bound again.
        let mut batch = b.qp.send_batch().unwrap();
        // SAFETY: as above.
        unsafe { batch.bind(WorkRequest::new(7), &mut window, info) }.unwrap();
        batch.post().unwrap();
        let wc = b.next();
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::MW_BIND_ERR));
        window.revert();
        assert!(window.rkey() == remote.rkey && window.is_bound());
    });
}

#[test]
fn a_binding_of_type_1_that_is_refused_changes_nothing() {
    on_each_mode(|soft, mode| {
        let Lab { mut a, mut b, pd } = lab(soft, mode).build();
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
            soft.fail_once("bind_mw", errno);
            let error = b.qp.bind_window(WorkRequest::new(2), &mut window, info).unwrap_err();
            assert_eq!((error, window.rkey(), window.is_pending()), (expected, remote.rkey, false));
        }
        let zero = b.qp.bind_window(WorkRequest::new(2), &mut window, info.zero_based());
        assert_eq!(zero, Err(PostError::ZeroBased));
        assert_eq!(write(&mut a, remote, b"kept"), WcStatus::SUCCESS);
        // The device fails a posted binding, because its region was deregistered.
        b.qp.bind_window(WorkRequest::new(3), &mut window, info).unwrap();
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
    });
}

#[test]
fn binding_closes_a_forgotten_batch_first() {
    on_each_mode(|soft, mode| {
        let Lab { a: _a, mut b, pd } = lab(soft, mode).build();
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
    on_each_mode(|soft, mode| {
        let Lab { mut a, mut b, pd } = lab(soft, mode).build();
        let (first, second) = (region(&pd), region(&pd));
        let mut window = pd.memory_window::<Type1>().unwrap();
        let mut bind = |b: &mut Side, region: &ExposedRegion| {
            let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
            let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
            done(b, 1, WcOpcode::BIND_MW);
            window.confirm();
            remote
        };
        // More bindings than a window can keep regions for. Miri, which needs a second for three bindings, does fewer.
        for _ in 0..if cfg!(miri) { 2 } else { MemoryWindow::<Type1>::MAX_REGIONS } {
            bind(&mut b, &first);
            bind(&mut b, &second);
        }
        let remote = bind(&mut b, &first);
        drop((first, second));
        assert_eq!(regions(soft), 2);
        assert_eq!(write(&mut a, remote, b"held"), WcStatus::SUCCESS);
        // SAFETY: all outcomes reported to the window were true.
        unsafe { window.release_unused_regions() };
        assert_eq!(regions(soft), 1);
        assert_eq!(write(&mut a, remote, b"held"), WcStatus::SUCCESS);
        window.deallocate().unwrap();
        assert_eq!((regions(soft), soft.live().mws), (0, 0));
    });
}

#[test]
fn a_window_keeps_a_limited_number_of_regions() {
    const MAX: usize = MemoryWindow::<Type2>::MAX_REGIONS;
    let Some(soft) = interposed() else { return };
    let Lab { a: _a, mut b, pd } = lab(&soft, Mode::EXTENDED).build();
    let mut window = pd.memory_window::<Type2>().unwrap();
    // Dropped bindings count, too, because only the user knows whether they were posted.
    for _ in 0..MAX {
        let region = region(&pd);
        let mut batch = b.qp.send_batch().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        // SAFETY: the window is not used until the batch is dropped.
        unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap();
        drop(batch);
        window.revert();
    }
    assert_eq!(regions(&soft), MAX);
    let further = region(&pd);
    let info = further.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
    let mut batch = b.qp.send_batch().unwrap();
    // SAFETY: the call fails.
    let error = unsafe { batch.bind(WorkRequest::new(1), &mut window, info) }.unwrap_err();
    assert_eq!(error, PostError::WindowRegions { max: MAX });
    assert!(batch.is_empty());
    drop((batch, window));
    let mut window = pd.memory_window::<Type2>().unwrap();
    assert_eq!(regions(&soft), 1, "the former window is gone");
    bind_2(&mut b, &mut window, info);
}

/// Checks that the region stays registered and accessible to peers until the window is deallocated.
#[track_caller]
fn is_kept(soft: &Interposed, a: &mut Side, remote: RemoteMemory, window: MemoryWindow<impl WindowType>) {
    assert_eq!(regions(soft), 1, "while the window lives");
    assert_eq!(write(a, remote, b"held"), WcStatus::SUCCESS);
    window.deallocate().unwrap();
    assert_eq!(regions(soft), 0);
    assert_eq!(write(a, remote, b"late"), WcStatus::REM_ACCESS_ERR);
}

#[test]
fn a_confirmation_that_comes_too_early_frees_no_region() {
    on_each_mode(|soft, mode| {
        let Lab { a: _a, mut b, pd } = lab(soft, mode).build();
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.confirm();
        soft.hold();
        b.qp.unbind_window(WorkRequest::new(2).signaled(), &mut window).unwrap();
        window.confirm();
        assert!(!window.is_bound());
        drop(region);
        assert_eq!(regions(soft), 1, "the unbinding has not been reported");
        soft.release();
        done(&mut b, 2, WcOpcode::BIND_MW);
        drop(window);
        assert_eq!(regions(soft), 0);
    });
}

#[test]
fn a_false_revert_frees_no_region() {
    on_each_mode(|soft, mode| {
        let Lab { mut a, mut b, pd } = lab(soft, mode).build();
        let region = region(&pd);
        let mut window = pd.memory_window::<Type1>().unwrap();
        let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
        let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
        done(&mut b, 1, WcOpcode::BIND_MW);
        window.revert();
        assert!(!window.is_bound());
        drop(region);
        is_kept(soft, &mut a, remote, window);
    });
}

#[test]
fn a_binding_that_the_provider_refused_frees_no_region() {
    let Some(soft) = interposed() else { return };
    let Lab { a: _a, mut b, pd } = lab(&soft, Mode::EXTENDED).build();
    let region = region(&pd);
    let mut window = pd.memory_window::<Type1>().unwrap();
    // Some providers execute refused work.
    soft.fail_once("bind_mw", libc::ENOMEM);
    let info = region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap();
    let error = b.qp.bind_window(WorkRequest::new(1), &mut window, info).unwrap_err();
    assert_eq!((error, window.is_bound()), (PostError::QueueFull { posted: 0 }, false));
    drop(region);
    assert_eq!(regions(&soft), 1, "while the window lives");
    drop(window);
    assert_eq!(regions(&soft), 0);
}

#[test]
fn an_invalidation_that_did_not_happen_frees_no_region() {
    on_each_mode(|soft, mode| {
        let Lab { mut a, mut b, pd } = lab(soft, mode).build();
        let region = region(&pd);
        let mut window = pd.memory_window::<Type2>().unwrap();
        let remote = bind_2(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_WRITE).unwrap());
        window.invalidated();
        assert!(!window.is_bound());
        drop(region);
        is_kept(soft, &mut a, remote, window);
    });
}

#[test]
fn a_raw_region_is_not_deregistered_or_changed_under_its_windows() {
    let Some(soft) = interposed() else { return };
    let Lab { a: _a, mut b, pd } = lab(&soft, Mode::EXTENDED).build();
    let mut memory = [0_u64; 4];
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    // SAFETY: nobody writes to the memory, and it outlives the window.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 32, access) }.unwrap();
    let mut window = pd.memory_window::<Type1>().unwrap();
    let info = region.bind_info(8, 8, Access::REMOTE_READ).unwrap();
    let remote = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
    assert_eq!(remote.address, region.address() + 8);
    done(&mut b, 1, WcOpcode::BIND_MW);
    window.confirm();
    // SAFETY: no work uses the region.
    let error = unsafe { region.reregister(Reregistration::new().access(Access::LOCAL_WRITE)) }.unwrap_err();
    assert!(matches!(error, ReregisterError::Unchanged { errno: Errno(libc::EBUSY), .. }), "{error}");
    assert_eq!(soft.calls("ibv_rereg_mr"), 0);
    let error = error.into_region().unwrap().deregister().unwrap_err();
    assert!(error.to_string().contains("memory windows that were bound to it"), "{error}");
    assert!(matches!(error, Error::InUse { object: "memory region", .. }), "{error}");
    assert_eq!((regions(&soft), soft.calls("ibv_dereg_mr")), (1, 0));
    drop(window);
    assert_eq!(regions(&soft), 0, "with the last window");
}

#[test]
fn a_device_without_windows_is_not_asked_for_one() {
    let without_capabilities = DeviceCapabilities::MEM_WINDOW
        | DeviceCapabilities::MEM_WINDOW_TYPE_2A
        | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
    let Some(soft) = interposed_with(Config { without_capabilities, ..Config::default() }) else { return };
    let pd = soft.pd();
    let refused = |error: Error, expected: &str| {
        assert!(matches!(&error, Error::Unsupported { feature, .. } if *feature == expected), "{error}");
    };
    refused(pd.memory_window::<Type1>().unwrap_err(), "memory windows of type 1");
    refused(pd.memory_window::<Type2>().unwrap_err(), "memory windows of type 2");
    assert_eq!(soft.calls("alloc_mw"), 0);
}

#[test]
fn a_device_without_free_windows_is_an_error() {
    let Some(soft) = interposed() else { return };
    soft.fail("alloc_mw", libc::ENOMEM);
    let error = soft.pd().memory_window::<Type1>().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::AllocMw, errno: Errno(libc::ENOMEM), .. }), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_window_that_cannot_be_deallocated_keeps_what_it_is_bound_to() {
    let Some(soft) = interposed() else { return };
    let Lab { a, mut b, pd } = lab(&soft, Mode::EXTENDED).build_in(soft.pd_of_own_context());
    let region = region(&pd);
    let mut window = pd.memory_window::<Type2>().unwrap();
    bind_2(&mut b, &mut window, region.bind_info(0, 8, Access::REMOTE_READ).unwrap());
    soft.fail("dealloc_mw", libc::EBUSY);
    let error = window.deallocate().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DeallocMw, errno: Errno(libc::EBUSY), .. }), "{error}");
    drop((region, a, b, pd));
    assert_eq!(soft.live(), Live { contexts: 1, pds: 1, mrs: 1, cqs: 1, qps: 1, mws: 1, ..Live::default() });
    soft.may_leak();
}

#[test]
fn raw_memory_is_not_released_while_a_window_is_bound_to_it() {
    let Some(soft) = interposed() else { return };
    let Lab { a: _a, mut b, pd } = lab(&soft, Mode::EXTENDED).build();
    let mut memory = [0_u64; 4];
    // SAFETY: nobody writes to the memory, and it outlives the window.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr().cast(), 32, Access::MW_BIND) }.unwrap();
    let mut window = pd.memory_window::<Type1>().unwrap();
    let info = region.bind_info(8, 8, Access::REMOTE_READ).unwrap();
    let _ = b.qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info).unwrap();
    done(&mut b, 1, WcOpcode::BIND_MW);
    window.confirm();
    let mrs = regions(&soft);
    let error = region.into_raw().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "memory region", .. }), "{error}");
    assert_eq!(regions(&soft), mrs);
    drop(window);
    assert_eq!(regions(&soft), mrs - 1, "destroyed with the last dependent");
}
