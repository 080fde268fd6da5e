//! `cargo xtask bench overhead`: instructions that a caller of verbs executes for each operation, beside C.

mod gates;
mod panics;
mod profile;
mod report;
mod rivals;
mod tools;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::gates::Verdict;
use self::rivals::Rivals;
use self::tools::Tools;
use super::result;
use crate::{process, workspace};

/// Instructions of the caller for each operation: in C, over rdma-sys, over both doors of rdma-safe
///
/// The operations are those of a provider that does nothing but a provider's work on memory; callgrind counts what is executed
/// outside of it, in the default release profile. The figures are the same on every run of the same compilers. The status is 1 if
/// a figure exceeds its limit, or if a loop allocates, can panic or has another checksum than C's.
///
/// rvN is a receive, in1 an inline send of 32 bytes without completion, em an empty poll, poll the taking of one of sixteen
/// completions with five fields, ud_send a datagram; the others post and poll, one at a time or sixteen, ex by the extended
/// interface, cl by the classic one. send and recv hand a buffer over and back. qp and mr create and destroy, the provider's
/// allocations included.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also count the loops over the crates sideway and ibverbs, as published
    ///
    /// They are compiled first, which takes minutes, cmake, libclang and libnl with its headers. The result then has tables of
    /// them, and gates of how many times the instructions of the raw door sideway needs. The status is 1 if one is not met, or
    /// if a loop of theirs has another checksum than C's; that they allocate is only shown.
    #[arg(long)]
    rivals: bool,
    /// Where to write the result, instead of target/bench/overhead.json
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The compiler whose C the gates compare with: it and rustc share a code generator.
const REFERENCE: &str = "clang";

/// Rows of the control path, which may allocate and panic.
const CONTROL: [&str; 2] = ["qp", "mr"];

/// What was found.
#[derive(Debug)]
pub(crate) struct Measured {
    tools: Tools,
    rows: Vec<Row>,
    rivals: Option<Rivals>,
    pub(crate) verdicts: Vec<Verdict>,
}

/// A loop in all its variants.
#[derive(Debug)]
struct Row {
    name: String,
    /// Instructions for each operation, by variant.
    instructions: BTreeMap<String, f64>,
    /// Calls of the allocator in the longer run, by variant.
    allocations: BTreeMap<String, u64>,
    /// The same for each operation.
    allocations_each: BTreeMap<String, f64>,
    /// Of the longer run, by variant.
    checksums: BTreeMap<String, u64>,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let tools = tools::find()?;
    if args.rivals {
        rivals::prepare()?;
    }
    let measured = measure(tools, args.rivals)?;
    let benchmark = report::benchmark(&measured)?;
    report::print(&measured, &benchmark);
    let file = args.json.clone().map_or_else(|| result::file("overhead"), Ok)?;
    benchmark.save(&file)?;
    println!("written to {}", file.display());
    Ok(i32::from(measured.verdicts.iter().any(|verdict| verdict.complaint.is_some())))
}

/// For the test command: the gates, or why they cannot be taken.
pub(crate) fn gates() -> Result<Result<Measured, String>> {
    match tools::find() {
        Ok(tools) => measure(tools, false).map(Ok),
        Err(error) => Ok(Err(format!("{error:#}"))),
    }
}

fn measure(tools: Tools, with_rivals: bool) -> Result<Measured> {
    let directory = workspace::target_dir()?.join("bench/overhead");
    let (program, stub) = build()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let mut loops = Vec::new();
    for compiler in &tools.compilers {
        let library = directory.join(format!("libloops-{}.so", compiler.name));
        let source = workspace::root().join("benches/overhead/loops.c");
        let mut command = Command::new(&compiler.path);
        command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-I"]).arg(&tools.headers);
        process::output(command.arg(source).arg("-o").arg(&library))?;
        loops.push(format!("{}={}", compiler.name, library.display()));
    }
    let run = Run { directory: &directory.join("profiles"), program: &program, arguments: &loops, stub: &stub };
    let rows = run.rows(&tools, ("RDMA_SYS_LIBIBVERBS", &stub))?;
    let mut verdicts = gates::judge(&rows, panics::reachable(&program, &rows)?);
    let rivals = with_rivals.then(|| rivals::measure(&tools, &stub)).transpose()?;
    if let Some(rivals) = &rivals {
        verdicts.extend(rivals.judge(&rows));
    }
    Ok(Measured { tools, rows, rivals, verdicts })
}

