//! Every operation of a reliable connection through the raw API: bytes and completion fields.

use rdma_safe::mr::Pages;
use rdma_safe::post::InlineList;
use rdma_safe::{Access, Inline, Remote, Sge, WcOpcode, WcStatus, WorkRequest};

use crate::support::{Raw, Seen, on_each_interface, post, raw_pair, receive, seen};

/// A successful completion of `raw`'s queue pair.
fn success(raw: &Raw, wr_id: u64, opcode: WcOpcode, byte_len: u32) -> Seen {
    Seen {
        wr_id,
        status: WcStatus::SUCCESS,
        opcode,
        byte_len: Some(byte_len),
        imm: None,
        invalidated_rkey: None,
        qp_num: Some(raw.qp.number()),
    }
}

#[test]
fn a_send_arrives_in_the_posted_receive() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let mut outbox = pd.allocate(5).unwrap();
        outbox.fill_from(b"hello").unwrap();
        let inbox = pd.allocate(32).unwrap();
        receive!(b, 77, inbox.sge()).unwrap();
        post!(a, send(WorkRequest::new(11).signaled(), outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq), [success(&a, 11, WcOpcode::SEND, 5)]);
        assert_eq!(seen(&mut b.cq), [success(&b, 77, WcOpcode::RECV, 5)]);
        assert_eq!(&inbox[..6], b"hello\0");
    });
}

#[test]
fn immediate_data_arrives_in_host_byte_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let (outbox, inbox) = (pd.allocate(3).unwrap(), pd.allocate(8).unwrap());
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        receive!(b, 1, inbox.sge()).unwrap();
        receive!(b, 2, inbox.sge()).unwrap();
        post!(a,
            send_imm(WorkRequest::new(5).signaled(), 0x0102_0304, outbox.sge());
            write_imm(WorkRequest::new(6).signaled(), exposed.remote(), 0xfffe_fdfc, outbox.sge());
        )
        .unwrap();
        let sent = seen(&mut a.cq);
        assert_eq!(sent, [success(&a, 5, WcOpcode::SEND, 3), success(&a, 6, WcOpcode::RDMA_WRITE, 3)]);
        let received = seen(&mut b.cq);
        assert_eq!(received[0], Seen { imm: Some(0x0102_0304), ..success(&b, 1, WcOpcode::RECV, 3) });
        let write = success(&b, 2, WcOpcode::RECV_RDMA_WITH_IMM, 3);
        assert_eq!(received[1], Seen { imm: Some(0xfffe_fdfc), ..write });
        assert_eq!(received.len(), 2);
    });
}

#[test]
fn a_send_with_invalidate_takes_the_key_and_names_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let (outbox, inbox) = (pd.allocate(4).unwrap(), pd.allocate(4).unwrap());
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        let remote = exposed.remote();
        receive!(b, 1, inbox.sge()).unwrap();
        post!(a, send_invalidate(WorkRequest::new(2).signaled(), remote.rkey, outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq), [success(&a, 2, WcOpcode::SEND, 4)]);
        let received = Seen { invalidated_rkey: Some(remote.rkey), ..success(&b, 1, WcOpcode::RECV, 4) };
        assert_eq!(seen(&mut b.cq), [received], "the key in host byte order, no immediate data");
        post!(a, write(WorkRequest::new(3), remote, outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::REM_ACCESS_ERR);
    });
}

#[test]
fn a_write_changes_the_peers_memory_and_nothing_around_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let mut outbox = pd.allocate(4).unwrap();
        outbox.copy_from_slice(b"data");
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE_WRITE).unwrap();
        let remote = exposed.remote().slice(6, 4).unwrap();
        post!(a, write(WorkRequest::new(1).signaled(), remote, outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq), [success(&a, 1, WcOpcode::RDMA_WRITE, 4)]);
        assert_eq!(seen(&mut b.cq), [], "the peer gets no completion");
        let mut bytes = [1; 16];
        exposed.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0\0\0\0\0\0data\0\0\0\0\0\0");
    });
}

#[test]
fn a_read_fetches_the_peers_memory() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, interfaces);
        let mut exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE_READ).unwrap();
        exposed.write(3, b"treasure").unwrap();
        let target = pd.allocate(8).unwrap();
        let remote = exposed.remote().slice(3, 8).unwrap();
        post!(a, read(WorkRequest::new(1).signaled(), remote, target.sge());).unwrap();
        assert_eq!(seen(&mut a.cq), [success(&a, 1, WcOpcode::RDMA_READ, 8)]);
        assert_eq!(&target[..], b"treasure");
    });
}

