//! Access flags of regions, in every combination, and wrong local keys.

use rdma_safe::{Access, Errno, Error, ProtectionDomain, RawMemoryRegion, Result, Sge, WcStatus};

use crate::support::lab::{self, Data, Lab, MEMORY, Memory, Mode, Op, Wr};
use crate::support::{device, error_of, pattern};

/// Memory that outlives its registrations.
struct Page(Box<[u8]>);

impl Page {
    fn register(&mut self, pd: &ProtectionDomain, access: Access) -> Result<RawMemoryRegion> {
        // SAFETY: no work request uses the memory, and the tests keep it until after the region is deregistered.
        unsafe { pd.register_raw(self.0.as_mut_ptr(), self.0.len(), access) }
    }
}

#[test]
fn every_combination_of_access_flags_registers_except_remote_writes_without_local_write() {
    let Some(rdma) = device() else { return };
    let (pd, mut page) = (rdma.pd(), Page(vec![0; 4096].into()));
    for bits in 0..16 {
        // The four lowest bits are local write, remote write, remote read and remote atomic.
        for access in [Access::from_bits_retain(bits), Access::from_bits_retain(bits) | Access::RELAXED_ORDERING] {
            let changes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            match page.register(&pd, access) {
                Ok(region) => {
                    assert!(!changes || access.contains(Access::LOCAL_WRITE), "{access:?}");
                    assert!(!access.intersects(Access::REMOTE) || region.rkey() != 0, "{access:?}");
                    region.deregister().unwrap();
                }
                Err(Error::RegisterMemory { access: refused, errno: Errno(libc::EINVAL), .. }) => {
                    assert!(changes && !access.contains(Access::LOCAL_WRITE) && refused == access, "{access:?}");
                }
                Err(error) => panic!("{access:?}: {error}"),
            }
        }
    }
}

#[test]
fn an_unknown_access_flag_is_refused_and_an_unknown_optional_one_is_ignored() {
    let Some(rdma) = device() else { return };
    let (pd, mut page) = (rdma.pd(), Page(vec![0; 4096].into()));
    let error = error_of(page.register(&pd, Access::LOCAL_WRITE | Access::from_bits_retain(1 << 15)));
    assert!(matches!(error, Error::RegisterMemory { errno: Errno(libc::EINVAL), .. }), "{error}");
    assert!(error.explain().is_some_and(|cause| cause.contains("unsupported flags")), "{error}");
    // A bit of IBV_ACCESS_OPTIONAL_RANGE.
    page.register(&pd, Access::LOCAL_WRITE | Access::from_bits_retain(1 << 28)).unwrap().deregister().unwrap();
}

#[test]
fn regions_with_relaxed_ordering_support_every_operation() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let relaxed = Access::LOCAL_WRITE | Access::REMOTE | Access::RELAXED_ORDERING;
        for side in [&mut lab.a, &mut lab.b] {
            side.memory = Memory::with_access(&lab.pd, MEMORY, relaxed);
        }
        let bytes = pattern(3, 5000);
        lab.a.memory.put(0, &bytes);
        lab.b.receive(1, 10_000..20_000).unwrap();
        let from = Data::One(lab.a.memory.sge(0..5000));
        lab.a.post(&[Wr::new(2, Op::Send, from), Wr::new(3, Op::Write(lab.b.memory.remote(20_000)), from)]).unwrap();
        lab.b.next_ok(1);
        for id in [2, 3] {
            lab.a.next_ok(id);
        }
        assert!(lab.b.memory.get(10_000..15_000) == bytes && lab.b.memory.get(20_000..25_000) == bytes, "{mode}");
        lab.b.memory.put_u64(0, 40);
        let word = Data::One(lab.a.memory.sge(30_000..30_008));
        let read = Op::Read(lab.b.memory.remote(20_000));
        lab.a.post(&[Wr::new(4, Op::FetchAdd(lab.b.memory.remote(0), 2), word)]).unwrap();
        lab.a.next_ok(4);
        lab.a.post(&[Wr::new(5, read, Data::One(lab.a.memory.sge(40_000..45_000)))]).unwrap();
        lab.a.next_ok(5);
        assert_eq!((lab.a.memory.get_u64(30_000), lab.b.memory.get_u64(0)), (40, 42), "{mode}");
        assert!(lab.a.memory.get(40_000..45_000) == bytes, "{mode}");
    }
}

#[test]
fn a_wrong_lkey_fails_locally_for_every_operation() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for index in 0..5 {
            let mut lab = Lab::new(&rdma, mode);
            lab.b.memory.put_u64(0, 5);
            lab.b.receive(9, 64..128).unwrap();
            let to = lab.b.memory.remote(0);
            let ops = [Op::Send, Op::Write(to), Op::Read(to), Op::FetchAdd(to, 1), Op::CompareSwap(to, 5, 6)];
            let sge = lab.a.memory.sge(0..8);
            lab.a.post(&[Wr::new(1, ops[index], Data::One(Sge { lkey: sge.lkey ^ 0xff, ..sge }))]).unwrap();
            let wc = lab.a.next();
            assert_eq!(wc.wr_id, 1, "{mode}: {:?}", ops[index]);
            // SoftRoCE deviates from IBTA and reports the latter for data that it cannot send.
            let known = [WcStatus::LOC_PROT_ERR, lab::local_failure(&rdma)];
            assert!(known.contains(&wc.status), "{mode}: {:?}: {wc:?}", ops[index]);
            assert_eq!(lab.a.memory.get_u64(0), 0, "{mode}: the local memory is unchanged");
            // The peer executes an atomic before the missing destination of its result is noticed.
            if index < 3 {
                assert_eq!(lab.b.memory.get_u64(0), 5, "{mode}: {:?}", ops[index]);
            }
        }
    }
}

#[test]
fn a_receive_with_a_wrong_lkey_fails_at_both_ends() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let sge = lab.b.memory.sge(0..64);
        // SAFETY: the key belongs to no region, so the device cannot access memory with it.
        unsafe { lab.b.qp.receive(1, Sge { lkey: sge.lkey ^ 0xff, ..sge }) }.unwrap();
        lab.a.memory.put(0, b"nowhere!");
        lab.a.post(&[Wr::new(2, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        let (sent, received) = (lab.a.next(), lab.b.next());
        assert_eq!((sent.wr_id, received.wr_id), (2, 1), "{mode}");
        assert!(matches!(received.status, WcStatus::LOC_PROT_ERR | WcStatus::LOC_QP_OP_ERR), "{mode}: {received:?}");
        assert_eq!(sent.status, WcStatus::REM_OP_ERR, "{mode}");
        assert_eq!(lab.b.memory.get(0..8), [0; 8], "{mode}");
    }
}
