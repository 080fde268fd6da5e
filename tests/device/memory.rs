//! Registered memory: kinds of memory, access rights, bounds, and parts of buffers.

use std::sync::Arc;

use rdma_safe::device::OdpCapabilities;
use rdma_safe::error::{HugePagesError, Verb};
use rdma_safe::mr::{Backing, HugePages, Pages};
use rdma_safe::{
    Access, Buffer, Endpoint, Errno, Error, ExposedRegion, ProtectionDomain, RemoteMemory, WcStatus, Work,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Data, Lab, Memory, Mode, Op, Wr};
use crate::support::link::connected;
use crate::support::{DEADLINE, Rdma, device, device_unless_soft, error_of, pattern};

/// Sends `buffer` from one end to the other. Returns the buffer and the bytes that arrived.
fn through_the_device(ends: &mut (Endpoint, Endpoint), buffer: Buffer) -> (Buffer, Vec<u8>) {
    let (sender, receiver) = ends;
    sender.send(buffer).unwrap();
    let received = receiver.wait(DEADLINE).unwrap().ok().unwrap();
    let sent = sender.wait(DEADLINE).unwrap().ok().unwrap();
    (sent.buffer.unwrap(), received.buffer.unwrap().to_vec())
}

#[test]
fn bytes_of_every_kind_of_local_memory_reach_the_peer() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut ends = connected(rdma.endpoint(&pd));
    let odd = pattern(2, 777).into_boxed_slice();
    let kinds: [(&str, Buffer); 4] = [
        ("allocated", pd.allocate(10_000).unwrap()),
        ("pages", pd.register(Pages::new(4097).unwrap()).unwrap()),
        ("boxed", pd.register(odd.clone()).unwrap()),
        ("relaxed ordering", pd.register_with(Pages::new(100).unwrap(), Access::RELAXED_ORDERING).unwrap()),
    ];
    for (seed, (kind, mut buffer)) in (1..).zip(kinds) {
        if kind == "boxed" {
            assert_eq!(*buffer, *odd, "a box keeps its bytes");
        } else {
            assert!(buffer.iter().all(|byte| *byte == 0), "{kind} memory is zeroed");
        }
        let sent = pattern(seed, buffer.capacity());
        buffer.fill_from(&sent).unwrap();
        ends.1.receive(pd.allocate(sent.len()).unwrap()).unwrap();
        let (back, received) = through_the_device(&mut ends, buffer);
        assert!(received == sent, "{kind}: {} bytes arrived changed", sent.len());
        assert!(*back == *sent, "{kind}: the sender's bytes are unchanged");
    }
}

#[test]
fn empty_memory_cannot_be_registered() {
    let Some(rdma) = device() else { return };
    struct Nothing;
    // SAFETY: the memory has no bytes.
    unsafe impl Backing for Nothing {
        fn address(&self) -> std::ptr::NonNull<u8> {
            std::ptr::NonNull::dangling()
        }
        fn len(&self) -> usize {
            0
        }
    }
    let pd = rdma.pd();
    let mut byte = 0;
    // SAFETY: the region would have no bytes.
    let raw = unsafe { pd.register_raw(&raw mut byte, 0, Access::empty()) };
    for error in [
        error_of(pd.allocate(0)),
        error_of(pd.register(Nothing)),
        error_of(pd.register(Box::<[u8]>::default())),
        error_of(pd.expose(Nothing, Access::REMOTE_READ)),
        error_of(raw),
        error_of(Pages::new(0)),
        error_of(HugePages::new(0)),
    ] {
        assert!(matches!(error, Error::EmptyRegion), "{error:?}");
    }
}

#[test]
fn a_local_buffer_cannot_be_given_a_remote_right() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for right in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::MW_BIND] {
        let error = error_of(pd.register_with(Pages::new(64).unwrap(), right));
        let Error::BufferAccess { access } = error else { panic!("{error:?}") };
        assert_eq!(access, right);
    }
    // An unknown flag could allow peers to write to memory that a slice borrows.
    let unknown = Access::from_bits_retain(1 << 19);
    let error = error_of(pd.register_with(Pages::new(64).unwrap(), unknown));
    assert!(matches!(error, Error::RegisterMemory { errno: Errno(libc::EINVAL), .. }), "{error:?}");
}

