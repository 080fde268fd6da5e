//! Memory that the provider allocates.

use std::any::Any;
use std::ptr::NonNull;

use rdma_safe::dmah::ProcessingHint;
use rdma_safe::error::Verb;
use rdma_safe::mr::{Backing, ProviderMemory};
use rdma_safe::{Access, Errno, Error, ProtectionDomain, RawMemoryRegion, Sge, WcFields, WcStatus, WorkRequest};

use crate::fake::{Config, Fake, Live};
use crate::support::{
    EXTENDED, done, drop_in_order, endpoints, in_every_order, on_each_interface, post, raw_with, receive, seen, to_rts,
};

fn memory(pd: &ProtectionDomain) -> ProviderMemory {
    pd.alloc_buf(64).unwrap()
}

/// A domain whose memory the host of a confidential guest can access.
fn unprotected(fake: &Fake) -> ProtectionDomain {
    // SAFETY: the fake provider has no host that could change the memory.
    unsafe { fake.pd().unprotected_domain() }.unwrap()
}

/// Registers a part of `memory`.
///
/// # Safety
/// Same as for `RegistrationBuilder::register_part`.
unsafe fn part(memory: &ProviderMemory, offset: usize, len: usize) -> Result<RawMemoryRegion, Error> {
    // SAFETY: the caller's contract.
    unsafe { memory.pd().registration(Access::LOCAL_WRITE).register_part(memory, offset, len) }
}

#[test]
fn provider_memory_is_zeroed_and_used_by_messages_and_writes() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let mut outbox = pd.register(memory(&pd)).unwrap();
        assert_eq!((outbox.len(), &outbox[..]), (64, &[0; 64][..]));
        outbox.fill_from(b"a message").unwrap();
        let parts = pd.register(memory(&pd)).unwrap().into_chunks(16).unwrap();
        for inbox in parts {
            b.receive(inbox).unwrap();
            a.send(outbox).unwrap();
            outbox = done(&mut a).buffer.unwrap();
            assert_eq!(&done(&mut b).buffer.unwrap()[..], b"a message");
        }
        let mut region = pd.expose(memory(&pd), Access::REMOTE_WRITE).unwrap();
        region.write(0, b"<").unwrap();
        a.write(outbox, region.remote().slice(1, 9).unwrap()).unwrap();
        let _ = done(&mut a);
        let mut bytes = [7; 12];
        region.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"<a message\0\0");
        assert_eq!(fake.calls("ibv_reg_buf_mr"), 3);
        assert_eq!((fake.calls("ibv_reg_mr"), fake.calls("ibv_reg_mr_ex")), (0, 0));
    });
}

#[test]
fn a_part_is_registered_for_work_and_keeps_the_memory() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    let memory = memory(&pd);
    let at = memory.address().as_ptr();
    // SAFETY: the bytes are accessed by pointer only, and not while work is in flight.
    let (first, second) = unsafe { (part(&memory, 0, 16).unwrap(), part(&memory, 8, 56).unwrap()) };
    assert_eq!((second.address(), second.len()), (at.addr() as u64 + 8, 56));
    drop(memory);
    // SAFETY: as above.
    unsafe { at.copy_from(b"partly".as_ptr(), 6) };
    receive!(b, 1, Sge { address: second.address() + 50, len: 6, lkey: second.lkey() }).unwrap();
    post!(a, send(WorkRequest::new(2).signaled(), Sge { address: first.address(), len: 6, lkey: first.lkey() });)
        .unwrap();
    assert_eq!((seen(&mut a.cq)[0].status, seen(&mut b.cq)[0].status), (WcStatus::SUCCESS, WcStatus::SUCCESS));
    // SAFETY: as above.
    assert_eq!(unsafe { std::slice::from_raw_parts(at.add(58), 6) }, b"partly");
    // This range exceeds the registered part.
    post!(a, send(WorkRequest::new(3).signaled(), Sge { address: first.address() + 11, len: 6, lkey: first.lkey() });)
        .unwrap();
    assert_eq!(seen(&mut a.cq)[0].status, WcStatus::LOC_PROT_ERR);
    drop(first);
    assert_eq!((fake.live().mrs, fake.live().bufs), (1, 1));
    second.deregister().unwrap();
    assert_eq!((fake.live().mrs, fake.live().bufs), (0, 0));
}

