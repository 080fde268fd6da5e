//! Tag matching, which soft0 lacks.

use rdma_safe::post::InlineList;
use rdma_safe::srq::{Tag, TagHandle, TagHeader, TagListSize, TagMessage, TagOperation};
use rdma_safe::sys::*;
use rdma_safe::{
    Buffer, CompletionQueue, Errno, Error, PostError, ProtectionDomain, Sge, SharedReceiveQueue, WcFields, WcFlags,
    WcOpcode, WcStatus, WorkRequest,
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

/// Tag and private data of a `TagInfo`.
type TagAndData = (u64, u32);

const SIZE: TagListSize = TagListSize { tags: 2, ops: 8 };

/// A queue that matches tags, and a connection whose receiver uses it.
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

    /// The 32 bytes of the memory at `32 * index`.
    fn place(&self, index: u64) -> Sge {
        Sge { address: self.memory.address() + 32 * index, len: 32, lkey: self.memory.lkey() }
    }

    fn bytes(&self, index: usize, len: usize) -> &[u8] {
        &self.memory[32 * index..][..len]
    }

    /// Adds an entry for `tag` that receives into place `index`.
    #[track_caller]
    fn add(&mut self, op: TagOperation, receive_id: u64, tag: Tag, index: u64) -> TagHandle {
        let place = self.place(index);
        // SAFETY: the memory is read only after the message has arrived, and outlives the queue.
        unsafe { self.srq.tag_list().unwrap().add(op, receive_id, tag, &[place]) }.unwrap()
    }

    #[track_caller]
    fn send(&mut self, kind: TagMessage, tag: u64, payload: &[u8]) {
        let header = TagHeader { kind, private: 77, tag }.to_bytes();
        post!(self.sender, send(WorkRequest::new(1), InlineList(&[&header, payload]));).unwrap();
    }

    /// Completions: identifier, status, opcode, length, flags, tag.
    fn completions(&mut self) -> Vec<(u64, WcStatus, WcOpcode, u32, WcFlags, TagAndData)> {
        let mut all = Vec::new();
        let mut poll = self.cq.poll();
        while let Some(wc) = poll.next().unwrap() {
            let (flags, tag) = (wc.flags(), wc.tag_info().unwrap());
            all.push((wc.wr_id(), wc.status(), wc.opcode(), wc.byte_len().unwrap(), flags, (tag.tag, tag.private)));
        }
        all
    }
}

fn exactly(tag: u64) -> Tag {
    Tag { tag, mask: u64::MAX }
}

#[test]
fn a_message_arrives_in_the_entry_that_it_matches() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    tagged.add(TagOperation::new(1).signaled(), 10, exactly(5), 0);
    tagged.add(TagOperation::new(2), 11, Tag { tag: 0x100, mask: 0xf00 }, 1);
    tagged.send(TagMessage::EAGER, 0x1aa, b"by mask");
    tagged.send(TagMessage::EAGER, 5, b"exactly");
    let matched = WcFlags::TM_MATCH | WcFlags::TM_DATA_VALID;
    let recv = |id, tag| (id, WcStatus::SUCCESS, WcOpcode::TM_RECV, 7, matched, (tag, 77));
    let none = (0, 0);
    let added = (1, WcStatus::SUCCESS, WcOpcode::TM_ADD, 0, WcFlags::empty(), none);
    assert_eq!(tagged.completions(), [added, recv(11, 0x1aa), recv(10, 5)], "in the completion queue of the list");
    assert_eq!((tagged.bytes(0, 8), tagged.bytes(1, 8)), (&b"exactly\0"[..], &b"by mask\0"[..]));
    assert_eq!(crate::support::seen(&mut tagged.receiver.cq), []);
    assert_eq!(tagged.srq.xrc_number(), None);
}

#[test]
fn an_unmatched_message_takes_a_receive_and_keeps_its_header() {
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
    let done = tagged.completions();
    assert_eq!((done[0].0, done[0].2, done[0].3), (20, WcOpcode::TM_RECV, 21));
    assert_eq!(done[0].4, WcFlags::TM_SYNC_REQ);
    assert_eq!((done[1].0, done[1].2, done[1].3), (21, WcOpcode::TM_NO_TAG, 21));
    let header = TagHeader::parse(tagged.bytes(4, 32)).unwrap();
    assert_eq!(header, TagHeader { kind: TagMessage::EAGER, private: 77, tag: 6 });
    assert_eq!(&tagged.bytes(4, 21)[TagHeader::LEN..], b"other");
    assert_eq!(&tagged.bytes(5, 21)[TagHeader::LEN..], b"plain");
}

