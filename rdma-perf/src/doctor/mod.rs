//! `rdma-perf doctor`: finds problems of a host's RDMA set-up, and says how to fix them.
//!
//! The checks read files below a root directory and a record of libibverbs' answers, so that tests can provide any
//! host.

mod cgroup;
mod device;
mod finding;
mod firewall;
mod gid;
mod library;
mod memory;
mod modules;
mod pcie;
mod port;
mod processor;
mod stack;

use std::io::{self, Write};

use anyhow::Result;

use crate::host::files::HostFiles;
use finding::{Diagnosis, Finding};
use firewall::Ruleset;
use stack::Stack;

/// Prints the findings. The status is 1 if any is a problem.
pub(crate) fn main(device: Option<&str>, json: bool) -> Result<i32> {
    let host = HostFiles::new("/");
    let stack = Stack::query(&host);
    let diagnosis = Diagnosis::new(examine(&host, &stack, device, &firewall::nft));
    let text = if json { serde_json::to_string_pretty(&diagnosis)? + "\n" } else { diagnosis.text() };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader, such as `head`, has closed the pipe.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
        _ => {}
    }
    Ok(i32::from(diagnosis.has_problems()))
}

fn examine(host: &HostFiles, stack: &Stack, wanted: Option<&str>, ruleset: Ruleset<'_>) -> Vec<Finding> {
    // `device::check` reports an unreadable class.
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
    fn a_host_without_rdma_has_problems() {
        let stack = Stack { library: Err("no library".into()), devices: Err("no library".into()) };
        let findings = examine(&HostFiles::new("/nowhere"), &stack, None, &|| Ok(String::new()));
        let problems: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Problem).collect();
        assert_eq!(problems.len(), 3, "library, module and device: {problems:?}");
        let diagnosis = Diagnosis::new(findings);
        assert!(diagnosis.has_problems());
        assert!(diagnosis.text().contains("✗ problem  the kernel has no RDMA device"));
        let json = serde_json::to_string(&diagnosis).unwrap();
        assert!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["findings"].is_array());
    }

    #[test]
    fn this_host_can_be_examined() {
        let host = HostFiles::new("/");
        let findings = examine(&host, &Stack::query(&host), None, &|| Err("not in a test".into()));
        assert!(findings.len() >= 5, "{findings:?}");
    }
}
