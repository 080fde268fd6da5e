//! `rdma-perf doctor`: what keeps a host from RDMA, or from being fast at it, and what to do about that.
//!
//! The checks read files below a root, and what libibverbs has said, so that tests can give them hosts that nobody has.

mod cgroup;
mod device;
mod finding;
mod firewall;
mod gid;
mod host;
mod library;
mod memory;
mod modules;
mod pcie;
mod port;
mod processor;
mod stack;

use std::io::{self, Write};

use anyhow::Result;

use crate::cli::DoctorArgs;
use finding::{Diagnosis, Finding};
use firewall::Ruleset;
use host::Host;
pub(crate) use host::amount;
use stack::Stack;

/// Prints the findings. The status is 1 when there is a problem among them.
pub(crate) fn main(args: &DoctorArgs) -> Result<i32> {
    let host = Host::new("/");
    let stack = Stack::query(&host);
    let diagnosis = Diagnosis::new(examine(&host, &stack, args.device.as_deref(), &firewall::nft));
    let text = if args.json { serde_json::to_string_pretty(&diagnosis)? + "\n" } else { diagnosis.text() };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // A reader such as `head` has seen enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
        _ => {}
    }
    Ok(i32::from(diagnosis.has_problems()))
}

/// Bytes of memory that this process can have, if that can be found out.
pub(crate) fn available_memory() -> Option<u64> {
    memory::available(&Host::new("/"))
}

fn examine(host: &Host, stack: &Stack, wanted: Option<&str>, ruleset: Ruleset<'_>) -> Vec<Finding> {
    // When the class cannot be read, `device::check` says so.
    let devices = device::names(host, wanted).unwrap_or_default();
    let mut findings = library::check(host, stack);
    findings.extend(modules::check(host, &devices));
    findings.extend(device::check(host, stack, wanted));
    findings.extend(port::check(host, stack, &devices));
    findings.extend(gid::check(host, &devices));
    findings.extend(memory::check(host));
    findings.extend(cgroup::check(host, &devices));
    findings.extend(firewall::check(host, &devices, ruleset));
    findings.extend(pcie::check(host, &devices));
    findings.extend(processor::check(host, &devices));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use finding::Level;

    #[test]
    fn a_bare_host_has_problems_and_makes_no_panic() {
        let stack = Stack { library: Err("no library".into()), devices: Err("no library".into()) };
        let findings = examine(&Host::new("/nowhere"), &stack, None, &|| Ok(String::new()));
        let problems: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Problem).collect();
        assert_eq!(problems.len(), 3, "library, module and device: {problems:?}");
        let diagnosis = Diagnosis::new(findings);
        assert!(diagnosis.has_problems());
        assert!(diagnosis.text().contains("✗ problem  the kernel has no RDMA device"));
        let json = serde_json::to_string(&diagnosis).unwrap();
        assert!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["findings"].is_array());
    }

    #[test]
    fn this_host_can_be_examined_whatever_it_has() {
        let host = Host::new("/");
        let findings = examine(&host, &Stack::query(&host), None, &|| Err("not in a test".into()));
        assert!(findings.len() >= 5, "{findings:?}");
    }
}
