//! Shared receive queues that match messages by tag.

use rdma_safe::sys::*;
use rdma_safe::{
    Buffer, CompletionQueue, Errno, Error, InlineList, PostError, ProtectionDomain, Sge, SharedReceiveQueue, Tag,
    TagHandle, TagHeader, TagInfo, TagListSize, TagMessage, TagOperation, WcFields, WcFlags, WcOpcode, WcStatus,
    WorkRequest,
};

use crate::fake::{Config, Fake, Live};
use crate::support::{EXTENDED, Raw, post, raw_with, to_rts};

fn config() -> Config {
    let change_device = |attr: &mut ibv_device_attr_ex| {
        attr.tm_caps =
            ibv_tm_caps { max_rndv_hdr_size: 16, max_num_tags: 4, flags: IBV_TM_CAP_RC.0, max_ops: 8, max_sge: 1 };
    };
    let wc_flags = (WcFields::STANDARD | WcFields::TM_INFO).bits();
    Config { change_device, wc_flags, ..Config::default() }
}

const SIZE: TagListSize = TagListSize { tags: 2, ops: 8 };

/// A queue that matches tags, and a connection to a queue pair that takes from it.
struct Tagged {
    srq: SharedReceiveQueue,
    cq: CompletionQueue,
    sender: Raw,
    receiver: Raw,
    memory: Buffer,
}

impl Tagged {
    fn new(pd: &ProtectionDomain) -> Self {
        let fields = WcFields::STANDARD | WcFields::TM_INFO;
        let cq = pd.context().completion_queue(32).fields(fields).build().unwrap();
        let srq = pd.tag_matching_queue(&cq, 4, SIZE).build().unwrap();
        let mut receiver = raw_with(pd, EXTENDED, WcFields::STANDARD, |qp| qp.shared_receive_queue(&srq));
        let mut sender = raw_with(pd, EXTENDED, WcFields::STANDARD, |qp| qp);
        to_rts(&mut receiver.qp, sender.qp.number());
        to_rts(&mut sender.qp, receiver.qp.number());
        let memory = pd.allocate(256).unwrap();
        Tagged { srq, cq, sender, receiver, memory }
    }

    /// Place `index` of the memory.
    fn place(&self, index: u64) -> Sge {
        Sge { address: self.memory.address() + 32 * index, len: 32, lkey: self.memory.lkey() }
    }

    fn bytes(&self, index: usize, len: usize) -> &[u8] {
        &self.memory[32 * index..][..len]
    }

    /// Adds an entry for `tag` whose message comes to place `index`.
    #[track_caller]
    fn add(&mut self, op: TagOperation, receive_id: u64, tag: Tag, index: u64) -> TagHandle {
        let place = self.place(index);
        // SAFETY: the memory is looked at only after the message has come, and goes after the queue.
        unsafe { self.srq.tag_list().unwrap().add(op, receive_id, tag, &[place]) }.unwrap()
    }

    #[track_caller]
    fn send(&mut self, kind: TagMessage, tag: u64, payload: &[u8]) {
        let header = TagHeader { kind, private: 77, tag }.to_bytes();
        post!(self.sender, send(WorkRequest::new(1), InlineList(&[&header, payload]));).unwrap();
    }

    /// What has completed: identifier, status, opcode, length, flags, tag.
    fn done(&mut self) -> Vec<(u64, WcStatus, WcOpcode, u32, WcFlags, TagInfo)> {
        let mut all = Vec::new();
        let mut poll = self.cq.poll();
        while let Some(wc) = poll.next().unwrap() {
            let (flags, tag) = (wc.flags(), wc.tag_info().unwrap());
            all.push((wc.wr_id(), wc.status(), wc.opcode(), wc.byte_len().unwrap(), flags, tag));
        }
        all
    }
}

fn exactly(tag: u64) -> Tag {
    Tag { tag, mask: u64::MAX }
}

