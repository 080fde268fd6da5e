//! Configuration of the device by environment variables, and its errors.

use std::net::IpAddr;

use crate::net::OpenError;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(
        "RDMA_SOFT_ADDR={value}: {part:?} is no IP address; it takes one, or several with commas between them, of this machine"
    )]
    Address { value: String, part: String },
    #[error("RDMA_SOFT_ADDR={value}: {address} is listed twice")]
    Twice { value: String, address: IpAddr },
    #[error("RDMA_SOFT_UDP={0}: use 1 to reach peers on this host by UDP, or 0")]
    Udp(String),
    #[error("RDMA_SOFT_FAULTS: {0}")]
    Faults(#[from] crate::faults::FaultsError),
    #[error("cannot create an eventfd: {0}")]
    Wake(#[from] std::io::Error),
}

/// Addresses of the device: `RDMA_SOFT_ADDR`. `None` is a free loopback address.
pub(super) fn addresses() -> Result<Vec<Option<IpAddr>>, SetupError> {
    let value = std::env::var("RDMA_SOFT_ADDR").unwrap_or_default();
    if value.trim().is_empty() {
        return Ok(vec![None]);
    }
    let mut addresses = Vec::new();
    for part in value.split(',').map(str::trim) {
        let Ok(address) = part.parse::<IpAddr>() else {
            return Err(SetupError::Address { part: part.to_owned(), value });
        };
        let address = address.to_canonical();
        if addresses.contains(&Some(address)) {
            return Err(SetupError::Twice { value, address });
        }
        addresses.push(Some(address));
    }
    Ok(addresses)
}

/// Whether packets to peers on this host go by UDP: `RDMA_SOFT_UDP`.
pub(super) fn is_by_udp() -> Result<bool, SetupError> {
    match std::env::var("RDMA_SOFT_UDP").unwrap_or_default().trim() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        other => Err(SetupError::Udp(other.to_owned())),
    }
}