#[test]
fn memory_its_regions_and_its_domain_are_dropped_in_any_order() {
    in_every_order(&[0, 1, 2, 3], &mut |order| {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let unused = memory(&pd);
        // SAFETY: there are no references to the memory, and no work uses the region.
        let region = unsafe { part(&unused, 0, 64) }.unwrap();
        let buffer = pd.register(memory(&pd)).unwrap();
        let objects: [Box<dyn Any>; 4] = [Box::new(pd), Box::new(unused), Box::new(region), Box::new(buffer)];
        drop_in_order(order, objects);
        assert_eq!((fake.calls("ibv_free_buf"), fake.live()), (2, Live::default()), "{order:?}");
    });
}

#[test]
fn memory_can_only_be_registered_in_its_own_domain() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (parent, other) = (pd.parent_domain().unwrap(), pd.context().alloc_pd().unwrap());
    for domain in [&parent, &other] {
        let error = domain.register(memory(&pd)).unwrap_err();
        assert!(matches!(error, Error::ForeignMemory), "{error}");
        // SAFETY: nothing is registered.
        let part = unsafe { domain.registration(Access::empty()).register_part(&memory(&pd), 0, 8) };
        assert!(matches!(part, Err(Error::ForeignMemory)));
    }
    assert_eq!((fake.calls("ibv_reg_buf_mr"), fake.live().bufs), (0, 0));
    // Memory of a parent domain also works with endpoints of the domain that the parent extends.
    let (mut a, mut b) = endpoints(&pd, EXTENDED);
    let mut outbox = parent.register(memory(&parent)).unwrap();
    outbox.fill_from(b"across").unwrap();
    b.receive(pd.register(memory(&pd)).unwrap()).unwrap();
    a.send(outbox).unwrap();
    assert_eq!(&done(&mut b).buffer.unwrap()[..], b"across");
    drop(parent);
}

#[test]
fn memory_that_cannot_be_allocated_or_registered_is_refused_with_the_reason() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    assert!(matches!(pd.alloc_buf(0), Err(Error::EmptyRegion)));
    assert!(matches!(pd.alloc_buf(usize::MAX), Err(Error::Allocate { len: usize::MAX })));
    assert_eq!(fake.calls("ibv_alloc_buf"), 0);
    assert!(matches!(pd.alloc_buf(1 << 31), Err(Error::Allocate { len: 0x8000_0000 })));
    fake.fail("ibv_alloc_buf", libc::EOPNOTSUPP);
    let error = pd.alloc_buf(8).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("rdma-core 64")), "{error}");
    fake.fail("ibv_alloc_buf", 0);
    assert!(matches!(pd.alloc_buf(8), Err(Error::Verb { verb: Verb::AllocBuf, errno: Errno(0), .. })));
    fake.heal("ibv_alloc_buf");

    let buf = memory(&pd);
    // SAFETY: nothing is registered.
    unsafe {
        for (offset, len) in [(0, 65), (64, 1), (usize::MAX, 2)] {
            let error = part(&buf, offset, len).unwrap_err();
            assert!(matches!(error, Error::OutOfBounds { region: 64, .. }), "{error}");
        }
        assert!(matches!(part(&buf, 64, 0), Err(Error::EmptyRegion)));
    }
    let error = pd.register_with(buf, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(error, Error::BufferAccess { .. }), "{error}");
    assert_eq!((fake.calls("ibv_reg_buf_mr"), fake.live().bufs), (0, 0), "a failed registration frees the memory");
    fake.fail("ibv_reg_buf_mr", libc::ENOMEM);
    let error = pd.register(memory(&pd)).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::RegBufMr, errno: Errno(libc::ENOMEM), .. }), "{error}");
    fake.fail("ibv_reg_buf_mr", libc::EOPNOTSUPP);
    assert!(matches!(pd.expose(memory(&pd), Access::REMOTE), Err(Error::Unsupported { .. })));
    assert_eq!(fake.live().bufs, 0);
}

#[test]
fn provider_memory_can_have_a_dma_handle_and_a_chosen_address() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let handle = pd.context().dma_handle().hint(ProcessingHint::REQUESTER).build().unwrap();
    let (mut a, _b) = endpoints(&pd, EXTENDED);
    let mut outbox = pd.registration(Access::empty()).dma_handle(&handle).register(memory(&pd)).unwrap();
    outbox.fill_from(b"hinted").unwrap();
    let region = pd.expose_at(memory(&pd), 0x5000, Access::REMOTE).unwrap();
    assert_eq!(region.remote().address, 0x5000);
    a.write(outbox, region.remote().slice(0, 6).unwrap()).unwrap();
    let _ = done(&mut a);
    let mut bytes = [0; 6];
    region.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hinted");
    assert_eq!((fake.calls("ibv_reg_mr_ex"), fake.calls("ibv_reg_buf_mr")), (2, 0));

    let fake = Fake::new(Config { confidential: true, ..Config::default() });
    let pd = unprotected(&fake);
    let handle = pd.context().dma_handle().hint(ProcessingHint::REQUESTER).build().unwrap();
    let hinted = pd.registration(Access::REMOTE).dma_handle(&handle);
    assert_eq!(hinted.expose(memory(&pd)).unwrap().len(), 64, "for a DMA-BUF, the library determines the address");
    let error = pd.expose_at(memory(&pd), 0x5000, Access::REMOTE).unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::RegMrEx, errno: Errno(libc::EINVAL), .. }), "{error}");
}

