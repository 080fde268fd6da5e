//! Resized queues, changed registrations, and kinds of memory that not every device supports.

use std::time::Duration;

use rdma_safe::mr::{ReregisterError, Reregistration};
use rdma_safe::{Access, Device, Error};

use crate::support::lab::{Data, Lab, Memory, Mode, Op, Wr};
use crate::support::{device, error_of, rounds, within_deadline};

/// Takes completions of the first end, which must be `ids` in this order.
#[track_caller]
fn take(lab: &mut Lab, ids: std::ops::Range<u64>) {
    for id in ids {
        lab.a.next_ok(id);
    }
}

#[test]
fn a_completion_queue_grows_and_shrinks_and_keeps_its_completions() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let few = rounds(5, 2);
        let mut lab = Lab::builder(&rdma, mode).entries(few as u32 + 2).depth(64).build();
        let (remote, local) = (lab.b.memory.remote(0), lab.a.memory.sge(0..8));
        let write = |lab: &mut Lab, ids: std::ops::Range<u64>| {
            for id in ids {
                lab.a.post(&[Wr::new(id, Op::Write(remote), Data::One(local))]).unwrap();
            }
        };
        // The second completions wrap around the end of the ring.
        write(&mut lab, 0..few);
        take(&mut lab, 0..few);
        write(&mut lab, few..2 * few);
        lab.a.next_ok(few);
        lab.a.cq.resize(50).unwrap();
        assert!(lab.a.cq.capacity() >= 50, "{mode}: {}", lab.a.cq.capacity());
        let last = rounds(50, 9);
        write(&mut lab, 2 * few..last);
        take(&mut lab, few + 1..last);
        lab.a.cq.resize(9).unwrap();
        assert!(lab.a.cq.capacity() >= 9);
        let end = last + rounds(7, 2);
        write(&mut lab, last..end);
        take(&mut lab, last..end);
    }
}

#[test]
fn a_size_that_a_completion_queue_cannot_have_is_refused() {
    const READ: u64 = 0x0123_4567_89ab_cdef;
    let Some(rdma) = device() else { return };
    let max = rdma.attributes().max_cqe();
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).entries(40).depth(64).build();
        let capacity = lab.a.cq.capacity();
        let (remote, local) = (lab.b.memory.remote(0), Data::One(lab.a.memory.sge(0..8)));
        // A classic poll takes several completions at a time, so there are many. Miri is slow: it posts few writes and polls none.
        let (writes, polled) = (rounds(29, 5), rounds(1, 0));
        (0..writes).for_each(|id| lab.a.post(&[Wr::new(id, Op::Write(remote), local)]).unwrap());
        lab.b.memory.put_u64(8, READ);
        take(&mut lab, 0..polled);
        for entries in [0, max + 1, u32::MAX] {
            let error = lab.a.cq.resize(entries).unwrap_err();
            assert!(matches!(error, Error::ResizeCompletionQueue { max_entries, .. } if max_entries == max), "{error}");
        }
        // The second read is posted after the data of the first one arrived. When its data arrives, the completions of the writes
        // are in the queue. Before that, a smaller queue might be granted, and overrun.
        let read = Op::Read(lab.b.memory.remote(8));
        for (id, offset) in [(writes, 8), (writes + 1, 16)] {
            lab.a.post(&[Wr::new(id, read, Data::One(lab.a.memory.sge(offset..offset + 8)))]).unwrap();
            within_deadline("data of the read", || (lab.a.memory.get_u64(offset) == READ).then_some(()));
        }
        let error = lab.a.cq.resize(3).unwrap_err();
        assert!(matches!(error, Error::ResizeCompletionQueue { entries: 3, .. }), "{mode}: {error}");
        assert_eq!(lab.a.cq.capacity(), capacity);
        take(&mut lab, polled..writes + 2);
    }
}

