//! Memory windows: access by peers, and its end.

use std::thread;

use rdma_safe::device::{DeviceCapabilities, Quirks};
use rdma_safe::mr::Pages;
use rdma_safe::mw::{BindInfo, MemoryWindow, Type1, Type2, WindowType};
use rdma_safe::{
    Access, Error, ExposedRegion, InitOptions, PostError, QueuePair, QueuePairType, RemoteMemory, SendOps, WcFlags,
    WcOpcode, WcStatus, WorkRequest,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Data, Lab, Memory, Mode, Op, Side, Wr};
use crate::support::link::Link;
use crate::support::{Rdma, device, error_of, rounds};

/// Runs `body` on every combination of interfaces, if the device supports windows of this type.
fn with_windows<K: WindowType>(needs: DeviceCapabilities, body: impl Fn(&Rdma, Mode)) {
    let Some(rdma) = device() else { return };
    if !rdma.attributes().capabilities().intersects(needs) {
        assert!(!rdma.is_rxe(), "SoftRoCE has windows of both types");
        let error = rdma.pd().memory_window::<K>().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        println!("skipped: {error}");
        return;
    }
    for mode in Mode::each() {
        println!("{mode}");
        body(&rdma, mode);
    }
}

fn type_1(body: impl Fn(&Rdma, Mode)) {
    with_windows::<Type1>(DeviceCapabilities::MEM_WINDOW, body);
}

fn type_2(body: impl Fn(&Rdma, Mode)) {
    let any = DeviceCapabilities::MEM_WINDOW_TYPE_2A | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
    with_windows::<Type2>(any, body);
}

fn region(lab: &Lab) -> ExposedRegion {
    lab.pd.expose(Pages::new(8192).unwrap(), Access::MW_BIND).unwrap()
}