#[test]
fn entries_match_only_after_unexpected_messages_are_synchronized() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    for wr_id in [20, 21] {
        let place = tagged.place(wr_id - 16);
        // SAFETY: as in `add`.
        unsafe { tagged.srq.receive(wr_id, place) }.unwrap();
    }
    tagged.send(TagMessage::EAGER, 9, b"early");
    // The program has not seen the early message, which may be the one for this entry.
    tagged.add(TagOperation::new(1).signaled(), 10, exactly(9), 0);
    tagged.send(TagMessage::EAGER, 9, b"again");
    let ids: Vec<_> = tagged.completions().iter().map(|done| (done.0, done.4.contains(WcFlags::TM_SYNC_REQ))).collect();
    assert_eq!(ids, [(20, true), (1, true), (21, true)]);
    tagged.srq.tag_list().unwrap().sync(TagOperation::new(2).signaled().unexpected(2)).unwrap();
    tagged.add(TagOperation::new(3).unexpected(2), 11, exactly(9), 1);
    tagged.send(TagMessage::EAGER, 9, b"now");
    let done = tagged.completions();
    assert_eq!((done[0].0, done[0].2, done[0].4), (2, WcOpcode::TM_SYNC, WcFlags::empty()));
    assert_eq!((done[1].0, done[1].3), (11, 3));
    assert_eq!(tagged.bytes(1, 4), b"now\0");
}

#[test]
fn an_entry_is_removed_unless_a_message_matched_it() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let first = tagged.add(TagOperation::new(1), 10, exactly(5), 0);
    let second = tagged.add(TagOperation::new(2), 11, exactly(6), 1);
    let full = {
        let place = tagged.place(2);
        // SAFETY: the entry is refused.
        unsafe { tagged.srq.tag_list().unwrap().add(TagOperation::new(3), 12, exactly(7), &[place]) }
    };
    assert_eq!(full, Err(PostError::QueueFull { posted: 0 }), "the list has two entries");
    tagged.send(TagMessage::EAGER, 6, b"taken");
    // SAFETY: no completion was polled.
    unsafe {
        let mut list = tagged.srq.tag_list().unwrap();
        list.remove(TagOperation::new(4).signaled(), &first).unwrap();
        list.remove(TagOperation::new(5), &second).unwrap();
    }
    let done: Vec<_> = tagged.completions().iter().map(|done| (done.0, done.1)).collect();
    assert_eq!(done, [(11, WcStatus::SUCCESS), (4, WcStatus::SUCCESS), (5, WcStatus::TM_ERR)]);
}

#[test]
fn an_entry_of_another_list_is_refused() {
    let fake = Fake::new(config());
    let pd = fake.pd();
    let (mut ours, mut theirs) = (Tagged::new(&pd), Tagged::new(&pd));
    let entry = ours.add(TagOperation::new(1), 10, exactly(5), 0);
    // SAFETY: the call is refused.
    let refused = unsafe { theirs.srq.tag_list().unwrap().remove(TagOperation::new(2), &entry) };
    assert_eq!(refused, Err(PostError::ForeignTag));
    assert_eq!(fake.calls("post_srq_ops"), 1);
    let mut basic = pd.shared_receive_queue(4).build().unwrap();
    assert!(basic.tag_list().is_none());
    let domain = pd.context().open_xrcd().unwrap();
    assert!(domain.shared_receive_queue(&pd, &ours.cq, 4).build().unwrap().tag_list().is_none());
}

#[test]
fn an_entry_has_at_most_the_elements_of_the_device() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let place = tagged.place(0);
    let mut list = tagged.srq.tag_list().unwrap();
    // SAFETY: the first entry is refused, and the second one has no memory.
    unsafe {
        let refused = list.add(TagOperation::new(1), 10, exactly(5), &[place; 2]);
        assert_eq!(refused, Err(PostError::TooManySges { count: 2, max: 1 }));
        list.add(TagOperation::new(1), 10, exactly(5), &[]).unwrap();
    }
    tagged.send(TagMessage::EAGER, 5, b"");
    assert_eq!(tagged.completions()[0].3, 0);
}

#[test]
fn a_failed_operation_is_refused_or_in_doubt() {
    let fake = Fake::new(config());
    let mut tagged = Tagged::new(&fake.pd());
    let mut sync = || tagged.srq.tag_list().unwrap().sync(TagOperation::new(1));
    fake.fail_once("post_srq_ops", libc::EIO);
    assert_eq!(sync(), Err(PostError::Refused { posted: 0, errno: Errno(libc::EIO) }));
    fake.fail_once("post_srq_ops", -libc::EIO);
    assert_eq!(sync(), Err(PostError::MaybePosted { errno: Errno(libc::EIO) }));
    sync().unwrap();
}

#[test]
fn a_tag_list_beyond_the_device_is_refused_with_the_limits() {
    let fake = Fake::new(config());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    for asked in [TagListSize { tags: 5, ops: 8 }, TagListSize { tags: 4, ops: 9 }] {
        let error = pd.tag_matching_queue(&cq, 4, asked).build().unwrap_err();
        assert!(
            matches!(error, Error::TagList { requested: found, max_tags: 4, max_ops: 8 } if found == asked),
            "{error}"
        );
    }
    let foreign = fake.open().completion_queue(4).build().unwrap();
    let error = pd.tag_matching_queue(&foreign, 4, SIZE).build().unwrap_err();
    assert!(matches!(error, Error::ForeignContext { object: "completion queue" }), "{error}");
    assert_eq!(fake.calls("create_srq_ex"), 0);
}

#[test]
fn a_queue_with_tags_and_its_users_are_dropped_in_any_order() {
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
