//! The first examples, which take no arguments.

use rdma_safe::device::DeviceCapabilities;

use crate::support::device;
use crate::support::program::Program;

/// Runs an example, which must succeed; returns the lines that it prints, sorted.
fn lines_of(example: &str) -> Option<Vec<String>> {
    device()?;
    let (status, text) = Program::example(example)?.start_with(&[]).finish();
    assert!(status.success(), "{example}: {status}\n{text}");
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort();
    Some(lines)
}

/// The same for an example that connects by a loopback address.
fn lines_on_soft0(example: &str) -> Option<Vec<String>> {
    if !device()?.is_soft() {
        println!("skipped: only soft0 has loopback addresses");
        return None;
    }
    lines_of(example)
}

#[test]
fn hello_message_sends_a_message_and_an_answer() {
    let Some(lines) = lines_of("hello_message") else { return };
    let expected = [
        r#"client: Receive of "hello to you too" completed"#,
        r#"client: Send of "hello" completed"#,
        r#"server: received "hello""#,
    ];
    assert_eq!(lines, expected);
}

#[test]
fn hello_write_writes_to_memory_and_reads_from_it() {
    let Some(lines) = lines_of("hello_write") else { return };
    assert_eq!(lines, [r#"owner: the memory holds "written by the peer""#, r#"peer: read "written by the owner""#]);
}

#[test]
fn hello_many_answers_each_client() {
    let Some(lines) = lines_of("hello_many") else { return };
    let expected = [1, 2, 3].map(|number| format!(r#"client {number}: received "hello, client {number}""#));
    assert_eq!(lines, expected);
}

#[test]
fn hello_offers_receives_each_block() {
    let Some(lines) = lines_on_soft0("hello_offers") else { return };
    assert_eq!(lines, std::array::from_fn::<_, 8, _>(|number| format!("a block of 1048576 bytes, each {number}")));
}

#[test]
fn hello_datagrams_answers_each_client() {
    let Some(lines) = lines_on_soft0("hello_datagrams") else { return };
    assert_eq!(lines, ["alice", "bob"].map(|name| format!("{name}: received {:?}", format!("hello, {name}"))));
}

#[test]
fn memory_slices_sends_a_vector_in_any_order() {
    let Some(lines) = lines_of("memory_slices") else { return };
    assert_eq!(lines, ["both vectors are back, and they are equal", "sent 16777216 bytes as 1003 slices"]);
}

#[test]
fn memory_payloads_sends_one_payload_to_sixteen_peers() {
    let Some(lines) = lines_of("memory_payloads") else { return };
    let mut expected = vec!["16 headers and the payload of 100000 bytes are back".to_owned()];
    expected.extend((0..16).map(|number| format!("peer {number}: \"to peer {number}\" and the payload")));
    expected.sort();
    assert_eq!(lines, expected);
}

#[test]
fn memory_pool_waits_for_buffers_and_gets_all_of_them_back() {
    let Some(lines) = lines_of("memory_pool") else { return };
    let mut expected = [
        "the sends have 16 buffers",
        "try_get: no block of 4096 bytes is free for sends: drop buffers, or wait with get or get_async",
        "get: nothing within 10 ms",
        "get_async: one more buffer, of 4096 bytes",
        "sent 1000 messages",
        "the reader has read 1000 of them",
        "32768 bytes were posted, and 0 are in use now",
        "registered: 32768 bytes for the receives and 65536 for all budgets",
    ];
    expected.sort_unstable();
    assert_eq!(lines, expected);
}

#[test]
fn memory_windows_revokes_one_of_four_clients() {
    let Some(rdma) = device() else { return };
    let any = DeviceCapabilities::MEM_WINDOW_TYPE_2A | DeviceCapabilities::MEM_WINDOW_TYPE_2B;
    if !rdma.attributes().capabilities().intersects(any) {
        println!("skipped: the device has no windows of type 2");
        return;
    }
    let Some(lines) = lines_of("memory_windows") else { return };
    let text = |number: u32| if number == 1 { "before" } else { "after!" };
    let mut expected = vec!["client 1 is revoked".to_owned(), "client 1: the write was refused".to_owned()];
    expected.extend((0..4).map(|number| format!("client {number}: the write succeeded")));
    expected.extend([0, 2, 3].map(|number| format!("client {number}: the write succeeded")));
    expected.extend((0..4).map(|number| format!("part {number} holds {:?}", text(number))));
    expected.sort();
    assert_eq!(lines, expected);
}

#[test]
fn hello_raw_sends_a_message_through_the_raw_api() {
    let Some(lines) = lines_of("hello_raw") else { return };
    let expected = [r#"received "hello""#, "work request 1 completed: RECV", "work request 2 completed: SEND"];
    assert_eq!(lines, expected);
}
