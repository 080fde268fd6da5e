//! Names of peers.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use rdma_safe::cm::Address;

use crate::{Error, Result};

/// Where to connect to, or to listen: an address, or the name of a host with a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Destination(Kind);

#[derive(Clone, PartialEq, Eq, Debug)]
enum Kind {
    Address(Address),
    Name(String),
}

impl From<Address> for Destination {
    fn from(address: Address) -> Self {
        Destination(Kind::Address(address))
    }
}

impl From<SocketAddr> for Destination {
    fn from(address: SocketAddr) -> Self {
        Address::from(address).into()
    }
}

impl<I: Into<IpAddr>> From<(I, u16)> for Destination {
    fn from((ip, port): (I, u16)) -> Self {
        SocketAddr::new(ip.into(), port).into()
    }
}

impl From<&str> for Destination {
    /// `name` is `host:port`, `1.2.3.4:port` or `[::1]:port`.
    fn from(name: &str) -> Self {
        match name.parse::<SocketAddr>() {
            Ok(address) => address.into(),
            Err(_) => Destination(Kind::Name(name.to_owned())),
        }
    }
}

impl From<String> for Destination {
    fn from(name: String) -> Self {
        name.as_str().into()
    }
}

impl From<&String> for Destination {
    fn from(name: &String) -> Self {
        name.as_str().into()
    }
}

impl Destination {
    /// The addresses. A new thread looks a name up, because that can block.
    pub(crate) async fn addresses(self) -> Result<Vec<Address>> {
        let name = match self.0 {
            Kind::Address(address) => return Ok(vec![address]),
            Kind::Name(name) => name,
        };
        let lookup = Arc::new(Mutex::new(Lookup::default()));
        let (result, asked) = (lookup.clone(), name.clone());
        std::thread::Builder::new().name("rdma-async-name".to_owned()).spawn(move || {
            let found = name.to_socket_addrs().map(|found| found.map(Address::from).collect());
            let mut lookup = result.lock().unwrap_or_else(PoisonError::into_inner);
            lookup.found = Some(found);
            let waker = lookup.waker.take();
            drop(lookup);
            if let Some(waker) = waker {
                waker.wake();
            }
        })?;
        let found = poll_fn(|context| {
            let waker = context.waker().clone();
            let mut lookup = lookup.lock().unwrap_or_else(PoisonError::into_inner);
            let (result, before) = match lookup.found.take() {
                Some(found) => (Poll::Ready(found), None),
                None => (Poll::Pending, lookup.waker.replace(waker)),
            };
            drop(lookup);
            drop(before);
            result
        })
        .await;
        match found {
            Ok(addresses) => Ok(addresses),
            Err(error) => Err(Error::Name(Arc::new(explain(&asked, &error)))),
        }
    }
}

/// The error of a lookup, with the name.
fn explain(name: &str, error: &io::Error) -> io::Error {
    let text = match name.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => format!("{name:?}: {error}"),
        _ => format!("{name:?}: a host and a port are expected, like 10.0.0.2:7471"),
    };
    io::Error::new(error.kind(), text)
}

#[derive(Default)]
struct Lookup {
    found: Option<io::Result<Vec<Address>>>,
    waker: Option<Waker>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_name_and_what_is_expected() {
        let error = io::Error::other("not known");
        assert_eq!(explain("nowhere:7471", &error).to_string(), r#""nowhere:7471": not known"#);
        for wrong in ["localhost", "localhost:http", "[::1]", ""] {
            assert!(explain(wrong, &error).to_string().ends_with("like 10.0.0.2:7471"), "{wrong}");
        }
    }

    #[test]
    fn addresses_need_no_lookup_and_names_do() {
        let address = Destination::from("127.0.0.1:7471");
        assert_eq!(address, Destination::from(([127, 0, 0, 1], 7471)));
        assert!(matches!(Destination::from("localhost:7471").0, Kind::Name(_)));
    }
}
