//! Regions at chosen addresses, and on-demand paging.

use rdma_safe::dmah::{DmaHandle, ProcessingHint};
use rdma_safe::error::Verb;
use rdma_safe::mr::{Advice, Pages};
use rdma_safe::sys::*;
use rdma_safe::{Access, Errno, Error, Sge, WcFields, WcStatus, WorkRequest};

use crate::fake::{Advised, Config, Fake};
use crate::support::{EXTENDED, done, endpoints, init, post, raw_with, receive, rtr, rts, seen, to_rts};

/// On-demand paging, with a region for the whole address space.
fn paging() -> Config {
    Config { odp: (IBV_ODP_SUPPORT.0 | IBV_ODP_SUPPORT_IMPLICIT.0).into(), ..Config::default() }
}

#[test]
fn peers_reach_exposed_memory_by_the_address_that_it_was_given() {
    for iova in [0, 0x7000_0000_0000] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, EXTENDED);
        let mut region = pd.expose_at(Pages::new(64).unwrap(), iova, Access::REMOTE).unwrap();
        assert_eq!((region.remote().address, region.remote().len), (iova, 64));
        region.write(8, b"there").unwrap();
        let mut buffer = pd.allocate(5).unwrap();
        a.read(buffer, region.remote().slice(8, 5).unwrap()).unwrap();
        buffer = done(&mut a).ok().unwrap().buffer.unwrap();
        assert_eq!(&buffer[..], b"there");
        buffer.copy_from_slice(b"HERE!");
        a.write(buffer, region.remote().slice(59, 5).unwrap()).unwrap();
        assert_eq!(done(&mut a).status, WcStatus::SUCCESS);
        let mut bytes = [0; 6];
        region.read(58, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0HERE!", "offsets of this side are from the first byte");
    }
}

#[test]
fn work_names_raw_memory_by_the_address_that_it_was_given() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    for attributes in [init().set_access(Access::REMOTE), rtr(a.qp.number()), rts()] {
        b.qp.modify(&attributes).unwrap();
    }
    let mut pages = vec![0_u8; 3 * 4096];
    let memory = pages.as_mut_ptr();
    let iova = 0x1_0000_0000 + memory.addr() as u64 % 4096;
    // SAFETY: the memory outlives the regions, and is accessed only by pointer while they exist.
    let region =
        unsafe { pd.register_raw_at(memory, pages.len(), iova, Access::LOCAL_WRITE | Access::REMOTE) }.unwrap();
    assert_eq!((region.address(), region.len()), (iova, 3 * 4096));
    assert_eq!(region.remote().slice(4096, 1).unwrap().address, iova + 4096);
    // SAFETY: within the memory, to which there is no reference.
    unsafe { memory.add(100).copy_from(b"by address".as_ptr(), 10) };
    let sge = |offset, len| Sge { address: region.address() + offset, len, lkey: region.lkey() };
    receive!(b, 1, sge(5000, 10)).unwrap();
    post!(a, send(WorkRequest::new(2).signaled(), sge(100, 10));).unwrap();
    assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
    assert_eq!(seen(&mut b.cq)[0].status, WcStatus::SUCCESS);
    let target = region.remote().slice(9000, 10).unwrap();
    post!(a, write(WorkRequest::new(3).signaled(), target, sge(100, 10));).unwrap();
    assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
    // The real address of the bytes is not valid in work requests any more.
    let beside = Sge { address: memory.addr() as u64, ..sge(0, 10) };
    post!(a, send(WorkRequest::new(4).signaled(), beside);).unwrap();
    assert_eq!(seen(&mut a.cq)[0].status, WcStatus::LOC_PROT_ERR);
    drop((a, b, region));
    assert_eq!((&pages[5000..5010], &pages[9000..9010]), (&b"by address"[..], &b"by address"[..]));
}

#[test]
fn an_address_that_does_not_fit_the_memory_is_refused_with_the_reason() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for iova in [1, 4095, u64::MAX - 4095] {
        let error = pd.expose_at(Pages::new(4096).unwrap(), iova, Access::REMOTE).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::RegMrIova, errno: Errno(libc::EINVAL), .. }), "{error}");
        assert!(error.to_string().contains("offset within a page"), "{error}");
    }
    // SAFETY: the registration fails.
    let empty = unsafe { pd.register_raw_at([0_u8; 0].as_mut_ptr(), 0, 0, Access::empty()) };
    assert!(matches!(empty, Err(Error::EmptyRegion)));
}

#[test]
fn flags_that_only_raw_memory_may_have_are_refused_elsewhere() {
    let fake = Fake::new(paging());
    let pd = fake.pd();
    for access in [Access::ZERO_BASED, Access::HUGETLB | Access::ON_DEMAND] {
        let (buffer, region) =
            (pd.register_with(Pages::new(8).unwrap(), access), pd.expose(Pages::new(8).unwrap(), access));
        for error in [buffer.map(drop).unwrap_err(), region.map(drop).unwrap_err()] {
            assert!(matches!(error, Error::RegisterMemory { errno: Errno(libc::EINVAL), .. }), "{error}");
        }
        let mut memory = [0; 8];
        // SAFETY: the memory outlives the region, whose keys are not used.
        let region = unsafe { pd.register_raw(memory.as_mut_ptr(), 8, access) }.unwrap();
        drop(region);
    }
    assert_eq!(fake.calls("ibv_reg_mr"), 2);
}

