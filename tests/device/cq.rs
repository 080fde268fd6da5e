//! Completion queues: creation, fields, and rings that wrap.

use rdma_safe::{Errno, Error, Quirks, WcFields, WcOpcode, WcStatus};

use crate::support::lab::{Data, Lab, Mode, Op, Wc, Wr, cq_builder, next_ok, post, try_next};
use crate::support::link::Link;
use crate::support::{Rdma, device, error_of, within_deadline};

#[test]
fn a_queue_is_extended_or_classic_as_asked() {
    let Some(rdma) = device() else { return };
    for mode in [Mode::ALL[0], Mode::ALL[1]] {
        let cq = cq_builder(&rdma, 100, mode).build().unwrap();
        assert!(cq.capacity() >= 100, "{mode}: {}", cq.capacity());
        assert_eq!(cq.fields(), WcFields::STANDARD);
        if mode.classic_cq || rdma.is_rxe() {
            assert_eq!(cq.is_extended(), !mode.classic_cq);
        }
        assert!(cq.channel().is_none());
    }
}

#[test]
fn a_queue_beyond_the_limits_of_the_device_is_refused_with_them() {
    let Some(rdma) = device() else { return };
    let (max, vectors) = (rdma.attributes().max_cqe(), rdma.completion_vectors());
    for mode in [Mode::ALL[0], Mode::ALL[1]] {
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
fn an_endpoint_notes_timestamps_where_the_device_has_a_clock() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    match rdma.endpoint(&pd).timestamps(true).build() {
        Ok(_) => assert!(!rdma.is_rxe(), "SoftRoCE has no clock"),
        Err(Error::CompletionFields { fields }) => assert!(fields.contains(WcFields::COMPLETION_TIMESTAMP)),
        Err(error) => panic!("{error:?}"),
    }
}

/// A write to the peer's memory, whose completion the peer does not see.
fn write(lab: &Lab, id: u64) -> Wr<'static> {
    Wr::new(id, Op::Write(lab.b.memory.remote(0)), Data::One(lab.a.memory.sge(0..8)))
}

#[test]
fn a_field_that_was_not_asked_for_cannot_be_read() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    let mut cq = rdma.completion_queue(16).fields(WcFields::empty()).build().unwrap();
    if !cq.is_extended() {
        return;
    }
    let mut bare = lab.pd.queue_pair(&cq, &cq).build().unwrap();
    let link = Link::default();
    lab.b.qp = lab.pd.queue_pair(&lab.b.cq, &lab.b.cq).build().unwrap();
    link.connect(&rdma, &mut bare, lab.b.qp.number()).unwrap();
    link.connect(&rdma, &mut lab.b.qp, bare.number()).unwrap();
    let sge = lab.a.memory.sge(0..64);
    // SAFETY: memory of the lab tolerates any access, and is freed after the queue pairs here: `bare` was made after it.
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
    assert_eq!(full.qp_num, Some(lab.b.qp.number()), "the standard fields are there where they were asked for");
    drop(bare);
}

#[test]
fn optional_fields_are_none_in_completions_without_them() {
    let Some(rdma) = device() else { return };
    for mode in [Mode::ALL[0], Mode::ALL[1]] {
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

/// How a test takes completions out.
#[derive(Clone, Copy, Debug)]
enum Taking {
    /// One to a cursor.
    Single,
    /// A few to a cursor; the rest stays for the next.
    Few(usize),
    /// All there are, until the queue says that it is empty.
    UntilEmpty,
}

/// Takes completions, each of which must be the next in order.
fn take(lab: &mut Lab, taking: Taking, next: &mut u64) {
    let most = match taking {
        Taking::Single => 1,
        Taking::Few(count) => count,
        Taking::UntilEmpty => usize::MAX,
    };
    let mut poll = lab.a.cq.poll();
    for _ in 0..most {
        let Some(wc) = poll.next().unwrap() else {
            assert!(poll.next().unwrap().is_none(), "an exhausted cursor stays exhausted");
            break;
        };
        let wc = Wc::from(wc);
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (*next, WcStatus::SUCCESS, WcOpcode::RDMA_WRITE), "{wc:?}");
        *next += 1;
    }
}

/// Sends `total` writes through a completion queue of `entries`, never more at a time than it holds.
fn wrap(rdma: &Rdma, mode: Mode, entries: u32, total: u64) {
    let mut lab = Lab::builder(rdma, mode).entries(entries).depth(entries).build();
    let room = u64::from(entries);
    let (mut posted, mut next) = (0_u64, 0_u64);
    let ways = [Taking::Single, Taking::UntilEmpty, Taking::Few(2), Taking::UntilEmpty, Taking::Few(5)];
    for round in 0.. {
        if next == total {
            break;
        }
        // From one work request at a time to as many as there is room for, so that the ring is emptied, filled, and
        // anything in between, at every position.
        let burst = (round % room + 1).min(room - (posted - next)).min(total - posted);
        let wrs: Vec<Wr<'_>> = (posted..posted + burst).map(|id| write(&lab, id)).collect();
        lab.a.post(&wrs).unwrap();
        posted += burst;
        let way = ways[round as usize % ways.len()];
        // Every third burst is left to fill the ring first.
        let wanted = if round % 3 == 0 { posted } else { (next + 1).min(posted) };
        within_deadline("completions", || {
            take(&mut lab, way, &mut next);
            (next >= wanted).then_some(())
        });
    }
    assert_eq!(try_next(&mut lab.a.cq), None, "nothing is repeated");
    assert_eq!((posted, next), (total, total));
}

/// SoftRoCE's provider before rdma-core 55 breaks its ring when `ibv_next_poll` finds it empty.
#[test]
fn a_ring_that_wraps_many_times_loses_and_repeats_nothing_extended() {
    let Some(rdma) = device() else { return };
    if rdma.is_rxe() {
        let fixed = rdma_safe::sys::verbs().unwrap().ibv_alloc_dmah.is_some();
        assert_eq!(rdma.quirks().contains(Quirks::ONE_COMPLETION_PER_POLL), !fixed);
    }
    wrap(&rdma, Mode::ALL[0], 7, 3000);
    wrap(&rdma, Mode::ALL[2], 1, 200);
}

#[test]
fn a_ring_that_wraps_many_times_loses_and_repeats_nothing_classic() {
    let Some(rdma) = device() else { return };
    wrap(&rdma, Mode::ALL[1], 7, 3000);
    wrap(&rdma, Mode::ALL[3], 1, 200);
}

#[test]
fn completions_of_a_batch_that_a_cursor_left_behind_are_there_for_the_next() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = Lab::new(&rdma, mode);
        let wrs: Vec<Wr<'_>> = (0..20).map(|id| write(&lab, id)).collect();
        lab.a.post(&wrs).unwrap();
        for id in 0..20 {
            // A cursor each, dropped after one completion; every fifth is forgotten instead.
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
fn queue_pairs_that_share_a_completion_queue_are_told_apart_by_number() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = Lab::new(&rdma, mode);
        let link = Link::default();
        // A second connection whose both ends complete to the queue of the first one's end `a`.
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
