//! Ports that this process uses, and the choice of ephemeral ports.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, OnceLock};

use super::names::Addresses;
use super::{ClaimError, Shared};
use crate::random::seed;

/// Range of ephemeral ports if the kernel's is unknown, which is its default.
const DEFAULT_RANGE: RangeInclusive<u16> = 32_768..=60_999;

/// Claims and source ports of this process.
///
/// The names of sockets exclude claims of other processes. Source ports have no sockets, so only this table excludes them.
pub(super) struct Ports {
    /// Addresses in use, by port space and port.
    used: HashMap<(u16, u16), Vec<Addresses>>,
    /// Ephemeral ports.
    range: RangeInclusive<u16>,
    /// Next ephemeral port to try.
    next: u16,
}

impl Ports {
    pub(super) fn new() -> Ports {
        Ports::with_range(ephemeral())
    }

    fn with_range(range: RangeInclusive<u16>) -> Ports {
        // Processes start at different ports, so they rarely try the same one.
        let next = range.clone().nth(seed() as usize % range.len()).unwrap_or(*range.start());
        Ports { used: HashMap::new(), range, next }
    }

    /// Returns the next ephemeral port. Each port comes again only after all others.
    pub(super) fn next_candidate(&mut self) -> u16 {
        let port = self.next;
        self.next = if port == *self.range.end() { *self.range.start() } else { port + 1 };
        port
    }

    fn add(&mut self, space: u16, addresses: Addresses, port: u16) -> Result<(), ClaimError> {
        let users = self.used.entry((space, port)).or_default();
        users.iter().try_for_each(|user| addresses.check_conflict(*user))?;
        users.push(addresses);
        Ok(())
    }

    fn remove(&mut self, space: u16, addresses: Addresses, port: u16) {
        let Some(users) = self.used.get_mut(&(space, port)) else { return };
        users.retain(|user| *user != addresses);
        if users.is_empty() {
            self.used.remove(&(space, port));
        }
    }
}

/// A port that this process uses at some addresses.
pub(super) struct Reservation {
    shared: Arc<Shared>,
    space: u16,
    addresses: Addresses,
    port: u16,
}

impl Reservation {
    pub(super) fn new(
        shared: &Arc<Shared>,
        space: u16,
        addresses: Addresses,
        port: u16,
    ) -> Result<Reservation, ClaimError> {
        shared.lock().ports.add(space, addresses, port)?;
        Ok(Reservation { shared: Arc::clone(shared), space, addresses, port })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.shared.is_child() {
            self.shared.lock().ports.remove(self.space, self.addresses, self.port);
        }
    }
}

/// The local port of a connection. Dropping it frees the port.
pub(crate) struct SourcePort(Reservation);

impl SourcePort {
    pub(crate) fn get(&self) -> u16 {
        self.0.port()
    }
}

pub(super) fn source_port(shared: &Arc<Shared>, space: u16, addresses: Addresses) -> Result<SourcePort, ClaimError> {
    let mut state = shared.lock();
    for _ in 0..ephemeral().len() {
        let port = state.ports.next_candidate();
        if state.ports.add(space, addresses, port).is_ok() {
            return Ok(SourcePort(Reservation { shared: Arc::clone(shared), space, addresses, port }));
        }
    }
    Err(ClaimError::NoFreePort)
}

/// Returns the kernel's range of ephemeral ports, as it was at the first call.
pub(super) fn ephemeral() -> RangeInclusive<u16> {
    static RANGE: OnceLock<RangeInclusive<u16>> = OnceLock::new();
    let read = || {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        parse_range(&text).unwrap_or(DEFAULT_RANGE)
    };
    RANGE.get_or_init(read).clone()
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(|number| number.parse().ok());
    let (low, high) = (numbers.next()??, numbers.next()??);
    (0 < low && low <= high).then_some(low..=high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_the_kernel_is_used_if_it_is_valid() {
        assert_eq!(parse_range("32768\t60999\n"), Some(32_768..=60_999));
        assert_eq!(parse_range("1 65535"), Some(1..=65_535));
        for invalid in ["", "1", "a b", "0 9", "9 8", "1 65536", "-1 5"] {
            assert_eq!(parse_range(invalid), None, "{invalid:?}");
        }
        assert!(!ephemeral().is_empty());
    }

    #[test]
    fn candidates_come_again_after_all_others() {
        let range = 65_500..=65_535;
        let mut ports = Ports::with_range(range.clone());
        let mut all: Vec<_> = range.clone().map(|_| ports.next_candidate()).collect();
        let first = all[0];
        assert_eq!(ports.next_candidate(), first);
        all.sort_unstable();
        assert_eq!(all, range.collect::<Vec<_>>());
    }
}
