//! Shared payloads, and lists of memory for one piece of work.

use std::any::type_name;
use std::sync::Arc;

use bytes::Bytes;
use rdma_safe::mr::{Gather, Piece, ReclaimReason, SharedBuffer};
use rdma_safe::{Access, Buffer, Endpoint, EndpointSet, Error, Operation, PostError, WcStatus, Work};

use crate::allocation::allocations;
use crate::support::link::connected;
use crate::support::{DEADLINE, device, device_without_checker, error_of, filled, kernel, pattern};

fn buffers(list: Option<Gather>) -> Vec<Buffer> {
    list.expect("a list").into_iter().map(|piece| piece.into_buffer().expect("a buffer")).collect()
}

/// The bytes of the next message that `endpoint` receives.
fn received(endpoint: &mut Endpoint) -> Vec<u8> {
    endpoint.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap().to_vec()
}

/// Waits for a send, which succeeds.
fn sent(endpoint: &mut Endpoint) -> Option<Gather> {
    endpoint.wait(DEADLINE).unwrap().ok().unwrap().list
}

#[test]
fn one_payload_reaches_many_peers_and_comes_back_after_the_last() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let bytes = pattern(1, 4000);
    let payload = pd.share(Bytes::from(bytes.clone())).unwrap();
    let mut ends: Vec<_> = (0..4).map(|_| connected(rdma.endpoint(&pd))).collect();
    for (index, (a, b)) in ends.iter_mut().enumerate() {
        b.receive(pd.allocate(4000).unwrap()).unwrap();
        a.send_list(payload.slice(index..).unwrap()).unwrap();
    }
    let in_flight = error_of(payload.into_memory::<Bytes>());
    assert_eq!(in_flight.reason, ReclaimReason::InUse { others: 4 });
    let payload = in_flight.part.unwrap();
    for (index, (a, b)) in ends.iter_mut().enumerate() {
        assert!(received(b) == bytes[index..]);
        let list = sent(a).unwrap();
        assert!(matches!(list.pieces(), [Piece::Shared(slice)] if **slice == bytes[index..]));
    }
    assert!(payload.into_memory::<Bytes>().unwrap() == bytes);
}

#[test]
fn a_payload_that_was_dropped_in_flight_still_arrives() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    let owner: Arc<[u8]> = pattern(2, 3000).into();
    let payload = pd.share(Arc::clone(&owner)).unwrap();
    b.receive(pd.allocate(3000).unwrap()).unwrap();
    a.send_list(payload).unwrap();
    assert_eq!(Arc::strong_count(&owner), 2, "the work keeps the owner");
    assert!(received(&mut b) == *owner);
    drop(sent(&mut a));
    assert_eq!(Arc::strong_count(&owner), 1, "the completion was the last use");
}

#[test]
fn every_kind_of_read_only_memory_is_sent() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    static TEXT: &[u8] = b"memory of the program";
    let boxed: Box<[u8]> = TEXT.into();
    let shared: [SharedBuffer; 7] = [
        pd.share(TEXT).unwrap(),
        pd.share(TEXT.to_vec()).unwrap(),
        pd.share(boxed).unwrap(),
        pd.share(String::from_utf8_lossy(TEXT).into_owned()).unwrap(),
        pd.share(Arc::new(TEXT.to_vec())).unwrap(),
        pd.share(Bytes::from_static(TEXT)).unwrap(),
        filled(&pd, TEXT).freeze(),
    ];
    for payload in shared {
        b.receive(pd.allocate(100).unwrap()).unwrap();
        a.send_list(payload).unwrap();
        assert_eq!(received(&mut b), TEXT);
        sent(&mut a);
    }
}

