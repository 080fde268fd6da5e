//! Memory of the user's own that is registered, and comes back.

use std::any::type_name;
use std::fs::File;

use rdma_safe::mr::{Backing, HugePages, JoinReason, Memory, Pages, ReclaimReason, Returned};
use rdma_safe::{Access, Buffer, Endpoint, Error, ProtectionDomain, RemoteMemory, Work};

use crate::support::link::connected;
use crate::support::{DEADLINE, device, error_of, filled, pattern};

/// Sends registered memory, changes it by a receive, and takes it back.
fn there_and_back<M: Memory>(pd: &ProtectionDomain, ends: &mut (Endpoint, Endpoint), memory: M, expected: &[u8]) -> M {
    let (a, b) = ends;
    let buffer = pd.register(memory).unwrap();
    assert_eq!(*buffer, *expected);
    b.receive(pd.allocate(expected.len()).unwrap()).unwrap();
    a.send(buffer).unwrap();
    let arrived = b.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    assert!(*arrived == *expected, "the bytes arrived changed");
    let mut reply = arrived;
    reply.reverse();
    let buffer = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    a.receive(buffer).unwrap();
    b.send(reply).unwrap();
    let buffer = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    assert!(b.wait(DEADLINE).unwrap().ok().is_ok());
    buffer.into_memory().unwrap()
}

#[test]
fn memory_of_the_user_is_sent_in_place_and_comes_back() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut ends = connected(rdma.endpoint(&pd));
    let bytes = pattern(1, 5000);
    let reversed: Vec<u8> = bytes.iter().rev().copied().collect();

    let mut vec = Vec::with_capacity(10_000);
    vec.extend_from_slice(&bytes);
    let address = vec.as_ptr();
    let vec = there_and_back(&pd, &mut ends, vec, &bytes);
    assert_eq!((vec.as_ptr(), vec.capacity()), (address, 10_000), "the same allocation");
    assert!(vec == reversed);

    let boxed = there_and_back(&pd, &mut ends, bytes.clone().into_boxed_slice(), &bytes);
    assert!(*boxed == *reversed);
}

#[cfg(not(miri))]
#[test]
fn a_mapped_file_is_written_by_the_device() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut ends = connected(rdma.endpoint(&pd));
    let bytes = pattern(2, 5000);
    let path = std::env::temp_dir().join(format!("rdma-mapped-{}", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // SAFETY: only this test uses the file.
    let map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    let map = there_and_back(&pd, &mut ends, map, &bytes);
    map.flush().unwrap();
    let written = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(written.iter().eq(bytes.iter().rev()));
}

#[test]
fn memory_comes_back_only_after_its_last_use() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    let bytes = pattern(3, 3000);
    let (head, tail) = pd.register(bytes.clone()).unwrap().into_split(1000).unwrap();
    a.receive(head).unwrap();
    let in_flight = error_of(tail.into_memory::<Vec<u8>>());
    assert_eq!(in_flight.reason, ReclaimReason::InUse { others: 1 });
    let tail = in_flight.part.unwrap();
    b.send(filled(&pd, &bytes[..10])).unwrap();
    assert!(b.wait(DEADLINE).unwrap().ok().is_ok());
    let head = a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap();
    assert_eq!((head.len(), tail.len()), (10, 2000), "the parts are unchanged");

    let other = error_of(head.into_memory::<Box<[u8]>>());
    let types = (type_name::<Box<[u8]>>(), type_name::<Vec<u8>>());
    assert!(
        matches!(other.reason, ReclaimReason::OtherType { expected, registered } if (expected, registered) == types),
        "{other}"
    );
    let exposed = pd.expose(Pages::new(64).unwrap(), Access::empty()).unwrap();
    let other_region = error_of(exposed.into_memory::<Vec<u8>>()).to_string();
    assert!(other_region.contains("it was registered as rdma_safe::mr::backing::Pages, not as"), "{other_region}");
    let mut whole = other.part.unwrap().join(tail).unwrap();
    whole.set_len(5).unwrap();
    whole.fill(9);
    let vec = whole.into_memory::<Vec<u8>>().unwrap();
    assert!(vec[..5] == [9; 5] && vec[5..] == bytes[5..], "the length of a buffer does not change the memory");
}

