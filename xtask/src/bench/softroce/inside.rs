//! The part that runs in the guest: every launch of one side.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::pair;

/// The argument that makes this program run the [`Plan`] in the next one.
pub(crate) const ARGUMENT: &str = "run-bench-softroce";

/// Of the guest's clock, which jumps over it: what the kernel puts off until after a program's end is done by then.
const SETTLE: Duration = Duration::from_millis(200);

/// Tries to run a case before it counts. Programs are read from the host the first time, and while the guest waits for
/// that with nothing else to do, its clock jumps from timer to timer, beyond any time limit if the host is busy.
const REHEARSALS: u32 = 3;

/// What to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) launches: u32,
    /// The words of a server and of its client. All of them run once in each launch, so that every case has launches
    /// early after the boot: identifiers of kernel objects grow, and with them the instructions that look them up.
    pub(super) cases: Vec<[Vec<String>; 2]>,
}

/// One line of output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// The guest's kernel and programs.
    Environment(BTreeMap<String, String>),
    /// The output of each case.
    Launch(Vec<Output>),
}

/// The lines that a client has printed, or why there are none.
pub(super) type Output = Result<Vec<String>, String>;

/// Runs the plan in `words`.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    let plan: Plan = serde_json::from_str(words.first().context("no plan")?)?;
    // Random addresses would make every launch another.
    fs::write("/proc/sys/kernel/randomize_va_space", "0").context("cannot make addresses repeat")?;
    report(&Report::Environment(environment()))?;
    for case in &plan.cases {
        // What fails here fails again below, where it is reported.
        let _ = (0..REHEARSALS).find(|_| run(case).is_ok());
    }
    let mut outputs: Vec<Output> = vec![Ok(Vec::new()); plan.cases.len()];
    for launch in 1..=plan.launches {
        eprintln!("launch {launch} of {}", plan.launches);
        for (output, case) in outputs.iter_mut().zip(&plan.cases) {
            // What has failed would fail again, perhaps by reaching its time limit.
            if output.is_ok() {
                *output = run(case).map_err(|error| format!("`{}`: {error:#}", case[1].join(" ")));
            }
        }
        // Not before, since what writes to the host is interrupted when the host has read it.
        report(&Report::Launch(outputs.clone()))?;
    }
    Ok(0)
}

/// Runs a server and its client; the lines of the client.
fn run([server, client]: &[Vec<String>; 2]) -> Result<Vec<String>> {
    std::thread::sleep(SETTLE);
    pair::client_output(command(server)?, command(client)?)
}

fn report(report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

/// The program and arguments of `words`, in an environment that is the same wherever this runs.
fn command(words: &[String]) -> Result<Command> {
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

fn environment() -> BTreeMap<String, String> {
    let kernel = rustix::system::uname();
    let mut facts =
        BTreeMap::from([("guest kernel".to_owned(), format!("Linux {}", kernel.release().to_string_lossy()))]);
    let library = Path::new("/usr/lib").join(format!("{}-linux-gnu/libibverbs.so.1", std::env::consts::ARCH));
    let library = library.canonicalize().unwrap_or(library);
    if let Some(version) = library.to_str().and_then(rdma_core) {
        facts.insert("guest rdma-core".to_owned(), version.to_owned());
    }
    // Ends with a status of its own.
    if let Ok(output) = Command::new("ib_write_bw").arg("--version").output() {
        if let Some(version) = String::from_utf8_lossy(&output.stdout).lines().find_map(perftest) {
            facts.insert("guest perftest".to_owned(), version.to_owned());
        }
    }
    facts
}

/// 44.0 of `libibverbs.so.1.14.44.0`: the version of the interface, of the library, of the package.
fn rdma_core(library: &str) -> Option<&str> {
    library.rsplit_once(".so.1.")?.1.split_once('.').map(|(_, package)| package)
}

/// 6.06 of `Version: 6.06`.
fn perftest(line: &str) -> Option<&str> {
    line.trim().strip_prefix("Version: ").map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_has_them() {
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
