//! The wire between the two machines.

use std::process::Command;

use crate::skip;

/// This machine, and the way to the other.
pub(crate) struct Host {
    /// Whether it is the first of the two.
    pub(crate) is_first: bool,
    /// Its address.
    pub(crate) own: String,
    /// The address of the other.
    pub(crate) peer: String,
    /// The interface between them.
    pub(crate) interface: String,
}

impl Host {
    /// `None` after having said that there are no two hosts.
    pub(crate) fn this() -> Option<Host> {
        let variable = |name: &str| std::env::var(name).ok();
        let (Some(host), Some(own), Some(peer)) = (variable("RDMA_HOST"), variable("RDMA_SELF"), variable("RDMA_PEER"))
        else {
            return skip("this is not one of two hosts (cargo xtask test --only hosts)");
        };
        let addresses = run("ip", &["-oneline", "-4", "address"]);
        let line = addresses.lines().find(|line| line.contains(&format!(" {own}/")));
        let interface = line.and_then(|line| line.split_whitespace().nth(1)).expect("an interface has the address");
        Some(Host { is_first: host == "0", own, peer, interface: interface.to_owned() })
    }

    /// Spoils what leaves by the wire, until the value is dropped: tc-netem(8).
    pub(crate) fn spoil(&self, how: &[&str]) -> Spoilt {
        // More than can be on its way: what is lost is what is to be lost.
        let netem = ["qdisc", "add", "dev", &self.interface, "root", "netem", "limit", "10000"];
        run("tc", &[&netem[..], how].concat());
        Spoilt(self.interface.clone())
    }
}

/// A wire that is spoilt.
pub(crate) struct Spoilt(String);

impl Spoilt {
    /// Packets that were lost on the way.
    pub(crate) fn dropped(&self) -> u64 {
        let said = run("tc", &["-s", "qdisc", "show", "dev", &self.0, "root"]);
        let number = said.split_once("dropped ").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
        number.unwrap_or_else(|| panic!("no number of lost packets in:\n{said}"))
    }
}

impl Drop for Spoilt {
    fn drop(&mut self) {
        let delete = ["qdisc", "delete", "dev", &self.0, "root"];
        let _ = Command::new("tc").args(delete).status();
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
