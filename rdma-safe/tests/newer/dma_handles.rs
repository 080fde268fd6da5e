//! DMA handles, and memory that is registered with them.

use std::any::Any;

use rdma_safe::dmah::{DmaHandle, ProcessingHint, TphMemoryType};
use rdma_safe::error::Verb;
use rdma_safe::mr::{Pages, Reregistration};
use rdma_safe::sys::*;
use rdma_safe::{Access, Context, Errno, Error, Sge, WcFields, WcStatus, WorkRequest};

use crate::fake::{Config, Fake, Live};
use crate::support::{
    EXTENDED, done, drop_in_order, endpoints, in_every_order, on_each_interface, post, raw_with, receive, seen, to_rts,
};

fn handle(context: &Context) -> DmaHandle {
    context.dma_handle().hint(ProcessingHint::TARGET).build().unwrap()
}

/// A CPU that this thread may run on.
fn cpu(context: &Context) -> u32 {
    let with = |cpu| context.dma_handle().hint(ProcessingHint::TARGET).cpu(cpu).memory_type(TphMemoryType::VOLATILE);
    (0..1024).find(|cpu| with(*cpu).build().is_ok()).expect("a CPU")
}

#[test]
fn a_handle_passes_only_the_attributes_that_were_set() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let hint = handle(&context);
    assert!(hint.context().is_same(&context));
    let here = cpu(&context);
    let _ = fake.take_dmah_attrs();
    let all = context.dma_handle().hint(ProcessingHint::TARGET_WITH_PRIORITY).memory_type(TphMemoryType::PERSISTENT);
    let (_all, _hint) = (all.cpu(here).build().unwrap(), handle(&context));
    let attributes: Vec<_> =
        fake.take_dmah_attrs().iter().map(|a| (a.comp_mask, a.cpu_id, a.ph, a.tph_mem_type)).collect();
    assert_eq!(attributes, [(0b111, here, 3, 1), (0b010, 0, 2, 0)]);
}

#[test]
fn invalid_attributes_of_a_handle_are_refused_before_the_call() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let builder = || context.dma_handle().memory_type(TphMemoryType::VOLATILE);
    let error = builder().hint(ProcessingHint(4)).build().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::AllocDmah, errno: Errno(libc::EINVAL), .. }), "{error}");
    assert!(error.to_string().contains("two bits"), "{error}");
    for cpu in [65_535, u32::MAX] {
        let error = builder().hint(ProcessingHint::TARGET).cpu(cpu).build().unwrap_err();
        assert!(matches!(error, Error::Verb { errno: Errno(libc::EPERM), .. }), "{error}");
        assert!(error.to_string().contains("taskset"), "{error}");
    }
    assert_eq!(fake.calls("ibv_alloc_dmah"), 0);
    // The device refuses incomplete attributes itself.
    for builder in [context.dma_handle(), builder().hint(ProcessingHint::TARGET)] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Verb { errno: Errno(libc::EINVAL), .. }), "{error}");
    }
    fake.fail("ibv_alloc_dmah", libc::EOPNOTSUPP);
    let error = context.dma_handle().build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("rdma-core 59")), "{error}");
}

#[test]
fn messages_and_writes_use_memory_with_a_handle() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let handle = handle(pd.context());
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let pages = || Pages::new(64).unwrap();
        let hinted = pd.registration(Access::empty()).dma_handle(&handle);
        let mut outbox = hinted.register(pages()).unwrap();
        b.receive(hinted.register(pages()).unwrap()).unwrap();
        outbox.fill_from(b"to the cache").unwrap();
        a.send(outbox).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"to the cache");
        outbox = done(&mut a).buffer.unwrap();

        let hinted = pd.registration(Access::REMOTE).dma_handle(&handle);
        let regions = [hinted.expose(pages()).unwrap(), hinted.expose_at(pages(), 0x7000_0000).unwrap()];
        assert_eq!(regions[1].remote().address, 0x7000_0000);
        for region in &regions {
            a.write(outbox, region.remote().slice(3, 12).unwrap()).unwrap();
            outbox = done(&mut a).buffer.unwrap();
            let mut bytes = [0; 16];
            region.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"\0\0\0to the cache\0");
        }
        assert_eq!(fake.calls("ibv_reg_mr_ex"), 4);
    });
}