#[test]
fn atomics_change_the_word_and_return_what_was_there() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, interfaces);
        let mut exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE_ATOMIC).unwrap();
        exposed.store_u64(8, 0x1122_3344_5566_7788).unwrap();
        let remote = exposed.remote().slice(8, 8).unwrap();
        let old = pd.allocate(32).unwrap();
        let at = |index: u64| Sge { address: old.address() + 8 * index, len: 8, lkey: old.lkey() };
        post!(a,
            fetch_add(WorkRequest::new(1).signaled(), remote, 8, at(0));
            compare_swap(WorkRequest::new(2).signaled(), remote, 1, 99, at(1));
            compare_swap(WorkRequest::new(3).signaled(), remote, 0x1122_3344_5566_7790, 5, at(2));
        )
        .unwrap();
        let expected = [
            success(&a, 1, WcOpcode::FETCH_ADD, 8),
            success(&a, 2, WcOpcode::COMP_SWAP, 8),
            success(&a, 3, WcOpcode::COMP_SWAP, 8),
        ];
        assert_eq!(seen(&mut a.cq), expected);
        let words: Vec<u64> = old.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [0x1122_3344_5566_7788, 0x1122_3344_5566_7790, 0x1122_3344_5566_7790, 0]);
        assert_eq!(exposed.load_u64(8).unwrap(), 5, "the first comparison failed, so the value is unchanged");
        assert_eq!(exposed.load_u64(0).unwrap(), 0);
    });
}

#[test]
fn inline_data_is_copied_as_it_is_posted() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inboxes = pd.allocate(64).unwrap().into_chunks(16).unwrap();
        for (wr_id, inbox) in inboxes.iter().enumerate() {
            receive!(b, wr_id as u64, inbox.sge()).unwrap();
        }
        {
            let first = b"first".to_vec();
            let (left, middle, right) = (b"se".to_vec(), Vec::new(), b"cond".to_vec());
            let pieces: [&[u8]; 3] = [&left, &middle, &right];
            let many: Vec<&[u8]> = b"twenty pieces of one".chunks(1).collect();
            let mut batch = a.qp.send_batch().unwrap();
            // SAFETY: inline data needs no memory after the call.
            unsafe {
                batch.send(WorkRequest::new(1), Inline(&first)).unwrap();
                batch.send(WorkRequest::new(2), InlineList(&pieces)).unwrap();
                batch.send(WorkRequest::new(3), InlineList(&many[..16])).unwrap();
                batch.send(WorkRequest::new(4).signaled(), Inline(&[])).unwrap();
            }
            // The batch has copied the data, so it may be dropped before the post.
            drop((first, left, middle, right));
            batch.post().unwrap();
        }
        assert_eq!(seen(&mut a.cq), [success(&a, 4, WcOpcode::SEND, 0)]);
        let lengths: Vec<_> = seen(&mut b.cq).iter().map(|wc| wc.byte_len.unwrap()).collect();
        assert_eq!(lengths, [5, 6, 16, 0]);
        assert_eq!(&inboxes[0][..5], b"first");
        assert_eq!(&inboxes[1][..6], b"second");
        assert_eq!(&inboxes[2][..16], b"twenty pieces of");
    });
}

#[test]
fn more_inline_pieces_than_fit_in_a_list_arrive_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inbox = pd.allocate(64).unwrap();
        receive!(b, 1, inbox.sge()).unwrap();
        let text = b"forty pieces, more than the stack holds.";
        let pieces: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(pieces.len(), 40);
        post!(a, send(WorkRequest::new(1), InlineList(&pieces));).unwrap();
        assert_eq!(seen(&mut b.cq)[0].byte_len, Some(40));
        assert_eq!(&inbox[..40], text);
    });
}

#[test]
fn element_lists_are_gathered_and_scattered_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let mut outbox = pd.allocate(32).unwrap();
        outbox[..16].copy_from_slice(b"abcdefghijklmnop");
        let part = |buffer: &rdma_safe::Buffer, offset: u64, len: u32| Sge {
            address: buffer.address() + offset,
            len,
            lkey: buffer.lkey(),
        };
        let inbox = pd.allocate(32).unwrap();
        let targets = [part(&inbox, 20, 2), Sge::EMPTY, part(&inbox, 0, 6)];
        let mut batch = b.qp.recv_batch().unwrap();
        // SAFETY: `inbox` is read after the completion.
        unsafe {
            batch.receive(1, &targets).unwrap();
            batch.receive(2, &[part(&inbox, 10, 4)]).unwrap();
            batch.receive(3, &[]).unwrap();
        }
        assert_eq!(batch.len(), 3);
        batch.post().unwrap();
        let sources = [part(&outbox, 8, 3), part(&outbox, 0, 1), Sge::EMPTY, part(&outbox, 15, 1)];
        post!(a,
            send(WorkRequest::new(1), &sources[..]);
            send(WorkRequest::new(2), &sources[..1]);
            send(WorkRequest::new(3).signaled(), &[][..]);
        )
        .unwrap();
        let lengths: Vec<_> = seen(&mut b.cq).iter().map(|wc| wc.byte_len.unwrap()).collect();
        assert_eq!(lengths, [5, 3, 0]);
        assert_eq!(&inbox[20..22], b"ij");
        assert_eq!(&inbox[..3], b"kap");
        assert_eq!(&inbox[10..13], b"ijk");
    });
}

