//! Handshakes that are dropped in each state.

use rdma_safe::cm::{Cause, RejectReason, Step};

use crate::{Ends, expect_objects, failure, network, pending, ready};

#[test]
fn dropping_a_resolution_leaves_nothing() {
    let ends = Ends::new();
    let before = network::objects();
    drop(ends.connector.start_resolve(ends.address()).unwrap());
    network::script(|script| script.loses_addresses = true);
    drop(pending(ends.connector.start_resolve(ends.address()).unwrap()));
    expect_objects(before);
}

#[test]
fn dropping_a_connecting_end_before_the_reply_ends_the_request() {
    let mut ends = Ends::new();
    let before = network::objects();
    // Before the request is read, and after that.
    for is_read in [false, true] {
        let connecting = pending(ends.connecting());
        let prepared = if is_read {
            let prepared = ends.requested();
            drop(connecting);
            prepared.start_accept(b"")
        } else {
            drop(connecting);
            ends.request().prepare(rdma_safe::Endpoint::builder(&ends.pd)).and_then(|end| end.start_accept(b""))
        };
        let error = failure(prepared);
        assert_eq!(error.step, Step::Accept, "{error}");
        expect_objects(before);
    }
}

#[test]
fn dropping_a_connecting_end_after_the_reply_rejects() {
    let mut ends = Ends::new();
    let before = network::objects();
    let connecting = ends.connecting();
    let accepting = pending(ends.accepting());
    // The reply has arrived, and was not handled.
    drop(connecting);
    let error = failure(accepting.advance());
    assert_eq!(error.step, Step::Accept);
    assert!(matches!(error.cause, Cause::Rejected { reason: RejectReason::CONSUMER_DEFINED, .. }), "{error}");
    expect_objects(before);
}

#[test]
fn dropping_an_accepting_end_rejects_or_disconnects() {
    let mut ends = Ends::new();
    let before = network::objects();
    let connecting = ends.connecting();
    drop(ends.accepting());
    let error = failure(connecting.advance());
    assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
    expect_objects(before);

    // The confirmation has arrived, and was not handled.
    let connecting = ends.connecting();
    let accepting = ends.accepting();
    let mut connection = ready(connecting);
    drop(accepting);
    assert!(!connection.is_connected().unwrap());
    drop(connection);
    expect_objects(before);
}

#[test]
fn a_reply_that_was_withdrawn_before_it_was_read_is_an_error() {
    let mut ends = Ends::new();
    let connecting = ends.connecting();
    // The reply and its withdrawal are read at once.
    drop(pending(ends.accepting()));
    let error = failure(connecting.wait());
    assert_eq!(error.step, Step::Connect);
    assert!(matches!(error.cause, Cause::Rejected { .. } | Cause::Failed(_)), "{error}");
}

#[test]
fn dropping_a_disconnect_ends_the_connection() {
    let mut ends = Ends::new();
    let before = network::objects();
    let [client, mut server] = ends.connected();
    drop(pending(client.start_disconnect().unwrap()));
    assert!(!server.is_connected().unwrap());
    assert_eq!(server.disconnect().unwrap().len(), 1, "the unused receive");
    expect_objects(before);
}

#[test]
fn a_prepared_end_can_be_dropped() {
    let mut ends = Ends::new();
    let before = network::objects();
    drop(ends.prepared());
    let connecting = ends.connecting();
    drop(ends.requested());
    let error = failure(connecting.advance());
    assert!(matches!(error.cause, Cause::Rejected { .. }), "{error}");
    expect_objects(before);
}

#[test]
fn too_much_private_data_drops_the_handshake() {
    let mut ends = Ends::new();
    let before = network::objects();
    let error = ends.prepared().start_connect(&[0; 57]).unwrap_err();
    assert!(error.to_string().contains("57 bytes of private data"), "{error}");
    let connecting = ends.connecting();
    let error = ends.requested().start_accept(&[0; 197]).unwrap_err();
    assert!(error.to_string().contains("197 bytes of private data"), "{error}");
    let refused = failure(connecting.advance());
    assert!(matches!(refused.cause, Cause::Rejected { .. }), "{refused}");
    expect_objects(before);
}
