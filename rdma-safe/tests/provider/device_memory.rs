//! Device memory, which soft0 does not have.

use rdma_safe::dm::DeviceMemory;
use rdma_safe::error::Verb;
use rdma_safe::{Access, Context, Errno, Error, RemoteMemory, WcStatus, WorkRequest};

use crate::fake::{Config, Fake, Live};
use crate::support::{on_each_interface, post, raw_pair, receive, seen};

fn bytes(memory: &DeviceMemory, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(offset, &mut bytes).unwrap();
    bytes
}

fn memory(context: &Context) -> DeviceMemory {
    let mut memory = context.alloc_dm(64, 8).unwrap();
    memory.write(0, &[0; 64]).unwrap();
    memory
}

#[test]
fn device_memory_is_copied_within_its_bounds() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let mut memory = memory(&context);
    assert_eq!((memory.len(), memory.is_empty(), memory.context().is_same(&context)), (64, false, true));
    memory.write(8, b"counter").unwrap();
    assert_eq!(bytes(&memory, 6, 11), b"\0\0counter\0\0");
    for (offset, len) in [(0, 65), (64, 1), (usize::MAX, 2)] {
        let mut target = vec![0; len];
        for error in [memory.write(offset, &target).unwrap_err(), memory.read(offset, &mut target).unwrap_err()] {
            assert!(matches!(error, Error::OutOfBounds { region: 64, .. }), "{error}");
        }
    }
    memory.write(64, &[]).unwrap();
    fake.fail("memcpy_to_dm", libc::EFAULT);
    let error = memory.write(1, b"odd").unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::MemcpyToDm, errno: Errno(libc::EFAULT), .. }), "{error}");
    fake.fail("memcpy_from_dm", libc::EFAULT);
    let error = memory.read(1, &mut [0]).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::MemcpyFromDm, errno: Errno(libc::EFAULT), .. }), "{error}");
}

#[test]
fn work_and_peers_reach_device_memory_by_offset() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let mut memory = memory(pd.context());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = pd.register_dm(&memory, 16, 32, access).unwrap();
        assert_eq!((region.len(), region.remote().address, region.remote().len), (32, 0, 32));
        // Written by the peer.
        let mut outbox = pd.allocate(4).unwrap();
        outbox.fill_from(b"peer").unwrap();
        let at = region.remote().slice(28, 4).unwrap();
        post!(a, write(WorkRequest::new(1).signaled(), at, outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
        assert_eq!(bytes(&memory, 43, 6), b"\0peer\0");
        // Sent and received.
        memory.write(16, b"sent").unwrap();
        receive!(b, 2, region.sge(8, 4).unwrap()).unwrap();
        post!(a, send(WorkRequest::new(3).signaled(), region.sge(0, 4).unwrap());).unwrap();
        assert_eq!((seen(&mut a.cq)[0].status, seen(&mut b.cq)[0].status), (WcStatus::SUCCESS, WcStatus::SUCCESS));
        assert_eq!(bytes(&memory, 24, 4), b"sent");
        assert!(matches!(region.sge(29, 4), Err(Error::OutOfBounds { region: 32, .. })));
        // Beyond the end of the region.
        let beyond = RemoteMemory { address: 29, ..region.remote() };
        post!(a, write(WorkRequest::new(4).signaled(), beyond, outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::REM_ACCESS_ERR);
    });
}

#[test]
fn device_memory_is_freed_after_its_last_region() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let memory = memory(pd.context());
    let region = pd.register_dm(&memory, 0, 64, Access::REMOTE_READ).unwrap();
    drop(memory);
    assert_eq!((fake.live().dms, fake.live().mrs), (1, 1));
    drop(region);
    assert_eq!((fake.live().dms, fake.live().mrs), (0, 0));
}

#[test]
fn impossible_allocations_and_regions_of_device_memory_are_refused_with_the_reason() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    for (len, align) in [(0, 8), (8, 0), (8, 12)] {
        let error = context.alloc_dm(len, align).unwrap_err();
        assert!(matches!(error, Error::AllocateDeviceMemory { errno: Errno(libc::EINVAL), .. }), "{error}");
    }
    assert_eq!(fake.calls("alloc_dm"), 0);
    let error = context.alloc_dm(1 << 30, 1).unwrap_err();
    assert!(matches!(error, Error::AllocateDeviceMemory { len: 0x4000_0000, align: 1, max: 4096, .. }), "{error}");
    let memory = memory(&context);
    let (pd, other) = (context.alloc_pd().unwrap(), fake.pd());
    let error = other.register_dm(&memory, 0, 8, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "device memory" }), "{error}");
    assert!(matches!(pd.register_dm(&memory, 60, 5, Access::LOCAL_WRITE), Err(Error::OutOfBounds { .. })));
    assert!(matches!(pd.register_dm(&memory, 64, 0, Access::LOCAL_WRITE), Err(Error::EmptyRegion)));
    fake.fail("reg_dm_mr", libc::ENOMEM);
    let error = pd.register_dm(&memory, 0, 8, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, Error::RegisterMemory { len: 8, errno: Errno(libc::ENOMEM), .. }), "{error}");
}

#[test]
fn a_provider_without_copies_refuses_them() {
    let fake = Fake::new(Config { device_memory_copies: false, ..Config::default() });
    let mut memory = fake.open().alloc_dm(8, 1).unwrap();
    assert!(matches!(memory.write(0, &[1]), Err(Error::Unsupported { .. })));
    assert!(matches!(memory.read(0, &mut [1]), Err(Error::Unsupported { .. })));
}

#[test]
fn each_export_of_device_memory_has_its_own_descriptor() {
    let fake = Fake::new(Config::default());
    let memory = memory(&fake.open());
    let first = memory.export_dmabuf().unwrap();
    let second = memory.export_dmabuf().unwrap();
    use std::os::fd::AsRawFd;
    assert_ne!(first.as_raw_fd(), second.as_raw_fd());
    fake.fail("ibv_dm_export_dmabuf_fd", libc::EOPNOTSUPP);
    let error = memory.export_dmabuf().unwrap_err();
    assert!(error.to_string().contains("rdma-core 62"), "{error}");
    fake.fail("ibv_dm_export_dmabuf_fd", libc::EMFILE);
    let error = memory.export_dmabuf().unwrap_err();
    assert!(matches!(error, Error::Verb { errno: Errno(libc::EMFILE), .. }), "{error}");
}

#[test]
fn imported_device_memory_has_the_same_bytes_and_is_unimported_when_dropped() {
    let fake = Fake::new(Config::default());
    let mut memory = memory(&fake.open());
    // SAFETY: handles of a fake device are valid in all its contexts, and `memory` outlives the import.
    let imported = unsafe { fake.open().import_dm(memory.handle(), memory.len()) }.unwrap();
    memory.write(0, b"shared").unwrap();
    assert_eq!(bytes(&imported, 0, 6), b"shared");
    assert_eq!(imported.handle(), memory.handle());
    drop(imported);
    assert_eq!((fake.calls("ibv_unimport_dm"), fake.calls("free_dm"), fake.live().dms), (1, 0, 1));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_device_region_that_cannot_be_deregistered_keeps_its_memory() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let memory = memory(pd.context());
    let region = pd.register_dm(&memory, 0, 64, Access::REMOTE_READ).unwrap();
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    drop((region, memory, pd));
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 1, dms: 1, ..Live::default() });
    fake.may_leak();
}
