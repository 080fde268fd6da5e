//! Addresses on the command line.

use std::fmt;
use std::net::IpAddr;

/// A host and a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    /// An IP address without brackets, or a name.
    host: String,
    port: u16,
}

impl Address {
    /// The address to connect to: `HOST:PORT`, or a host and a port.
    pub(crate) fn of_peer(words: &[String]) -> Result<Self, String> {
        let address = match words {
            [host, port] => Address::new(host, port)?,
            [word] => {
                let (host, port) =
                    word.rsplit_once(':').ok_or_else(|| format!("`{word}` has no port: use HOST:PORT"))?;
                Address::new(bracketed(host)?, port)?
            }
            _ => return Err("expected HOST:PORT, or HOST and PORT".to_owned()),
        };
        if address.port == 0 {
            return Err("port 0 is only for listening".to_owned());
        }
        Ok(address)
    }

    /// The address to listen at: `PORT`, `ADDRESS:PORT`, or an address and a port.
    pub(crate) fn of_listener(words: &[String]) -> Result<Self, String> {
        match words {
            [address, port] => Address::new(address, port),
            [word] => match word.rsplit_once(':') {
                None | Some(("", _)) => Address::new("0.0.0.0", word.trim_start_matches(':')),
                Some((address, port)) => Address::new(bracketed(address)?, port),
            },
            _ => Err("expected PORT, ADDRESS:PORT, or ADDRESS and PORT".to_owned()),
        }
    }

    fn new(host: &str, port: &str) -> Result<Self, String> {
        if host.is_empty() {
            return Err("the host is empty".to_owned());
        }
        let port = port.parse().map_err(|_| format!("`{port}` is not a port number from 0 to 65535"))?;
        Ok(Address { host: host.to_owned(), port })
    }
}

/// A host before a colon and a port. An IPv6 address must be in brackets, which are removed.
fn bracketed(host: &str) -> Result<&str, String> {
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => Ok(inner),
        None if host.contains(':') => {
            Err(format!("`{host}` is ambiguous: put an IPv6 address in brackets, [ADDRESS]:PORT"))
        }
        None => Ok(host),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { host, port } = self;
        match host.parse::<IpAddr>() {
            Ok(IpAddr::V6(_)) => write!(f, "[{host}]:{port}"),
            // The resolver takes an address with a zone as a name.
            _ => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn peers_have_a_host_and_a_port() {
        for (line, expected) in [
            ("10.0.0.2:7471", "10.0.0.2:7471"),
            ("10.0.0.2 7471", "10.0.0.2:7471"),
            ("storage:1", "storage:1"),
            ("[::1]:7471", "[::1]:7471"),
            ("::1 7471", "[::1]:7471"),
            ("fe80::1%eth0 7471", "fe80::1%eth0:7471"),
            ("[fe80::1%eth0]:7471", "fe80::1%eth0:7471"),
        ] {
            assert_eq!(Address::of_peer(&words(line)).unwrap().to_string(), expected, "{line}");
        }
        for line in ["", "storage", ":7471", "::1:7471", "a:b", "a:65536", "a 0", "a:0", "a b c"] {
            assert!(Address::of_peer(&words(line)).is_err(), "{line}");
        }
    }

    #[test]
    fn a_listener_needs_only_a_port() {
        for (line, expected) in [
            ("7471", "0.0.0.0:7471"),
            (":7471", "0.0.0.0:7471"),
            ("0", "0.0.0.0:0"),
            ("10.0.0.2:0", "10.0.0.2:0"),
            ("10.0.0.2 7471", "10.0.0.2:7471"),
            ("[::]:7471", "[::]:7471"),
        ] {
            assert_eq!(Address::of_listener(&words(line)).unwrap().to_string(), expected, "{line}");
        }
        for line in ["", "storage", "::1:7471", "70000", "a b"] {
            assert!(Address::of_listener(&words(line)).is_err(), "{line}");
        }
    }
}
