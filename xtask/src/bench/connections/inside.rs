//! The part that runs where the device is: `cmtime` over one connection manager.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::pair::{self, Ends, Ready};
use crate::{process, soft};

/// First argument of this program that selects this part. The second argument is the [`Plan`].
pub(crate) const ARGUMENT: &str = "run-bench-connections";

/// Port of the server.
const PORT: u16 = 7471;
/// Descriptors of a process. On soft0 a connection of `cmtime` takes four.
const DESCRIPTORS: u64 = 65_536;
/// Interval between two samples of memory.
const SAMPLE: Duration = Duration::from_millis(2);

/// A connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Manager {
    /// `rdma_cm` of the kernel, over the device `rxe0`.
    Kernel,
    Soft,
}

/// What to measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// One after the other.
    pub(super) managers: Vec<Manager>,
    /// Connections of each run.
    pub(super) connections: u32,
    /// Connections of the runs that the memory of the others is compared with.
    pub(super) few: u32,
    pub(super) rounds: u32,
    /// `librdma_soft.so`.
    pub(super) library: PathBuf,
}

/// One line of output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// Versions of the kernel and of rdma-core.
    Environment(BTreeMap<String, String>),
    Round(Manager, Round),
}

/// Results of one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    /// Steps in the order of `cmtime`, each with its microseconds per connection.
    pub(super) steps: Vec<(String, f64)>,
    /// Bytes per connection.
    pub(super) memory: Memory<f64>,
}

/// Memory of connections, both ends of each.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Memory<T> {
    /// Resident memory of the two processes.
    pub(super) processes: T,
    /// Decrease of the available memory, which the processes and the kernel have taken.
    pub(super) system: T,
}

/// Runs the plan in `words`.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    let plan: Plan = serde_json::from_str(words.first().context("no plan")?)?;
    report(&Report::Environment(crate::bench::softroce::inside::environment()))?;
    raise_limit_of_descriptors()?;
    for (index, manager) in plan.managers.iter().enumerate() {
        if *manager == Manager::Soft && !is_alone() {
            // A network namespace has no other listeners.
            let rest = Plan { managers: plan.managers[index..].to_vec(), ..plan };
            return run_alone(&rest);
        }
        for _ in 0..plan.rounds {
            report(&Report::Round(*manager, measure(&plan, *manager)?))?;
        }
    }
    Ok(0)
}

/// Raises the limit to [`DESCRIPTORS`], or else as far as this process may.
fn raise_limit_of_descriptors() -> Result<()> {
    let set = |limit| rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit });
    let most = rustix::process::getrlimit(Resource::Nofile).maximum;
    set(Some(DESCRIPTORS)).or_else(|_| set(most)).context("cannot raise the limit of descriptors")
}

/// Whether [`run_alone`] has started this process, in its own network namespace.
fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

const ALONE: &str = "RDMA_BENCH_ALONE";

fn run_alone(plan: &Plan) -> Result<i32> {
    let script = r#"ip link set lo up && exec "$@""#;
    let mut command = Command::new("unshare");
    // In a guest, the program has no path. Its parent process waits, so this one is valid.
    command.args(["--net", "--", "sh", "-c", script, "sh", &format!("/proc/{}/exe", std::process::id())]);
    command.args([ARGUMENT, &serde_json::to_string(plan)?]).env(ALONE, "1");
    process::run(&mut command)?;
    Ok(0)
}

fn measure(plan: &Plan, manager: Manager) -> Result<Round> {
    // The first runs read the programs, and fill the caches of the kernel.
    run(plan, manager, plan.connections)?;
    let steps = run(plan, manager, plan.connections)?;
    let memory = [plan.few, plan.connections].map(|connections| sampled(|| run(plan, manager, connections)));
    let [few, many] = memory;
    let (few, many) = (few?, many?);
    let more = f64::from(plan.connections - plan.few);
    let growth = |of: fn(&Memory<u64>) -> u64| (of(&many) as f64 - of(&few) as f64) * 1024.0 / more;
    let memory = Memory { processes: growth(|of| of.processes), system: growth(|of| of.system) };
    Ok(Round { steps, memory })
}

