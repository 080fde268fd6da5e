//! The raw API: every operation on every combination of interfaces.

use std::ops::Range;

use rdma_safe::{SendFlags, SendOps, Sge, WcFlags, WcOpcode, WcStatus};

use crate::support::lab::{Data, Lab, Memory, Mode, Op, Wr, add, cq_builder, next_ok, post, try_next};
use crate::support::link::Link;
use crate::support::{Rdma, device, pattern};

/// Runs `body` on every combination of interfaces.
fn on_every_interface(body: impl Fn(&Rdma, Mode)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        body(&rdma, mode);
    }
}

#[test]
fn the_requested_interfaces_are_used() {
    on_every_interface(|rdma, mode| {
        let lab = Lab::new(rdma, mode);
        if rdma.is_rxe() {
            assert_eq!(lab.a.qp.is_extended(), !mode.classic_qp);
            assert_eq!(lab.a.cq.is_extended(), !mode.classic_cq);
        }
        assert!(!mode.classic_qp || !lab.a.qp.is_extended());
        assert!(!mode.classic_cq || !lab.a.cq.is_extended());
    });
}

#[test]
fn a_send_delivers_its_bytes() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        for (id, len) in [(1, 1), (2, 63), (3, 4096), (4, 4097), (5, 30_000)] {
            lab.b.memory.put(0, &[0xaa; 40_000]);
            lab.b.receive(id, 100..40_000).unwrap();
            lab.a.memory.put(7, &pattern(id, len));
            lab.a.post(&[Wr::new(id + 100, Op::Send, Data::One(lab.a.memory.sge(7..7 + len)))]).unwrap();
            let received = lab.b.next_ok(id);
            assert_eq!((received.opcode, received.byte_len), (WcOpcode::RECV, Some(len as u32)));
            assert_eq!((received.imm, received.qp_num), (None, Some(lab.b.qp.number())));
            assert!(!received.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV));
            let sent = lab.a.next_ok(id + 100);
            assert_eq!((sent.opcode, sent.qp_num), (WcOpcode::SEND, Some(lab.a.qp.number())));
            assert!(lab.b.memory.get(100..100 + len) == pattern(id, len), "{len} bytes");
            assert_eq!(lab.b.memory.get(99..100), [0xaa], "bytes before the buffer are unchanged");
            assert_eq!(lab.b.memory.get(100 + len..101 + len), [0xaa], "bytes after the message are unchanged");
        }
    });
}

#[test]
fn a_send_carries_immediate_data_in_host_order() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        for (id, imm) in [(1, 0x0102_0304), (2, 0), (3, u32::MAX)] {
            lab.b.receive(id, 0..64).unwrap();
            lab.a.memory.put(0, &pattern(id, 5));
            lab.a.post(&[Wr::new(id, Op::SendImm(imm), Data::One(lab.a.memory.sge(0..5)))]).unwrap();
            let received = lab.b.next_ok(id);
            assert_eq!((received.opcode, received.byte_len), (WcOpcode::RECV, Some(5)));
            assert_eq!(received.imm, Some(imm));
            assert_eq!(lab.b.memory.get(0..5), pattern(id, 5));
            lab.a.next_ok(id);
        }
    });
}

#[test]
fn a_write_reaches_exactly_the_bytes_it_names() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        for (id, len, offset) in [(1, 1, 3), (2, 4096, 0), (3, 10_000, 12_345)] {
            lab.b.memory.put(0, &[0x55; 40_000]);
            lab.a.memory.put(0, &pattern(id, len));
            let op = Op::Write(lab.b.memory.remote(offset));
            lab.a.post(&[Wr::new(id, op, Data::One(lab.a.memory.sge(0..len)))]).unwrap();
            let wc = lab.a.next_ok(id);
            assert_eq!(wc.opcode, WcOpcode::RDMA_WRITE);
            let mut expected = vec![0x55; 40_000];
            expected[offset..offset + len].copy_from_slice(&pattern(id, len));
            assert!(lab.b.memory.get(0..40_000) == expected, "{len} bytes at {offset}");
            assert_eq!(try_next(&mut lab.b.cq), None, "a write causes no completion at the peer");
        }
    });
}

