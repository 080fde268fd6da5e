//! The network between the two machines.

use std::process::Command;

use crate::lab::wait_until;
use crate::skip;

/// This machine, and how to reach the other one.
pub(crate) struct Host {
    /// Whether this is the first of the two machines.
    pub(crate) is_first: bool,
    /// Address of this machine.
    pub(crate) own: String,
    /// Address of the other machine.
    pub(crate) peer: String,
    /// Name of the interface to the other machine.
    pub(crate) interface: String,
}

impl Host {
    /// Reads the variables of this host. Prints the reason and returns `None` if there are no two hosts.
    pub(crate) fn from_env() -> Option<Host> {
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

    /// Link-local IPv6 address of the interface, once no other host can have it.
    pub(crate) fn link_local(&self) -> Option<String> {
        let shown = wait_until("the end of duplicate address detection", || {
            let shown = run("ip", &["-oneline", "-6", "address", "show", "dev", &self.interface, "scope", "link"]);
            (!shown.contains("tentative")).then_some(shown)
        });
        let address = |line: &str| Some(line.split_once("inet6 ")?.1.split_once('/')?.0.to_owned());
        shown.lines().find_map(address)
    }

    /// Impairs outgoing packets with tc-netem(8) until the returned value is dropped.
    pub(crate) fn impair(&self, options: &[&str]) -> Impairment {
        // The limit exceeds the number of packets in flight, so that only the requested loss occurs.
        let netem = ["qdisc", "add", "dev", &self.interface, "root", "netem", "limit", "10000"];
        run("tc", &[&netem[..], options].concat());
        Impairment(self.interface.clone())
    }
}

/// An impaired interface. Dropping it removes the impairment.
pub(crate) struct Impairment(String);

impl Impairment {
    /// Number of packets that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        let output = run("tc", &["-s", "qdisc", "show", "dev", &self.0, "root"]);
        let number = output.split_once("dropped ").and_then(|(_, tail)| tail.split(',').next()?.parse().ok());
        number.unwrap_or_else(|| panic!("no number of dropped packets in:\n{output}"))
    }
}

impl Drop for Impairment {
    fn drop(&mut self) {
        let delete = ["qdisc", "delete", "dev", &self.0, "root"];
        let _ = Command::new("tc").args(delete).status();
    }
}

/// Runs a program, which must succeed, and returns its standard output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