#[test]
fn remote_write_without_local_write_is_refused_with_the_reason() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for right in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let mut bytes = vec![0_u8; 64];
        // SAFETY: the region is not created.
        let error = error_of(unsafe { pd.register_raw(bytes.as_mut_ptr(), bytes.len(), right) });
        let text = error.to_string();
        assert!(matches!(error, Error::RegisterMemory { len: 64, errno: Errno(libc::EINVAL), .. }), "{error:?}");
        assert!(text.contains("need local write access"), "{text}");
    }
}

#[test]
fn on_demand_paging_works_or_is_refused_before_the_call() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let has = rdma.attributes().on_demand_paging().is_some();
    assert!(!(has && rdma.is_rxe() && !rdma.is_newer_rxe()), "SoftRoCE of this kernel pages nothing on demand");
    match pd.register_with(Pages::new(4096).unwrap(), Access::ON_DEMAND) {
        Ok(buffer) => assert!(has && buffer.capacity() == 4096),
        Err(Error::Unsupported { feature, .. }) => assert!(!has && feature.contains("ON_DEMAND"), "{feature}"),
        Err(error) => panic!("{error:?}"),
    }
    let implicit =
        rdma.attributes().on_demand_paging().is_some_and(|paging| paging.general.contains(OdpCapabilities::IMPLICIT));
    // SAFETY: no work request uses its keys.
    match unsafe { pd.register_implicit(Access::LOCAL_WRITE) } {
        Ok(region) => assert!(implicit && region.len() == usize::MAX),
        Err(Error::Unsupported { feature, .. }) => assert!(!implicit && feature.contains("IMPLICIT"), "{feature}"),
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn memory_is_reached_by_the_address_it_was_registered_with() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, _b) = connected(rdma.endpoint(&pd).peer_access(Access::REMOTE));
    for iova in [0, 0x5000_0000_0000] {
        let mut region = pd.expose_at(Pages::new(3 * 4096).unwrap(), iova, Access::REMOTE).unwrap();
        assert_eq!(region.remote().address, iova);
        region.write(4090, b"across pages").unwrap();
        let buffer = pd.allocate(12).unwrap();
        a.post(Work::read(buffer, region.remote().slice(4090, 12).unwrap())).unwrap();
        let mut buffer = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
        assert_eq!(&buffer[..], b"across pages");
        buffer.reverse();
        a.post(Work::write(buffer, region.remote().slice(8190, 12).unwrap())).unwrap();
        assert_eq!(a.wait(DEADLINE).unwrap().status, WcStatus::SUCCESS);
        let mut bytes = [0; 12];
        region.read(8190, &mut bytes).unwrap();
        assert_eq!(&bytes, b"segap ssorca");
    }
    let error = error_of(pd.expose_at(Pages::new(4096).unwrap(), 0x1001, Access::REMOTE));
    assert!(matches!(error, Error::Verb { verb: Verb::RegMrIova, errno: Errno(libc::EINVAL), .. }), "{error:?}");
    assert!(error.explain().is_some_and(|cause| cause.contains("offset within a page")), "{error}");
}

