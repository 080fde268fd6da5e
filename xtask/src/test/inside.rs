//! Runs test programs one after another, on the machine that has the device.

use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::process;

/// The argument that makes this program run a [`Plan`], which is the next argument.
pub(crate) const ARGUMENT: &str = "run-device-tests";

/// Prefix of the line with the exit status of a test program.
const ENDED: &str = "xtask: ended with status ";

/// Prefix of the line that announces a test program.
const BEGINS: &str = "--> ";

/// Test programs to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Number of repetitions of all programs.
    pub(crate) rounds: u32,
    /// Time limit of one program, in seconds.
    pub(crate) limit: u64,
    pub(crate) programs: Vec<Program>,
    /// Arguments for every program.
    pub(crate) arguments: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) executable: String,
    /// Arguments for this program only.
    pub(crate) arguments: Vec<String>,
}

/// Parses the exit status from a line that reports the end of a test program.
pub(crate) fn ended(line: &str) -> Option<i32> {
    line.strip_prefix(ENDED)?.split_whitespace().next()?.parse().ok()
}

/// Parses the name and the round from a line that reports the start of a test program.
pub(crate) fn begun(line: &str) -> Option<&str> {
    line.strip_prefix(BEGINS)
}

/// Runs all programs of the plan in `words`, even after a failure.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    let plan: Plan = serde_json::from_str(words.first().context("no plan")?)?;
    for round in 1..=plan.rounds {
        for program in &plan.programs {
            let of = if plan.rounds > 1 { format!(", round {round}") } else { String::new() };
            println!("{BEGINS}{}{of}", program.name);
            let started = Instant::now();
            let status = run(program, &plan)?;
            // A program that crashes leaves a line without its end.
            println!("\n{ENDED}{status} after {:.1} s", started.elapsed().as_secs_f64());
        }
    }
    Ok(0)
}

fn run(program: &Program, plan: &Plan) -> Result<i32> {
    let limit = Duration::from_secs(plan.limit);
    let child =
        Command::new(&program.executable).args(&plan.arguments).args(&program.arguments).stdin(Stdio::null()).spawn();
    match child {
        Ok(child) => wait(child, limit),
        Err(error) => {
            println!("cannot run {}: {error}", program.executable);
            Ok(127)
        }
    }
}

/// Waits for `child`, and kills it after `limit`.
fn wait(mut child: Child, limit: Duration) -> Result<i32> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no process")?;
    let (sender, receiver) = channel();
    let waiter = std::thread::spawn(move || {
        let status = child.wait();
        let _ = sender.send(());
        status
    });
    if receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        println!("\nxtask: killed after {} s, its time limit", limit.as_secs());
        // The program may have ended just now. Its process number is not reused within microseconds.
        let _ = kill_process(pid, Signal::KILL);
    }
    let status = waiter.join().ok().context("the waiting thread panicked")??;
    Ok(process::shell_status(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_program_is_recognised() {
        assert_eq!(ended("xtask: ended with status 139 after 1.2 s"), Some(139));
        assert_eq!(ended("test a ... ok"), None);
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(wait(child, Duration::from_millis(20)).unwrap(), 137);
    }
}
