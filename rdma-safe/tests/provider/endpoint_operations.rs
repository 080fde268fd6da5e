//! Every kind of work through the owned API: transferred bytes, and fields of the completion.

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, CompletionError, Operation, ProtectionDomain, RemoteMemory, WcStatus, Work, WorkId};

use crate::support::{builder, connect, done, endpoints, in_flight, nothing, on_each_interface};

fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

#[test]
fn a_message_fills_the_peers_receive_and_both_buffers_come_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let inbox = pd.allocate(64).unwrap();
        let address = inbox.address();
        let receive = b.receive(inbox).unwrap();
        let send = a.send(filled(&pd, b"a message")).unwrap();
        assert!(receive.is_receive() && !send.is_receive());
        assert_eq!((in_flight(&a), in_flight(&b)), ((1, 0), (0, 1)));

        let sent = done(&mut a);
        assert_eq!((sent.id, sent.operation, sent.status), (send, Operation::Send, WcStatus::SUCCESS));
        assert_eq!(sent.byte_len, 0, "not defined for a send");
        assert_eq!(&sent.buffer.unwrap()[..], b"a message");

        let received = done(&mut b);
        assert_eq!((received.id, received.operation), (receive, Operation::Receive));
        assert_eq!((received.byte_len, received.imm(), received.invalidated_rkey()), (9, None, None));
        let buffer = received.buffer.unwrap();
        assert_eq!(&buffer[..], b"a message", "as long as the message");
        assert_eq!((buffer.address(), buffer.capacity()), (address, 64));
        nothing(&mut a);
        nothing(&mut b);
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
    });
}

#[test]
fn a_receive_offers_the_whole_capacity_and_a_send_takes_the_length() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let mut inbox = pd.allocate(16).unwrap();
        inbox.set_len(2).unwrap();
        b.receive(inbox).unwrap();
        let mut outbox = filled(&pd, b"0123456789");
        outbox.set_len(6).unwrap();
        a.send(outbox).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"012345");
    });
}

#[test]
fn immediate_data_goes_with_sends_and_writes() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        for _ in 0..4 {
            b.receive(filled(&pd, b"untouched")).unwrap();
        }
        a.post(Work::send(filled(&pd, b"abc")).imm(0x0102_0304)).unwrap();
        a.post(Work::send_inline(b"inline").imm(1)).unwrap();
        a.post(Work::write(filled(&pd, b"12345"), exposed.remote()).imm(0xff00_ff01)).unwrap();
        a.post(Work::write_inline(b"xy", exposed.remote()).imm(2)).unwrap();

        let first = done(&mut b);
        assert_eq!((first.operation, first.imm(), first.byte_len), (Operation::Receive, Some(0x0102_0304), 3));
        assert_eq!(&first.buffer.unwrap()[..], b"abc");
        let second = done(&mut b);
        assert_eq!((second.operation, second.imm()), (Operation::Receive, Some(1)));
        assert_eq!(&second.buffer.unwrap()[..], b"inline");
        let third = done(&mut b);
        assert_eq!((third.operation, third.imm(), third.byte_len), (Operation::ReceiveWrite, Some(0xff00_ff01), 5));
        let buffer = third.buffer.unwrap();
        assert_eq!((buffer.len(), buffer.capacity()), (0, 9), "the data is in the exposed memory");
        assert_eq!(done(&mut b).imm(), Some(2));

        let mut bytes = [0; 5];
        exposed.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"xy345");
        let sent: Vec<_> = (0..4).map(|_| done(&mut a)).map(|sent| (sent.operation, sent.buffer.is_some())).collect();
        let (send, write) = (Operation::Send, Operation::Write);
        assert_eq!(sent, [(send, true), (send, false), (write, true), (write, false)]);
    });
}

#[test]
fn a_send_can_invalidate_a_key_of_the_peer() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        let remote = exposed.remote();
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.post(Work::send_invalidate(filled(&pd, b"bye"), remote.rkey)).unwrap();
        let received = done(&mut b);
        assert_eq!((received.invalidated_rkey(), received.imm()), (Some(remote.rkey), None));
        assert_eq!(done(&mut a).operation, Operation::Send);
        a.write(filled(&pd, b"too late"), remote).unwrap();
        assert_eq!(a.poll().unwrap().unwrap().status, WcStatus::REM_ACCESS_ERR);
    });
}

#[test]
fn reads_and_writes_move_bytes_at_offsets() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let rights = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mut exposed = pd.expose(Pages::new(32).unwrap(), rights).unwrap();
        exposed.write(0, b"________________________________").unwrap();
        a.write(filled(&pd, b"four"), exposed.remote().slice(10, 4).unwrap()).unwrap();
        assert_eq!(done(&mut a).operation, Operation::Write);
        let mut target = pd.allocate(64).unwrap();
        target.set_len(8).unwrap();
        a.read(target, exposed.remote().slice(8, 8).unwrap()).unwrap();
        let read = done(&mut a);
        assert_eq!((read.operation, read.byte_len), (Operation::Read, 8));
        assert_eq!(&read.buffer.unwrap()[..], b"__four__");
        nothing(&mut b);
    });
}

#[test]
fn atomics_return_the_old_value() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let mut exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_ATOMIC).unwrap();
        exposed.store_u64(0, 40).unwrap();
        let remote = exposed.remote();
        for (work, old, new) in [
            (Work::fetch_add(pd.allocate(64).unwrap(), remote, 2), 40, 42),
            (Work::compare_swap(pd.allocate(8).unwrap(), remote, 41, 7), 42, 42),
            (Work::compare_swap(pd.allocate(8).unwrap(), remote, 42, 7), 42, 7),
        ] {
            a.post(work).unwrap();
            let completion = done(&mut a);
            assert_eq!((completion.operation, completion.atomic_result()), (Operation::Atomic, Some(old)));
            let buffer = completion.buffer.unwrap();
            assert_eq!(u64::from_ne_bytes(buffer[..].try_into().unwrap()), old, "eight bytes, in host order");
            assert_eq!(exposed.load_u64(0).unwrap(), new);
        }
    });
}

