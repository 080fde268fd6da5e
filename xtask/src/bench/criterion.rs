//! `cargo xtask bench criterion`: times of benches/verbs, compared with a baseline.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::softroce::{self, Ending, Options, Passthrough};
use crate::{process, workspace};

/// Name of the `[[bench]]` target in the package rdma-benches.
const BENCH: &str = "verbs";
/// Time limit of a run over the stub, which usually takes half a minute.
const LIMIT: Duration = Duration::from_secs(600);

/// Time the benchmarks of benches/verbs, over the stub provider or a device, and compare them with a baseline
///
/// --save-baseline saves the times in target/criterion. A later run with --baseline compares against them and fails if a
/// benchmark has become slower, that is, if the whole 95 % confidence interval of its change lies above the threshold.
/// Run both on the same machine, and keep that machine otherwise idle.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run over a device instead of the stub: one of this machine, or else SoftRoCE in a guest
    #[arg(long)]
    device: bool,
    /// Save the times as a baseline with this name
    #[arg(long, value_name = "NAME", conflicts_with = "baseline")]
    save_baseline: Option<String>,
    /// Compare with the baseline of this name
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Smallest change that counts, in per cent
    #[arg(long, default_value_t = 10.0, value_name = "PERCENT")]
    threshold: f64,
    /// Run only benchmarks whose name matches this regular expression, such as `empty poll`
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let command = args.command(&build()?);
    let home = workspace::target_dir()?.join("criterion");
    // Some file systems store modification times in whole seconds.
    let started = SystemTime::now() - Duration::from_secs(1);
    let status = run(args, &command, &home)?.status();
    if status != 0 || args.baseline.is_none() {
        return Ok(status);
    }
    let changes = changes(&home, started)?;
    if changes.is_empty() {
        bail!("nothing to compare: no benchmark matches the filter");
    }
    let threshold = args.threshold / 100.0;
    println!("\nchange of the median, with its 95 % confidence interval");
    for change in &changes {
        println!("{}", change.line(threshold));
    }
    let slower = changes.iter().filter(|change| change.verdict(threshold) == Verdict::Slower).count();
    println!("{} benchmarks, {slower} slower by more than {} %", changes.len(), args.threshold);
    Ok(i32::from(slower > 0))
}

impl Args {
    /// Command line of the benchmark program.
    fn command(&self, program: &Path) -> Vec<String> {
        let mut words = vec![program.to_string_lossy().into_owned(), "--bench".to_owned(), "--quiet".to_owned()];
        for (option, name) in [("--save-baseline", &self.save_baseline), ("--baseline", &self.baseline)] {
            words.extend(name.iter().flat_map(|name| [option.to_owned(), name.clone()]));
        }
        words.extend(self.filter.clone());
        words
    }
}

/// Compiles the benchmark and returns the path of its program.
fn build() -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["bench", "--no-run", "--package", "rdma-benches", "--bench", BENCH]);
    cargo.arg("--message-format=json-render-diagnostics");
    process::output(&mut cargo)?.lines().find_map(executable).context("cargo reported no executable for the benchmark")
}

/// Path of the benchmark program, if this line of cargo's JSON output reports it.
fn executable(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let target = message.get("target")?;
    let is_bench = target.get("name")? == BENCH && target.get("kind")?.as_array()?.iter().any(|kind| kind == "bench");
    message.get("executable").filter(|_| is_bench)?.as_str().map(PathBuf::from)
}

fn run(args: &Args, command: &[String], home: &Path) -> Result<Ending> {
    const HOME: &str = "CRITERION_HOME";
    std::env::set_current_dir(workspace::root())?;
    let home = home.to_string_lossy().into_owned();
    if args.device {
        let device = std::env::var("RDMA_DEVICE").unwrap_or_else(|_| "rxe0".to_owned());
        let environment = vec![("RDMA_DEVICE".to_owned(), device), (HOME.to_owned(), home)];
        return softroce::run(command, &Options { environment, ..Options::default() }, &mut Passthrough);
    }
    let (program, words) = command.split_first().context("no command")?;
    let mut local = Command::new(program);
    local.args(words).env(HOME, home).env_remove("RDMA_DEVICE");
    softroce::run_local(local, LIMIT, &mut Passthrough)
}