/// Makes connections, and returns the microseconds per connection of each step.
fn run(plan: &Plan, manager: Manager, connections: u32) -> Result<Vec<(String, f64)>> {
    let (address, port) = (if manager == Manager::Kernel { "10.9.9.1" } else { "127.0.0.1" }, PORT.to_string());
    let count = connections.to_string();
    let command = |own: &[&str]| {
        let mut command = Command::new("cmtime");
        command.args(["-c", &count, "-p", &port]).args(own);
        if manager == Manager::Soft {
            soft::preload(&mut command, &plan.library, None)?;
        }
        anyhow::Ok(command)
    };
    let (server, client) = (command(&["-b", address])?, command(&["-s", address])?);
    let name = format!("/{port}/");
    let ready = if manager == Manager::Kernel { Ready::Kernel(PORT) } else { Ready::Soft(&name) };
    let [said_by_server, lines] = pair::output(ready, Ends::Killed, server, client)?;
    // The status of cmtime does not tell.
    let is_failure = |line: &&String| line.starts_with("event: ") || line.starts_with("failure");
    if let Some(failure) = said_by_server.iter().chain(&lines).find(is_failure) {
        bail!("cmtime -c {count}: {failure}");
    }
    let steps: Vec<_> = lines.iter().filter_map(|line| step(line)).collect();
    if steps.is_empty() {
        bail!("cmtime has no results:\n  {}", lines.join("\n  "));
    }
    Ok(steps.into_iter().map(|(name, milliseconds)| (name, milliseconds * 1e3 / f64::from(connections))).collect())
}

/// Name and total milliseconds of a step, in a line such as `create id    :        0.26       0.08       0.00       2.64`.
fn step(line: &str) -> Option<(String, f64)> {
    let (name, figures) = line.split_once(':')?;
    Some((name.trim().to_owned(), figures.split_whitespace().next()?.parse().ok()?))
}

/// Runs `work` and returns the most memory that it has taken at a time, in KiB.
fn sampled<T>(work: impl FnOnce() -> Result<T>) -> Result<Memory<u64>> {
    let before = available()?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampling = scope.spawn(|| {
            let (mut least, mut peaks) = (before, BTreeMap::new());
            while !done.load(Ordering::Relaxed) {
                least = least.min(available()?);
                peaks.extend(peaks_of("cmtime"));
                thread::sleep(SAMPLE);
            }
            anyhow::Ok(Memory { processes: peaks.into_values().sum(), system: before - least })
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        let memory = sampling.join().ok().context("no samples")?;
        result.and(memory)
    })
}

/// The largest resident memory so far, in KiB, of all processes of a program, by process id.
fn peaks_of(program: &str) -> BTreeMap<String, u64> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let peak = |entry: fs::DirEntry| {
        let is_it = fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == program);
        let status = is_it.then(|| fs::read_to_string(entry.path().join("status")).ok()).flatten()?;
        Some((entry.file_name().into_string().ok()?, kibibytes(&status, "VmHWM")?))
    };
    processes.filter_map(peak).collect()
}

/// Memory that programs can allocate, in KiB. It contains the free pages that are reserved for one processor, which
/// `MemAvailable` leaves out: several MiB in a guest.
fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let shared = kibibytes(&text, "MemAvailable").context("the kernel does not report MemAvailable")?;
    Ok(shared + reserved_pages(&fs::read_to_string("/proc/zoneinfo")?) * rustix::param::page_size() as u64 / 1024)
}

/// Free pages that are reserved for one processor each, in lines such as `              count: 154`.
fn reserved_pages(zoneinfo: &str) -> u64 {
    let counts = zoneinfo.lines().filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok());
    counts.sum()
}

/// The value in a line such as `MemAvailable:    1880388 kB`.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn report(report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_a_step_is_read() {
        assert_eq!(
            step("resolve addr :        3.77       3.63    3618.00      37.74"),
            Some(("resolve addr".into(), 3.77))
        );
        assert_eq!(step("step              total ms     max ms     min us  us / conn"), None);
        assert_eq!(step("event: RDMA_CM_EVENT_REJECTED, error: 28"), None);
    }

    #[test]
    fn values_of_procfs_are_read_by_their_whole_names() {
        let text = "MemAvailableX:  1 kB\nMemAvailable:    1880388 kB\nThreads:\t1\n";
        assert_eq!(kibibytes(text, "MemAvailable"), Some(1_880_388));
        assert_eq!(kibibytes(text, "Threads"), None);
        assert_eq!(kibibytes(text, "Mem"), None);
    }

    #[test]
    fn reserved_pages_of_all_processors_and_zones_are_added_up() {
        let text = "  pagesets\n    cpu: 0\n              count: 154\n              high:  9\n    cpu: 1\n              count: 3\n";
        assert_eq!(reserved_pages(text), 157);
    }

    #[test]
    fn memory_of_processes_is_sampled() {
        let own = fs::read_to_string("/proc/self/comm").unwrap();
        let peaks = peaks_of(own.trim());
        assert!(peaks[&std::process::id().to_string()] > 100, "{peaks:?}");
        assert!(sampled(|| anyhow::Ok(())).is_ok());
    }
}