#[cfg(not(miri))]
#[test]
fn a_read_only_mapping_of_a_file_is_sent() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    let bytes = pattern(3, 10_000);
    let path = std::env::temp_dir().join(format!("rdma-read-only-{}", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    // Kernels before 6.2 pin pages as if for writing, which a shared mapping that is read-only does not allow.
    let is_shared = rdma.is_soft() || kernel() >= (6, 2);
    // SAFETY: nothing else uses the file.
    let map = unsafe {
        if is_shared { memmap2::Mmap::map(&file) } else { memmap2::MmapOptions::new().map_copy_read_only(&file) }
    };
    let payload = pd.share(map.unwrap()).unwrap();
    b.receive(pd.allocate(10_000).unwrap()).unwrap();
    a.send_list(payload.clone()).unwrap();
    assert!(received(&mut b) == bytes);
    sent(&mut a);
    assert!(*payload.into_memory::<memmap2::Mmap>().unwrap() == *bytes);
}

#[test]
fn slices_are_checked_and_frozen_buffers_thaw() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let frozen = filled(&pd, b"0123456789").freeze();
    assert_eq!(*frozen.slice(2..=4).unwrap(), *b"234");
    let nested = frozen.slice(2..).unwrap().slice(..3).unwrap();
    assert_eq!(nested.as_ref(), b"234");
    assert!(frozen.slice(10..).unwrap().is_empty());
    for (start, end) in [(0, 11), (11, 11), (5, 4), (usize::MAX, usize::MAX)] {
        let error = error_of(frozen.slice(start..end));
        assert!(matches!(error, Error::OutOfBounds { offset, region: 10, .. } if offset == start), "{error:?}");
    }
    let cut = || (0..10).for_each(|at| drop(std::hint::black_box(frozen.slice(at..).unwrap())));
    assert_eq!(allocations(cut), 0, "a slice is one more reference");
    let shared = error_of(frozen.into_buffer());
    assert_eq!(shared.reason, ReclaimReason::InUse { others: 1 });
    drop(shared);
    let mut buffer = nested.into_buffer().unwrap();
    assert_eq!(*buffer, *b"0123456789", "the whole buffer");
    buffer[0] = b'x';

    let registered_as = |reason: ReclaimReason| match reason {
        ReclaimReason::OtherType { registered, .. } => registered,
        other => panic!("{other}"),
    };
    let other = error_of(buffer.freeze().into_memory::<Vec<u8>>());
    assert_eq!(registered_as(other.reason), type_name::<Buffer>());
    let read_only = error_of(pd.share(b"constant".to_vec()).unwrap().into_buffer());
    assert_eq!(registered_as(read_only.reason), type_name::<Vec<u8>>());
    let other = error_of(read_only.part.unwrap().into_memory::<String>());
    let text = "it was registered as alloc::vec::Vec<u8>, not as alloc::string::String";
    assert!(other.to_string().contains(text), "{other}");
    assert_eq!(other.part.unwrap().into_memory::<Vec<u8>>().unwrap(), b"constant");

    let refused = error_of(pd.registration(Access::REMOTE_READ).share(vec![1]));
    assert!(matches!(refused.error, Error::BufferAccess { .. }) && refused.memory == [1]);
}

#[test]
fn received_messages_become_bytes_without_a_copy() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    let inbox = pd.allocate(100).unwrap();
    let address = inbox.as_ptr();
    b.receive(inbox).unwrap();
    a.send(filled(&pd, b"hello world")).unwrap();
    let message = Bytes::from(b.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap());
    assert_eq!((&message[..], message.as_ptr()), (&b"hello world"[..], address));
    let word = message.slice(6..);
    drop(message);
    // Sent on, again without a copy.
    assert!(a.wait(DEADLINE).unwrap().ok().is_ok());
    a.receive(pd.allocate(100).unwrap()).unwrap();
    b.send_list(pd.share(word).unwrap()).unwrap();
    assert_eq!(received(&mut a), b"world");
}