#[test]
fn a_write_with_immediate_completes_a_receive_and_leaves_its_buffer_alone() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        lab.b.memory.put(1000, &[0x77; 64]);
        lab.b.receive(9, 1000..1064).unwrap();
        lab.a.memory.put(0, &pattern(4, 500));
        let op = Op::WriteImm(lab.b.memory.remote(2000), 0xcafe_0001);
        lab.a.post(&[Wr::new(1, op, Data::One(lab.a.memory.sge(0..500)))]).unwrap();
        let wc = lab.b.next_ok(9);
        assert_eq!((wc.opcode, wc.imm, wc.byte_len), (WcOpcode::RECV_RDMA_WITH_IMM, Some(0xcafe_0001), Some(500)));
        assert_eq!(lab.a.next_ok(1).opcode, WcOpcode::RDMA_WRITE);
        assert_eq!(lab.b.memory.get(2000..2500), pattern(4, 500));
        assert_eq!(lab.b.memory.get(1000..1064), [0x77; 64]);
    });
}

#[test]
fn a_read_fetches_the_bytes_of_the_peer() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        for (id, len) in [(1, 1), (2, 4097), (3, 20_000)] {
            lab.b.memory.put(500, &pattern(id, len));
            lab.a.memory.put(0, &[0x33; 30_000]);
            let op = Op::Read(lab.b.memory.remote(500));
            lab.a.post(&[Wr::new(id, op, Data::One(lab.a.memory.sge(10..10 + len)))]).unwrap();
            let wc = lab.a.next_ok(id);
            assert_eq!(wc.opcode, WcOpcode::RDMA_READ);
            assert!(lab.a.memory.get(10..10 + len) == pattern(id, len), "{len} bytes");
            assert_eq!(lab.a.memory.get(9..10), [0x33]);
            assert_eq!(lab.a.memory.get(10 + len..11 + len), [0x33]);
        }
    });
}

#[test]
fn compare_and_swap_replaces_only_what_it_expects() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        lab.b.memory.put_u64(64, 0x1122_3344_5566_7788);
        for (id, compare, swap, old, new) in [
            (1, 0x1122_3344_5566_7788, 42, 0x1122_3344_5566_7788, 42),
            (2, 41, 99, 42, 42),
            (3, 42, u64::MAX, 42, u64::MAX),
        ] {
            let op = Op::CompareSwap(lab.b.memory.remote(64), compare, swap);
            lab.a.memory.put_u64(8, 0);
            lab.a.post(&[Wr::new(id, op, Data::One(lab.a.memory.sge(8..16)))]).unwrap();
            assert_eq!(lab.a.next_ok(id).opcode, WcOpcode::COMP_SWAP);
            assert_eq!((lab.a.memory.get_u64(8), lab.b.memory.get_u64(64)), (old, new));
        }
        assert_eq!(lab.b.memory.get(56..64), [0; 8], "neighbouring words are unchanged");
        assert_eq!(lab.b.memory.get(72..80), [0; 8]);
    });
}

#[test]
fn fetch_and_add_returns_the_old_value() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        lab.b.memory.put_u64(0, 10);
        for (id, add, old, new) in [(1, 5, 10, 15), (2, 0, 15, 15), (3, u64::MAX, 15, 14)] {
            let op = Op::FetchAdd(lab.b.memory.remote(0), add);
            lab.a.post(&[Wr::new(id, op, Data::One(lab.a.memory.sge(16..24)))]).unwrap();
            assert_eq!(lab.a.next_ok(id).opcode, WcOpcode::FETCH_ADD);
            assert_eq!((lab.a.memory.get_u64(16), lab.b.memory.get_u64(0)), (old, new));
        }
    });
}

