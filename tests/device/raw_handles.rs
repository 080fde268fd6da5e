//! Objects of other code, made by the table of verbs on the device, adopted, used, and given up.

use std::ptr::{NonNull, null_mut};

use rdma_safe::sys::*;
use rdma_safe::{
    Access, CompletionChannel, CompletionQueue, Context, Error, ProtectionDomain, QueuePair, QueuePairState,
    RawMemoryRegion, SendOps, Sge, WcFields, WcStatus, WorkRequest,
};

use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::{Mode, next_ok};
use crate::support::link::Link;
use crate::support::{DEADLINE, Rdma, device, error_of};

#[track_caller]
fn made<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).unwrap_or_else(|| panic!("{}", std::io::Error::last_os_error()))
}

/// Opens the device of the tests as a program in C does.
fn open(rdma: &Rdma) -> Context {
    let table = verbs().unwrap();
    // SAFETY: the device is that of an open context; what is opened is given away.
    unsafe { Context::from_raw(made((table.ibv_open_device)((*rdma.as_raw()).device))) }.unwrap()
}

fn create_cq(context: &Context, classic: bool, channel: &CompletionChannel) -> CompletionQueue {
    let table = verbs().unwrap();
    // SAFETY: the context and the channel are valid; the queue is given away as what it was made.
    unsafe {
        let raw = if classic {
            made((table.ibv_create_cq)(context.as_raw(), 16, null_mut(), channel.as_raw(), 0))
        } else {
            let mut attr = ibv_cq_init_attr_ex {
                cqe: 16,
                channel: channel.as_raw(),
                wc_flags: WcFields::STANDARD.bits(),
                ..std::mem::zeroed()
            };
            made(ibv_create_cq_ex(context.as_raw(), &mut attr)).cast()
        };
        context.completion_queue(0).classic(classic).channel(channel).from_raw(raw).unwrap()
    }
}

fn create_qp(pd: &ProtectionDomain, cq: &CompletionQueue, ops: Option<SendOps>) -> NonNull<ibv_qp> {
    let mut attr = ibv_qp_init_attr_ex::zeroed();
    (attr.send_cq, attr.recv_cq, attr.pd, attr.qp_type) = (cq.as_raw(), cq.as_raw(), pd.as_raw(), IBV_QPT_RC);
    attr.cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 16 };
    attr.comp_mask = IBV_QP_INIT_ATTR_PD.0;
    if let Some(ops) = ops {
        attr.send_ops_flags = ops.bits();
        attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
    }
    // SAFETY: the domain and the queue are valid.
    made(unsafe { ibv_create_qp_ex(pd.context().as_raw(), &mut attr) })
}

/// Sends eight bytes from one half of the memory to the other, over a queue pair that is connected to itself.
fn send(qp: &mut QueuePair, cq: &mut CompletionQueue, mr: &RawMemoryRegion, id: u64) {
    let sge = |at: u64, len| Sge { address: mr.address() + at, len, lkey: mr.lkey() };
    // SAFETY: the memory stays until the queue pair is gone, and is accessed by volatile reads and writes only.
    unsafe {
        let memory = std::ptr::with_exposed_provenance_mut::<u64>(mr.address() as usize);
        memory.write_volatile(id);
        qp.receive(id, sge(2048, 64)).unwrap();
        let mut batch = qp.send_batch().unwrap();
        batch.send(WorkRequest::new(id).signaled(), sge(0, 8)).unwrap();
        batch.post().unwrap();
        for _ in 0..2 {
            assert_eq!(next_ok(cq, id).status, WcStatus::SUCCESS);
        }
        assert_eq!(memory.add(2048 / 8).read_volatile(), id);
    }
}

#[test]
fn objects_of_other_code_carry_messages_and_are_destroyed_once() {
    let Some(rdma) = device() else { return };
    in_own_process("raw_handles::objects_of_other_code_carry_messages_and_are_destroyed_once", || {
        let table = verbs().unwrap();
        for mode in Mode::ALL {
            let mut page = vec![0_u8; 4096].into_boxed_slice();
            // SAFETY: each object was just made with those it is said to belong to; the page goes after all of them.
            unsafe {
                let context = open(&rdma);
                let pd = ProtectionDomain::from_raw(&context, made((table.ibv_alloc_pd)(context.as_raw())));
                let access = Access::LOCAL_WRITE.bits() as i32;
                let mr = made((table.ibv_reg_mr)(pd.as_raw(), page.as_mut_ptr().cast(), 4096, access));
                let mr = RawMemoryRegion::from_raw(&pd, mr);
                let _ = page.as_mut_ptr().expose_provenance();
                assert_eq!(mr.len(), 4096);
                let channel = made((table.ibv_create_comp_channel)(context.as_raw()));
                let channel = CompletionChannel::from_raw(&context, channel).unwrap();
                let mut cq = create_cq(&context, mode.classic_cq, &channel);
                assert_eq!(cq.is_extended(), !mode.classic_cq);
                let raw = create_qp(&pd, &cq, (!mode.classic_qp).then_some(SendOps::RC));
                let mut qp = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
                assert!(!rdma.is_rxe() || qp.is_extended() != mode.classic_qp, "{mode}");
                assert!(qp.capacity().max_send_wr >= 8 && qp.capacity().max_inline_data >= 16, "{:?}", qp.capacity());
                let number = qp.number();
                Link::default().connect(&rdma, &mut qp, number).unwrap();
                cq.arm(false).unwrap();
                send(&mut qp, &mut cq, &mr, 5);
                assert_eq!(channel.wait(DEADLINE).unwrap(), Some(cq.id()), "{mode}: the event names the adopted queue");

                // Given up, used by other code, and adopted again in the state that it is in.
                let raw = qp.into_raw().unwrap();
                let mut qp = pd.queue_pair(&cq, &cq).classic(mode.classic_qp).from_raw(raw).unwrap();
                assert_eq!(qp.state(), QueuePairState::RTS, "{mode}");
                send(&mut qp, &mut cq, &mr, 6);
                expect_kernel_objects("qp", 1);
                drop((context, pd, channel, cq));
                qp.destroy().unwrap();
                mr.deregister().unwrap();
                for kind in ["qp", "cq", "mr", "pd"] {
                    expect_kernel_objects(kind, 0);
                }
            }
        }
    });
}

#[test]
fn a_queue_pair_of_other_code_needs_what_it_was_made_with() {
    let Some(rdma) = device() else { return };
    let (pd, channel) = (rdma.pd(), rdma.create_channel().unwrap());
    let (cq, other) = (create_cq(&rdma, false, &channel), create_cq(&rdma, true, &channel));
    let raw = create_qp(&pd, &cq, None);
    // SAFETY: what the builders say wrong is refused, and the last one says what it was made with.
    unsafe {
        let error = error_of(pd.queue_pair(&other, &cq).from_raw(raw));
        assert!(matches!(error, Error::WrongParent { object: "completion queue of sends" }), "{error}");
        let error = error_of(rdma.pd().queue_pair(&cq, &cq).from_raw(raw));
        assert!(matches!(error, Error::WrongParent { object: "protection domain" }), "{error}");
        let qp = pd.queue_pair(&cq, &cq).from_raw(raw).unwrap();
        assert!(!qp.is_extended() && qp.as_raw_ex().is_none(), "it was made by ibv_create_qp");
        assert_eq!(channel.try_event().unwrap(), None);
        qp.destroy().unwrap();
    }
}