#[test]
fn a_header_and_a_payload_are_gathered_and_scattered() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_sges(3).recv_sges(3));
    let bytes = pattern(4, 5000);
    let payload = pd.share(bytes.clone()).unwrap();
    let receives = [10, 100, 6000].map(|len| pd.allocate(len).unwrap());
    let receive = b.receive_list(receives).unwrap();
    let id =
        a.send_list((filled(&pd, b"header"), payload.slice(..4000).unwrap(), payload.slice(4000..).unwrap())).unwrap();

    let done = b.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!((done.operation, done.id, done.byte_len), (Operation::Receive, receive, 5006));
    assert!(done.buffer.is_none());
    let parts = buffers(done.list);
    assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [10, 100, 4896]);
    let message: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
    assert!(message[..6] == *b"header" && message[6..] == bytes);

    let done = a.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!((done.operation, done.id), (Operation::Send, id));
    let mut list = done.list.unwrap();
    assert_eq!((list.len(), list.byte_len()), (3, 5006));
    // The same list can be changed and posted again.
    assert!(matches!(list.pop(), Some(Piece::Shared(last)) if *last == bytes[4000..]));
    b.receive_list((pd.allocate(6).unwrap(), pd.allocate(4000).unwrap())).unwrap();
    a.post(Work::send_list(list).imm(9)).unwrap();
    let done = b.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!((done.imm(), done.byte_len), (Some(9), 4006));
    let parts = buffers(done.list);
    assert!(*parts[0] == *b"header" && *parts[1] == bytes[..4000]);
}

#[test]
fn peers_are_written_and_read_by_lists() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_sges(2).recv_sges(2).peer_access(Access::REMOTE));
    let mut target = pd.expose(vec![0; 100], Access::REMOTE).unwrap();
    let remote = target.remote();
    let short = error_of(a.write_list(filled(&pd, &[1; 101]), remote));
    assert_eq!(short.error, PostError::RemoteTooShort { len: 101, remote: 100 });
    assert_eq!(short.list.unwrap().byte_len(), 101);
    a.write_list((filled(&pd, b"written "), pd.share("by a list".to_owned()).unwrap()), remote).unwrap();
    assert_eq!(sent(&mut a).unwrap().len(), 2);
    let mut bytes = [0; 17];
    target.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"written by a list");

    // A read into a buffer and into exposed memory, which then is the source of a send.
    let local = pd.expose(vec![0; 100], Access::REMOTE_READ).unwrap();
    target.write(0, b"read into both.").unwrap();
    a.read_list((pd.allocate(5).unwrap(), local.part(90, 10).unwrap()), remote).unwrap();
    let done = a.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!((done.operation, done.byte_len), (Operation::Read, 15));
    let mut bytes = [0; 10];
    local.read(90, &mut bytes).unwrap();
    let list = done.list.unwrap();
    assert!(matches!(list.pieces(), [Piece::Buffer(buffer), Piece::Exposed(part)]
        if **buffer == *b"read " && (part.offset(), part.len()) == (90, 10)));
    assert_eq!(&bytes, b"into both.");

    // The region stays registered while a part of it is in flight.
    let part = local.part(90, 10).unwrap();
    drop(local);
    let place = pd.expose(vec![0; 64], Access::REMOTE_READ).unwrap();
    b.receive_list((pd.allocate(4).unwrap(), place.part(60, 4).unwrap())).unwrap();
    a.send_list(part).unwrap();
    let failed = b.wait(DEADLINE).unwrap();
    // Ten bytes for eight. SoftRoCE reports another status.
    assert!(if rdma.is_rxe() { failed.status != WcStatus::SUCCESS } else { failed.status == WcStatus::LOC_LEN_ERR });
    assert_eq!(failed.list.unwrap().len(), 2, "a failed receive returns its list");
    assert_ne!(a.wait(DEADLINE).unwrap().status, WcStatus::SUCCESS);
    drop((a, b));

    let (mut a, mut b) = connected(rdma.endpoint(&pd).recv_sges(2));
    b.receive_list((pd.allocate(4).unwrap(), place.part(60, 4).unwrap())).unwrap();
    a.send(filled(&pd, b"exposed")).unwrap();
    assert_eq!(b.wait(DEADLINE).unwrap().ok().unwrap().byte_len, 7);
    let mut bytes = [0; 3];
    place.read(60, &mut bytes).unwrap();
    assert_eq!(&bytes, b"sed");
    assert!(matches!(error_of(place.part(60, 5)), Error::OutOfBounds { offset: 60, len: 5, region: 64 }));
}