/// Change of a benchmark's time relative to the baseline, as a fraction.
#[derive(Debug, PartialEq)]
struct Change {
    name: String,
    median: f64,
    /// 95 % confidence interval.
    interval: [f64; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Slower,
    Faster,
    Same,
}

impl Change {
    fn verdict(&self, threshold: f64) -> Verdict {
        match self.interval {
            [lower, _] if lower > threshold => Verdict::Slower,
            [_, upper] if upper < -threshold => Verdict::Faster,
            _ => Verdict::Same,
        }
    }

    fn line(&self, threshold: f64) -> String {
        let verdict = match self.verdict(threshold) {
            Verdict::Slower => "  slower",
            Verdict::Faster => "  faster",
            Verdict::Same => "",
        };
        let [lower, upper] = self.interval.map(|bound| bound * 100.0);
        format!("{:<42} {:+7.1} %  {lower:+7.1} .. {upper:+7.1} %{verdict}", self.name, self.median * 100.0)
    }
}

/// Changes that criterion has written since `started`.
///
/// Each is a file `GROUP/FUNCTION/change/estimates.json`, with `new/benchmark.json` beside `change`.
fn changes(home: &Path, started: SystemTime) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for group in directories(home)? {
        for function in directories(&group)? {
            let estimates = function.join("change/estimates.json");
            let is_new = |path: &Path| fs::metadata(path)?.modified().map(|modified| modified >= started);
            if is_new(&estimates).unwrap_or(false) {
                changes.push(change(&read(&function.join("new/benchmark.json"))?, &read(&estimates)?)?);
            }
        }
    }
    changes.sort_by(|first, second| first.name.cmp(&second.name));
    Ok(changes)
}

fn directories(parent: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(parent).with_context(|| format!("cannot read {}", parent.display()))?;
    let paths: Vec<PathBuf> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    Ok(paths.into_iter().filter(|path| path.is_dir()).collect())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn change(benchmark: &str, estimates: &str) -> Result<Change> {
    #[derive(Deserialize)]
    struct Benchmark {
        full_id: String,
    }
    #[derive(Deserialize)]
    struct Estimates {
        median: Estimate,
    }
    #[derive(Deserialize)]
    struct Estimate {
        point_estimate: f64,
        confidence_interval: Interval,
    }
    #[derive(Deserialize)]
    struct Interval {
        lower_bound: f64,
        upper_bound: f64,
    }
    let Benchmark { full_id: name } = serde_json::from_str(benchmark)?;
    let Estimates { median } = serde_json::from_str(estimates)?;
    let interval = [median.confidence_interval.lower_bound, median.confidence_interval.upper_bound];
    Ok(Change { name, median: median.point_estimate, interval })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_executable_of_the_benchmark_target() {
        let line = |kind: &str, name: &str| {
            format!(r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},"executable":"/t/{name}-1"}}"#)
        };
        assert_eq!(executable(&line("bench", BENCH)), Some(PathBuf::from("/t/verbs-1")));
        assert_eq!(executable(&line("test", BENCH)), None);
        assert_eq!(executable(&line("bench", "other")), None);
        assert_eq!(executable("not JSON"), None);
    }

    #[test]
    fn a_change_counts_when_its_whole_interval_exceeds_the_threshold() {
        let estimates = r#"{"median":{"confidence_interval":{"confidence_level":0.95,"lower_bound":0.12,
            "upper_bound":0.2},"point_estimate":0.15,"standard_error":0.02},"mean":{}}"#;
        let mut change = change(r#"{"group_id":"stub0/a","full_id":"stub0/a/b"}"#, estimates).unwrap();
        assert_eq!((change.name.as_str(), change.median), ("stub0/a/b", 0.15));
        assert_eq!(change.verdict(0.1), Verdict::Slower);
        assert!(change.line(0.1).ends_with("+15.0 %    +12.0 ..   +20.0 %  slower"), "{}", change.line(0.1));
        assert_eq!(change.verdict(0.15), Verdict::Same);
        change.interval = [-0.3, -0.2];
        assert_eq!(change.verdict(0.1), Verdict::Faster);
        change.interval = [-0.3, 0.3];
        assert_eq!(change.verdict(0.1), Verdict::Same);
    }

    #[test]
    fn options_are_passed_to_the_program() {
        let args = Args {
            device: false,
            save_baseline: Some("before".into()),
            baseline: None,
            threshold: 10.0,
            filter: Some("raw".into()),
        };
        assert_eq!(
            args.command(Path::new("/t/verbs-1")).join(" "),
            "/t/verbs-1 --bench --quiet --save-baseline before raw"
        );
    }
}