#[test]
fn inline_data_of_any_length_is_copied_when_posted() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::builder(rdma, mode).inline(256).build();
        let max = lab.a.qp.capacity().max_inline_data as usize;
        assert!(max >= 256);
        for (id, len) in [(1, 0), (2, 1), (3, 255), (4, max)] {
            lab.b.memory.put(0, &[0xaa; 2048]);
            lab.b.receive(id, 0..2048).unwrap();
            let mut bytes = pattern(id, len);
            lab.a.post(&[Wr::new(id, Op::Send, Data::Inline(&bytes))]).unwrap();
            bytes.fill(0);
            let wc = lab.b.next_ok(id);
            assert_eq!(wc.byte_len, Some(len as u32));
            assert_eq!(lab.b.memory.get(0..len), pattern(id, len));
            assert_eq!(lab.b.memory.get(len..len + 1), [0xaa]);
            lab.a.next_ok(id);

            // The same data in writes, without and with immediate data.
            let mut bytes = pattern(id + 50, len);
            let to = lab.b.memory.remote(3000);
            lab.b.receive(id + 10, 0..1).unwrap();
            lab.a
                .post(&[
                    Wr::new(id + 20, Op::Write(to), Data::Inline(&bytes)),
                    Wr::new(id + 30, Op::WriteImm(lab.b.memory.remote(6000), len as u32), Data::Inline(&bytes)),
                ])
                .unwrap();
            bytes.fill(0);
            let wc = lab.b.next_ok(id + 10);
            assert_eq!((wc.imm, wc.byte_len), (Some(len as u32), Some(len as u32)));
            lab.a.next_ok(id + 20);
            lab.a.next_ok(id + 30);
            assert_eq!(lab.b.memory.get(3000..3000 + len), pattern(id + 50, len));
            assert_eq!(lab.b.memory.get(6000..6000 + len), pattern(id + 50, len));
        }
    });
}

#[test]
fn an_inline_list_arrives_as_one_message() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::builder(rdma, mode).inline(200).build();
        let many = [[1_u8], [2]].repeat(20);
        let many: Vec<&[u8]> = many.iter().map(|piece| &piece[..]).collect();
        let lists: [&[&[u8]]; 5] = [&[], &[b""], &[b"one"], &[b"head", b"", b"er", &[7; 150]], &many];
        for (id, list) in (1..).zip(lists) {
            lab.b.receive(id, 0..1000).unwrap();
            lab.a.post(&[Wr::new(id, Op::Send, Data::InlineList(list))]).unwrap();
            let expected = list.concat();
            assert_eq!(lab.b.next_ok(id).byte_len, Some(expected.len() as u32), "list {id}");
            assert_eq!(lab.b.memory.get(0..expected.len()), expected, "list {id}");
            lab.a.next_ok(id);
        }
    });
}

/// `count` elements of different lengths, with gaps, in descending order. Also returns their ranges and total length.
fn scattered(memory: &Memory, count: usize) -> (Vec<Sge>, Vec<Range<usize>>, usize) {
    let ranges: Vec<_> = (0..count).rev().map(|index| index * 300 + 5..index * 300 + 5 + 9 * (index + 1)).collect();
    let sges = ranges.iter().map(|range| memory.sge(range.clone())).collect();
    let len = ranges.iter().map(ExactSizeIterator::len).sum();
    (sges, ranges, len)
}

#[test]
fn lists_of_elements_are_gathered_and_scattered_in_order() {
    on_every_interface(|rdma, mode| {
        let max = rdma.attributes().max_sge().min(30) as usize;
        for count in [0, 1, 2, 3, max] {
            // As many elements as the queue pair allows, and fewer.
            for made_for in [count.max(1), max] {
                let mut lab = Lab::builder(rdma, mode).sges(made_for as u32).build();
                assert!(lab.a.qp.capacity().max_send_sge as usize >= made_for);
                let (from, sources, len) = scattered(&lab.a.memory, count);
                let (to, targets, _) = scattered(&lab.b.memory, count);
                let message = pattern(count as u64, len);
                let mut rest = &message[..];
                for range in sources {
                    let (part, behind) = rest.split_at(range.len());
                    lab.a.memory.put(range.start, part);
                    rest = behind;
                }
                // A send from a list to a list.
                lab.b.receive_batch(&[(1, &to)]).unwrap();
                lab.a.post(&[Wr::new(1, Op::Send, Data::List(&from))]).unwrap();
                assert_eq!(lab.b.next_ok(1).byte_len, Some(len as u32), "{count} of {made_for}");
                lab.a.next_ok(1);
                let received: Vec<u8> = targets.iter().flat_map(|range| lab.b.memory.get(range.clone())).collect();
                assert!(received == message, "{count} elements of {made_for}, sent");
                // A write from a list.
                lab.a.post(&[Wr::new(2, Op::Write(lab.b.memory.remote(40_000)), Data::List(&from))]).unwrap();
                lab.a.next_ok(2);
                assert!(lab.b.memory.get(40_000..40_000 + len) == message, "{count} elements of {made_for}, written");
                // A read into a list.
                lab.b.memory.put(50_000, &pattern(77, len));
                lab.a.post(&[Wr::new(3, Op::Read(lab.b.memory.remote(50_000)), Data::List(&from))]).unwrap();
                lab.a.next_ok(3);
                let (_, sources, _) = scattered(&lab.a.memory, count);
                let read: Vec<u8> = sources.iter().flat_map(|range| lab.a.memory.get(range.clone())).collect();
                assert!(read == pattern(77, len), "{count} elements of {made_for}, read");
            }
        }
    });
}