#[test]
fn lists_that_cannot_be_posted_come_back() {
    let Some(rdma) = device() else { return };
    let (pd, other) = (rdma.pd(), rdma.pd());
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_depth(2).recv_depth(1));
    let shared = pd.share(b"constant".to_vec()).unwrap();
    let exposed = pd.expose(vec![0; 64], Access::REMOTE_READ).unwrap();

    let rejected = error_of(a.receive_list(shared.clone()));
    assert_eq!((rejected.error, rejected.list.map(|list| list.len())), (PostError::ReadOnly, Some(1)));
    let rejected = error_of(a.read_list(shared.clone(), exposed.remote()));
    assert_eq!((rejected.error, rejected.list.map(|list| list.len())), (PostError::ReadOnly, Some(1)));
    for rejected in [
        error_of(a.receive_list(filled(&other, b"x"))),
        error_of(a.send_list(filled(&other, b"x"))),
        error_of(a.send_list(other.share(vec![1]).unwrap())),
        error_of(a.send_list(other.expose(vec![0; 8], Access::REMOTE_READ).unwrap().part(0, 8).unwrap())),
    ] {
        assert_eq!((rejected.error, rejected.list.unwrap().len()), (PostError::ForeignBuffer, 1));
    }
    let max = a.queue_pair().capacity().max_send_sge as usize;
    let many: Gather = (0..=max).map(|_| shared.clone()).collect();
    let rejected = error_of(a.send_list(many));
    assert_eq!(rejected.error, PostError::TooManySges { count: max + 1, max: max as u32 });
    assert_eq!(rejected.list.unwrap().len(), max + 1);
    let rejected = error_of(a.receive_list([pd.allocate(8).unwrap(), pd.allocate(8).unwrap()]));
    if a.queue_pair().capacity().max_recv_sge == 1 {
        assert_eq!(rejected.error, PostError::TooManySges { count: 2, max: 1 });
    }
    assert_eq!(buffers(rejected.list).len(), 2);

    a.receive_list(pd.allocate(8).unwrap()).unwrap();
    let full = error_of(a.receive_list(pd.allocate(8).unwrap()));
    assert_eq!((full.error, full.list.unwrap().len()), (PostError::QueueFull { posted: 0 }, 1));

    // A batch that is dropped drops its lists, and one that is posted returns them in order.
    let mut batch = a.batch().unwrap();
    batch.add(Work::send_list(filled(&pd, b"dropped"))).unwrap();
    batch.add(Work::send(filled(&pd, b"dropped"))).unwrap();
    let refused = error_of(batch.add(Work::send_list(shared.clone())));
    assert!(matches!(refused.error, PostError::EndpointFull { .. }) && refused.list.is_some());
    drop(batch);
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.send_list(shared).unwrap();
    assert_eq!(received(&mut b), b"constant");
    assert!(matches!(sent(&mut a).unwrap().pieces(), [Piece::Shared(_)]));
}

#[test]
fn pending_and_unsignaled_lists_arrive_in_order() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).send_depth(2).pending_sends(6).send_sges(2));
    let payload = pd.share(pattern(5, 64)).unwrap();
    for buffer in pd.allocate(8 * 100).unwrap().into_chunks(100).unwrap() {
        b.receive(buffer).unwrap();
    }
    for number in 0..8_u8 {
        let list = (filled(&pd, &[number]), payload.clone());
        let work = if number % 3 == 0 { Work::send_list(list) } else { Work::send_list(list).unsignaled() };
        a.post(work).unwrap();
    }
    let full = error_of(a.send_list(payload.clone()));
    assert!(matches!(full.error, PostError::EndpointFull { .. }) && full.list.is_some());
    for number in 0..8 {
        let list = sent(&mut a).unwrap();
        assert!(matches!(list.pieces(), [Piece::Buffer(header), Piece::Shared(_)] if **header == [number]));
        let message = received(&mut b);
        assert!(message[0] == number && message[1..] == *payload);
    }
}

#[test]
fn closing_returns_the_buffers_of_lists_and_frees_shared_memory() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, _b) = connected(rdma.endpoint(&pd).recv_sges(2).send_sges(2));
    let owner: Arc<[u8]> = vec![1; 64].into();
    a.receive_list((pd.allocate(4).unwrap(), pd.allocate(5).unwrap())).unwrap();
    a.receive(pd.allocate(6).unwrap()).unwrap();
    // The peer has no receive.
    a.send_list((pd.share(Arc::clone(&owner)).unwrap(), pd.allocate(7).unwrap())).unwrap();
    let mut lens: Vec<_> = a.close().unwrap().iter().map(|buffer| buffer.capacity()).collect();
    lens.sort_unstable();
    assert_eq!((lens, Arc::strong_count(&owner)), (vec![4, 5, 6, 7], 1));
}

