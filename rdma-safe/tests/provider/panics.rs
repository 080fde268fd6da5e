//! Closures that panic while they use a completion or a batch lose only this completion or batch.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rdma_safe::interface::{Classic, Extended, Interface};
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Endpoint, Operation, ProtectionDomain, WcStatus, Work};

use crate::fake::{Config, Fake, Mode};
use crate::support::{
    CLASSIC, EXTENDED, builder, connect, done, endpoints, in_flight, nothing, on_each_interface, one_under_miri,
};

fn tagged(pd: &ProtectionDomain, tag: usize) -> Buffer {
    pd.allocate(tag).unwrap()
}

/// Takes a completion in a closure that panics; returns the number of its work.
fn lose<I: Interface>(endpoint: &mut Endpoint<I>) -> u64 {
    let mut seen = None;
    let taken = catch_unwind(AssertUnwindSafe(|| {
        endpoint.poll_with(|completion| -> () {
            seen = Some(completion.buffer.as_ref().map_or(0, |buffer| buffer.capacity() as u64));
            resume_unwind(Box::new(()))
        })
    }));
    assert!(taken.is_err(), "there was a completion");
    seen.unwrap()
}

#[test]
fn a_panicking_closure_takes_only_the_completion_it_was_given() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for tag in 101..=104 {
            b.receive(tagged(&pd, tag)).unwrap();
        }
        let before = fake.live().mrs;
        for tag in 1..=4 {
            a.send(tagged(&pd, tag)).unwrap();
        }
        assert_eq!((lose(&mut a), lose(&mut b)), (1, 101));
        assert_eq!((lose(&mut a), lose(&mut b)), (2, 102));
        assert_eq!(done(&mut a).buffer.unwrap().len(), 3);
        assert_eq!(done(&mut b).buffer.unwrap().len(), 3);
        assert_eq!((lose(&mut a), lose(&mut b)), (4, 104));
        nothing(&mut a);
        nothing(&mut b);
        assert_eq!(fake.live().mrs, before - 4, "each buffer was dropped once");
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
        a.send(tagged(&pd, 5)).unwrap();
        b.receive(tagged(&pd, 105)).unwrap();
        assert_eq!(done(&mut b).byte_len, 5);
        assert_eq!(done(&mut a).buffer.unwrap().len(), 5);
    });
}

#[test]
fn a_panic_keeps_other_work_that_the_same_completion_released() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for _ in 0..6 {
            b.receive(tagged(&pd, 100)).unwrap();
        }
        a.post(Work::send(tagged(&pd, 1)).unsignaled()).unwrap();
        a.post(Work::send_inline(b"silent").unsignaled()).unwrap();
        a.post(Work::send(tagged(&pd, 2)).unsignaled()).unwrap();
        a.send(tagged(&pd, 3)).unwrap();
        assert_eq!(lose(&mut a), 1);
        // More completions arrive while some remain to be handed out.
        a.send(tagged(&pd, 4)).unwrap();
        a.post(Work::send(tagged(&pd, 5)).unsignaled()).unwrap();
        assert_eq!(lose(&mut a), 2);
        assert_eq!(lose(&mut a), 3);
        assert_eq!(done(&mut a).buffer.unwrap().len(), 4);
        nothing(&mut a);
        assert_eq!(in_flight(&a), (1, 0));
        assert_eq!(a.close().unwrap().len(), 1);
    });
}

#[test]
fn panics_over_immediate_invalidated_and_flushed_work_keep_the_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE).unwrap();
        let revoked = pd.expose(Pages::new(8).unwrap(), Access::REMOTE).unwrap();
        for tag in 101..=105 {
            b.receive(tagged(&pd, tag)).unwrap();
        }
        a.post(Work::write_inline(b"imm", exposed.remote()).imm(7)).unwrap();
        a.post(Work::send_invalidate(tagged(&pd, 1), revoked.remote().rkey)).unwrap();
        a.post(Work::send(tagged(&pd, 2)).imm(9)).unwrap();
        assert_eq!((lose(&mut b), lose(&mut b), lose(&mut b)), (101, 102, 103));
        assert_eq!((lose(&mut a), lose(&mut a), lose(&mut a)), (0, 1, 2));
        fake.break_qp(b.queue_pair().number());
        assert_eq!(lose(&mut b), 104);
        let flushed = b.poll().unwrap().unwrap();
        assert_eq!((flushed.status, flushed.buffer.unwrap().capacity()), (WcStatus::WR_FLUSH_ERR, 105));
        nothing(&mut b);
    });
}

#[test]
fn a_panic_ends_the_poll_of_an_endpoint_with_a_fixed_interface() {
    fn run<I: Interface>(fake: &Fake, pd: &ProtectionDomain, mut a: Endpoint<I>, mut b: Endpoint) {
        b.receive(tagged(pd, 9)).unwrap();
        a.send(tagged(pd, 1)).unwrap();
        a.send(tagged(pd, 2)).unwrap();
        assert_eq!(lose(&mut a), 1);
        b.receive(tagged(pd, 9)).unwrap();
        let second = a.poll().unwrap().unwrap();
        assert_eq!((second.operation, second.buffer.unwrap().len()), (Operation::Send, 2));
        assert_eq!(fake.calls("start_poll") == 0, fake.calls("ibv_poll_cq") > 0);
    }
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(3).build().unwrap();
        let mut b = builder(&pd, interfaces).build().unwrap();
        connect(&mut a, &mut b);
        match a.with_interface::<Extended>() {
            Ok(a) => run::<Extended>(&fake, &pd, a, b),
            Err(a) => run::<Classic>(&fake, &pd, a.with_interface::<Classic>().unwrap(), b),
        }
    }
}

#[test]
fn a_panic_while_a_batch_is_filled_posts_nothing_and_drops_its_buffers() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let before = fake.live().mrs;
        let filled = catch_unwind(AssertUnwindSafe(|| {
            let mut batch = a.batch().unwrap();
            batch.add(Work::send(tagged(&pd, 1)).unsignaled()).unwrap();
            batch.add(Work::send(tagged(&pd, 2))).unwrap();
            resume_unwind(Box::new(()))
        }));
        assert!(filled.is_err());
        assert_eq!((fake.live().mrs, in_flight(&a)), (before, (0, 0)));
        fake.set_mode(Mode::AtPoll);
        b.receive(tagged(&pd, 9)).unwrap();
        a.send(tagged(&pd, 3)).unwrap();
        assert_eq!(done(&mut b).byte_len, 3);
        assert_eq!(done(&mut a).buffer.unwrap().len(), 3);
    });
}
