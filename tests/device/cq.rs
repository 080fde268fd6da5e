//! Completion queues: creation, fields, and wrapping of the ring.

use rdma_safe::device::Quirks;
use rdma_safe::{Errno, Error, WcFields, WcOpcode, WcStatus};

use crate::support::lab::{Data, Lab, Mode, Op, Wc, Wr, cq_builder, next_ok, post, try_next};
use crate::support::link::Link;
use crate::support::{Rdma, device, error_of, rounds, within_deadline};

#[test]
fn a_queue_is_extended_or_classic_as_requested() {
    let Some(rdma) = device() else { return };
    for mode in [Mode::EXTENDED, Mode::ALL[1]] {
        let cq = cq_builder(&rdma, 100, mode).build().unwrap();
        assert!(cq.capacity() >= 100, "{mode}: {}", cq.capacity());
        assert_eq!(cq.fields(), WcFields::STANDARD);
        if mode.classic_cq || rdma.is_rxe() || rdma.is_soft() {
            assert_eq!(cq.is_extended(), !mode.classic_cq);
            // One does not depend on the other.
            let pd = rdma.pd();
            for classic in [false, true] {
                assert_eq!(pd.queue_pair(&cq, &cq).classic(classic).build().unwrap().is_extended(), !classic, "{mode}");
            }
        }
        assert!(cq.channel().is_none());
    }
}

#[test]
fn a_queue_beyond_the_device_limits_is_refused_and_they_are_named() {
    let Some(rdma) = device() else { return };
    let (max, vectors) = (rdma.attributes().max_cqe(), rdma.completion_vectors());
    for mode in [Mode::EXTENDED, Mode::ALL[1]] {
        for (wanted, vector) in [(0, 0), (max + 1, 0), (u32::MAX, 0), (16, vectors), (16, u32::MAX)] {
            let error = error_of(cq_builder(&rdma, wanted, mode).vector(vector).build());
            let text = error.to_string();
            let Error::CreateCompletionQueue { entries, max_entries, vectors: known, errno } = error else {
                panic!("{mode}, {wanted} entries, vector {vector}: {error:?}");
            };
            assert_eq!((entries, max_entries, known), (wanted, max, vectors), "{mode}");
            assert!(matches!(errno, Errno(libc::EINVAL | libc::ENOMEM)), "{mode}: {errno:?}");
            let limits = format!("1 to {max} entries and completion vectors 0 to {}", vectors - 1);
            assert!(text.contains(&limits), "{text}");
        }
        let largest = cq_builder(&rdma, max, mode).vector(vectors - 1).build().unwrap();
        assert!(largest.capacity() >= max, "{mode}");
    }
}

#[test]
fn fields_that_the_device_cannot_report_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    for fields in [
        WcFields::COMPLETION_TIMESTAMP,
        WcFields::COMPLETION_TIMESTAMP_WALLCLOCK,
        WcFields::CVLAN,
        WcFields::FLOW_TAG,
        WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP,
    ] {
        match rdma.completion_queue(16).fields(fields).build() {
            Ok(cq) => {
                assert!(!rdma.is_rxe(), "SoftRoCE has no {fields:?}");
                assert_eq!(cq.fields(), fields);
            }
            Err(Error::CompletionFields { fields: refused }) => assert_eq!(refused, fields - WcFields::STANDARD),
            Err(error) => panic!("{fields:?}: {error:?}"),
        }
        let error = error_of(rdma.completion_queue(16).fields(fields).classic(true).build());
        let text = error.to_string();
        let Error::CompletionFields { fields: refused } = error else { panic!("classic, {fields:?}: {error:?}") };
        assert_eq!(refused, fields - WcFields::STANDARD, "no classic queue has more than the standard fields");
        assert!(text.contains("cannot report") && text.contains("CompletionQueueBuilder::fields"), "{text}");
    }
}

#[test]
fn endpoint_timestamps_require_a_device_clock() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    match rdma.endpoint(&pd).timestamps(true).build() {
        Ok(_) => assert!(!rdma.is_rxe(), "SoftRoCE has no clock"),
        Err(Error::CompletionFields { fields }) => assert!(fields.contains(WcFields::COMPLETION_TIMESTAMP)),
        Err(error) => panic!("{error:?}"),
    }
}

