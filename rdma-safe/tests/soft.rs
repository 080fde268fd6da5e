//! soft0 as the libibverbs of this process.

use std::net::SocketAddr;

use rdma_safe::cm::{AddressQuery, Connector, DatagramListener, EventChannel, Listener};
use rdma_safe::{Errno, Error, soft};

const REFUSAL: &str = "soft0 has no connection manager: exchange addresses out of band (QueuePairAddress)";

#[test]
fn connections_by_address_are_refused_with_an_alternative() {
    soft::install().unwrap();
    for (object, error) in [
        ("channel", EventChannel::new().map(drop)),
        ("connector", Connector::new().connect(("127.0.0.1", 7471)).map(drop)),
        ("datagrams", Connector::new().resolve_datagrams(SocketAddr::from(([127, 0, 0, 1], 7471))).map(drop)),
        ("listener", Listener::bind(("127.0.0.1", 7471)).map(drop)),
        ("services", DatagramListener::bind(("127.0.0.1", 7471)).map(drop)),
        ("names", AddressQuery::new().node("127.0.0.1").lookup().map(drop)),
    ] {
        let error: Error = error.unwrap_err();
        assert_eq!(error.errno(), Some(Errno(libc::EOPNOTSUPP)), "{object}: {error}");
        assert!(error.to_string().contains(REFUSAL), "{object}: {error}");
        assert!(error.explain().unwrap().starts_with(REFUSAL), "{object}: {error}");
    }
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