#[test]
fn a_device_is_told_what_will_be_read_and_written() {
    let fake = Fake::new(paging());
    let pd = fake.pd();
    let mut memory = [7_u8; 64];
    // SAFETY: the memory outlives the region, whose keys no work uses.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr(), 64, Access::LOCAL_WRITE | Access::ON_DEMAND) }.unwrap();
    let range = |offset, len| Sge { address: region.address() + offset, len, lkey: region.lkey() };
    pd.advise(Advice::Prefetch, &[range(0, 8), range(32, 32)]).unwrap();
    pd.advise(Advice::PrefetchNoFault, &[range(8, 8)]).unwrap();
    pd.advise_and_wait(Advice::PrefetchWrite, &[range(0, 64)]).unwrap();
    pd.advise(Advice::Prefetch, &[]).unwrap();
    let at = region.address();
    assert_eq!(
        fake.take_advised(),
        [
            Advised { advice: 0, flags: 0, ranges: vec![(at, 8), (at + 32, 32)] },
            Advised { advice: 2, flags: 0, ranges: vec![(at + 8, 8)] },
            Advised { advice: 1, flags: 1, ranges: vec![(at, 64)] },
        ],
        "no ranges, no call"
    );
    let locked = pd.allocate(8).unwrap();
    for ranges in [[range(60, 8)], [locked.sge()]] {
        let error = pd.advise(Advice::Prefetch, &ranges).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::AdviseMr, errno: Errno(libc::EFAULT), .. }), "{error}");
        assert!(error.to_string().contains("Access::ON_DEMAND"), "{error}");
    }
    let paged = pd.register_with(Pages::new(100).unwrap(), Access::ON_DEMAND).unwrap();
    paged.prefetch().unwrap();
    assert_eq!(fake.take_advised(), [Advised { advice: 1, flags: 1, ranges: vec![(paged.address(), 100)] }]);
}

#[test]
fn one_region_for_all_memory_serves_bytes_wherever_they_are() {
    let fake = Fake::new(paging());
    let pd = fake.pd();
    // SAFETY: work uses only the bytes below.
    let all = unsafe { pd.register_implicit(Access::LOCAL_WRITE) }.unwrap();
    assert_eq!((all.address(), all.len()), (0, usize::MAX));
    let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let (mut a, mut b) = (make(), make());
    to_rts(&mut a.qp, b.qp.number());
    to_rts(&mut b.qp, a.qp.number());
    let (mut from, mut to) = (*b"anywhere", vec![0_u8; 8]);
    let sge = |bytes: &mut [u8]| Sge {
        address: bytes.as_mut_ptr().expose_provenance() as u64,
        len: bytes.len() as u32,
        lkey: all.lkey(),
    };
    receive!(b, 1, sge(&mut to)).unwrap();
    post!(a, send(WorkRequest::new(2).signaled(), sge(&mut from));).unwrap();
    assert_eq!(seen(&mut b.cq)[0].status, WcStatus::SUCCESS);
    assert_eq!(to, b"anywhere");
    assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
}

#[test]
fn paging_on_demand_is_not_asked_of_a_device_without() {
    let without = Fake::new(Config::default());
    let explicit_only = Fake::new(Config { odp: IBV_ODP_SUPPORT.0.into(), ..Config::default() });
    let refused = |fake: &Fake, result: Result<(), Error>, what: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(what), "{error}");
        assert_eq!((fake.calls("ibv_reg_mr"), fake.calls("advise_mr")), (0, 0));
    };
    let pd = without.pd();
    let registered = pd.register_with(Pages::new(8).unwrap(), Access::ON_DEMAND).map(drop);
    refused(&without, registered, "Access::ON_DEMAND");
    refused(&without, pd.advise(Advice::Prefetch, &[Sge::EMPTY]), "ibv_advise_mr");
    for fake in [&without, &explicit_only] {
        // SAFETY: the registration fails.
        let all = unsafe { fake.pd().register_implicit(Access::LOCAL_WRITE) };
        refused(fake, all.map(drop), "OdpCapabilities::IMPLICIT");
    }
}

#[test]
fn what_an_older_library_lacks_is_refused_with_the_release_that_brought_it() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let refused = |error: Error, release: &str| {
        assert!(matches!(&error, Error::Unsupported { feature, .. } if feature.contains(release)), "{error}");
        assert!(error.to_string().contains(fake.name()), "{error}");
    };
    refused(pd.alloc_buf(8).unwrap_err(), "rdma-core 64");
    // SAFETY: no domain is created.
    refused(unsafe { pd.unprotected_domain() }.unwrap_err(), "rdma-core 64");
    assert_eq!(fake.calls("alloc_parent_domain"), 0);
    refused(pd.context().dma_handle().hint(ProcessingHint::TARGET).build().unwrap_err(), "rdma-core 59");
    let mut handle = ibv_dmah { context: pd.context().as_raw() };
    // SAFETY: the call fails, so the handle is never deallocated.
    let adopted = unsafe { DmaHandle::from_raw(pd.context(), std::ptr::NonNull::from(&mut handle)) };
    refused(adopted.unwrap_err(), "rdma-core 59");
}
