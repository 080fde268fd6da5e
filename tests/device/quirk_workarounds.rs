//! Workarounds for the faults of SoftRoCE in rdma-core 44 and of bnxt_re, on a soft0 that reports their vendors.

use rdma_safe::device::Quirks;
use rdma_safe::{Errno, PostError, WcStatus};

use crate::support::interposer::rig::{done, endpoints};
use crate::support::interposer::{Config, Interposed, interposed_with};
use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::{RXE, error_of, filled};

/// Vendor of bnxt_re.
const BROADCOM: u32 = 0x14e4;

/// A soft0 that reports this vendor, if any.
fn of_vendor(vendor_id: Option<u32>) -> Option<Interposed> {
    interposed_with(Config { vendor_id, ..Config::default() })
}

#[test]
fn sends_use_post_send_if_extended_sends_are_broken() {
    let Some(soft) = of_vendor(Some(BROADCOM)) else { return };
    assert_eq!(soft.quirks(), Quirks::EXTENDED_SENDS_BROKEN);
    let pd = soft.pd();
    let (mut a, mut b) = endpoints(&soft, &pd, Mode::EXTENDED);
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.send(filled(&pd, b"abc")).unwrap();
    assert_eq!(&done(&mut b).buffer.unwrap()[..], b"abc");
    let calls = (soft.calls("create_qp_ex"), soft.calls("wr_start"), soft.calls("ibv_post_send"));
    assert_eq!(calls, (0, 0, 1));
}

/// The doorbell of rxe is a system call, which may fail with ENOMEM after the work was added to the queue.
#[test]
fn enomem_leaves_the_work_in_doubt_if_the_doorbell_can_fail() {
    for (vendor, taken, expected) in [
        (Some(RXE), true, PostError::MaybePosted { errno: Errno(libc::ENOMEM) }),
        (None, false, PostError::QueueFull { posted: 0 }),
    ] {
        let Some(soft) = of_vendor(vendor) else { return };
        let pd = soft.pd();
        // The peer has no receive, so the send stays in flight.
        let (mut a, _b) = endpoints(&soft, &pd, Mode::EXTENDED);
        soft.fail_wr_complete(libc::ENOMEM, taken);
        let rejected = a.send(pd.allocate(3).unwrap()).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.is_some()), (expected, !taken));
        assert_eq!(a.close().unwrap().len(), usize::from(taken));
    }
    let Some(soft) = of_vendor(Some(RXE)) else { return };
    let pd = soft.pd();
    let (mut a, _b) = endpoints(&soft, &pd, Mode::EXTENDED);
    soft.fail_wr_complete(libc::ENOSPC, false);
    let rejected = a.send(pd.allocate(3).unwrap()).unwrap_err();
    assert_eq!((rejected.error, rejected.buffer.is_some()), (PostError::QueueFull { posted: 0 }, true));
}

#[test]
fn inline_lists_are_concatenated_if_the_provider_sends_them_empty() {
    for (vendor, setter) in [(Some(RXE), "inline_data"), (None, "inline_data_list")] {
        let Some(soft) = of_vendor(vendor) else { return };
        let mut lab = Lab::builder(&soft, Mode::EXTENDED).inline(64).build();
        lab.b.receive(1, 0..16).unwrap();
        lab.a.post(&[Wr::new(1, Op::Send, Data::InlineList(&[b"to", b"gether", b"!"]))]).unwrap();
        assert_eq!(lab.b.next_ok(1).byte_len, Some(9));
        assert_eq!(lab.b.memory.get(0..9), b"together!");
        let posted = soft.take_posted();
        assert_eq!((posted[0].setter, posted[0].len, posted[0].verb), (setter, 9, "ibv_wr_complete"));
    }
}

#[test]
fn each_inline_list_of_a_batch_keeps_its_bytes() {
    for vendor in [Some(RXE), None] {
        let Some(soft) = of_vendor(vendor) else { return };
        let mut lab = Lab::builder(&soft, Mode::EXTENDED).inline(64).build();
        for id in 0..3 {
            lab.b.receive(id as u64, id * 8..id * 8 + 8).unwrap();
        }
        lab.a
            .post(&[
                Wr::new(1, Op::Send, Data::InlineList(&[b"on", b"e"])),
                Wr::new(2, Op::Send, Data::Inline(b"two")),
                Wr::new(3, Op::Send, Data::InlineList(&[b"thr", b"ee"])),
            ])
            .unwrap();
        (0..3).for_each(|id| _ = lab.b.next_ok(id));
        assert_eq!(lab.b.memory.get(0..3), b"one");
        assert_eq!(lab.b.memory.get(8..11), b"two");
        assert_eq!(lab.b.memory.get(16..21), b"three");
    }
}

#[test]
fn element_lists_use_post_send_if_the_provider_miscounts_them() {
    for (vendor, extended) in [(Some(RXE), false), (None, true)] {
        let Some(soft) = of_vendor(vendor) else { return };
        let single = Lab::builder(&soft, Mode::EXTENDED).sges(1).build();
        assert!(single.a.qp.is_extended(), "a single element is counted correctly");
        let mut lab = Lab::builder(&soft, Mode::EXTENDED).sges(2).build();
        assert_eq!(lab.a.qp.is_extended(), extended);
        lab.b.receive(1, 0..200).unwrap();
        lab.a.memory.put(0, &[7; 108]);
        let list = [lab.a.memory.sge(0..8), lab.a.memory.sge(8..108)];
        lab.a.post(&[Wr::new(1, Op::Send, Data::List(&list))]).unwrap();
        assert_eq!(lab.b.next_ok(1).byte_len, Some(108), "8 and 100 bytes are not 16");
        assert_eq!(lab.b.memory.get(0..108), [7; 108]);
    }
}

#[test]
fn inline_data_always_has_the_inline_flag() {
    for vendor in [Some(RXE), None] {
        for mode in [Mode::EXTENDED, Mode::CLASSIC] {
            let Some(soft) = of_vendor(vendor) else { return };
            let pd = soft.pd();
            let (mut a, mut b) = endpoints(&soft, &pd, mode);
            b.receive(pd.allocate(8).unwrap()).unwrap();
            b.receive(pd.allocate(8).unwrap()).unwrap();
            a.send_inline(b"inline").unwrap();
            a.send(pd.allocate(2).unwrap()).unwrap();
            let flags: Vec<_> = soft.take_posted().iter().map(|posted| posted.flags).collect();
            assert_eq!(flags, [2 | 8, 2], "the flag is cleared for the next work request");
            assert_eq!(done(&mut a).status, WcStatus::SUCCESS);
            assert_eq!(&done(&mut b).buffer.unwrap()[..], b"inline");
        }
    }
}

#[test]
fn a_smaller_shared_queue_is_not_requested_where_a_refusal_frees_it() {
    for (vendor, is_requested) in [(Some(RXE), false), (None, true)] {
        let Some(soft) = of_vendor(vendor) else { return };
        let mut srq = soft.pd().shared_receive_queue(8).build().unwrap();
        let resized = srq.resize(4);
        assert_eq!(soft.calls("ibv_modify_srq"), usize::from(is_requested));
        match is_requested {
            true => resized.unwrap(),
            false => {
                assert!(error_of(resized).to_string().contains("the queue has 8, and on this device it can only grow"))
            }
        }
        assert_eq!(srq.max_wr(), if is_requested { 4 } else { 8 });
        srq.resize(16).unwrap();
        assert_eq!(srq.max_wr(), 16);
    }
}