#[test]
fn cut_buffers_are_joined_in_any_order() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_depth(8).recv_depth(8));
    let bytes = pattern(7, 700);
    let mut rest = pd.register(bytes.clone()).unwrap();
    for wrong in [0, 700, 701] {
        for error in [error_of(rest.split_to(wrong)), error_of(rest.split_off(wrong))] {
            assert!(matches!(error, Error::PartSize { size, capacity: 700 } if size == wrong), "{error:?}");
        }
    }
    let mut parts = vec![rest.split_to(100).unwrap(), rest.split_off(300).unwrap()];
    assert_eq!(parts.iter().chain([&rest]).map(|part| part.len()).collect::<Vec<_>>(), [100, 300, 300]);
    parts.push(rest.split_to(1).unwrap());
    parts.push(rest);

    // In flight in any order, while others are joined.
    for index in [3, 0] {
        let part = parts.swap_remove(index);
        b.receive(pd.allocate(part.len()).unwrap()).unwrap();
        a.send(part).unwrap();
    }
    let incomplete = error_of(Buffer::join_all(parts));
    let mut parts = incomplete.parts;
    assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [1, 300], "sorted");
    for _ in 0..2 {
        assert!(b.wait(DEADLINE).unwrap().ok().is_ok());
        parts.push(a.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap());
    }
    parts.push(pd.allocate(10).unwrap());
    let foreign = error_of(Buffer::join_all(parts));
    let (mut parts, whole): (Vec<_>, Vec<_>) = foreign.parts.into_iter().partition(|part| part.len() == 10);
    assert_eq!((parts.len(), whole.len()), (1, 1));
    let unrelated = error_of(whole.into_iter().next().unwrap().join(parts.pop().unwrap()));
    assert_eq!(unrelated.reason, JoinReason::OtherRegion);
    let [whole, other] = unrelated.parts;
    assert_eq!((whole.len(), other.len()), (700, 10), "both come back");

    let (head, tail) = whole.into_split(200).unwrap();
    let reversed = error_of(tail.join(head));
    assert_eq!(reversed.reason, JoinReason::NotAdjacent);
    let [tail, head] = reversed.parts;
    assert_eq!((head.len(), tail.len()), (200, 500), "in the order in which they were passed");
    assert!(head.join(tail).unwrap().into_memory::<Vec<u8>>().unwrap() == bytes);
    let none = error_of(Buffer::join_all([]));
    assert!(none.parts.is_empty() && none.reason == JoinReason::NoParts);
}

/// Joins two buffers and takes their memory back, with the crate's error for both steps.
fn joined_memory(first: Buffer, second: Buffer) -> rdma_safe::Result<Box<[u8]>> {
    Ok(first.join(second)?.into_memory()?)
}

#[test]
fn errors_of_joining_and_reclaiming_become_errors_of_the_crate() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (head, tail) = pd.register(vec![1; 20]).unwrap().into_split(10).unwrap();
    let error = error_of(joined_memory(tail, head));
    assert!(matches!(error, Error::Join(JoinReason::NotAdjacent)), "{error:?}");
    assert_eq!(error.to_string(), "the buffers cannot be joined: each must begin where the one before it ends");

    let (head, tail) = pd.register(vec![1; 20]).unwrap().into_split(10).unwrap();
    let error = error_of(joined_memory(head, tail));
    assert!(matches!(error, Error::Reclaim(ReclaimReason::OtherType { .. })), "{error:?}");
    assert!(error.to_string().starts_with("the memory cannot be returned: it was registered as "), "{error}");

    let parts = pd.register(vec![1; 30]).unwrap().into_chunks(10).unwrap();
    let every_other = || -> rdma_safe::Result<Buffer> { Ok(Buffer::join_all(parts.into_iter().step_by(2))?) };
    assert!(matches!(error_of(every_other()), Error::Join(JoinReason::NotAdjacent)));
}

#[test]
fn exposed_memory_comes_back_with_what_the_peer_wrote() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, _b) = connected(rdma.endpoint(&pd).peer_access(Access::REMOTE));
    let region = pd.expose(vec![0; 64], Access::REMOTE_WRITE).unwrap();
    let remote: RemoteMemory = region.remote();
    a.post(Work::write(filled(&pd, b"from the peer"), remote)).unwrap();
    assert!(a.wait(DEADLINE).unwrap().ok().is_ok());
    let vec: Vec<u8> = region.into_memory().unwrap();
    assert_eq!((&vec[..13], vec.len()), (&b"from the peer"[..], 64));
}

#[test]
fn memory_that_cannot_be_registered_is_returned() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let refused = pd.registration(Access::REMOTE_READ).try_register(vec![7; 100]).unwrap_err();
    assert!(matches!(refused.error, Error::BufferAccess { access: Access::REMOTE_READ }), "{refused:?}");
    assert_eq!(refused.memory, [7; 100]);
    let unknown = Access::from_bits_retain(1 << 19);
    let failed = pd.registration(unknown).try_register(refused.memory).unwrap_err();
    assert!(matches!(failed.error, Error::RegisterMemory { len: 100, .. }), "{failed:?}");
    assert_eq!(pd.register(failed.memory).unwrap().into_memory::<Vec<u8>>().unwrap(), [7; 100]);

    let empty = pd.try_register(Vec::with_capacity(50)).unwrap_err();
    assert!(matches!(empty.error, Error::EmptyRegion) && empty.memory.capacity() == 50, "{empty:?}");
    assert!(pd.allocate(10).unwrap().into_memory::<Pages>().is_ok());
}

#[test]
fn a_buffer_is_returned_only_to_memory_of_its_type() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let buffer = pd.allocate(64).unwrap();
    let address = buffer.address();
    let buffer = Returned::<HugePages>::try_from(buffer).unwrap_err();
    let (buffer, rest) = buffer.into_split(10).unwrap();
    let buffer = Returned::<Pages>::try_from(buffer).unwrap();
    assert_eq!((buffer.memory().len(), buffer.capacity()), (64, 10));
    assert_eq!(Buffer::from(buffer).join(rest).unwrap().address(), address);
}