#[test]
fn prefetching_works_or_is_refused_by_name() {
    let Some(rdma) = device() else { return };
    let buffer = rdma.pd().allocate(4096).unwrap();
    match buffer.prefetch() {
        Ok(()) => assert!(!rdma.is_rxe(), "SoftRoCE of this kernel pages nothing on demand"),
        Err(Error::Unsupported { device, feature }) => {
            assert_eq!(device, rdma.device_name());
            assert!(feature.contains("ibv_advise_mr"), "{feature}");
        }
        // The buffer was registered without on-demand paging.
        Err(Error::Verb { verb, .. }) => assert_eq!(verb, Verb::AdviseMr),
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
#[cfg_attr(miri, ignore = "it reads files")]
fn huge_pages_are_registered_where_there_are_any_and_refused_elsewhere() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let huge = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = huge.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).map_or("0", str::trim);
    match HugePages::new(1 << 20) {
        Ok(pages) => {
            assert_eq!(pages.len(), 2 << 20, "rounded up to whole pages");
            let buffer = pd.register(pages).unwrap();
            assert_eq!(buffer.capacity(), 2 << 20);
            let mut ends = connected(rdma.endpoint(&pd));
            let (mut buffer, rest) = buffer.into_split(1 << 20).unwrap();
            buffer.fill_from(&pattern(9, 1 << 20)).unwrap();
            ends.1.receive(rest).unwrap();
            let (_, received) = through_the_device(&mut ends, buffer);
            assert!(received == pattern(9, 1 << 20));
        }
        Err(error @ Error::MapHugePages(HugePagesError { len: 0x10_0000, pages: 1, .. })) => {
            assert_eq!((free, error.errno()), ("0", Some(Errno(libc::ENOMEM))), "{error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
#[cfg_attr(miri, ignore = "it maps huge pages")]
fn memory_near_the_device_in_any_kind_of_pages_is_registered() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let node = rdma.numa_node();
    if rdma.is_soft() || rdma.is_rxe() {
        assert_eq!(node, None, "a software device belongs to no node");
    }
    let mut pages = HugePages::or_ordinary(3 << 20).unwrap();
    println!("{:?} pages: {:?} {:?}, node {node:?}", pages.kind(), pages.explicit_error(), pages.transparent_error());
    if let Some(node) = node {
        pages = pages.on_node(node).unwrap();
    }
    let (mut buffer, rest) = pd.register(pages).unwrap().into_split(1 << 20).unwrap();
    let mut ends = connected(rdma.endpoint(&pd));
    buffer.fill_from(&pattern(10, 1 << 20)).unwrap();
    ends.1.receive(rest).unwrap();
    let (_, received) = through_the_device(&mut ends, buffer);
    assert!(received == pattern(10, 1 << 20));
}

#[test]
fn parts_of_one_registration_are_in_flight_independently() {
    const PARTS: usize = 16;
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    let outbox = pd.allocate(PARTS * 1000 + 999).unwrap();
    let lkey = outbox.lkey();
    let parts = outbox.into_chunks(1000).unwrap();
    assert_eq!(parts.len(), PARTS, "the remaining 999 bytes are unused");
    for buffer in pd.allocate(PARTS * 1000).unwrap().into_chunks(1000).unwrap() {
        b.receive(buffer).unwrap();
    }
    // The test holds references to the odd parts, and writes through them, while the even parts are in flight.
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for (seed, mut part) in (0..).zip(parts) {
        assert_eq!(part.lkey(), lkey);
        part.copy_from_slice(&pattern(seed, 1000));
        if seed % 2 == 0 { even.push(part) } else { odd.push(part) }
    }
    let held: Vec<&mut [u8]> = odd.iter_mut().map(|part| &mut part[..]).collect();
    for part in even {
        a.send(part).unwrap();
    }
    for part in held {
        part.reverse();
    }
    for part in odd {
        a.send(part).unwrap();
    }
    let order = (0..PARTS as u64).filter(|seed| seed % 2 == 0).chain((0..PARTS as u64).filter(|seed| seed % 2 == 1));
    for seed in order {
        let mut expected = pattern(seed, 1000);
        if seed % 2 == 1 {
            expected.reverse();
        }
        let received = b.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(received.byte_len, 1000);
        assert!(*received.buffer.unwrap() == *expected, "part {seed}");
        let sent = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
        assert!(*sent == *expected, "part {seed} after its send");
    }
}

#[test]
fn a_region_stays_registered_until_its_last_part_is_dropped() {
    let Some(rdma) = device() else { return };
    in_own_process("memory::a_region_stays_registered_until_its_last_part_is_dropped", || {
        let pd = rdma.pd();
        let buffer = pd.allocate(4096).unwrap();
        expect_kernel_objects("mr", 1);
        let (first, second) = buffer.into_split(1).unwrap();
        let parts = second.into_chunks(1000).unwrap();
        drop(first);
        expect_kernel_objects("mr", 1);
        let last = parts.into_iter().next_back();
        expect_kernel_objects("mr", 1);
        drop(last);
        expect_kernel_objects("mr", 0);
    });
}

/// The status of a peer's `operation` on exposed memory.
fn attempt(rdma: &Rdma, pd: &ProtectionDomain, remote: RemoteMemory, operation: &str) -> WcStatus {
    let builder = rdma.endpoint(pd).peer_access(Access::REMOTE);
    let (mut a, _b) = connected(builder);
    let mut buffer = pd.allocate(8).unwrap();
    buffer.fill_from(&[0xee; 8]).unwrap();
    let work = match operation {
        "read" => Work::read(buffer, remote),
        "write" => Work::write(buffer, remote),
        "atomic" => Work::fetch_add(buffer, remote, 1),
        other => panic!("{other}"),
    };
    a.post(work).unwrap();
    a.wait(DEADLINE).unwrap().status
}

#[test]
fn an_exposed_region_allows_exactly_its_access_rights() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    for (access, allowed) in [
        (Access::empty(), &[][..]),
        (Access::REMOTE_READ, &["read"]),
        (Access::REMOTE_WRITE, &["write"]),
        (Access::REMOTE_ATOMIC, &["atomic"]),
        (Access::REMOTE, &["read", "write", "atomic"]),
    ] {
        for operation in ["read", "write", "atomic"] {
            let mut region = pd.expose(Pages::new(64).unwrap(), access).unwrap();
            region.store_u64(0, 7).unwrap();
            let status = attempt(&rdma, &pd, region.remote(), operation);
            let permitted = allowed.contains(&operation);
            let expected = if permitted { WcStatus::SUCCESS } else { WcStatus::REM_ACCESS_ERR };
            assert_eq!(status, expected, "{operation} of a region with {access:?}");
            let value = match (permitted, operation) {
                (true, "write") => u64::from_ne_bytes([0xee; 8]),
                (true, "atomic") => 8,
                _ => 7,
            };
            assert_eq!(region.load_u64(0).unwrap(), value, "after {operation} of a region with {access:?}");
        }
    }
}

#[test]
fn a_peer_can_only_read_memory_that_is_exposed_for_reading() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut frozen = pd.allocate(64).unwrap();
    frozen.fill_from(&[7; 64]).unwrap();
    let regions = [
        pd.expose_read_only(Arc::<[u8]>::from([7; 64])).unwrap(),
        pd.expose_read_only(frozen.freeze().slice(8..32).unwrap()).unwrap(),
    ];
    for region in &regions {
        for operation in ["read", "write", "atomic"] {
            let expected = if operation == "read" { WcStatus::SUCCESS } else { WcStatus::REM_ACCESS_ERR };
            assert_eq!(attempt(&rdma, &pd, region.remote(), operation), expected, "{operation}");
            assert!(region.iter().all(|byte| *byte == 7), "after {operation}");
        }
    }
}

#[test]
fn the_key_of_a_deregistered_region_is_refused() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let gone = Memory::new(&lab.pd, 4096);
    let remote = gone.remote(0);
    let key = gone.raw().rkey();
    assert_ne!(key, 0);
    drop(gone);
    let data = Data::One(lab.a.memory.sge(0..8));
    lab.a.post(&[Wr::new(1, Op::Write(remote), data)]).unwrap();
    assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR);
}

