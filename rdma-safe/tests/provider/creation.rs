//! Creating queues and queue pairs: replacements for missing functions, and refusals that name their cause.

use rdma_safe::qp::QueuePairCapacity;
use rdma_safe::{Access, Endpoint, Errno, Error, SendOps, WcFields, Work, WorkRequest};

use crate::fake::{Config, Fake, Live};
use crate::support::{CLASSIC, EXTENDED, Raw, connect, done, one_under_miri, post, receive, seen, to_rts};

/// Providers that report a missing function in different ways.
fn lacking() -> Vec<(&'static str, Fake)> {
    let with_fault = |errno| {
        let fake = Fake::new(Config::default());
        fake.fail("create_cq_ex", errno);
        fake.fail("create_qp_ex", libc::EOPNOTSUPP);
        fake
    };
    vec![
        ("no operations", Fake::new(Config::interfaces(false, false))),
        ("no verbs_context", Fake::new(Config { extended_context: false, ..Config::default() })),
        ("EOPNOTSUPP", with_fault(libc::EOPNOTSUPP)),
        ("ENOSYS", with_fault(libc::ENOSYS)),
        ("EINVAL for a field", with_fault(libc::EINVAL)),
    ]
}

#[test]
fn without_the_extended_calls_the_classic_ones_are_used() {
    for (how, fake) in lacking() {
        let pd = fake.pd();
        let inbox = pd.allocate(8).unwrap();
        for fields in [WcFields::STANDARD, WcFields::BYTE_LEN | WcFields::IMM, WcFields::empty()] {
            let make = || {
                let cq = pd.context().completion_queue(8).fields(fields).build().unwrap();
                let qp = pd.queue_pair(&cq, &cq).inline_data(8).build().unwrap();
                assert!(!cq.is_extended() && !qp.is_extended(), "{how}");
                assert!(cq.fields().contains(fields), "{how}");
                assert_eq!(qp.operations(), SendOps::RC | SendOps::WINDOWS);
                Raw { qp, cq }
            };
            let (mut a, mut b) = (make(), make());
            to_rts(&mut a.qp, b.qp.number());
            to_rts(&mut b.qp, a.qp.number());
            receive!(b, 1, inbox.sge()).unwrap();
            post!(a, send(WorkRequest::new(2).signaled(), rdma_safe::Inline(b"classic"));).unwrap();
            assert_eq!(seen(&mut a.cq)[0].wr_id, 2);
            assert_eq!(seen(&mut b.cq)[0].byte_len, Some(7));
        }
        assert_eq!((fake.calls("start_poll"), fake.calls("wr_start")), (0, 0));
    }
}

#[test]
fn endpoints_work_without_the_extended_calls() {
    for (how, fake) in lacking() {
        let pd = fake.pd();
        let small = || Endpoint::builder(&pd).send_depth(4).recv_depth(4);
        let mut a = small().build().unwrap_or_else(|error| panic!("{how}: {error}"));
        let mut b = small().build().unwrap();
        connect(&mut a, &mut b);
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.post(Work::send(pd.allocate(3).unwrap()).imm(7)).unwrap();
        let received = done(&mut b);
        assert_eq!((received.byte_len, received.imm()), (3, Some(7)));
        assert!(!a.queue_pair().is_extended());
    }
}

#[test]
fn fields_that_the_device_cannot_report_are_named() {
    let fake = Fake::new(Config::default());
    let context = fake.open();
    let fields = WcFields::BYTE_LEN | WcFields::COMPLETION_TIMESTAMP;
    let classic = || context.completion_queue(8).fields(fields).classic(true).build();
    let extended = || context.completion_queue(8).fields(fields).build();
    for error in [classic().unwrap_err(), extended().unwrap_err()] {
        assert!(
            matches!(error, Error::CompletionFields { fields: found } if found == WcFields::COMPLETION_TIMESTAMP),
            "{error}"
        );
        assert!(error.to_string().contains("COMPLETION_TIMESTAMP"), "{error}");
    }
    let pd = context.alloc_pd().unwrap();
    let error = Endpoint::builder(&pd).timestamps(true).build().unwrap_err();
    assert!(matches!(error, Error::CompletionFields { .. }), "{error}");
    assert_eq!((fake.live().cqs, fake.live().qps), (0, 0));
}

#[test]
fn an_endpoint_reports_timestamps_if_they_were_requested() {
    let wc_flags = (WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP).bits();
    let fake = Fake::new(Config { wc_flags, ..Config::default() });
    let pd = fake.pd();
    let mut a = Endpoint::builder(&pd).timestamps(true).build().unwrap();
    let mut b = Endpoint::builder(&pd).build().unwrap();
    connect(&mut a, &mut b);
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.send(pd.allocate(3).unwrap()).unwrap();
    assert_eq!((done(&mut a).timestamp, done(&mut b).timestamp), (Some(1_000_001), None));
}

