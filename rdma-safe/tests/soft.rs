//! soft0 as the libibverbs and librdmacm of this process.

use std::time::Duration;

use rdma_safe::cm::{AddressQuery, Connector, Listener};
use rdma_safe::{Endpoint, soft};

/// Only a test that hangs waits for so long.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn a_connection_by_address_needs_no_setup() {
    soft::install().unwrap();
    let mut listener = Listener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_address().ip().unwrap();
    let found = AddressQuery::new().node("127.0.0.1").service(at.port().to_string()).lookup().unwrap();
    assert_eq!(found[0].peer.and_then(|peer| peer.ip()), Some(at));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut connection = Connector::new().connect(at).unwrap();
            let mut outbox = connection.pd().allocate(64).unwrap();
            outbox.fill_from(b"hello").unwrap();
            connection.send(outbox).unwrap();
            let _ = connection.wait(DEADLINE).unwrap().ok().unwrap();
            while connection.is_connected().unwrap() {
                std::thread::yield_now();
            }
        });
        let request = listener.next(DEADLINE).unwrap().expect("a request in time");
        let pd = request.pd().unwrap();
        let mut prepared = request.prepare(Endpoint::builder(&pd)).unwrap();
        prepared.receive(pd.allocate(64).unwrap()).unwrap();
        let mut connection = prepared.accept(b"").unwrap();
        let done = connection.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(done.buffer.as_deref(), Some(&b"hello"[..]));
        connection.disconnect().unwrap();
    });
}

#[test]
#[deny(unused_must_use, reason = "programs call this without using the result")]
fn installing_again_has_no_effect() {
    soft::install_by_default();
    soft::install().unwrap();
    soft::install().unwrap();
    assert!(soft::is_installed() && soft::install_by_default() && soft::install_for(Some("mlx5_0")));
    assert!(rdma_soft::install().is_err(), "another installation is refused");
}
