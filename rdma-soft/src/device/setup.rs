//! Configuration by environment variables.

use std::net::IpAddr;

use crate::net::{OpenError, Socket};

/// Reasons why the device cannot be created.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(
        "RDMA_SOFT_ADDR={value}: {part:?} is not an IP address; list addresses of this machine, separated by commas"
    )]
    Address { value: String, part: String },
    #[error("RDMA_SOFT_ADDR={value}: {address} is listed twice")]
    Twice { value: String, address: IpAddr },
    #[error("RDMA_SOFT_UDP={0}: use 1 to reach peers on this host by UDP, or 0")]
    Udp(String),
    #[error("RDMA_SOFT_NETWORK={0}: use memory to keep packets in this process, or leave it unset")]
    Network(String),
    #[error("RDMA_SOFT_FAULTS: {0}")]
    Faults(#[from] crate::faults::FaultsError),
    #[error("RDMA_SOFT_CHECK: {0}")]
    Check(#[from] crate::check::OptionsError),
    #[error("cannot create an eventfd: {0}")]
    Wake(#[from] std::io::Error),
}

impl SetupError {
    /// The error of `ibv_open_device(3)`: `EADDRNOTAVAIL` for addresses, `EINVAL` for other variables that are not valid.
    pub(super) fn errno(&self) -> i32 {
        match self {
            SetupError::Open(_) | SetupError::Address { .. } | SetupError::Twice { .. } => libc::EADDRNOTAVAIL,
            SetupError::Wake(error) => error.raw_os_error().unwrap_or(libc::EMFILE),
            SetupError::Udp(_) | SetupError::Network(_) | SetupError::Faults(_) | SetupError::Check(_) => libc::EINVAL,
        }
    }
}

/// Addresses of the device, from `RDMA_SOFT_ADDR`. `None` is a free loopback address.
fn addresses() -> Result<Vec<Option<IpAddr>>, SetupError> {
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

/// Opens the sockets of the device, one for each address.
pub(super) fn sockets() -> Result<Vec<Socket>, SetupError> {
    let (is_in_memory, is_by_udp) = (is_in_memory()?, is_by_udp()?);
    let open = |address| match (is_in_memory, is_by_udp) {
        (true, _) => Socket::in_memory(address),
        (false, true) => Socket::open(address).map(Socket::without_shm),
        (false, false) => Socket::open(address),
    };
    addresses()?.into_iter().map(|address| open(address).map_err(SetupError::Open)).collect()
}

/// Whether packets stay in the memory of this process: `RDMA_SOFT_NETWORK=memory`. Miri has no other network.
fn is_in_memory() -> Result<bool, SetupError> {
    match std::env::var("RDMA_SOFT_NETWORK").unwrap_or_default().trim() {
        "" => Ok(cfg!(miri)),
        "memory" => Ok(true),
        other => Err(SetupError::Network(other.to_owned())),
    }
}

/// Whether packets to peers on this host go by UDP, from `RDMA_SOFT_UDP`.
fn is_by_udp() -> Result<bool, SetupError> {
    match std::env::var("RDMA_SOFT_UDP").unwrap_or_default().trim() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        other => Err(SetupError::Udp(other.to_owned())),
    }
}