/// A program that measures loops.
struct Run<'run> {
    /// Of its profiles.
    directory: &'run Path,
    program: &'run Path,
    arguments: &'run [String],
    /// The provider, whose instructions do not count.
    stub: &'run Path,
}

impl Run<'_> {
    /// What it measures. `variable`, with its value, is all of its environment: nothing else shall matter.
    fn rows(&self, tools: &Tools, variable: (&str, &Path)) -> Result<Vec<Row>> {
        // Profiles of an earlier run would be taken for this one's.
        _ = std::fs::remove_dir_all(self.directory);
        std::fs::create_dir_all(self.directory)
            .with_context(|| format!("cannot create {}", self.directory.display()))?;
        let mut command = Command::new(&tools.valgrind);
        command.args(["--tool=callgrind", "--collect-atstart=no", "--dump-line=no", "--compress-pos=no"]);
        command.arg(format!("--callgrind-out-file={}", self.directory.join("profile").display()));
        command.arg(self.program).args(self.arguments);
        command.env_clear().env(variable.0, variable.1);
        let runs = process::output(&mut command)?;
        rows(&runs, &profile::read(self.directory, self.stub)?)
    }
}

/// The program with the loops, and the stub.
fn build() -> Result<(PathBuf, PathBuf)> {
    let mut command = Command::new(workspace::cargo());
    command.args(["build", "--release", "--package", "rdma-overhead", "--package", "rdma-stub"]);
    process::run(command.current_dir(workspace::root()))?;
    let release = workspace::target_dir()?.join("release");
    Ok((release.join("rdma-overhead"), release.join("librdma_stub.so")))
}

/// From the lines that the program prints, one for each run: variant, loop, number of operations, checksum, allocations.
fn rows(runs: &str, profiles: &BTreeMap<String, u64>) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    let mut shorter: BTreeMap<(String, String), (u64, u64, u64)> = BTreeMap::new();
    for line in runs.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [variant, name, count, checksum, allocations] = fields[..] else { bail!("not a run: {line}") };
        let run = format!("{variant} {name} {count}");
        let instructions = *profiles.get(&run).with_context(|| format!("callgrind wrote no profile of {run}"))?;
        let (count, allocations): (u64, u64) = (count.parse()?, allocations.parse()?);
        let key = (variant.to_owned(), name.to_owned());
        let Some((shorter, before, allocated)) = shorter.remove(&key) else {
            shorter.insert(key, (count, instructions, allocations));
            continue;
        };
        if rows.last().is_none_or(|row| row.name != name) {
            rows.push(Row {
                name: name.to_owned(),
                instructions: BTreeMap::new(),
                allocations: BTreeMap::new(),
                allocations_each: BTreeMap::new(),
                checksums: BTreeMap::new(),
            });
        }
        let Some(row) = rows.last_mut() else { continue };
        let each = |total: u64, before: u64| (total as f64 - before as f64) / (count - shorter) as f64;
        row.instructions.insert(variant.to_owned(), each(instructions, before));
        row.allocations.insert(variant.to_owned(), allocations);
        row.allocations_each.insert(variant.to_owned(), each(allocations, allocated));
        row.checksums.insert(variant.to_owned(), checksum.parse()?);
    }
    Ok(rows)
}

/// Whether `path` is that of the provider, whose instructions do not count.
fn is_provider(path: &str, stub: &Path) -> bool {
    Path::new(path) == stub
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_loop_does_once_drops_out() {
        let runs = "gcc\tex1\t1600\t1\t3\ngcc\tex1\t17600\t2\t32003\nraw\tex1\t1600\t1\t0\nraw\tex1\t17600\t2\t0\n";
        let profiles =
            [("gcc ex1 1600", 1700), ("gcc ex1 17600", 33700), ("raw ex1 1600", 99), ("raw ex1 17600", 8099)];
        let profiles = profiles.map(|(name, count)| (name.to_owned(), count)).into();
        let rows = rows(runs, &profiles).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].instructions, [("gcc".to_owned(), 2.0), ("raw".to_owned(), 0.5)].into());
        assert_eq!(rows[0].allocations["gcc"], 32003);
        assert_eq!(rows[0].allocations_each, [("gcc".to_owned(), 2.0), ("raw".to_owned(), 0.0)].into());
    }

    #[test]
    fn a_run_without_a_profile_is_an_error() {
        assert!(rows("gcc\tex1\t1600\t1\t0\n", &BTreeMap::new()).unwrap_err().to_string().contains("gcc ex1 1600"));
    }
}