/// A write to the peer's memory, which causes no completion at the peer.
fn write(lab: &Lab, id: u64) -> Wr<'static> {
    Wr::new(id, Op::Write(lab.b.memory.remote(0)), Data::One(lab.a.memory.sge(0..8)))
}

#[test]
fn a_field_that_was_not_requested_is_none() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let mut cq = rdma.completion_queue(16).fields(WcFields::empty()).build().unwrap();
    if !cq.is_extended() {
        return println!("skipped: {} has no extended completion queues", rdma.device_name());
    }
    let mut bare = lab.pd.queue_pair(&cq, &cq).build().unwrap();
    let link = Link::default();
    lab.b.qp = lab.pd.queue_pair(&lab.b.cq, &lab.b.cq).build().unwrap();
    link.connect(&rdma, &mut bare, lab.b.qp.number()).unwrap();
    link.connect(&rdma, &mut lab.b.qp, bare.number()).unwrap();
    let sge = lab.a.memory.sge(0..64);
    // SAFETY: memory of the lab tolerates any access, and is freed after `bare`, which was created later.
    unsafe { bare.receive(5, sge) }.unwrap();
    lab.b.post(&[Wr::new(6, Op::SendImm(0x0102_0304), Data::One(lab.b.memory.sge(0..32)))]).unwrap();
    let wc = next_ok(&mut cq, 5);
    assert_eq!(wc.opcode, WcOpcode::RECV);
    assert_eq!((wc.byte_len, wc.imm, wc.qp_num, wc.invalidated_rkey), (None, None, None, None));
    let mut poll = cq.poll();
    assert!(poll.next().unwrap().is_none());
    drop(poll);
    let mut full = lab.b.next_ok(6);
    full.wr_id = 0;
    assert_eq!(full.qp_num, Some(lab.b.qp.number()), "a queue with the standard fields reports them");
    drop(bare);
}

#[test]
fn optional_fields_are_none_in_completions_without_them() {
    let Some(rdma) = device() else { return };
    for mode in [Mode::EXTENDED, Mode::ALL[1]] {
        let mut lab = Lab::new(&rdma, mode);
        lab.a.post(&[write(&lab, 1)]).unwrap();
        within_deadline("a completion", || {
            let mut poll = lab.a.cq.poll();
            let wc = poll.next().unwrap()?;
            assert_eq!((wc.wr_id(), wc.status(), wc.opcode()), (1, WcStatus::SUCCESS, WcOpcode::RDMA_WRITE), "{mode}");
            wc.ok().unwrap();
            assert_eq!(wc.completion_timestamp(), None, "{mode}");
            assert_eq!(wc.completion_wallclock_ns(), None, "{mode}");
            assert_eq!(
                (wc.cvlan(), wc.flow_tag(), wc.imm(), wc.invalidated_rkey()),
                (None, None, None, None),
                "{mode}"
            );
            assert_eq!(wc.qp_num(), Some(lab.a.qp.number()), "{mode}");
            Some(())
        });
    }
}

/// How a test polls.
#[derive(Clone, Copy, Debug)]
enum PollStyle {
    /// One completion per cursor.
    Single,
    /// A few completions per cursor. The others are left for the next cursor.
    Few(usize),
    /// All completions until the queue is empty.
    UntilEmpty,
}

/// Takes completions and checks that they come in order.
fn take(lab: &mut Lab, style: PollStyle, next: &mut u64) {
    let limit = match style {
        PollStyle::Single => 1,
        PollStyle::Few(count) => count,
        PollStyle::UntilEmpty => usize::MAX,
    };
    let mut poll = lab.a.cq.poll();
    for _ in 0..limit {
        let Some(wc) = poll.next().unwrap() else {
            assert!(poll.next().unwrap().is_none(), "an exhausted cursor stays exhausted");
            break;
        };
        let wc = Wc::from(wc);
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (*next, WcStatus::SUCCESS, WcOpcode::RDMA_WRITE), "{wc:?}");
        *next += 1;
    }
}