#[test]
fn registering_more_than_the_memlock_limit_says_what_to_raise() {
    let Some(rdma) = device_unless_soft("pins no memory") else { return };
    in_own_process("memory::registering_more_than_the_memlock_limit_says_what_to_raise", || {
        const LIMIT: usize = 1 << 20;
        let pd = rdma.pd();
        let before = pd.allocate(4 * LIMIT).expect("there is no limit yet");
        drop(before);
        limit_locked_memory(LIMIT as u64);
        let error = error_of(pd.allocate(4 * LIMIT));
        let text = error.to_string();
        let Error::RegisterMemory { len, errno: Errno(libc::ENOMEM), .. } = error else { panic!("{error:?}") };
        assert_eq!(len, 4 * LIMIT);
        assert!(text.contains("ulimit -l") && text.contains("LimitMEMLOCK"), "{text}");
        let error = error_of(pd.register(vec![0; 4 * LIMIT].into_boxed_slice()));
        assert!(matches!(error, Error::RegisterMemory { errno: Errno(libc::ENOMEM), .. }), "{error:?}");
        pd.allocate(LIMIT / 4).expect("less than the limit can be registered");
    });
}

/// Lowers RLIMIT_MEMLOCK, and gives up the capability of the calling thread to exceed it.
fn limit_locked_memory(bytes: u64) {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Sets {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 1 << 14;
    let mut header = Header { version: VERSION_3, pid: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: capget(2) fills two sets for this version; both structures have the layout of the kernel's.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) }, 0);
    sets[0].effective &= !IPC_LOCK;
    sets[0].permitted &= !IPC_LOCK;
    // SAFETY: capset(2) reads the same; it only takes a capability away.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) }, 0);
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a valid structure for the duration of the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
}

#[test]
fn exposed_memory_is_accessible_within_its_bounds_only() {
    let Some(rdma) = device() else { return };
    let mut region = rdma.pd().expose(Pages::new(20).unwrap(), Access::REMOTE).unwrap();
    assert_eq!((region.len(), region.is_empty()), (20, false));
    region.write(17, b"end").unwrap();
    let mut bytes = [1; 5];
    region.read(15, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0end");
    region.read(20, &mut []).unwrap();
    for (offset, len) in [(16, 5), (21, 0), (usize::MAX, 2), (usize::MAX, 5)] {
        let mut bytes = vec![7; len];
        for error in [error_of(region.read(offset, &mut bytes)), error_of(region.write(offset, &bytes))] {
            let Error::OutOfBounds { offset: o, len: l, region: 20 } = error else { panic!("{error:?}") };
            assert_eq!((o, l), (offset, len));
        }
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
    region.read(17, &mut bytes[..3]).unwrap();
    assert_eq!(&bytes[..3], b"end", "a refused access changes nothing");
}

#[test]
fn words_of_exposed_memory_must_be_aligned_and_within_bounds() {
    let Some(rdma) = device() else { return };
    let mut region = rdma.pd().expose(Pages::new(20).unwrap(), Access::REMOTE).unwrap();
    region.store_u64(8, u64::MAX - 1).unwrap();
    assert_eq!(region.load_u64(8).unwrap(), u64::MAX - 1);
    for offset in [1, 4, 12] {
        for error in [error_of(region.load_u64(offset)), error_of(region.store_u64(offset, 0))] {
            assert!(matches!(error, Error::Misaligned { offset: o, align: 8 } if o == offset), "{error:?}");
        }
    }
    for offset in [13, 16, 20, usize::MAX - 7] {
        for error in [error_of(region.load_u64(offset)), error_of(region.store_u64(offset, 0))] {
            assert!(matches!(error, Error::OutOfBounds { region: 20, .. }), "{offset}: {error:?}");
        }
    }
    assert_eq!(region.load_u64(8).unwrap(), u64::MAX - 1, "a refused access changes nothing");
}

#[test]
fn copies_of_exposed_memory_are_exact_at_every_offset_and_length() {
    let Some(rdma) = device() else { return };
    let mut region = rdma.pd().expose(Pages::new(40).unwrap(), Access::REMOTE).unwrap();
    for offset in 0..9 {
        for len in 0..27 {
            let bytes: Vec<u8> = (1..=len).collect();
            region.write(0, &[0xee; 40]).unwrap();
            region.write(offset, &bytes).unwrap();
            let mut all = [0; 40];
            region.read(0, &mut all).unwrap();
            let mut expected = [0xee; 40];
            expected[offset..][..bytes.len()].copy_from_slice(&bytes);
            assert_eq!(all, expected, "{len} bytes at {offset}");
            let mut part = vec![0; bytes.len()];
            region.read(offset, &mut part).unwrap();
            assert_eq!(part, bytes);
        }
    }
}

#[test]
fn exposed_regions_start_at_a_page_and_have_keys_of_their_own() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let regions = [(); 2].map(|()| pd.expose(Pages::new(100).unwrap(), Access::REMOTE_READ).unwrap());
    let [first, second] = regions.each_ref().map(ExposedRegion::remote);
    for RemoteMemory { address, len, rkey } in [first, second] {
        assert_eq!((len, address % 4096), (100, 0));
        assert_ne!(rkey, 0);
    }
    assert_ne!(first.rkey, second.rkey);
    assert_ne!(first.address, second.address);
}

#[test]
fn parts_of_a_buffer_cover_it_and_do_not_overlap() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let whole = pd.allocate(10).unwrap();
    let start = whole.address();
    let (mut first, rest) = whole.into_split(3).unwrap();
    let mut parts = rest.into_chunks(2).unwrap();
    assert_eq!((first.address(), first.len(), first.capacity()), (start, 3, 3));
    let places: Vec<_> = parts.iter().map(|part| (part.address() - start, part.len())).collect();
    assert_eq!(places, [(3, 2), (5, 2), (7, 2)], "the last byte is unused");
    // All references exist at once, so Miri notices if two parts overlap.
    let mut slices: Vec<&mut [u8]> = parts.iter_mut().map(|part| &mut part[..]).collect();
    first.fill(1);
    for (slice, value) in slices.iter_mut().zip(2..) {
        slice.fill(value);
    }
    assert_eq!(first[..], [1; 3]);
    for (part, value) in parts.iter().zip(2..) {
        assert_eq!(part[..], [value; 2]);
        assert_eq!(part.lkey(), first.lkey());
    }
    for size in [0, 3, 4] {
        let error = error_of(pd.allocate(3).unwrap().into_split(size));
        assert!(matches!(error, Error::PartSize { size: s, capacity: 3 } if s == size), "{error:?}");
    }
    for size in [0, 4] {
        let error = error_of(pd.allocate(3).unwrap().into_chunks(size));
        assert!(matches!(error, Error::PartSize { size: s, capacity: 3 } if s == size), "{error:?}");
    }
}

#[test]
fn the_length_of_a_buffer_stays_within_its_capacity() {
    let Some(rdma) = device() else { return };
    let mut buffer = rdma.pd().allocate(8).unwrap();
    buffer.fill_from(b"abc").unwrap();
    assert_eq!((&buffer[..], buffer.capacity(), buffer.sge().len), (&b"abc"[..], 8, 3));
    buffer.set_len(5).unwrap();
    assert_eq!(&buffer[..], b"abc\0\0", "all bytes are initialized");
    assert!(matches!(error_of(buffer.set_len(9)), Error::OutOfBounds { len: 9, region: 8, .. }));
    assert!(matches!(error_of(buffer.fill_from(&[1; 9])), Error::OutOfBounds { len: 9, region: 8, .. }));
    assert_eq!(&buffer[..], b"abc\0\0", "a refusal changes nothing");
}

#[test]
fn memory_of_the_caller_is_registered_in_place_and_not_freed() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut memory = [7_u8; 16];
    // SAFETY: no work request uses the memory, which outlives the region.
    let region =
        unsafe { pd.register_raw(memory.as_mut_ptr(), 16, Access::LOCAL_WRITE | Access::REMOTE_READ) }.unwrap();
    assert_eq!((region.address(), region.len()), (memory.as_ptr().addr() as u64, 16));
    assert_ne!((region.lkey(), region.rkey()), (0, 0));
    assert!(region.pd().is_same(&pd));
    drop(region);
    assert_eq!(memory, [7; 16]);
}
