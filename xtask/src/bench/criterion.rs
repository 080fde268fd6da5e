//! `cargo xtask bench criterion`: the times of benches/verbs, and which have changed since a baseline.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::softroce::{self, Ending, Options, Passthrough};
use crate::{process, workspace};

/// The benchmark's target in the root package.
const BENCH: &str = "verbs";
/// For the stub, whose run takes half a minute.
const LIMIT: Duration = Duration::from_secs(600);

/// The times of benches/verbs over the stub provider or a device, and what has changed since a baseline
///
/// With --save-baseline the times are kept in target/criterion. A later run with --baseline compares with them and fails
/// when a benchmark has become slower: when the whole of its change's 95 % confidence interval is beyond the threshold.
/// Both runs want the same machine, with nothing else to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run on a device, SoftRoCE in a guest unless this machine has one, instead of the stub
    #[arg(long)]
    device: bool,
    /// Keep the times under this name
    #[arg(long, value_name = "NAME", conflicts_with = "baseline")]
    save_baseline: Option<String>,
    /// Compare with the times kept under this name
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Changes that count, in per cent
    #[arg(long, default_value_t = 10.0, value_name = "PERCENT")]
    threshold: f64,
    /// Only benchmarks whose name matches this regular expression, such as `empty poll`
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let command = args.command(&build()?);
    let home = workspace::target_dir()?.join("criterion");
    // A file system may keep whole seconds only.
    let started = SystemTime::now() - Duration::from_secs(1);
    let status = run(args, &command, &home)?.status();
    if status != 0 || args.baseline.is_none() {
        return Ok(status);
    }
    let changes = changes(&home, started)?;
    if changes.is_empty() {
        bail!("nothing was compared: no benchmark is called so");
    }
    let threshold = args.threshold / 100.0;
    println!("\nchange of the median, and its 95 % confidence interval");
    for change in &changes {
        println!("{}", change.line(threshold));
    }
    let slower = changes.iter().filter(|change| change.verdict(threshold) == Verdict::Slower).count();
    println!("{} benchmarks, {slower} slower by more than {} %", changes.len(), args.threshold);
    Ok(i32::from(slower > 0))
}

impl Args {
    /// The command line of the benchmark's program.
    fn command(&self, program: &Path) -> Vec<String> {
        let mut words = vec![program.to_string_lossy().into_owned(), "--bench".to_owned(), "--quiet".to_owned()];
        for (option, name) in [("--save-baseline", &self.save_baseline), ("--baseline", &self.baseline)] {
            words.extend(name.iter().flat_map(|name| [option.to_owned(), name.clone()]));
        }
        words.extend(self.filter.clone());
        words
    }
}

/// Compiles the benchmark; its program.
fn build() -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["bench", "--no-run", "--package", "rdma-stack", "--bench", BENCH]);
    cargo.arg("--message-format=json-render-diagnostics");
    process::output(&mut cargo)?.lines().find_map(executable).context("cargo does not say where the benchmark is")
}

/// The benchmark's program in a line of what cargo says, if it is about that.
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

/// How much longer a benchmark takes than it did.
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

/// What criterion has written since `started`: `GROUP/FUNCTION/change/estimates.json` beside `new/benchmark.json`.
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

fn directories(of: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(of).with_context(|| format!("cannot read {}", of.display()))?;
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
    fn the_program_is_the_one_of_the_benchmark() {
        let line = |kind: &str, name: &str| {
            format!(r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},"executable":"/t/{name}-1"}}"#)
        };
        assert_eq!(executable(&line("bench", BENCH)), Some(PathBuf::from("/t/verbs-1")));
        assert_eq!(executable(&line("test", BENCH)), None);
        assert_eq!(executable(&line("bench", "other")), None);
        assert_eq!(executable("not JSON"), None);
    }

    #[test]
    fn a_change_counts_when_all_of_its_interval_does() {
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
    fn options_reach_the_program() {
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
