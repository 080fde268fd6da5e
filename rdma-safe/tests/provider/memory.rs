//! Registered memory: bounds, parts, and who may hold a reference to what while the device works.

use rdma_safe::{Access, Error, Pages, RemoteMemory};

use crate::fake::{Config, Fake};
use crate::support::{done, endpoints, on_each_interface};

#[test]
fn exposed_memory_is_reached_within_its_bounds_only() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut region = pd.expose(Pages::new(20).unwrap(), Access::REMOTE).unwrap();
    assert_eq!((region.len(), region.is_empty()), (20, false));
    region.write(17, b"end").unwrap();
    let mut bytes = [1; 5];
    region.read(15, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0end");
    region.read(20, &mut []).unwrap();
    for (offset, len) in [(16, 5), (21, 0), (usize::MAX, 2), (usize::MAX, 5)] {
        let mut bytes = vec![7; len];
        let errors = [region.read(offset, &mut bytes).unwrap_err(), region.write(offset, &bytes).unwrap_err()];
        for error in errors {
            assert!(
                matches!(error, Error::OutOfBounds { offset: o, len: l, region: 20 } if (o, l) == (offset, len)),
                "{error}"
            );
        }
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
    region.store_u64(8, u64::MAX - 1).unwrap();
    assert_eq!(region.load_u64(8).unwrap(), u64::MAX - 1);
    for offset in [1, 4, 12] {
        let errors = [region.load_u64(offset).unwrap_err(), region.store_u64(offset, 0).unwrap_err()];
        assert!(errors.iter().all(|error| matches!(error, Error::Misaligned { align: 8, .. })), "{errors:?}");
    }
    for offset in [13, 16, 20, usize::MAX - 7] {
        assert!(matches!(region.load_u64(offset), Err(Error::OutOfBounds { region: 20, .. })), "{offset}");
        assert!(matches!(region.store_u64(offset, 0), Err(Error::OutOfBounds { region: 20, .. })), "{offset}");
    }
    region.read(17, &mut bytes[..3]).unwrap();
    assert_eq!(&bytes[..3], b"end", "what was refused changed nothing");
}

#[test]
fn copies_of_exposed_memory_are_exact_at_every_offset_and_length() {
    let fake = Fake::new(Config::default());
    let mut region = fake.pd().expose(Pages::new(40).unwrap(), Access::REMOTE).unwrap();
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
fn what_a_peer_is_told_of_a_region_is_where_it_is() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let region = pd.expose(Pages::new(100).unwrap(), Access::REMOTE_READ).unwrap();
    let RemoteMemory { address, len, rkey } = region.remote();
    assert_eq!(len, 100);
    assert_eq!(address % 4096, 0);
    assert_ne!(rkey, 0);
    let other = pd.expose(Pages::new(100).unwrap(), Access::REMOTE_READ).unwrap();
    assert_ne!(other.remote().rkey, rkey);
}

#[test]
fn parts_of_a_buffer_cover_it_and_do_not_overlap() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let whole = pd.allocate(10).unwrap();
    let start = whole.address();
    let (mut first, rest) = whole.into_split(3).unwrap();
    let mut parts = rest.into_chunks(2).unwrap();
    assert_eq!((first.address(), first.len(), first.capacity()), (start, 3, 3));
    let places: Vec<_> = parts.iter().map(|part| (part.address() - start, part.len())).collect();
    assert_eq!(places, [(3, 2), (5, 2), (7, 2)], "the last byte is left over");
    // All at once: no part is a way to another.
    let mut slices: Vec<&mut [u8]> = parts.iter_mut().map(|part| &mut part[..]).collect();
    first.fill(1);
    for (slice, value) in slices.iter_mut().zip(2..) {
        slice.fill(value);
    }
    assert_eq!(first[..], [1; 3]);
    for (part, value) in parts.iter().zip(2..) {
        assert_eq!(part[..], [value; 2]);
    }
    assert!(parts.iter().all(|part| part.lkey() == first.lkey()));
    for at in [0, 3, 4] {
        let (buffer, len) = (pd.allocate(3).unwrap(), at);
        assert!(matches!(buffer.into_split(at), Err(Error::PartSize { .. })), "{len}");
    }
    assert!(matches!(pd.allocate(3).unwrap().into_chunks(0), Err(Error::PartSize { size: 0, capacity: 3 })));
    assert!(matches!(pd.allocate(3).unwrap().into_chunks(4), Err(Error::PartSize { size: 4, capacity: 3 })));
}

#[test]
fn a_length_stays_within_the_capacity() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut buffer = pd.allocate(8).unwrap();
    buffer.fill_from(b"abc").unwrap();
    assert_eq!((&buffer[..], buffer.capacity(), buffer.sge().len), (&b"abc"[..], 8, 3));
    buffer.set_len(5).unwrap();
    assert_eq!(&buffer[..], b"abc\0\0", "all bytes are initialised");
    assert!(matches!(buffer.set_len(9), Err(Error::OutOfBounds { len: 9, region: 8, .. })));
    assert!(matches!(buffer.fill_from(&[1; 9]), Err(Error::OutOfBounds { .. })));
    assert_eq!(&buffer[..], b"abc\0\0");
}

#[test]
fn references_to_other_parts_are_good_while_the_device_has_one() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let mut parts = pd.register_boxed(vec![9; 24].into_boxed_slice()).unwrap().into_chunks(8).unwrap();
        let (mut last, inbox, mut outbox) = (parts.pop().unwrap(), parts.pop().unwrap(), parts.pop().unwrap());
        outbox.copy_from_slice(b"outgoing");
        let held = &mut last[..];
        b.receive(inbox).unwrap();
        a.send(outbox).unwrap();
        held.fill(3);
        let mut received = done(&mut b).buffer.unwrap();
        let sent = done(&mut a).buffer.unwrap();
        // Each is its owner's again, as if the device had never had it.
        received[0] = b'O';
        assert_eq!((&received[..], &sent[..], held), (&b"Outgoing"[..], &b"outgoing"[..], &mut [3; 8][..]));
    });
}

#[test]
fn raw_memory_is_the_callers() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut memory = [7_u8; 16];
    // SAFETY: no work names it.
    let region = unsafe { pd.register_raw(memory.as_mut_ptr(), 16, Access::REMOTE_READ) }.unwrap();
    assert_eq!((region.address(), region.len()), (memory.as_ptr().addr() as u64, 16));
    assert_ne!((region.lkey(), region.rkey()), (0, 0));
    assert!(region.pd().is_same(&pd));
    drop(region);
    assert_eq!(memory, [7; 16], "neither freed nor changed");
    // SAFETY: nothing is registered.
    let error = unsafe { pd.register_raw(memory.as_mut_ptr(), 0, Access::empty()) }.unwrap_err();
    assert!(matches!(error, Error::EmptyRegion), "{error}");
}