fn get(region: &ExposedRegion, offset: usize) -> [u8; 4] {
    let mut bytes = [0; 4];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

/// Writes `bytes` from the first end; returns the completion status.
fn write(lab: &mut Lab, remote: RemoteMemory, bytes: &[u8]) -> WcStatus {
    lab.a.memory.put(0, bytes);
    let data = Data::One(lab.a.memory.sge(0..bytes.len()));
    lab.a.post(&[Wr::new(9, Op::Write(remote.into()), data)]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.wr_id, 9);
    wc.status
}

/// Takes the next completion, which must be of work `id`.
#[track_caller]
pub(crate) fn done(side: &mut Side, id: u64, opcode: WcOpcode) {
    let wc = side.next_ok(id);
    assert_eq!(wc.opcode, opcode);
}

#[track_caller]
fn bind_1(side: &mut Side, window: &mut MemoryWindow<Type1>, info: BindInfo<'_>) -> RemoteMemory {
    let remote = side.qp.bind_window(WorkRequest::new(5).signaled(), window, info).unwrap();
    done(side, 5, WcOpcode::BIND_MW);
    window.confirm();
    remote
}

/// Binds the window with a batch of one work request, and confirms the binding.
#[track_caller]
pub(crate) fn bind_2(side: &mut Side, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) -> RemoteMemory {
    let mut batch = side.qp.send_batch().unwrap();
    // SAFETY: the window is not used until the batch is posted.
    let remote = unsafe { batch.bind(WorkRequest::new(5).signaled(), window, info) }.unwrap();
    batch.post().unwrap();
    done(side, 5, WcOpcode::BIND_MW);
    window.confirm();
    remote
}

#[test]
fn a_write_through_a_window_of_type_1_reaches_its_bytes_until_it_is_unbound() {
    type_1(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        for (offset, bytes) in [(4094, b"over"), (64, b"next")] {
            let info = region.bind_info(offset, 4, Access::REMOTE_WRITE).unwrap();
            let remote = bind_1(&mut lab.b, &mut window, info);
            assert_eq!(write(&mut lab, remote, bytes), WcStatus::SUCCESS);
            assert_eq!(&get(&region, offset), bytes);
        }
        // A range within the window.
        let info = region.bind_info(64, 12, Access::REMOTE_WRITE).unwrap();
        let before = window.rkey();
        let remote = lab.b.qp.bind_window(WorkRequest::new(7).signaled(), &mut window, info).unwrap();
        assert_eq!((remote.address, remote.len), (region.remote().address + 64, 12));
        assert!(remote.rkey == window.rkey() && remote.rkey != before && window.is_pending() && window.is_bound());
        done(&mut lab.b, 7, WcOpcode::BIND_MW);
        window.confirm();
        assert!(window.is_bound() && !window.is_pending());
        assert_eq!(write(&mut lab, remote.slice(4, 4).unwrap(), b"part"), WcStatus::SUCCESS);
        assert_eq!((&get(&region, 64), &get(&region, 68), get(&region, 72)), (b"next", b"part", [0; 4]));
        lab.b.qp.unbind_window(WorkRequest::new(6).signaled(), &mut window).unwrap();
        done(&mut lab.b, 6, WcOpcode::BIND_MW);
        window.confirm();
        assert!(!window.is_bound());
        assert!(matches!(lab.b.qp.unbind_window(WorkRequest::new(3), &mut window), Err(PostError::NotBound)));
        assert_eq!(write(&mut lab, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&get(&region, 64), b"next");
    });
}

#[test]
fn a_write_through_a_window_without_the_right_is_refused() {
    type_1(|rdma, mode| {
        for access in [Access::empty(), Access::REMOTE_READ, Access::REMOTE_READ | Access::REMOTE_ATOMIC] {
            let mut lab = Lab::new(rdma, mode);
            let region = region(&lab);
            let mut window = lab.pd.memory_window().unwrap();
            let remote = bind_1(&mut lab.b, &mut window, region.bind_info(0, 64, access).unwrap());
            assert_eq!(write(&mut lab, remote, b"more"), WcStatus::REM_ACCESS_ERR, "{access:?}");
            assert_eq!(get(&region, 0), [0; 4]);
        }
    });
}

#[test]
fn a_write_beyond_a_window_is_refused_if_the_device_checks_bounds() {
    type_1(|rdma, mode| {
        let unbounded = rdma.quirks().contains(Quirks::WINDOWS_COVER_WHOLE_REGIONS);
        assert_eq!(unbounded, rdma.is_rxe());
        for (offset, len) in [(0, 3), (8, 64)] {
            let mut lab = Lab::new(rdma, mode);
            let region = region(&lab);
            let mut window = lab.pd.memory_window().unwrap();
            let info = region.bind_info(offset, len, Access::REMOTE_WRITE).unwrap();
            let remote = RemoteMemory { len: 4, ..bind_1(&mut lab.b, &mut window, info) };
            let remote = RemoteMemory { address: region.remote().address, ..remote };
            let (status, bytes) =
                if unbounded { (WcStatus::SUCCESS, *b"more") } else { (WcStatus::REM_ACCESS_ERR, [0; 4]) };
            assert_eq!((write(&mut lab, remote, b"more"), get(&region, 0)), (status, bytes), "{offset} {len}");
        }
    });
}

#[test]
fn a_window_of_type_2_grants_only_its_bytes_and_rights() {
    type_2(|rdma, mode| {
        let unbounded = rdma.quirks().contains(Quirks::WINDOWS_COVER_WHOLE_REGIONS);
        for (offset, len, access) in [
            (0, 16, Access::REMOTE_READ),
            (0, 16, Access::empty()),
            (1, 16, Access::REMOTE_WRITE),
            (0, 3, Access::REMOTE_WRITE),
        ] {
            if unbounded && access == Access::REMOTE_WRITE {
                continue;
            }
            let mut lab = Lab::new(rdma, mode);
            let region = region(&lab);
            let mut window = lab.pd.memory_window().unwrap();
            let remote = bind_2(&mut lab.b, &mut window, region.bind_info(offset, len, access).unwrap());
            let wide = RemoteMemory { address: region.remote().address, len: 4, rkey: remote.rkey };
            assert_eq!(write(&mut lab, wide, b"more"), WcStatus::REM_ACCESS_ERR, "{offset} {len} {access:?}");
            assert_eq!(get(&region, 0), [0; 4]);
        }
    });
}

#[test]
fn addresses_of_a_zero_based_window_begin_at_zero() {
    type_2(|rdma, mode| {
        if !rdma.is_soft() {
            println!("skipped: not every device has zero-based windows");
            return;
        }
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let info = region.bind_info(8, 8, Access::REMOTE_WRITE).unwrap().zero_based();
        let remote = bind_2(&mut lab.b, &mut window, info);
        assert_eq!((remote.address, remote.len), (0, 8));
        assert_eq!(write(&mut lab, remote.slice(4, 4).unwrap(), b"zero"), WcStatus::SUCCESS);
        assert_eq!(&get(&region, 12), b"zero");
    });
}

#[test]
fn invalid_bindings_are_refused_with_the_reason() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let plain = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let error = error_of(plain.bind_info(0, 8, Access::REMOTE_READ));
    assert!(matches!(error, Error::NotBindable { missing: Access::MW_BIND }), "{error}");
    let raw = Memory::with_access(&pd, 64, Access::MW_BIND);
    let _ = raw.raw().bind_info(0, 8, Access::REMOTE_READ).unwrap();
    let error = error_of(raw.raw().bind_info(0, 8, Access::REMOTE_WRITE));
    assert!(matches!(error, Error::NotBindable { missing: Access::LOCAL_WRITE }), "{error}");
    let region = pd.expose(Pages::new(4096).unwrap(), Access::MW_BIND).unwrap();
    for (offset, len) in [(0, 4097), (4096, 1), (usize::MAX, 2)] {
        assert!(matches!(region.bind_info(offset, len, Access::REMOTE), Err(Error::OutOfBounds { .. })));
    }
    assert!(matches!(region.bind_info(8, 0, Access::REMOTE), Err(Error::EmptyRegion)));
    let error = error_of(pd.register_with(Pages::new(64).unwrap(), Access::MW_BIND));
    assert!(matches!(error, Error::BufferAccess { access: Access::MW_BIND }), "{error}");
}