#[test]
fn a_message_goes_to_the_memory_of_the_entry_that_it_matches() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    tagged.add(TagOperation::new(1).signaled(), 10, exactly(5), 0);
    tagged.add(TagOperation::new(2), 11, Tag { tag: 0x100, mask: 0xf00 }, 1);
    tagged.send(TagMessage::EAGER, 0x1aa, b"by mask");
    tagged.send(TagMessage::EAGER, 5, b"exactly");
    let matched = WcFlags::TM_MATCH | WcFlags::TM_DATA_VALID;
    let recv = |id, tag| (id, WcStatus::SUCCESS, WcOpcode::TM_RECV, 7, matched, TagInfo { tag, private: 77 });
    let none = TagInfo { tag: 0, private: 0 };
    let added = (1, WcStatus::SUCCESS, WcOpcode::TM_ADD, 0, WcFlags::empty(), none);
    assert_eq!(tagged.done(), [added, recv(11, 0x1aa), recv(10, 5)], "in the queue of the list");
    assert_eq!((tagged.bytes(0, 8), tagged.bytes(1, 8)), (&b"exactly\0"[..], &b"by mask\0"[..]));
    assert_eq!(crate::support::seen(&mut tagged.receiver.cq), []);
    assert_eq!(tagged.srq.xrc_number(), None);
}

#[test]
fn what_matches_nothing_takes_a_receive_and_comes_with_its_header() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let places = [tagged.place(4), tagged.place(5)];
    for (wr_id, place) in (20..).zip(places) {
        // SAFETY: as in `add`.
        unsafe { tagged.srq.receive(wr_id, place) }.unwrap();
    }
    tagged.add(TagOperation::new(1), 10, exactly(5), 0);
    tagged.send(TagMessage::EAGER, 6, b"other");
    tagged.send(TagMessage::NO_TAG, 0, b"plain");
    let done = tagged.done();
    assert_eq!((done[0].0, done[0].2, done[0].3), (20, WcOpcode::TM_RECV, 21));
    assert_eq!(done[0].4, WcFlags::TM_SYNC_REQ);
    assert_eq!((done[1].0, done[1].2, done[1].3), (21, WcOpcode::TM_NO_TAG, 21));
    let header = TagHeader::of(tagged.bytes(4, 32)).unwrap();
    assert_eq!(header, TagHeader { kind: TagMessage::EAGER, private: 77, tag: 6 });
    assert_eq!(&tagged.bytes(4, 21)[TagHeader::LEN..], b"other");
    assert_eq!(&tagged.bytes(5, 21)[TagHeader::LEN..], b"plain");
}

#[test]
fn an_unexpected_message_is_told_to_the_device_before_more_is_matched() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    for wr_id in [20, 21] {
        let place = tagged.place(wr_id - 16);
        // SAFETY: as in `add`.
        unsafe { tagged.srq.receive(wr_id, place) }.unwrap();
    }
    tagged.send(TagMessage::EAGER, 9, b"early");
    // The program does not know of it yet: it may be what this waits for.
    tagged.add(TagOperation::new(1).signaled(), 10, exactly(9), 0);
    tagged.send(TagMessage::EAGER, 9, b"again");
    let ids: Vec<_> = tagged.done().iter().map(|done| (done.0, done.4.contains(WcFlags::TM_SYNC_REQ))).collect();
    assert_eq!(ids, [(20, true), (1, true), (21, true)]);
    tagged.srq.tag_list().unwrap().sync(TagOperation::new(2).signaled().unexpected(2)).unwrap();
    tagged.add(TagOperation::new(3).unexpected(2), 11, exactly(9), 1);
    tagged.send(TagMessage::EAGER, 9, b"now");
    let done = tagged.done();
    assert_eq!((done[0].0, done[0].2, done[0].4), (2, WcOpcode::TM_SYNC, WcFlags::empty()));
    assert_eq!((done[1].0, done[1].3), (11, 3));
    assert_eq!(tagged.bytes(1, 4), b"now\0");
}

#[test]
fn an_entry_is_removed_unless_a_message_has_taken_it() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let first = tagged.add(TagOperation::new(1), 10, exactly(5), 0);
    let second = tagged.add(TagOperation::new(2), 11, exactly(6), 1);
    let full = {
        let place = tagged.place(2);
        // SAFETY: it is refused.
        unsafe { tagged.srq.tag_list().unwrap().add(TagOperation::new(3), 12, exactly(7), &[place]) }
    };
    assert_eq!(full, Err(PostError::QueueFull { posted: 0 }), "of two entries");
    tagged.send(TagMessage::EAGER, 6, b"taken");
    // SAFETY: no completion was polled.
    unsafe {
        let mut list = tagged.srq.tag_list().unwrap();
        list.remove(TagOperation::new(4).signaled(), &first).unwrap();
        list.remove(TagOperation::new(5), &second).unwrap();
    }
    let done: Vec<_> = tagged.done().iter().map(|done| (done.0, done.1)).collect();
    assert_eq!(done, [(11, WcStatus::SUCCESS), (4, WcStatus::SUCCESS), (5, WcStatus::TM_ERR)]);
}

