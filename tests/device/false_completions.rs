//! A provider that invents completions. Each buffer comes back at most once, and nothing panics.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rdma_safe::sys::*;
use rdma_safe::{Buffer, Work};

use crate::support::in_flight;
use crate::support::interposer::rig::{builder, cq_of};
use crate::support::interposer::{Config, interposed_with};
use crate::support::lab::Mode;
use crate::support::link::connected;

#[derive(Clone, Debug)]
enum Step {
    Send {
        signaled: bool,
        inline: bool,
    },
    Read,
    Receive,
    Stage,
    Poll,
    Release,
    /// A false completion of the send or receive at this offset from the oldest sequence number in flight.
    Invent {
        receive: bool,
        distance: i64,
        status: u32,
        opcode: u32,
        flags: u32,
        byte_len: u32,
    },
    Repeat,
}

fn step() -> impl Strategy<Value = Step> {
    let status = [IBV_WC_SUCCESS.0, IBV_WC_SUCCESS.0, IBV_WC_WR_FLUSH_ERR.0, IBV_WC_RETRY_EXC_ERR.0, 999];
    let opcode = [IBV_WC_SEND.0, IBV_WC_RECV.0, IBV_WC_RECV_RDMA_WITH_IMM.0, u32::MAX];
    let invent = (
        any::<bool>(),
        prop_oneof![4 => -2_i64..12, 1 => any::<i64>()],
        prop::sample::select(status.to_vec()),
        prop::sample::select(opcode.to_vec()),
        prop::sample::select(&[0, 1, 2, 3, 4, 8, u32::MAX][..]),
        prop::sample::select(&[0, 1, 8, 1 << 30, u32::MAX][..]),
    );
    prop_oneof![
        4 => (any::<bool>(), any::<bool>()).prop_map(|(signaled, inline)| Step::Send { signaled, inline }),
        1 => Just(Step::Read),
        3 => Just(Step::Receive),
        1 => Just(Step::Stage),
        6 => Just(Step::Poll),
        2 => Just(Step::Release),
        4 => invent.prop_map(|(receive, distance, status, opcode, flags, byte_len)| {
            Step::Invent { receive, distance, status, opcode, flags, byte_len }
        }),
        1 => Just(Step::Repeat),
    ]
}

fn run(steps: &[Step], mode: Mode, depth: u32, timestamps: bool) {
    let further_fields = u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0);
    let Some(soft) = interposed_with(Config { further_fields, ..Config::default() }) else { return };
    let pd = soft.pd();
    let timestamps = timestamps && !mode.classic_cq;
    let ends = builder(&soft, &pd, mode).send_depth(depth).recv_depth(depth).timestamps(timestamps);
    let (mut a, _b) = connected(ends);
    soft.hold();
    let exposed = pd.expose(rdma_safe::mr::Pages::new(8).unwrap(), rdma_safe::Access::REMOTE).unwrap();
    let cq = cq_of(a.queue_pair());
    let (mut next, mut posted, mut back) = (0, BTreeSet::new(), Vec::<Buffer>::new());
    let mut lied = ibv_wc::zeroed();
    let mut oldest = [1_i64, 1];
    for step in steps {
        next += 1;
        let buffer = || pd.allocate(7 + next).unwrap();
        match step {
            Step::Send { signaled, inline } => {
                let work = if *inline { Work::send_inline(b"x") } else { Work::send(buffer()) };
                let done = a.post(if *signaled { work } else { work.unsignaled() });
                posted.extend((done.is_ok() && !inline).then_some(7 + next));
            }
            Step::Read => {
                let mut target = buffer();
                target.set_len(8).unwrap();
                posted.extend(a.read(target, exposed.remote()).is_ok().then_some(7 + next));
            }
            Step::Receive => posted.extend(a.receive(buffer()).is_ok().then_some(7 + next)),
            Step::Stage => {
                if let Ok(mut batch) = a.batch() {
                    let _ = batch.add(Work::send_inline(b"never"));
                    std::mem::forget(batch);
                }
            }
            Step::Poll => {
                // An error is fine, even if it reports an overrun.
                if let Ok(Some(completion)) = a.poll() {
                    oldest[usize::from(completion.id.is_receive())] += 1;
                    back.extend(completion.buffer);
                }
            }
            Step::Release => {
                soft.release();
                soft.hold();
            }
            Step::Invent { receive, distance, status, opcode, flags, byte_len } => {
                let sequence = oldest[usize::from(*receive)].wrapping_add(*distance) as u64;
                let wr_id = sequence ^ u64::from(*receive) << 63;
                lied = ibv_wc {
                    wr_id,
                    status: ibv_wc_status(*status),
                    opcode: ibv_wc_opcode(*opcode),
                    wc_flags: *flags,
                    byte_len: *byte_len,
                    ..ibv_wc::zeroed()
                };
                soft.inject(cq, lied);
            }
            Step::Repeat => soft.inject(cq, lied),
        }
        let (sends, receives) = in_flight(&a);
        assert!(sends <= depth.into() && receives <= depth.into());
    }
    back.extend(a.close().unwrap());
    let mut tags: Vec<_> = back.iter().map(Buffer::capacity).collect();
    tags.sort_unstable();
    assert_eq!(tags, posted.into_iter().collect::<Vec<_>>());
    for buffer in &back {
        assert!(buffer.len() <= buffer.capacity());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn each_buffer_comes_back_once_despite_false_completions(
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 30 } else { 100 }),
        classic_cq in any::<bool>(),
        classic_qp in any::<bool>(),
        depth in 1_u32..9,
        timestamps in any::<bool>(),
    ) {
        run(&steps, Mode { classic_qp, classic_cq }, depth, timestamps);
    }
}