#[test]
fn members_of_a_set_send_and_receive_lists() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut set = EndpointSet::builder(pd.context(), 300).build().unwrap();
    let key = rdma.endpoint(&pd).send_sges(2).recv_sges(2).build_in(&mut set).unwrap();
    let mut peer = rdma.endpoint(&pd).build().unwrap();
    let mut member = set.endpoint(key).unwrap();
    member.connect(&peer.address()).unwrap();
    peer.connect(&member.address()).unwrap();
    let payload = pd.share("payload".to_owned()).unwrap();
    member.receive_list((pd.allocate(2).unwrap(), pd.allocate(50).unwrap())).unwrap();
    peer.receive(pd.allocate(50).unwrap()).unwrap();
    member.send_list((filled(&pd, b"header "), payload)).unwrap();
    assert_eq!(received(&mut peer), b"header payload");
    peer.send(filled(&pd, b"reply")).unwrap();
    let mut parts = Vec::new();
    for _ in 0..2 {
        let (whose, done) = set.wait(DEADLINE).unwrap();
        let done = done.ok().unwrap();
        assert_eq!(whose, key);
        match done.operation {
            Operation::Receive => parts = buffers(done.list),
            operation => assert_eq!((operation, done.list.unwrap().len()), (Operation::Send, 2)),
        }
    }
    assert!(*parts[0] == *b"re" && *parts[1] == *b"ply");
    set.endpoint(key).unwrap().receive_list((parts.pop().unwrap(), parts.pop().unwrap())).unwrap();
    let buffers = set.remove(key).unwrap();
    assert_eq!(buffers.len(), 2);
}

/// Sends and receives one message by lists, and takes them from the completions.
fn exchange(ends: &mut (Endpoint, Endpoint), sent: Gather, receive: Gather) -> (Gather, Gather) {
    let (a, b) = ends;
    b.receive_list(receive).unwrap();
    a.send_list(sent).unwrap();
    let receive = b.wait(DEADLINE).unwrap().ok().unwrap().list.unwrap();
    (a.wait(DEADLINE).unwrap().ok().unwrap().list.unwrap(), receive)
}

#[test]
#[cfg_attr(miri, ignore = "packets in memory are allocated")]
fn lists_of_up_to_four_elements_allocate_nothing() {
    let Some(rdma) = device_without_checker("delayed packets are stored in memory") else { return };
    let pd = rdma.pd();
    let max = rdma.attributes().max_sge().min(4);
    let mut ends = connected(rdma.endpoint(&pd).send_sges(max).recv_sges(max));
    let payload = pd.share(pattern(6, 100)).unwrap();
    let mut receives: Vec<Buffer> = (0..max).map(|_| pd.allocate(100).unwrap()).collect();
    let mut header = Some(filled(&pd, b"header"));
    let mut round = || {
        let mut list = Gather::new();
        list.extend(header.take());
        list.extend((1..max).map(|_| payload.clone()));
        let (list, receive) = exchange(&mut ends, list, receives.drain(..).collect());
        receives.extend(receive.into_iter().filter_map(Piece::into_buffer));
        header = list.into_iter().next().and_then(Piece::into_buffer);
    };
    round();
    assert_eq!(allocations(|| (0..20).for_each(|_| round())), 0);
}

#[test]
fn an_empty_list_is_an_empty_message() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    b.receive(pd.allocate(10).unwrap()).unwrap();
    b.receive_list(Gather::new()).unwrap();
    for _ in 0..2 {
        a.send_list(Gather::new()).unwrap();
        assert!(sent(&mut a).unwrap().is_empty());
    }
    let first = b.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!((first.byte_len, first.buffer.unwrap().len()), (0, 0));
    let second = b.wait(DEADLINE).unwrap().ok().unwrap();
    assert!(second.byte_len == 0 && second.list.unwrap().is_empty());
}