#[test]
fn unsupported_changes_and_registrations_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let refused = |error: Error| {
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(rdma.device_name()), "{error}");
    };
    let mut cq = rdma.completion_queue(8).build().unwrap();
    match cq.moderate(4, Duration::from_micros(10)) {
        Ok(()) => assert!(!rdma.is_rxe(), "SoftRoCE moderates nothing"),
        Err(error) => refused(error),
    }
    match pd.null_region() {
        Ok(_) => assert!(!rdma.is_rxe(), "SoftRoCE has no null regions"),
        Err(error) => refused(error),
    }
    // Standard input is not a DMA-BUF, so devices with DMA-BUF support return an error of their own.
    // SAFETY: the registration fails.
    match error_of(unsafe { pd.register_dmabuf(std::io::stdin(), 0, 4096, 0, Access::LOCAL_WRITE) }) {
        error @ Error::Unsupported { .. } => refused(error),
        error => assert!(!rdma.is_rxe() && matches!(error, Error::RegisterDmaBuf { .. }), "{error:?}"),
    }
}

#[test]
fn a_registration_changes_or_stays_as_it_was() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let memory = Memory::new(&lab.pd, 64);
    // SAFETY: memory of a `Memory` tolerates any access and is freed after the queue pairs.
    let region = unsafe { lab.pd.register_raw(memory.raw().address() as *mut u8, 64, Access::LOCAL_WRITE) }.unwrap();
    // SAFETY: as above.
    let region = match unsafe {
        region.reregister(Reregistration::new().access(Access::LOCAL_WRITE | Access::REMOTE_WRITE))
    } {
        Ok(region) => {
            assert!(!rdma.is_rxe(), "SoftRoCE changes no registration");
            region
        }
        Err(error) => {
            assert!(matches!(&error, ReregisterError::Unchanged { errno, .. } if errno.is_unsupported()), "{error}");
            error.into_region().expect("it is as it was")
        }
    };
    memory.put(0, b"as it was");
    lab.b.receive(1, 0..64).unwrap();
    let sge = rdma_safe::Sge { address: region.address(), len: 9, lkey: region.lkey() };
    lab.a.post(&[Wr::new(2, Op::Send, Data::One(sge))]).unwrap();
    lab.a.next_ok(2);
    lab.b.next_ok(1);
    assert_eq!(lab.b.memory.get(0..9), b"as it was");
    region.deregister().unwrap();
    drop(lab);
}

#[test]
fn a_registration_moves_to_other_memory_and_another_domain() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        println!("skipped: not every device can change registrations");
        return;
    }
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let other = rdma.pd();
        let [first, second] = [Memory::new(&lab.pd, 64), Memory::new(&lab.pd, 64)];
        second.put(0, b"rereg mr");
        let pointer = |memory: &Memory| memory.raw().address() as *mut u8;
        // SAFETY: memory of a `Memory` tolerates any access and is freed after the queue pairs.
        let region = unsafe { other.register_raw(pointer(&first), 64, Access::LOCAL_WRITE) }.unwrap();
        // SAFETY: as above.
        let region =
            unsafe { region.reregister(Reregistration::new().memory(pointer(&second), 8).pd(&lab.pd)) }.unwrap();
        assert_eq!((region.address(), region.len()), (second.raw().address(), 8));
        assert!(region.pd().is_same(&lab.pd));
        drop(other);
        lab.b.receive(1, 0..64).unwrap();
        let sge = rdma_safe::Sge { address: region.address(), len: 8, lkey: region.lkey() };
        lab.a.post(&[Wr::new(2, Op::Send, Data::One(sge))]).unwrap();
        lab.a.next_ok(2);
        lab.b.next_ok(1);
        assert_eq!(lab.b.memory.get(0..8), b"rereg mr", "{mode}");
        region.deregister().unwrap();
        drop(lab);
    }
}

#[test]
fn a_registration_does_not_move_to_another_context() {
    let Some(rdma) = device() else { return };
    let (pd, other) = (rdma.pd(), Device::by_name(rdma.device_name()).unwrap().open().unwrap());
    let memory = Memory::new(&pd, 64);
    // SAFETY: memory of a `Memory` tolerates any access, and no work uses the region.
    let region = unsafe { pd.register_raw(memory.raw().address() as *mut u8, 64, Access::LOCAL_WRITE) }.unwrap();
    // SAFETY: as above.
    let error = error_of(unsafe { region.reregister(Reregistration::new().pd(&other.alloc_pd().unwrap())) });
    assert!(matches!(error, ReregisterError::ForeignContext { .. }), "{error}");
    assert!(error.into_region().is_some_and(|region| region.pd().is_same(&pd)));
}