#[test]
fn binding_across_protection_domains_is_refused() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let other = rdma.pd();
        let (ours, theirs) = (region(&lab), other.expose(Pages::new(64).unwrap(), Access::MW_BIND).unwrap());
        let (mut here, mut there) = (lab.pd.memory_window().unwrap(), other.memory_window().unwrap());
        let near = ours.bind_info(0, 8, Access::REMOTE_READ).unwrap();
        let far = theirs.bind_info(0, 8, Access::REMOTE_READ).unwrap();
        let wr = WorkRequest::new(1);
        let foreign = |object| Err(PostError::ForeignDomain { object });
        assert_eq!(lab.b.qp.bind_window(wr, &mut there, near), foreign("memory window"));
        assert_eq!(lab.b.qp.bind_window(wr, &mut here, far), foreign("memory region"));
        let refused = lab.b.qp.unbind_window(wr, &mut there);
        assert_eq!(refused, Err(PostError::ForeignDomain { object: "memory window" }));
        let (mut here, mut there) = (lab.pd.memory_window().unwrap(), other.memory_window().unwrap());
        let mut batch = lab.b.qp.send_batch().unwrap();
        // SAFETY: the call fails.
        unsafe {
            assert_eq!(batch.bind(wr, &mut there, near), foreign("memory window"));
            assert_eq!(batch.bind(wr, &mut here, far), foreign("memory region"));
        }
        assert!(batch.is_empty());
    });
}

#[test]
fn binding_needs_a_ready_queue_pair_that_supports_windows() {
    type_2(|rdma, mode| {
        let lab = Lab::new(rdma, mode);
        let build = |qp_type, ops| {
            let builder = lab.pd.queue_pair(&lab.b.cq, &lab.b.cq).qp_type(qp_type).operations(ops);
            builder.classic(mode.classic_qp).build().unwrap()
        };
        let region = region(&lab);
        let info = region.bind_info(0, 8, Access::REMOTE_READ).unwrap();
        let mut window = lab.pd.memory_window::<Type1>().unwrap();
        let mut reset = build(QueuePairType::RC, SendOps::RC | SendOps::WINDOWS);
        let error = reset.bind_window(WorkRequest::new(1), &mut window, info).unwrap_err();
        assert!(matches!(error, PostError::NotReady { .. }), "{error}");
        let mut ud = build(QueuePairType::UD, SendOps::UD);
        ud.init_datagrams(7, &InitOptions::default().port(rdma.port).gid_index(rdma.gid.index)).unwrap();
        let not_enabled = |op| PostError::NotEnabled { op };
        assert_eq!(ud.bind_window(WorkRequest::new(1), &mut window, info), Err(not_enabled(SendOps::BIND_MW)));
        let mut window = lab.pd.memory_window::<Type2>().unwrap();
        let mut basic = build(QueuePairType::RC, SendOps::BASIC);
        let number = basic.number();
        Link::default().connect(rdma, &mut basic, number).unwrap();
        for qp in [&mut ud, &mut basic] {
            let mut batch = qp.send_batch().unwrap();
            // SAFETY: the call fails.
            let error = unsafe { batch.bind(WorkRequest::new(1), &mut window, info) };
            assert_eq!(error, Err(not_enabled(SendOps::BIND_MW)));
            assert_eq!(batch.invalidate(WorkRequest::new(1), 7), Err(not_enabled(SendOps::LOCAL_INV)));
        }
        assert!(!window.is_pending());
    });
}