#[test]
fn an_entry_of_another_list_is_not_removed() {
    let fake = Fake::new(config());
    let pd = fake.pd();
    let (mut ours, mut theirs) = (Tagged::new(&pd), Tagged::new(&pd));
    let entry = ours.add(TagOperation::new(1), 10, exactly(5), 0);
    // SAFETY: it is refused.
    let refused = unsafe { theirs.srq.tag_list().unwrap().remove(TagOperation::new(2), &entry) };
    assert_eq!(refused, Err(PostError::ForeignTag));
    assert_eq!(fake.calls("post_srq_ops"), 1);
    let mut basic = pd.shared_receive_queue(4).build().unwrap();
    assert!(basic.tag_list().is_none());
    let domain = pd.context().open_xrcd().unwrap();
    assert!(domain.shared_receive_queue(&pd, &ours.cq, 4).build().unwrap().tag_list().is_none());
}

#[test]
fn an_entry_has_no_more_elements_than_the_device_looks_at() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let place = tagged.place(0);
    let mut list = tagged.srq.tag_list().unwrap();
    // SAFETY: it is refused, and then has no memory.
    unsafe {
        let refused = list.add(TagOperation::new(1), 10, exactly(5), &[place; 2]);
        assert_eq!(refused, Err(PostError::TooManySges { count: 2, max: 1 }));
        list.add(TagOperation::new(1), 10, exactly(5), &[]).unwrap();
    }
    tagged.send(TagMessage::EAGER, 5, b"");
    assert_eq!(tagged.done()[0].3, 0);
}

#[test]
fn a_failure_says_whether_the_device_has_the_operation() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let mut sync = || tagged.srq.tag_list().unwrap().sync(TagOperation::new(1));
    fake.fail_once("post_srq_ops", libc::EIO);
    assert_eq!(sync(), Err(PostError::Refused { posted: 0, errno: Errno(libc::EIO) }));
    fake.fail_once("post_srq_ops", -libc::EIO);
    assert_eq!(sync(), Err(PostError::InDoubt { errno: Errno(libc::EIO) }));
    sync().unwrap();
}

#[test]
fn a_device_without_tags_is_not_asked_and_its_limits_are_named() {
    let without = Fake::new(Config::default());
    let pd = without.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let error = pd.tag_matching_queue(&cq, 4, SIZE).build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature, .. } if feature.contains("matching of tags")), "{error}");
    let error = pd.context().completion_queue(4).fields(WcFields::TM_INFO).build().unwrap_err();
    assert!(matches!(error, Error::CompletionFields { fields: WcFields::TM_INFO }), "{error}");

    let fake = Fake::new(config());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    for asked in [TagListSize { tags: 5, ops: 8 }, TagListSize { tags: 4, ops: 9 }] {
        let error = pd.tag_matching_queue(&cq, 4, asked).build().unwrap_err();
        assert!(matches!(error, Error::TagList { asked: found, max_tags: 4, max_ops: 8 } if found == asked), "{error}");
    }
    let foreign = fake.open().completion_queue(4).build().unwrap();
    let error = pd.tag_matching_queue(&foreign, 4, SIZE).build().unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "completion queue" }), "{error}");
    assert_eq!(without.calls("create_srq_ex") + fake.calls("create_srq_ex"), 0);
    let mut poll = cq;
    assert!(poll.poll().next().unwrap().is_none());
}

#[test]
fn a_queue_with_tags_and_what_it_is_used_with_go_in_any_order() {
    let fake = Fake::new(config());
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let Tagged { srq, cq, sender, receiver, memory } = Tagged::new(&fake.pd());
        let mut objects: [Option<Box<dyn std::any::Any>>; 3] =
            [Some(Box::new(srq)), Some(Box::new(cq)), Some(Box::new((sender, receiver)))];
        order.into_iter().for_each(|index| objects[index] = None);
        drop(memory);
        assert_eq!(fake.live(), Live::default(), "{order:?}");
    }
}