#[test]
fn empty_messages_complete_at_both_ends() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let (nothing, to) = (lab.a.memory.sge(0..0), lab.b.memory.remote(0));
        for (id, data) in [(1, Data::One(nothing)), (2, Data::One(Sge::EMPTY)), (3, Data::List(&[]))] {
            lab.b.memory.put(0, &[9; 64]);
            lab.b.receive(id, 0..64).unwrap();
            lab.b.receive(id + 10, 0..64).unwrap();
            lab.a
                .post(&[
                    Wr::new(id, Op::SendImm(id as u32), data),
                    Wr::new(id + 10, Op::WriteImm(to, 77), data),
                    Wr::new(id + 20, Op::Write(to), data),
                    Wr::new(id + 30, Op::Read(to), data),
                ])
                .unwrap();
            let wc = lab.b.next_ok(id);
            assert_eq!((wc.byte_len, wc.imm), (Some(0), Some(id as u32)));
            let wc = lab.b.next_ok(id + 10);
            assert_eq!((wc.byte_len, wc.imm), (Some(0), Some(77)));
            for id in [id, id + 10, id + 20, id + 30] {
                lab.a.next_ok(id);
            }
            assert_eq!(lab.b.memory.get(0..64), [9; 64]);
        }
    });
}

#[test]
fn a_batch_of_mixed_operations_executes_in_order() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::builder(rdma, mode).inline(16).build();
        lab.a.memory.put(0, &pattern(1, 100));
        lab.b.memory.put_u64(1024, 5);
        for id in 0..3 {
            lab.b.receive(id, id as usize * 200 + 2000..id as usize * 200 + 2200).unwrap();
        }
        let (a, b) = (&lab.a.memory, &lab.b.memory);
        let from = Data::One(a.sge(0..100));
        let wrs = [
            Wr::new(10, Op::Send, from),
            Wr::new(11, Op::Write(b.remote(0)), from),
            Wr::new(12, Op::Read(b.remote(0)), Data::One(a.sge(200..300))),
            Wr::new(13, Op::FetchAdd(b.remote(1024), 1), Data::One(a.sge(400..408))),
            Wr::new(14, Op::SendImm(8), Data::Inline(b"inline")),
            Wr::new(15, Op::CompareSwap(b.remote(1024), 6, 60), Data::One(a.sge(408..416))),
            Wr::new(16, Op::WriteImm(b.remote(500), 9), from),
        ];
        lab.a.post(&wrs).unwrap();
        for id in 10..17 {
            lab.a.next_ok(id);
        }
        assert_eq!((lab.b.next_ok(0).byte_len, lab.b.memory.get(2000..2100)), (Some(100), pattern(1, 100)));
        assert_eq!((lab.b.next_ok(1).imm, lab.b.memory.get(2200..2206)), (Some(8), b"inline".to_vec()));
        assert_eq!(lab.b.next_ok(2).imm, Some(9));
        assert_eq!(lab.b.memory.get(0..100), pattern(1, 100));
        assert_eq!(lab.a.memory.get(200..300), pattern(1, 100), "the read returns the bytes of the earlier write");
        assert_eq!((lab.a.memory.get_u64(400), lab.a.memory.get_u64(408)), (5, 6));
        assert_eq!(lab.b.memory.get_u64(1024), 60);
        assert_eq!(lab.b.memory.get(500..600), pattern(1, 100));
    });
}

#[test]
fn only_signaled_work_completes() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let quiet = |id, op, range| Wr::new(id, op, Data::One(range)).flags(SendFlags::empty());
        for round in 0..10_u64 {
            lab.a.memory.put(0, &pattern(round, 64));
            let (from, to) = (lab.a.memory.sge(0..64), |at| lab.b.memory.remote(at));
            let mut wrs: Vec<Wr<'_>> = (0..7).map(|n| quiet(n, Op::Write(to(n as usize * 64)), from)).collect();
            wrs.push(Wr::new(100 + round, Op::Write(to(7 * 64)), Data::One(from)));
            lab.a.post(&wrs).unwrap();
            lab.a.next_ok(100 + round);
            assert_eq!(lab.b.memory.get(0..512), pattern(round, 64).repeat(8), "all earlier work is done");
        }
        assert_eq!(try_next(&mut lab.a.cq), None);
    });
}