#[test]
fn a_window_of_type_2_is_bound_and_its_key_sent_in_one_batch() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let info = region.bind_info(100, 8, Access::REMOTE_WRITE).unwrap();
        lab.a.receive(1, 512..516).unwrap();
        let message = lab.b.memory.sge(0..4);
        let mut batch = lab.b.qp.send_batch().unwrap();
        // SAFETY: the window is not used until the batch is posted, and the memory of the lab tolerates any access.
        let remote = unsafe {
            let remote = batch.bind(WorkRequest::new(2).signaled(), &mut window, info).unwrap();
            lab.b.memory.put(0, &remote.rkey.to_be_bytes());
            batch.send(WorkRequest::new(3).signaled(), message).unwrap();
            remote
        };
        batch.post().unwrap();
        lab.a.next_ok(1);
        let told = u32::from_be_bytes(lab.a.memory.get(512..516).try_into().unwrap());
        assert_eq!(told, window.rkey());
        done(&mut lab.b, 2, WcOpcode::BIND_MW);
        window.confirm();
        lab.b.next_ok(3);
        assert_eq!(
            write(&mut lab, RemoteMemory { rkey: told, ..remote }.slice(2, 4).unwrap(), b"told"),
            WcStatus::SUCCESS
        );
        assert_eq!(&get(&region, 102), b"told");
    });
}

#[test]
fn a_window_of_type_2_is_closed_by_a_local_invalidation_and_bound_again() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let info = region.bind_info(0, 64, Access::REMOTE).unwrap();
        let mut last: Option<RemoteMemory> = None;
        // More rounds than there are keys, except under Miri.
        let count = rounds(300, 3);
        for round in 0..count {
            let remote = bind_2(&mut lab.b, &mut window, info);
            if let Some(last) = last.replace(remote) {
                assert_eq!((last.rkey >> 8, (last.rkey as u8).wrapping_add(1)), (remote.rkey >> 8, remote.rkey as u8));
            }
            assert_eq!(write(&mut lab, remote, &[round as u8; 4]), WcStatus::SUCCESS);
            assert_eq!(get(&region, 0), [round as u8; 4]);
            let mut batch = lab.b.qp.send_batch().unwrap();
            batch.invalidate(WorkRequest::new(6).signaled(), window.rkey()).unwrap();
            batch.post().unwrap();
            done(&mut lab.b, 6, WcOpcode::LOCAL_INV);
            window.invalidated();
        }
        assert_eq!(write(&mut lab, last.unwrap(), b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 0), [(count - 1) as u8; 4]);
        // The queue pair can be destroyed, since no window is bound to it any more.
        lab.b.qp.destroy().unwrap();
    });
}

#[test]
fn a_window_of_type_2_is_closed_by_the_peer_that_invalidates_its_key() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let remote = bind_2(&mut lab.b, &mut window, region.bind_info(0, 64, Access::REMOTE).unwrap());
        lab.b.receive(1, 0..64).unwrap();
        let data = Data::One(lab.a.memory.sge(0..4));
        lab.a.post(&[Wr::new(2, Op::SendInvalidate(remote.rkey), data)]).unwrap();
        let wc = lab.b.next_ok(1);
        match wc.invalidated_rkey {
            Some(key) => assert_eq!(key, window.rkey()),
            // The kernel's rxe sets its own flag for an invalidation. In the verbs API this flag means a verified checksum.
            None => assert!(rdma.is_rxe() && wc.flags.contains(WcFlags::IP_CSUM_OK), "{wc:?}"),
        }
        lab.a.next_ok(2);
        window.invalidated();
        assert!(!window.is_bound());
        // The window can be bound again.
        let again = bind_2(&mut lab.b, &mut window, region.bind_info(0, 64, Access::REMOTE).unwrap());
        assert_ne!(again.rkey, remote.rkey);
        assert_eq!(write(&mut lab, again, b"anew"), WcStatus::SUCCESS);
        assert_eq!(write(&mut lab, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(&get(&region, 0), b"anew");
    });
}

