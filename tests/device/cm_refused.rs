//! Connections by address on soft0, which has no connection manager.

use std::net::SocketAddr;

use rdma_safe::Errno;
use rdma_safe::cm::{Connector, Listener};

use crate::support::{device, error_of};

#[test]
fn soft0_refuses_connections_by_address_with_advice() {
    let Some(rdma) = device() else { return };
    if !rdma.is_soft() {
        println!("skipped: {} may have a connection manager", rdma.device_name());
        return;
    }
    let address = SocketAddr::from(([127, 0, 0, 1], 7471));
    for error in [error_of(Connector::new().connect(address)), error_of(Listener::bind(address))] {
        assert_eq!(error.errno(), Some(Errno(libc::EOPNOTSUPP)), "{error}");
        let advice = "soft0 has no connection manager: exchange addresses out of band (QueuePairAddress)";
        assert!(error.to_string().contains(advice), "{error}");
    }
}