#[test]
fn fenced_work_waits_for_the_read_before_it() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let len = 20_000;
        for round in 0..5 {
            lab.a.memory.put(0, &vec![0; len]);
            lab.b.memory.put(0, &pattern(round, len));
            lab.b.receive(round, 30_000..30_000 + len).unwrap();
            let (local, remote) = (Data::One(lab.a.memory.sge(0..len)), lab.b.memory.remote(0));
            let fenced = SendFlags::SIGNALED | SendFlags::FENCE;
            lab.a.post(&[Wr::new(1, Op::Read(remote), local), Wr::new(2, Op::Send, local).flags(fenced)]).unwrap();
            lab.b.next_ok(round);
            assert!(
                lab.b.memory.get(30_000..30_000 + len) == pattern(round, len),
                "the send carries the bytes that were read"
            );
            lab.a.next_ok(1);
            lab.a.next_ok(2);
        }
    });
}

#[test]
fn receives_of_one_batch_are_filled_in_order() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::builder(rdma, mode).sges(2).build();
        let parts: Vec<[Sge; 2]> = (0..20_usize)
            .map(|n| [lab.b.memory.sge(n * 100..n * 100 + 10), lab.b.memory.sge(n * 100 + 50..n * 100 + 90)])
            .collect();
        let receives: Vec<(u64, &[Sge])> = (0..).zip(&parts).map(|(id, sges)| (id, &sges[..])).collect();
        lab.b.receive_batch(&receives).unwrap();
        for id in 0..20_u64 {
            lab.a.memory.put(0, &pattern(id, 30));
            lab.a.post(&[Wr::new(id, Op::Send, Data::One(lab.a.memory.sge(0..30)))]).unwrap();
            lab.a.next_ok(id);
            assert_eq!(lab.b.next_ok(id).byte_len, Some(30));
            let at = id as usize * 100;
            let received = [lab.b.memory.get(at..at + 10), lab.b.memory.get(at + 50..at + 70)].concat();
            assert_eq!(received, pattern(id, 30));
        }
    });
}

#[test]
fn both_directions_work_at_the_same_time() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        for round in 0..20 {
            for (side, seed) in [(&mut lab.a, round), (&mut lab.b, round + 1000)] {
                side.memory.put(0, &pattern(seed, 5000));
                side.receive(1, 10_000..15_000).unwrap();
            }
            for side in [&mut lab.a, &mut lab.b] {
                side.post(&[Wr::new(2, Op::Send, Data::One(side.memory.sge(0..5000)))]).unwrap();
            }
            for (side, seed) in [(&mut lab.a, round + 1000), (&mut lab.b, round)] {
                let mut ids = [side.next().wr_id, side.next().wr_id];
                ids.sort_unstable();
                assert_eq!(ids, [1, 2]);
                assert!(side.memory.get(10_000..15_000) == pattern(seed, 5000));
            }
        }
    });
}

/// One thread sends and another receives on the two halves of a queue pair, and the peer echoes.
#[test]
fn two_threads_use_one_queue_each() {
    on_every_interface(|rdma, mode| {
        const ROUNDS: u64 = 100;
        const ECHO: u64 = 1 << 32;
        // Echoes do not wait for each other, so the queues must have room for all.
        let builder = Lab::builder(rdma, mode).depth(ROUNDS as u32).entries(2 * ROUNDS as u32);
        let mut lab = builder.connected(false).build();
        let (mut send_cq, mut recv_cq) =
            (cq_builder(rdma, 64, mode).build().unwrap(), cq_builder(rdma, 64, mode).build().unwrap());
        let mut qp = builder.qp_builder(lab.pd.queue_pair(&send_cq, &recv_cq)).build().unwrap();
        let link = Link::default();
        link.connect(rdma, &mut qp, lab.b.qp.number()).unwrap();
        link.connect(rdma, &mut lab.b.qp, qp.number()).unwrap();
        let (from, into) = (lab.a.memory.sge(0..64), lab.a.memory.sge(4096..4160));
        let (mut sends, mut receives) = qp.split();
        // SAFETY: memory of the lab tolerates any access and is freed after `qp`, which was created later.
        unsafe { receives.receive(0, into) }.unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for id in 0..ROUNDS {
                    post(sends.batch(), &[Wr::new(id, Op::SendImm(id as u32), Data::One(from))]).unwrap();
                    next_ok(&mut send_cq, id);
                }
            });
            scope.spawn(|| {
                for id in 0..ROUNDS {
                    assert_eq!(next_ok(&mut recv_cq, id).imm, Some(id as u32 + 1));
                    // SAFETY: the same as above.
                    unsafe { receives.receive(id + 1, into) }.unwrap();
                }
            });
            lab.b.receive(0, 0..64).unwrap();
            for id in 0..ROUNDS {
                // Skips completions of echoes.
                let received = std::iter::repeat_with(|| lab.b.next()).find(|wc| wc.wr_id < ECHO).unwrap();
                assert_eq!((received.wr_id, received.status), (id, WcStatus::SUCCESS));
                let imm = received.imm.unwrap();
                lab.b.receive(id + 1, 0..64).unwrap();
                let from = Data::One(lab.b.memory.sge(64..128));
                lab.b.post(&[Wr::new(ECHO + id, Op::SendImm(imm + 1), from)]).unwrap();
            }
        });
    });
}

