//! The part that runs in the guest: all launches of one side.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::pair;

/// First argument of this program that selects this part. The second argument is the [`Plan`].
pub(crate) const ARGUMENT: &str = "run-bench-softroce";

/// Pause on the guest's clock before each run, so that the kernel finishes deferred work of the previous program.
///
/// The clock skips over the pause.
const SETTLE: Duration = Duration::from_millis(200);

/// Number of attempts to run a case before the measured launches.
///
/// The first run reads the programs from the host. While the guest waits for that, it is idle, so its clock jumps from
/// timer to timer and exceeds any time limit if the host is busy.
const WARMUPS: u32 = 3;

/// The launches to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) launches: u32,
    /// Command lines of the server and the client of each case.
    ///
    /// Each launch runs every case once, so that every case has launches soon after boot. The identifiers of kernel objects
    /// grow over time, and so does the number of instructions to look them up.
    pub(super) cases: Vec<[Vec<String>; 2]>,
}

/// One line of output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// Kernel and program versions of the guest.
    Environment(BTreeMap<String, String>),
    /// Output of each case in one launch.
    Launch(Vec<Output>),
}

/// Lines that a client has printed, or the reason for their absence.
pub(super) type Output = Result<Vec<String>, String>;

/// Runs the plan in `words`.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    let plan: Plan = serde_json::from_str(words.first().context("no plan")?)?;
    // With random addresses, launches would not repeat.
    fs::write("/proc/sys/kernel/randomize_va_space", "0").context("cannot disable address space randomization")?;
    report(&Report::Environment(environment()))?;
    for case in &plan.cases {
        // A case that fails here fails again below, where the failure is reported.
        let _ = (0..WARMUPS).find(|_| run(case).is_ok());
    }
    let mut outputs: Vec<Output> = vec![Ok(Vec::new()); plan.cases.len()];
    for launch in 1..=plan.launches {
        eprintln!("launch {launch} of {}", plan.launches);
        for (output, case) in outputs.iter_mut().zip(&plan.cases) {
            // A case that has failed would fail again, perhaps at its time limit.
            if output.is_ok() {
                *output = run(case).map_err(|error| format!("`{}`: {error:#}", case[1].join(" ")));
            }
        }
        // Report only after all cases: a write to the host causes an interrupt once the host has read it.
        report(&Report::Launch(outputs.clone()))?;
    }
    Ok(0)
}

/// Runs a server and its client and returns the lines of the client.
fn run([server, client]: &[Vec<String>; 2]) -> Result<Vec<String>> {
    std::thread::sleep(SETTLE);
    pair::client_output(command(server)?, command(client)?)
}

fn report(report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

/// A command from `words`, with an environment that is the same on every machine.
pub(crate) fn command(words: &[String]) -> Result<Command> {
    let (program, arguments) = words.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear();
    for name in ["PATH", "LD_LIBRARY_PATH"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    Ok(command)
}

/// Versions of the kernel, of rdma-core, and of perftest.
pub(crate) fn environment() -> BTreeMap<String, String> {
    let kernel = rustix::system::uname();
    let mut facts =
        BTreeMap::from([("guest kernel".to_owned(), format!("Linux {}", kernel.release().to_string_lossy()))]);
    let library = Path::new("/usr/lib").join(format!("{}-linux-gnu/libibverbs.so.1", std::env::consts::ARCH));
    let library = library.canonicalize().unwrap_or(library);
    if let Some(version) = library.to_str().and_then(rdma_core) {
        facts.insert("guest rdma-core".to_owned(), version.to_owned());
    }
    // `ib_write_bw --version` prints the version and exits with a failure status.
    if let Ok(output) = Command::new("ib_write_bw").arg("--version").output() {
        if let Some(version) = String::from_utf8_lossy(&output.stdout).lines().find_map(perftest) {
            facts.insert("guest perftest".to_owned(), version.to_owned());
        }
    }
    facts
}

/// Package version in a library's file name: 44.0 in `libibverbs.so.1.14.44.0`.
///
/// The numbers are the version of the interface, of the library, and of the package.
fn rdma_core(library: &str) -> Option<&str> {
    library.rsplit_once(".so.1.")?.1.split_once('.').map(|(_, package)| package)
}

/// Version in perftest's line `Version: 6.06`.
fn perftest(line: &str) -> Option<&str> {
    line.trim().strip_prefix("Version: ").map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        assert_eq!(rdma_core("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0"), Some("44.0"));
        assert_eq!(rdma_core("/usr/lib/libibverbs.so.1"), None);
        assert_eq!(perftest("Version: 6.06"), Some("6.06"));
    }

    #[test]
    fn programs_get_a_fixed_environment() {
        let words = ["env".to_owned(), "-u".to_owned()];
        let command = command(&words).unwrap();
        assert_eq!(crate::process::display(&command), "env -u");
        assert!(command.get_envs().all(|(name, _)| name == "PATH" || name == "LD_LIBRARY_PATH"));
    }
}