#[test]
fn dma_buf_memory_is_exported_as_a_new_descriptor() {
    use std::os::fd::AsRawFd;
    let fake = Fake::new(Config { confidential: true, ..Config::default() });
    let memory = memory(&unprotected(&fake));
    // SAFETY: nothing accesses the memory through the descriptors.
    unsafe {
        let (first, second) = (memory.export_dmabuf().unwrap(), memory.export_dmabuf().unwrap());
        assert_ne!(first.as_raw_fd(), second.as_raw_fd());
        fake.fail("ibv_export_buf_dmabuf_fd", libc::EMFILE);
        let error = memory.export_dmabuf().unwrap_err();
        assert!(matches!(error, Error::Verb { errno: Errno(libc::EMFILE), .. }), "{error}");
    }
    fake.heal("ibv_export_buf_dmabuf_fd");
    // Outside a confidential guest, unprotected memory is ordinary memory.
    let elsewhere = Fake::new(Config::default());
    for pd in [fake.pd(), unprotected(&elsewhere)] {
        // SAFETY: the export fails, so there is no descriptor.
        let error = unsafe { pd.alloc_buf(8).unwrap().export_dmabuf() }.unwrap_err();
        assert!(matches!(error, Error::Verb { errno: Errno(libc::ENODATA), .. }), "{error}");
        assert!(error.to_string().contains("ordinary memory"), "{error}");
    }
}

#[test]
fn peers_write_to_unprotected_memory_which_is_refused_where_unsupported() {
    let fake = Fake::new(Config { confidential: true, ..Config::default() });
    let pd = unprotected(&fake);
    assert!(pd.is_parent());
    let (mut a, _b) = endpoints(&pd, EXTENDED);
    let region = pd.expose(memory(&pd), Access::REMOTE).unwrap();
    let mut outbox = pd.allocate(8).unwrap();
    outbox.fill_from(b"straight").unwrap();
    a.write(outbox, region.remote().slice(56, 8).unwrap()).unwrap();
    let _ = done(&mut a);
    let mut bytes = [0; 8];
    region.read(56, &mut bytes).unwrap();
    assert_eq!(&bytes, b"straight");

    let fake = Fake::new(Config { domains: false, ..Config::default() });
    // SAFETY: the call fails, so there is no domain.
    let error = unsafe { fake.pd().unprotected_domain() }.unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "parent domains", .. }), "{error}");
}

/// A program's wrapper around provider memory.
struct Wrapper(ProviderMemory);

// SAFETY: each method forwards to the provider memory, which meets the contract.
unsafe impl Backing for Wrapper {
    fn address(&self) -> NonNull<u8> {
        self.0.address()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn provider_memory(&self) -> Option<&ProviderMemory> {
        self.0.provider_memory()
    }
}

#[test]
fn provider_memory_is_recognized_behind_a_wrapper() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let buffer = pd.register(Wrapper(memory(&pd))).unwrap();
    assert_eq!((fake.calls("ibv_reg_buf_mr"), &buffer[..]), (1, &[0; 64][..]));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn released_memory_or_memory_that_cannot_be_deregistered_is_never_freed() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let pd = fake.pd();
    // SAFETY: there are no references to the memory, and no work uses the region.
    let released = unsafe { part(&memory(&pd), 0, 8) }.unwrap().into_raw().unwrap();
    assert_eq!((fake.live().bufs, fake.calls("ibv_free_buf")), (1, 0));
    // SAFETY: `into_raw` has released the region, and this is its only deregistration.
    assert_eq!(unsafe { (rdma_safe::sys::verbs().unwrap().ibv_dereg_mr)(released.as_ptr()) }, 0);
    // SAFETY: as above.
    let region = unsafe { part(&memory(&pd), 0, 8) }.unwrap();
    let buffer = pd.register(memory(&pd)).unwrap();
    fake.fail("ibv_dereg_mr", libc::EBUSY);
    drop((region, buffer, pd));
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, mrs: 2, bufs: 3, ..Live::default() });
    assert_eq!((fake.calls("ibv_free_buf"), fake.calls("ibv_dealloc_pd")), (0, 0));
}