#[test]
fn a_dropped_batch_posts_nothing() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::builder(rdma, mode).inline(16).build();
        lab.b.receive(1, 0..64).unwrap();
        lab.b.receive(2, 0..64).unwrap();
        let to = lab.b.memory.remote(1000);
        for forget in [false, true] {
            lab.a.memory.put(0, b"dropped!");
            let mut batch = lab.a.qp.send_batch().unwrap();
            let from = Data::One(lab.a.memory.sge(0..8));
            add(&mut batch, Wr::new(100, Op::Send, from)).unwrap();
            add(&mut batch, Wr::new(101, Op::Write(to), from)).unwrap();
            add(&mut batch, Wr::new(102, Op::Write(to), Data::Inline(b"inline"))).unwrap();
            assert_eq!(batch.len(), 3);
            // A forgotten batch leaves the provider's lock held until the next batch.
            if forget {
                std::mem::forget(batch)
            } else {
                drop(batch)
            }

            lab.a.memory.put(0, b"sent yes");
            let id = 1 + u64::from(forget);
            lab.a.post(&[Wr::new(id, Op::Send, from)]).unwrap();
            assert_eq!(lab.a.next_ok(id).opcode, WcOpcode::SEND, "the first completion is of the first posted work");
            assert_eq!(lab.b.next_ok(id).byte_len, Some(8));
            assert_eq!(lab.b.memory.get(0..8), b"sent yes");
            assert_eq!(lab.b.memory.get(1000..1008), [0; 8], "dropped work writes nothing");
        }
        // An empty batch posts nothing.
        lab.a.post(&[]).unwrap();
        lab.b.receive_batch(&[]).unwrap();
        assert_eq!((try_next(&mut lab.a.cq), try_next(&mut lab.b.cq)), (None, None));
    });
}

#[test]
fn a_dropped_batch_of_receives_posts_nothing() {
    on_every_interface(|rdma, mode| {
        let mut lab = Lab::new(rdma, mode);
        let mut batch = lab.b.qp.recv_batch().unwrap();
        // SAFETY: memory of the lab tolerates any access and outlives its queue pair.
        unsafe { batch.receive(7, &[lab.b.memory.sge(0..64)]) }.unwrap();
        assert_eq!((batch.len(), batch.is_empty()), (1, false));
        drop(batch);
        lab.b.receive(8, 64..128).unwrap();
        lab.a.memory.put(0, b"message");
        lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..7)))]).unwrap();
        lab.b.next_ok(8);
        lab.a.next_ok(1);
        assert_eq!((lab.b.memory.get(0..7), lab.b.memory.get(64..71)), (vec![0; 7], b"message".to_vec()));
    });
}

#[test]
fn a_queue_pair_supports_the_enabled_operations() {
    on_every_interface(|rdma, mode| {
        for ops in [SendOps::SEND, SendOps::RDMA_WRITE | SendOps::SEND, SendOps::BASIC, SendOps::RC] {
            let mut lab = Lab::builder(rdma, mode).ops(ops).build();
            assert_eq!(lab.a.qp.operations(), ops);
            lab.b.receive(1, 0..64).unwrap();
            lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..3)))]).unwrap();
            lab.a.next_ok(1);
            lab.b.next_ok(1);
        }
    });
}