#[test]
fn work_requests_use_raw_memory_with_a_handle() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let handle = handle(pd.context());
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    let mut bytes = vec![0_u8; 2 * 4096];
    let (memory, iova) = (bytes.as_mut_ptr(), 0x1_0000_0000 + bytes.as_ptr().addr() as u64 % 4096);
    let hinted = pd.registration(Access::LOCAL_WRITE).dma_handle(&handle);
    // SAFETY: the memory outlives the regions, and is accessed by pointer only while they exist.
    let (plain, moved) = unsafe {
        memory.copy_from(b"by address".as_ptr(), 10);
        (hinted.register_raw(memory, 4096).unwrap(), hinted.register_raw_at(memory, 2 * 4096, iova).unwrap())
    };
    assert_eq!((plain.address(), moved.address()), (memory.addr() as u64, iova));
    receive!(b, 1, Sge { address: iova + 5000, len: 10, lkey: moved.lkey() }).unwrap();
    post!(a, send(WorkRequest::new(2).signaled(), Sge { address: plain.address(), len: 10, lkey: plain.lkey() });)
        .unwrap();
    assert_eq!((seen(&mut a.cq)[0].status, seen(&mut b.cq)[0].status), (WcStatus::SUCCESS, WcStatus::SUCCESS));
    drop((a, b, plain, moved));
    assert_eq!(&bytes[5000..5010], b"by address");
    let (file, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the provider does not access the memory.
    let region = unsafe { hinted.register_dmabuf(&file, 8192, 4096, 0x10000) }.unwrap();
    assert_eq!((fake.take_dmabufs(), region.address()), (vec![(8192, 4096, 0x10000)], 0x10000));
    assert_eq!(fake.calls("ibv_reg_mr_ex"), 3);
}

#[test]
fn without_a_handle_the_classic_calls_are_used() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let pages = || Pages::new(64).unwrap();
    let plain = pd.registration(Access::REMOTE_READ);
    let _regions = (pd.allocate(8).unwrap(), plain.expose(pages()).unwrap(), plain.expose_at(pages(), 0).unwrap());
    let (file, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the provider does not access the memory.
    let _dmabuf = unsafe { plain.register_dmabuf(&file, 0, 64, 0) }.unwrap();
    let calls = ["ibv_reg_mr_ex", "ibv_reg_mr", "ibv_reg_dmabuf_mr"].map(|verb| fake.calls(verb));
    assert_eq!(calls, [0, 3, 1]);
}

#[test]
fn a_handle_its_regions_and_its_domain_are_dropped_in_any_order() {
    in_every_order(&[0, 1, 2, 3], &mut |order| {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let handle = handle(pd.context());
        let hinted = pd.registration(Access::empty()).dma_handle(&handle);
        let buffer = hinted.register(Pages::new(64).unwrap()).unwrap();
        let region = hinted.expose(Pages::new(64).unwrap()).unwrap();
        let objects: [Box<dyn Any>; 4] = [Box::new(pd), Box::new(handle), Box::new(buffer), Box::new(region)];
        drop_in_order(order, objects);
        assert_eq!((fake.calls("ibv_dealloc_dmah"), fake.live()), (1, Live::default()), "{order:?}");
    });
}

#[test]
fn memory_that_cannot_be_registered_with_a_handle_is_refused_with_the_reason() {
    let fake = Fake::new(Config { odp: IBV_ODP_SUPPORT.0.into(), ..Config::default() });
    let pd = fake.pd();
    let handle = handle(pd.context());
    let pages = || Pages::new(64).unwrap();
    let hinted = |access| pd.registration(access).dma_handle(&handle);
    let error = hinted(Access::REMOTE_READ).register(pages()).unwrap_err();
    assert!(matches!(error, Error::BufferAccess { access: Access::REMOTE_READ }), "{error}");
    // SAFETY: nothing is registered.
    let empty = unsafe { hinted(Access::empty()).register_raw([0_u8; 0].as_mut_ptr(), 0) };
    assert!(matches!(empty, Err(Error::EmptyRegion)));
    let error = hinted(Access::REMOTE).expose_at(pages(), u64::MAX).unwrap_err();
    assert!(matches!(error, Error::Verb { errno: Errno(libc::EINVAL), .. }), "{error}");
    let other = fake.open().alloc_pd().unwrap();
    let error = other.registration(Access::empty()).dma_handle(&handle).register(pages()).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "DMA handle" }), "{error}");
    assert_eq!(fake.calls("ibv_reg_mr_ex"), 0);

    let error = hinted(Access::REMOTE).expose_at(pages(), 1).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::RegMrEx, errno: Errno(libc::EINVAL), .. }), "{error}");
    assert!(error.to_string().contains("offset within a page"), "{error}");
    let error = hinted(Access::ON_DEMAND).register(pages()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("DMA handle")), "{error}");
    fake.fail("ibv_reg_mr_ex", libc::ENOMEM);
    let error = hinted(Access::empty()).register(pages()).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::RegMrEx, errno: Errno(libc::ENOMEM), .. }), "{error}");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    assert_eq!(fake.live().mrs, 0);
}

