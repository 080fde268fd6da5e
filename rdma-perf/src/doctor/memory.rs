//! Memory: limit of locked memory, and huge pages.

use super::finding::{Finding, Topic};
use crate::host::files::{HostFiles, IPC_LOCK};
use crate::units::amount;

pub(crate) fn check(host: &HostFiles) -> Vec<Finding> {
    vec![locked(host), huge_pages(host)]
}

/// Below this, the buffers of a few queue pairs with messages of a megabyte do not fit.
const ENOUGH: u64 = 1 << 30;

fn locked(host: &HostFiles) -> Finding {
    if host.has_capability(IPC_LOCK) {
        return Topic::Memory.ok("this user may lock any amount of memory (CAP_IPC_LOCK)");
    }
    let limits = match host.text("/proc/self/limits") {
        Ok(limits) => limits,
        Err(error) => return Topic::Memory.note(error.to_string()),
    };
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next()).unwrap_or_default();
    match soft.parse::<u64>() {
        _ if soft == "unlimited" => Topic::Memory.ok("this user may lock any amount of memory (ulimit -l)"),
        Ok(bytes) if bytes >= ENOUGH => Topic::Memory.ok(format!("this user may lock {} of memory", amount(bytes))),
        Ok(bytes) => Topic::Memory
            .warning(format!("this user may lock no more than {} of memory", amount(bytes)))
            .why("Registered memory is locked. Registering more fails with ENOMEM.")
            .fix(
                "ulimit -l unlimited, permanently `* - memlock unlimited` in /etc/security/limits.d/rdma.conf, \
                 in a systemd unit LimitMEMLOCK=infinity",
            ),
        Err(_) => Topic::Memory.note("/proc/self/limits does not say how much memory may be locked"),
    }
}

const HUGE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

fn huge_pages(host: &HostFiles) -> Finding {
    let [Some(all), Some(free)] = ["nr_hugepages", "free_hugepages"].map(|name| host.number(&format!("{HUGE}/{name}")))
    else {
        return Topic::Memory.note("this kernel has no huge pages of 2 MiB");
    };
    let fix = "sysctl vm.nr_hugepages=512";
    match (all, free) {
        (0, _) => Topic::Memory
            .note("no huge pages are reserved")
            .why("--huge-pages needs them. They reduce address translations in the RNIC for large buffers.")
            .fix(fix),
        (all, 0) => Topic::Memory.note(format!("all {all} huge pages of 2 MiB are in use")).fix(fix),
        (all, free) => Topic::Memory.ok(format!("{free} of {all} huge pages of 2 MiB are free")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use crate::testing::scratch::Scratch;

    fn locked_with(capabilities: &str, limit: &str) -> Finding {
        let scratch = Scratch::new();
        scratch.write("/proc/self/status", &format!("CapEff:\t{capabilities}\n"));
        let limits =
            format!("Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {limit}    {limit}    bytes\n");
        scratch.write("/proc/self/limits", &limits);
        locked(&HostFiles::new(scratch.path("")))
    }

    #[test]
    fn a_small_limit_of_locked_memory_is_a_warning() {
        let finding = locked_with("0", "8388608");
        assert_eq!((finding.level, finding.what.contains("8 MiB")), (Level::Warning, true));
        assert_eq!(locked_with("0", "unlimited").level, Level::Ok);
        assert_eq!(locked_with("0", "4294967296").what, "this user may lock 4 GiB of memory");
        assert_eq!(locked_with("000001ffffffffff", "65536").level, Level::Ok);
        assert_eq!(locked_with("0", "?").level, Level::Note);
        assert!(locked(&HostFiles::new("/nowhere")).what.contains("cannot be read"));
    }

    #[test]
    fn huge_pages_are_counted() {
        let scratch = Scratch::new();
        let host = HostFiles::new(scratch.path(""));
        assert_eq!(huge_pages(&host).what, "this kernel has no huge pages of 2 MiB");
        let set = |all: &str, free: &str| {
            scratch.write(&format!("{HUGE}/nr_hugepages"), all);
            scratch.write(&format!("{HUGE}/free_hugepages"), free);
            huge_pages(&host)
        };
        assert!(set("0\n", "0\n").fix.is_some());
        assert_eq!(set("512\n", "0\n").what, "all 512 huge pages of 2 MiB are in use");
        assert_eq!(set("512\n", "500\n"), Topic::Memory.ok("500 of 512 huge pages of 2 MiB are free"));
    }
}