#[test]
fn a_failure_without_errno_is_an_error_that_says_so() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    // A stale errno is not reported as the reason.
    let stale = || std::fs::metadata("/nowhere").unwrap_err();
    for verb in ["create_cq_ex", "ibv_create_cq"] {
        fake.fail(verb, 0);
        stale();
        let builder = pd.context().completion_queue(4);
        let error = builder.classic(verb == "ibv_create_cq").build().unwrap_err();
        assert!(matches!(error, Error::CreateCompletionQueue { errno: Errno(0), .. }), "{error}");
        assert!(error.to_string().contains("gave no reason"), "{error}");
        fake.heal(verb);
    }
    for verb in ["create_qp_ex", "ibv_create_qp"] {
        fake.fail(verb, 0);
        stale();
        let builder = pd.queue_pair(&cq, &cq);
        let error = builder.classic(verb == "ibv_create_qp").build().unwrap_err();
        assert!(matches!(error, Error::CreateQueuePair { errno: Errno(0), .. }), "{error}");
        assert!(error.to_string().contains("gave no reason"), "{error}");
        fake.heal(verb);
    }
}

#[test]
fn a_queue_pair_beyond_the_limits_is_an_error_that_names_them() {
    let fake = Fake::new(Config { max_qp_wr: 50, max_sge: 3, max_inline: 32, ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    for classic in [false, true] {
        let builder = || {
            let builder =
                pd.queue_pair(&cq, &cq).send_depth(50).recv_depth(50).send_sges(3).recv_sges(3).inline_data(32);
            builder.classic(classic)
        };
        let granted = builder().build().unwrap().capacity();
        let expected = QueuePairCapacity {
            max_send_wr: 50,
            max_recv_wr: 50,
            max_send_sge: 3,
            max_recv_sge: 3,
            max_inline_data: 32,
        };
        assert_eq!(granted, expected);
        let beyond = [
            builder().send_depth(51),
            builder().recv_depth(51),
            builder().send_sges(4),
            builder().recv_sges(4),
            builder().inline_data(33),
        ];
        for (builder, asked) in
            beyond.into_iter().zip(["51 sends", "51 receives", "of 4 elements", "of 4 elements", "33 inline"])
        {
            let error = builder.build().unwrap_err();
            assert!(matches!(error, Error::CreateQueuePair { errno: Errno(libc::EINVAL), .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(asked) && text.contains("50 work requests and 3 elements"), "{text}");
        }
    }
    assert_eq!(fake.live().qps, 0);
}

#[test]
fn a_provider_that_lacks_operations_gets_a_queue_pair_without_them() {
    let (all, no_inv, basic) = (SendOps::RC, SendOps::RC.difference(SendOps::SEND_WITH_INV), SendOps::BASIC);
    for has in [all | SendOps::WINDOWS, all, no_inv, basic] {
        let fake = Fake::new(Config { send_ops: has.bits(), ..Config::default() });
        let pd = fake.pd();
        let cq = pd.context().completion_queue(4).build().unwrap();
        let qp = pd.queue_pair(&cq, &cq).build().unwrap();
        assert_eq!((qp.operations(), qp.is_extended()), (has, true));
        let qp = pd.queue_pair(&cq, &cq).operations(SendOps::SEND).build().unwrap();
        assert_eq!((qp.operations(), qp.is_extended()), (SendOps::SEND, true));
    }
    let fake = Fake::new(Config { send_ops: SendOps::SEND.bits(), ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    assert!(!pd.queue_pair(&cq, &cq).build().unwrap().is_extended(), "the classic interface has all operations");
    fake.fail("ibv_create_qp", libc::EOPNOTSUPP);
    let error = pd.queue_pair(&cq, &cq).operations(SendOps::BASIC).build().unwrap_err();
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::BASIC }), "{error}");
}

#[test]
fn an_endpoint_that_cannot_be_built_leaves_nothing_behind() {
    let steps = [
        "query_port",
        "ibv_query_gid_table",
        "ibv_create_comp_channel",
        "create_cq_ex",
        "create_qp_ex",
        "ibv_modify_qp",
    ];
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let build = || {
            Endpoint::builder(&pd)
                .events(true)
                .peer_access(Access::REMOTE)
                .classic_poll(!interfaces.extended_cq)
                .classic_post(!interfaces.extended_qp)
                .build()
        };
        for step in steps {
            let step = match step {
                "create_cq_ex" if !interfaces.extended_cq => "ibv_create_cq",
                "create_qp_ex" if !interfaces.extended_qp => "ibv_create_qp",
                step => step,
            };
            fake.fail(step, libc::EIO);
            let error = build().unwrap_err().to_string();
            assert!(error.contains("Input/output error"), "{step}: {error}");
            assert_eq!(fake.live(), Live { contexts: 1, pds: 1, ..Live::default() }, "{step}");
            fake.heal(step);
            drop(build().unwrap());
        }
    }
}

#[test]
fn an_endpoint_cannot_be_built_on_iwarp() {
    let fake = Fake::new(Config { transport: rdma_sys::IBV_TRANSPORT_IWARP, ..Config::default() });
    let pd = fake.pd();
    let error = Endpoint::builder(&pd).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("iWARP"), "{error}");
    assert_eq!(fake.live().cqs, 0);
}

#[test]
fn an_endpoint_cannot_be_built_where_work_may_complete_in_any_order() {
    let fake = Fake::new(Config { transport: rdma_sys::IBV_TRANSPORT_UNSPECIFIED, ..Config::default() });
    let pd = fake.pd();
    for error in [Endpoint::builder(&pd).build().err(), Endpoint::builder(&pd).build_datagrams(1).err()] {
        let error = error.expect("an error");
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("order"), "{error}");
    }
    assert_eq!(fake.live().cqs, 0);
}