#[test]
fn a_reregistered_region_keeps_its_handle() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let handle = handle(pd.context());
    let mut memory = [0_u8; 128];
    let at = memory.as_mut_ptr();
    // SAFETY: the memory outlives the region, and no work uses it.
    let region = unsafe { pd.registration(Access::LOCAL_WRITE).dma_handle(&handle).register_raw(at, 64) }.unwrap();
    drop(handle);
    let other = pd.context().alloc_pd().unwrap();
    // SAFETY: as above.
    let region = unsafe { region.reregister(Reregistration::new().memory(at.add(64), 64).pd(&other)) }.unwrap();
    assert_eq!(fake.live().dmahs, 1);
    region.deregister().unwrap();
    assert_eq!(fake.live().dmahs, 0);
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_released_region_or_one_that_cannot_be_deregistered_leaks_its_handle() {
    for give_up in [true, false] {
        let fake = Fake::new(Config::default());
        fake.may_leak();
        let pd = fake.pd();
        let handle = handle(pd.context());
        let mut memory = [0_u8; 64];
        let hinted = pd.registration(Access::LOCAL_WRITE).dma_handle(&handle);
        // SAFETY: no work uses the region, and the provider never accesses it.
        let region = unsafe { hinted.register_raw(memory.as_mut_ptr(), 64) }.unwrap();
        if give_up {
            let raw = region.into_raw().unwrap();
            drop(handle);
            // SAFETY: `into_raw` has released the region, and this is its only deregistration.
            assert_eq!(unsafe { (verbs().unwrap().ibv_dereg_mr)(raw.as_ptr()) }, 0);
            assert_eq!(fake.live(), Live { contexts: 1, pds: 1, dmahs: 1, ..Live::default() });
        } else {
            fake.fail("ibv_dereg_mr", libc::EBUSY);
            drop((region, handle, pd));
            assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 1, dmahs: 1, ..Live::default() });
        }
        assert_eq!(fake.calls("ibv_dealloc_dmah"), 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_handle_that_cannot_be_deallocated_keeps_its_device() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let handle = handle(&fake.open());
    fake.fail("ibv_dealloc_dmah", libc::EBUSY);
    let error = handle.deallocate().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DeallocDmah, errno: Errno(libc::EBUSY), .. }), "{error}");
    assert_eq!(fake.live(), Live { contexts: 1, dmahs: 1, ..Live::default() });
    assert_eq!(fake.calls("ibv_close_device"), 0);
}

#[test]
fn a_handle_adopted_from_raw_is_deallocated_once() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    // SAFETY: the arguments are those of the manual page.
    let handle = unsafe {
        let mut attr = ibv_dmah_init_attr { comp_mask: IBV_DMAH_INIT_ATTR_MASK_PH.0, ..ibv_dmah_init_attr::zeroed() };
        let raw = verbs().unwrap().ibv_alloc_dmah.unwrap()(pd.context().as_raw(), &mut attr);
        DmaHandle::from_raw(pd.context(), std::ptr::NonNull::new(raw).unwrap()).unwrap()
    };
    let buffer = pd.registration(Access::empty()).dma_handle(&handle).register(Pages::new(8).unwrap()).unwrap();
    let error = handle.deallocate().unwrap_err();
    assert!(matches!(error, Error::InUse { object: "DMA handle", .. }), "{error}");
    assert_eq!(fake.live().dmahs, 1);
    drop(buffer);
    assert_eq!((fake.live().dmahs, fake.calls("ibv_dealloc_dmah")), (0, 1));
    self::handle(pd.context()).deallocate().unwrap();
    assert_eq!((fake.live().dmahs, fake.calls("ibv_dealloc_dmah")), (0, 2));
}
