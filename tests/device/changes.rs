//! Changes of what exists, and kinds of memory that not every device has.

use std::time::Duration;

use rdma_safe::{Access, Error, ReregisterError, Reregistration};

use crate::support::lab::{Data, Lab, Memory, Mode, Op, Wr};
use crate::support::{device, error_of, within_deadline};

/// Takes completions of the first end, which are there in this order.
#[track_caller]
fn take(lab: &mut Lab, ids: std::ops::Range<u64>) {
    for id in ids {
        lab.a.next_ok(id);
    }
}

#[test]
fn a_completion_queue_grows_and_shrinks_and_keeps_what_is_in_it() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = Lab::builder(&rdma, mode).entries(7).depth(64).build();
        let (remote, local) = (lab.b.memory.remote(0), lab.a.memory.sge(0..8));
        let write = |lab: &mut Lab, ids: std::ops::Range<u64>| {
            for id in ids {
                lab.a.post(&[Wr::new(id, Op::Write(remote), Data::One(local))]).unwrap();
            }
        };
        // The ring has wrapped.
        write(&mut lab, 0..5);
        take(&mut lab, 0..5);
        write(&mut lab, 5..10);
        lab.a.next_ok(5);
        lab.a.cq.resize(50).unwrap();
        assert!(lab.a.cq.capacity() >= 50, "{mode}: {}", lab.a.cq.capacity());
        write(&mut lab, 10..50);
        take(&mut lab, 6..50);
        lab.a.cq.resize(9).unwrap();
        assert!(lab.a.cq.capacity() >= 9);
        write(&mut lab, 50..57);
        take(&mut lab, 50..57);
    }
}

#[test]
fn a_size_that_a_completion_queue_cannot_have_is_refused() {
    const READ: u64 = 0x0123_4567_89ab_cdef;
    let Some(rdma) = device() else { return };
    let max = rdma.attributes().max_cqe();
    for mode in Mode::ALL {
        let mut lab = Lab::builder(&rdma, mode).entries(40).depth(64).build();
        let capacity = lab.a.cq.capacity();
        let (remote, local) = (lab.b.memory.remote(0), Data::One(lab.a.memory.sge(0..8)));
        (0..29).for_each(|id| lab.a.post(&[Wr::new(id, Op::Write(remote), local)]).unwrap());
        lab.b.memory.put_u64(8, READ);
        let read = Op::Read(lab.b.memory.remote(8));
        lab.a.post(&[Wr::new(29, read, Data::One(lab.a.memory.sge(8..16)))]).unwrap();
        lab.a.next_ok(0);
        for entries in [0, max + 1, u32::MAX] {
            let error = lab.a.cq.resize(entries).unwrap_err();
            assert!(matches!(error, Error::ResizeCompletionQueue { max_entries, .. } if max_entries == max), "{error}");
        }
        // When the read has its data, all writes have completed. To shrink the queue before that would let it overrun.
        within_deadline("data of the read", || (lab.a.memory.get_u64(8) == READ).then_some(()));
        let error = lab.a.cq.resize(3).unwrap_err();
        assert!(matches!(error, Error::ResizeCompletionQueue { entries: 3, .. }), "{mode}: {error}");
        assert_eq!(lab.a.cq.capacity(), capacity);
        take(&mut lab, 1..30);
    }
}

#[test]
fn what_the_device_cannot_change_or_register_is_refused_by_name() {
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
    // No DMA-BUF: of a device that knows them this is an error of its own.
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    // SAFETY: it is refused.
    match error_of(unsafe { pd.register_dmabuf(&file, 0, 4096, 0, Access::LOCAL_WRITE) }) {
        error @ Error::Unsupported { .. } => refused(error),
        error => assert!(!rdma.is_rxe() && matches!(error, Error::RegisterDmaBuf { .. }), "{error:?}"),
    }
}

#[test]
fn a_registration_changes_or_stays_as_it_was() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    let memory = Memory::new(&lab.pd, 64);
    // SAFETY: memory of a `Memory`, which tolerates any access, and which is freed after the queue pairs.
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