#[test]
fn flags_reach_the_provider() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let buffer = pd.allocate(8).unwrap();
        for wr_id in 0..3 {
            receive!(b, wr_id, buffer.sge()).unwrap();
        }
        fake.take_posted();
        post!(a,
            send(WorkRequest::new(1), buffer.sge());
            send(WorkRequest::new(2).signaled().fenced(), buffer.sge());
            send(WorkRequest::new(3).solicited(), Inline(b"x"));
        )
        .unwrap();
        let posted = fake.take_posted();
        let flags: Vec<_> = posted.iter().map(|posted| (posted.wr_id, posted.flags)).collect();
        assert_eq!(flags, [(1, 0), (2, 1 | 2), (3, 4 | 8)], "fence 1, signaled 2, solicited 4, inline 8");
        let verb = if interfaces.extended_qp { "ibv_wr_complete" } else { "ibv_post_send" };
        assert!(posted.iter().all(|posted| posted.verb == verb));
        assert_eq!(seen(&mut a.cq).len(), 1, "only signaled work completes");
    });
}

#[test]
fn a_send_waits_for_a_receive() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let mut outbox = pd.allocate(2).unwrap();
        outbox.copy_from_slice(b"ok");
        let inbox = pd.allocate(2).unwrap();
        post!(a, send(WorkRequest::new(1).signaled(), outbox.sge());).unwrap();
        assert_eq!(seen(&mut a.cq), []);
        receive!(b, 1, inbox.sge()).unwrap();
        assert_eq!(seen(&mut a.cq), [success(&a, 1, WcOpcode::SEND, 2)]);
        assert_eq!(seen(&mut b.cq), [success(&b, 1, WcOpcode::RECV, 2)]);
        assert_eq!(&inbox[..], b"ok");
    });
}

#[test]
fn failures_have_the_status_and_the_work_behind_them_is_flushed() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE_READ).unwrap();
        let buffer = pd.allocate(16).unwrap();
        let (good, forged) = (exposed.remote(), Remote { address: 0x1000, rkey: 0x9999 });
        let wild = Sge { lkey: 0x9999, ..buffer.sge() };
        type Add<'a> = &'a dyn Fn(&mut Raw) -> Result<(), rdma_safe::PostError>;
        let cases: [(Add<'_>, WcStatus); 4] = [
            (&|raw| post!(raw, read(WorkRequest::new(1), forged, buffer.sge());), WcStatus::REM_ACCESS_ERR),
            (&|raw| post!(raw, write(WorkRequest::new(1), good, buffer.sge());), WcStatus::REM_ACCESS_ERR),
            (&|raw| post!(raw, read(WorkRequest::new(1), good, wild);), WcStatus::LOC_PROT_ERR),
            (&|raw| post!(raw, send(WorkRequest::new(1), wild);), WcStatus::LOC_PROT_ERR),
        ];
        for (add, status) in cases.into_iter().step_by(if cfg!(miri) { 3 } else { 1 }) {
            let (mut a, mut b) = raw_pair(&pd, interfaces);
            receive!(b, 1, buffer.sge()).unwrap();
            add(&mut a).unwrap();
            post!(a, send(WorkRequest::new(2), buffer.sge());).unwrap();
            let statuses: Vec<_> = seen(&mut a.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
            assert_eq!(statuses, [(1, status), (2, WcStatus::WR_FLUSH_ERR)]);
            let mut poll = a.cq.poll();
            assert!(poll.next().unwrap().is_none());
        }
    });
}

#[test]
fn a_failed_completion_becomes_an_error_that_explains_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = raw_pair(&pd, interfaces);
        let buffer = pd.allocate(4).unwrap();
        let forged = Remote { address: 0x1000, rkey: 0x9999 };
        post!(a, read(WorkRequest::new(42), forged, buffer.sge());).unwrap();
        let number = a.qp.number();
        let mut poll = a.cq.poll();
        let error = poll.next().unwrap().unwrap().ok().unwrap_err();
        assert_eq!((error.wr_id, error.status, error.vendor_error), (42, WcStatus::REM_ACCESS_ERR, 0x57));
        assert_eq!(error.qp_num, Some(number));
        let text = error.to_string();
        for part in ["work request 42", "remote access error", "0x57", "rkey", &format!("{number:#08x}")] {
            assert!(text.contains(part), "{part} in {text}");
        }
    });
}