#[test]
fn a_batch_may_fill_the_ring() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let deep = || builder(&pd, interfaces).send_depth(100).build().unwrap();
        let (mut a, mut b) = (deep(), deep());
        connect(&mut a, &mut b);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        let mut batch = a.batch().unwrap();
        for _ in 0..100 {
            let _id = batch.add(Work::write_inline(b"3", exposed.remote())).unwrap();
        }
        batch.post().unwrap();
        assert_eq!(fake.calls("ibv_post_send") + fake.calls("wr_complete"), 1);
        assert_eq!((0..100).filter(|_| done(&mut a).operation == Operation::Write).count(), 100);
    });
}

#[test]
fn a_batch_posts_all_of_it_with_one_call() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(8).unwrap(), Access::REMOTE_WRITE).unwrap();
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let mut batch = a.batch().unwrap();
        let first = batch.add(Work::write(filled(&pd, b"12"), exposed.remote())).unwrap();
        let second = batch.add(Work::write_inline(b"3", exposed.remote().slice(2, 1).unwrap())).unwrap();
        let third = batch.add(Work::send(filled(&pd, b"go"))).unwrap();
        assert_eq!(batch.len(), 3);
        assert!(first < second && second < third);
        batch.post().unwrap();
        assert_eq!(fake.calls("ibv_post_send") + fake.calls("wr_complete"), 1);
        let ids: Vec<WorkId> = (0..3).map(|_| done(&mut a).id).collect();
        assert_eq!(ids, [first, second, third]);
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"go");
        let mut bytes = [0; 3];
        exposed.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"123");
    });
}

#[test]
fn failed_work_returns_its_buffer_and_the_reason() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(filled(&pd, b"waiting")).unwrap();
        let forged = RemoteMemory { address: 0x1000, len: 100, rkey: 0x9999 };
        let id = a.write(filled(&pd, b"nowhere"), forged).unwrap();
        let failed = a.poll().unwrap().unwrap();
        assert_eq!((failed.id, failed.operation, failed.status), (id, Operation::Write, WcStatus::REM_ACCESS_ERR));
        assert_eq!((failed.vendor_error, failed.byte_len), (0x57, 0), "undefined fields are cleared");
        let failed = failed.ok().unwrap_err();
        let text = failed.to_string();
        assert!(text.contains("Write") && text.contains("remote access error") && text.contains("rkey"), "{text}");
        assert_eq!(&failed.0.buffer.as_ref().unwrap()[..], b"nowhere");

        let flushed = b.poll().unwrap().unwrap();
        assert_eq!((flushed.operation, flushed.status), (Operation::Receive, WcStatus::WR_FLUSH_ERR));
        assert_eq!((flushed.byte_len, flushed.imm()), (0, None));
        assert_eq!(&flushed.buffer.unwrap()[..], b"waiting", "the length is unchanged");
        a.send(filled(&pd, b"x")).unwrap();
        assert_eq!(a.poll().unwrap().unwrap().status, WcStatus::WR_FLUSH_ERR);
    });
}

#[test]
fn a_message_longer_than_the_receive_fails_on_both_sides() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(pd.allocate(3).unwrap()).unwrap();
        a.send(filled(&pd, b"four")).unwrap();
        assert_eq!(a.poll().unwrap().unwrap().status, WcStatus::REM_INV_REQ_ERR);
        let received = b.poll().unwrap().unwrap();
        assert_eq!(received.status, WcStatus::LOC_LEN_ERR);
        assert_eq!(&received.buffer.unwrap()[..], b"\0\0\0");
    });
}

#[test]
fn a_send_to_a_destroyed_peer_fails() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, b) = endpoints(&pd, interfaces);
        drop(b);
        a.send(filled(&pd, b"hello?")).unwrap();
        let error = a.poll().unwrap().unwrap().ok().unwrap_err();
        assert_eq!(error.0.status, WcStatus::RETRY_EXC_ERR);
        assert!(error.to_string().contains("did not answer"), "{error}");
    });
}

#[test]
fn a_peer_reaches_only_what_both_the_region_and_the_queue_pair_allow() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let regions = [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC];
        for (index, right) in regions.into_iter().enumerate().take(if cfg!(miri) { 1 } else { 3 }) {
            for peer_access in [right, Access::REMOTE - right] {
                let exposed = pd.expose(Pages::new(8).unwrap(), right).unwrap();
                let remote = exposed.remote();
                let mut a = crate::support::builder(&pd, interfaces).build().unwrap();
                let mut b = crate::support::builder(&pd, interfaces).peer_access(peer_access).build().unwrap();
                crate::support::connect(&mut a, &mut b);
                let buffer = pd.allocate(8).unwrap();
                a.post(match index {
                    0 => Work::read(buffer, remote),
                    1 => Work::write(buffer, remote),
                    _ => Work::fetch_add(buffer, remote, 1),
                })
                .unwrap();
                let status = a.poll().unwrap().unwrap().status;
                let expected = if peer_access == right { WcStatus::SUCCESS } else { WcStatus::REM_ACCESS_ERR };
                assert_eq!(status, expected, "{right:?} with {peer_access:?}");
            }
        }
    });
}

#[test]
fn an_unknown_completion_status_is_shown_as_a_number() {
    let error = CompletionError::new(WcStatus(250), 1, 2);
    assert!(error.to_string().contains("completion status 250"), "{error}");
}