/// Posts `total` writes with a completion queue of `entries`, with at most that many in flight.
fn wrap(rdma: &Rdma, mode: Mode, entries: u32, total: u64) {
    let mut lab = Lab::builder(rdma, mode).entries(entries).depth(entries).build();
    let room = u64::from(entries);
    let (mut posted, mut next) = (0_u64, 0_u64);
    let styles =
        [PollStyle::Single, PollStyle::UntilEmpty, PollStyle::Few(2), PollStyle::UntilEmpty, PollStyle::Few(5)];
    for round in 0.. {
        if next == total {
            break;
        }
        // Bursts of all sizes from one to the capacity, so that the ring is empty, full and partly full at every position.
        let burst = (round % room + 1).min(room - (posted - next)).min(total - posted);
        let wrs: Vec<Wr<'_>> = (posted..posted + burst).map(|id| write(&lab, id)).collect();
        lab.a.post(&wrs).unwrap();
        posted += burst;
        let style = styles[round as usize % styles.len()];
        // Every third burst completes as a whole before the next is posted.
        let wanted = if round % 3 == 0 { posted } else { (next + 1).min(posted) };
        within_deadline("completions", || {
            take(&mut lab, style, &mut next);
            (next >= wanted).then_some(())
        });
    }
    assert_eq!(try_next(&mut lab.a.cq), None, "no completion is repeated");
    assert_eq!((posted, next), (total, total));
}

/// The SoftRoCE provider before rdma-core 55 corrupts its ring when `ibv_next_poll` finds it empty.
#[test]
fn an_extended_queue_that_wraps_loses_and_repeats_nothing() {
    let Some(rdma) = device() else { return };
    if rdma.is_rxe() {
        let fixed = rdma_safe::sys::verbs().unwrap().ibv_alloc_dmah.is_some();
        assert_eq!(rdma.quirks().contains(Quirks::ONE_COMPLETION_PER_POLL), !fixed);
    }
    wrap(&rdma, Mode::EXTENDED, 7, rounds(3000, 30));
    wrap(&rdma, Mode { classic_qp: true, classic_cq: false }, 1, rounds(200, 5));
}

#[test]
fn a_classic_queue_that_wraps_loses_and_repeats_nothing() {
    let Some(rdma) = device() else { return };
    wrap(&rdma, Mode::ALL[1], 7, rounds(3000, 30));
    wrap(&rdma, Mode::CLASSIC, 1, rounds(200, 5));
}

#[test]
fn completions_left_by_one_cursor_are_returned_by_the_next() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let wrs: Vec<Wr<'_>> = (0..20).map(|id| write(&lab, id)).collect();
        lab.a.post(&wrs).unwrap();
        for id in 0..20 {
            // Each cursor is dropped after one completion, and every fifth is forgotten.
            let wc = within_deadline("a completion", || {
                let mut poll = lab.a.cq.poll();
                let wc = poll.next().unwrap().map(Wc::from);
                if id % 5 == 0 {
                    std::mem::forget(poll);
                }
                wc
            });
            assert_eq!((wc.wr_id, wc.status), (id, WcStatus::SUCCESS), "{mode}");
        }
        assert_eq!(try_next(&mut lab.a.cq), None, "{mode}");
    }
}

#[test]
fn completions_of_a_shared_queue_name_their_queue_pair() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let link = Link::default();
        // A second connection. Both of its ends complete to the queue of `a`.
        let builder = Lab::builder(&rdma, mode);
        let make = || builder.qp_builder(lab.pd.queue_pair(&lab.a.cq, &lab.a.cq)).build().unwrap();
        let (mut c, mut d) = (make(), make());
        link.connect(&rdma, &mut c, d.number()).unwrap();
        link.connect(&rdma, &mut d, c.number()).unwrap();
        let wr = write(&lab, 1);
        post(c.send_batch(), &[wr]).unwrap();
        let wc = lab.a.next_ok(1);
        assert_eq!(wc.qp_num, Some(c.number()), "{mode}");
        post(d.send_batch(), &[wr]).unwrap();
        assert_eq!(lab.a.next_ok(1).qp_num, Some(d.number()), "{mode}");
        lab.a.post(&[wr]).unwrap();
        assert_eq!(lab.a.next_ok(1).qp_num, Some(lab.a.qp.number()), "{mode}");
    }
}