#[test]
fn a_window_that_is_bound_is_not_bound_a_second_time_and_keeps_its_key() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let info = region.bind_info(0, 64, Access::REMOTE).unwrap();
        let remote = bind_2(&mut lab.b, &mut window, info);
        let mut batch = lab.b.qp.send_batch().unwrap();
        // SAFETY: the window is not used until the batch is posted.
        unsafe { batch.bind(WorkRequest::new(6).signaled(), &mut window, info) }.unwrap();
        batch.post().unwrap();
        let wc = lab.b.next();
        // Newer SoftRoCE enters the error state before it completes the failed work.
        let expected = if rdma.is_newer_rxe() { WcStatus::WR_FLUSH_ERR } else { WcStatus::MW_BIND_ERR };
        assert_eq!((wc.wr_id, wc.status), (6, expected));
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
    });
}

#[test]
fn the_key_of_a_deallocated_window_is_refused() {
    type_1(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let remote = bind_1(&mut lab.b, &mut window, region.bind_info(0, 64, Access::REMOTE).unwrap());
        window.deallocate().unwrap();
        assert_eq!(write(&mut lab, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 0), [0; 4]);
    });
}

#[test]
fn a_region_is_deregistered_after_the_windows_that_are_bound_to_it() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        println!("skipped: it counts objects, which differ from device to device");
        return;
    }
    in_own_process("memory_windows::a_region_is_deregistered_after_the_windows_that_are_bound_to_it", || {
        let mut lab = Lab::new(&rdma, Mode::EXTENDED);
        let raw = Memory::with_access(&lab.pd, 4096, Access::LOCAL_WRITE | Access::MW_BIND);
        let exposed = region(&lab);
        let (mut first, mut second) = (lab.pd.memory_window().unwrap(), lab.pd.memory_window().unwrap());
        expect_kernel_objects("mr", 4);
        bind_1(&mut lab.b, &mut first, raw.raw().bind_info(0, 64, Access::REMOTE).unwrap());
        bind_2(&mut lab.b, &mut second, exposed.bind_info(0, 64, Access::REMOTE).unwrap());
        drop(exposed);
        expect_kernel_objects("mr", 4);
        let (raw, memory) = raw.into_parts();
        let error = raw.deregister().unwrap_err();
        assert!(matches!(error, Error::InUse { object: "memory region", .. }), "{error:?}");
        expect_kernel_objects("mr", 4);
        drop(first);
        expect_kernel_objects("mr", 3);
        drop(memory);
        let Lab { a, b, pd } = lab;
        let error = b.qp.destroy().unwrap_err();
        assert!(matches!(error, Error::InUse { object: "queue pair", .. }), "{error:?}");
        drop((b.cq, b.memory, a));
        expect_kernel_objects("qp", 1);
        drop(second);
        expect_kernel_objects("qp", 0);
        expect_kernel_objects("mr", 0);
        drop(pd);
        expect_kernel_objects("pd", 0);
    });
}

#[test]
fn a_queue_pair_is_destroyed_with_the_last_window_that_is_bound_by_it() {
    let Some(rdma) = device() else { return };
    if !rdma.is_rxe() && !rdma.is_soft() {
        println!("skipped: it counts objects, which differ from device to device");
        return;
    }
    in_own_process("memory_windows::a_queue_pair_is_destroyed_with_the_last_window_that_is_bound_by_it", || {
        let ends: [fn(QueuePair); 3] = [
            drop,
            |qp| assert!(matches!(qp.destroy(), Err(Error::InUse { object: "queue pair", .. }))),
            |qp| assert!(matches!(qp.into_raw(), Err(Error::InUse { object: "queue pair", .. }))),
        ];
        for end in ends {
            let mut lab = Lab::new(&rdma, Mode::EXTENDED);
            let region = region(&lab);
            let mut windows = [lab.pd.memory_window().unwrap(), lab.pd.memory_window().unwrap()];
            for window in &mut windows {
                bind_2(&mut lab.b, window, region.bind_info(0, 64, Access::REMOTE).unwrap());
            }
            let Lab { a, b, pd } = lab;
            end(b.qp);
            drop((b.cq, b.memory, a, pd));
            let [first, last] = windows;
            drop(first);
            expect_kernel_objects("qp", 1);
            thread::spawn(|| drop(last)).join().unwrap();
            expect_kernel_objects("qp", 0);
        }
        let mut lab = Lab::new(&rdma, Mode::EXTENDED);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        bind_2(&mut lab.b, &mut window, region.bind_info(0, 64, Access::REMOTE).unwrap());
        window.invalidated();
        lab.b.qp.destroy().unwrap();
    });
}
