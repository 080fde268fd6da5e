//! Memory windows: what peers reach through them, and until when.

use rdma_safe::{
    Access, BindInfo, DeviceCapabilities, Error, ExposedRegion, MemoryWindow, Pages, Quirks, RemoteMemory, Type1,
    Type2, WcFlags, WcOpcode, WcStatus, WindowType, WorkRequest,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Data, Lab, Memory, Mode, Op, Side, Wr};
use crate::support::{Rdma, device};

/// Runs `body` on every combination of interfaces, if the device has windows of the type.
fn with_windows<K: WindowType>(needs: DeviceCapabilities, body: impl Fn(&Rdma, Mode)) {
    let Some(rdma) = device() else { return };
    if !rdma.attributes().capabilities().intersects(needs) {
        assert!(!rdma.is_rxe(), "SoftRoCE has windows of both types");
        let error = rdma.pd().memory_window::<K>().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        println!("skipped: {error}");
        return;
    }
    for mode in Mode::ALL {
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

/// How a write of `bytes` by the first end goes.
fn write(lab: &mut Lab, remote: RemoteMemory, bytes: &[u8]) -> WcStatus {
    lab.a.memory.put(0, bytes);
    let data = Data::One(lab.a.memory.sge(0..bytes.len()));
    lab.a.post(&[Wr::new(9, Op::Write(remote.into()), data)]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.wr_id, 9);
    wc.status
}

#[track_caller]
fn done(side: &mut Side, id: u64, opcode: WcOpcode) {
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

#[track_caller]
fn bind_2(side: &mut Side, window: &mut MemoryWindow<Type2>, info: BindInfo<'_>) -> RemoteMemory {
    let mut batch = side.qp.send_batch().unwrap();
    // SAFETY: the window is left alone until the batch is posted.
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
        let remote = RemoteMemory { address: region.remote().address + 64, len: 4, rkey: window.rkey() };
        lab.b.qp.unbind_window(WorkRequest::new(6).signaled(), &mut window).unwrap();
        done(&mut lab.b, 6, WcOpcode::BIND_MW);
        window.confirm();
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
fn a_write_beyond_the_bytes_of_a_window_is_refused_where_the_device_looks() {
    type_1(|rdma, mode| {
        let unbounded = rdma.quirks().contains(Quirks::WINDOWS_UNBOUNDED);
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
fn a_window_of_type_2_is_bound_and_its_key_told_in_one_batch() {
    type_2(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let region = region(&lab);
        let mut window = lab.pd.memory_window().unwrap();
        let info = region.bind_info(100, 8, Access::REMOTE_WRITE).unwrap();
        lab.a.receive(1, 512..516).unwrap();
        let message = lab.b.memory.sge(0..4);
        let mut batch = lab.b.qp.send_batch().unwrap();
        // SAFETY: the window is left alone until the batch is posted, and the memory is that of the lab.
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
        let mut last = None;
        for round in 0..3 {
            let remote = bind_2(&mut lab.b, &mut window, info);
            assert_ne!(last.replace(remote), Some(remote));
            assert_eq!(write(&mut lab, remote, &[round; 4]), WcStatus::SUCCESS);
            assert_eq!(get(&region, 0), [round; 4]);
            let mut batch = lab.b.qp.send_batch().unwrap();
            batch.invalidate(WorkRequest::new(6).signaled(), window.rkey()).unwrap();
            batch.post().unwrap();
            done(&mut lab.b, 6, WcOpcode::LOCAL_INV);
            window.invalidated();
        }
        assert_eq!(write(&mut lab, last.unwrap(), b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 0), [2; 4]);
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
            // The kernel's rxe sets its own bit for it, which is that of a verified checksum in the verbs API.
            None => assert!(rdma.is_rxe() && wc.flags.contains(WcFlags::IP_CSUM_OK), "{wc:?}"),
        }
        lab.a.next_ok(2);
        window.invalidated();
        assert!(!window.is_bound());
        assert_eq!(write(&mut lab, remote, b"late"), WcStatus::REM_ACCESS_ERR);
        assert_eq!(get(&region, 0), [0; 4]);
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
        // SAFETY: the window is left alone until the batch is posted.
        unsafe { batch.bind(WorkRequest::new(6).signaled(), &mut window, info) }.unwrap();
        batch.post().unwrap();
        let wc = lab.b.next();
        // Newer SoftRoCE is in the error state before it completes what has failed.
        let expected = if rdma.is_newer_rxe() { WcStatus::WR_FLUSH_ERR } else { WcStatus::MW_BIND_ERR };
        assert_eq!((wc.wr_id, wc.status), (6, expected));
        window.revert();
        assert_eq!(window.rkey(), remote.rkey);
    });
}

#[test]
fn a_key_of_a_window_that_was_deallocated_opens_nothing() {
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
    if !rdma.is_rxe() {
        println!("skipped: counts what the kernel has of SoftRoCE");
        return;
    }
    in_own_process("memory_windows::a_region_is_deregistered_after_the_windows_that_are_bound_to_it", || {
        let mut lab = Lab::new(&rdma, Mode::ALL[0]);
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
